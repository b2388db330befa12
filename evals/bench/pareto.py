"""The picture of a comparison: what each drafter costs in memory, how much faster it decodes, and what was expected.

Knows nothing of engines or models.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eagle_train.results import write_bytes
from evals.bench.comparison_report import expected_speedups, own_rows, speedups
from evals.bench.report import literal

LEAST = 1e-3  # MB: what takes less stands here, as a logarithm has no zero
MOST_PANELS = 3
COLORS, MARKERS = 10, ("o", "s", "D", "^")  # with more drafters than colors, the next marker
EXPECTED: dict[str, Any] = {"marker": "x", "linestyle": "", "markersize": 7, "zorder": 3}

Point = tuple[str, float, float, float, float]
"""A drafter's name, memory in MB, and speed-up: mean, least and most over the tasks."""


def plot_pareto(found: Mapping[str, Any], path: Path) -> None:
    """Speed-up by memory, a panel for each of the first batch sizes, as a PNG that is whole or not there."""
    sizes = list(dict.fromkeys(row["batch_size"] for row in found["rows"]))[:MOST_PANELS]
    figure, picture = Figure(figsize=(1 + 4.6 * len(sizes), 4.2), layout="constrained"), BytesIO()
    panels = figure.subplots(1, len(sizes), squeeze=False, sharex=True, sharey=True)[0]
    drawn = [points(found, size) for size in sizes]
    colors = {each["name"]: f"C{place % COLORS}" for place, each in enumerate(found["drafters"])}
    hollow = {each["name"]: "white" for each in found["drafters"] if each["is_prepared"]}
    fills = colors | hollow
    markers = {name: MARKERS[place // COLORS % len(MARKERS)] for place, name in enumerate(colors)}
    memory = [max(x, LEAST) for panel in drawn for _, x, *_ in panel] or [LEAST]
    panels[0].set_xscale("log")  # before anything is drawn: a single point alone has no limits
    panels[0].set_xlim(10 ** (floor(log10(min(memory))) - 0.2), 10 ** (ceil(log10(max(memory))) + 0.2))
    for axes, panel, size in zip(panels, drawn, sizes, strict=True):
        _draw(axes, panel, colors, fills, markers)
        for name, y in expected_speedups(found, size).items():
            x = next(memory for drawn_name, memory, *_ in panel if drawn_name == name)
            axes.plot([max(x, LEAST)], [y], color=colors[name], **EXPECTED)
        axes.set_title(f"batch size {size}", fontsize="medium")
        axes.set_xlabel("memory of the drafter, MB")
    names = []
    for name, marker in markers.items():
        look: dict[str, Any] = {"color": colors[name], "markerfacecolor": fills[name], "marker": marker}
        names.append(Line2D([], [], linestyle="", label=literal(name), **look))
    names.append(Line2D([], [], color="0.4", label="expected of acceptance and cost", **EXPECTED))
    figure.legend(handles=names, frameon=False, loc="outside upper left", fontsize="small", ncols=3 * len(sizes))
    panels[0].set_ylabel("speed-up over plain decoding")
    figure.savefig(picture, dpi=150, format="png")
    write_bytes(path, picture.getvalue())


def points(found: Mapping[str, Any], batch_size: int) -> list[Point]:
    """A point for each drafter at a batch size, by memory."""
    memory = {row["decoding"]: row["memory"]["bytes"] / 1e6 for row in own_rows(found, batch_size)}
    means = speedups(found, batch_size)
    return sorted(((name, memory[name], *means[name]) for name in means), key=lambda point: (point[1], -point[2]))


def front(points: Sequence[Point]) -> list[Point]:
    """Of points by memory, those that are faster than all with as little memory or less."""
    found: list[Point] = []
    for point in points:
        if not found or point[2] > found[-1][2]:
            found.append(point)
    return found


def _draw(
    axes: Axes,
    points: Sequence[Point],
    colors: Mapping[str, str],
    fills: Mapping[str, str],
    markers: Mapping[str, str],
) -> None:
    best = front(points)
    axes.axhline(1, color="0.6", linewidth=1, linestyle=":")
    steps = [max(x, LEAST) for _, x, *_ in best], [y for _, _, y, *_ in best]
    axes.plot(*steps, color="0.75", linewidth=1, zorder=1, drawstyle="steps-post")
    for name, x, y, least, most in points:
        bars = [[max(0.0, y - least)], [max(0.0, most - y)]]  # a mean of one value may be beyond it by rounding
        look: dict[str, Any] = {"color": colors[name], "markerfacecolor": fills[name], "fmt": markers[name]}
        axes.errorbar([max(x, LEAST)], [y], yerr=bars, capsize=2, **look)
    axes.margins(y=0.15)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
