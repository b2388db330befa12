"""eagle-export: a trained draft becomes the directory one gives away, in the layout and precision its engine loads.

The draft is a training checkpoint, an artifact that was exported before, or somebody else's EAGLE-1 draft. DESIGN
sections 3.9, 3.10.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts import format as artifact
from eagle_train.artifacts import layouts
from eagle_train.artifacts.calibrate import calibrated
from eagle_train.artifacts.card import card, caveat, read_evaluations
from eagle_train.artifacts.compressed_tensors_format import file_tensors, load_tensors
from eagle_train.artifacts.foreign import load_foreign
from eagle_train.artifacts.format import (
    DTYPES,
    ROUNDINGS,
    Artifact,
    check_replaceable,
    check_target,
    fingerprint,
    load_draft,
    read_artifact,
    write_artifact,
)
from eagle_train.artifacts.verify import prove
from eagle_train.cli import command
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig, check_found
from eagle_train.corpus.stream import Stream
from eagle_train.errors import UserError, check, one_line
from eagle_train.hardware import resolve_device
from eagle_train.inference.requests.readable import texts
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.stops import stop_ids_of
from eagle_train.models.target import Identity, Target
from eagle_train.results import redact
from eagle_train.settings import build
from eagle_train.training.checkpoint.format import MANIFEST, Checkpoint, checkpoints
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.checkpoint.verify import open_checkpoint

FIELD = "checkpoint"
NOTHING = "no checkpoint there; give the directory of a training run"
TOLD = ("data", "train", "optim", "seed")  # of a run's config, in the artifact
CALIBRATION_ROWS = 4  # packed rows that target and draft read at a time
LOSS = re.compile("^loss$|l1$|ce$|agreement$|^heldout_")  # of a step's metrics, likewise
HUB_FILES = ["*.json", "*.safetensors", "pytorch_model*.bin"]


@dataclass
class Config:
    """conf/commands/export.yaml, which says what each key is. Raises UserError for values that cannot be."""

    checkpoint: str
    out: str
    layout: str
    dtype: str
    quant: Quant
    rounding: str
    calibration_tokens: int
    evaluations: list[str]
    push_to: str | None
    push_private: bool
    device: str
    target: TargetConfig | None = None  # absent from the config where the group is null
    data: dict[str, Any] | None = None  # likewise

    def __post_init__(self) -> None:
        check(self.layout in layouts.ENGINES, f"layout={self.layout}: must be one of {', '.join(layouts.ENGINES)}")
        check(self.dtype in DTYPES, f"dtype={self.dtype}: must be {' or '.join(DTYPES)}")
        check(self.rounding in ROUNDINGS, f"rounding={self.rounding}: must be {' or '.join(ROUNDINGS)}")
        gptq, given = self.rounding == "gptq", self.target is not None
        check(
            not gptq or self.quant.scheme != "none", "rounding=gptq: nothing is rounded; give quant=int4 or quant=fp8"
        )
        check(not gptq or given, "rounding=gptq: reads the target's states; give target=PATH")
        check(not gptq or self.data is not None, "rounding=gptq: reads chat data; give data=messages data.path=FILE")
        repeats = self.layout == "trtllm"
        check(not repeats or given, "layout=trtllm: its file repeats the target's embedding; give target=PATH")
        check(self.calibration_tokens >= 1, f"calibration_tokens={self.calibration_tokens}: must be at least 1")


@dataclass
class Source:
    """A draft that is to be exported, as it was trained or last exported, and what is known of it."""

    draft: Draft
    about: Artifact
    place: Path


@command("export")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    out = Path(config.out)
    check_replaceable(out)
    data = None
    if config.rounding != "nearest":
        data = build(DataConfig, config.data, "data")
        check_found(data)
    path, target = local(config.checkpoint), None
    check_there(path)
    if config.target is not None:
        target = load_target(config.target, resolve_device(config.device), reads=None if data is None else texts)
    source = find(path, config.checkpoint, target)
    measured = read_evaluations(config.evaluations, source.about.source)
    about = replace(source.about, engine=config.layout, dtype=config.dtype)
    about.evaluations = [*about.evaluations, *measured]
    if config.quant.scheme != "none":
        about = replace(about, quant=config.quant, rounding=config.rounding)
    layouts.check_runs(about.engine, about.draft, about.quant)
    if about.engine != "native":
        about, source.draft = as_served(about, source.draft)
    draft = rounded(config, source.draft, target, data)
    text = card(about, file_tensors(draft, getattr(torch, about.dtype)), config.push_to or out.name)
    off = []

    def proved(place: Path) -> None:
        off.append(prove(place, about, draft, source.draft))

    write_artifact(about, draft, out, text, proved, None if target is None else target.embedding)
    how = about.dtype if about.quant.scheme == "none" else f"{about.quant}, {about.rounding}"
    print(f"{source.place} -> {out} ({about.engine}, {how}, for {about.target.name})")
    print(f"read back: every tensor as it was; outputs on a sample {off[0]:.1%} off the draft's in {about.dtype}")
    if lost := caveat(about):
        print(f"note: {lost}")
    if config.push_to:
        print(f"pushed to {push(out, config.push_to, config.push_private)}")


def as_served(about: Artifact, draft: Draft) -> tuple[Artifact, Draft]:
    """The draft as serving engines run it, without the first token's slot; so it is written, proved and evaluated."""
    if draft.config.first_token == "skip":
        return about, draft
    told = about.training | {"first_token": draft.config.first_token}
    draft = draft.with_first_token("skip")
    return replace(about, draft=draft.config, training=told), draft


