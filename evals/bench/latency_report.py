"""The report on latency: the summary on the terminal and report.md. Knows nothing of engines or models.

`found` is what evals/latency.py writes to results.json.
"""

from collections.abc import Mapping
from typing import Any

from eagle_train.artifacts.markdown import code, plain
from eagle_train.profiling import text
from evals.bench.growth import AXES
from evals.bench.report import (
    TERMS,
    decoding,
    document,
    lossy,
    made_on,
    marked,
    ms,
    number,
    options,
    percent,
    sampling,
    several,
    table,
    warnings,
)

Found = Mapping[str, Any]
COLUMNS = (
    "`threads` of a CPU: the engine chooses them for each product; `transformers` has those that it is fastest "
    "with. `times as fast`: plain decoding's mean TTIT divided by the row's, the median over the batches. "
    "Tokens/s count the prefill; `over plain` and `over transformers` are ratios of tokens/s, medians over the batches."
)
PROFILES = (
    "Of a few rounds that were decoded when all else was measured; each has its trace beside this report, for "
    "chrome://tracing or Perfetto. Times, counts and operators are of one round, gaps of all that were profiled. A "
    "profiler makes the host slower, so a GPU waits longer; without it the kernels take as long, and the round is "
    "timed without. A kernel belongs to the stage that launched it. Operations: operators that are called from Python, "
    "views left out, and with them."
)
NAMES = {"batch_size": "batch", "context_length": "context"}
SHARES = ("drafting", "validation", "sampling", "bookkeeping", "rest")  # of a round, in the order of figure 4b


def summary(found: Found) -> str:
    """For the terminal: a line per row."""
    wide = max(28, *(len(name(row)) + 2 for row in found["rows"]))
    lines = [
        f"{'batch':>5} {'context':>8}  {'decoding':<{wide}}"
        f"{'TPC':>5}{'TTFT':>12}{'TTIT':>11}{'tokens/s':>10}{'plain':>7}"
    ]
    for row in found["rows"]:
        lines.append(
            f"{row['batch_size']:>5} {context(row):>8}  {name(row):<{wide}}{number(row['tpc']):>5}"
            f"{ms(row['ttft_s']):>12}{ms(row['ttit_s']):>11}{row['tokens_per_s']:>10,.1f}{over(row, 'plain'):>7}"
        )
    said = [f"{lossy(found['config'])}: answers may be others than the target's own"] if found["lossy"] else []
    return "\n".join([*lines, outside(found), *said, *warnings(found)])


def outside(found: Found) -> str:
    """The share of a round in which no model computes, as a sentence."""
    return f"{percent(found['outside'])} of a round is spent outside the forwards of target, draft and LM head"


def markdown(found: Found) -> str:
    """report.md."""
    config = found["config"]
    prompts = f"questions of {code(config['questions'])}" if config["questions"] else "random tokens"
    target = found["target"] if config.get("shapes") else code(found["target"])
    setting = (
        f"Target {target}, {found['dtype']} on {found['device']}; {prompts}; {sampling(config)}; answers of up to "
        f"{config['max_tokens']} tokens; {several(config['repeats'], 'batch', 'es')} of each size, in turn. The "
        "title's figure is of the first batch size and context: plain decoding's mean TTIT divided by this one's."
    )
    if found["cells"]["measured"] < found["cells"]["of"]:
        setting += " Of {of} batch sizes and contexts {measured} so far.".format(**found["cells"])
    for path, trees in found["tables"].items():
        setting += f" {code(path)} is {trees}."
    if found["drafter"] != "eagle":
        setting += f" Drafter: {options(config['drafter'])}."
    if config["acceptance"]:
        setting += f" Weights are random, and acceptance is simulated: {config['acceptance']}."
    title = f"{plain(found['tree'])} could not be measured"
    if found["speedup"] is not None:
        title = f"{plain(found['tree'])} is {found['speedup']:.2f} times as fast as plain decoding"
    sections = {marked(title, found): setting}
    together = latencies([row for row in found["rows"] if row["arrivals"] == "together"])
    sections["Batches"] = f"{together}\n\n{TERMS}\n\n{COLUMNS}"
    if config["rate"]:
        title = f"Arrivals at random, {config['rate']:g} a second"
        arriving = [row for row in found["rows"] if row["arrivals"] == "poisson"]
        sections[title] = "\n\n".join([latencies(arriving), *over_time(arriving)])
    if found["growth"]:
        sections["How TTIT grows"] = growing(found)
    sections["Where a round's time goes"] = stages(found)
    if found.get("profiles"):
        sections["Profiles"] = f"```\n{profile_text(found)}\n```\n\n{PROFILES}"
    if found.get("left_out"):
        sections["Left out"] = "\n".join(f"- {plain(said)}" for said in found["left_out"])
    sections["Made on"] = made_on(found)
    return document(sections)


