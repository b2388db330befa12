"""The config and the tensors of EAGLE-3 and P-EAGLE drafts that others trained, as ours. Knows nothing of files."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig

from eagle_train.drafts import Eagle3Config, PeagleConfig
from eagle_train.drafts.eagle3_layouts import FLAGS, SLIDING
from eagle_train.drafts.peagle_layouts import MASK, MASK_TOKENS
from eagle_train.errors import check, shown
from eagle_train.models.target import Target

_IDS = "eagle_aux_hidden_state_layer_ids"
_DFLASH = "dflash_config"  # where vLLM looks first for a mask token, in P-EAGLE drafts too
_SPECULATORS = ("speculators_model_type", "speculators_config")
_TRAINED = "embed_requires_grad"
# Keys of a config.json beside the layers'.
OF_EAGLE3 = (*FLAGS, _IDS, "eagle_config", _DFLASH, *_SPECULATORS, *MASK_TOKENS, _TRAINED, "architectures")
_POST_NORM = "return_hidden_post_norm"  # `norm_output` of ModelOpt
# Keys of `eagle_config` that change what is computed, with the value of what our drafts compute.
_OURS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "eh_proj_before_attn": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
_KNOWN = (*_OURS, _IDS, "norm_before_fc", _POST_NORM, "parallel_draft_heads_num_layers", "eh_proj_bias")
_PARALLEL = ("pard_token", "ptd_token_id")  # of drafts that propose all tokens in one forward alone
_HEAD, _OFFSETS = "lm_head.weight", "d2t"
_FREE_OF_LENGTH = ("default", "linear", "llama3")  # RoPE types whose angles do not depend on the longest context
_MASK_OF_TOKENS = "t2d"  # the inverse of d2t: of each of the target's tokens, whether the draft has it
_UNUSED = (_MASK_OF_TOKENS, MASK)  # `_vocabulary` and P-EAGLE's own line read these


def eagle3_config(
    values: Mapping[str, Any], llama: LlamaConfig, tensors: Mapping[str, torch.Tensor], target: Target
) -> Eagle3Config:
    """The draft's config; `values`: what its config.json says, `llama`: the part of it that describes layers. P-EAGLE's
    where there are a mask token and what its slots have in place of states.

    Fused layers that it does not name are those that engines choose. Raises UserError for other values.
    """
    count, text = llama.num_hidden_layers, target.config
    llama.num_hidden_layers = text.num_hidden_layers  # by which layers to fuse are chosen and checked
    llama.max_position_embeddings = positions_of(llama, values, target)
    normed = values.get("speculators_model_type") == "eagle3"  # where norm_before_residual is not said
    inner = _eagle_config(values, count)
    flags = {name: values.get(name, name == "norm_before_residual" and normed) for name in FLAGS}
    flags["norm_before_fc"] = inner.get("norm_before_fc", flags["norm_before_fc"])  # where vLLM looks first
    flags["norm_output"] = inner.get(_POST_NORM) or flags["norm_output"]  # as TensorRT-LLM reads them
    for name, flag in flags.items():
        check(isinstance(flag, bool), f"{name} is {shown(flag)}, and must be true or false")
    tokens = _vocabulary(values, tensors, target)
    made: type[Eagle3Config] = Eagle3Config
    if is_peagle(values, tensors):
        mask_token = _mask_token(values)
        made, flags = PeagleConfig, flags | {"norm_output": True, "mask_token": mask_token, "steps": _steps(values)}
    return made.from_target(
        llama,
        num_layers=count,
        layers=_layers(values, inner),
        first_token="skip",
        window=_window(values),
        vocab_size=None if tokens is None else len(tokens),
        vocabulary=None if tokens is None else tokens.sort().values.tolist(),
        **flags,
    )


def _eagle_config(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """ModelOpt's and SGLang's settings of an EAGLE-3 draft of so many layers, without those that are null. Raises
    UserError for what our drafts do not compute, and for what is unknown and on."""
    inner = values.get("eagle_config") or {}
    check(isinstance(inner, dict), f"eagle_config is {shown(inner)}, and must be a mapping")
    inner = {name: value for name, value in inner.items() if value is not None}
    for name, value in inner.items():
        place = f"eagle_config.{name} is {shown(value)}"
        if name in _OURS and not (name == "next_layer_regular" and layers == 1):  # of the layers behind the first
            check(value == _OURS[name], f"{place}, and our drafts compute as with {shown(_OURS[name])}")
        known = name in _KNOWN or not value
        check(known, f"{place}, which we do not know; take it out where it changes nothing of what is computed")
    return inner


def is_peagle(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a draft proposes all its tokens in one forward. Raises UserError where its config.json says so, and it
    has no mask."""
    classes = values.get("architectures")
    names = [str(name) for name in classes if "peagle" in str(name).lower()] if isinstance(classes, list) else []
    if values.get("speculators_model_type") == "peagle":
        names.append("speculators_model_type peagle")
    names += [name for name in _PARALLEL if values.get(name) is not None]
    check(not names or MASK in tensors, f"names {' '.join(names)}, and the file has no {MASK}")
    return MASK in tensors


