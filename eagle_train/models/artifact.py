"""The draft on disk: `config.json` + `model.safetensors`, complete and self-describing. DESIGN sections 3.3, 3.9, 3.11.

Knows nothing of checkpoints of a training run; what is here is what one gives to somebody else.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle_train.config import UserError, build, check, write_json
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.target import Identity
from eagle_train.ops.linear import QuantisedLinear

FORMAT = "eagle_train.draft"
VERSION = 1


def conventions(config: DraftConfig) -> dict[str, Any]:
    """What whoever runs the draft must know and cannot read off the tensors."""
    norms = {
        "eagle1": "layer 0 has no input norm; there is no final norm",
        "full": "every layer has an input norm; a final norm ends the draft",
    }
    first = {"self_fusion": "its own hidden state", "skip": "zeros"}[config.first_token]
    return {
        "input": "fc(concatenate(embedding of token t_j, hidden state h_{j-1})): embedding first",
        "first_slot": f"t_0 is paired with {first}",
        "hidden": "the target's, after its final norm; fed back as the draft puts it out",
        "norms": norms[config.norms],
        "rope": "halves convention, as Hugging Face's Llama, on the first partial_rotary_factor of each head",
        "position_of_slot": "the position of its token t_j, so the draft's cache is as long as the target's",
        "lm_head_and_embedding": "the target's"
        + ("" if config.vocabulary is None else "; the draft proposes the tokens of draft.vocabulary only"),
    }


def save_draft(
    draft: Draft,
    directory: str | Path,
    target: Identity,
    training: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write the draft so that the directory is whole or not there; what it held before is replaced.

    The embedding scale is folded. `training` is what the artifact tells of how it was made (steps, tokens, losses,
    data). Raises UserError if the directory cannot be written, or if it holds something that is no draft.
    """
    assert not any(isinstance(module, QuantisedLinear) for module in draft.modules()), "save what it was made from"
    directory = Path(directory)
    check(is_replaceable(directory), f"out={directory}: exists and holds no draft; name another directory")
    draft = draft.folded()
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in draft.state_dict().items()}
    check_finite(tensors, directory)
    values = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": str(dtype).removeprefix("torch."),
        "draft": dataclasses.asdict(draft.config),
        "conventions": conventions(draft.config),
        "target": dataclasses.asdict(target),
        "training": training or {},
    }
    partial = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
        partial.chmod(0o755)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # safetensors keeps it to its owner
        write_json(partial / "config.json", values)
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(partial, directory)
    except (OSError, SafetensorError) as error:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"out={directory}: cannot be written: {error}") from error
    return directory


def is_replaceable(directory: Path) -> bool:
    """Whether a draft may be written there: nothing is, or an empty directory, or another draft."""
    if not directory.is_dir():
        return not directory.exists() and all(p.is_dir() for p in directory.parents if p.exists())
    config = directory / "config.json"
    return not any(directory.iterdir()) or (config.is_file() and f'"{FORMAT}"' in config.read_text(errors="replace"))


def load_draft(directory: str | Path, target: Identity | None = None) -> Draft:
    """The draft in fp32 on the CPU, every tensor checked. Raises UserError.

    With `target`, a draft made for another target is refused.
    """
    directory = Path(directory).expanduser()
    values = read_config(directory)
    made_for = build(Identity, values.get("target", {}), f"{directory}/config.json: target")
    if target is not None:
        check_target(made_for, target, directory)
    draft = Draft(build(DraftConfig, values.get("draft", {}), f"{directory}/config.json: draft"))
    try:
        tensors = load_file(directory / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"draft={directory}: model.safetensors cannot be read: {error}") from error
    load_tensors(draft, tensors, directory)
    return draft


def load_tensors(draft: Draft, tensors: dict[str, torch.Tensor], place: str | Path) -> None:
    """Fill the draft from `tensors`; a missing, unexpected, misshapen or non-finite one is a UserError."""
    expected = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    for name in sorted(expected.keys() ^ tensors.keys()):
        problem = "is missing" if name in expected else "is not part of this draft"
        raise UserError(f"draft={place}: tensor {name} {problem}")
    for name, shape in expected.items():
        found = tuple(tensors[name].shape)
        check(found == shape, f"draft={place}: tensor {name} has shape {found}, must be {shape}")
    check_finite(tensors, place)
    draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def check_finite(tensors: dict[str, torch.Tensor], place: str | Path) -> None:
    for name, tensor in tensors.items():
        check(bool(tensor.isfinite().all()), f"draft={place}: tensor {name} holds values that are not finite")


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    check(path.is_file(), f"draft={directory}: no config.json there; give a directory that eagle-export wrote")
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"draft={directory}: config.json is not JSON: {error}") from error
    found = f"{values.get('format')} {values.get('version')}" if isinstance(values, dict) else "no mapping"
    check(found == f"{FORMAT} {VERSION}", f"draft={directory}: config.json says {found}, must be {FORMAT} {VERSION}")
    return values


def check_target(made_for: Identity, target: Identity, directory: Path) -> None:
    """Refuse a draft made for another target: sizes first, then the weights' fingerprint."""
    for name in ("hidden_size", "vocab_size", "num_layers", "fingerprint"):
        wanted, given = getattr(made_for, name), getattr(target, name)
        check(
            wanted == given,
            f"draft={directory}: made for target {made_for.name} ({name} {wanted}), not for {target.name} ({given})",
        )
