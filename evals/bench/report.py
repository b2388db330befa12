"""How results are written and shown: files, tables of Markdown, texts of numbers, pictures.

Knows nothing of engines or models.
"""

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eagle_train.artifacts import markdown as md
from eagle_train.artifacts.markdown import code, plain
from eagle_train.errors import typed
from eagle_train.inference.requests.sampling_keys import changed
from eagle_train.results import write_bytes, write_json, write_text

Found = Mapping[str, Any]
"""What an evaluation writes to results.json."""

TERMS = (
    "TPC: tokens committed in decoding, by calls of the target. TTFT: time to the first token. TTIT: time between one "
    "token and the next; tokens of one round come together, so that p50 may be far below the mean."
)


BY_DEPTH = "accepted to depth 1, 2, ..., of rounds that draft so deep"
_TRUNCATION = ("top_p", "top_k", "min_p")  # change nothing at temperature 0
LOOPING = 0.1  # of the answers; beyond it there is a warning


def loops(found: Found) -> list[str]:
    """A sentence where many answers end in a loop, by `looping_answers` of a result or of its rows; else none."""
    shares = [each["looping_answers"] for each in (found, *found.get("rows", [])) if "looping_answers" in each]
    if not shares or max(shares) <= LOOPING:
        return []
    most = "up to " if min(shares) < max(shares) else ""
    return [
        f"Warning: {most}{percent(max(shares))} of the answers end in a loop, the same tokens again and again. Loops "
        "are easy to draft, so TPC and speed-ups say nothing of text without them."
    ]


def beyond_calls(found: Found) -> list[str]:
    """A sentence where a speed-up of single prompts exceeds tokens per call, though no more than noise explains; else
    none."""
    timed = [(each.get("decoding", each.get("tree")), each) for each in (found, *found.get("rows", []))]
    alone = [(of, each) for of, each in timed if each.get("batch_size") == 1 and each.get("acceptance_per_depth")]
    by_variant = found.get("speedups") or {}
    alone += [(f"{name}, {tree}", each) for name, trees in by_variant.items() for tree, each in trees.items() if each]
    known = [(of, each) for of, each in alone if None not in (each["speedup"], each["tpc"])]
    names = [of for of, each in known if each["speedup"] > each["tpc"] and each.get("arrivals") != "poisson"]
    if not names:
        return []
    said = "Caution: more than tokens per call, which no draft can bring, is the speed-up of"
    return [f"{said} {', '.join(dict.fromkeys(names))}. It is noise: ask more questions on a quieter machine."]


def asked_again(found: Found) -> list[str]:
    """A sentence where rows have more answers than different prompts; else none."""
    rows = [row for row in found.get("rows", []) if "distinct_prompts" in row]
    counts = [(row["distinct_prompts"], row.get("answers", row.get("on_prompts"))) for row in rows]
    again = [pair for pair in counts if pair[0] < pair[1]]
    if not again:
        return []
    prompts, answers = min(again, key=lambda pair: pair[0] / pair[1])
    return [
        f"Caution: prompts were asked more than once, most often where {answers} answers are to {prompts} different "
        "ones. Intervals count each answer as one to another prompt, so they are too narrow, and drafters that "
        "remember answers gain."
    ]


def warnings(found: Found) -> list[str]:
    """What a reader must know first: the sentences of `loops`, `beyond_calls` and `asked_again`."""
    return [*loops(found), *beyond_calls(found), *asked_again(found)]


def write_report(out: Path, found: Found, report: str) -> None:
    """report.md, with the `warnings` below its title, and results.json, each whole or not there."""
    title, rest = report.split("\n\n", 1)
    write_text(out / "report.md", "\n\n".join([title, *warnings(found), rest]))
    write_json(out / "results.json", found)


def document(sections: Mapping[str, str]) -> str:
    """Markdown: each title with its text; the first title is the document's."""
    parts = [f"{'##' if place else '#'} {title}\n\n{text}" for place, (title, text) in enumerate(sections.items())]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    return md.table(header, rows, rule="---:")


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits; an empty text for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def depths(shares: Sequence[float], none: str = "nothing drafted") -> str:
    """Acceptance by depth, under `BY_DEPTH`. `none`: what is said where nothing was drafted."""
    return " ".join(number(share) for share in shares) or none


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """A number, with its interval in brackets where there is one: `2.31 (2.25 to 2.38)`."""
    return number(value) + ("" if interval is None else f" ({' to '.join(number(end) for end in interval)})")


