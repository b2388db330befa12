"""A plan of decoding as lines to read. Knows nothing of how it came about."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from eagle_train.inference.parallel.divided_draft import reason_against
from eagle_train.models.loading import DTYPES
from eagle_train.results import count_in_words, in_words
from eagle_train.training.cost.estimate import USABLE
from evals.bench.decoding_plan import DecodingPlan, PlannedRound, Reading
from evals.bench.latency_config import Config

Unit = tuple[float, str]
SIZES: tuple[Unit, ...] = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
TIMES: tuple[Unit, ...] = ((1e-3, "ms"), (1e-6, "us"))


def plan_text(config: Config) -> str:
    """The plan of a config with shapes. Raises UserError where so many GPUs cannot hold the target together."""
    assert config.context_lengths is not None  # checked
    plan = plan_of(config, config.cluster.gpus or 1)
    rounds = plan.rounds(config.batch_sizes, config.context_lengths, config.trees, config.acceptance)
    rows, longest = max(config.batch_sizes), max(config.context_lengths) + config.max_tokens
    return "\n".join([*_models(plan), "", *_readings(rounds, plan), "", *_memory(plan, rows, longest, config.trees)])


def plan_of(config: Config, gpus: int) -> DecodingPlan:
    """The plan of a config with shapes, for so many GPUs. Raises UserError as `DecodingPlan`."""
    assert config.shapes is not None  # checked
    shape = replace(config.shapes.draft, window=config.draft.window, sink=config.draft.sink)
    dtype = DTYPES[config.shapes.dtype] or torch.bfloat16  # which GPUs compute in
    return DecodingPlan(config.shapes.target, shape, dtype, gpus, config.cluster, config.options)


def _models(plan: DecodingPlan) -> Iterator[str]:
    """What there is, and what dividing it over the GPUs brings, and what the engine does."""
    gpus, cluster, shape = plan.gpus, plan.cluster, plan.shape
    among = "" if gpus == 1 else f"; a sum over all takes {cluster.sum_us:g} us"
    dtype = str(plan.dtype).removeprefix("torch.")
    target, draft = map(count_in_words, (shape.parameters, plan.module.num_parameters))
    yield f"target: {target} parameters, draft: {draft}, {dtype}"
    yield f"{gpus} GPU{'s' if gpus > 1 else ''}, each reads {cluster.memory_tb_s:g} TB/s of its memory{among}"
    if gpus > 1:
        yield from _divided(plan)


def _memory(plan: DecodingPlan, rows: int, longest: int, trees: list[str]) -> Iterator[str]:
    """Of each GPU, with the tree that needs most."""
    each = (plan.memory(rows, longest, tree) for tree in trees)
    memory = max(each, key=lambda parts: sum(parts.values()))
    total = sum(memory.values())
    fits = "" if total <= plan.cluster.room else f": does not fit below {USABLE:.0%}"
    yield f"memory on each GPU, of an engine for {rows} text{'s' if rows > 1 else ''} of {longest:,} tokens"
    yield from (f"  {part:<26}{in_words(value):>12}" for part, value in memory.items())
    yield f"  {'all, without activations':<26}{in_words(total):>12}  of {plan.cluster.memory_gib:g} GiB{fits}"


def _divided(plan: DecodingPlan) -> Iterator[str]:
    """The LM head and the draft, whole and divided."""
    reason = reason_against(plan.module, plan.gpus)
    pairs = zip(plan.whole_and_divided.items(), plan.division, (None, reason), strict=True)
    for (name, (whole, divided)), is_divided, against in pairs:
        times = [f"{1e3 * each.seconds(plan.speeds):.2f} ms" for each in (whole, divided)]
        waits = f"{divided.sums} sum{'s' if divided.sums > 1 else ''}"
        done = f"whole: {against}" if against else "divided" if is_divided else "whole"
        yield f"{name}: {times[0]} whole, {times[1]} divided, with {waits}; {done}"


def _readings(rounds: Iterator[PlannedRound], plan: DecodingPlan) -> Iterator[str]:
    """Of all rounds, in the units of the smallest."""
    shown = list(rounds)
    size = _unit_of(min(each.plain.bytes for each in shown), SIZES)
    time = _unit_of(min(each.plain.seconds(plan.speeds) for each in shown), TIMES)
    yield "At least: what each GPU reads (weights, LM head, keys and values, all together), sums, time"
    yield f"{'':<24}{'weights':>9}{'LM head':>9}{'KV':>9}{size[1]:>9}{'sums':>6}{time[1]:>9}"
    for each in shown:
        yield from _round(each, plan, size, time)


def _unit_of(least: float, units: tuple[Unit, ...]) -> Unit:
    """The largest of which there is a tenth at least."""
    return next((unit for unit in units if least >= unit[0] / 10), units[-1])


def _round(planned: PlannedRound, plan: DecodingPlan, size: Unit, time: Unit) -> Iterator[str]:
    """A batch size, a context and a tree."""
    whole = planned.drafting + planned.validation
    yield f"batch {planned.batch_size}, context {planned.context:,}, {planned.tree}"
    parts = {"plain step": planned.plain, "drafting": planned.drafting, "validation": planned.validation}
    for name, reading in (parts | {"round": whole}).items():
        yield _reading(name, reading, plan, size, time)
    if planned.tokens is not None:
        each, plain = (reading.seconds(plan.speeds) for reading in (whole, planned.plain))
        token = each / planned.tokens
        said = f"{token / time[0]:.2f} {time[1]} a token, {plain / token:.2f} times plain"
        yield f"  {planned.tokens:.2f} tokens a round: {said}"


def _reading(name: str, reading: Reading, plan: DecodingPlan, size: Unit, time: Unit) -> str:
    sizes = (reading.weights, reading.lm_head, reading.kv, reading.bytes)
    shown = "".join(f"{each / size[0]:9.2f}" for each in sizes)
    return f"  {name:<22}{shown}{reading.sums:>6}{reading.seconds(plan.speeds) / time[0]:9.2f}"
