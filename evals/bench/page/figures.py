"""The figures of a result, each with what it is of: for the overview, and for comparing two results.

One function an evaluation, in the table `FIGURES`. Knows nothing of pages.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evals.bench.page import training_figures
from evals.bench.page.figure import Figure, Interval
from evals.bench.page.gather import UNREADABLE, Source
from evals.bench.statistics import question_interval

PLAIN = ("plain", "transformers", "transformers, prompt lookup", "transformers, assisted")  # no drafter of ours


def figures_of(source: Source) -> list[Figure]:
    """The figures of a result, in order; none for an evaluation that has no function here, for a result that another
    version wrote, or for values that are null or not finite."""
    make = FIGURES.get(source.evaluation)
    try:
        return [] if make is None else [_of_numbers(figure) for figure in make(source) if _is_finite(figure.value)]
    except UNREADABLE:  # its section says so
        return []


def _of_numbers(figure: Figure) -> Figure:
    """The same, without an interval or a control that is not finite. Raises one of UNREADABLE where the result has
    something else in the place of a number."""
    math.isfinite(figure.batch_size or 0)
    low, high = figure.interval or (None, None)
    is_known = _is_finite(low) and _is_finite(high)
    control = figure.control if _is_finite(figure.control) else None
    return replace(figure, interval=figure.interval if is_known else None, control=control)


def _is_finite(number: float | None) -> bool:
    """Raises one of UNREADABLE for what is neither a number nor null."""
    return number is not None and math.isfinite(number)


def answer_sums(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[int, list[Any]] | None:
    """Sums of these columns of answers.jsonl over all that was asked of a question, by its line in the file; None
    where no answers were kept, or without lines or numbers."""
    if not rows or any(row.get(key) is None for row in rows for key in ("line", *columns)):
        return None
    sums: dict[int, list[Any]] = {}
    for row in rows:
        own = sums.setdefault(row["line"], [0] * len(columns))
        own[:] = [total + row[name] for total, name in zip(own, columns, strict=True)]
    return sums


def tree_and_drafter(source: Source) -> str:
    """`chain3`, or `ngram, chain3` where another than EAGLE drafts."""
    drafter, tree = source.found.get("drafter", "eagle"), str(source.found.get("tree", ""))
    return tree if drafter in ("eagle", None) else f"{drafter}, {tree}"


def _decoded(row: Any, plain: Any, of: str, tpc: Interval = None) -> Iterator[Figure]:
    """TPC, speed-up, TTIT and TTFT, under the names that evaluations share; no speed-up where nothing was drafted.
    `plain`: plain decoding's times. `tpc`: the interval of TPC, where the row has none."""
    size = row["batch_size"]
    yield Figure(of, "TPC", row["tpc"], row.get("tpc_interval") or tpc, batch_size=size)
    if row["acceptance_per_depth"]:
        yield _speedup(row, plain, of, size)
    for name, key in (("TTIT, ms", "ttit_s"), ("TTFT, ms", "ttft_s")):
        less = Figure(of, name, _ms(row[key]), None, more_is_better=False, is_time=True, batch_size=size)
        yield replace(less, control=_ms(plain[key]))


def _ms(seconds: Any) -> Any:
    return None if seconds is None else 1e3 * seconds


def _speedup(row: Any, plain: Any, of: str, size: int) -> Figure:
    interval, control = row.get("speedup_interval"), _ms(plain["ttit_s"])
    figure = Figure(of, "speed-up", row["speedup"], interval, is_time=True, batch_size=size)
    return replace(figure, control=control, is_ratio=True)


def _mt_bench(source: Source) -> Iterator[Figure]:
    sums = answer_sums(source.answers, ("tokens", "calls"))
    interval = None if sums is None else question_interval([*sums.values()])
    plain = {key: source.found[f"plain_{key}"] for key in ("ttit_s", "ttft_s")}
    of = f"{tree_and_drafter(source)}, batch size {source.found['batch_size']}"
    yield from _decoded(source.found, plain, of, interval)


