"""Plots of the report, as SVG for a page in any colour scheme."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from evals.bench.page.canvas import ACCENT, SERIES, STYLE, blank, color, finished, short
from evals.bench.page.svg import INK, RULE

LINES = ("-", "--", "-.", ":")
FEW_POINTS = 40  # of a line: each has a mark
MARKS = ("o", "s", "^", "D", "v", "P")
Points = Sequence[tuple[float, float]]


@rc_context(STYLE)
def lines(series: Mapping[str, Points], xlabel: str, ylabel: str, *, percent: bool = False, log: bool = False) -> str:
    """A line for each series of points; `log`: the x axis is logarithmic, `percent`: the y axis is of shares."""
    figure, axes = blank(3.3, list(series))
    for place, (name, points) in enumerate(series.items()):
        few = {"marker": MARKS[place % len(MARKS)], "markersize": 4}
        look: dict[str, Any] = few if len(points) <= FEW_POINTS else {"linewidth": 1.2}
        x, y = zip(*points, strict=True)
        axes.plot(
            x, y, LINES[place // SERIES % len(LINES)], color=color(place), label=short(name), clip_on=False, **look
        )
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
    return finished(figure, axes, list(series))


@rc_context(STYLE)
def marked(points: Sequence[tuple[str, float, float]], line: Points, xlabel: str, ylabel: str) -> str:
    """A mark for each named point (name, x, y), no two alike up to 36, and a line through some places (x, y)."""
    names = [name for name, *_ in points]
    figure, axes = blank(3.6, names)
    if len(line) > 1:
        axes.plot(*zip(*line, strict=True), color=INK, linewidth=1, linestyle=":", zorder=1)
    for place, (name, x, y) in enumerate(points):
        turn = place // SERIES  # of the colours; each has another mark for the same colour
        look: dict[str, Any] = {"markersize": 7, "markerfacecolor": "none" if turn % 2 else color(place)}
        axes.plot([x], [y], MARKS[(place + turn) % len(MARKS)], color=color(place), label=short(name), **look)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.margins(0.12)
    return finished(figure, axes, names)


@rc_context(STYLE)
def intervals(
    rows: Sequence[tuple[str, float, Sequence[float] | None]],
    xlabel: str,
    at: float,
    expected: Sequence[float | None] = (),
) -> str:
    """A row for each name, value and interval, with a line at `at`, where nothing is gained or lost. `expected`: a
    cross for each row that has one."""
    crosses = [(x, place) for place, x in enumerate(expected) if x is not None]
    names = ["measured", "expected"] if crosses else []
    figure, axes = blank(0.75 + 0.3 * len(rows), names)
    axes.axvline(at, color=INK, linewidth=1, linestyle=":")
    for place, (_, value, interval) in enumerate(rows):
        low, high = interval or (value, value)
        axes.plot([low, high], [place, place], color=ACCENT, linewidth=2)
        axes.plot([value], [place], "o", color=ACCENT, markersize=5, label="" if place else "measured")
    if crosses:
        axes.plot(*zip(*crosses, strict=True), "x", color=INK, markersize=6, label="expected")
    axes.set_yticks(range(len(rows)), labels=[short(name) for name, *_ in rows])
    axes.set(xlabel=xlabel, ylim=(len(rows) - 0.5, -0.5))
    return finished(figure, axes, names, grid="x")


@rc_context(STYLE)
def stacked(bars: Mapping[str, Mapping[str, float]], xlabel: str) -> str:
    """A horizontal bar for each name, made of its parts in the order given."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    figure, axes = blank(1.0 + 0.34 * len(bars), parts)
    left = [0.0] * len(bars)
    for place, part in enumerate(parts):
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(
            range(len(bars)), widths, left=left, color=color(place), edgecolor=RULE, height=0.62, label=short(part)
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), labels=list(map(short, bars)))
    axes.set(xlabel=xlabel, ylim=(len(bars) - 0.5, -0.5))
    return finished(figure, axes, parts, grid="x")


@rc_context(STYLE)
def heat(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], of: str) -> str:
    """A cell for each value, the darker the larger, with the number in it."""
    figure, axes = blank(0.9 + 0.36 * len(rows))
    known = [value for row in values for value in row if value is not None]
    low, span = min(known), max(max(known) - min(known), 1e-9)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is not None:
                box = (x - 0.5, y - 0.5)
                share = 0.04 + 0.3 * (value - low) / span  # so that the number can be read in both schemes
                axes.add_patch(Rectangle(box, 1, 1, facecolor=ACCENT, alpha=share, linewidth=0))
                axes.text(x, y, f"{value:.2f}", ha="center", va="center")
    axes.set_xticks(range(len(columns)), labels=list(columns))
    axes.set_yticks(range(len(rows)), labels=list(map(short, rows)))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=of)
    return finished(figure, axes, grid=None)
