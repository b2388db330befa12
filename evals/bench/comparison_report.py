"""The report on a comparison: the summary on the terminal and report.md. Knows nothing of engines or models.

`found` is what evals/compare.py writes to results.json.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import geometric_mean
from typing import Any

from eagle_train.artifacts.markdown import code, plain
from eagle_train.errors import typed
from evals.bench.report import (
    BY_DEPTH,
    TERMS,
    contexts,
    decoding,
    depths,
    document,
    lossy,
    made_on,
    marked,
    ms,
    number,
    of_suite,
    percent,
    sampling,
    several,
    table,
    warnings,
    with_interval,
)

Found = Mapping[str, Any]
COLUMNS = (
    "Speed-up: plain decoding's mean TTIT divided by the row's, with its 95 % bootstrap interval over the batches, as "
    "the rows of a batch share their rounds' times; that of TPC is over the questions. "
    "Tokens/s: the median over the batches, prompts included. Drafting: its share of a round. Memory: the drafter's "
    "weights, its cache with room for a full batch, and what it keeps on the host. Equal answers: those whose tokens "
    "are plain decoding's."
)
FORMULAS = (
    "Expected, by the formulas of Leviathan et al. (2023): with acceptance at depth 1 as alpha at each depth, a round "
    "that drafts k tokens one after the other commits (1 - alpha^(k+1)) / (1 - alpha), averaged over the rounds' k; "
    "with c, the time of a drafted token divided by that of a call of the target in plain decoding, the speed-up is "
    "that divided by 1 + k c. It takes the verification of k + 1 tokens to cost as much as one token's."
)
PICTURE = (
    "![Speed-up and memory](pareto.png)\n\nThe geometric mean over the tasks, with the least and the most. On the line "
    "are drafters that none beats in both memory and speed-up. Hollow: something must be prepared first. Crosses: the "
    "geometric mean of what the formulas below expect."
)


def summary(found: Found) -> str:
    """For the terminal: a line per row."""
    wide = max(len(decoding(row)) for row in found["rows"]) + 2
    tasks = max(4, *(len(row["task"]) for row in found["rows"])) + 2
    lines = [
        f"{'task':<{tasks}}{'batch':>5}  {'decoding':<{wide}}{'TPC':>5}{'TTIT p50':>12}{'tokens/s':>10}"
        f"{'speed-up':>10}{'equal':>16}"
    ]
    for row in found["rows"]:
        lines.append(
            f"{row['task']:<{tasks}}{row['batch_size']:>5}  {decoding(row):<{wide}}{number(row['tpc']):>5}"
            f"{ms(row['ttit_p50_s']):>12}{number(row['tokens_per_s'], 1):>10}{number(row['speedup']):>10}"
            f"{equal(row):>16}"
        )
    if found["lossy"]:
        lines.append(f"{lossy(found['config'])}: answers may be others than the target's own")
    return "\n".join([*lines, *warnings(found)])


def markdown(found: Found) -> str:
    """report.md."""
    config, cells = found["config"], found["cells"]
    most = (
        "as many batches" if config["repeats"] is None else f"{several(config['repeats'], 'batch', 'es')}, or as many"
    )
    repeats = f"for each task and size {most} as its questions fill"
    setting = (
        f"Target {code(found['target'])}, {found['dtype']} on {found['device']}; {sampling(config)}; answers of up to "
        f"{config['max_tokens']} tokens; {repeats}, in turn. The title's figure is of batches of "
        f"{config['batch_sizes'][0]}, the geometric mean over the tasks."
    )
    if cells["measured"] < cells["of"]:
        setting += f" Of {cells['of']} tasks and batch sizes {cells['measured']} so far."
    sections = {marked(title(found), found): setting, "Speed-up and memory": f"{PICTURE}{without_mean(found)}"}
    for task in found["tasks"]:
        rows = [row for row in found["rows"] if row["task"] == task["name"]]
        if rows:
            sections[f"Task {plain(task['name'])}"] = of_task(task, rows, found["grouped"])
    sections |= {"What the columns say": f"{TERMS}\n\n{COLUMNS}\n\n{FORMULAS}", "The drafters": of_drafters(found)}
    if found["left_out"]:
        sections["Left out"] = "\n".join(f"- {plain(said)}" for said in found["left_out"])
    return document({**sections, "Made on": made_on(found)})


def title(found: Found) -> str:
    """The fastest drafter at the first batch size, or that none is shown to be faster than plain decoding: on no task
    its interval lies above 1. Others than which it is not shown to be faster, by their intervals, are named."""
    size = found["config"]["batch_sizes"][0]
    means, rows = speedups(found, size), own_rows(found, size)
    if not means and any(drafted(row) for row in rows):
        return "No drafter could be measured on all tasks"
    if not means:
        return "No drafter drafted anything" if rows else "No drafter could be measured"
    best = max(means, key=lambda name: means[name][0])
    name, times = plain(best), f"{means[best][0]:.2f} times"
    if means[best][0] <= 1:
        return f"No drafter is faster than plain decoding: {name}, the best, has {times} its speed"
    spreads = [row["speedup_interval"] for row in rows if row["decoding"] == best and drafted(row)]
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return f"{name} has the largest speed-up, without an interval: {times} plain decoding"
    if all(low <= 1 for low, _ in known):
        return f"No drafter is shown to be faster than plain decoding: {name}, the best, has {times} its speed"
    near = [plain(other) for other in means if other != best and not _is_faster(best, other, rows)]
    if near:
        return f"{name} has the largest speed-up, {times} plain decoding; not shown to be faster than {', '.join(near)}"
    return f"{name} is the fastest: {times} plain decoding"


def _is_faster(name: str, other: str, rows: Sequence[Found]) -> bool:
    """Whether on a task the drafter's interval lies above another one's."""
    own, theirs = ({row["task"]: row for row in rows if row["decoding"] == each} for each in (name, other))
    return any(_ends(own[task])[0] > _ends(theirs[task])[1] for task in own.keys() & theirs.keys())


def _ends(row: Found) -> tuple[float, float]:
    """The interval of the speed-up: of one that is not known, any, and where nothing was drafted, plain decoding's."""
    low, high = (row["speedup_interval"] or (-inf, inf)) if drafted(row) else (1.0, 1.0)
    return low, high


