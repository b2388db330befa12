"""Records all CUDA graphs that rounds may need, before the first request. Paper section 3.4, DESIGN section 3.9.

Knows nothing of requests. graphs.py replays.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from eagle_train.inference.cache.block_pool import blocks_for
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH, PagedPrefix
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.graphs import Graphs, Size
from eagle_train.inference.decode.rounds import RoundInputs
from eagle_train.inference.decode.sampling import SamplingTensors
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.decode.tree_forms import TreeForm
from eagle_train.inference.decode.verification import KINDS
from eagle_train.inference.drafters.drafter import Pending, TreePlan
from eagle_train.inference.grammar.guided import StopMasks
from eagle_train.inference.runner import Runner
from eagle_train.ops.graphs import Record
from eagle_train.progress import progress

_LEAST_SLOTS = 256  # of a row that graphs are recorded for, where they are recorded for several numbers
_ROWS_STEP = 8  # between numbers of rows; below it they are powers of two
_LOG = logging.getLogger(__name__)


def record_rounds(
    runner: Runner, dispatcher: Dispatcher, blocks: int, recorder: Callable[[], Record], masks: StopMasks | None
) -> None:
    """Record all parts of rounds for batches of every size, each with the trees that the dispatcher may give it.

    `blocks`: in the cache, whose tensors must stay where they are; `recorder`, `masks`: as for `Graphs`.
    """
    runner.graphs = Graphs(recorder, dispatcher.deepest + 1, masks)
    most = runner.config.max_batch_size
    steps = row_steps(most, [size for size, _ in dispatcher.table])
    plans = dispatcher.plans(steps)
    if runner.drafters.by_name and (runner.config.gate or dispatcher.auto or not runner.drafters.recordable):
        plain = TreePlan(chain(0).to(runner.target.device))  # any batch may go without drafts
        plans += [(rows, plain) for rows in steps if (rows, plain) not in plans]
    _record(runner, plans, blocks)


@torch.inference_mode()
def _record(runner: Runner, plans: list[tuple[int, TreePlan]], blocks: int) -> None:
    """Record rounds of these numbers of rows and plans. `blocks`: in the cache."""
    started, context = time.perf_counter(), runner.target.max_positions
    assert runner.graphs is not None
    # A row's block table holds its context, a round in flight and the next one.
    width = min(blocks, blocks_for(context + 2 * runner.graphs.pending))
    with runner.resources(max(rows * plan.tree.num_nodes for rows, plan in plans)):
        gathers = {plan: _gathers(runner, plan) for plan in dict.fromkeys(plan for _, plan in plans)}
        jobs = []
        for rows, plan in sorted(plans, key=lambda pair: pair[0], reverse=True):  # later ones use the largest's memory
            widths = block_steps(width, blocks, rows) if gathers[plan] else [width]
            for each in widths:
                jobs += _jobs(runner, (rows, each * BLOCK), plan)
        bar = progress(len(jobs), "CUDA graph")
        for done, job in enumerate(jobs, 1):
            job()
            bar.update(done)
        bar.close()
    _LOG.info("%d CUDA graphs recorded in %.1f s", len(jobs), time.perf_counter() - started)


def row_steps(most: int, changes: list[int]) -> list[int]:
    """The numbers of rows that rounds are recorded for: 1, 2, 4, 8, then every 8, and `most`. `changes`: the largest
    batch sizes of the dispatcher's table, so that all batches of a step have one tree."""
    powers = [1 << i for i in range((_ROWS_STEP - 1).bit_length())]
    return sorted({rows for rows in (*powers, *range(_ROWS_STEP, most, _ROWS_STEP), *changes) if rows < most} | {most})


