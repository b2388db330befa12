"""The draft's building blocks: rotary positions, attention, feed-forward, and the layer made of them.

Tensor names are those of Llama checkpoints, because serving engines load them. Knows nothing of how keys and values
are kept: `attend` comes from outside. Shapes: B batch, T tokens, H hidden, Q query heads, K key/value heads, D width.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_train.errors import check
from eagle_train.ops import grouped
from eagle_train.ops.kernels import is_plain
from eagle_train.ops.linear import Linear
from eagle_train.ops.norm import rms_norm
from eagle_train.ops.rule import Attend, Rule


class AttendingShape(Protocol):
    """What a draft's config, of whatever kind, says of the keys that layers see."""

    @property
    def head_dim(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    def first_slot_of(self, layer: int) -> int: ...
    def rope_of_layer(self, layer: int) -> tuple[bool, int | None]: ...


class LayerShape(AttendingShape, Protocol):
    """What layers read of a draft's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope_parameters(self) -> dict[str, Any]: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def norms(self) -> str: ...
    @property
    def ffn(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def sink(self) -> bool: ...


class RMSNorm(nn.Module):
    """Root-mean-square norm with fp32 statistics, whatever the input's precision."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary position embeddings with the target's settings (base and scaling), computed by transformers' own rules."""

    frequencies: torch.Tensor

    def __init__(self, config: LayerShape):
        super().__init__()
        frequencies, self.scale = _rope_frequencies(config)
        turning = torch.cat((-frequencies, frequencies))
        # As bits: a model's conversion to bf16 would round them, and angles at long distances with them.
        self.register_buffer("frequencies", turning.view(torch.int32), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rotate` takes, in fp32, for int64 positions [B, T]: cos, and sin with its first half negated.

        Both are [B, 1, T, R].
        """
        angles = positions[:, None, :, None].float() * self.frequencies.view(torch.float32)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1.0 else (cos * self.scale, sin * self.scale)


def _rope_frequencies(config: LayerShape) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [R/2] in fp32 and the factor on cos and sin, from the target's `rope_parameters`.

    R, how much of a head turns, is `partial_rotary_factor` of its width. Raises UserError for an unknown `rope_type`.
    """
    rope = config.rope_parameters
    rope_type, known = rope.get("rope_type", "default"), ("default", *ROPE_INIT_FUNCTIONS)
    check(rope_type in known, f"draft.rope_parameters.rope_type={rope_type}: must be one of {', '.join(known)}")
    if rope_type == "default":
        width = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        # What engines alone read stands under another name as well (drafts/rope.py).
        rope_parameters={key: value for key, value in rope.items() if key not in ("short_mscale", "long_mscale")},
    )
    with torch.device("cpu"):  # also where a draft is built without memory for its weights
        return ROPE_INIT_FUNCTIONS[rope_type](llama, torch.device("cpu"))


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [B, heads, T, D]: its first R turned by its positions' angles (halves convention, as Hugging Face's Llama)."""
    cos, sin = rotary
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], rotary), x[..., width:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(width // 2, dims=-1), sin).to(x.dtype)


def rule_of_layer(config: AttendingShape, layer: int) -> Rule:
    """What a layer asks of attention, but for its sinks, which are parameters."""
    _, chunk = config.rope_of_layer(layer)
    return Rule(config.head_dim**-0.5, config.window, chunk, skip_first=config.first_slot_of(layer))


class Attention(nn.Module):
    """Grouped-query self-attention; which keys are seen is decided by `attend`."""

    sinks: nn.Parameter | None  # [Q]

    def __init__(self, config: LayerShape, layer: int, inputs: int | None = None):
        """`inputs`: what queries, keys and values read; None: H."""
        super().__init__()
        inputs = inputs or config.hidden_size
        self.layer, self.head_dim = layer, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.uses_rope, _ = config.rope_of_layer(layer)
        self.rule = rule_of_layer(config, layer)
        self.q_proj = Linear(inputs, config.num_heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = Linear(inputs, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = Linear(inputs, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.register_parameter("sinks", nn.Parameter(torch.empty(config.num_heads)) if config.sink else None)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.uses_rope:
            q, k = rotate(q, rotary), rotate(k, rotary)
        out = attend(self.layer, q, k, v, self.rule.having(self.sinks))
        return self.o_proj(only(out.transpose(1, 2).flatten(2), wanted))


class DenseFFN(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, width: int, inner: int, bias: bool = False):
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoEFFN(nn.Module):
    """Llama 4's mixture: each token goes through a shared expert and through its best one, weighted by a sigmoid."""

    def __init__(self, width: int, inner: int, num_experts: int):
        super().__init__()
        self.router = Linear(width, num_experts, bias=False)
        self.shared_expert = DenseFFN(width, inner)
        self.experts = nn.ModuleList(DenseFFN(width, inner) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        gate, best = self.router(flat).max(dim=-1)
        routed = flat * torch.sigmoid(gate).unsqueeze(-1)
        out = self.shared_expert(flat)
        if self._is_grouped(routed):
            return self._grouped(routed, best, out).view_as(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(routed[rows]).to(out.dtype))
        return out.view_as(x)

    def _is_grouped(self, rows: torch.Tensor) -> bool:
        """Whether all experts run at once. That takes a copy of their weights, which pays where they learn from the
        many rows of a training step. Modules that are quantised, or whose weights are elsewhere until they are called
        (ZeRO-3), run one by one, and so do types that have no grouped product."""
        if is_plain("experts") or not torch.is_grad_enabled():
            return False
        weight = getattr(getattr(self.experts[0], "gate_proj", None), "weight", None)
        if weight is None or not weight.requires_grad or weight.ndim < 2:
            return False
        return grouped.supports(rows.device, _computed_in(rows), *weight.shape)

    @torch.compiler.disable  # which takes a CPU's grouped products for bf16's alone
    def _grouped(self, routed: torch.Tensor, best: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` [R, H] and what each row's `best` expert, int64 [R], makes of `routed` [R, H]."""
        dtype, experts = _computed_in(routed), list(self.experts)
        gates, ups, downs = (
            [getattr(expert, name).weight for expert in experts] for name in ("gate_proj", "up_proj", "down_proj")
        )
        order, ends = grouped.by_expert(best, len(experts))
        rows = routed.index_select(0, order).to(dtype)
        made = grouped.swiglu(rows, grouped.stacked(dtype, gates, ups), grouped.stacked(dtype, downs), ends)
        return out.index_add(0, order, made.to(out.dtype))


def _computed_in(x: torch.Tensor) -> torch.dtype:
    """The dtype of products with x: autocast's, where there is one. Autocast itself casts for no grouped product."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Layer(nn.Module):
    """A pre-norm transformer layer. Without `input_layernorm` it reads its input as it is (EAGLE-1's first layer)."""

    def __init__(self, config: LayerShape, layer: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        has_norm = layer > 0 or config.norms == "full"
        self.input_layernorm = RMSNorm(width, eps) if has_norm else nn.Identity()
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp: DenseFFN | MoEFFN
        if config.ffn == "moe":
            self.mlp = MoEFFN(width, config.intermediate_size, config.num_experts)
        else:
            self.mlp = DenseFFN(width, config.intermediate_size, config.mlp_bias)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [B, T, H] to [B, T, H]; or to [B, N, H] at the slots `wanted` [B, N] alone, of all keys and values."""
        x = only(x, wanted) + self.self_attn(self.input_layernorm(x), rotary, attend, wanted)
        return x + self.mlp(self.post_attention_layernorm(x))


def only(x: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """x [B, T, H] at slots [B, N] of its T, or all of it."""
    return x if slots is None else x.gather(1, slots.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
