"""Engines with settings drawn at random, requests that come and go, and a check that each gets its own tokens."""

import random
from collections.abc import Callable
from functools import cache
from itertools import combinations

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.requests.sequence import Sequence
from tests.support.cache_checks import spoil
from tests.support.inside import add_as, pool_of
from tests.support.reference_answers import guide
from tests.support.tiny import continued, random_tokens, shared_target, tiny_draft

FAMILIES = ["llama", "llama4", "qwen3_moe", "gpt_oss", "gemma2"]
LENGTH = 20
STEMS = random_tokens(35, 18, seed=5)
TAILS = random_tokens(1, 3, 9, seed=6)
PROMPTS = [stem + tail for stem in STEMS for tail in TAILS]
SETTINGS = {
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
    "draft_lm_head": ["target", "fp8"],  # these targets are too narrow for INT4
}


@cache
def answers(family: str) -> list[list[int]]:
    return [continued(shared_target(family), prompt, LENGTH + 10) for prompt in PROMPTS]


def greedy(family: str) -> tuple[list[SamplingParams], list[list[int]]]:
    """Parameters and answers for `check_tokens`."""
    return [SamplingParams(max_tokens=LENGTH, ignore_eos=True)] * len(PROMPTS), answers(family)


def draw_settings(rng: random.Random) -> dict:
    return {name: rng.choice(values) for name, values in SETTINGS.items()}


@cache
def each_pair() -> list[dict]:
    """Settings in which each value of a switch stands with each of any other. The first five have each value."""
    rng, sizes, found = random.Random(0), [len(values) for values in SETTINGS.values()], []

    def pairs(row: list[int]) -> set[tuple]:
        return set(combinations(enumerate(row), 2))

    every = [(place, value) for place, size in enumerate(sizes) for value in range(size)]
    missing = {(one, other) for one, other in combinations(every, 2) if one[0] != other[0]}
    while missing:
        tried = [[rng.randrange(size) for size in sizes] for _ in range(400)]
        row = max(tried, key=lambda each: len(pairs(each) & missing))
        missing -= pairs(row)
        found.append({name: SETTINGS[name][place] for name, place in zip(SETTINGS, row, strict=True)})
    return found


def engine_for(
    family: str, at: dict, rng: random.Random, guide: Callable = guide, draft_of: Callable = tiny_draft
) -> Engine:
    """Its draft is right for as many tokens as chance will have it."""
    target, (prefix_cache, host) = shared_target(family), at["prefix_cache"]
    draft = draft_of(target, norms=at["norms"], first_token=at["first_token"])
    names = ("drafting", "max_batch_size", "kv_tokens", "prefill_tokens", "overlap", "draft_lm_head")
    drafter, settings = Eagle(draft, target, at["alignment"]), {name: at[name] for name in names}
    engine = Engine(target, drafter, at["tree"], prefix_cache=prefix_cache, host_kv_tokens=host, **settings)
    if at["drafting"] == "greedy":
        guide(engine, answers(family), lambda _: rng.randint(0, 3))
    return engine


def check_tokens(
    engine: Engine, rng: random.Random, at: dict, params: list[SamplingParams], wanted: list[list[int]]
) -> None:
    """Requests of all kinds, of an engine whose switches stand so; each prompt has its parameters and its answer."""
    waiting = [(index % len(PROMPTS), index) for index in range(2 * len(PROMPTS))]
    rng.shuffle(waiting)
    asked: dict[int, Sequence] = {}
    cancelled = set()
    while waiting or engine.has_unfinished:
        for index, request in (waiting.pop() for _ in range(min(len(waiting), rng.randint(0, 3)))):
            asked[request] = add_as(engine, index, PROMPTS[index], params[index])
        if asked and rng.random() < 0.05:
            request = rng.choice(sorted(asked))
            engine.cancel(asked[request])
            cancelled.add(request)
        engine.step()
        spoil(engine)
    for request, sequence in asked.items():
        whole = wanted[request % len(PROMPTS)][:LENGTH]
        begun = request in cancelled and sequence.generated == whole[: len(sequence.generated)]
        assert sequence.generated == whole or begun, at
    assert not any(pool_of(engine).users)