def fuses_none(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says that an EAGLE-3 draft reads the target's last state alone."""
    inner = values.get("eagle_config")
    return isinstance(inner, dict) and inner.get("use_aux_hidden_state") is False


def trains_embedding(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the draft's embedding was trained, as speculators' P-EAGLE does by default."""
    return bool(values.get(_TRAINED, values.get("speculators_model_type") == "peagle"))


def _mask_token(values: Mapping[str, Any]) -> int:
    """The mask token, in vLLM's order. Raises UserError where none is named."""
    inner = values.get(_DFLASH) or {}
    check(isinstance(inner, dict), f"{_DFLASH} is {shown(inner)}, and must be a mapping")
    found = [places[name] for places in (inner, values) for name in MASK_TOKENS if places.get(name) is not None]
    check(bool(found), f"names no mask token, and the file has {MASK} (P-EAGLE); add pard_token, the mask token's id")
    token = found[0]
    sound = isinstance(token, int) and not isinstance(token, bool)
    check(sound, f"the mask token is {shown(token)}, and must be a token id")
    return token


def _steps(values: Mapping[str, Any]) -> int | None:
    """How many tokens a P-EAGLE draft proposes, as speculators say it; None where nothing does."""
    inner = values.get("speculators_config") or {}
    check(isinstance(inner, dict), f"speculators_config is {shown(inner)}, and must be a mapping")
    methods = inner.get("proposal_methods") or [{}]
    sound = isinstance(methods, list) and isinstance(methods[0], dict)
    check(sound, f"proposal_methods is {shown(methods)}, and must be a list of mappings")
    steps = methods[0].get("speculative_tokens")
    check(steps is None or isinstance(steps, int), f"speculative_tokens is {shown(steps)}, and must be a whole number")
    return steps


def positions_of(llama: LlamaConfig, values: Mapping[str, Any], target: Target) -> int:
    """A draft's longest context: its own, or the target's where that is longer and no rotary angle depends on it:
    engines cut requests to it."""
    if "max_position_embeddings" not in values:
        return target.max_positions
    own, rope = llama.max_position_embeddings, (llama.rope_parameters or {}).get("rope_type", "default")
    return max(own, target.max_positions) if rope in _FREE_OF_LENGTH else own


def _window(values: Mapping[str, Any]) -> int | None:
    """The window of the layers that `layer_types` says have one, as engines read it: all of them, or none."""
    types, window = values.get("layer_types") or [], values.get("sliding_window")
    check(isinstance(types, list), f"layer_types is {shown(types)}, and must be a list")
    if SLIDING not in types:
        return None
    check(set(types) == {SLIDING}, f"layer_types is {shown(types)}, and must be the same for all layers")
    sound = isinstance(window, int) and not isinstance(window, bool) and window >= 1
    check(sound, f"sliding_window is {shown(window)}, and must be a whole number of 1 or more")
    return window


def _layers(values: Mapping[str, Any], inner: Mapping[str, Any]) -> list[int] | None:
    """The fused layers' ids as vLLM counts them, which reads the top level first; SGLang's, in `eagle_config`, are one
    lower. An empty list names none, as to engines."""
    for ids, lower, name in ((values.get(_IDS), 0, _IDS), (inner.get(_IDS), 1, f"eagle_config.{_IDS}")):
        if ids is not None and ids != []:
            sound = isinstance(ids, list) and all(isinstance(each, int) for each in ids)
            check(sound, f"{name} is {shown(ids)}, and must be a list of whole numbers")
            return [each + lower for each in ids]
    return None


def _vocabulary(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: Target) -> torch.Tensor | None:
    """The target's ids of the draft's tokens, int64 [V'], in the order of the LM head's rows; None: all of them.

    A file without `d2t` whose LM head is smaller than the target's has those of `t2d`. Raises UserError where LM head,
    maps and `draft_vocab_size` differ in size.
    """
    whole, head, mask = target.identity.vocab_size, tensors.get(_HEAD), tensors.get(_MASK_OF_TOKENS)
    if head is not None:
        check(head.ndim == 2, f"{_HEAD} has shape {tuple(head.shape)}, and must be a matrix")
    tokens, wanted = None, f"{whole}, as target {target.name} and without {_OFFSETS}"
    if _OFFSETS in tensors:
        tokens, wanted = _tokens(tensors[_OFFSETS], target), f"{len(tensors[_OFFSETS])}, as {_OFFSETS}"
    elif mask is not None and head is not None and len(head) != whole:
        sound = mask.shape == (whole,) and mask.dtype == torch.bool
        check(
            sound,
            f"{_MASK_OF_TOKENS} has shape {tuple(mask.shape)} and {mask.dtype}, and must be {whole} of torch.bool",
        )
        tokens = mask.nonzero().flatten()
        wanted = f"{len(tokens)}, as {_MASK_OF_TOKENS}"
    size, stated = whole if tokens is None else len(tokens), values.get("draft_vocab_size")
    check(stated in (None, size), f"draft_vocab_size is {shown(stated)}, and must be {wanted}")
    if head is not None:
        check(len(head) == size, f"{_HEAD} has {len(head)} rows, and must have {wanted}")
    return tokens


def _tokens(offsets: torch.Tensor, target: Target) -> torch.Tensor:
    """The target's ids that offsets name, int64 [V']. Raises UserError where they name none."""
    sound = offsets.ndim == 1 and not offsets.is_floating_point() and offsets.dtype != torch.bool
    check(sound, f"d2t has shape {tuple(offsets.shape)} and {offsets.dtype}, and must be a row of whole numbers")
    tokens = torch.arange(len(offsets)) + offsets.long()
    known = bool(((tokens >= 0) & (tokens < target.identity.vocab_size)).all()) and len(tokens.unique()) == len(tokens)
    check(known, f"d2t names tokens twice, or beyond the {target.identity.vocab_size} of target {target.name}")
    return tokens


def eagle3_tensors(
    tensors: Mapping[str, torch.Tensor], config: Eagle3Config, target: Target, place: str
) -> dict[str, torch.Tensor]:
    """The draft's tensors by our names. A file without an LM head has the target's. Raises UserError for a norm that
    engines would apply differently."""
    found = {name: tensor for name, tensor in tensors.items() if name not in (*_UNUSED, _OFFSETS)}
    if isinstance(config, PeagleConfig):
        found[MASK] = tensors[MASK].flatten()
    for name in [each for each in found if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", each)]:
        norm, own = found.pop(name), name.replace("hidden_norm", "input_layernorm")
        same = own not in found or torch.equal(found[own], norm)
        check(same, f"{place}: {name} is not {own}: of the two, vLLM applies one and SGLang the other")
        found[own] = norm
    if _HEAD not in found:
        rows = target.lm_head if config.vocabulary is None else target.lm_head.of(torch.tensor(config.vocabulary))
        found[_HEAD] = rows.weight.cpu()
    elif _OFFSETS in tensors:  # our rows follow the target's ids
        found[_HEAD] = found[_HEAD][_tokens(tensors[_OFFSETS], target).argsort()]
    return found
