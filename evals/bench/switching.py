"""Both variants of a switch answer the same batches, and their times are compared. Knows nothing of reports."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from eagle_train.distributed import World, place
from eagle_train.errors import check
from eagle_train.inference import Dispatcher, Engine, Output, RemotePrefill
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.loading import load_config
from eagle_train.models.shapes import heads_of
from evals.bench import statistics
from evals.bench.answering import take_turns
from evals.bench.requests import TimedRequest
from evals.bench.session import Session
from evals.bench.statistics import AnswerBatch
from evals.bench.subprocess_rank import prefill_process, second_rank
from evals.bench.variants import SWITCHES, Switch, SwitchesConfig, Variant

FIGURES = {"ttit": "TTIT", "ttft": "TTFT", "wait": "longest wait"}
"""The times, by their names in the report: means between tokens and to the first token, and the longest time between
two rounds of a request."""


def check_switch(config: SwitchesConfig, name: str) -> None:
    """Raise UserError where a switch needs what is not there: a file, a package, a target that can be divided."""
    if name == "tree_dispatcher":
        found = Path(config.table).is_file()
        check(found, f"table={config.table}: no such file; python -m evals.tune_trees writes one for tree_dispatcher")
        Dispatcher({"table": config.table})
    if name == "guided_speculation":
        known = find_spec("xgrammar") is not None
        install = "pip install 'eagle-train[guided]', or name others"
        check(known, f"switches: guided_speculation needs xgrammar; {install}")
    if (ranks := SWITCHES[name].ranks) > 1 and place()[1] == 1:
        heads = heads_of(load_config(config.target).get_text_config()).keys
        check(
            heads % ranks == 0,
            f"switches: {name}: {heads} key/value heads cannot be divided between {ranks} processes; name others",
        )


def engine_of(
    session: Session, variant: Variant, switch: Switch, size: int, longest: int, prefill: RemotePrefill | None = None
) -> Engine:
    """A variant's engine. `longest`: as for `Session.engine`; `prefill`: the prefill process, for a variant with
    disaggregated prefill."""
    config, drafter = session.config, None
    if variant.drafts:
        drafter = session.drafter(Quant(variant.quant), variant.alignment)
    options = {"tree": config.tree, "longest": longest, "max_batch_size": size + switch.workload.extra_rows}
    options |= variant.options(config, size)
    return session.engine(drafter, prefill=prefill if variant.remote_prefill else None, **options)


def answer_both(session: Session, name: str, size: int) -> dict[str, list[AnswerBatch]]:
    """The answers of both variants to all batches."""
    switch = SWITCHES[name]
    if switch.ranks > 1 and session.target.together is None:
        with second_rank(_answer_along, session.config, name, size) as world:
            return answer_both(Session(session.config, world), name, size)
    variants = {"off": switch.off, "on": switch.on}
    batches = switch.workload.batches(session, size)
    longest = max(len(each.prompt) + each.params.max_tokens for batch in batches for each in batch)
    remote = any(variant.remote_prefill for variant in variants.values())
    config = session.config
    with prefill_process(config.target, config.draft.path) if remote else nullcontext() as prefill:
        engines = {key: engine_of(session, side, switch, size, longest, prefill) for key, side in variants.items()}
        answering = {key: partial(answer, variant, switch, engines[key]) for key, variant in variants.items()}
        return take_turns(answering, batches, switch.workload.warm_up)


def _answer_along(world: World, config: SwitchesConfig, name: str, size: int) -> None:
    """What the second rank does while the first one measures."""
    answer_both(Session(config, world), name, size)


def answer(variant: Variant, switch: Switch, engine: Engine, batch: Sequence[TimedRequest]) -> list[Output]:
    """A variant's outputs for a batch."""
    return (variant.serve or switch.workload.serve)(engine, batch)


def compared(
    answered: dict[str, list[AnswerBatch]], max_tokens: int, newcomers: int = 0, asks_again: bool = False
) -> dict[str, Any]:
    """Each variant's TPC and times in seconds, medians of the batches; and the time of `off` divided by that of `on`,
    the median of the batches, with its 95 % interval, None for fewer than 6 batches.

    `max_tokens`: of the answers. `newcomers`, `asks_again`: see `Workload`. Raises UserError where nothing was decoded
    in a batch.
    """
    asked = list(chain.from_iterable(answered["on"]))
    found: dict[str, Any] = {"looping_answers": statistics.looping(statistics.token_ids(asked))}
    found |= {} if asks_again else {"distinct_prompts": statistics.distinct_prompts(asked)}
    times: dict[str, dict[str, list[float]]] = {}
    for side, batches in answered.items():
        answers = list(chain.from_iterable(batches))
        found |= {f"{side}_tpc": statistics.tpc(answers), f"{side}_prompts": len(answers)}
        check(all(map(statistics.intervals, batches)), f"in a batch: {statistics.no_decoding(max_tokens)}")
        times[side] = {
            "ttit": [fmean(statistics.intervals(batch)) for batch in batches],
            "ttft": [fmean(each.output.stats.ttft_s for each in batch[-newcomers:]) for batch in batches],
            "wait": [max(statistics.round_waits(batch)) for batch in batches],
        }
        found |= {f"{side}_{key}_s": median(each) for key, each in times[side].items()}
    for key in FIGURES:
        ratios = [off / on for off, on in zip(times["off"][key], times["on"][key], strict=True)]
        found[f"{key}_speedup"] = median(ratios)
        found[f"{key}_speedup_interval"] = statistics.median_interval(ratios)
    return found


def verdict(interval: Sequence[float] | None, noise: Sequence[float] | None) -> str:
    """What a ratio's interval says of its figure; `noise`: that of two sides that are alike, which need not hold 1."""
    if interval is None or noise is None:
        return "not told from noise"
    if interval[0] > max(1, noise[1]):
        return "shorter"
    return "longer" if interval[1] < min(1, noise[0]) else "not told from noise"
