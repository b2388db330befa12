"""What kinds have in common that learn logits alone, in passes whose weights fall: the settings of that, and the loss.

Those of them whose passes are each on the draft's own states of the one before have layers that are plain Llama's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from eagle_train.drafts.head import Head
from eagle_train.drafts.kind import Draft, DraftConfig
from eagle_train.drafts.losses import LEARNT_LOGITS, Lesson, LossSums, chunked_logits_loss
from eagle_train.errors import check

_NO_REGRESSION = "it does not learn the target's hidden states"


@dataclass
class LogitsConfig(DraftConfig):
    """`decay`: the weight of a pass relative to the one before. `loss`: the cross-entropy from the target's
    distribution (soft), that of its most likely token (hard), or a loss that turns to the acceptance rate (lk,
    losses.py), all among the tokens that the draft proposes."""

    may_differ: ClassVar[tuple[str, ...]] = (*DraftConfig.may_differ, "decay", "loss")
    unread: ClassVar[Mapping[str, str]] = {
        "l1_weight": _NO_REGRESSION,
        "l1_weight_end": _NO_REGRESSION,
        "ce_weight": "the loss on logits is all that it learns",
        "logits_loss": "give draft.loss=soft, hard or lk",
    }

    num_layers: int = 1
    first_token: str = "skip"  # skip | self_fusion: no slot, as serving engines have it, or its own states
    decay: float = 0.8  # weight of a pass relative to the one before
    loss: str = "soft"  # soft | hard | lk: the target's distribution, its most likely token, or the acceptance rate

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.decay <= 1, f"draft.decay={self.decay}: must be above 0 and at most 1")
        self.check_choice("loss", *LEARNT_LOGITS)

    @property
    def idle(self) -> Mapping[str, str]:
        return {} if self.passes(1) > 1 else {"decay": "it learns from one pass"}

    def loss_bytes(self, itemsize: int) -> int:
        return 3 * itemsize  # rows of both models, picked, and a gradient

    @property
    def on_logits(self) -> str:
        """`loss` by the name that losses.py has for it."""
        return LEARNT_LOGITS[self.loss]

    def weights(self, passes: int) -> list[float]:
        """Of the passes' losses in their mean."""
        each = [self.decay**step for step in range(passes)]
        return [weight / sum(each) for weight in each]


@dataclass
class StepsConfig(LogitsConfig):
    """See `LogitsConfig`. `steps`: passes that it learns from, each after the first on the draft's own states of the
    pass before."""

    may_differ: ClassVar[tuple[str, ...]] = (*LogitsConfig.may_differ, "steps")
    unread: ClassVar[Mapping[str, str]] = {**LogitsConfig.unread, "unroll": "give draft.steps"}
    # What its layers have no choice in.
    norms: ClassVar[str] = "full"
    ffn: ClassVar[str] = "dense"
    num_experts: ClassVar[int] = 1
    qkv_bias: ClassVar[bool] = False
    o_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    steps: int = 7  # passes it learns from, each after the first on its own states

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.steps >= 1, f"draft.steps={self.steps}: must be at least 1")

    def passes(self, unroll: int) -> int:
        return self.steps


class LogitsDraft(Draft):
    """A draft whose config is a `LogitsConfig`."""

    config: LogitsConfig

    def fitted(self, shape: DraftConfig) -> Any:
        assert isinstance(shape, LogitsConfig)
        draft = super().fitted(shape)
        learnt = [name for name in shape.may_differ if name not in DraftConfig.may_differ]
        draft.config = replace(draft.config, **{name: getattr(shape, name) for name in learnt})
        return draft

    def losses(
        self,
        states: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        head: Head,
        lesson: Lesson,
        scale: float,
    ) -> LossSums:
        """`LogitsConfig.loss` on logits of the target's LM head, the mean over the passes weighted by `decay`."""
        wanted, total, sums = hidden.flatten(0, 1), [], []
        for state, own, weight in zip(states, slots, self.config.weights(len(states)), strict=True):
            rows = self.read(state).flatten(0, 1).index_select(0, own)
            of_target, kind = wanted.index_select(0, own), self.config.on_logits
            loss, *others = chunked_logits_loss(rows, of_target, head.lm_head, kind, run_parallel=lesson.run_parallel)
            total.append(weight * loss)
            sums.append(others)
        ce, agree = sums[0]
        return LossSums(scale * torch.stack(total).sum(), None, ce, agree, len(slots[0]))
