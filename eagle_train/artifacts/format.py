"""The artifact, a draft on disk for distribution: config.json, model.safetensors, README.md. DESIGN 3.3, 3.9, 3.11.

Everything about the draft is in config.json under the key `eagle_train`; the other keys are what a serving engine reads
(layouts.py). Knows nothing of a training run's checkpoints.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from eagle_train.artifacts import layouts
from eagle_train.artifacts.tensors import check_finite, file_tensors, load_tensors
from eagle_train.drafts import Draft, DraftConfig, saved_config
from eagle_train.drafts.layouts import TOKEN_MAP, WEIGHTS
from eagle_train.errors import UserError, check
from eagle_train.models.draft_quantisation import Quant, quant_of
from eagle_train.models.loading import TargetConfig, load_config
from eagle_train.models.target import Identity
from eagle_train.ops.tensor_files import tensors_of, write_tensors
from eagle_train.results import write_json, write_text
from eagle_train.settings import build

KEY = "eagle_train"
VERSION = 4
ROUNDINGS = ("nearest", "gptq")
DTYPES = ("bfloat16", "float32")
CONFIG, CARD = "config.json", "README.md"


@dataclass
class Artifact:
    """The description of a draft in its artifact.

    `layout`: of the files, one of `layouts.LAYOUTS`. `dtype`: of unquantised tensors. `rounding`: how quantised ones
    were rounded. `source`: the fingerprint of the trained weights, the same in every export of them. `training`: how
    they were trained (steps, tokens, losses, data). `evaluations`: measured figures. `license`: the hub's name of it,
    if known.
    """

    draft: DraftConfig
    target: Identity
    layout: str = "native"
    dtype: str = "bfloat16"
    quant: Quant = field(default_factory=Quant)
    rounding: str = "nearest"
    source: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    conventions: dict[str, str] = field(default_factory=dict)
    license: str | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        self.conventions = self.draft.conventions()

    def saved(self) -> dict[str, Any]:
        """What config.json has of it."""
        return {**dataclasses.asdict(self), "draft": self.draft.saved()}


def save_draft(
    draft: Draft,
    directory: str | Path,
    target: Identity,
    training: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write an artifact for our own engine: quantised modules unchanged, all other tensors in `dtype`.

    The embedding scale is folded into `fc`. Raises as `write_artifact` does.
    """
    draft = draft.folded()
    about = Artifact(
        draft.config,
        target,
        dtype=str(dtype).removeprefix("torch."),
        quant=quant_of(draft),
        source=fingerprint(draft),
        training=training or {},
    )
    return write_artifact(about, draft, directory)


