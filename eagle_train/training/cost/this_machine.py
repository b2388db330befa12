"""How long a run takes on the machine at hand, from the measured speed of its matrix products. Runs no model."""

from collections.abc import Mapping

import torch

from eagle_train.drafts import DraftConfig
from eagle_train.hardware import cpu_name, low_precision, measured_speed
from eagle_train.results import time_in_words
from eagle_train.training import muon
from eagle_train.training.optimizer import OptimConfig, by_muon
from eagle_train.training.train_config import TrainConfig

# The share of the measured speed that a step reaches, whatever else it does included: measured on the quickstart's
# steps of 0.45 s on an AMD EPYC with AVX2, two cores, 147 GFLOP/s. Less where products are faster and the rest is not.
_REACH = 0.8


def part_flops(
    flops: Mapping[str, float], draft: DraftConfig, optim: OptimConfig, dtype: torch.dtype, ranks: int = 1
) -> dict[str, float]:
    """FLOPs of a rank's optimiser step by part: `flops` for each of its tokens, and the optimiser's, which are Muon's;
    AdamW has no products."""
    parts = {part: each * optim.tokens_per_step / ranks for part, each in flops.items()}
    parts["optimiser"] = 0.0
    if optim.name == "muon":
        with torch.device("meta"):
            matrices = [parameter.shape for parameter in by_muon(draft.module()) if parameter.ndim == 2]
        parts["optimiser"] += sum(muon.flops(shape, wide=dtype == torch.float32) for shape in matrices)
    return parts


def step_flops(flops: float, draft: DraftConfig, optim: OptimConfig, dtype: torch.dtype) -> float:
    """FLOPs of an optimiser step: `flops` for each of its tokens, and Muon's own."""
    return sum(part_flops({"all": flops}, draft, optim, dtype).values())


def part_seconds(
    flops: Mapping[str, float], draft: DraftConfig, optim: OptimConfig, device: str, ranks: int = 1
) -> dict[str, float]:
    """Seconds of a rank's optimiser step on this machine by part, one after the other, as `part_flops` counts them; the
    sum is the step of `steps_here`. Measures for half a second."""
    dtype = low_precision(device)
    reached = _REACH * measured_speed(device, dtype)
    return {part: each / reached for part, each in part_flops(flops, draft, optim, dtype, ranks).items()}


def steps_here(train: TrainConfig, flops: float, draft: DraftConfig, optim: OptimConfig, device: str) -> str:
    """One line: how long a step takes on this machine, and how many steps the run's minutes are, or how long its steps
    take. Measures for half a second.
    """
    dtype = low_precision(device)
    speed = measured_speed(device, dtype)
    seconds = step_flops(flops, draft, optim, dtype) / (_REACH * speed)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
    if train.steps is not None:
        run = f"{time_in_words(train.steps * seconds)} for train.steps={train.steps}"
    else:
        assert train.minutes is not None  # one of them is given
        run = f"{max(1, round(60 * train.minutes / seconds)):,} steps in train.minutes={train.minutes:g}"
    return (
        f"on this machine ({name}; {speed / 1e9:,.0f} GFLOP/s in {str(dtype).removeprefix('torch.')}): about "
        f"{seconds:{',.0f' if seconds >= 10 else '.2g'}} s a step, {run}"
    )
