"""The figures of training runs, of training steps, and of drafts that were trained otherwise."""

from collections.abc import Callable, Iterator

from evals.bench.page.figure import Figure
from evals.bench.page.gather import Source
from evals.bench.statistics import interval_of
from evals.bench.study import part_title


def experiments(source: Source) -> Iterator[Figure]:
    """TPC of each variant and tree, and speed-ups over plain decoding."""
    for part in source.found["parts"]:
        for name, one in part["variants"].items():
            for tree, each in one["tpc"].items():
                yield Figure(f"{name}, {tree}, {part_title(part)}", "TPC", each["tpc"], interval_of(each))
    for name, by_tree in (source.found["speedups"] or {}).items():
        for tree, each in by_tree.items():
            if each is not None:  # None: its timing could not be right
                yield Figure(f"{name}, {tree}", "TPC", each["tpc"], batch_size=1)
                yield Figure(
                    f"{name}, {tree}", "speed-up", each["speedup"], each["interval"], is_time=True, batch_size=1
                )


def train_throughput(source: Source) -> Iterator[Figure]:
    """Time, tokens a second and memory of a training step."""
    ours = source.found["ours"]
    yield Figure("training step", "s", ours["step_s"], None, more_is_better=False, is_time=True)
    yield Figure("training step", "tokens/s", ours["tokens_per_s"], is_time=True)
    over = source.found["step_over_floor"]
    yield Figure("training step", "time over the floor", over, None, more_is_better=False, is_time=True)
    if ours["peak_memory"]:
        yield Figure("training step", "peak memory, GB", ours["peak_memory"] / 1e9, more_is_better=False)


def training(source: Source) -> Iterator[Figure]:
    """The loss at the end of a run, and what it measured on held-out rows."""
    records = source.found["records"]
    last = next((record for record in reversed(records) if "heldout_ce" in record), None)
    losses = [record["loss"] for record in records[-max(1, len(records) // 10) :] if record.get("loss") is not None]
    if losses:
        yield Figure("last tenth", "loss", sum(losses) / len(losses), more_is_better=False)
    if last is not None:
        yield Figure("held out", "cross-entropy", last["heldout_ce"], more_is_better=False)
        if last.get("heldout_simulated_tpc") is not None:
            yield Figure("held out", "TPC, simulated", last["heldout_simulated_tpc"])


def memory(key: str, name: str) -> Callable[[Source], Iterator[Figure]]:
    """One figure of an evaluation of memory, by its key."""

    def make(source: Source) -> Iterator[Figure]:
        yield Figure("memory", name, source.found[key], more_is_better=False)

    return make
