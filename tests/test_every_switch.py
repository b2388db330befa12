"""The engine's switches together, in positions drawn at random: the tokens stay transformers' own, for every family.

Requests share beginnings, arrive a few at a time, are cancelled, give their memory up and come back; after each round
every slot without a committed token is NaN.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest
from caches import spoil
from oracle import guide
from tiny import continued, random_tokens, shared_target, tiny_draft

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.paged_kv import BLOCK
from eagle_train.inference.sequence import Sequence
from eagle_train.inference.tree import chain

FAMILIES = ["llama", "llama4", "qwen3_moe", "gpt_oss", "gemma2"]
LENGTH = 20
STEMS = random_tokens(35, 18, seed=5)
TAILS = random_tokens(1, 3, 9, seed=6)
PROMPTS = [stem + tail for stem in STEMS for tail in TAILS]
SWITCHES = {
    "tree": ["chain3", "d3_bf2", "n8", {1: "chain3", 2: "d3_bf2", 16: chain(0)}],
    "alignment": ["accepted", "last"],
    "drafting": ["greedy", "multinomial", "multinomial_without_replacement"],
    "norms": ["eagle1", "full"],
    "first_token": ["self_fusion", "skip"],
    "max_batch_size": [1, 3, 16],
    "kv_tokens": [7 * BLOCK, 12 * BLOCK, None],
    "prefill_tokens": [5, 16, None],
    "prefix_cache": [(False, 0), (True, 0), (True, 30 * BLOCK)],
    "overlap": [False, True],
}


@cache
def answers(family: str) -> list[list[int]]:
    return [continued(shared_target(family), prompt, LENGTH + 10) for prompt in PROMPTS]


def positions(rng: random.Random) -> dict:
    return {name: rng.choice(values) for name, values in SWITCHES.items()}


def engine_for(family: str, at: dict, rng: random.Random, guide: Callable = guide) -> Engine:
    """Its draft is right for as many tokens as chance will have it."""
    target, (prefix_cache, host) = shared_target(family), at["prefix_cache"]
    draft = tiny_draft(target, norms=at["norms"], first_token=at["first_token"])
    names = ("drafting", "max_batch_size", "kv_tokens", "prefill_tokens", "overlap")
    drafter, settings = Eagle(draft, target, at["alignment"]), {name: at[name] for name in names}
    engine = Engine(target, drafter, at["tree"], prefix_cache=prefix_cache, host_kv_tokens=host, **settings)
    if at["drafting"] == "greedy":
        guide(engine, answers(family), lambda _: rng.randint(0, 3))
    return engine


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_the_targets_own(family, seed):
    rng = random.Random(f"{family} {seed}")
    at = positions(rng)
    check_tokens(engine_for(family, at, rng), family, rng, at)


def check_tokens(engine: Engine, family: str, rng: random.Random, at: dict) -> None:
    """Requests of all kinds, of an engine whose switches stand so."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    waiting = [(index % len(PROMPTS), index) for index in range(2 * len(PROMPTS))]
    rng.shuffle(waiting)
    asked: dict[int, Sequence] = {}
    cancelled = set()
    while waiting or engine.scheduler.unfinished:
        for index, request in (waiting.pop() for _ in range(min(len(waiting), rng.randint(0, 3)))):
            asked[request] = engine.requests.sequence(index, PROMPTS[index], params)
            engine.enqueue([asked[request]])
        if asked and rng.random() < 0.05:
            request = rng.choice(sorted(asked))
            engine.cancel(asked[request])
            cancelled.add(request)
        engine.step()
        spoil(engine)
    for request, sequence in asked.items():
        wanted = answers(family)[request % len(PROMPTS)][:LENGTH]
        whole = sequence.generated == wanted
        assert whole or (request in cancelled and sequence.generated == wanted[: len(sequence.generated)]), at
    assert not any(engine.scheduler.pool.users)
