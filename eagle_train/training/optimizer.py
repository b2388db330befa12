"""Optimisers and the learning rate; the paper's recipe (section 2.2) is the default. Knows nothing of losses."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from eagle_train.errors import check
from eagle_train.training.muon import Muon

NAMES = ("adamw", "muon")


@dataclass
class OptimConfig:
    """The group `optim`.

    `name`: adamw, or muon (Muon for matrices, AdamW for norms and biases, with steps of like size).
    `betas` are AdamW's under either name, `momentum` is Muon's. The learning rate climbs for `warmup_steps`, stays at
    `lr`, and falls linearly to 0 over the last `decay_share` of the run's steps or minutes. `tokens_per_step` counts
    the tokens of an optimiser step, padding included.
    """

    name: str = "adamw"
    lr: float = 2e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.95
    warmup_steps: int = 0
    decay_share: float = 0.0
    max_grad_norm: float = 1.0
    tokens_per_step: int = 2_097_152

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
        """The learning rate of step 1, 2, ..., before which the share `used` of the run was used."""
        share = min(1.0, step / max(1, self.warmup_steps))
        if self.decay_share:
            share = min(share, (1 - used) / self.decay_share)
        return self.lr * share


class Optimizer:
    """torch's optimisers for one model as one: `step`, `zero_grad`; `parts` have the state.

    Muon's products are too small for two of a CPU's cores to share one, so each takes half of the matrices: on the
    bundled target's draft, 32 ms a step where it was 54 on one core and 78 with the products divided.
    """

    def __init__(self, model: nn.Module, config: OptimConfig):
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        adamw = {"lr": config.lr, "betas": config.betas, "fused": True}
        # Norm weights are scales around 1: decay would pull them to 0. Biases are left to themselves, as is usual.
        groups = [{"params": vectors, "weight_decay": 0.0}]
        if config.name == "muon":
            muon = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
            muons = [Muon(share, **muon, adjust_lr_fn="match_rms_adamw") for share in shares(matrices)]
            self.parts, self.beside = [*muons, torch.optim.AdamW(groups, **adamw)], muons[1:]
        else:
            groups.append({"params": matrices, "weight_decay": config.weight_decay})
            self.parts, self.beside = [torch.optim.AdamW(groups, **adamw)], []
        self.helper = ThreadPoolExecutor(max_workers=1)

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
        helped = [self.helper.submit(part.step) for part in self.beside]
        for part in self.parts:
            if part not in self.beside:
                part.step()
        for step in helped:
            step.result()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def shares(matrices: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The matrices in two halves of like work where two cores are to be had, or in one."""
    plain = all(matrix.device.type == "cpu" and not isinstance(matrix, DTensor) for matrix in matrices)
    if not plain or len(matrices) < 2 or torch.get_num_threads() < 2:
        return [matrices]
    ordered = sorted(matrices, key=lambda matrix: matrix.numel() * min(matrix.shape), reverse=True)
    return [ordered[::2], ordered[1::2]]