def write_artifact(
    about: Artifact,
    draft: Draft,
    directory: str | Path,
    card: str = "",
    verify: Callable[[Path], None] | None = None,
    repeated: torch.Tensor | None = None,
) -> Path:
    """Write an artifact's directory atomically, replacing an older artifact there.

    `verify` is called with the temporary directory before it is renamed; if it raises, nothing is replaced.
    `repeated` [V, H]: the target's embedding or LM head, for an engine whose file repeats it (`layouts.to_layout`). The
    same arguments give the same bytes. Raises UserError if the directory cannot be written or holds something else than
    an artifact, and for a draft that the layout's engine cannot run.
    """
    directory = Path(directory).resolve()  # a symbolic link stays; its target is replaced
    check_replaceable(directory)
    tensors = file_tensors(draft, getattr(torch, about.dtype))
    check_finite(tensors, f"out={directory}")
    tensors = layouts.to_layout(about.layout, about.draft, tensors, repeated)
    values = layouts.layout_config(about.layout, about.draft, about.quant, about.dtype, about.target)
    values[KEY] = about.saved()
    partial = replaced = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
        partial.chmod(0o755)
        weights = partial / layouts.weights_file(about.layout, about.draft)
        write_tensors(tensors, weights, {"format": "pt"})
        write_json(partial / CONFIG, values)
        own = layouts.layout_of(about.layout, about.draft)
        if own is not None and own.has_token_map and about.draft.vocabulary is not None:
            torch.save(about.draft.vocabulary, partial / TOKEN_MAP)
        if card:
            write_text(partial / CARD, card)
        if verify is not None:
            verify(partial)
        if directory.exists():
            replaced = partial.with_name(f"{partial.name}.replaced")
            os.rename(directory, replaced)  # if that fails, the old artifact is untouched
        os.rename(partial, directory)
    except (OSError, SafetensorError) as error:
        raise UserError(f"out={directory}: cannot be written: {error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)  # after success it was renamed
        if replaced is not None and replaced.exists() and not directory.exists():
            os.rename(replaced, directory)
        elif replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    return directory


def check_replaceable(directory: Path) -> None:
    """Raise UserError unless `is_replaceable`."""
    check(is_replaceable(directory), f"out={directory}: exists and holds no draft; name another directory")


def is_replaceable(directory: Path) -> bool:
    """Whether an artifact may be written there: the path is free, an empty directory, or an artifact of ours."""
    if not directory.is_dir():
        return not directory.exists() and all(p.is_dir() for p in directory.parents if p.exists())
    config = directory / CONFIG
    return not any(directory.iterdir()) or (config.is_file() and f'"{KEY}"' in config.read_text(errors="replace"))


def fingerprint(draft: Draft) -> str:
    """A short hash of all of a draft's tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict().items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def load_draft(directory: str | Path, target: Identity | None = None, field: str = "draft") -> Draft:
    """The draft of an artifact, on the CPU, in fp32 or quantised as it was exported; every tensor is checked.

    With `target`, a draft for another target is refused. Raises UserError that names `field`, the user's setting.
    """
    about, place = read_artifact(directory, field), f"{field}={directory}"
    if target is not None:
        check_target(about.target, target, place)
    draft, file = about.draft.module(), layouts.weights_file(about.layout, about.draft)
    tensors = layouts.from_layout(about.layout, about.draft, read_tensors(directory, field, file))
    load_tensors(draft, tensors, place, about.quant)
    return draft


def read_tensors(directory: str | Path, field: str = "draft", file: str = WEIGHTS) -> dict[str, torch.Tensor]:
    try:
        return tensors_of(Path(directory).expanduser() / file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{field}={directory}: {file} cannot be read: {error}") from error


def read_config(directory: str | Path, field: str = "draft") -> dict[str, Any]:
    """An artifact's config.json. Raises UserError if there is none, or if it is no JSON object."""
    path, place = Path(directory).expanduser() / CONFIG, f"{field}={directory}"
    runs = not path.is_file() and (any(path.parent.glob("step-*")) or (path.parent / "manifest.json").is_file())
    check(
        not runs,
        f"{place}: a training run; make a draft of it: eagle-export checkpoint={directory} layout=native out=DIR",
    )
    check(path.is_file(), f"{place}: no {CONFIG} there; give a directory that eagle-export wrote")
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{place}: {CONFIG} is not JSON: {error}") from error
    check(isinstance(values, dict), f"{place}: {CONFIG} is no JSON object")
    return values


def read_artifact(directory: str | Path, field: str = "draft") -> Artifact:
    """The description in a directory that eagle-export wrote. Raises UserError for any other directory."""
    values, place = read_config(directory, field), f"{field}={directory}: {CONFIG}"
    reads = f"eagle-export checkpoint={directory} target=PATH layout=native out=DIR reads a draft that others trained"
    check(KEY in values, f"{place} has no {KEY!r}; give a directory that eagle-export wrote; {reads}")
    about = values[KEY]
    version = about.get("version") if isinstance(about, dict) else None
    check(version == VERSION, f"{place} has version {version}, must be {VERSION}; export the draft again")
    shape = saved_config(about.get("draft"), f"{place}: {KEY}.draft")
    about = build(Artifact, about | {"draft": shape}, f"{place}: {KEY}")
    for name, known in (("layout", layouts.LAYOUTS), ("rounding", ROUNDINGS), ("dtype", DTYPES)):
        value = getattr(about, name)
        check(value in known, f"{place}: {name} is {value!r}, must be one of {', '.join(known)}")
    return about


def check_target(made_for: Identity, target: Identity, place: str) -> None:
    """Raise UserError for a draft for another target: sizes are compared, then the weights' fingerprint."""
    for name in ("hidden_size", "vocab_size", "num_layers", "fingerprint"):
        _check_same(made_for, name, getattr(target, name), target.name, place)


def check_sizes(made_for: Identity, target: TargetConfig, place: str) -> None:
    """As `check_target`, of the sizes that the target's config names, before a weight of it is loaded."""
    text = load_config(target).get_text_config()
    names = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_layers": "num_hidden_layers"}
    for name, theirs in names.items():
        if (given := getattr(text, theirs, None)) is not None:  # None: a family that has none of these is told later
            _check_same(made_for, name, given, target.path, place)


def _check_same(made_for: Identity, name: str, given: Any, target: str, place: str) -> None:
    wanted = getattr(made_for, name)
    check(wanted == given, f"{place}: made for target {made_for.name} ({name} {wanted}), not for {target} ({given})")
