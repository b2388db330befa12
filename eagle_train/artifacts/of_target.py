"""A draft that a target's own checkpoint holds beside the target's weights, as DeepSeek-V3's does its MTP module.

Its kind says where (`Draft.in_target`). It is read from there, and put back. Knows nothing of our own artifacts.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle_train.artifacts.tensors import load_tensors
from eagle_train.drafts import Draft, DraftConfig
from eagle_train.drafts.kind import InTarget
from eagle_train.errors import UserError, check, foreign
from eagle_train.models.directory import folder_of, weight_files
from eagle_train.models.target import TargetEnds
from eagle_train.ops.tensor_files import check_opens, tensors_of, write_tensors

_NATIVE = "use layout=native"
_OTHER_MODULE = re.compile(r"(?:\w+\.)*?mtp\w*\.(?:\d+\.)?")  # of Qwen3-Next, MiMo and Ernie, for some


def check_in_target(shape: DraftConfig, hf_config: Any, path: str, field: str, *instead: str) -> None:
    """Raise UserError, before a weight is read, where a target (its config, its directory or hub id) has no draft of
    this shape. What is yet to be downloaded is not looked at. `field` begins the message, and what to do `instead` ends
    it."""
    with torch.device("meta"):
        draft = shape.module()
    place = _place_of(draft, hf_config, field, *instead)
    folder = folder_of(path)
    if folder is not None and all(file.exists() for file in weight_files(folder, field)):
        _files_of(draft, place, folder, f"{field}: target.path={path}", *instead)


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


def check_put_back(shape: DraftConfig, hf_config: Any, path: str, out: Path, field: str) -> None:
    """Raise UserError, before a weight is read, where `put_back` would for a draft of this shape. `unserved` tells the
    same before a training."""
    check(not out.exists(), f"out={out}: exists; name another directory")
    local, few = shape.window or shape.sink, shape.vocab_size
    check(not local, f"{field}: draft.window and draft.sink are not the target's module's; give a draft without them")
    whole = f"{field}: draft.vocab_size={few}: the target's module proposes from its whole vocabulary"
    check(few is None, f"{whole}; give a draft that was trained with all of it, or {_NATIVE}")
    check_in_target(shape, hf_config, path, field, _NATIVE)


def put_back(draft: Draft, target: TargetEnds, path: str, out: Path, field: str) -> list[str]:
    """Write to `out` the target's checkpoint, at `path`, with this draft in the place of its own: links to its files,
    and copies of those that hold tensors of the draft. Returns the names of the copies.

    Names, dtypes and the index stay, so that an engine loads it as it does the target. Raises UserError, which `field`
    begins, for a draft that the checkpoint has no place for, and for a directory that is there.
    """
    check_put_back(draft.config, target.config, path, out, field)
    said = f"{field}: target.path={path}"
    place, folder = _place_of(draft, target.config, field, _NATIVE), folder_of(path)
    assert folder is not None, "its target is loaded"
    files = _files_of(draft, place, folder, said, _NATIVE)
    tensors = {theirs: draft.state_dict()[ours].detach().cpu() for ours, theirs in place.names.items()}
    copies = sorted({files[name].name for name in tensors})
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        for file in folder.iterdir():
            if file.name in copies:
                _copy_with(tensors, file, partial / file.name, said)
            else:
                (partial / file.name).symlink_to(file.resolve())
        partial.chmod(0o755)
        os.rename(partial, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"out={out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after success it was renamed
    return copies


def _copy_with(tensors: Mapping[str, torch.Tensor], file: Path, copy: Path, said: str) -> None:
    """Write a safetensors file again, with `tensors` in the place of those of these names, in their dtypes."""
    found = tensors_of(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    for name in found.keys() & tensors.keys():
        new, old = tensors[name], found[name]
        same = new.shape == old.shape and old.is_floating_point()
        check(same, f"{said}: {name} is {tuple(old.shape)} of {old.dtype}, and the draft's is {tuple(new.shape)}")
        found[name] = new.to(old.dtype).contiguous()
    write_tensors(found, copy, metadata)


def _place_of(
    draft: Draft, hf_config: Any, field: str, instead: str = "give a directory that eagle-export wrote"
) -> InTarget:
    place = draft.in_target(hf_config.get_text_config().num_hidden_layers)
    check(place is not None, f"{field}: no target has a draft of draft={draft.config.kind}; {instead}")
    assert place is not None
    return place


def _files_of(
    draft: Draft, place: InTarget, folder: Path, said: str, instead: str = "give train.init_from=null"
) -> dict[str, Path]:
    """The file of each tensor below the draft's prefixes. Raises UserError unless these are the draft's."""
    found: dict[str, Path] = {}
    others: set[str] = set()  # where families other than DeepSeek's keep theirs
    for file in weight_files(folder, said):
        check(file.suffix == ".safetensors", f"{said}: {file.name} is no safetensors; give a checkpoint in safetensors")
        with foreign(f"{said}: {file.name}"):
            check_opens(file)
        with foreign(f"{said}: {file.name}"), safe_open(file, "pt") as tensors:
            names = tensors.keys()
        found |= {name: file for name in names if name.startswith(place.prefixes)}
        others |= {where[0] for name in names if (where := _OTHER_MODULE.match(name))}
    kind = draft.config.kind
    theirs = f"has an MTP module under {min(others, default='')}*, which draft={kind} cannot take over"
    none = theirs if others else f"has no {place.prefixes[0]}*, so no draft of its own"
    check(bool(found), f"{said}: {none}; {instead}")
    odd = min((found.keys() - place.shared.keys()) ^ set(place.names.values()), default=None)
    does = "has" if odd in found else "lacks"
    check(odd is None, f"{said}: {does} {odd}, unlike draft={kind}; {instead}")
    return found
