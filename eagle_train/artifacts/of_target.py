"""A draft that a target's own checkpoint holds beside the target's weights, as DeepSeek-V3's does its MTP module.

Its kind says where (`Draft.in_target`). Knows nothing of our own artifacts.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle_train.artifacts.tensors import load_tensors
from eagle_train.drafts import Draft, DraftConfig
from eagle_train.drafts.kind import InTarget
from eagle_train.errors import check, foreign
from eagle_train.models.directory import folder_of, weight_files
from eagle_train.models.target import TargetEnds


def check_in_target(shape: DraftConfig, hf_config: Any, path: str, field: str) -> None:
    """Raise UserError, before a weight is read, where a target (its config, its directory or hub id) has no draft of
    this shape. What is yet to be downloaded is not looked at. `field` begins the message."""
    with torch.device("meta"):
        draft = shape.module()
    place = _place_of(draft, hf_config, field)
    folder = folder_of(path)
    if folder is not None and all(file.exists() for file in weight_files(folder, field)):
        _files_of(draft, place, folder, f"{field}: target.path={path}")


def load_in_target(draft: Draft, target: TargetEnds, path: str, field: str) -> None:
    """Load into `draft` the weights that the target's checkpoint holds of it. Raises UserError as `check_in_target`
    does, and for an embedding or an LM head of its own."""
    place, folder, said = _place_of(draft, target.config, field), folder_of(path), f"{field}: target.path={path}"
    assert folder is not None, "its target is loaded"
    found = {}
    for name, file in _files_of(draft, place, folder, said).items():
        with safe_open(file, "pt") as tensors:
            found[name] = tensors.get_tensor(name)
    for name, what in place.shared.items():
        own = (target.embedding if what == "embedding" else target.lm_head.weight).detach().cpu()
        same = name not in found or torch.equal(found[name].to(own.dtype), own)
        check(same, f"{said}: {name} is not the target's {what}, which draft={draft.config.kind} proposes with")
    load_tensors(draft, {ours: found[theirs] for ours, theirs in place.names.items()}, said)


def _place_of(draft: Draft, hf_config: Any, field: str) -> InTarget:
    place = draft.in_target(hf_config.get_text_config().num_hidden_layers)
    kind = draft.config.kind
    check(
        place is not None, f"{field}: no target has a draft of draft={kind}; give a directory that eagle-export wrote"
    )
    assert place is not None
    return place


def _files_of(draft: Draft, place: InTarget, folder: Path, said: str) -> dict[str, Path]:
    """The file of each tensor below the draft's prefix. Raises UserError unless these are the draft's."""
    found: dict[str, Path] = {}
    for file in weight_files(folder, said):
        check(file.suffix == ".safetensors", f"{said}: {file.name} is no safetensors; give a checkpoint in safetensors")
        with foreign(f"{said}: {file.name}"), safe_open(file, "pt") as tensors:
            found |= {name: file for name in tensors.keys() if name.startswith(place.prefix)}  # noqa: SIM118, no mapping
    check(bool(found), f"{said}: has no {place.prefix}*, so no draft of its own; give train.init_from=null")
    odd = min((found.keys() - place.shared.keys()) ^ set(place.names.values()), default=None)
    does, kind = "has" if odd in found else "lacks", draft.config.kind
    check(odd is None, f"{said}: {does} {odd}, unlike draft={kind}; give train.init_from=null")
    return found
