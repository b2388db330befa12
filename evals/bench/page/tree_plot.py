"""A tree of drafts as a picture: its nodes level by level, and how often each is accepted."""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context

from evals.bench.page.canvas import ACCENT, STYLE, blank, finished
from evals.bench.page.svg import PAPER


@rc_context(STYLE)
def tree(parents: Sequence[int], shares: Sequence[float]) -> str:
    """A tree of drafts, level by level, each node with the share of rounds that accept it. `parents`: -1 for the root,
    which comes first."""
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        depth[node] = depth[parent] + 1
    place = _places(parents)
    figure, axes = blank(0.5 + 0.62 * (max(depth) + 1))
    for node, parent in enumerate(parents[1:], 1):
        ends = [place[parent], place[node]], [-depth[parent], -depth[node]]
        axes.plot(*ends, color=ACCENT, linewidth=0.6 + 4 * shares[node], alpha=0.75, zorder=1)
    for node, share in enumerate(shares):
        axes.plot([place[node]], [-depth[node]], "o", color=ACCENT, markersize=4, zorder=2)
        said = "target's token" if node == 0 else f"{100 * share:.0f} %"
        label = axes.annotate(said, (place[node], -depth[node]), (6, 3), textcoords="offset points", fontsize=9)
        label.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.85})  # lines pass behind
    axes.set_axis_off()
    axes.margins(x=0.12, y=0.12)
    return finished(figure, axes, grid=None)


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