def context(row: Found) -> str:
    """The context length of a row."""
    return "as is" if row["context_length"] is None else str(row["context_length"])


def name(row: Found) -> str:
    """The variant of a row."""
    return decoding(row) + (", arriving" if row["arrivals"] == "poisson" else "")


def over(row: Found, other: str) -> str:
    """How many times as many tokens a second as another variant."""
    return number(row["over"].get(other, 1.0 if row["decoding"] == other else None))


def over_time(rows: list[Found]) -> list[str]:
    """A table for each batch size and context of TTIT by the time since the first request."""
    cells = dict.fromkeys((row["batch_size"], row["context_length"]) for row in rows)
    texts = []
    for cell in cells:
        own = [row for row in rows if (row["batch_size"], row["context_length"]) == cell]
        window, most = own[0]["window_s"], max(len(row["ttit_over_time_s"]) for row in own)
        header = [f"TTIT by time, batch size {cell[0]}, context {context(own[0])}; up to", *(decoding(r) for r in own)]
        lines = [
            [f"{window * (place + 1):.1f} s", *(_at(row["ttit_over_time_s"], place) for row in own)]
            for place in range(most)
        ]
        texts.append(table([plain(each) for each in header], lines))
    return texts


def _at(seconds: list[float | None], place: int) -> str:
    found = seconds[place] if place < len(seconds) else None
    return "" if found is None else ms(found)


def latencies(rows: list[Found]) -> str:
    """The table of latencies."""
    header = ["decoding", "threads", "batch", "context", "TPC", "TTFT", "TTFT p50", "TTFT p99", "TTIT", "TTIT p50"]
    header += ["TTIT p99", "times as fast", "tokens/s", "over plain", "over transformers"]
    header += ["answers that differ from plain's"]
    cells = [
        [
            plain(decoding(row)),
            "own choice" if row["threads"] is None else str(row["threads"]),
            str(row["batch_size"]),
            context(row),
            number(row["tpc"]),
            *(ms(row[f"{key}_{kind}"]) for key in ("ttft", "ttit") for kind in ("s", "p50_s", "p99_s")),
            number(row["speedup_batch_median"]),
            number(row["tokens_per_s"], 1),
            over(row, "plain"),
            over(row, "transformers"),
            "" if row["differing_answers"] is None else f"{row['differing_answers']} of {row['answers']}",
        ]
        for row in rows
    ]
    return table(header, cells)


def growing(found: Found) -> str:
    """The exponents of batch and context."""
    rows = [
        [
            plain(each["decoding"]),
            f"{NAMES[each['over']]}, {NAMES[AXES[each['over']]]} {'as is' if each['at'] is None else each['at']}",
            number(each["exponent"]),
        ]
        for each in found["growth"]
    ]
    note = "Between the sizes above, the median TTIT grows as size^exponent; 1 is in proportion, 0 is not at all."
    return f"{table(['decoding', 'with', 'exponent'], rows)}\n\n{note}"


def profile_text(found: Found) -> str:
    """All profiles, as lines to read."""
    where = "{decoding}, batch {batch_size}, context {shown} ({trace})"
    titles = [where.format(**each, shown=context(each)) for each in found["profiles"]]
    return "\n\n".join(text(each, title, "round") for each, title in zip(found["profiles"], titles, strict=True))


def stages(found: Found) -> str:
    """Paper figure 4b, and the share of a round outside the forwards."""
    header = ["decoding", "batch", "context", "prefill, ms", "round, ms", *SHARES, "outside the forwards"]
    cells = [
        [
            plain(each["decoding"]),
            str(each["batch_size"]),
            context(each),
            number(each["prefill_ms"]),
            number(each["round_ms"]),
            *(percent(each["stages_ms"].get(stage, 0.0) / each["round_ms"]) for stage in SHARES),
            percent(each["outside"]),
        ]
        for each in found["breakdown"]
    ]
    note = (
        "Measured on separate rounds; on a GPU each stage is waited for there, which makes rounds slower. Outside "
        "the forwards: the share of a round in which neither target nor draft nor LM head computes."
    )
    return f"{table(header, cells)}\n\n{note}"
