"""What every plot begins and ends with: an empty figure in the page's style, and its SVG.

Drawn by matplotlib, which the project has anyway, and not by a library of interactive plots: Plotly's script alone has
4 MB, and a table with the same numbers stands beside each plot. Colours are CSS variables of the page.
"""

from collections.abc import Sequence
from io import StringIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evals.bench.page.svg import COLOR, RULE, in_page

SERIES = 6  # colours of the page; further series have the same ones with other marks
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "eagle_train", "font.size": 10}
STYLE |= {"text.parse_math": False}  # names of results are no formulas, and may have dollar signs
INCHES = 5.2  # wide: texts of 10 points are as large as the page's on a phone
LONGEST = 48  # characters of a name in a plot: beside longer ones the axes have no room
SIDE_BY_SIDE = 30  # of two names in a line of the legend
ACCENT = COLOR.format(1)


def color(place: int) -> str:
    """Of the series at this place, from 0."""
    return COLOR.format(place % SERIES + 1)


def short(name: str) -> str:
    """A name as plots have it: its beginning and its end, if it is long. The table beside a plot has the whole."""
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[:half]}…{name[1 - half :]}"


def blank(height: float, legend: Sequence[str] = ()) -> tuple[Figure, Axes]:
    """An empty figure of this height in inches. `legend`: the names that stand above, if there are several."""
    lines = -(-len(legend) // _columns(legend)) if len(legend) > 1 else 0
    figure = Figure(figsize=(INCHES, height + 0.2 * lines), layout="constrained")
    return figure, figure.subplots()


def _columns(legend: Sequence[str]) -> int:
    """How many names stand in a line of the legend: two where both fit."""
    return 2 if max(map(len, map(short, legend)), default=0) <= SIDE_BY_SIDE else 1


def finished(figure: Figure, axes: Axes, legend: Sequence[str] = (), grid: Any = "y") -> str:
    """The figure as an SVG element in the page's colours. `legend`: as of `blank`."""
    if grid:
        axes.grid(axis=grid, color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(legend) > 1:  # outside the axes, so that no line crosses it
        figure.legend(frameon=False, loc="outside upper left", fontsize=9, ncols=_columns(legend))
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return in_page(out.getvalue())
