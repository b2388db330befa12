"""One forward of a target of any family, with attention from outside. Knows no weights' places, heads or drafts.

Whoever calls passes `attend`, which transformers carries as a keyword to the attention function registered here. What a
layer's mask would hide (a window, a chunk) is known from the masks that the family itself builds, see `Reach`.
"""

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from eagle_train.ops.rule import Attend, Rule
from eagle_train.ops.torch_private import without_torch_function

OURS, PROBED = "eagle_train", "eagle_train_probe"  # attention implementations: the second has the family build masks


class Reach(NamedTuple):
    """What a layer's mask hides beside causality, as `Rule` has it."""

    window: int | None = None
    chunk: int | None = None


Reaches = MutableMapping[int, Reach]
"""By layer; of those whose mask was seen."""


def _attention_of_target(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attend: Attend | None = None,
    token_positions: torch.Tensor | None = None,
    reaches: Reaches | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # what else a family passes (dropout, position ids) says nothing of which keys are seen
) -> tuple[torch.Tensor, None]:
    """The attention function every target is loaded with: a family's keywords become a `Rule` for `attend`.

    A mask that says its reach is noted in `reaches`. That nothing a family needs is lost here is checked at start-up,
    see models/probe.py. Raises ValueError where the family does not hand keywords on, and for a mask of its own.
    """
    if attend is None or token_positions is None or reaches is None:
        raise ValueError("keywords that its forward is given do not come to it")
    if attention_mask is not None:
        if not isinstance(attention_mask, _ReachMask):
            raise ValueError("it makes masks of its own")
        reaches[module.layer_idx] = attention_mask.reach
    window, chunk = reaches.get(module.layer_idx, Reach(sliding_window))
    rule = Rule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=s_aux,
    )
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = query * _temperature_correction(module, token_positions).to(query.dtype)
    return attend(module.layer_idx, query, key, value, rule).transpose(1, 2).contiguous(), None


class _ReachMask(torch.Tensor):
    """A mask that says its reach; so do its copies and slices, and nothing else that is computed with it."""

    reach: Reach
    KEEPING = (torch.Tensor.__getitem__, torch.Tensor.to, torch.Tensor.expand, torch.Tensor.contiguous)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with without_torch_function():
            found = func(*args, **(kwargs or {}))
        if func in cls.KEEPING:
            found = found.as_subclass(cls)
            found.reach = args[0].reach
        return found


def _mask_with_reach(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    config: Any,
    device: torch.device,
    local_size: Any = None,
    **_: Any,
) -> torch.Tensor:
    """What a family that asks for a mask is given in a probe: one that hides nothing, and says what it should hide.

    transformers' function for windows and that for chunks both give `local_size`; each takes it from the config.
    """
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device).as_subclass(_ReachMask)
    is_window = local_size is None or local_size == getattr(config, "sliding_window", None)
    mask.reach = Reach(window=local_size) if is_window else Reach(chunk=local_size)
    return mask


def _temperature_correction(module: Any, positions: torch.Tensor) -> torch.Tensor:
    """What turns Llama 4's scaling of queries by their place in the call into that by their positions [B, T].

    Returns [B, 1, T, 1]. In a packed row or a tree the two differ; transformers knows the first only.
    """

    def scale(position: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((position.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    places = torch.arange(positions.shape[1], device=positions.device)
    return (scale(positions) / scale(places))[:, None, :, None]


for name in (OURS, PROBED):
    AttentionInterface.register(name, _attention_of_target)
AttentionMaskInterface.register(PROBED, _mask_with_reach)


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """What reads token ids and ends with the final norm; of a multimodal model, its language model."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or decoder is model:  # Llama 4's text model names none
        return model.model if model.base_model is model else model.base_model
    return decoder if decoder.get_output_embeddings() is None else decoder_of(decoder)


def layers_of(model: PreTrainedModel, count: int) -> torch.nn.ModuleList | None:
    """The decoder's `count` layers in their order; None where they are not one list of it."""
    lists = [each for each in decoder_of(model).children() if isinstance(each, torch.nn.ModuleList)]
    return next((each for each in lists if len(each) == count), None)


class LayerOutputs:
    """Keeps modules' outputs while it is asked to. Its hooks stay: torch.compile traces none that come and go."""

    def __init__(self, modules: list[torch.nn.Module]):
        self._keeps, self._found = False, [torch.empty(0)] * len(modules)
        for place, module in enumerate(modules):
            module.register_forward_hook(partial(self._note, place))

    def _note(self, place: int, _: Any, __: Any, output: Any) -> None:
        if self._keeps:
            self._found[place] = output[0] if isinstance(output, tuple) else output

    def beside(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `forward` returns [B, T, H] and behind it the outputs of the modules that it called, [B, T, S]."""
        self._keeps = True
        hidden = forward()
        self._keeps, found = False, torch.cat([hidden, *self._found], dim=-1)
        self._found = [found[:0]] * len(self._found)
        return found


def hidden_states(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
    reaches: Reaches,
    limit: int | None = None,
) -> torch.Tensor:
    """The final norm's output [B, T, H] for int64 tokens and positions [B, T], of a model with our attention.

    `limit`: positions from there on are not told to RoPE, see `rope_limit`.
    """
    own = {"attend": attend, "token_positions": positions, "reaches": reaches}  # carried to `_attention_of_target`
    if limit is not None:  # padding, and what is drafted beyond a text's end, may lie there
        positions = positions.clamp(max=limit - 1)
    return decoder_of(model)(input_ids=tokens, position_ids=positions, use_cache=False, **own).last_hidden_state
