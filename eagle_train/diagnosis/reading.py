"""The draft of a directory as an engine reads its files, and as it was trained.

Our own artifacts in an engine's layout say a draft twice: for the engine, in config.json's own keys and the tensors by
the engine's names, and for us, under one key. Both are read, as the engine sees only the first. Knows nothing of what a
draft is worth.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle_train.artifacts.foreign import load_foreign
from eagle_train.artifacts.format import CONFIG, KEY, Artifact, read_artifact, read_config, read_tensors
from eagle_train.artifacts.layouts import from_layout, weights_file
from eagle_train.artifacts.tensors import load_tensors
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
    whether it is a training run's own, which no export wrote and nobody edited."""

    served: Draft | None
    trained: Draft | None
    about: Artifact | None
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    is_run: bool = False

    @property
    def training(self) -> dict[str, Any]:
        """How it was trained, as far as the artifact says."""
        return {} if self.about is None else self.about.training


def read_draft(path: Path, name: str, target: Target, field: str = "draft") -> Reading:
    """The draft in a directory, `name` to the user. What an engine would trip over becomes a finding. Raises UserError
    for a draft of other sizes than the target's."""
    if not (path / CONFIG).is_file():
        source = trained_draft(path)
        reading = Reading(source.draft, None, source.about, is_run=True)
    elif KEY in read_config(path, field):
        reading = _of_ours(path, target, field)
    else:
        reading = _of_others(path, target)
    if reading.about is not None:
        reading.findings += _of_another_target(reading.about.target, target.identity, f"{field}={name}")
    return reading


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


def _of_ours(path: Path, target: Target, field: str) -> Reading:
    """An artifact that eagle-export wrote, native or in an engine's layout."""
    about = read_artifact(path, field)
    tensors = read_tensors(path, field, weights_file(about.layout, about.draft))
    reading = Reading(None, None, about, file_findings(read_config(path, field), tensors, target, about))
    own, kept = about.draft.module(), {name: each for name, each in tensors.items() if name not in MAPS}
    try:
        load_tensors(own, from_layout(about.layout, about.draft, kept), f"{field}={path}", about.quant)
    except UserError as error:
        reading.findings.append(_unreadable(error, reading.findings))
        return reading
    reading.served = own
    if about.layout == "native":
        return reading
    if about.quant.scheme != "none":
        reason = "quantised files are read by what the artifact says of itself"
        reading.not_checked.append(NotChecked("what the engine reads of config.json", reason))
        return reading
    try:
        reading.served, reading.trained = load_foreign(path, target), own
    except UserError as error:
        if not reading.findings:
            reading.findings.append(_unreadable(error, []))
    return reading


def _of_others(path: Path, target: Target) -> Reading:
    """A draft that others trained, or that was converted by other means."""
    values, tensors = read_config(path), _tensors_of(path)
    reading = Reading(None, None, None, file_findings(values, tensors, target, None))
    try:
        reading.served = load_foreign(path, target)
    except UserError as error:
        if not reading.findings:
            reading.findings.append(_unreadable(error, []))
    return reading


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of its one safetensors file; none of what lies otherwise, which its reader checks."""
    files = sorted(path.glob("*.safetensors"))
    return read_tensors(path, file=files[0].name) if len(files) == 1 else {}


def _unreadable(error: UserError, known: list[Finding]) -> Finding:
    """Of a file that cannot be read; what is known of it already says why."""
    cause = known[0].cause if known else "tensor"
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
