"""Chained MTP modules in the engine: states while drafting are those of training's passes, however a text was read."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from eagle_train.drafts import MtpDraft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams, dynamic, full
from eagle_train.inference.cache.prefix import BLOCK, Prefix
from eagle_train.inference.decode.row_trees import PlanTree
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.chained import Chained
from eagle_train.inference.drafters.drafter import Choice, DraftRound, Pending, TreePlan
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.ops.attention import packed_attention
from tests.support.graph_recorder import recorded
from tests.support.inside import runner_of
from tests.support.tiny import random_tokens, repeating_target, shared_target, tiny_mtp, trained_mtp

LENGTHS = [50, 20]
TEXTS = random_tokens(*LENGTHS, seed=3)
BLOCKS = [[2, 3, 4, 5], [8, 6, 7, 9]]  # of the cache, by row
ROOTS = [(31, 33), (1, 1)], [(34, 36), (2, 3)], [(37, 37), (4, 12)]  # by round and row: the first and last pending
PROMPTS = random_tokens(5, 21, 33, 1)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@cache
def hidden_of(row: int) -> torch.Tensor:
    """The target's states [T, H] at a text."""
    target, length = shared_target(), LENGTHS[row]
    tokens, positions = torch.tensor([TEXTS[row]]), torch.arange(length)[None]
    return target.hidden_states(tokens, positions, packed_attention([[length]]))[0]


@torch.no_grad()
def passes_of(draft: MtpDraft, row: int, passes: int) -> list[torch.Tensor]:
    """Of each of training's passes the draft's states [T, W] at a text."""
    target, length = shared_target(), LENGTHS[row]
    states = TargetStates(hidden_of(row)[None], {})
    rows = Rows(target.embed(torch.tensor([TEXTS[row]])), states, torch.arange(length)[None], [[length]])
    return [each[0] for each in draft.unrolled(draft, rows, passes)]


def padded(parts: list[torch.Tensor]) -> torch.Tensor:
    """One row after the other, with what is not there as nobody may read it."""
    width = max(map(len, parts))
    filled = [torch.cat((each, each.new_full((width - len(each), *each.shape[1:]), 7))) for each in parts]
    return torch.stack(filled)


class Drafting:
    """A drafter that drafts what the texts go on with, besides other tokens; and its states at these."""

    def __init__(self, draft: MtpDraft, tree: PlanTree):
        self.drafter, self.plan = drafter_of(draft, shared_target()), TreePlan(tree)
        assert isinstance(self.drafter, Chained)
        for store in (self.drafter.cache, self.drafter.last):
            store.hold(store.grown(10))
        self.drafter.children, self.drafter.best = self.children, self.best
        self.states, self.roots = [], [0, 0]

    def children(self, states: torch.Tensor, level, choice) -> tuple[torch.Tensor, None]:
        return self.best(states, level.most, None)[0], None

    def best(self, states: torch.Tensor, count: int, allowed) -> tuple[torch.Tensor, torch.Tensor]:
        """The text's next token, by far the most likely one, then others."""
        self.states.append(states[:, 0])
        right = [text[root + len(self.states)] for text, root in zip(TEXTS, self.roots, strict=True)]
        tokens = torch.arange(3, 3 + count).repeat(len(states), states.shape[1], 1)
        tokens[..., 0] = torch.tensor(right).unsqueeze(1)
        logs = torch.tensor([-0.1, *[-1.0] * (count - 1)])
        return tokens, logs.expand(tokens.shape)

    @torch.no_grad()
    def prefill(self, rows: list[int], starts: list[int], ends: list[int]) -> None:
        prefix = Prefix.of(starts, [BLOCKS[row] for row in rows], torch.device("cpu"))
        tokens = padded([torch.tensor(TEXTS[row][a:b]) for row, a, b in zip(rows, starts, ends, strict=True)])
        hidden = padded([hidden_of(row)[a:b] for row, a, b in zip(rows, starts, ends, strict=True)])
        before = None
        if prefix.longest > 0:
            before = torch.stack([hidden_of(row)[max(a - 1, 0)] for row, a in zip(rows, starts, strict=True)])
        counts = [b - a for a, b in zip(starts, ends, strict=True)]
        self.drafter.prefill(prefix, tokens, prefix.positions(tokens.shape[1]), hidden, before, counts)

    @torch.no_grad()
    def round(self, roots: list[tuple[int, int]]) -> list[torch.Tensor]:
        """By level the states [A, W] at the root and at the nodes that the text goes on with."""
        self.states, self.roots = [], [last for _, last in roots]
        lengths, device = torch.tensor(self.roots), torch.device("cpu")
        pending = Pending(
            padded([torch.tensor(text[a : b + 1]) for text, (a, b) in zip(TEXTS, roots, strict=True)]),
            padded([hidden_of(row)[a - 1 : b] for row, (a, b) in enumerate(roots)]),
            torch.tensor([b + 1 - a for a, b in roots]),
            lengths,
        )
        prefixes = [Prefix.of(each, BLOCKS, device) for each in (self.roots, [first for first, _ in roots])]
        self.drafter.propose(DraftRound(self.plan, *prefixes, pending, Choice(), 96))
        return self.states


