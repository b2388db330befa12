"""How long a round of each tree takes at each batch size: the trees take turns, round by round.

Knows nothing of how trees are chosen. Paper section 3.4.
"""

import time
from itertools import count
from statistics import median
from typing import Any

import torch

from eagle_train.inference import Dispatcher, Engine, SamplingParams, Tree, TreePlan
from eagle_train.progress import progress
from evals.bench.tree_search import Candidate

AT_ONCE: dict[str, Any] = {"overlap": False, "prefill_tokens": None}
"""A step then reads all new prompts, or is one whole round: no prompt is left to read, and no other tree's round is in
flight."""


class TreeInTurn(Dispatcher):
    """Gives every batch the plan that is set. An engine has room, and is compiled, for the tree that it is made of, and
    records rounds of all that are tried."""

    plan: TreePlan | None = None

    def __init__(self, tree: Tree, device: torch.device, tried: list[Candidate]):
        super().__init__(tree, device)
        self.tried = [Dispatcher(each.tree, device).dispatch(1) for each in tried]

    def plans(self, sizes: list[int]) -> list[tuple[int, TreePlan]]:
        return [(size, plan) for size in sizes for plan in self.tried]

    def dispatch(self, batch_size: int) -> TreePlan:
        return super().dispatch(batch_size) if self.plan is None else self.plan


def two_chains(depth: int) -> Tree:
    """Two chains side by side: an engine that is made with it has room for the deepest candidate, and is compiled for
    one node and for several at once, as any candidate may need."""
    return Tree((-1, 0, *range(2 * depth - 1)))


def round_seconds(
    plain: Engine,
    drafting: Engine,
    trees: TreeInTurn,
    tried: list[Candidate],
    asked: list[list[int]],
    sizes: list[int],
    rounds: int,
    tokens: int,
) -> dict[int, list[float]]:
    """Each candidate's median time of a round in seconds, for each batch size. The trees take turns, round by round.

    `plain`, `drafting`: engines with the options `AT_ONCE`; `trees`: the dispatcher of the second. `asked`: prompts, of
    which the end is used where too little of the context is left. `tokens`: that a request may generate.

    A tree has two rounds in its turn, and the second is timed: how much the draft has to read depends on the round
    before, which then was of the same tree. Plain rounds run in an engine without a draft. Its requests grow more
    slowly; in each turn the other engine's requests begin anew with their texts, so that all contexts are of similar
    length.
    """
    seconds: dict[int, list[float]] = {}
    bar, turns = progress(len(sizes) * (rounds + 1), "round of each tree"), count(1)
    for size in sorted(sizes):
        prompts = [asked[i % len(asked)][tokens - plain.target.max_positions :] for i in range(size)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        requests = {plain: [plain.add(prompt, params) for prompt in prompts], drafting: []}
        plain.step()
        times: list[list[float]] = [[] for _ in tried]
        for turn in range(rounds + 1):
            for request in requests[drafting]:
                drafting.cancel(request)
            texts = [each.prompt + each.generated for each in requests[plain]]
            requests[drafting] = [drafting.add(text, params) for text in texts]
            drafting.step()
            for plan, taken in zip(trees.tried, times, strict=True):
                engine, trees.plan = drafting if plan.tree.max_depth else plain, plan
                engine.step()
                started = time.perf_counter()
                engine.step()
                if turn > 0:  # the first warms up
                    taken.append(time.perf_counter() - started)
            bar.update(next(turns))
        for engine, theirs in requests.items():
            for request in theirs:
                engine.cancel(request)
        seconds[size] = [median(taken) for taken in times]
    bar.close()
    return seconds


def best_of(tried: list[Candidate], seconds: list[float]) -> int:
    """The candidate with the most tokens a second; of equal ones the first, which is the smallest."""
    return max(range(len(tried)), key=lambda i: tried[i].tpc / seconds[i])