def contexts(rows: Sequence[Found]) -> str:
    """A table of `contexts.by_context`'s buckets; of one bucket, which other tables tell already, a sentence."""
    if len(rows) == 1:
        return f"All {rows[0]['rounds']:,} rounds have contexts of {rows[0]['from']:,} to {rows[0]['to']:,} tokens."
    cells = [
        [
            f"{row['from']:,} to {row['to']:,}",
            f"{row['questions']:,}",
            f"{row['rounds']:,}",
            with_interval(row["tpc"], row["tpc_interval"]),
            depths(row["acceptance_per_depth"]),
        ]
        for row in rows
    ]
    return table(["context, tokens", "questions", "rounds", "TPC (95 %)", BY_DEPTH], cells)


def contexts_beside(series: Mapping[str, Sequence[Found]]) -> str:
    """Buckets of `contexts.by_context` of several decodings of the same questions: a row for each, a column for each
    bucket, with acceptance at depth 1 and TPC; of one bucket, which other tables tell already, a sentence."""
    ends = sorted({(row["from"], row["to"]) for rows in series.values() for row in rows})
    if len(ends) < 2:
        return "".join(f"All rounds have contexts of {first:,} to {last:,} tokens." for first, last in ends)
    cells = []
    for name, rows in series.items():
        of = {row["to"]: row for row in rows}
        cells.append([plain(name), *(_bucket(of[last]) if last in of else "" for _, last in ends)])
    header = ["by context, tokens", *(f"{first:,} to {last:,}" for first, last in ends)]
    note = "Acceptance at depth 1, of the rounds that draft; and TPC, with its 95 % interval."
    return f"{table(header, cells)}\n\n{note}"


def _bucket(row: Found) -> str:
    first = [percent(share) for share in row["acceptance_per_depth"][:1]] or ["no draft"]
    return f"{first[0]}; TPC {with_interval(row['tpc'], row['tpc_interval'])}"


def of_suite(suite: Found) -> str:
    """What a suite is and what it was asked with, for a report."""
    thinking = {None: "not given", True: "on", False: "off"}[suite["thinking"]]
    of = "" if suite.get("size") is None else f" ({several(suite['size'], 'question')} published)"
    parts = [f"Suite {suite['title']}{of}", f"read from {code(suite['place'])}", f"thinking {thinking}"]
    parts.append("no template" if suite["template"] is None else f"template {code(suite['template'])}")
    parts.append(f"licence {plain(suite['licence'] or 'not stated')}")
    return "; ".join(parts) + "."


def percent(value: float | None) -> str:
    """A share in percent; an empty text for None."""
    return "" if value is None else f"{100 * value:.1f} %"


def change(value: float, digits: int = 1) -> str:
    """A relative difference in percent, with its sign; zero has none."""
    text = f"{100 * value:+.{digits}f}"
    return f"{text[1:] if float(text) == 0 else text} %"


def first_of(left_out: Sequence[str]) -> str:
    """The first reason why rows are left out, and how many more there are; an empty text for none."""
    more = f"; so for {len(left_out) - 1} more, which report.md names" if len(left_out) > 1 else ""
    return "".join(left_out[:1]) + more


def several(count: int, of: str, ending: str = "s") -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count:,} {of}" + ("" if count == 1 else ending)


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.2f} ms"


def subject(found: Found) -> str:
    """Target, dtype, device, draft, and the drafter unless it is EAGLE's, for the first line of a report."""
    path, drafter = found["config"]["draft"]["path"], found["config"].get("drafter")
    parts = [f"Target {code(found['target'])}, {found['dtype']} on {found['device']}"]
    parts += [] if drafter is None or found["drafter"] == "eagle" else [f"drafter {options(drafter)}"]
    return "; ".join(parts if path is None else [*parts, f"draft {code(path)}"])


