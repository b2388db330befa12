"""Draws README's picture from the published results: python docs/figure.py. Knows nothing of engines or models."""

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "evals/results/latency.json"
PICTURE = ROOT / "docs/figures/speedup.svg"
WAYS = {
    "transformers": "transformers",
    "transformers, prompt lookup": "transformers,\nprompt lookup",
    "plain": "eagle_train,\nwithout a draft",
    "chain3": "eagle_train,\nchain of 3",
}
GREY, GREEN = "#9aa5b1", "#2f855a"
# Text stays text, and the same results give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "eagle_train", "font.family": "sans-serif", "font.size": 10}


def main() -> None:
    with rc_context(STYLE):
        PICTURE.parent.mkdir(exist_ok=True)
        drawn(json.loads(RESULTS.read_text("utf-8"))).savefig(PICTURE, metadata={"Date": None})


def drawn(results: dict[str, Any]) -> Figure:
    """The figure of a results.json of evals.latency: tokens per second beside acceptance by depth."""
    rows = {row["decoding"]: row for row in results["rows"] if row["batch_size"] == 1}
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(left, {label: rows[way]["tokens_per_s"] for way, label in WAYS.items()}, "{:.0f}")
    left.set_title("tokens per second, batch size 1")
    depths = {f"depth {depth}": 100 * share for depth, share in enumerate(rows["chain3"]["acceptance_per_depth"], 1)}
    _bars(right, depths, "{:.0f} %")
    right.set_title(f"accepted drafts, TPC {rows['chain3']['tpc']:.2f}")
    made = results["provenance"]
    about = f"bundled target, {made['cores']} cores of an {made['cpu']}, temperature 0"
    figure.supxlabel(f"{about}; {RESULTS.relative_to(ROOT)}", fontsize=8, color="#555555")
    return figure


def _bars(axes: Axes, values: dict[str, float], shown: str) -> None:
    """Horizontal bars from top to bottom, each with its value; ours with a draft is the last and the green one."""
    highlighted = [GREEN if "chain" in name or "depth" in name else GREY for name in values]
    bars = axes.barh(list(values), list(values.values()), color=highlighted, height=0.65)
    axes.bar_label(bars, [shown.format(value) for value in values.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


if __name__ == "__main__":
    main()