def rounded(config: Config, draft: Draft, target: Target | None, data: DataConfig | None) -> Draft:
    """The draft quantised as asked. Raises UserError as `quantise_draft` and the stream of `data` do."""
    if config.rounding == "nearest":
        return quantise_draft(draft, config.quant)
    fits = data.row_tokens <= target.max_positions
    check(fits, f"data.row_tokens={data.row_tokens}: must be at most the context, {target.context}")
    stops = stop_ids_of(target.model.generation_config, target.config, target.tokenizer)
    renderer = ChatRenderer(
        target.tokenizer, data.supervise, stops, data.template_kwargs, data.date, len(target.embedding)
    )
    stream = Stream(data, renderer, CALIBRATION_ROWS)
    return calibrated(draft, target, stream, config.quant, config.calibration_tokens)


def check_there(path: Path) -> None:
    """Raise UserError where there is neither a checkpoint nor a draft, before a target is loaded."""
    has_draft = (path / artifact.CONFIG).is_file() or (path / MANIFEST).exists()
    check(has_draft or bool(checkpoints(path)), f"checkpoint={path}: {NOTHING}")


def find(path: Path, name: str, target: Target | None) -> Source:
    """The draft at a place, given as `name`, its embedding scale folded. Raises UserError where there is none for
    `target`."""
    if not (path / artifact.CONFIG).is_file():
        found, draft = trained(path)
        source = source_of(draft.folded(), Identity(**found.state["target"]), made_how(found), found.path)
    elif artifact.KEY in artifact.read_config(path, FIELD):
        source = Source(load_draft(path, field=FIELD), read_artifact(path, FIELD), path)
    else:
        said = f"checkpoint={path}: a draft of somebody else's, which does not say what it is for; give target=PATH"
        check(target is not None, said)
        source = source_of(load_foreign(path, target), target.identity, {"imported": name}, path)
    if target is not None:
        check_target(source.about.target, target.identity, f"{FIELD}={path}")
    return source


def source_of(draft: Draft, target: Identity, training: dict[str, Any], place: Path) -> Source:
    return Source(draft, Artifact(draft.config, target, source=fingerprint(draft), training=training), place)


def local(name: str) -> Path:
    """Where a directory is, one on the hub (USER/NAME) after it was downloaded. Raises UserError."""
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute() or name.startswith(".") or len(path.parts) != 2:
        return path
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's library raises many kinds
        raise UserError(f"checkpoint={name}: no such directory, and the hub has it not: {one_line(error)}") from error


def trained(path: Path) -> tuple[Checkpoint, Draft]:
    """A checkpoint, or the newest one of a run's directory, and its draft. Raises UserError where there is none."""
    if not (path / MANIFEST).exists():
        newest = CheckpointStore(path).latest()
        check(newest is not None, f"checkpoint={path}: {NOTHING}")
        path = newest
    found = open_checkpoint(path)
    draft = Draft(build(DraftConfig, found.config, f"{path}: draft"))
    load_tensors(draft, found.draft(), f"checkpoint={path}")
    return found, draft


def made_how(found: Checkpoint) -> dict[str, Any]:
    """What a run's directory tells of how a checkpoint came to be: steps, tokens, its losses, the config's parts."""
    told = {"steps": found.step, "tokens": found.state["tokens"], "checkpoint": found.path.name}
    records, config = found.path.parent / "metrics.jsonl", found.path.parent / "config.yaml"
    if records.is_file():
        every = map(json.loads, records.read_text("utf-8").splitlines())
        own = next((record for record in every if record["step"] == found.step), {})
        told["metrics"] = {name: value for name, value in own.items() if LOSS.search(name)}
    if config.is_file():
        values = OmegaConf.load(config)
        told |= {key: redact(OmegaConf.to_container(values)[key], key) for key in TOLD if key in values}
    return told


def push(directory: Path, name: str, private: bool) -> str:
    """Upload an exported directory to the hub. Returns its address there. Raises UserError; the directory stays."""
    hub = HfApi()
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=directory, commit_message="An EAGLE draft")
    except Exception as error:  # the hub's library raises many kinds
        raise UserError(f"push_to={name}: {one_line(error)}; the draft is in {directory}") from error
    return str(address)


if __name__ == "__main__":
    main()
