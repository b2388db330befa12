"""Blocks of training: the loss curves of a run, what a step costs, and drafts that were trained otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.bench.page import plots
from evals.bench.page.blocks import Block, Facts, Plot, Table
from evals.bench.page.decoding_blocks import acceptance, along_context
from evals.bench.page.gather import Source
from evals.bench.page.shown import spread
from evals.bench.statistics import interval_of
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
        first = [(n, one["tpc"][trees[0]]["tpc"], interval_of(one["tpc"][trees[0]])) for n, one in variants.items()]
        drawn = plots.intervals(first, f"TPC, {trees[0]}", 1)
        said = f"TPC of each variant with {trees[0]}, with 95 % intervals, {title}."
        blocks.append(Plot(f"TPC, {title}", said, drawn, numbers))
        blocks += _gains(part, source.config["study"]["reference"], title)
        depths = next(iter(variants.values()))["acceptance_per_depth"]
        deepest = max(trees, key=lambda tree: len(depths[tree]))
        blocks.append(
            acceptance({f"{n}, {deepest}": one["acceptance_per_depth"][deepest] for n, one in variants.items()})
        )
        along = {name: one.get("by_context", {}).get(trees[0], []) for name, one in variants.items()}
        blocks += along_context(along, f"{trees[0]}, {title}")
    blocks += _by_steps(source)
    speedups = source.found["speedups"]
    if speedups:
        trees = list(next(iter(speedups.values())))
        rows = [[n, *(_speedup(by[t]) for t in trees)] for n, by in speedups.items()]
        values = [[None if by[t] is None else by[t]["speedup"] for t in trees] for by in speedups.values()]
        numbers = Table("Speed-up over plain decoding (95 %)", ["variant", *trees], rows)
        drawn = plots.heat(list(speedups), trees, values, "tree")
        blocks.append(Plot("Speed-up by variant and tree", "Speed-up over plain decoding.", drawn, numbers))
    return blocks


def _gains(part: Mapping[str, Any], reference: str, title: str) -> list[Block]:
    """TPC above the reference's, and above the first tree's, paired by question; nothing without another one."""
    variants, blocks = part["variants"], list[Block]()
    trees = list(variants[reference]["tpc"])
    others = [name for name in variants if name != reference]
    if others:
        rows = [[name, *(_tpc(variants[name]["gain"][tree], signed=True) for tree in trees)] for name in others]
        blocks.append(Table(f"TPC above {reference}, the same questions (95 %), {title}", ["variant", *trees], rows))
    if len(trees) > 1:
        own = {name: one["gain_over_first_tree"] for name, one in variants.items()}
        rows = [[name, *(_tpc(one[tree], signed=True) for tree in trees[1:])] for name, one in own.items()]
        said = f"TPC above {trees[0]}, the same drafts and questions (95 %), {title}"
        blocks.append(Table(said, ["variant", *trees[1:]], rows))
    return blocks


def _by_steps(source: Source) -> list[Block]:
    """TPC by the length of training, a plot for each way to be equal and tree; nothing for one length."""
    parts, blocks = source.found["parts"], list[Block]()
    for equal in dict.fromkeys(part["equal"] for part in parts):
        own = [part for part in parts if part["equal"] == equal]
        if len(own) < 2:
            continue
        names = list(own[0]["variants"])
        for tree in own[0]["variants"][names[0]]["tpc"]:
            found = {name: [(part["steps"], part["variants"][name]["tpc"][tree]) for part in own] for name in names}
            rows = [[name, *(_tpc(each) for _, each in points)] for name, points in found.items()]
            said = f"TPC with {tree} by steps of the reference, equal {equal}"
            numbers = Table(f"{said} (95 %)", ["variant", *(f"{part['steps']:,}" for part in own)], rows)
            lines = {name: [(float(at), each["tpc"]) for at, each in points] for name, points in found.items()}
            drawn = plots.lines(lines, "steps of the reference", f"TPC, {tree}", log=True)
            blocks.append(Plot(said, f"{said}. {_ranges(lines)}.", drawn, numbers))
    return blocks


def _ranges(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    return "; ".join(f"{name}: {points[0][1]:.2f} to {points[-1][1]:.2f}" for name, points in lines.items())


def _speedup(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else spread(found["speedup"], found["interval"])


def _tpc(found: Mapping[str, float], signed: bool = False) -> str:
    return ("+" if signed and found["tpc"] >= 0 else "") + spread(found["tpc"], interval_of(found))
