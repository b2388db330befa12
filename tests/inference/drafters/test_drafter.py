"""The interface `Drafter`: any implementation can draft for the engine, and the tokens stay the target's own.

The one here is a prompt lookup, which has no model: it proposes what followed the last occurrence of the last two
tokens.
"""

from functools import cache

import pytest

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from tests.support.graph_recorder import recorded
from tests.support.inside import scheduler_of
from tests.support.prompt_lookup import PromptLookup
from tests.support.reference_answers import token_ids
from tests.support.tiny import continued, random_tokens, repeating_target

LENGTH = 60
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
STEMS = random_tokens(35, 18, seed=3)
TREES = ["chain3", "n8"]
PROMPTS = [stem + tail for stem in STEMS for tail in random_tokens(2, 5, seed=4)]


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
        {"kv_tokens": 9 * BLOCK, "prefill_tokens": 7},
        {"prefix_cache": True, "host_kv_tokens": 30 * BLOCK, "kv_tokens": 9 * BLOCK, "overlap": True},
    ],
)
def test_a_drafter_of_anyones_own(tree, options):
    """Recorded; and in test_every_drafter.py it is not."""
    engine = recorded(Engine(repeating_target(), PromptLookup(), tree, **{"max_batch_size": 4} | options))
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
