"""A draft into the artifact that an engine loads: layout, precision, model card, and a check of what was written.

Knows nothing of where the draft comes from.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_train.artifacts.calibrate import calibrated
from eagle_train.artifacts.card import card, caveats, read_evaluations
from eagle_train.artifacts.format import CONFIG, DTYPES, ROUNDINGS, Artifact, fingerprint, read_artifact, write_artifact
from eagle_train.artifacts.layouts import LAYOUTS, check_runs, layout_of, not_in_target
from eagle_train.artifacts.license import check_license, license_of_target
from eagle_train.artifacts.of_target import check_put_back, put_back
from eagle_train.artifacts.tensors import file_tensors
from eagle_train.artifacts.verify import verify
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Stream
from eagle_train.drafts import Draft
from eagle_train.errors import UserError, check
from eagle_train.models.draft_quantisation import Quant, modules_to_quantise, quantise_draft
from eagle_train.models.loading import TargetConfig, load_config
from eagle_train.models.stops import stop_ids_of
from eagle_train.models.target import Identity, Target

IN_TARGET = "target"  # the layout of a draft that is written into its target's own checkpoint
_CALIBRATION_ROWS = 4  # packed rows in a batch


@dataclass
class ExportConfig:
    """The settings of `eagle-export`; conf/commands/export.yaml says what each one means. Raises UserError."""

    checkpoint: str
    out: str
    layout: str
    dtype: str
    quant: Quant
    rounding: str
    calibration_tokens: int
    evaluations: list[str]
    license: str | None
    push_to: str | None
    push_private: bool
    device: str
    target: TargetConfig | None = None  # absent from the config where the group is null
    data: dict[str, Any] | None = None  # likewise

    def __post_init__(self) -> None:
        known = (*LAYOUTS, IN_TARGET)
        check(self.layout in known, f"layout={self.layout}: must be one of {', '.join(known)}")
        if self.layout == IN_TARGET:
            check(self.target is not None, f"layout={IN_TARGET}: is the target's checkpoint; give target=PATH")
            plain = self.quant.scheme == "none" and self.push_to is None
            check(
                plain,
                f"layout={IN_TARGET}: keeps dtypes, and is not pushed; leave quant and push_to out",
            )
            unread = self.dtype == DTYPES[0] and not self.evaluations and self.license is None
            check(
                unread,
                f"layout={IN_TARGET}: keeps dtypes, and writes no model card; leave dtype, evaluations and license out",
            )
        check(self.dtype in DTYPES, f"dtype={self.dtype}: must be {' or '.join(DTYPES)}")
        check(self.rounding in ROUNDINGS, f"rounding={self.rounding}: must be {' or '.join(ROUNDINGS)}")
        check_license(self.license)
        gptq, given = self.rounding == "gptq", self.target is not None
        check(
            not gptq or self.quant.scheme != "none", "rounding=gptq: nothing is rounded; give quant=int4 or quant=fp8"
        )
        check(not gptq or given, "rounding=gptq: reads the target's states; give target=PATH")
        check(not gptq or self.data is not None, "rounding=gptq: reads chat data; give data=messages data.path=FILE")
        check(self.calibration_tokens >= 1, f"calibration_tokens={self.calibration_tokens}: must be at least 1")


@dataclass
class Source:
    """A draft to export, as it was trained or last exported, its description, and the directory that it is from."""

    draft: Draft
    about: Artifact
    place: Path

    @classmethod
    def of(cls, draft: Draft, target: Identity, training: dict[str, Any], place: Path) -> "Source":
        return cls(draft, Artifact(draft.config, target, source=fingerprint(draft), training=training), place)


def convert(
    source: Source, config: ExportConfig, target: Target | None, data: DataConfig | None, writes: bool = True
) -> list[str]:
    """Write the artifact; returns lines to print. `target`, `data`: see `ExportConfig`. Raises UserError.

    `writes`: False on the ranks of a divided target but the first, which calibrate and return no lines.
    """
    if config.layout == IN_TARGET:
        return _put_back(source, config, target) if writes else []
    about, trained = _described(source, config), source.draft
    if about.layout != "native":
        about, trained = _as_served(about, trained)
    draft = _quantised(config, trained, target, data)
    if not writes:
        return []
    out, errors = Path(config.out), []
    replaced = _replaced(out)
    text = card(about, file_tensors(draft, getattr(torch, about.dtype)), config.push_to)

    def check_written(place: Path) -> None:
        errors.append(verify(place, about, draft, trained))

    write_artifact(about, draft, out, text, check_written, _repeated(about, target))
    precision = about.dtype if about.quant.scheme == "none" else f"{about.quant}, {about.rounding}"
    return [
        f"{source.place} -> {out} ({about.layout}, {precision}, for {about.target.name})",
        *replaced,
        f"read back: all tensors are equal; outputs on a sample are {errors[0]:.1%} off the draft's in {about.dtype}",
        *(f"note: {each}" for each in caveats(about)),
    ]


def _replaced(out: Path) -> list[str]:
    """A line on the draft that an artifact in this directory replaces; none where no draft is there."""
    if not (out / CONFIG).is_file():
        return []
    layout = ""
    with suppress(UserError):  # of another version, say, which is replaced too
        layout = f"{read_artifact(out).layout} "
    return [f"replaces the {layout}draft that was there"]


def check_convertible(source: Source, config: ExportConfig) -> None:
    """Raise UserError, as `convert` would, for what the draft's config and shapes rule out."""
    if config.layout == IN_TARGET:
        target, field = config.target, f"layout={config.layout}"
        assert target is not None  # ExportConfig asks for it
        check_put_back(source.about.draft, load_config(target), target.path, Path(config.out), field)
        return
    _described(source, config)
    if config.quant.scheme != "none":
        modules_to_quantise(source.draft, config.quant)


