"""The figures of a result, each with what it is of: for the overview, and for comparing two results.

One function an evaluation, in the table `FIGURES`. Knows nothing of pages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evals.bench.page.gather import Source
from evals.bench.statistics import tpc_interval

PLAIN = ("plain", "transformers", "transformers, prompt lookup", "transformers, assisted")  # no drafter of ours
Interval = Sequence[float] | None


@dataclass(frozen=True)
class Figure:
    """A number of a result. `of`: drafter, tree and batch size, say; `interval`: of 95 %, or None; `is_time`: whether
    it hangs on the speed of the machine; `more_is_better`."""

    of: str
    name: str
    value: float
    interval: Interval = None
    more_is_better: bool = True
    is_time: bool = False
    batch_size: int | None = None


def figures_of(source: Source) -> list[Figure]:
    """The figures of a result, in order; none for an evaluation that has no function here, or for values of null."""
    make = FIGURES.get(source.evaluation)
    return [] if make is None else [figure for figure in make(source) if figure.value is not None]


def tree_and_drafter(source: Source) -> str:
    """`chain3`, or `ngram, chain3` where another than EAGLE drafts."""
    drafter, tree = source.found.get("drafter", "eagle"), str(source.found.get("tree", ""))
    return tree if drafter in ("eagle", None) else f"{drafter}, {tree}"


def _decoded(row: Any, of: str, size: int, tpc: Interval = None) -> Iterator[Figure]:
    """TPC, speed-up, TTIT and TTFT, under the names that evaluations share."""
    yield Figure(of, "TPC", row["tpc"], tpc, batch_size=size)
    yield Figure(of, "speed-up", row["speedup"], row.get("speedup_interval"), is_time=True, batch_size=size)
    for name, key in (("TTIT, ms", "ttit_s"), ("TTFT, ms", "ttft_s")):
        yield Figure(of, name, row[key] * 1e3, None, more_is_better=False, is_time=True, batch_size=size)


def _mt_bench(source: Source) -> Iterator[Figure]:
    counts = [[row["tokens"], row["calls"]] for row in source.answers]
    spread = tpc_interval([counts]) if counts else None
    interval = None if spread is None else (spread["low"], spread["high"])
    size = source.found["batch_size"]
    yield from _decoded(source.found, f"{tree_and_drafter(source)}, batch size {size}", size, interval)


def _latency(source: Source) -> Iterator[Figure]:
    for row in source.found["rows"]:
        if row["decoding"] not in PLAIN:
            at = [row["decoding"], f"batch size {row['batch_size']}"]
            at += [f"context {row['context_length']}"] if row["context_length"] else []
            at += ["random arrivals"] if row["arrivals"] == "poisson" else []
            yield from _decoded(row, ", ".join(at), row["batch_size"])


def _compare(source: Source) -> Iterator[Figure]:
    for row in source.found["rows"]:
        if row["decoding"] not in PLAIN:
            of = f"{row['decoding']}, {row['task']}, batch size {row['batch_size']}"
            yield from _decoded(row, of, row["batch_size"])


def _tune_trees(source: Source) -> Iterator[Figure]:
    for row in source.found["table"]:
        of, size = f"{row['tree']}, batch size {row['batch_size']}", row["batch_size"]
        yield Figure(of, "TPC, expected", row["tpc"], batch_size=size)
        yield Figure(of, "speed-up, expected", row["speedup"], is_time=True, batch_size=size)


def _quantisation(source: Source) -> Iterator[Figure]:
    for name, row in source.found["schemes"].items():
        yield Figure(name, "TPC", row["tpc"])
        yield Figure(name, "drafting, ms", row["draft_latency_ms"], more_is_better=False, is_time=True)


def _switches(source: Source) -> Iterator[Figure]:
    for row in source.found["rows"]:
        of, name = f"{row['switch']}, {row['load']}, batch size {row['batch_size']}", row["figure"]
        value, interval = row[f"{name}_speedup"], row[f"{name}_speedup_interval"]
        yield Figure(of, f"{name.upper()}, times shorter", value, interval, is_time=True, batch_size=row["batch_size"])


def _serving(source: Source) -> Iterator[Figure]:
    for name in ("eagle_train", "vllm"):
        yield Figure(f"{name}, {source.found['tree']}", "TPC", source.found[name]["tpc"])


def _experiments(source: Source) -> Iterator[Figure]:
    for part in source.found["parts"]:
        for name, one in part["variants"].items():
            for tree, each in one["tpc"].items():
                of = f"{name}, {tree}, {part['steps']} steps, equal {part['equal']}"
                yield Figure(of, "TPC", each["tpc"], (each["low"], each["high"]))
    for name, by_tree in (source.found["speedups"] or {}).items():
        for tree, each in by_tree.items():
            yield Figure(f"{name}, {tree}", "speed-up", each["speedup"], each["interval"], is_time=True, batch_size=1)


def _train_throughput(source: Source) -> Iterator[Figure]:
    ours = source.found["ours"]
    yield Figure("training step", "s", ours["step_s"], None, more_is_better=False, is_time=True)
    yield Figure("training step", "tokens/s", ours["tokens_per_s"], is_time=True)
    over = source.found["step_over_floor"]
    yield Figure("training step", "time over the floor", over, None, more_is_better=False, is_time=True)
    if ours["peak_memory"]:
        yield Figure("training step", "peak memory, GB", ours["peak_memory"] / 1e9, more_is_better=False)


def _training(source: Source) -> Iterator[Figure]:
    records = source.found["records"]
    last = next((record for record in reversed(records) if "heldout_ce" in record), None)
    losses = [record["loss"] for record in records[-max(1, len(records) // 10) :] if record.get("loss") is not None]
    if losses:
        yield Figure("last tenth", "loss", sum(losses) / len(losses), more_is_better=False)
    if last is not None:
        yield Figure("held out", "cross-entropy", last["heldout_ce"], more_is_better=False)
        if last.get("heldout_simulated_tpc") is not None:
            yield Figure("held out", "TPC, simulated", last["heldout_simulated_tpc"])


def _memory(key: str, name: str) -> Callable[[Source], Iterator[Figure]]:
    def make(source: Source) -> Iterator[Figure]:
        yield Figure("memory", name, source.found[key], more_is_better=False)

    return make


FIGURES: dict[str, Callable[[Source], Iterator[Figure]]] = {
    "compare": _compare,
    "latency": _latency,
    "mt_bench": _mt_bench,
    "experiments": _experiments,
    "quantisation": _quantisation,
    "serving": _serving,
    "switches": _switches,
    "train_throughput": _train_throughput,
    "training": _training,
    "tune_trees": _tune_trees,
    "loss_memory": _memory("extra_gb", "extra, GB"),
    "stream_memory": _memory("grown_mb", "grown, MB"),
}
