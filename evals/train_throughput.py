"""What a training step costs: its parts, its tokens per second, its memory; against its floor, a naive step and the
plan of it (`eagle-train plan=true`).

The floor is the step's own matrix products, replayed with nothing between them. The naive step trains the same draft on
the same documents in the simplest way. Each of the two has its own process, and they take turns. The target's weights
are random: time and memory do not depend on them. Knows nothing of inference.

    python -m evals.train_throughput vocab=32000 hidden=512 rounds=5
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig

from eagle_train.drafts import EagleConfig, EagleDraft
from eagle_train.hardware import resolve_device
from eagle_train.results import in_words, prepared_file, write_json
from eagle_train.settings import build
from eagle_train.training.cost import measured
from eagle_train.training.cost.flops import flops_of
from eagle_train.training.cost.target_shape import TargetShape
from evals.bench.evaluation import evaluation_alone, origin
from evals.bench.statistics import median_ratio
from evals.bench.training_plan import beside_the_plan
from evals.bench.training_steps import StepConfig, llama, work, write_documents
from evals.bench.worker import Worker

KINDS = ("ours", "naive")


@evaluation_alone("train_throughput")
def main(values: DictConfig) -> None:
    config = build(StepConfig, values, "")
    resolve_device(config.device)
    out = prepared_file(config.out)
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder) / "documents.jsonl", config)
        found = compared(config, folder)
    found |= {"device": resolve_device(config.device), "config": asdict(config), **origin()}
    write_json(out, found)
    print(text(found))
    print(f"written to {config.out}")


def compared(config: StepConfig, folder: str) -> dict[str, Any]:
    """Both steps' figures; the steps run in turn."""
    device = resolve_device(config.device)
    kinds = KINDS if config.naive else KINDS[:1]
    workers = {kind: Worker(work, kind, config, folder, device) for kind in kinds}
    rounds: dict[str, list[dict]] = {kind: [] for kind in kinds}
    floors: list[list[float]] = []
    for number in range(config.rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            rounds[kind].append(workers[kind].ask("steps"))
        floors += [workers["ours"].ask("floor") for _ in range(config.steps)]
    plan = workers["ours"].ask("plan")
    for worker in workers.values():
        worker.close()
    found = figures(config, rounds, floors)
    return found | {"plan": beside_the_plan(found, plan, device)}


def figures(config: StepConfig, rounds: dict[str, list[dict]], floors: list[list[float]]) -> dict[str, Any]:
    """Medians of the rounds, and the ratios that count. Seconds, bytes.

    The floor is the faster of its two ways; each has as many runs as there are steps.
    Memory is that of the first round: later the floor's operands are held too. The share of the
    device's FLOP/s leaves out attention, whose cost depends on the documents.
    """
    found: dict[str, Any] = {}
    for kind, results in rounds.items():
        found[kind] = {
            "step_s": median(second for one in results for second in one["seconds"]),
            "tokens_per_s": median(one["tokens"] / sum(one["seconds"]) for one in results),
            "peak_memory": results[0]["memory"],
        }
    ours = rounds["ours"]
    parts = {part: median(one["parts"][part] for one in ours) / config.steps for part in ours[0]["parts"]}
    shape = llama(config)
    draft = EagleConfig.from_target(shape, num_layers=config.draft_layers)
    with torch.device("meta"):
        flops = flops_of(TargetShape.of(shape), draft, EagleDraft(draft), 0, recomputed=False)
    rate = found["ours"]["tokens_per_s"] * sum(flops.values()) / 1e12
    floor = min(median(way) for way in zip(*floors, strict=True))
    return found | {
        "parts_s": parts,
        "data_wait": median(one["parts"]["waiting for data"] / sum(one["seconds"]) for one in ours),
        "floor_s": floor,
        "step_over_floor": found["ours"]["step_s"] / floor,
        "tflops_per_s": rate,
        "mfu": rate / config.tflops if config.tflops else None,
        **against_naive(found, rounds),
    }


def against_naive(found: dict[str, Any], rounds: dict[str, list[dict]]) -> dict[str, Any]:
    """What we take of the naive step's time and memory; null where it was left out."""
    if "naive" not in rounds:
        return {"faster_than_naive": None, "memory_of_naive": None}
    speeds = ([one["tokens"] / sum(one["seconds"]) for one in each] for each in (rounds["ours"], rounds["naive"]))
    memory = found["ours"]["peak_memory"] / found["naive"]["peak_memory"]
    return {"faster_than_naive": median_ratio(*speeds), "memory_of_naive": memory}


def text(found: dict[str, Any]) -> str:
    """For the terminal."""
    lines = []
    for kind in (kind for kind in KINDS if kind in found):
        one = found[kind]
        speed, memory = one["tokens_per_s"], in_words(one["peak_memory"])
        lines.append(f"{kind:<6}{one['step_s'] * 1e3:8.0f} ms a step {speed:9,.0f} tokens/s {memory:>12} at most")
    speed, memory = found["faster_than_naive"], found["memory_of_naive"]
    if speed is not None:
        lines.append(f"ours has {speed:.2f} times the tokens/s (without padding), and takes {memory:.0%} of the memory")
    beside = "the target in parallel with the rest" if found["device"] == "cpu" else "one after the other"
    lines.append(f"of our step, {beside}:")
    lines += [f"  {part:<18}{seconds * 1e3:8.1f} ms" for part, seconds in found["parts_s"].items()]
    lines.append(measured.text(found["plan"], side_by_side=found["device"] == "cpu"))
    lines.append(
        f"the step takes {found['step_over_floor']:.2f} times its products alone ({found['floor_s'] * 1e3:.0f} ms); it "
        f"waited for data {found['data_wait']:.1%} of the time"
    )
    if found["mfu"] is not None:
        lines.append(f"{found['tflops_per_s']:.1f} TFLOP/s, {found['mfu']:.0%} of the device's")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