def without_mean(found: Found) -> str:
    """A sentence on drafters with rows that were left out; an empty text without any."""
    names = dict.fromkeys(name for size in _sizes(found) for name in _incomplete(found, size))
    if not names:
        return ""
    said = "a row is left out at a batch size, as its timing could not be right, and so there is no mean there"
    return f" Of {', '.join(map(plain, names))} {said}."


def _sizes(found: Found) -> list[int]:
    return list(dict.fromkeys(row["batch_size"] for row in found["rows"]))


def _incomplete(found: Found, batch_size: int) -> list[str]:
    """The drafters without a row for some task that was measured at a batch size: a mean over the others is no figure
    beside those over all."""
    rows = [row for row in found["rows"] if row["batch_size"] == batch_size]
    there = {(row["task"], row["decoding"]) for row in rows}
    names, tasks = [each["name"] for each in found["drafters"]], {task for task, _ in there}
    return [name for name in names if any((task, name) not in there for task in tasks)]


def drafted(row: Found) -> bool:
    """Whether a decoding drafted anything in a cell; else it is plain decoding."""
    return bool(row["acceptance_per_depth"])


def speedups(found: Found, batch_size: int) -> dict[str, tuple[float, float, float]]:
    """Each drafter's speed-up over the tasks at a batch size: geometric mean, least and most; of one that drafted
    nothing in all of them, or lacks a row for some, none, and where it drafted nothing in some, as plain decoding, 1
    there."""
    by_name: dict[str, list[float]] = {}
    rows = own_rows(found, batch_size)
    drafting = {row["decoding"] for row in rows if drafted(row)} - set(_incomplete(found, batch_size))
    for row in rows:
        if row["decoding"] in drafting:
            by_name.setdefault(row["decoding"], []).append(row["speedup"] if drafted(row) else 1.0)
    return {name: (geometric_mean(values), min(values), max(values)) for name, values in by_name.items()}


def expected_speedups(found: Found, batch_size: int) -> dict[str, float]:
    """What the formulas expect in place of each mean of `speedups`; 1 where a drafter drafted nothing."""
    by_name: dict[str, list[float]] = {name: [] for name in speedups(found, batch_size)}
    for row in own_rows(found, batch_size):
        if row["decoding"] in by_name:
            by_name[row["decoding"]].append(row["expected"]["speedup"] if drafted(row) else 1.0)
    return {name: geometric_mean(values) for name, values in by_name.items()}


def own_rows(found: Found, batch_size: int) -> list[Found]:
    """The drafters' rows at a batch size."""
    names = {each["name"] for each in found["drafters"]}
    return [row for row in found["rows"] if row["batch_size"] == batch_size and row["decoding"] in names]


def of_task(task: Found, rows: Sequence[Found], grouped: str | None) -> str:
    """A task's tables: all figures, what is expected, and speed-ups by category."""
    too_long = f", {task['too_long']} more too long" if task["too_long"] else ""
    parts = [
        f"{code(task['path'])}: {task['format']}, {several(task['questions'], 'question')}{too_long}; licence: "
        f"{plain(task['licence'])}."
    ]
    parts += [of_suite(task["suite"])] if task["suite"] else []
    parts += [measures(rows), expectations(rows)]
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        parts.append(categories([row for row in rows if row["batch_size"] == size], f"batches of {size}"))
    if task["format"] == "Spec-Bench" and grouped:
        parts.append(grouped)
    first = [row for row in rows if row["memory"] is not None and row["batch_size"] == rows[0]["batch_size"]]
    parts += [f"{plain(row['decoding'])}, by context:\n\n{contexts(row['by_context'])}" for row in first]
    return "\n\n".join(part for part in parts if part)


