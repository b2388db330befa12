"""EAGLE-3: features of several of the target's layers, and no regression: it learns what its own chains will meet.

Li et al., 2025 (arXiv 2503.01840). Layer 0 reads the norms of token embedding and hidden state side by side. In pass 1
of its training-time test the hidden states are made of the target's layers; in pass k they are what the draft itself
gave at the slot before, as in decoding. It has an LM head of its own over the most frequent tokens. DESIGN section 3.3.

Its states are two halves: what its LM head reads, after the final norm, and what a chain's next slot is fed, before it.
With `norm_output` both are one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from eagle_train.drafts.eagle3_layouts import LAYOUTS
from eagle_train.drafts.head import Head
from eagle_train.drafts.kind import Rows, shift_hidden
from eagle_train.drafts.losses import Lesson, LossSums
from eagle_train.drafts.own_head import Learnt, OwnHead, Share
from eagle_train.drafts.steps import LogitsDraft, StepsConfig
from eagle_train.drafts.unroll import unroll
from eagle_train.errors import check
from eagle_train.models.layers import Attention, DenseFFN, Layer, RMSNorm, Rotary, only
from eagle_train.models.target import LMHead
from eagle_train.ops.linear import Linear
from eagle_train.ops.rule import Attend

__all__ = ["Eagle3Config", "Eagle3Draft"]


@dataclass
class Eagle3Config(StepsConfig):
    """The shape and conventions of an EAGLE-3 draft; see `DraftConfig`, and `StepsConfig` for its training-time test.

    `layers`: which states of the target are fused, each by how many of its layers stand before it, as engines number
    them: layer i here is the output of the i-th layer, counted from 1.

    `norm_before_fc`: one norm over what is fused; `fc_norm`: one for each layer's part of it. `norm_before_residual`:
    the residual of layer 0 begins after the norm of the hidden state. `norm_output`: chains are fed what the LM head
    reads.
    """

    kind: ClassVar[str] = "eagle3"
    title: ClassVar[str] = "An EAGLE-3 draft"
    layouts: ClassVar = LAYOUTS
    fed_hidden: ClassVar[bool] = False

    target_vocab_size: int = 0
    layers: list[int] | None = None  # states to fuse, after so many of the target's layers; null: 2, half, all but 3
    fc_norm: bool = False  # a norm for each fused layer's states
    norm_before_fc: bool = False  # one norm over all of them
    norm_before_residual: bool = False  # the residual of layer 0 begins after its norm
    norm_output: bool = False  # chains are fed what the LM head reads, after the final norm

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.target_vocab_size >= 1, f"draft.target_vocab_size={self.target_vocab_size}: must be at least 1")
        given = self.layers or []
        ascending = len(given) >= 1 and given == sorted(set(given)) and given[0] >= 1
        check(ascending, f"draft.layers={self.layers}: must be numbers from 1 on, in ascending order")

    @classmethod
    def of_target(cls, text: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        count, wanted = text.num_hidden_layers, given.get("layers")
        right = f"from 1 to {count - 1}, in ascending order"
        if wanted is None:
            wanted = [2, count // 2, count - 3]
            sound = wanted == sorted(set(wanted)) and wanted[0] < count
            told = f"draft.layers=null: a target of {count} layers has no {wanted} in ascending order, the default"
            check(sound and wanted[-1] >= 1, f"{told} of serving engines; give draft.layers=[...], {right}")
        else:
            sound = isinstance(wanted, list) and all(isinstance(each, int) and 1 <= each < count for each in wanted)
            check(sound, f"draft.layers={wanted}: must be numbers {right}, the states that our drafts take")
        return {"layers": wanted, "target_vocab_size": text.vocab_size}

    @property
    def target_layers(self) -> tuple[int, ...]:
        assert self.layers is not None, "checked"
        return tuple(each - 1 for each in self.layers)

    @property
    def fc_inputs(self) -> int:
        return len(self.target_layers) * self.hidden_size

    @property
    def own_heads(self) -> int:
        return 1

    def kept_beside_layers(self, itemsize: int) -> tuple[int, int]:
        # In each pass: the embedding and what the final norm reads, in fp32, the second half of what layer 0's products
        # read, and the states. Once: what is fused, and in fp32 where it goes through norms.
        halves = 1 if self.norm_output else 2
        normed = self.fc_norm or self.norm_before_fc
        once = (itemsize + (4 if normed else 0)) * self.fc_inputs
        return (2 * 4 + (2 + halves) * itemsize) * self.hidden_size, once

    def loss_bytes(self, itemsize: int) -> int:
        return 5 * itemsize  # rows of both models, picked and put together, and a gradient

    def fc_products(self, passes: int) -> int:
        return 2  # in pass 1 alone, and what it reads needs no gradient

    def conventions(self) -> dict[str, str]:
        before = "; the residual begins after its norm" if self.norm_before_residual else ""
        fed = "after" if self.norm_output else "before"
        return {
            "input": "layer 0: concatenate(norm of the embedding of token t_j, norm of the hidden state at j-1): "
            f"embedding first{before}",
            "hidden": f"fc of the target's states after {self.layers} of its layers, side by side; in a chain, the "
            f"draft's own output {fed} its final norm",
            "norms": "every layer has an input norm; a final norm stands before the LM head",
            "lm_head_and_embedding": "an LM head of its own; the target's embedding"
            + ("" if self.vocabulary is None else "; the draft proposes the tokens of draft.vocabulary only"),
            **super().conventions(),
        }

    def module(self) -> "Eagle3Draft":
        return Eagle3Draft(self)


class FusionLayer(nn.Module):
    """Layer 0: its queries, keys and values read the norms of embedding and hidden state side by side."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.self_attn = Attention(config, 0, inputs=2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = DenseFFN(width, config.intermediate_size)
        self._norm_before_residual = config.norm_before_residual

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Both [B, T, H] to [B, T, H]; or to [B, N, H] at the slots `wanted` [B, N], of all keys and values."""
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(token_embeddings), normed), dim=-1)
        residual = only(normed if self._norm_before_residual else hidden, wanted)
        x = residual + self.self_attn(both, rotary, attend, wanted)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Draft(LogitsDraft):
    """`fc` over the fused layers, a `FusionLayer`, Llama layers, a norm and an LM head. NaN until initialised or
    loaded."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config):
        super().__init__()
        width, eps, fused = config.hidden_size, config.rms_norm_eps, len(config.target_layers)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused * width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(fused))
        self.fc = Linear(config.fc_inputs, width, bias=False)
        deeper = (Layer(config, layer) for layer in range(1, config.num_layers))
        self.layers = nn.ModuleList([FusionLayer(config), *deeper])
        self.norm = RMSNorm(width, eps)
        self.lm_head = OwnHead(width, config.vocab_size or config.target_vocab_size)
        self.rotary = Rotary(config)
        self.begin(config)

    def init_weights(self, seed: int, lm_head: LMHead | None = None) -> "Eagle3Draft":
        super().init_weights(seed)
        if lm_head is not None:
            head = lm_head if self.vocabulary is None else lm_head.of(self.vocabulary.to(lm_head.weight.device))
            with torch.no_grad():
                self.lm_head.weight.copy_(head.weight * head.scale)
        return self

    def own_head(self, level: int = 0) -> LMHead:
        return LMHead(self.lm_head.weight.detach())

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        fuses: bool = False,
    ) -> torch.Tensor:
        """States [B, T, W]. `fuses`: `hidden` is [B, T, H * layers], the target's, and is put through `fc` here."""
        x, rotary = self._fused(hidden) if fuses else hidden, self.rotary(positions)
        first, *others = self.layers
        last = len(others)
        x = first(token_embeddings, x, rotary, attend, wanted if last == 0 else None)
        for number, layer in enumerate(others, 1):
            x = layer(x, rotary, attend, wanted if number == last else None)
        read = self.norm(x)
        return read if self.config.norm_output else torch.cat((read, x.to(read.dtype)), dim=-1)

    def _fused(self, layers: torch.Tensor) -> torch.Tensor:
        """[.., H] of the target's layers side by side, [.., H * layers]."""
        if self.config.norm_before_fc:
            layers = self.input_norm(layers)
        if self.config.fc_norm:
            parts = layers.chunk(len(self.fc_norm), dim=-1)
            layers = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(layers)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self._fused(states[..., self.config.hidden_size :])

    def fed(self, states: torch.Tensor) -> torch.Tensor:
        return states if self.config.norm_output else states[..., self.config.hidden_size :]

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return states if self.config.norm_output else states[..., : self.config.hidden_size]

    def logits(self, states: torch.Tensor, head: Head, level: int = 0) -> torch.Tensor:
        return self.lm_head(self.read(states))

    def unrolled(self, forward: Callable[..., torch.Tensor], rows: Rows, passes: int) -> list[torch.Tensor]:
        layers = torch.cat([rows.states.layers[each] for each in self.config.target_layers], dim=-1)
        paired, first = rows.noise(shift_hidden(layers, rows.positions)), partial(forward, fuses=True)
        return unroll(forward, rows.embeddings, paired, rows.positions, rows.lengths, passes, first, self.fed)

    def losses(
        self,
        states: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        head: Head,
        lesson: Lesson,
        scale: float,
    ) -> LossSums:
        """`DraftConfig.loss` on logits, the mean over the passes weighted by `decay`."""
        pairs = list(zip(states, slots, strict=True))
        rows = torch.cat([self.read(state).flatten(0, 1).index_select(0, own) for state, own in pairs])
        wanted = torch.cat([hidden.flatten(0, 1).index_select(0, own) for _, own in pairs])
        weights = self.config.weights(len(pairs))
        shares = [Share(len(own), weight) for own, weight in zip(slots, weights, strict=True)]
        loss, ce, agree = self.lm_head(rows, Learnt(wanted, head.of_target, self.config.on_logits, shares))
        return LossSums(scale * loss, None, ce, agree, len(slots[0]))
