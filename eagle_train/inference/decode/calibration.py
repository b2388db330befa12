"""Runs rounds of an engine without requests: for kernels that are made at their first call, and, timed, for the cost
model. Knows nothing of requests or acceptance.

Shapes: A rows, N tree nodes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from eagle_train.inference.cache.block_pool import SCRATCH, blocks_for
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.adaptive import Adaptive
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.opening import ReadSeconds
from eagle_train.inference.decode.recording import empty_round
from eagle_train.inference.decode.round_costs import RoundCosts
from eagle_train.inference.decode.rounds import RoundInputs
from eagle_train.inference.decode.row_trees import RowTrees
from eagle_train.inference.decode.tree import Tree, chain
from eagle_train.inference.drafters.drafter import TreePlan
from eagle_train.inference.drafters.proposed import Proposed
from eagle_train.inference.runner import Runner
from eagle_train.ops.few_rows import MOST_ROWS
from eagle_train.progress import progress

_LONG, _TIMES = 256, 3  # tokens of a prompt that is read for its time, and how often
_DIVIDED = 256  # slots of a row, of which attention on a GPU makes two parts (ops/paged.py)


@torch.inference_mode()
def warm_up(runner: Runner, dispatcher: Dispatcher) -> None:
    """Run what an engine without recorded rounds may run of few tokens, once: kernels are compiled, and chosen by their
    times for numbers of rows up to a power of two (ops/few_rows.py), at their first call, for which no request is to
    wait.

    Rounds are run of all plans and numbers of rows by powers of two, with tokens that drafters have to read likewise;
    some with block tables of whole contexts, and prompts of up to the most tokens that are few.

    The caches must have their reserved blocks."""
    most, context = runner.config.max_batch_size, runner.target.max_positions
    sizes = sorted({*_powers(most), *(size for size, _ in dispatcher.table if size < most)})
    plans = dispatcher.plans(sizes)
    if dispatcher.deepest > 0:
        plain = TreePlan(chain(0).to(runner.target.device))  # any batch may go without drafts
        plans += [(rows, plain) for rows in sizes]
    jobs: list[Callable[[], None]] = [partial(_prefill, runner, each) for each in _powers(min(MOST_ROWS, context))]
    for rows, plan in plans:
        behind = _powers(dispatcher.deepest + 1) if plan.tree.num_nodes > 1 else [1]
        for pending, slots in [*((each, 0) for each in behind), (behind[-1], _DIVIDED), (behind[-1], context)]:
            jobs.append(partial(_run_empty, runner, plan, rows, pending, slots))
    bar = progress(len(jobs), "round")
    for done, job in enumerate(jobs, 1):
        job()
        bar.update(done)
    bar.close()
    runner.times.clear()


def _powers(most: int) -> list[int]:
    """The powers of two up to `most`, and `most`."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def _run_empty(runner: Runner, plan: TreePlan, rows: int, pending: int, slots: int) -> None:
    """The numbers as of `empty_round`."""
    _run(runner, empty_round(runner, plan, rows=rows, pending=pending, slots=slots))


def _prefill(runner: Runner, length: int) -> None:
    """A prompt of so many tokens. Drafters that read texts are left out."""
    seat = runner.drafters.seat(None)
    prefix = Prefix.of([0], [[SCRATCH] * blocks_for(length)], runner.target.device)
    runner.prefill(prefix, [[0] * length], None, [None if runner.drafters.reads_texts(seat) else seat])


@torch.inference_mode()
def calibrated(runner: Runner, dispatcher: Dispatcher, plain: TreePlan) -> Adaptive:
    """The choice of plans for an engine, by rounds of each plan that are timed now, at batch sizes by powers of two.
    `plain`: the engine's plan without drafts.

    The caches must have their reserved blocks."""
    most = runner.config.max_batch_size
    sizes = _powers(most)
    chosen = [plan for _, plan in dispatcher.plans([size for size, _ in dispatcher.table])]
    plans = dict.fromkeys(plan for plan in chosen if plan.tree.max_depth > 0)

    def seconds(plan: TreePlan, rows: int) -> float:
        # As after a round whose drafts were accepted in part: the drafter has that many tokens to read.
        pending = 1 + (plan.tree.max_depth + 1) // 2
        inputs = empty_round(runner, plan, rows=rows, pending=pending, ragged=rows > 1)
        started = time.perf_counter()
        _run(runner, inputs)
        return time.perf_counter() - started

    costs = RoundCosts([plain, *plans], sizes, seconds, runner.ranks)
    return Adaptive(dispatcher, plain, costs, _read_seconds(runner))


def _read_seconds(runner: Runner) -> ReadSeconds:
    """What drafters take to read a prompt alone, as they come where requests take the places of others: by a short and
    a long one that each reads now. Drafters that read texts are not asked."""
    long = min(_LONG, runner.target.max_positions)
    short = max(1, long // 16)
    names = list(runner.drafters.by_name)
    times = [time for name in names for time in _prefill_times(runner, name, [short, long])]
    agreed = iter(found / 1e9 for found in runner.ranks.least_of_hosts(times))
    both = {name: (next(agreed), next(agreed)) for name in names}

    def seconds(name: str, tokens: float) -> float:
        first, last = both[name]
        slope = max(0.0, last - first) / max(1, long - short)
        return max(0.0, first + slope * (tokens - short)) if tokens > 0 else 0.0

    return seconds


def _prefill_times(runner: Runner, name: str, lengths: list[int]) -> list[int]:
    """Nanoseconds that prompts of these lengths take a drafter."""
    device = runner.target.device
    if runner.drafters.reads_texts(name):
        return [0] * len(lengths)

    def once(length: int) -> float:
        prefix = Prefix.of([0], [[SCRATCH] * blocks_for(length)], device)
        tokens = torch.zeros(1, length, dtype=torch.long, device=device)
        positions = torch.arange(length, device=device).unsqueeze(0)
        hidden = torch.zeros(1, length, runner.width, dtype=runner.target.dtype, device=device)
        with runner.resources(length):  # as prompts are read later
            started = time.perf_counter()
            runner.drafters.prefill(prefix, tokens, positions, hidden, None, [length], [name])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - started

    return [round(1e9 * min(once(length) for _ in range(_TIMES))) for length in lengths]


def _run(runner: Runner, inputs: RoundInputs) -> None:
    """A round, to its end on the host. Drafters that read texts are left out."""
    if inputs.draft_prefix is None or not runner.drafters.reads_texts(inputs.seats[0]):
        _, result = runner.run(inputs)
    else:
        _, result = runner.complete(replace(inputs, draft_prefix=None), _undrafted(inputs.plan, inputs.pending.last))
    result.gains()


def _undrafted(plan: TreePlan, last: torch.Tensor) -> Proposed:
    """The pending tokens `last` int64 [A, 1] in place of drafts."""
    tree = plan.tree
    tokens = last.repeat(1, tree.num_nodes)
    if isinstance(tree, Tree):
        return Proposed(tokens, None, tree, [], None, {}, None)
    parents = (torch.arange(tree.num_nodes, device=last.device) - 1).clamp(0, tree.max_depth - 1).expand_as(tokens)
    trees = RowTrees(parents, torch.ones_like(tokens, dtype=torch.bool), tree.max_depth)
    return Proposed(tokens, None, trees, [], None, {}, None)
