"""What a reader should not conclude from a result: sentences that follow from its own data."""

from collections.abc import Iterator, Mapping
from typing import Any

from eagle_train.settings import BUNDLED
from evals.bench.page.figure import Figure
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import TRAINING, Source
from evals.bench.report import loops, several, warnings

FEW_PROMPTS = 100  # below, the interval of TPC is wider than most differences between drafts
SPARE_LOAD = 0.5  # of running processes, beyond the cores
TIMED = ("mt_bench", "latency", "compare", "switches", "tune_trees", "experiments", "quantisation", "gating")


def cautions(source: Source) -> list[str]:
    """Sentences, the gravest first; none where nothing is to be said."""
    figures = figures_of(source)
    return [
        *_of_acceptance(source),
        *_of_what_is_missing(source),
        *_of_the_machine(source),
        *_of_numbers(source),
        *_of_intervals(figures),
        *_of_batches(figures),
    ]


def _of_acceptance(source: Source) -> Iterator[str]:
    config = source.config
    if is_lossy(source):
        yield "Relaxed acceptance was asked for: answers need not be the target's own."
    if config.get("acceptance") is not None:
        yield "Acceptance was simulated: times are measured, and TPC and speed-ups follow from a share that was given."
    yield from warnings(source.found)
    if config.get("shapes") is not None:
        yield "Weights are random, of a model's shape: times are those of its size, and the texts mean nothing."


def is_lossy(source: Source) -> bool:
    """Whether answers may be other than the target's own."""
    return bool(source.found.get("lossy"))


def is_simulated(source: Source) -> bool:
    """Whether acceptance was given, not measured."""
    return source.config.get("acceptance") is not None


def is_looping(source: Source) -> bool:
    """Whether so many answers end in a loop that speed-ups say nothing of other text."""
    return bool(loops(source.found))


def other_work(source: Source) -> float:
    """How many processes too many ran, about: the load average beyond the cores, of which each of the evaluation's
    threads has one; 0 where it was not written."""
    made = source.provenance
    load = made.get("load_average") or [0]
    return max(0.0, load[0] - max(made.get("threads", 1), made.get("cores", 1)))


def _of_the_machine(source: Source) -> Iterator[str]:
    made = source.provenance
    if not made:
        if source.evaluation != TRAINING:
            yield "Versions and hardware were not written beside this result: nothing can be compared with it."
        return
    is_busy = other_work(source) > SPARE_LOAD
    if source.evaluation in TIMED and made.get("gpu") is None and is_busy:
        yield (
            f"The machine was busy with other work: {made['load_average'][0]:g} running processes, where this "
            f"evaluation has {several(made['threads'], 'thread')}. Times and speed-ups may be off; TPC and acceptance "
            "are not."
        )
    if source.evaluation in TIMED and source.found.get("device", "cpu") == "cpu" and made.get("gpu") is None:
        yield (
            "Times are a CPU's, where drafting and validating cost in proportion to tokens. They say nothing of a GPU, "
            "where a small batch's time is that of reading the weights."
        )
    if BUNDLED in str(source.found.get("target") or _target(source.config)):
        yield (
            "The target is the bundled one, small and of one narrow domain. Its drafts cost a far larger share of a "
            "round than those of a large model, and its TPC is that of text like its own."
        )


def _of_what_is_missing(source: Source) -> Iterator[str]:
    """Cells that are still to come, and rows that could not be told."""
    found, left = source.found, source.found.get("left_out") or []
    cells, to_come = found.get("cells") or {}, found.get("left", 0)
    if cells and cells["measured"] < cells["of"]:
        yield f"Unfinished: {cells['measured']} of {cells['of']} cells were measured, and the others are not here."
    if to_come:
        yield f"Unfinished: {several(to_come, 'row')} of this result are still to come."
    told = (f"{name}: {reason}" for name, reason in left.items()) if isinstance(left, Mapping) else left
    yield from (f"Left out: {said.rstrip('.')}." for said in told)


def _target(config: Mapping[str, Any]) -> Any:
    target = config.get("target")
    return target.get("path") if isinstance(target, Mapping) else target


def prompts_of(source: Source) -> int | None:
    """How many prompts a result is over, different ones if it tells that, the fewest of its rows; None: not told."""
    found = source.found
    counts = [found.get(key) for key in ("prompts", "answers")]
    rows = [row for row in found.get("rows", []) if isinstance(row, Mapping)]
    counts += [row.get("distinct_prompts", row.get("answers", row.get("on_prompts"))) for row in rows]
    known = [count for count in counts if isinstance(count, int)]
    return min(known) if known else None


def _of_numbers(source: Source) -> Iterator[str]:
    prompts, config = prompts_of(source), source.config
    if prompts is not None and prompts < FEW_PROMPTS:
        said = "others may well give another TPC and another order."
        yield f"{several(prompts, 'prompt')} a figure, at the fewest: {said}"
    seeds = config.get("seeds")
    if isinstance(seeds, list) and len(seeds) == 1:
        yield "One seed of training: how much another seed would change is not known, and no interval counts it."
    if source.evaluation == TRAINING:
        yield "One run: another seed's curve differs. Held-out figures are of the run's own held-out rows."


def _of_intervals(figures: list[Figure]) -> Iterator[str]:
    speeds = [figure for figure in figures if figure.name == "speed-up"]
    if any(figure.interval is None for figure in speeds):
        yield "Speed-ups without an interval: whether a small difference is more than chance cannot be told."
    unclear = [each.of for each in speeds if each.interval and each.interval[0] <= 1 <= each.interval[1]]
    if unclear:
        yield f"Neither faster nor slower than plain decoding, as the interval contains 1: {'; '.join(unclear)}."
    for size in dict.fromkeys(each.batch_size for each in speeds):
        yield from _of_the_best([each for each in speeds if each.batch_size == size and each.interval])


def _of_the_best(speeds: list[Figure]) -> Iterator[str]:
    if len(speeds) < 2:
        return
    best = max(speeds, key=lambda each: each.value)
    assert best.interval is not None  # those without were left out
    near = [each.of for each in speeds if each is not best and each.interval and each.interval[1] >= best.interval[0]]
    if near:
        yield f"Intervals overlap: {best.of} is not shown to be faster than {'; '.join(near)}."


def _of_batches(figures: list[Figure]) -> Iterator[str]:
    sizes = {each.batch_size for each in figures if each.name == "speed-up" and each.batch_size is not None}
    if sizes == {1}:
        yield "Single prompts alone: speed-ups at larger batch sizes are smaller, and may be losses."
