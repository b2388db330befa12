"""Medusa: heads on the target's last hidden state, each of which proposes a token further ahead, all at once.

Cai et al., 2024 (arXiv 2401.10774), with the target frozen (Medusa-1). Head i, from 1 on, reads the hidden state at
token t_j, of which the target's LM head makes t_(j+1), and proposes t_(j+1+i) with the same LM head, or with one of its
own, as the paper's. It knows no token that another head proposes, has no attention, and leaves nothing in a cache.
DESIGN section 3.5.

As passes (`Draft.unrolled`): what pass k, from 0 on, has at slot j is of head k + 1, at the token k + 1 before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.drafts.head import Head
from eagle_train.drafts.kind import Rows, shift_hidden
from eagle_train.drafts.losses import Lesson, LossSums
from eagle_train.drafts.medusa_layouts import LAYOUTS
from eagle_train.drafts.own_head import Learnt, OwnHead, Share
from eagle_train.drafts.steps import LogitsConfig, LogitsDraft
from eagle_train.errors import check
from eagle_train.models.target import LMHead
from eagle_train.ops.linear import Linear
from eagle_train.ops.rule import Attend

__all__ = ["MedusaConfig", "MedusaDraft"]

# Fields of all kinds that say nothing of heads without attention: no settings here, see fields.py.
_OF_LAYERS = (
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "window",
    "sink",
)


@dataclass
class MedusaConfig(LogitsConfig):
    """The shape of a draft of Medusa heads; see `DraftConfig`, whose fields for attention and norms it does not read,
    and `LogitsConfig` for what it learns, where a pass is a head.

    `heads`: how many tokens ahead it proposes. `num_layers`: blocks x + silu(W x + b) of a head, one after the other.
    `own_head`: each head has an LM head of its own, `lm_head.(i-1)`, which begins as the target's rows.
    """

    kind: ClassVar[str] = "medusa"
    title: ClassVar[str] = "Medusa heads"
    layouts: ClassVar = LAYOUTS
    at_once: ClassVar[bool] = True
    unread: ClassVar[Mapping[str, str]] = {**LogitsConfig.unread, "unroll": "give draft.heads"}

    num_layers: int = 1  # blocks of a head
    first_token: str = "skip"
    heads: int = 5  # tokens that it proposes ahead, and so the most levels of a tree
    decay: float = 0.8  # weight of a head relative to the one before
    own_head: bool = False  # an LM head of its own for each head, as the paper's, which begins as the target's
    target_vocab_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.heads >= 1, f"draft.heads={self.heads}: must be at least 1")
        # The first token has no hidden state before it, and no token ahead of it is proposed from its own.
        self.check_choice("first_token", "skip")
        known = self.target_vocab_size >= 1 or not self.own_head
        check(known, f"draft.target_vocab_size={self.target_vocab_size}: must be at least 1")

    @classmethod
    def of_target(cls, text: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        for name in _OF_LAYERS:
            check(name not in given, f"draft.{name}={given.get(name)}: Medusa heads have no attention; leave it out")
        return {"target_vocab_size": text.vocab_size}

    @property
    def levels(self) -> int:
        return self.heads

    @property
    def own_heads(self) -> int:
        return self.heads if self.own_head else 0

    @property
    def fc_inputs(self) -> int:
        return 0

    @property
    def attention_width(self) -> int:
        return 0

    def kept_by_layer(self, itemsize: int) -> int:
        # What silu reads, and what a block reads of the one before; the first reads the target's states, counted once.
        return itemsize * self.hidden_size * (2 * self.num_layers - 1) // self.num_layers

    def kept_beside_layers(self, itemsize: int) -> tuple[int, int]:
        return itemsize * self.hidden_size, itemsize * self.hidden_size  # a head's states, and what all of them read

    def passes(self, unroll: int) -> int:
        return self.heads

    def fc_products(self, passes: int) -> int:
        return 0

    def layer_products(self, passes: int, recomputed: bool) -> float:
        # Each head runs in one pass alone, and what its first block reads needs no gradient.
        return (2 if recomputed else 1) + 2 - 1 / self.num_layers

    def described(self) -> str:
        return f"Medusa heads ({self.heads}, blocks in each: {self.num_layers}) that propose"

    def conventions(self) -> dict[str, str]:
        return {
            "input": "head i, from 1 on, reads the hidden state at token t_j, of which the target's LM head makes "
            "t_(j+1), and proposes t_(j+1+i)",
            "hidden": "the target's, after its final norm",
            "head": "layers.(i-1).mlp: blocks x + silu(W x + b), one after the other",
            "lm_head_and_embedding": ("lm_head.(i-1) for head i" if self.own_head else "the target's LM head")
            + "; no embedding"
            + ("" if self.vocabulary is None else "; the draft proposes the tokens of draft.vocabulary only"),
        }

    def module(self) -> "MedusaDraft":
        return MedusaDraft(self)


class MedusaHead(nn.Module):
    """`count` blocks x + silu(W x + b) of width H."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.mlp = nn.ModuleList(Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., H] to [.., H]."""
        for block in self.mlp:
            x = x + F.silu(block(x))
        return x


