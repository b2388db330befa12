"""Plots of the report, as SVG for a page in any colour scheme.

Drawn by matplotlib, which the project has anyway, and not by a library of interactive plots: Plotly's script alone has
4 MB, and a table with the same numbers stands beside each plot. Colours are CSS variables of the page.
"""

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from evals.bench.page.svg import COLOR, INK, PAPER, RULE, in_page

SERIES = 6  # colours of the page; further series have the same ones with other marks
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "eagle_train", "font.size": 10}
INCHES = 5.2  # wide: texts of 10 points are as large as the page's on a phone
LINES = ("-", "--", "-.", ":")
FEW_POINTS = 40  # of a line: each has a mark
MARKS = ("o", "s", "^", "D", "v", "P")
_ACCENT = COLOR.format(1)
Points = Sequence[tuple[float, float]]


@rc_context(STYLE)
def lines(series: Mapping[str, Points], xlabel: str, ylabel: str, *, percent: bool = False, log: bool = False) -> str:
    """A line for each series of points; `log`: the x axis is logarithmic, `percent`: the y axis is of shares."""
    figure, axes = _figure(3.3, legend=len(series))
    for place, (name, points) in enumerate(series.items()):
        few = {"marker": MARKS[place % len(MARKS)], "markersize": 4}
        look: dict[str, Any] = few if len(points) <= FEW_POINTS else {"linewidth": 1.2}
        x, y = zip(*points, strict=True)
        axes.plot(x, y, LINES[place // SERIES % len(LINES)], color=_color(place), label=name, clip_on=False, **look)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if log:
        ticks = sorted({x for points in series.values() for x, _ in points})
        axes.set_xscale("log")
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    elif all(x == int(x) for points in series.values() for x, _ in points):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    if percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _svg(figure, axes, len(series))


@rc_context(STYLE)
def marked(points: Sequence[tuple[str, float, float]], xlabel: str, ylabel: str) -> str:
    """A mark for each named point (name, x, y), with its name beside it."""
    figure, axes = _figure(3.6, legend=len(points))
    for place, (name, x, y) in enumerate(points):
        look: dict[str, Any] = {"markersize": 7, "markerfacecolor": _color(place) if place < SERIES else "none"}
        axes.plot([x], [y], MARKS[place % len(MARKS)], color=_color(place), label=name, **look)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.margins(0.12)
    return _svg(figure, axes, len(points))


@rc_context(STYLE)
def intervals(rows: Sequence[tuple[str, float, Sequence[float] | None]], xlabel: str, at: float) -> str:
    """A row for each name, value and interval, with a line at `at`, where nothing is gained or lost."""
    figure, axes = _figure(0.75 + 0.3 * len(rows))
    axes.axvline(at, color=INK, linewidth=1, linestyle=":")
    for place, (_, value, interval) in enumerate(rows):
        low, high = interval or (value, value)
        axes.plot([low, high], [place, place], color=_ACCENT, linewidth=2)
        axes.plot([value], [place], "o", color=_ACCENT, markersize=5)
    axes.set_yticks(range(len(rows)), labels=[name for name, *_ in rows])
    axes.set(xlabel=xlabel, ylim=(len(rows) - 0.5, -0.5))
    return _svg(figure, axes, 0, grid="x")


@rc_context(STYLE)
def stacked(bars: Mapping[str, Mapping[str, float]], xlabel: str) -> str:
    """A horizontal bar for each name, made of its parts in the order given."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    figure, axes = _figure(1.0 + 0.34 * len(bars), legend=len(parts))
    left = [0.0] * len(bars)
    for place, part in enumerate(parts):
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(range(len(bars)), widths, left=left, color=_color(place), edgecolor=RULE, height=0.62, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), labels=list(bars))
    axes.set(xlabel=xlabel, ylim=(len(bars) - 0.5, -0.5))
    return _svg(figure, axes, len(parts), grid="x")


@rc_context(STYLE)
def heat(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], of: str) -> str:
    """A cell for each value, the darker the larger, with the number in it."""
    figure, axes = _figure(0.9 + 0.36 * len(rows))
    known = [value for row in values for value in row if value is not None]
    low, span = min(known), max(max(known) - min(known), 1e-9)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is not None:
                box = (x - 0.5, y - 0.5)
                share = 0.04 + 0.3 * (value - low) / span  # so that the number can be read in both schemes
                axes.add_patch(Rectangle(box, 1, 1, facecolor=_ACCENT, alpha=share, linewidth=0))
                axes.text(x, y, f"{value:.2f}", ha="center", va="center")
    axes.set_xticks(range(len(columns)), labels=list(columns))
    axes.set_yticks(range(len(rows)), labels=list(rows))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=of)
    return _svg(figure, axes, 0, grid=None)


@rc_context(STYLE)
def tree(parents: Sequence[int], shares: Sequence[float]) -> str:
    """A tree of drafts, level by level, each node with the share of rounds that accept it. `parents`: -1 for the root,
    which comes first."""
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        depth[node] = depth[parent] + 1
    place = _places(parents)
    figure, axes = _figure(0.5 + 0.62 * (max(depth) + 1))
    for node, parent in enumerate(parents[1:], 1):
        ends = [place[parent], place[node]], [-depth[parent], -depth[node]]
        axes.plot(*ends, color=_ACCENT, linewidth=0.6 + 4 * shares[node], alpha=0.75, zorder=1)
    for node, share in enumerate(shares):
        axes.plot([place[node]], [-depth[node]], "o", color=_ACCENT, markersize=4, zorder=2)
        said = "target's token" if node == 0 else f"{100 * share:.0f} %"
        label = axes.annotate(said, (place[node], -depth[node]), (6, 3), textcoords="offset points", fontsize=9)
        label.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.85})  # lines pass behind
    axes.set_axis_off()
    axes.margins(x=0.12, y=0.12)
    return _svg(figure, axes, 0, grid=None)


def _places(parents: Sequence[int]) -> list[float]:
    """Where each node stands, left to right: leaves side by side, others in the middle of their children."""
    children: dict[int, list[int]] = {node: [] for node in range(len(parents))}
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    place, leaves = [0.0] * len(parents), 0
    for node in _leaves_in_order(children):
        place[node], leaves = float(leaves), leaves + 1
    for node in reversed(range(len(parents))):  # children come behind their parents
        if own := children[node]:
            place[node] = sum(place[child] for child in own) / len(own)
    return place


def _leaves_in_order(children: Mapping[int, Sequence[int]]) -> list[int]:
    found, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        found += [] if children[node] else [node]
        waiting += reversed(children[node])
    return found


def _color(place: int) -> str:
    return COLOR.format(place % SERIES + 1)


def _figure(height: float, legend: int = 0) -> tuple[Figure, Axes]:
    """`legend`: how many names stand above, two in a line."""
    figure = Figure(figsize=(INCHES, height + 0.2 * -(-(legend if legend > 1 else 0) // 2)), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, axes: Axes, names: int, grid: Any = "y") -> str:
    """The figure as an SVG element in the page's colours."""
    if grid:
        axes.grid(axis=grid, color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if names > 1:  # outside the axes, so that no line crosses it
        figure.legend(frameon=False, loc="outside upper left", fontsize=9, ncols=2)
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return in_page(out.getvalue())