def _put_back(source: Source, config: ExportConfig, target: Target | None) -> list[str]:
    assert target is not None  # ExportConfig asks for both
    assert config.target is not None
    out, field = Path(config.out), f"layout={config.layout}"
    copies = put_back(source.draft, target, config.target.path, out, field)
    told = f"{source.place} -> {out} (the checkpoint of {target.name} with this draft in it)"
    lost = not_in_target(source.about.draft)
    return [
        told,
        f"links to its files, but for {', '.join(copies)}, in which the draft's tensors are other ones",
        *([f"note: the target {lost}"] if lost else []),
    ]


def _described(source: Source, config: ExportConfig) -> Artifact:
    """The description of the artifact to write. Raises UserError if its engine cannot run it."""
    measured = read_evaluations(config.evaluations, source.about.source)
    about = replace(source.about, layout=config.layout, dtype=config.dtype)
    about.evaluations = [*about.evaluations, *measured]
    about.license = config.license or about.license or license_of_target(about.target.name)
    if config.quant.scheme != "none":
        about = replace(about, quant=config.quant, rounding=config.rounding)
    check_runs(about.layout, about.draft, about.quant)
    own = layout_of(about.layout, about.draft)
    repeats, given = own and own.repeats(about.draft), config.target is not None
    check(not repeats or given, f"layout={about.layout}: its file repeats the target's {repeats}; give target=PATH")
    return about


def _repeated(about: Artifact, target: Target | None) -> torch.Tensor | None:
    """What the file repeats of the target's, [V, H]. Raises UserError for an LM head that is more than a matrix."""
    own = layout_of(about.layout, about.draft)
    if target is None or own is None or own.repeats(about.draft) != "LM head":
        return None if target is None else target.embedding
    head = target.lm_head
    plain = head.bias is None
    check(plain, f"layout={about.layout}: its LM heads have no bias, and {target.name}'s has one; use layout=native")
    return head.weight * head.scale


def _as_served(about: Artifact, draft: Draft) -> tuple[Artifact, Draft]:
    """The draft without the first token's slot, as serving engines run it: so it is written, verified and evaluated."""
    if draft.config.first_token == "skip":
        return about, draft
    training = about.training | {"first_token": draft.config.first_token}
    draft = draft.attending(first_token="skip")
    return replace(about, draft=draft.config, training=training), draft


def _quantised(config: ExportConfig, draft: Draft, target: Target | None, data: DataConfig | None) -> Draft:
    """The draft in the precision of `config`. Raises UserError as `quantise_draft` and the stream of `data` do."""
    if config.rounding == "nearest":
        return quantise_draft(draft, config.quant)
    assert target is not None  # ExportConfig asks for both
    assert data is not None
    fits = data.row_tokens <= target.max_positions
    check(fits, f"data.row_tokens={data.row_tokens}: must be at most the context, {target.context}")
    stops = stop_ids_of(target.model.generation_config, target.config, target.tokenizer)
    renderer = ChatRenderer(
        target.tokenizer, data.supervise, stops, data.template_kwargs, data.date, len(target.embedding)
    )
    stream = Stream(data, renderer, _CALIBRATION_ROWS)
    return calibrated(draft, target, stream, config.quant, config.calibration_tokens)