def _latency(source: Source) -> Iterator[Figure]:
    for row, plain in _with_plain(source, "batch_size", "context_length", "arrivals"):
        at = [row["decoding"], f"batch size {row['batch_size']}"]
        at += [f"context {row['context_length']}"] if row["context_length"] else []
        at += ["random arrivals"] if row["arrivals"] == "poisson" else []
        yield from _decoded(row, plain, ", ".join(at))


def _compare(source: Source) -> Iterator[Figure]:
    for row, plain in _with_plain(source, "task", "batch_size"):
        yield from _decoded(row, plain, f"{row['decoding']}, {row['task']}, batch size {row['batch_size']}")


def _with_plain(source: Source, *cell: str) -> Iterator[tuple[Any, Any]]:
    """The rows of our drafters, each with plain decoding's row of the same cell, which these keys name."""
    rows = source.found["rows"]
    plain = {tuple(row[key] for key in cell): row for row in rows if row["decoding"] == "plain"}
    yield from ((row, plain[tuple(row[key] for key in cell)]) for row in rows if row["decoding"] not in PLAIN)


def _tune_trees(source: Source) -> Iterator[Figure]:
    for row in source.found["table"]:
        of, size = f"{row['tree']}, batch size {row['batch_size']}", row["batch_size"]
        yield Figure(of, "TPC, expected", row["tpc"], batch_size=size)
        yield Figure(of, "speed-up, expected", row["speedup"], is_time=True, batch_size=size)


def _quantisation(source: Source) -> Iterator[Figure]:
    for name, row in source.found["schemes"].items():
        yield Figure(name, "TPC", row["tpc"], row.get("tpc_interval"))
        yield Figure(name, "drafting, ms", row["draft_latency_ms"], more_is_better=False, is_time=True)


def _switches(source: Source) -> Iterator[Figure]:
    for row in source.found["rows"]:
        of, name = f"{row['switch']}, {row['load']}, batch size {row['batch_size']}", row["figure"]
        value, interval = row[f"{name}_speedup"], row[f"{name}_speedup_interval"]
        yield Figure(of, f"{name.upper()}, times shorter", value, interval, is_time=True, batch_size=row["batch_size"])


def _serving(source: Source) -> Iterator[Figure]:
    for name in ("eagle_train", "vllm"):
        yield Figure(f"{name}, {source.found['tree']}", "TPC", source.found[name]["tpc"])


def _gating(source: Source) -> Iterator[Figure]:
    for row in source.found["rows"]:
        for name in ("gate", "auto"):
            of, size = f"{name}, {row['load']}, batch size {row['batch_size']}", row["batch_size"]
            share, interval = row[name]["share"], row[name]["interval"]
            yield Figure(of, "tokens/s over the best fixed choice's", share, interval, is_time=True, batch_size=size)


def _doctor(source: Source) -> Iterator[Figure]:
    """How many problems, and what the draft is worth where it could run."""
    found, of = source.found, "the draft"
    yield Figure(of, "problems", len(found["problems"]), more_is_better=False, is_count=True)
    for name, key in (("TPC", "tpc"), ("1 + drafts accepted after every token", "after_every_token")):
        if key in found:
            yield Figure(of, f"{name} (99 %)", found[key], found.get(f"{key}_interval"))
    if found.get("rounds"):
        share = 1 - found["rounds_that_differ"] / found["rounds"]
        yield Figure(of, "rounds in which engine and training graph agree, share", share)


FIGURES: dict[str, Callable[[Source], Iterator[Figure]]] = {
    "compare": _compare,
    "doctor": _doctor,
    "gating": _gating,
    "latency": _latency,
    "mt_bench": _mt_bench,
    "experiments": training_figures.experiments,
    "quantisation": _quantisation,
    "serving": _serving,
    "switches": _switches,
    "train_throughput": training_figures.train_throughput,
    "training": training_figures.training,
    "tune_trees": _tune_trees,
    "loss_memory": training_figures.memory("extra_gb", "extra, GB"),
    "stream_memory": training_figures.memory("grown_mb", "grown, MB"),
}
