"""A plan of decoding as lines to read. Knows nothing of how it came about."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from eagle_train.inference.parallel.divided_draft import reason_against
from eagle_train.models.loading import DTYPES
from eagle_train.training.cost.estimate import GIB, USABLE
from evals.bench.decoding_plan import DecodingPlan, PlannedRound, Reading
from evals.bench.latency_config import Config


def plan_text(config: Config) -> str:
    """The plan of a config with shapes. Raises UserError where so many GPUs cannot hold the target together."""
    assert config.shapes is not None  # both are checked
    assert config.context_lengths is not None
    shape = replace(config.shapes.draft, window=config.draft.window, sink=config.draft.sink)
    plan = DecodingPlan(
        config.shapes.target,
        shape,
        DTYPES[config.shapes.dtype] or torch.bfloat16,  # which the GPUs to plan for compute in
        config.cluster.gpus or 1,
        config.cluster,
        config.options,
    )
    rounds = plan.rounds(config.batch_sizes, config.context_lengths, config.trees, config.acceptance)
    rows, longest = max(config.batch_sizes), max(config.context_lengths) + config.max_tokens
    return "\n".join([*_models(plan), "", *_readings(rounds, plan), "", *_memory(plan, rows, longest, config.trees)])


def _models(plan: DecodingPlan) -> Iterator[str]:
    """What there is, and what dividing it over the GPUs brings, and what the engine does."""
    gpus, cluster, shape = plan.gpus, plan.cluster, plan.shape
    among = "" if gpus == 1 else f"; a sum over all takes {cluster.sum_us:g} us"
    dtype = str(plan.dtype).removeprefix("torch.")
    yield f"target: {shape.parameters / 1e9:.4g} B parameters, draft: {plan.module.num_parameters / 1e9:.4g} B, {dtype}"
    yield f"{gpus} GPU{'s' if gpus > 1 else ''}, each reads {cluster.memory_tb_s:g} TB/s of its memory{among}"
    if gpus > 1:
        yield from _divided(plan)


def _memory(plan: DecodingPlan, rows: int, longest: int, trees: list[str]) -> Iterator[str]:
    """Of each GPU, with the tree that needs most."""
    each = (plan.memory(rows, longest, tree) for tree in trees)
    memory = max(each, key=lambda parts: sum(parts.values()))
    total = sum(memory.values())
    fits = "" if total <= plan.cluster.room else f": does not fit below {USABLE:.0%}"
    yield f"GiB on each GPU, of an engine for {rows} text{'s' if rows > 1 else ''} of {longest:,} tokens"
    yield from (f"  {part:<26}{value / GIB:9.2f}" for part, value in memory.items())
    yield f"  {'all, without activations':<26}{total / GIB:9.2f}  of {plan.cluster.memory_gib:g}{fits}"


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
    """Of all rounds."""
    yield "At least: what each GPU reads (weights, LM head, keys and values, all together), sums, milliseconds"
    yield f"{'':<24}{'weights':>9}{'LM head':>9}{'KV':>9}{'GB':>9}{'sums':>6}{'ms':>9}"
    for each in rounds:
        yield from _round(each, plan)


def _round(planned: PlannedRound, plan: DecodingPlan) -> Iterator[str]:
    """A batch size, a context and a tree."""
    whole = planned.drafting + planned.validation
    yield f"batch {planned.batch_size}, context {planned.context:,}, {planned.tree}"
    parts = {"plain step": planned.plain, "drafting": planned.drafting, "validation": planned.validation}
    for name, reading in (parts | {"round": whole}).items():
        yield _reading(name, reading, plan)
    if planned.tokens is not None:
        each, plain = (reading.seconds(plan.speeds) for reading in (whole, planned.plain))
        token = each / planned.tokens
        yield f"  {planned.tokens:.2f} tokens a round: {1e3 * token:.2f} ms a token, {plain / token:.2f} times plain"


def _reading(name: str, reading: Reading, plan: DecodingPlan) -> str:
    gigabytes = (reading.weights, reading.lm_head, reading.kv, reading.bytes)
    shown = "".join(f"{each / 1e9:9.2f}" for each in gigabytes)
    return f"  {name:<22}{shown}{reading.sums:>6}{1e3 * reading.seconds(plan.speeds):9.2f}"
