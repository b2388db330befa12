"""A training step's plan beside what was measured of it. Knows nothing of how either came about."""

from typing import Any

from eagle_train.training.cost.measured import StepPlan, beside


def beside_the_plan(found: dict[str, Any], plan: StepPlan, device: str) -> dict[str, Any]:
    """Rows as of `eagle_train.training.cost.measured.beside`: the plan's parts of our step, and its memory."""
    parts = found["parts_s"]
    draft = parts["  draft, forward"] + parts["  draft, backward"]
    stages = {
        "target": parts["target"],
        "loss": parts["draft and loss"] - draft,
        "draft": draft,
        "optimiser": parts["optimiser"],
    }
    key = "device_ms" if device == "cuda" else "host_ms"
    timed = {"device": device, "undisturbed_ms": 1e3 * found["ours"]["step_s"]}
    by_stage = {name: {key: 1e3 * seconds} for name, seconds in stages.items()}
    return beside(plan, {**timed, "stages": by_stage}, {"step": found["ours"]["peak_memory"]})
