"""Blocks of training: the loss curves of a run, what a step costs, and drafts that were trained otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.bench.page import plots
from evals.bench.page.blocks import Block, Facts, Plot, Table
from evals.bench.page.decoding_blocks import acceptance
from evals.bench.page.gather import Source
from evals.bench.page.shown import spread
from evals.bench.study import part_title

MOST_POINTS = 240  # of a curve: more are not seen, and the page stays small
ROWS = 12  # of a curve's table
CURVES = ("loss", "l1", "ce", "top1_agreement")


def training(source: Source) -> list[Block]:
    """The loss curves of a run, and what it measured on held-out rows."""
    records = source.found["records"]
    known = [name for name in CURVES if any(record.get(name) is not None for record in records)]
    blocks: list[Block] = [curve(records, name) for name in known if name in ("loss", "l1", "ce")]
    heldout = [record for record in records if record.get("heldout_ce") is not None]
    if heldout:
        last = heldout[-1]
        names = [name for name in last if name.startswith("heldout_") and not isinstance(last[name], list)]
        rows = [[f"{record['step']:,}", *(spread(record.get(name), None, 3) for name in names)] for record in heldout]
        header = ["step", *(name.removeprefix("heldout_").replace("_", " ") for name in names)]
        blocks.append(Table("On held-out rows", header, rows))
        if last.get("heldout_acceptance_per_depth"):
            blocks.append(acceptance({"last step, held out": last["heldout_acceptance_per_depth"]}))
    return blocks


def curve(records: Sequence[Mapping[str, Any]], name: str) -> Plot:
    """A metric by step: means of neighbouring steps where there are many, and held-out values beside them."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    group = -(-len(points) // MOST_POINTS)
    means = [_mean(points[start : start + group]) for start in range(0, len(points), group)]
    series = {"training": means}
    heldout = [(float(r["step"]), r[f"heldout_{name}"]) for r in records if r.get(f"heldout_{name}") is not None]
    if heldout:
        series["held out"] = heldout
    some = means[:: -(-len(means) // ROWS)]
    rows = [[f"{step:,.0f}", f"{value:.4f}"] for step, value in dict.fromkeys([*some, means[-1]])]
    numbers = Table(
        f"{_said(name)} by step" + (f", means of {group} steps" if group > 1 else ""), ["step", _said(name)], rows
    )
    said = f"{_said(name)} by step, from {means[0][1]:.3f} to {means[-1][1]:.3f} at step {points[-1][0]:,}."
    return Plot(
        f"{_said(name)[0].upper()}{_said(name)[1:]} by step", said, plots.lines(series, "step", _said(name)), numbers
    )


def _said(name: str) -> str:
    return {"l1": "smooth L1 loss", "ce": "cross-entropy"}.get(name, name)


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    steps, values = zip(*points, strict=True)
    return sum(steps) / len(steps), sum(values) / len(values)


def train_throughput(source: Source) -> list[Block]:
    """A training step against a naive one, and where its time goes."""
    found = source.found
    kinds = {name: found[name] for name in ("ours", "naive") if found.get(name)}
    rows = [
        [name, spread(each["step_s"], None), f"{each['tokens_per_s']:,.0f}", f"{(each['peak_memory'] or 0) / 1e9:.2f}"]
        for name, each in kinds.items()
    ]
    parts = {name.strip(): value for name, value in found["parts_s"].items()}
    told = [[name, f"{value:.4f}"] for name, value in parts.items()]
    whole = {name: value for name, value in parts.items() if "," not in name}  # the others are parts of these
    drawn = plots.stacked({"one step": whole}, "s a step")
    return [
        Table("A training step", ["step", "s", "tokens/s", "peak memory, GB"], rows),
        Plot("Time of a step", "Seconds of a training step by part.", drawn, Table("Parts", ["part", "s"], told)),
        Facts("Against what the products alone take", [
            ("s of the products alone", f"{found['floor_s']:.3f}"),
            ("step over it", f"{found['step_over_floor']:.2f}"),
            ("MFU", "" if found["mfu"] is None else f"{100 * found['mfu']:.1f} %"),
        ], folded=False),
    ]  # fmt: skip


def experiments(source: Source) -> list[Block]:
    """Drafts that were trained otherwise: TPC by variant and tree, the gain over the reference, speed-ups."""
    blocks: list[Block] = []
    for part in source.found["parts"]:
        title, variants = part_title(part), part["variants"]
        trees = list(next(iter(variants.values()))["tpc"])
        rows = [[name, *(_tpc(one["tpc"][tree]) for tree in trees)] for name, one in variants.items()]
        numbers = Table(f"TPC (95 %), {title}", ["variant", *trees], rows)
        first = [(n, one["tpc"][trees[0]]["tpc"], _ends(one["tpc"][trees[0]])) for n, one in variants.items()]
        drawn = plots.intervals(first, f"TPC, {trees[0]}", 1)
        said = f"TPC of each variant with {trees[0]}, with 95 % intervals, {title}."
        blocks.append(Plot(f"TPC, {title}", said, drawn, numbers))
        depths = next(iter(variants.values()))["acceptance_per_depth"]
        deepest = max(trees, key=lambda tree: len(depths[tree]))
        blocks.append(
            acceptance({f"{n}, {deepest}": one["acceptance_per_depth"][deepest] for n, one in variants.items()})
        )
    speedups = source.found["speedups"]
    if speedups:
        trees = list(next(iter(speedups.values())))
        rows = [[n, *(spread(by[t]["speedup"], by[t]["interval"]) for t in trees)] for n, by in speedups.items()]
        values = [[by[tree]["speedup"] for tree in trees] for by in speedups.values()]
        numbers = Table("Speed-up over plain decoding (95 %)", ["variant", *trees], rows)
        drawn = plots.heat(list(speedups), trees, values, "tree")
        blocks.append(Plot("Speed-up by variant and tree", "Speed-up over plain decoding.", drawn, numbers))
    return blocks


def _tpc(found: Mapping[str, float]) -> str:
    return spread(found["tpc"], _ends(found))


def _ends(found: Mapping[str, float]) -> tuple[float, float]:
    return found["low"], found["high"]
