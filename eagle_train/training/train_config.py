"""The settings of a training run: the group `train`. Knows nothing of the loop that reads them. DESIGN section 3.10."""

from dataclasses import dataclass
from typing import ClassVar

from eagle_train.drafts.losses import LOGITS_LOSSES
from eagle_train.errors import check
from eagle_train.training.optimizer import OptimConfig

TARGET_QUANTS = ("none", "fp8")
OF_TARGET = "target"  # a value of init_from


@dataclass
class TrainConfig:
    """The group `train`. Raises UserError for values that cannot be.

    One of `steps` and `minutes` gives the length of the run; minutes count training only, not measurements on held-out
    data and saving, and a resumed run has what is left of them. `save_every` and `eval_every` are in steps, 0 for the
    end only. A step that saves measures too: the best checkpoint is kept by its own held-out score.

    Beyond the paper: `l1_weight` goes linearly to `l1_weight_end` by the last step; None leaves it. `logits_loss`: ce,
    or lk (losses.py). `unroll`: the number of passes that the draft learns from, each after the first on the draft's
    own features of the pass before (HASS, arXiv 2408.15766); the loss is their mean. `feature_noise`: uniform noise of
    at most this size, added to each number of the hidden states that the draft is fed (EAGLE, arXiv 2401.15077).

    `target_quant`: fp8 lets the layers of the frozen target multiply in FP8, weights (a scale for each output) and
    activations (one for each token); its hidden states then differ a little from those of the target that is served.
    An option of training alone.

    `init_from`: the artifact of a draft for the same target, whose weights the first step starts from, or `target`:
    what the target's own checkpoint holds of such a draft, as an MTP module; None for fresh ones. A resumed run
    continues from its own checkpoint.

    A step is skipped if its gradient is not finite, or longer than `runaway` times the median of the recent ones
    (runaway.py; inf: no length is too much); more than `max_skipped` such steps end the run.
    """

    unbounded: ClassVar[tuple[str, ...]] = ("runaway",)

    steps: int | None = None  # optimiser steps; null where minutes are given
    minutes: float | None = None  # of training: the schedule follows the share used, and a resumed run has what is left
    init_from: str | None = None  # weights to start from: a directory of eagle-export, or target: its own; null: fresh
    target_quant: str = "none"  # none | fp8: products of the frozen target's layers, for GPUs from Ada and Hopper on
    micro_batch_rows: int = 8  # packed rows that a process computes at once
    l1_weight: float = 1.0  # of the smooth-L1 on hidden states
    l1_weight_end: float | None = None  # l1_weight in the last step, reached linearly; null: the same
    ce_weight: float = 0.1  # of the loss on logits
    logits_loss: str = "ce"  # ce | lk: cross-entropy, or a loss that turns to the acceptance rate as that grows
    unroll: int = 1  # passes the draft learns from, each after the first on its own features
    feature_noise: float = 0.0  # the most that is added to, or taken from, each number of the draft's hidden inputs
    save_every: int = 500  # steps between checkpoints; 0: at the end only
    keep: int = 3  # checkpoints, beside the best; 0: all
    resume: bool = True  # continue from the newest checkpoint in `out`, if there is one
    eval_every: int = 500  # steps between measurements on held-out data; 0: at the end only
    eval_batches: int = 8  # micro-batches of a measurement
    eval_depth: int = 3  # of the simulated chains
    runaway: float = 100.0  # a gradient so many times longer than usual is not followed, nor one that is not finite
    max_skipped: int = 20  # more such steps end the run

    def __post_init__(self) -> None:
        both = f"train.steps={self.steps} and train.minutes={self.minutes}"
        check((self.steps is None) != (self.minutes is None), f"{both}: give one of them, and the other as null")
        check(self.steps is None or self.steps >= 1, f"train.steps={self.steps}: must be at least 1")
        check(self.minutes is None or self.minutes > 0, f"train.minutes={self.minutes}: must be above 0")
        for field in ("micro_batch_rows", "unroll", "eval_batches", "eval_depth"):
            check(getattr(self, field) >= 1, f"train.{field}={getattr(self, field)}: must be at least 1")
        for field in ("l1_weight", "ce_weight", "save_every", "keep", "eval_every", "max_skipped", "feature_noise"):
            check(getattr(self, field) >= 0, f"train.{field}={getattr(self, field)}: must be 0 or more")
        end = self.l1_weight_end
        check(end is None or end >= 0, f"train.l1_weight_end={end}: must be null, 0 or more")
        kinds = " or ".join(LOGITS_LOSSES)
        check(self.logits_loss in LOGITS_LOSSES, f"train.logits_loss={self.logits_loss}: must be {kinds}")
        weights = f"train.l1_weight={self.l1_weight}, train.ce_weight={self.ce_weight}"
        check(max(self.l1_weight, self.ce_weight, end or 0) > 0, f"{weights}: nothing is learnt; one must be above 0")
        used = self.ce_weight > 0 or self.logits_loss == TrainConfig.logits_loss
        check(used, f"train.logits_loss={self.logits_loss}: has no weight, train.ce_weight={self.ce_weight}; give one")
        quants = " or ".join(TARGET_QUANTS)
        check(self.target_quant in TARGET_QUANTS, f"train.target_quant={self.target_quant}: must be {quants}")
        check(self.runaway > 1, f"train.runaway={self.runaway}: must be above 1")

    @property
    def length(self) -> str:
        """The setting that gives the run's length, for messages."""
        return f"train.minutes={self.minutes:g}" if self.steps is None else f"train.steps={self.steps}"

    def l1_weight_at(self, progress: float) -> float:
        """The weight of smooth-L1 at a progress from 0 (the first step) to 1 (the last step)."""
        end = self.l1_weight if self.l1_weight_end is None else self.l1_weight_end
        return self.l1_weight + (end - self.l1_weight) * progress


def rows_of_run(optim: OptimConfig, train: TrainConfig, row_tokens: int) -> int | None:
    """Packed rows of all ranks that a run reads in its steps; None where it has minutes."""
    return None if train.steps is None else train.steps * optim.tokens_per_step // row_tokens


def accumulation(optim: OptimConfig, train: TrainConfig, row_tokens: int, ranks: int = 1) -> int:
    """Micro-batches of one rank in an optimiser step. Raises UserError where no whole number will do."""
    micro = train.micro_batch_rows * row_tokens * ranks
    count, rest = divmod(optim.tokens_per_step, micro)
    on_ranks = f" * {ranks} processes" if ranks > 1 else ""
    check(
        rest == 0 and count > 0,
        f"optim.tokens_per_step={optim.tokens_per_step}: must be a multiple of train.micro_batch_rows * "
        f"data.row_tokens{on_ranks} = {micro}; {max(count, 1) * micro} would do",
    )
    return count
