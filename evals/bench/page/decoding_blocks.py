"""Tables and plots of rows that tell one decoding each: its TPC, times, acceptance and speed-up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evals.bench.page import plots
from evals.bench.page.blocks import Block, Plot, Table
from evals.bench.page.figures import PLAIN
from evals.bench.page.shown import percents, spread

Row = Mapping[str, Any]
OF_ROUNDS = "Acceptance by depth, of the rounds that draft so deep"
MOST_SERIES = 12  # of a plot; what is beyond stands in the table


def decodings(caption: str, rows: Iterable[Row]) -> Table:
    """A row for each decoding: TPC, speed-up, TTIT, TTFT and tokens/s."""
    header = ["decoding", "TPC", "speed-up", "TTIT, ms", "p50", "p99", "TTFT, ms", "tokens/s"]
    told = [
        [
            row["decoding"] + (" (LOSSY)" if row.get("lossy") else ""),
            spread(row["tpc"], row.get("tpc_interval")),
            spread(row["speedup"], row.get("speedup_interval")),
            *(f"{1e3 * row[key]:.2f}" for key in ("ttit_s", "ttit_p50_s", "ttit_p99_s", "ttft_s")),
            f"{row['tokens_per_s']:,.0f}" if row.get("tokens_per_s") else "",
        ]
        for row in rows
    ]
    return filled(caption, header, told)


def filled(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the columns in which no row has anything."""
    used = [place for place in range(len(header)) if any(row[place] for row in rows)]
    return Table(caption, [header[place] for place in used], [[row[place] for place in used] for row in rows])


def acceptance_of(rows: Iterable[Row]) -> list[Block]:
    """The same of rows that draft; nothing where none does, as with a table that never pays."""
    shares = {row["decoding"]: row["acceptance_per_depth"] for row in rows if drafts(row)}
    return [acceptance(shares)] if shares else []


def drafts(row: Row) -> bool:
    """Whether a row is of a drafter of ours that drafted."""
    return row["decoding"] not in PLAIN and bool(row["acceptance_per_depth"])


def acceptance(shares: Mapping[str, Sequence[float]]) -> Plot:
    """Acceptance by depth, a line for each decoding."""
    deepest = max(map(len, shares.values()))
    rows = [[name, *percents(each), *[""] * (deepest - len(each))] for name, each in shares.items()]
    numbers = Table(f"{OF_ROUNDS}, %", ["decoding", *(str(depth) for depth in range(1, deepest + 1))], rows)
    drawn_of = dict(list(shares.items())[:MOST_SERIES])
    points = {name: list(enumerate(each, 1)) for name, each in drawn_of.items()}
    said = "; ".join(f"{name}: {' '.join(percents(each))} %" for name, each in drawn_of.items())
    said += f"; {len(shares) - MOST_SERIES} more stand in the table" if len(shares) > MOST_SERIES else ""
    drawn = plots.lines(points, "depth in the tree", "share of rounds accepted", percent=True)
    return Plot("Acceptance by depth", f"{OF_ROUNDS}. {said}.", drawn, numbers)