TREES = {"chain1": chain(1), "chain5": chain(5), "d4_bf2": full(4, 2), "dynamic": dynamic(10, 4, 2)}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", [{}, {"first_token": "self_fusion", "window": 6, "sink": True}], ids=["", "window"])
@pytest.mark.parametrize("modules", [2, 3])
def test_states_are_those_of_trainings_passes(modules, kind, tree):
    """Rows of other lengths, a text of two tokens among them; prompts in parts; round after round, of which some accept
    less than others; what padding has says nothing."""
    draft = tiny_mtp(shared_target(), modules=modules, **kind)
    drafting = Drafting(draft, TREES[tree])
    drafting.prefill([0, 1], [0, 0], [7, 1])
    drafting.prefill([0], [7], [20])
    drafting.prefill([0], [BLOCK], [31])  # as of another request, which found the first block
    wanted = [passes_of(draft, row, 5) for row in range(2)]
    for roots in ROOTS:
        found = drafting.round(roots)
        assert len(found) == TREES[tree].max_depth
        for depth, states in enumerate(found):
            for row, (_, last) in enumerate(roots):
                torch.testing.assert_close(states[row], wanted[row][depth][last + depth], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modules", [2, 3])
def test_a_dynamic_tree_of_single_children_is_a_chain(modules):
    target = repeating_target()
    draft = trained_mtp(target, 100, modules=modules)
    one, other = (Engine(target, draft, tree, max_batch_size=3) for tree in ("chain4", dynamic(4, 4, 1)))
    ours, theirs = one.generate(PROMPTS, GREEDY), other.generate(PROMPTS, GREEDY)
    assert [x.token_ids for x in ours] == [x.token_ids for x in theirs]
    assert [x.rounds for x in ours] == [x.rounds for x in theirs]
    assert max(max(x.rounds) for x in ours) > 2


@pytest.mark.parametrize("tree", ["chain4", "d2_bf2", dynamic(6, 3, 2), {1: "chain1", 2: chain(0)}], ids=str)
def test_rounds_may_be_recorded(tree):
    """One of them also where a request leaves and the other has much to read before it drafts again."""
    target, params = repeating_target(), [replace(GREEDY, max_tokens=length) for length in (20, 30, 40, 24)]
    draft, most = trained_mtp(target, 100, modules=3), 2 if isinstance(tree, dict) else 3
    eager, replayed = (Engine(target, draft, tree, max_batch_size=most) for _ in range(2))
    wanted, found = eager.generate(PROMPTS, params), recorded(replayed).generate(PROMPTS, params)
    assert [(x.token_ids, x.rounds) for x in found] == [(x.token_ids, x.rounds) for x in wanted]
    assert max(max(x.rounds) for x in wanted) > 1
    assert runner_of(replayed).graphs.drafting.made


def test_what_was_drafted_is_read_again():
    with pytest.raises(UserError, match=r"^draft\.alignment=last: draft=mtp with chained modules reads all accepted "):
        drafter_of(tiny_mtp(shared_target(), modules=2), shared_target(), "last")