class MedusaDraft(LogitsDraft):
    """The heads, as `layers`, and their LM heads, if they have some. Parameters are NaN until initialised or loaded."""

    config: MedusaConfig
    lm_head: nn.ModuleList

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.layers = nn.ModuleList(MedusaHead(config.hidden_size, config.num_layers) for _ in range(config.heads))
        if config.own_head:
            size = config.vocab_size or config.target_vocab_size
            self.lm_head = nn.ModuleList(OwnHead(config.hidden_size, size) for _ in range(config.heads))
        self.begin(config)

    @torch.no_grad()
    def init_weights(self, seed: int, lm_head: LMHead | None = None) -> "MedusaDraft":
        """Blocks all zero, as the paper's: each head begins as the identity, so that it proposes what the target's LM
        head says, or its copy of that."""
        super().init_weights(seed)
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)
        if self.config.own_head and lm_head is not None:
            rows = lm_head if self.vocabulary is None else lm_head.of(self.vocabulary.to(lm_head.weight.device))
            for each in self.lm_head:
                each.get_parameter("weight").copy_(rows.weight * rows.scale)
        return self

    def own_head(self, level: int = 0) -> LMHead | None:
        return LMHead(self.lm_head[level].get_parameter("weight").detach()) if self.config.own_head else None

    def logits(self, states: torch.Tensor, head: Head, level: int = 0) -> torch.Tensor:
        return self.lm_head[level](states) if self.config.own_head else super().logits(states, head)

    def forward(
        self,
        token_embeddings: torch.Tensor | None,
        hidden: torch.Tensor,
        positions: torch.Tensor | None = None,
        attend: Attend | None = None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [B, T, heads * H] of all heads, the first one's first, from the target's `hidden` [B, T, H]; with
        `wanted` int64 [B, N], [B, N, heads * H]. All else is for other kinds, and not read."""
        if wanted is not None:
            hidden = hidden.take_along_dim(wanted.unsqueeze(2), dim=1)
        return torch.cat([head(hidden) for head in self.layers], dim=-1)

    def unrolled(self, forward: Callable[..., torch.Tensor], rows: Rows, passes: int) -> list[torch.Tensor]:
        states = forward(None, rows.noise(shift_hidden(rows.states.hidden, rows.positions)))
        by_head = states.chunk(self.config.heads, dim=-1)[:passes]
        return [each.roll(ahead, dims=1) for ahead, each in enumerate(by_head)]

    def losses(
        self,
        states: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        head: Head,
        lesson: Lesson,
        scale: float,
    ) -> LossSums:
        """As `LogitsDraft.losses`, where heads have LM heads of their own by these."""
        if not self.config.own_head:
            return super().losses(states, slots, hidden, head, lesson, scale)
        wanted, weights, found = hidden.flatten(0, 1), self.config.weights(len(states)), []
        for level, (state, own) in enumerate(zip(states, slots, strict=True)):
            rows, share = state.flatten(0, 1).index_select(0, own), Share(len(own), weights[level])
            learnt = Learnt(wanted.index_select(0, own), head.of_target, self.config.on_logits, [share])
            found.append(self.lm_head[level](rows, learnt))
        loss = torch.stack([each for each, _, _ in found]).sum()
        _, ce, agree = found[0]
        return LossSums(scale * loss, None, ce, agree, len(slots[0]))
