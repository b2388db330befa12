"""What the engine's tests share: prompts, the answers transformers gives, and drafts that are right as far as told.

`guide` proposes the target's true continuation down to a depth that may vary by row and round: so every length and
path of acceptance is committed, rewound and followed.
"""

import random
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.decode.rounds import RoundInputs
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.proposed import Proposed
from eagle_train.inference.requests.sequence import Output, Sequence
from tests.support.inside import active_in, drafter_of, inside, runner_of
from tests.support.tiny import continued, random_tokens, shared_target

TREES = ["chain3", "d3_bf2", "n8"]
PROMPTS = random_tokens(5, 17, 9, 1, 12)
LENGTH = 16
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


@cache
def answers(family: str) -> list[list[int]]:
    """What transformers goes on with after PROMPTS, and a little more than LENGTH of it."""
    return [continued(shared_target(family), prompt, LENGTH + 10) for prompt in PROMPTS]


def cut(truth: list[list[int]], length: int = LENGTH) -> list[list[int]]:
    return [tokens[:length] for tokens in truth]


def token_ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


DepthOf = Callable[[Sequence], int]


def right_as_told(engine: Engine, truth: list[list[int]], depth_of: DepthOf) -> Callable[[Tree], torch.Tensor]:
    """Gives a round's tokens: right for `depth_of(sequence)` nodes along a path chosen at random, wrong elsewhere."""
    rng = random.Random(0)

    def tokens_for(tree: Tree) -> torch.Tensor:
        tokens = torch.zeros(len(active_in(engine)), tree.num_nodes, dtype=torch.long)
        lengths = inside(engine).batch.pending.lengths.tolist()
        for row, (sequence, length) in enumerate(zip(active_in(engine), lengths, strict=True)):
            right = truth[sequence.index][length + 1 - len(sequence.prompt) :]
            right += [0] * (tree.max_depth - len(right))  # it may have ended since the round before began
            path = [node for node in rng.choice(tree.paths.tolist()) if node > 0]
            good = path[: depth_of(sequence)]
            for node in range(1, tree.num_nodes):
                wrong = 0 if node in good else 1 + int(tree.child_rank[node])
                tokens[row, node] = (right[int(tree.depth[node]) - 1] + wrong) % engine.target.identity.vocab_size
        return tokens

    return tokens_for


def guide(engine: Engine, truth: list[list[int]], depth_of: DepthOf) -> None:
    """Make drafts right as told, whatever the drafter's model says."""
    tokens_for, wanted = right_as_told(engine, truth, depth_of), {}

    def children(hidden, level, choice):
        tree = engine.dispatcher.dispatch(len(active_in(engine))).tree
        if level.parents.tolist() == [0]:
            wanted["tokens"] = tokens_for(tree)
        proposed = torch.zeros(len(active_in(engine)), len(level.parents), level.most, dtype=torch.long)
        places = slice(None) if level.proposal is None else level.proposal
        below = slice(*tree.levels[tree.depth[level.parents[0]] + 1])
        proposed.flatten(1)[:, places] = wanted["tokens"][:, below]
        return proposed, None

    drafter_of(engine).children = children


def guide_from_outside(engine: Engine, truth: list[list[int]], depth_of: DepthOf) -> None:
    """As `guide`, for drafting that may be recorded: its tokens are replaced when it is done."""
    tokens_for, draft = right_as_told(engine, truth, depth_of), runner_of(engine).draft

    def replaced(inputs: RoundInputs) -> Proposed:
        wanted, drafted = tokens_for(inputs.plan.tree), draft(inputs)
        return drafted._replace(tokens=torch.where(inputs.plan.tree.depth > 0, wanted, drafted.tokens))

    runner_of(engine).draft = replaced


def fail_at(monkeypatch, owner: Any, name: str, call: int) -> None:
    """Let one call of a method fail, and none before or after it."""
    calls, real = count(1), getattr(owner, name)

    def failing(*arguments):
        if next(calls) == call:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(owner, name, failing)


def finish_without_waiting(engine: Engine) -> None:
    """Steps until all are done, one of which may not have the host wait for the GPU."""
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_unfinished:
        engine.step()
