"""The draft of a directory as an engine reads its files, and as it was trained.

Our own artifacts in an engine's layout say a draft twice: for the engine, in config.json's own keys and the tensors by
the engine's names, and for us, under one key. Both are read, as the engine sees only the first. Knows nothing of what a
draft is worth.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_train.artifacts.foreign import OtherTarget, foreign_tensors, load_foreign, stated_context
from eagle_train.artifacts.foreign_formats import NotRead
from eagle_train.artifacts.format import CONFIG, KEY, Artifact, read_artifact, read_config, read_tensors
from eagle_train.artifacts.layouts import from_layout, weights_file
from eagle_train.artifacts.tensors import TensorError, load_tensors
from eagle_train.diagnosis.causes import Finding, NotChecked
from eagle_train.diagnosis.files import MAPS, file_findings
from eagle_train.drafts import Draft
from eagle_train.errors import UserError, check
from eagle_train.models.target import Identity, Target
from eagle_train.ops.linear import QuantisedLinear
from eagle_train.ops.weight_codes import dequantise
from eagle_train.training.trained_draft import trained_draft


@dataclass
class Reading:
    """What was read of a directory. `served`: the draft as its engine reads it, None where it cannot; `trained`: as it
    was trained, None where nothing tells; `about`: the artifact's description, None for a draft of others; `is_run`:
    whether it is a training run's own, which no export wrote and nobody edited; `unread`: why `served` is None."""

    served: Draft | None
    trained: Draft | None
    about: Artifact | None
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    is_run: bool = False
    unread: str | None = None

    @property
    def training(self) -> dict[str, Any]:
        """How it was trained, as far as the artifact says."""
        return {} if self.about is None else self.about.training


def read_draft(path: Path, name: str, target: Target, field: str = "draft") -> Reading:
    """The draft in a directory, `name` to the user. What an engine would trip over becomes a finding. Raises UserError
    for a draft of a format that we do not run, or of other sizes than the target's."""
    if not (path / CONFIG).is_file():
        source = trained_draft(path)
        found = _of_another_target(source.about.target, target.identity, f"{field}={name}")
        return Reading(source.draft, None, source.about, found, is_run=True)
    return _of_ours(path, name, target, field) if KEY in read_config(path, field) else _of_others(path, target, field)


def plain(draft: Draft) -> Draft:
    """The same draft with each quantised matrix as what its codes stand for, in fp32; on its device."""
    modules = {name: each for name, each in draft.named_modules() if isinstance(each, QuantisedLinear)}
    made = draft.config.module()
    own = {f"{name}.{part}" for name in modules for part in ("codes", "scales")}
    tensors = {name: each.float() for name, each in draft.state_dict().items() if name not in own}
    for name, module in modules.items():
        tensors[f"{name}.weight"] = dequantise(*module.parts())
    made.load_state_dict(tensors)
    return made.to(next(iter(tensors.values())).device).eval().requires_grad_(False)


def quantised_names(draft: Draft) -> frozenset[str]:
    """The names of its quantised modules."""
    return frozenset(name for name, each in draft.named_modules() if isinstance(each, QuantisedLinear))


def _of_ours(path: Path, name: str, target: Target, field: str) -> Reading:
    """An artifact that eagle-export wrote, native or in an engine's layout."""
    about = read_artifact(path, field)
    others = _of_another_target(about.target, target.identity, f"{field}={name}")
    tensors = read_tensors(path, field, weights_file(about.layout, about.draft))
    found = file_findings(read_config(path, field), tensors, target, about)
    reading = Reading(None, None, about, found + others)
    own, kept = about.draft.module(), {name: each for name, each in tensors.items() if name not in MAPS}
    try:
        load_tensors(own, from_layout(about.layout, about.draft, kept), f"{field}={path}", about.quant)
    except UserError as error:
        cause = found[0].cause if found else "tensor"  # what is known of the file says why
        reading.findings.append(_unreadable(error, cause))
        reading.unread = str(error)
        return reading
    reading.served = own
    if about.layout == "native":
        return reading
    if about.quant.scheme != "none":
        reason = "quantised files are read by what the artifact says of itself"
        reading.not_checked.append(NotChecked("what the engine reads of config.json", reason))
        return reading
    try:
        reading.served, reading.trained = load_foreign(path, target, field), own
    except UserError as error:
        if not reading.findings:
            reading.findings.append(_unreadable(error, _cause_of(error)))
    return reading


def _of_others(path: Path, target: Target, field: str) -> Reading:
    """A draft that others trained, or that was converted by other means."""
    reading, refusal = Reading(None, None, None), None
    try:
        reading.served = load_foreign(path, target, field)
    except NotRead:
        raise
    except UserError as error:
        refusal = error
    reading.findings = file_findings(read_config(path, field), foreign_tensors(path, field), target, None)
    if refusal is not None:
        reading.unread = str(refusal)
        known = {each.cause for each in reading.findings}
        if not (known & {"embedding"} if isinstance(refusal, OtherTarget) else known):  # what is known says why
            reading.findings.append(_unreadable(refusal, _cause_of(refusal)))
    elif (most := stated_context(path, field)) is not None and most < target.max_positions:
        what = f"contexts of more than {most} tokens in serving engines"
        said = f"its config.json says max_position_embeddings {most}, to which engines cut requests"
        reading.not_checked.append(NotChecked(what, f"{said}; the target takes {target.max_positions}"))
    return reading


def _cause_of(error: UserError) -> str:
    """The cause of what a reader of others' drafts refuses. Raises it again where nothing is wrong with the file, or
    nobody can tell what."""
    if isinstance(error, OtherTarget):
        return "target"
    if isinstance(error, TensorError):
        return "tensor"
    raise error


def _unreadable(error: UserError, cause: str) -> Finding:
    return Finding(cause, f"It cannot be loaded: {error}.")


def _of_another_target(made_for: Identity, target: Identity, place: str) -> list[Finding]:
    """Raises UserError for a draft that cannot run with the target."""
    for name in ("hidden_size", "vocab_size"):
        wanted, given = getattr(made_for, name), getattr(target, name)
        check(
            wanted == given,
            f"{place}: made for target {made_for.name} ({name} {wanted}), not for {target.name} ({given})",
        )
    if made_for.fingerprint == target.fingerprint:
        return []
    said = f"Its target is {made_for.name} with weights {made_for.fingerprint}; {target.name} has {target.fingerprint}."
    return [Finding("target", said)]
