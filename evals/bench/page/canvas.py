"""What every plot begins and ends with: an empty figure in the page's style, and its SVG.

Drawn by matplotlib, which the project has anyway, and not by a library of interactive plots: Plotly's script alone has
4 MB, and a table with the same numbers stands beside each plot. Colours are CSS variables of the page.
"""

from io import StringIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evals.bench.page.svg import COLOR, RULE, in_page

SERIES = 6  # colours of the page; further series have the same ones with other marks
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "eagle_train", "font.size": 10}
STYLE |= {"text.parse_math": False}  # names of results are no formulas, and may have dollar signs
INCHES = 5.2  # wide: texts of 10 points are as large as the page's on a phone
ACCENT = COLOR.format(1)


def color(place: int) -> str:
    """Of the series at this place, from 0."""
    return COLOR.format(place % SERIES + 1)


def blank(height: float, legend: int = 0) -> tuple[Figure, Axes]:
    """An empty figure of this height in inches. `legend`: how many names stand above, two in a line."""
    figure = Figure(figsize=(INCHES, height + 0.2 * -(-(legend if legend > 1 else 0) // 2)), layout="constrained")
    return figure, figure.subplots()


def finished(figure: Figure, axes: Axes, names: int, grid: Any = "y") -> str:
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
