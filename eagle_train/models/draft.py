"""The EAGLE draft: a fusion of token and hidden state, then a few Llama layers. DESIGN section 3.3.

One definition for training and inference; it never knows which, because `attend` comes from outside. It has no
embedding and no LM head: both are the target's.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from eagle_train.config import build, check
from eagle_train.models.layers import Layer, RMSNorm, Rotary
from eagle_train.ops.attention import Attend

NOPE_EVERY = 4  # iRoPE as in Llama 4: every fourth layer has no rotary positions


@dataclass
class DraftConfig:
    """The draft's shape and conventions; saved with its weights. Sizes default to the target's, see `from_target`.

    `norms`: eagle1 has no norm before layer 0 and none at the end, which is what vLLM and SGLang load; full has both.
    `first_token`: self_fusion pairs the first token with its own hidden state; skip gives it none (zeros) and leaves
    nothing else changed. `irope`: layers attend within chunks of `attention_chunk` positions, every fourth (and the
    last) sees everything and has no rotary positions.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    rms_norm_eps: float = 1e-5
    num_layers: int = 3
    norms: str = "eagle1"
    ffn: str = "dense"
    num_experts: int = 16
    first_token: str = "self_fusion"
    irope: bool = False
    attention_chunk: int = 8192

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "num_layers")
        for name in (*sizes, "num_experts", "attention_chunk"):
            check(getattr(self, name) >= 1, f"draft.{name}={getattr(self, name)}: must be at least 1")
        choices = {"norms": ("eagle1", "full"), "ffn": ("dense", "moe"), "first_token": ("self_fusion", "skip")}
        for name, allowed in choices.items():
            check(getattr(self, name) in allowed, f"draft.{name}={getattr(self, name)}: must be {' or '.join(allowed)}")
        heads = f"draft.num_heads={self.num_heads}, draft.num_kv_heads={self.num_kv_heads}"
        check(self.num_heads % self.num_kv_heads == 0, f"{heads}: the second must divide the first")

    @classmethod
    def from_target(cls, target_config: Any, **overrides: Any) -> "DraftConfig":
        """The draft for a target with this Hugging Face config; an override that is None is left to the target."""
        text = target_config.get_text_config()
        heads = text.num_attention_heads
        sizes = {
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_heads": heads,
            "num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": rope_parameters_of(text),
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-5,
        }
        return build(cls, sizes | {key: value for key, value in overrides.items() if value is not None}, "draft")

    def rope_of_layer(self, layer: int) -> tuple[bool, int | None]:
        """Whether the layer has rotary positions, and the chunk it attends within."""
        if not self.irope:
            return True, None
        if (layer + 1) % NOPE_EVERY == 0 or layer == self.num_layers - 1:
            return False, None
        return True, self.attention_chunk


def rope_parameters_of(text: Any) -> dict[str, Any]:
    """The target's rotary settings as a flat mapping; where they differ by layer type, those of full attention."""
    parameters = dict(text.rope_parameters)
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    # JSON and dataclass round trips keep plain values only
    return {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}


class Draft(nn.Module):
    """`fc` (embedding first, hidden state second) and M layers. Parameters are NaN until initialised or loaded."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps) if config.norms == "full" else nn.Identity()
        self.rotary = Rotary(config)
        for parameter in self.parameters():
            nn.init.constant_(parameter, float("nan"))

    def init_weights(self, seed: int) -> "Draft":
        """Fresh weights: normal with the width's standard deviation; what writes to the residual stream starts at 0.

        So the fresh draft is its fusion alone, which passes on the hidden state it was given.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        with torch.no_grad():
            self.fc.weight[:, self.config.hidden_size :] = torch.eye(self.config.hidden_size)
        return self

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self, token_embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Predicted hidden states [B, T, H] for slots of (token embedding, previous hidden state), both [B, T, H].

        `positions` [B, T] int64 are the tokens' own (DESIGN section 3.1).
        """
        rotary = self.rotary(positions)
        x = self.fc(torch.cat((token_embeddings, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, rotary, attend)
        return self.norm(x)


def shift_hidden(hidden: torch.Tensor, positions: torch.Tensor, first_token: str) -> torch.Tensor:
    """The hidden state g_j each slot is paired with: the previous token's, DESIGN section 3.1. All [B, T, H].

    Where `positions` is 0 a document begins: its first slot gets its own hidden state (self_fusion) or zeros (skip).
    """
    previous = hidden.roll(1, dims=1)
    first = hidden if first_token == "self_fusion" else torch.zeros_like(hidden)
    return torch.where((positions == 0).unsqueeze(-1), first, previous)
