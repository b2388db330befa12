"""What a draft's files show before anything is computed: statements that contradict each other, and damaged tensors.

Knows nothing of prompts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eagle_train.artifacts.foreign import common_name
from eagle_train.artifacts.format import Artifact
from eagle_train.artifacts.layouts import layout_config
from eagle_train.artifacts.tensors import same_weight
from eagle_train.diagnosis.causes import Finding
from eagle_train.drafts.medusa_layouts import is_block
from eagle_train.drafts.peagle_layouts import MASK_TOKENS
from eagle_train.errors import shown
from eagle_train.models.target import Target

MAPS = ("d2t", "t2d")  # of the draft's vocabulary
# Keys of an engine's config.json, by what goes wrong where they are wrong.
_KEYS = {
    "rope": ("rope_parameters", "rope_theta", "rope_scaling"),
    "layer": ("eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"),
    "tensor": ("num_attention_heads", "num_key_value_heads", "head_dim"),  # how matrices are divided
    "embedding": MASK_TOKENS,
    "norm": ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "rms_norm_eps", "architectures"),
    "vocabulary": ("draft_vocab_size", "vocab_size"),
    "context": ("max_position_embeddings", "sliding_window", "layer_types"),
    "precision": ("quantization_config",),
}
_NESTED = "transformer_layer_config"  # of speculators' configs
_OFF = 0.01  # of an embedding, relative: one that is so near another times a scale is that


def file_findings(
    values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: Target, about: Artifact | None
) -> list[Finding]:
    """Of an engine's config.json and tensors. `about`: what our own artifact says beside them."""
    found = list(_damaged(tensors))
    common = {common_name(name): tensor for name, tensor in tensors.items()}
    found += _embedding(common, target, about)
    found += _vocabulary(common, target, about)
    if about is not None and about.layout != "native":
        found += _statements(values, about)
    return found


def _damaged(tensors: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Values that are not finite, and matrices without any value; blocks of Medusa heads are zero before training."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or name in MAPS:
            continue
        exact = tensor.float()
        if not bool(exact.isfinite().all()):
            count = int((~exact.isfinite()).sum())
            yield Finding("precision", f"{name} holds {count} values that are not finite: they overflowed.")
        elif tensor.ndim > 1 and not exact.any() and not is_block(name):
            yield Finding("tensor", f"{name} {list(tensor.shape)} is zero throughout.")


def _embedding(tensors: Mapping[str, torch.Tensor], target: Target, about: Artifact | None) -> list[Finding]:
    """What our own file repeats of the target's embedding must be that, and no file's may be that times a scale. Of
    others' any other embedding is of another target, or was trained: their reader says so. So does the fingerprint of
    ours for another target."""
    found = tensors.get("embed_tokens.weight")
    is_targets = about is None or about.target.fingerprint == target.identity.fingerprint
    if found is None or not is_targets or found.shape != target.embedding.shape:
        return []
    own = target.embedding.cpu()
    if same_weight(found, own):
        return []
    own, given = own.float(), found.float()
    scale = ((own * given).sum() / (own * own).sum()).item()
    if _apart(given, scale * own) <= _OFF < abs(scale - 1):
        return [Finding("embedding", f"Its embed_tokens.weight is the target's embedding times {scale:.4g}.")]
    said = f"Its embed_tokens.weight is {_apart(given, own):.2%} off the embedding of {target.name}."
    return [] if about is None else [Finding("embedding", said)]


def _apart(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found - right).norm() / right.norm().clamp(min=1e-30)).item()


def _vocabulary(tensors: Mapping[str, torch.Tensor], target: Target, about: Artifact | None) -> list[Finding]:
    """d2t: the token of the draft's i-th is i + d2t[i]. t2d: whether a token of the target's is among these."""
    offsets = tensors.get("d2t")
    if offsets is None or offsets.ndim != 1 or offsets.is_floating_point():
        return []
    places, size = torch.arange(len(offsets)), target.identity.vocab_size
    tokens = places + offsets.long()
    said = None
    if about is not None and about.draft.vocabulary is not None and len(about.draft.vocabulary) == len(offsets):
        right = torch.tensor(about.draft.vocabulary)
        if not torch.equal(tokens, right):
            said = _as_said(tokens, offsets, right)
    elif not _are_tokens(tokens, size):
        said = "d2t holds token ids, and must hold offsets" if _are_tokens(offsets, size) else "d2t names no tokens"
        said += f": row {int((tokens >= size).long().argmax())} would be token {int(tokens.max())} of {size}."
    if said is None and "t2d" in tensors and len(tensors["t2d"]) == size:
        known = torch.zeros(size, dtype=torch.bool).index_fill_(0, tokens, True)
        wrong = int((known != tensors["t2d"].bool()).sum())
        said = f"t2d and d2t name other tokens, {wrong} of them." if wrong else None
    return [] if said is None else [Finding("vocabulary", said)]


def _as_said(tokens: torch.Tensor, offsets: torch.Tensor, right: torch.Tensor) -> str:
    """What is wrong with a map that is not the one that was trained."""
    if torch.equal(offsets.long(), right):
        return "d2t holds token ids, and must hold offsets, id minus row."
    shifts = (tokens - right).unique()
    if len(shifts) == 1:
        return f"d2t is shifted: every token is {int(shifts[0]):+d} from the one that was trained."
    row = int((tokens != right).long().argmax())
    return f"d2t sends row {row} to token {int(tokens[row])}, and it was trained as token {int(right[row])}."


def _are_tokens(tokens: torch.Tensor, size: int) -> bool:
    inside = bool(((tokens >= 0) & (tokens < size)).all())
    return inside and len(tokens.unique()) == len(tokens)


def _statements(values: Mapping[str, Any], about: Artifact) -> Iterator[Finding]:
    """What config.json says to the engine against what it says to us: it was edited, or converted by other means."""
    right = layout_config(about.layout, about.draft, about.quant, about.dtype, about.target)
    for part in (None, _NESTED):
        given = values if part is None else values.get(part, {})
        wanted = right if part is None else right.get(part, {})
        for cause, keys in _KEYS.items():
            for key in keys:
                if key in wanted and given.get(key) != wanted[key]:
                    found, meant = shown(given.get(key)), shown(wanted[key])
                    yield Finding(cause, f"config.json says {key} {found} to the engine; it was trained with {meant}.")
