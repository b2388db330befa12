"""Blocks of the remaining evaluations: trees, switches, quantised drafts, the doctor, and any other result."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from evals.bench.page import plots, tree_plot
from evals.bench.page.blocks import Block, Facts, Notes, Plot, Table
from evals.bench.page.decoding_blocks import along_context, tpc_against_ttit
from evals.bench.page.gather import Source
from evals.bench.page.shown import overrides, spread
from evals.bench.trees import unpaid

_DECIMAL = re.compile(r"-?\d+\.\d+(e[+-]\d+)?")
MOST_NODES = 16  # of a tree that is drawn: more texts do not fit
MOST_FACTS = 60  # of a result that no function here knows
ABOUT_IT = ("config", "provenance", "evaluation", "date")  # keys of every result


def tune_trees(source: Source) -> list[Block]:
    """Which tree pays at which batch size, all that were tried, and trees with their acceptance."""
    found = source.found
    table = [[str(r["batch_size"]), r["tree"], f"{r['tpc']:.2f}", f"{r['speedup']:.2f}"] for r in found["table"]]
    said = unpaid(found["table"])
    blocks: list[Block] = [Notes("What pays", said)] if said else []
    blocks.append(Table("The table", ["batch size", "tree", "TPC", "speed-up"], table))
    trees = {each["name"]: each for each in found["trees"] if each["name"] != "plain"}
    sizes = list(found["round_s"])
    values = [
        [each["tpc"] * found["round_s"][size]["plain"] / found["round_s"][size][name] for size in sizes]
        for name, each in trees.items()
    ]
    rows = [
        [name, str(len(each["parents"]) - 1), f"{each['tpc']:.2f}", *(f"{value:.2f}" for value in row)]
        for (name, each), row in zip(trees.items(), values, strict=True)
    ]
    numbers = Table("Speed-up of each tree", ["tree", "nodes", "TPC", *(f"batch size {size}" for size in sizes)], rows)
    drawn = plots.heat(list(trees), sizes, values, "batch size")
    blocks.append(Plot("Speed-up by tree and batch size", "Speed-up over plain decoding of each tree.", drawn, numbers))
    least, by_tree = next(iter(found["round_s"].items()))
    timed = [{"decoding": n, "tpc": each["tpc"], "ttit_s": by_tree[n] / each["tpc"]} for n, each in trees.items()]
    blocks.append(tpc_against_ttit(timed, f"batch size {least}, expected"))
    branching = [name for name, each in trees.items() if len(set(each["parents"])) < len(each["parents"])]
    drawable = [name for name in branching if len(trees[name]["parents"]) <= MOST_NODES + 1]
    best = [row["tree"] for row in found["table"] if row["tree"] in trees][:1]
    largest = sorted(drawable, key=lambda name: trees[name]["tpc"])[-1:]
    blocks += along_context({row["tree"]: trees[row["tree"]].get("by_context", []) for row in found["table"]
                             if row["tree"] in trees})  # fmt: skip
    return [
        *blocks,
        *(tree(name, trees[name]["parents"], found["acceptance"]) for name in dict.fromkeys(best + largest)),
    ]


def tree(name: str, parents: list[int], acceptance: list[list[float]]) -> Plot:
    """A tree with the share of rounds in which each node is accepted: the product of the shares on its path.

    `acceptance[d][r]`: of nodes at depth d that were accepted, the share whose child of rank r is too.
    """
    depth, shares, children, path = [0], [1.0], [0] * len(parents), ["root"]
    for node, parent in enumerate(parents[1:], 1):
        rank = children[parent]
        children[parent] += 1
        depth.append(depth[parent] + 1)
        shares.append(shares[parent] * acceptance[depth[parent]][rank])
        path.append(str(rank + 1) if parent == 0 else f"{path[parent]}.{rank + 1}")
        assert len(shares) == node + 1
    rows = [[path[node], str(depth[node]), f"{100 * shares[node]:.1f}"] for node in range(1, len(parents))]
    numbers = Table("Nodes, by the rank of each choice on the path", ["node", "depth", "accepted, % of rounds"], rows)
    said = f"The tree {name}: {len(parents) - 1} nodes. Thick lines are accepted often."
    return Plot(f"The tree {name}", said, tree_plot.tree(parents, shares), numbers)


def switches(source: Source) -> list[Block]:
    """Each optimisation off and on, and the placebo, whose two sides are the same."""
    blocks: list[Block] = []
    rows = source.found["rows"]
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        drawn, told = [], []
        for row in (row for row in rows if row["batch_size"] == size):
            key = row["figure"]
            value, interval = row[f"{key}_speedup"], row[f"{key}_speedup_interval"]
            drawn.append((f"{row['switch'].replace('_', ' ')} ({key})", value, interval))
            tpc = [spread(row[f"{side}_tpc"], None) for side in ("off", "on")]
            told.append([row["switch"], row["load"], key.upper(), *tpc, spread(value, interval)])
        header = ["optimisation", "load", "figure", "TPC off", "TPC on", "times shorter (95 %)"]
        numbers = Table(f"Each off and on, batch size {size}", header, told)
        said = "How many times shorter a time is with each optimisation; the placebo shows the noise."
        picture = plots.intervals(drawn, "times shorter with it", 1)
        blocks.append(Plot(f"What each optimisation is worth, batch size {size}", said, picture, numbers))
    return blocks


def quantisation(source: Source) -> list[Block]:
    """A draft as it is and quantised."""
    rows = [
        [name, spread(r["tpc"], r.get("tpc_interval"), 3), _change(r), f"{r['draft_latency_ms']:.2f}",
         spread(r["relative_draft_latency"], r.get("relative_draft_latency_interval")),
         f"{r['feed_forward_bytes'] / 1e6:.2f}"]
        for name, r in source.found["schemes"].items()
    ]  # fmt: skip
    header = ["weights", "TPC (95 %)", "change (95 %)", "drafting, ms", "relative (95 %)", "feed-forward, MB"]
    along = {name: row.get("by_context", []) for name, row in source.found["schemes"].items()}
    return [Table("Quantised drafts", header, rows), *along_context(along)]


def _change(row: Mapping[str, Any]) -> str:
    interval = row.get("tpc_change_interval")
    told = "" if interval is None else f" ({' to '.join(f'{100 * end:+.2f}' for end in interval)})"
    return f"{100 * row['tpc_change']:+.2f} %{told}"


def gating(source: Source) -> list[Block]:
    """The gate and tree=auto against fixed choices."""
    rows = [
        [f"batch size {row['batch_size']}, {row['load']}"]
        + [f"{spread(row[n]['share'], row[n]['interval'], 3)} of {row[n]['best']}" for n in ("gate", "auto")]
        for row in source.found["rows"]
    ]
    return [Table("Tokens/s over the best fixed choice's", ["good drafts", "gate", "auto"], rows)]


def doctor(source: Source) -> list[Block]:
    """What the doctor found: a verdict, each problem with what was measured and the remedy, what was not checked, and
    the figures."""
    found = source.found
    rows = [[str(each[key]) for key in ("cause", "measured", "remedy")] for each in found["problems"]]
    blocks: list[Block] = [Notes("Verdict", [found["verdict"]])]
    if rows:
        blocks.append(Table("Problems", ["cause", "measured", "remedy"], rows, texts=True))
    if found["not_checked"]:
        left = [[each["check"], each["reason"]] for each in found["not_checked"]]
        blocks.append(Table("Not checked", ["check", "why not"], left, texts=True))
    return [*blocks, *_facts(found, (*ABOUT_IT, "verdict", "problems", "not_checked", "healthy"), folded=True)]


def any_other(source: Source) -> list[Block]:
    """The numbers of a result that no function knows, by their names."""
    return _facts(source.found, ABOUT_IT, folded=False)


def _facts(found: Mapping[str, Any], known: Collection[str], folded: bool) -> list[Block]:
    """The values of a result whose keys are not `known`."""
    own = {key: value for key, value in found.items() if key not in known}
    facts = [(key, _short(value)) for key, value in overrides(_without_rows(own))]
    told = facts[:MOST_FACTS]
    if len(facts) > len(told):
        told.append(("and more", f"{len(facts) - len(told)} values, in the file"))
    return [Facts("Figures", told, folded)] if told else []


def _without_rows(value: Any) -> Any:
    """Lists of mappings as the number of their rows: they are tables of their own."""
    if isinstance(value, Mapping):
        return {key: _without_rows(each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        return f"{len(value)} rows"
    return value


def _short(text: str) -> str:
    """A number with four digits; any other text as it is."""
    if not _DECIMAL.fullmatch(text):
        return text
    value = float(text)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
