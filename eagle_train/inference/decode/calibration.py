"""Times rounds of an engine without requests, for the cost model. Knows nothing of requests or acceptance.

Shapes: A rows, N tree nodes.
"""

import time
from dataclasses import replace

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
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import TreePlan
from eagle_train.inference.drafters.proposed import Proposed
from eagle_train.inference.runner import Runner

_LONG, _TIMES = 256, 3  # tokens of a prompt that is read for its time, and how often


@torch.inference_mode()
def calibrated(runner: Runner, dispatcher: Dispatcher, plain: TreePlan) -> Adaptive:
    """The choice of plans for an engine, by rounds of each plan that are timed now, at batch sizes by powers of two.
    `plain`: the engine's plan without drafts.

    The caches must have their reserved blocks."""
    most = runner.config.max_batch_size
    sizes = sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | {most})
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
            runner.drafters.prefill(prefix, tokens, positions, hidden, None, [name])
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
