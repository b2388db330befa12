"""What rounds took beside the least that they can: a copy of the bytes that they read. For random models of known
shapes. Knows nothing of how rounds were timed."""

from collections.abc import Mapping
from typing import Any

from eagle_train.inference import Dispatcher
from evals.bench.decoding_plan import DecodingPlan
from evals.bench.sweep import PLAIN, SweepConfig


def beside_the_copy_bound(plan: DecodingPlan, config: SweepConfig, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each round that `found`, what evals.latency writes, has the time of: `bound_ms`, `measured_ms`, without
    waits around its stages where it was profiled, and their `ratio`. Rounds of quantised drafts have none, nor those
    of trees whose size is chosen as they decode."""
    plain = {name: Dispatcher(tree) for name, (tree, quant) in config.drafters.items() if quant.scheme == "none"}
    known = {name: trees for name, trees in plain.items() if not trees.auto}
    keys = ("batch_size", "context_length", "decoding")
    alone = {tuple(each[key] for key in keys): each["undisturbed_ms"] for each in found.get("profiles", [])}
    rows = []
    for each in found["breakdown"]:
        size, context, name = cell = tuple(each[key] for key in keys)
        if name == PLAIN:
            reading = plan.validation(size, context)
        elif name in known:
            tree = known[name].dispatch(size).tree
            reading = plan.validation(size, context, tree.num_nodes) + plan.drafting(size, context, tree.max_depth)
        else:
            continue
        bound, measured = 1e3 * reading.seconds(plan.speeds), alone.get(cell, each["round_ms"])
        timed = {"gb": reading.bytes / 1e9, "bound_ms": bound, "measured_ms": measured, "ratio": measured / bound}
        rows.append({**dict(zip(keys, cell, strict=True)), **timed})
    return rows


def text(rows: list[dict[str, Any]], plan: DecodingPlan) -> str:
    """`beside_the_copy_bound` as lines to read."""
    lines = [
        f"a round, beside a copy of what each GPU reads at {plan.cluster.memory_tb_s:.3g} TB/s",
        f"{'batch':>5} {'context':>8}  {'decoding':<14}{'GB':>8}{'bound ms':>10}{'measured ms':>13}{'ratio':>7}",
    ]
    for row in rows:
        times = f"{row['gb']:>8.2f}{row['bound_ms']:>10.2f}{row['measured_ms']:>13.2f}{row['ratio']:>7.2f}"
        lines.append(f"{row['batch_size']:>5} {row['context_length']:>8}  {row['decoding']:<14}{times}")
    return "\n".join(lines)