def measures(rows: Iterable[Found]) -> str:
    """A row for each batch size and decoding."""
    header = ["decoding", "batch", "TPC", "TPC, 95 %", BY_DEPTH, "TTIT p50", "TTIT mean", "tokens/s", "speed-up"]
    header += ["95 %", "drafting", "memory, MB", "made in, s", "equal answers"]
    cells = [
        [
            plain(decoding(row)),
            str(row["batch_size"]),
            number(row["tpc"]),
            interval(row["tpc_interval"]),
            "" if row["memory"] is None else depths(row["acceptance_per_depth"], "drafted nothing; as plain decoding"),
            ms(row["ttit_p50_s"]),
            ms(row["ttit_s"]),
            number(row["tokens_per_s"], 1),
            number(row["speedup"]),
            interval(row["speedup_interval"]),
            percent(row["drafting_share"]),
            "" if row["memory"] is None else number(row["memory"]["bytes"] / 1e6, 3),
            number(row.get("made_s"), 2),
            equal(row),
        ]
        for row in rows
    ]
    return table(header, cells)


def expectations(rows: Iterable[Found]) -> str:
    """What the formulas expect, beside what was measured; an empty text where nothing was drafted."""
    header = ["decoding", "batch", "alpha", "k", "c", "TPC expected", "measured", "speed-up expected", "measured"]
    cells = [
        [
            plain(row["decoding"]),
            str(row["batch_size"]),
            number(row["expected"]["alpha"]),
            number(row["expected"]["depth"]),
            number(row["expected"]["cost_ratio"], 3),
            number(row["expected"]["tpc"]),
            number(row["tpc"]),
            number(row["expected"]["speedup"]),
            number(row["speedup"]),
        ]
        for row in rows
        if row["expected"] is not None
    ]
    return table(header, cells) if cells else ""


def categories(rows: Sequence[Found], where: str) -> str:
    """Speed-up and TPC of each decoding that drafts, a row for each category; an empty text without several."""
    parts = {row["decoding"]: row["by_group"] or row["by_category"] for row in rows if row["memory"] is not None}
    named = {each["category"]: each["answers"] for own in parts.values() for each in own}
    if len(named) < 2:
        return ""
    by_name = {name: {each["category"]: each for each in own} for name, own in parts.items()}
    cells = [
        [
            plain(category),
            f"{count:,}",
            *(_of_category(own[category]) for own in by_name.values()),
        ]
        for category, count in named.items()
    ]
    header = [f"category, {where}", "answers", *(plain(name) for name in by_name)]
    return f"{table(header, cells)}\n\nSpeed-up with its 95 % interval over the batches, TPC over the questions."


def _of_category(row: Found) -> str:
    spreads = [with_interval(row[key], row[f"{key}_interval"]) for key in ("speedup", "tpc")]
    return ", TPC ".join(spreads)


def of_drafters(found: Found) -> str:
    """What each drafter is, its memory at the first batch size, and what must be there before."""
    rows = {row["decoding"]: row for row in reversed(own_rows(found, found["config"]["batch_sizes"][0]))}
    cells = []
    for each in found["drafters"]:
        row = rows.get(each["name"], {"memory": {}, "tree": ""})  # none was right
        memory = row["memory"]
        options = ", ".join(f"{key}={typed(value)}" for key, value in each["options"].items() if key != "alignment")
        cells.append(
            [
                plain(each["name"]),
                code(each["drafter"].rpartition(".")[2]) + (f" {plain(options)}" if options else ""),
                plain(row["tree"]),
                *(number(memory[key] / 1e6, 3) if memory else "" for key in ("weight_bytes", "host_bytes")),
                number(memory.get("kv_bytes_per_token"), 0),
                preparation(each),
            ]
        )
    header = ["drafter", "made by", "tree", "weights, MB", "host, MB", "cache, bytes a token", "preparation"]
    note = (
        "Memory is of the first batch size. Host: what Python allocates for it beyond plain "
        "decoding while a batch is answered, its own count where it has one, and files that are read as memory."
    )
    return f"{table(header, cells)}\n\n{note}"


def preparation(drafter: Found) -> str:
    """What must be done before it drafts; of an EAGLE draft, what its artifact says of the training."""
    if drafter["training"]:
        known = ", ".join(
            f"{key} {drafter['training'][key]:,}"
            for key in ("steps", "tokens")
            if isinstance(drafter["training"].get(key), int)
        )
        return "trained" + (f": {known}" if known else "")
    return "needed" if drafter["is_prepared"] else "none"


def interval(ends: Sequence[float] | None) -> str:
    """`1.05 to 1.38`; an empty text where there is none."""
    return "" if ends is None else " to ".join(map(number, ends))


def equal(row: Found) -> str:
    """How many answers are plain decoding's; an empty text where two samples may differ."""
    return "" if row["equal_answers"] is None else f"{row['equal_answers']:,} of {row['answers']:,}"