def block_steps(width: int, total: int, rows: int) -> list[int]:
    """The widths of the block table that rounds are recorded for where attention copies all slots of the table.

    From `width` down, each half of the one before, so that at most half of a copy is padding. Widths with which `rows`
    rows have more than twice the cache's `total` blocks are left out: there is no memory for such a copy.
    """
    steps = [width]
    while steps[-1] > blocks_for(_LEAST_SLOTS):
        steps.append(-(-steps[-1] // 2))
    return [step for step in steps if rows * step <= 2 * total]


def _jobs(runner: Runner, size: Size, plan: TreePlan) -> list[Callable[[], None]]:
    """The recordings of one size and plan."""
    graphs, greedy = runner.graphs, empty_round(runner, plan)
    assert graphs is not None
    sampled = [empty_round(runner, plan, 1.0, *each) for each in KINDS]
    jobs: list[Callable[[], None]] = []
    guided = [False] if graphs.masks is None else [False, True]
    if greedy.draft_prefix is not None and runner.drafters.recordable:
        modes = {inputs.choice.mode: inputs for inputs in (greedy, *sampled)}
        draft = partial(
            graphs.record_drafting, size, propose=runner.propose, vocab_size=runner.target.identity.vocab_size
        )
        jobs += [partial(draft, each, is_guided=asked) for each in modes.values() for asked in guided]
    for form in TreeForm.all_of(plan.tree):
        jobs.append(partial(graphs.record_validation, size, greedy, form, runner.forward))
    if runner.drafters.recordable:
        checked = any(each.needs.checks for each in runner.drafters.by_name.values())
        kinds = [each for each in (greedy, *sampled) if each.draws is None or not checked]  # q is to be checked before
        jobs += [
            partial(graphs.record_end, size, each, runner.finish, asked, checked) for each in kinds for asked in guided
        ]
    return jobs


def _gathers(runner: Runner, plan: TreePlan) -> bool:
    """Whether attention copies slots in rounds of this plan, so that their number matters. Found out by a round.

    Where it reads them through the block table, it costs as much as the rows are long, however wide the table.
    """
    inputs, caches = empty_round(runner, plan), [runner.cache, *runner.drafters.caches]
    before = sum(cache.gathers for cache in caches)
    if inputs.draft_prefix is not None and runner.drafters.recordable:
        runner.propose(runner.draft_round(inputs))
    for form in TreeForm.all_of(plan.tree):
        tree = form.example(runner.target.device)
        runner.forward(inputs.prefix, tree, inputs.pending.tokens.new_zeros(1, tree.num_nodes))
    return sum(cache.gathers for cache in caches) > before


def empty_round(
    runner: Runner,
    plan: TreePlan,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    rows: int = 1,
    pending: int = 1,
    ragged: bool = True,
    slots: int = 0,
) -> RoundInputs:
    """A round of rows without tokens, which write to the SCRATCH block; all have the default drafter. `pending`: tokens
    that each has for it to read. `ragged`: the rows' lengths may differ. `slots`: for which their block tables have
    room, or for more."""
    device = runner.target.device
    zeros = torch.zeros(rows, 1, dtype=torch.long, device=device)
    counts = torch.full_like(zeros[:, 0], pending)
    blocks = zeros.new_full((rows, blocks_for(max(slots, pending + plan.tree.num_nodes))), SCRATCH)
    longest = blocks_for(pending) * BLOCK
    prefix, read = (PagedPrefix(length, blocks, longest, ragged=ragged) for length in (counts - 1, counts * 0))
    hidden = torch.zeros(rows, pending, runner.width, dtype=runner.target.dtype, device=device)
    waiting = Pending(zeros.repeat(1, pending), hidden, counts, counts - 1)
    sampling = SamplingTensors.from_lists([temperature] * rows, [top_k] * rows, [top_p] * rows, device, [min_p] * rows)
    drawn = temperature > 0 and runner.config.drafting != "greedy" and plan.tree.num_nodes > 1
    draws = torch.zeros(rows, plan.num_draws, dtype=torch.float64, device=device) if drawn else None
    drafts = read if runner.drafts(plan, waiting) else None
    seats = [runner.drafters.seat(None)] * rows
    return RoundInputs(plan, prefix, drafts, waiting, sampling, zeros[:, 0], runner.config.drafting, draws, None, seats)
