"""P-EAGLE: an EAGLE-3 draft that proposes all its tokens in one forward.

AWS, 2026 (arXiv 2602.01469). The slot of the pending token is EAGLE-3's. Behind it stand mask slots, one for each
further token, at the positions of tokens that are not known yet: each is fed the embedding of a mask token and, in
place of the target's states, `mask_hidden`, which is learnt. Slots attend to all before them, so that a mask slot knows
the text and how far it is behind it, and no token that another slot proposes. DESIGN section 3.3.

As passes (`Draft.unrolled`): what pass k, from 0 on, has at slot j is of the k-th mask slot behind slot j - k.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from eagle_train.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_train.drafts.kind import Rows, shift_hidden
from eagle_train.drafts.peagle_layouts import LAYOUTS
from eagle_train.drafts.unroll import all_passes
from eagle_train.errors import check
from eagle_train.models.target import LMHead
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.rule import Attend

__all__ = ["PeagleConfig", "PeagleDraft"]


@dataclass
class PeagleConfig(Eagle3Config):
    """The shape and conventions of a P-EAGLE draft; see `Eagle3Config`. A pass of its training is a slot of a forward.

    `steps`: how many tokens a forward proposes. `mask_token`: the token whose embedding, the target's, mask slots have.
    `norm_output` says nothing here: no slot is fed another one's output.
    """

    kind: ClassVar[str] = "peagle"
    title: ClassVar[str] = "A P-EAGLE draft"
    layouts: ClassVar = LAYOUTS
    in_one_pass: ClassVar[bool] = True

    num_layers: int = 4
    steps: int = 8  # tokens that a forward proposes, and so the most levels of a tree
    norm_output: bool = True
    mask_token: int | None = None  # whose embedding stands for tokens that are not known yet; null: the target's last

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.steps >= 2, f"draft.steps={self.steps}: must be at least 2; one token in a forward is draft=eagle3")
        check(self.norm_output, "draft.norm_output=false: draft=peagle feeds no slot's output to another; leave it out")
        token, size = self.mask_token, self.target_vocab_size
        known = token is not None and 0 <= token < size
        check(known, f"draft.mask_token={token}: must be a token id of the target, below {size}")

    @classmethod
    def of_target(cls, text: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().of_target(text, given), "mask_token": text.vocab_size - 1}

    @property
    def mask_id(self) -> int:
        """`mask_token`."""
        assert self.mask_token is not None, "checked"
        return self.mask_token

    @property
    def levels(self) -> int:
        return self.steps

    def fc_products(self, passes: int) -> int:
        return 3  # once for all passes, and what it reads has mask_hidden in it, which needs a gradient

    def passes_at_once(self, passes: int) -> int:
        return passes

    def described(self) -> str:
        return f"{super().described()}, {self.steps} in one forward,"

    def conventions(self) -> dict[str, str]:
        return {
            **super().conventions(),
            "hidden": f"fc of the target's states after {self.layers} of its layers, side by side",
            "mask_slots": f"after the pending token's slot, at the positions that follow: the embedding of token "
            f"{self.mask_token} beside fc of mask_hidden; slot d, from 1 on, proposes t_(j+1+d)",
        }

    def module(self) -> "PeagleDraft":
        return PeagleDraft(self)


class PeagleDraft(Eagle3Draft):
    """An `Eagle3Draft` and `mask_hidden` [H * layers], what mask slots have in place of the fused layers."""

    config: PeagleConfig

    def __init__(self, config: PeagleConfig):
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.empty(config.fc_inputs))
        self.begin(config)

    def init_weights(self, seed: int, lm_head: LMHead | None = None) -> "PeagleDraft":
        super().init_weights(seed, lm_head)
        # No norm's scale: it stands for states, and is of their order.
        nn.init.normal_(self.mask_hidden, generator=torch.Generator().manual_seed(seed + 1))
        return self

    def masked(self) -> torch.Tensor:
        """What a mask slot is fed, [1, 1, H]."""
        return self._fused(self.mask_hidden.view(1, 1, -1))

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        fuses: bool = False,
    ) -> torch.Tensor:
        """As EAGLE-3's. `fuses`: `hidden` [B, N, H * layers] are the target's states of the first N slots, and the
        others are mask slots."""
        if fuses:
            (rows, known), slots = hidden.shape[:2], token_embeddings.shape[1]
            mask = self.mask_hidden.to(hidden.dtype).expand(rows, 1, -1)  # by the same product as the others
            fused = self._fused(torch.cat((hidden, mask), dim=1))
            hidden = torch.cat((fused[:, :known], fused[:, known:].expand(-1, slots - known, -1)), dim=1)
        return super().forward(token_embeddings, hidden, positions, attend, wanted)

    def unrolled(self, forward: Callable[..., torch.Tensor], rows: Rows, passes: int) -> list[torch.Tensor]:
        layers = torch.cat([rows.states.layers[each] for each in self.config.target_layers], dim=-1)
        paired, count = rows.noise(shift_hidden(layers, rows.positions)), min(passes, self.config.steps)
        embeddings, attend = rows.embeddings, packed_attention(rows.lengths)
        if count > 1:
            assert rows.embed is not None, "mask slots have an embedding of their own"
            mask = rows.embed(torch.full_like(rows.positions[:, :1], self.config.mask_id))
            embeddings = torch.cat((embeddings, mask.expand(-1, (count - 1) * embeddings.shape[1], -1)), dim=1)
            attend = all_passes(rows.positions, rows.lengths, count)
        states = forward(embeddings, paired, rows.positions.repeat(1, count), attend, fuses=True)
        return list(states.chunk(count, dim=1))
