"""The plan's estimates beside what was measured: of a step's time and of a GPU's memory, by part.

Knows nothing of how a profile is made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle_train.hardware import device_memory
from eagle_train.models.loading import TargetConfig
from eagle_train.models.target import Target
from eagle_train.results import in_words
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost.estimate import GIB, ClusterConfig, PlannedRun
from eagle_train.training.cost.this_machine import part_seconds
from eagle_train.training.placement import chosen
from eagle_train.training.trainer import Trainer

STAGES = {"target": "target", "LM head, for target and draft": "loss", "draft": "draft", "optimiser": "optimiser"}
"""The plan's parts of a step, with the stages of training that they are."""

_WEIGHTS = "target's weights"
_OURS = "CUDA"  # what the plan reckons with for CUDA itself, which no allocator of torch sees


@dataclass(frozen=True)
class StepPlan:
    """What the plan says of a rank's step on this machine. `seconds`: by stage, one after the other. `memory`: bytes on
    a GPU, by part; {} on a CPU, for which there is no plan. `weights`: bytes of the target that are there."""

    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    weights: int


def step_plan(trainer: Trainer, target: TargetConfig, parallel: ParallelConfig) -> StepPlan:
    """The plan of a run that is ready to begin. `target`, `parallel`: its settings. Measures the machine for half a
    second."""
    device, world, own = trainer.target.device, trainer.world, trainer.target
    memory = device_memory(device)
    cluster = ClusterConfig(memory_gib=memory / GIB) if memory else ClusterConfig()
    row_tokens = trainer.lookahead.stream.config.row_tokens
    hf_config = own.model.config if isinstance(own, Target) else own.config
    shape = (target, hf_config, trainer.draft.config, trainer.config, trainer.optim)
    run = PlannedRun(*shape, cluster, row_tokens, world.size, own.dtype)
    cost = run.cost(chosen(parallel, world.size, world.node, lambda each: memory is None or run.fits(each)))
    seconds = part_seconds(cost.timed_flops(device), trainer.draft.config, trainer.optim, device.type, world.size)
    ends = {each.data_ptr(): each for each in (own.embedding, own.lm_head.weight)}.values()
    there = [*own.model.parameters(), *own.model.buffers()] if isinstance(own, Target) else ends  # codes are buffers
    weights = sum(_local_bytes(tensor) for tensor in there)
    return StepPlan(
        {STAGES[part]: each for part, each in seconds.items()}, cost.memory if memory is not None else {}, weights
    )


def beside(plan: StepPlan, found: Mapping[str, Any], memory: Mapping[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Rows of `part`, `planned`, `measured` and `ratio` (measured by planned; None where nothing was planned).

    `found`: the figures of a profile of training. `seconds`: of a step, a GPU's own time by stage, or on a CPU that of
    the stage's thread; `all` is the whole step without a profiler. `bytes`: on a GPU alone, the most that torch had
    allocated in the profiled steps, by `memory`, the most in each stage.
    """
    key = "device_ms" if found["device"] == "cuda" else "host_ms"
    measured = {part: found["stages"][part][key] / 1e3 for part in plan.seconds}
    rows = [_row(part, plan.seconds[part], measured[part]) for part in plan.seconds]
    rows.append(_row("all", sum(plan.seconds.values()), found["undisturbed_ms"] / 1e3))
    if not memory or not plan.memory:
        return {"seconds": rows, "bytes": []}
    whole, most = sum(plan.memory.values()) - plan.memory[_OURS], max(memory.values())
    return {
        "seconds": rows,
        "bytes": [
            _row(_WEIGHTS, plan.memory[_WEIGHTS], plan.weights),
            _row("all else", whole - plan.memory[_WEIGHTS], most - plan.weights),
            _row("all, without CUDA's own", whole, most),
        ],
    }


def text(rows: Mapping[str, list[dict[str, Any]]], side_by_side: bool) -> str:
    """`beside` as lines to read. `side_by_side`: whether the target ran beside the draft, each on half of the cores."""
    lines = [f"  {'the plan, of a step':<28}{'planned ms':>12}{'measured ms':>12}{'ratio':>12}"]
    lines += [_line(row, lambda seconds: f"{seconds * 1e3:,.2f}") for row in rows["seconds"]]
    if side_by_side:
        lines.append("  the plan is for all cores; target and draft have half of them each at once: 2 is as planned")
    if rows["bytes"]:
        lines.append(f"  {'the plan, memory':<28}{'planned':>12}{'measured':>12}{'ratio':>12}")
        lines += [_line(row, in_words) for row in rows["bytes"]]
    return "\n".join(lines)


def _row(part: str, planned: float, measured: float) -> dict[str, Any]:
    return {"part": part, "planned": planned, "measured": measured, "ratio": measured / planned if planned else None}


def _line(row: Mapping[str, Any], said: Callable[[float], str]) -> str:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:,.2f}"
    planned, measured = (said(row[key]) for key in ("planned", "measured"))
    return f"  {row['part']:<28}{planned if row['ratio'] is not None else 'none':>12}{measured:>12}{ratio:>12}"


def _local_bytes(tensor: torch.Tensor) -> int:
    """Of this rank's part."""
    local = getattr(tensor, "to_local", None)
    return (tensor if local is None else local()).nbytes
