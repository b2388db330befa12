"""Optimisers and the learning-rate schedule. The defaults are the paper's recipe (section 2.2).

Knows nothing of losses.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from eagle_train.errors import check
from eagle_train.training.muon import Muon

NAMES = ("adamw", "muon")


@dataclass
class OptimConfig:
    """The group `optim`. Raises UserError for values that cannot be.

    `name`: adamw, or muon: Muon for matrices and AdamW for norms, biases and an LM head, with updates of similar size.
    `betas` are AdamW's under either name, `momentum` is Muon's. The learning rate rises linearly for `warmup_steps`,
    stays at `lr`, and falls linearly to 0 over the last `decay_share` of the run's steps or minutes. `tokens_per_step`:
    the tokens of an optimiser step over all ranks, padding included.
    """

    unbounded: ClassVar[tuple[str, ...]] = ("max_grad_norm",)

    name: str = "adamw"  # adamw | muon (matrices by Muon, norms by AdamW)
    lr: float = 2e-4  # the learning rate: the highest, between warm-up and decay
    weight_decay: float = 0.1  # of matrices; norms, biases and sinks are not decayed
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    momentum: float = 0.95  # Muon's
    warmup_steps: int = 0  # steps in which the learning rate rises to lr, of a run of minutes too
    decay_share: float = 0.0  # the last share of the run, in which the learning rate falls to 0
    max_grad_norm: float = 1.0  # a longer gradient is scaled to this length; inf: none is
    tokens_per_step: int = 2_097_152  # tokens of an optimiser step over all processes, padding included

    def __post_init__(self) -> None:
        check(self.name in NAMES, f"optim.name={self.name}: must be {' or '.join(NAMES)}")
        for field in ("lr", "max_grad_norm", "tokens_per_step"):
            check(getattr(self, field) > 0, f"optim.{field}={getattr(self, field)}: must be above 0")
        for field in ("weight_decay", "warmup_steps"):
            check(getattr(self, field) >= 0, f"optim.{field}={getattr(self, field)}: must be 0 or more")
        share = self.decay_share
        check(0 <= share <= 1, f"optim.decay_share={share}: must be from 0 to 1, a share of the run")
        sound = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(sound, f"optim.betas={list(self.betas)}: must be two numbers in [0, 1)")
        check(0 <= self.momentum < 1, f"optim.momentum={self.momentum}: must be 0 or more and below 1")

    def lr_at(self, step: int, used: float) -> float:
        """The learning rate of step 1, 2, ..., before which the share `used` of the run was used (0 to 1)."""
        share = min(1.0, step / max(1, self.warmup_steps))
        if self.decay_share:
            share = min(share, (1 - used) / self.decay_share)
        return self.lr * share


class Optimizer:
    """The optimisers of one model as one: `step` and `zero_grad`. `parts` are torch's optimisers, which have the state.

    Muon's products are too small to be split over two of a CPU's cores, so each core takes half of the matrices. A step
    on the bundled target's draft takes 32 ms; on one core it takes 54, and with the products split 78.
    """

    def __init__(self, model: nn.Module, config: OptimConfig):
        matrices, inner = [each for each in model.parameters() if each.ndim >= 2], by_muon(model)
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        others = [each for each in matrices if all(each is not one for one in inner)]
        adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "fused": True}
        # Norm weights are scales around 1, which decay would pull to 0. Biases are not decayed either, as is usual.
        groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
        if config.name == "muon":
            muon: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
            muons = [Muon(half, **muon, adjust_lr_fn="match_rms_adamw") for half in _halves(inner)]
            groups += [{"params": others, "weight_decay": config.weight_decay}] if others else []
            self.parts, self._beside = [*muons, torch.optim.AdamW(groups, **adamw)], muons[1:]
        else:
            groups.append({"params": matrices, "weight_decay": config.weight_decay})
            self.parts, self._beside = [torch.optim.AdamW(groups, **adamw)], []
        self._helper = ThreadPoolExecutor(max_workers=1)

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
        helped = [self._helper.submit(part.step) for part in self._beside]
        for part in self.parts:
            if part not in self._beside:
                part.step()
        for step in helped:
            step.result()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def by_muon(model: nn.Module) -> list[nn.Parameter]:
    """The matrices that Muon trains: all but an LM head, whose rows are tokens, each with a gradient of its own
    size."""
    named = model.named_parameters()
    return [parameter for name, parameter in named if parameter.ndim >= 2 and not name.startswith("lm_head.")]


def _halves(matrices: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The matrices in two halves of similar work where there are two CPU threads, else in one list."""
    plain = all(matrix.device.type == "cpu" and not isinstance(matrix, DTensor) for matrix in matrices)
    if not plain or len(matrices) < 2 or torch.get_num_threads() < 2:
        return [matrices]
    ordered = sorted(matrices, key=lambda matrix: matrix.numel() * min(matrix.shape), reverse=True)
    return [ordered[::2], ordered[1::2]]