def by_context(rows: Sequence[Row]) -> list[Block]:
    """Acceptance at depth 1 by context, where there are several contexts."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["context_length"] and row["arrivals"] == "together":
            own = found.setdefault(f"{row['decoding']}, batch size {row['batch_size']}", {})
            own[row["context_length"]] = row
    contexts = sorted({context for own in found.values() for context in own})
    if len(contexts) < 2:
        return []
    points = {name: [(float(c), own[c]["acceptance_per_depth"][0]) for c in sorted(own)] for name, own in found.items()}
    told = [
        [name, *(f"{percents(own[c]['acceptance_per_depth'][:1])[0]} % ({own[c]['tpc']:.2f})" if c in own else ""
                 for c in contexts)]
        for name, own in found.items()
    ]  # fmt: skip
    numbers = Table("Acceptance at depth 1, and TPC, by context", ["decoding", *map(str, contexts)], told)
    drawn = plots.lines(points, "context, tokens", "share accepted at depth 1", percent=True, log=True)
    return [
        Plot(
            "Acceptance by context",
            "Of the rounds that draft, the share whose first draft is accepted, by context.",
            drawn,
            numbers,
        )
    ]


def along_context(series: Mapping[str, Sequence[Row]], where: str = "") -> list[Block]:
    """The same of real questions, in buckets of the context of each round; nothing where no series has two of them.

    `series`: rows of `contexts.by_context` by decoding. `where`: what all are of, for titles.
    """
    behind = f", {where}" if where else ""
    series = {name: rows for name, rows in series.items() if any(row["acceptance_per_depth"] for row in rows)}
    if max((len(rows) for rows in series.values()), default=0) < 2:
        return []
    ends = sorted({row["to"] for rows in series.values() for row in rows})
    points = {
        name: [(float(row["to"]), row["acceptance_per_depth"][0]) for row in rows if row["acceptance_per_depth"]]
        for name, rows in series.items()
    }
    told = []
    for name, rows in series.items():
        of = {row["to"]: row for row in rows}
        cells = [_bucket(of[end]) if end in of else "" for end in ends]
        told.append([name, *cells])
    caption = f"Acceptance at depth 1, and TPC (95 %), by context up to{behind}"
    numbers = Table(caption, ["decoding", *map(str, ends)], told)
    drawn = plots.lines(points, "context up to, tokens", "share accepted at depth 1", percent=True, log=True)
    said = "Of the rounds that draft, the share whose first draft is accepted, by the tokens before the round"
    return [Plot(f"Acceptance by context{behind}", f"{said}{behind}.", drawn, numbers)]


def _bucket(row: Row) -> str:
    first = percents(row["acceptance_per_depth"][:1])
    return f"{f'{first[0]} %' if first else 'no draft'}; TPC {spread(row['tpc'], row['tpc_interval'])}"


def tpc_against_ttit(rows: Iterable[Row], where: str) -> Plot:
    """TPC against TTIT: what lies lower is faster, what lies to the right has more tokens a call. The Pareto front is
    what no other decoding exceeds in both."""
    points = [(row["decoding"], row["tpc"], 1e3 * row["ttit_s"]) for row in rows]
    front = {
        name
        for name, tpc, ttit in points
        if not any(more >= tpc and less <= ttit and (more, less) != (tpc, ttit) for _, more, less in points)
    }
    told = [[name, f"{tpc:.2f}", f"{ttit:.2f}", "yes" if name in front else ""] for name, tpc, ttit in points]
    numbers = Table(f"TPC and TTIT, {where}", ["decoding", "TPC", "TTIT, ms", "on the Pareto front"], told)
    fastest = min(points, key=lambda point: point[2])
    said = (
        f"Tokens per call against ms per token, {where}. The lowest TTIT is {fastest[0]}'s, {fastest[2]:.2f} ms. "
        "Dotted: the Pareto front."
    )
    line = sorted({(tpc, ttit) for name, tpc, ttit in points if name in front})
    drawn = plots.marked(points, line, "TPC", "TTIT, ms (lower is faster)")
    return Plot(f"TPC against TTIT, {where}", said, drawn, numbers)


def speedups(rows: Iterable[Row], where: str) -> list[Block]:
    """Speed-ups over plain decoding with their intervals, the largest first, and what was expected of acceptance and
    cost where a row says it; nothing of plain decoding, nor of drafters that drafted nothing."""
    others = [row for row in rows if row["decoding"] != "plain" and (row["decoding"] in PLAIN or drafts(row))]
    own = sorted(others, key=lambda row: -row["speedup"])
    drawn = [(row["decoding"], row["speedup"], row.get("speedup_interval")) for row in own]
    if not drawn:
        return []
    told = [[name, spread(value, interval)] for name, value, interval in drawn]
    numbers = Table(f"Speed-up, {where}", ["decoding", "speed-up (95 %)"], told)
    said = f"Speed-up over plain decoding with 95 % intervals, {where}. The largest is {told[0][0]}'s, {told[0][1]}."
    expected = [row["expected"]["speedup"] if row.get("expected") else None for row in own]
    picture = plots.intervals(drawn, "speed-up over plain decoding", 1, expected)
    return [Plot(f"Speed-up, {where}", said, picture, numbers), *_expectations(own, where)]


def _expectations(rows: Sequence[Row], where: str) -> list[Block]:
    """What the formulas expect of acceptance and cost beside what was measured; nothing where no row says it."""
    own = [row for row in rows if row.get("expected")]
    if not own:
        return []
    header = ["decoding", "alpha", "k", "c"]
    header += [f"{name} {what}" for name in ("TPC", "speed-up") for what in ("expected", "measured")]
    told = []
    for row in own:
        by = row["expected"]
        of_drafts = [f"{by['alpha']:.2f}", f"{by['depth']:.2f}", f"{by['cost_ratio']:.3f}"]
        both = (by["tpc"], row["tpc"], by["speedup"], row["speedup"])
        told.append([row["decoding"], *of_drafts, *(spread(value, None) for value in both)])
    title = f"TPC, expected and measured, {where}"
    said = (
        f"Tokens per call, {where}. Crosses: (1 - alpha^(k+1)) / (1 - alpha), where alpha is acceptance at depth 1 and "
        "k the drafted tokens of a round. The speed-up expected is that divided by 1 + k c, c being a drafted token's "
        "time in calls of the target; it takes a verification to cost as much as one token's call."
    )
    expected = [row["expected"]["tpc"] for row in own]
    drawn = plots.intervals([(row["decoding"], row["tpc"], None) for row in own], "TPC", 1, expected)
    return [Plot(title, said, drawn, Table(title, header, told))]


def speed_map(cells: Mapping[str, Sequence[Row]]) -> list[Block]:
    """Speed-up of each decoding in each cell, where there are several; nothing of plain decoding alone."""
    names = list(dict.fromkeys(row["decoding"] for own in cells.values() for row in own if row["decoding"] != "plain"))
    if not names or len(cells) < 2:
        return []
    values = [
        [next((r["speedup"] for r in own if r["decoding"] == name), None) for own in cells.values()] for name in names
    ]
    told = [[name, *(spread(value, None) for value in row)] for name, row in zip(names, values, strict=True)]
    numbers = Table("Speed-up over plain decoding", ["decoding", *cells], told)
    short = [name.replace("batch size ", "b").replace("context ", "c").replace(", ", "\n") for name in cells]
    drawn = plots.heat(names, short, values, "b: batch size; c: context")
    return [Plot("Speed-up, map", "Speed-up of each decoding at each batch size and context.", drawn, numbers)]


def over_time(rows: Sequence[Row], where: str) -> Plot:
    """TTIT by the time since the first request, where requests arrive at random: figure 1c."""
    window = rows[0]["window_s"]
    ends = [window * (place + 1) for place in range(max(len(row["ttit_over_time_s"]) for row in rows))]
    series, told = {}, []
    for row in rows:
        values = [None if each is None else 1e3 * each for each in row["ttit_over_time_s"]]
        series[row["decoding"]] = [(end, each) for end, each in zip(ends, values, strict=False) if each is not None]
        told.append([row["decoding"], *(spread(each, None) for each in values), *[""] * (len(ends) - len(values))])
    title = f"TTIT over time, {where}"
    numbers = Table(f"{title}, ms, up to", ["decoding", *(f"{end:.1f} s" for end in ends)], told)
    said = "; ".join(f"{name}: at most {max(y for _, y in points):.1f} ms" for name, points in series.items())
    drawn = plots.lines(series, "seconds since the first request", "TTIT, ms")
    return Plot(title, f"Mean time between tokens by the time since the first request. {said}.", drawn, numbers)


def by_stage(bars: Mapping[str, Mapping[str, float]]) -> Plot:
    """Milliseconds of a round by stage."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    told = [[name, *(spread(bar.get(part), None) for part in parts)] for name, bar in bars.items()]
    numbers = Table("Time by stage, ms a round", ["decoding", *parts], told)
    said = "; ".join(f"{name}: {sum(bar.values()):.1f} ms" for name, bar in bars.items())
    drawn = plots.stacked(bars, "ms a round")
    return Plot("Time by stage", f"Milliseconds of a round by stage. Whole rounds: {said}.", drawn, numbers)
