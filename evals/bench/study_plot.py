"""An experiment as a picture: TPC by the length of training, or by variant. Knows nothing of engines or models."""

from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eagle_train.results import write_bytes
from evals.bench.report import Found, literal
from evals.bench.statistics import interval_of

COLORS = 10  # of a plot


def plot(found: Found, path: Path) -> None:
    """TPC by the reference's steps, or by variant where there is one number of steps, as a PNG: a row of panels for
    each way to be equal and a panel for each tree."""
    study = found["config"]["study"]
    trees, equals = list(study["trees"]), list(study["equal"])
    size = (1 + 3.2 * len(trees), 0.9 + 2.9 * len(equals))
    figure, picture = Figure(figsize=size, layout="constrained"), BytesIO()
    panels = figure.subplots(len(equals), len(trees), squeeze=False, sharex=True, sharey="col")
    for row, equal in enumerate(equals):
        parts = [part for part in found["parts"] if part["equal"] == equal]
        for axes, tree in zip(panels[row], trees, strict=True):
            _panel(axes, parts, tree)
            axes.set_title(literal(tree if len(equals) == 1 else f"{tree}, equal {equal}"), fontsize="medium")
        panels[row][0].set_ylabel("tokens per call")
    if len(study["steps"]) > 1:
        for axes in panels[-1]:
            axes.set_xlabel("steps of the reference")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside upper left", fontsize="small", ncols=6)
    figure.savefig(picture, dpi=150, format="png")
    write_bytes(path, picture.getvalue())


def _panel(axes: Any, parts: list[Found], tree: str) -> None:
    names = list(dict.fromkeys(name for part in parts for name in part["variants"]))
    for place, name in enumerate(names):
        points = [(part["steps"], part["variants"][name]["tpc"][tree]) for part in parts if name in part["variants"]]
        steps, values = zip(*points, strict=True)
        spreads = [interval_of(each) or (each["tpc"], each["tpc"]) for each in values]
        below = [each["tpc"] - low for each, (low, _) in zip(values, spreads, strict=True)]
        above = [high - each["tpc"] for each, (_, high) in zip(values, spreads, strict=True)]
        at = steps if len(parts) > 1 else [place]
        look: dict[str, Any] = {"fmt": "o-", "markersize": 4, "capsize": 2, "color": f"C{place % COLORS}"}
        axes.errorbar(at, [each["tpc"] for each in values], yerr=[below, above], label=literal(name), **look)
    if len(parts) > 1:
        axes.set_xscale("log")
        axes.set_xticks(sorted({part["steps"] for part in parts}), labels=[f"{part['steps']}" for part in parts])
    else:
        axes.set_xticks(range(len(names)), labels=[literal(name) for name in names], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
