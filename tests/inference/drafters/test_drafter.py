"""The interface `Drafter`: any implementation can draft for the engine, and the tokens stay the target's own.

The one here is a prompt lookup, which has no model: it proposes what followed the last occurrence of the last two
tokens.
"""

from functools import cache

import pytest
import torch

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import BLOCK, Prefix
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Needs, Outcome, Pending
from eagle_train.models.shapes import KVShape
from tests.support.graph_recorder import recorded
from tests.support.inside import scheduler_of
from tests.support.reference_answers import token_ids
from tests.support.tiny import continued, random_tokens, repeating_target

LENGTH = 60
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
STEMS = random_tokens(35, 18, seed=3)
TREES = ["chain3", "n8"]
PROMPTS = [stem + tail for stem in STEMS for tail in random_tokens(2, 5, seed=4)]


class PromptLookup(Drafter):
    """Keeps a sequence's tokens in its cache, and finds the last place where the last two tokens stood before."""

    needs = Needs(waits=False)

    def __init__(self) -> None:
        self.cache = PagedKV({0: KVShape(1, 1, 1)}, blocks=0, dtype=torch.int64, device="cpu")
        self.caches = [self.cache]

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
    ) -> None:
        self.cache.memory[0][0, prefix.slots(positions)] = tokens[:, :, None, None]

    def propose(self, round: DraftRound) -> Drafted:
        pending, prefix = round.pending, round.prefix
        positions = round.draft_prefix.positions(pending.tokens.shape[1])
        self.cache.memory[0][0, round.draft_prefix.slots(positions)] = pending.tokens[:, :, None, None]
        places = torch.arange(prefix.longest + 1)[None]
        last = prefix.lengths[:, None].clamp(min=1)  # where the pending token is; rows that are not there have none
        text = self.cache.memory[0][0, prefix.slots(places.expand(len(last), -1)), 0, 0]
        alike = (text == pending.last) & (text.roll(1, 1) == text.gather(1, last - 1)) & (places > 0) & (places < last)
        found = (alike * places).amax(1, keepdim=True)
        tree = round.plan.tree
        there = found + 1 + torch.arange(tree.max_depth) % (last - found)  # over and over where the text ends
        # Siblings are the same token: nothing says that they must differ.
        return Drafted(torch.cat((pending.last, text.gather(1, there)), 1)[:, tree.depth])

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        return outcome.pending


@cache
def answers() -> list[list[int]]:
    return [continued(repeating_target(), prompt, LENGTH) for prompt in PROMPTS]


@cache
def rounds(tree: str) -> list[list[int]]:
    """The numbers of tokens in the rounds of each prompt, decoded alone."""
    engine = Engine(repeating_target(), PromptLookup(), tree, max_batch_size=1)
    return [engine.generate([prompt], GREEDY)[0].rounds for prompt in PROMPTS]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"kv_tokens": 9 * BLOCK, "prefill_tokens": 7},
        {"prefix_cache": True},
        {"prefix_cache": True, "host_kv_tokens": 30 * BLOCK, "kv_tokens": 9 * BLOCK, "overlap": True},
    ],
)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_drafter_of_anyones_own(tree, options, graphs):
    drafter: Drafter = PromptLookup()
    engine = Engine(repeating_target(), drafter, tree, **{"max_batch_size": 4} | options)
    if graphs:
        recorded(engine)
    preempted, preempt = [], scheduler_of(engine).preempt
    scheduler_of(engine).preempt = lambda sequence: preempted.append(sequence) or preempt(sequence)
    for _ in range(2):  # kept beginnings are found by the second
        outputs = engine.generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == answers()
        assert [output.rounds for output in outputs] == rounds(tree)  # what it keeps is lost nowhere
    assert bool(preempted) == ("kv_tokens" in options)
    assert any(output.stats.cached_tokens for output in outputs) == ("prefix_cache" in options)


@pytest.mark.parametrize("tree", TREES)
def test_what_it_drafts_is_accepted(tree):
    counts = [count for each in rounds(tree) for count in each]
    assert sum(counts) / len(counts) > 1.4