def options(drafter: Found) -> str:
    """A drafter and its options."""
    said = ", ".join(f"{key}={typed(value)}" for key, value in drafter.items() if key != "_target_")
    return code(str(drafter.get("_target_", drafter.get("file")))) + (f" ({said})" if said else "")


def sampling(config: Found) -> str:
    """Temperature, top-p, top-k, other keys of sampling that were given, and the kind of drafts, for a report."""
    others = changed(config, "temperature", *_TRUNCATION)
    said = [f"{name.replace('_', ' ')} {value}" for name, value in others.items()]
    if config["temperature"] == 0:
        return ", ".join(["temperature 0", *said, *([lossy(config)] if config.get("relaxed_topk") else [])])
    parts = [f"temperature {config['temperature']:g}", f"top-p {config['top_p']:g}"]
    parts += [f"top-k {config['top_k']}"] if config["top_k"] > 0 else []
    parts += [f"min-p {config['min_p']:g}"] if config.get("min_p") else []
    parts += said
    drafting = config.get("engine", {}).get("drafting", "greedy")
    return ", ".join(parts if drafting == "greedy" else [*parts, f"{drafting.replace('_', ' ')} drafts"])


def sampled(config: Found) -> dict[str, Any]:
    """The keys of sampling beside the temperature that are not at their defaults, and change something at it."""
    return changed(config, "temperature", *(_TRUNCATION if config["temperature"] == 0 else ()))


def lossy(config: Found) -> str:
    """What relaxed acceptance was asked for, for a report whose answers need not be the target's own."""
    topk, delta = config["relaxed_topk"], config["relaxed_delta"]
    where = " while it thinks" if config["relaxed_thinking"] else ""
    return f"LOSSY: relaxed acceptance{where} (top-k {topk}, delta {delta:g})"


def marked(title: str, found: Found) -> str:
    """A report's title, which says so where answers need not be the target's own."""
    return f"LOSSY: {title}" if found.get("lossy") else title


def decoding(row: Found) -> str:
    """What a row of a table is of, marked where its answers need not be the target's own."""
    return row["decoding"] + (" (LOSSY)" if row.get("lossy") else "")


def made_on(found: Found) -> str:
    """A table of versions and hardware."""
    rows = {**found["provenance"], "seed": found["config"].get("seed")}
    if found.get("ranks", 1) > 1:
        rows["ranks that hold the target together"] = found["ranks"]
    rows["load_average"] = " ".join(map(str, rows["load_average"]))
    said = [[name.replace("_", " "), plain(str(value))] for name, value in rows.items() if value is not None]
    return md.table(["", ""], said)


def plot_acceptance(found: Found, path: Path) -> None:
    """Acceptance by depth as a PNG, whole or not there."""
    figure, picture = figure_of(found["acceptance_per_depth"], found["acceptance_after_depth_before"]), BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_bytes(path, picture.getvalue())


def literal(name: str) -> str:
    """A name for matplotlib, which reads what stands between two dollar signs as a formula."""
    return name.replace("$", r"\$")


def figure_of(shares: Sequence[float], given: Sequence[float | None] | None) -> Figure:
    """Acceptance by depth, of all rounds and, where `given` has it, of those that accepted the depth before."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    depths = range(1, len(shares) + 1)
    usual: dict[str, Any] = {}
    hollow: dict[str, Any] = {
        "markersize": 9,
        "markerfacecolor": "none",
    }  # around the other's mark where both are the same
    given = given if len(shares) > 1 else None  # before depth 1 there is no other
    for values, style, look, name in (
        (shares, "o-", usual, "of rounds that draft to this depth"),
        (given or [], "s--", hollow, "of rounds that accepted the depth before"),
    ):
        heights = [float("nan") if value is None else value for value in values]
        if heights:
            axes.plot(depths, heights, style, label=name, clip_on=False, **look)
    axes.set(xlabel="depth in the tree", ylabel="share accepted", ylim=(0, 1), xlim=(0.7, len(shares) + 0.3))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # Outside the axes, one name a line: no curve crosses it, and it is at most as wide as the picture.
    figure.legend(frameon=False, loc="outside upper left", fontsize="small", ncols=1)
    return figure
