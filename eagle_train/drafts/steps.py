"""What kinds have in common that learn logits alone, in passes of which each is on the draft's own states of the one
before: the settings of that, and layers that are plain Llama's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from eagle_train.drafts.kind import Draft, DraftConfig
from eagle_train.drafts.losses import LEARNT_LOGITS
from eagle_train.errors import check

_NO_REGRESSION = "it does not learn the target's hidden states"


@dataclass
class StepsConfig(DraftConfig):
    """`steps`: passes that it learns from, each after the first on the draft's own states of the pass before; `decay`:
    the weight of a pass relative to the one before. `loss`: the cross-entropy from the target's distribution (soft),
    that of its most likely token (hard), or a loss that turns to the acceptance rate (lk, losses.py), all among the
    tokens that the draft proposes."""

    may_differ: ClassVar[tuple[str, ...]] = (*DraftConfig.may_differ, "steps", "decay", "loss")
    unread: ClassVar[Mapping[str, str]] = {
        "l1_weight": _NO_REGRESSION,
        "l1_weight_end": _NO_REGRESSION,
        "ce_weight": "the loss on logits is all that it learns",
        "logits_loss": "give draft.loss=soft, hard or lk",
        "unroll": "give draft.steps",
    }
    # What its layers have no choice in.
    norms: ClassVar[str] = "full"
    ffn: ClassVar[str] = "dense"
    num_experts: ClassVar[int] = 1
    qkv_bias: ClassVar[bool] = False
    o_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    num_layers: int = 1
    first_token: str = "skip"  # skip | self_fusion: no slot, as serving engines have it, or its own states
    steps: int = 7  # passes it learns from, each after the first on its own states
    decay: float = 0.8  # weight of a pass relative to the one before
    loss: str = "soft"  # soft | hard | lk: the target's distribution, its most likely token, or the acceptance rate

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.steps >= 1, f"draft.steps={self.steps}: must be at least 1")
        check(0 < self.decay <= 1, f"draft.decay={self.decay}: must be above 0 and at most 1")
        self.check_choice("loss", *LEARNT_LOGITS)

    def passes(self, unroll: int) -> int:
        return self.steps

    @property
    def on_logits(self) -> str:
        """`loss` by the name that losses.py has for it."""
        return LEARNT_LOGITS[self.loss]

    def weights(self, passes: int) -> list[float]:
        """Of the passes' losses in their mean."""
        each = [self.decay**step for step in range(passes)]
        return [weight / sum(each) for weight in each]


class StepsDraft(Draft):
    """A draft whose config is a `StepsConfig`."""

    config: StepsConfig

    def fitted(self, shape: DraftConfig) -> Any:
        assert isinstance(shape, StepsConfig)
        draft = self.with_first_token(shape.first_token)
        draft.config = replace(draft.config, steps=shape.steps, decay=shape.decay, loss=shape.loss)
        return draft
