"""The engine's switches, each value with each value of any other: greedy tokens are transformers' own, sampled ones
those of plain decoding, and with drawn drafts those of a request alone.

Requests share prefixes, arrive a few at a time, are cancelled, preempted and readmitted; after each round every slot
without a committed token is overwritten with NaN.
"""

import random
from functools import cache, partial

import pytest

from eagle_train.inference import Engine, SamplingParams
from tests.support.random_settings import (
    FAMILIES,
    LENGTH,
    PROMPTS,
    SETTINGS,
    check_tokens,
    each_pair,
    engine_for,
    greedy,
)
from tests.support.tiny import LAYERED, shared_target, trained_draft

ALL = [*FAMILIES, *LAYERED]


@pytest.mark.parametrize(("family", "place"), [(ALL[place % len(ALL)], place) for place in range(len(each_pair()))])
def test_the_tokens_are_the_targets_own(family, place):
    rng, at = random.Random(f"{family} {place}"), each_pair()[place]
    check_tokens(engine_for(family, at, rng), rng, at, *greedy(family))


@cache
def drawn(family: str) -> tuple[list[SamplingParams], list[list[int]]]:
    """The same above temperature 0: what plain decoding samples."""
    params = [
        SamplingParams(temperature=0.6, top_p=0.9, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    return params, [output.token_ids for output in Engine(shared_target(family)).generate(PROMPTS, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_is_what_plain_decoding_draws(family):
    rng = random.Random(f"{family} sampled")
    at = each_pair()[FAMILIES.index(family)] | {"drafting": "greedy"}
    engine = engine_for(family, at, rng, lambda *_: None, partial(trained_draft, steps=60))
    check_tokens(engine, rng, at, *drawn(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_drawn_drafts_come_to_is_as_if_alone(family):
    """Whatever the other switches; the tokens of a seed then depend on tree and drafting mode."""
    place = FAMILIES.index(family)
    rng = random.Random(f"{family} drawn")
    at = each_pair()[place] | {
        "tree": SETTINGS["tree"][place % 3],
        "drafting": SETTINGS["drafting"][1 + place % 2],
    }
    if at["alignment"] == "last":  # who is begun anew has its own tokens read with the target's hidden states
        at["kv_tokens"] = None
    params, _ = drawn(family)
    others = {name: SETTINGS[name][0] for name in ("max_batch_size", "prefix_cache", "overlap")}
    others |= {"kv_tokens": None, "prefill_tokens": None}
    trained = partial(trained_draft, steps=60)
    alone = engine_for(family, at | others, rng, lambda *_: None, trained)
    wanted = [alone.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    assert any(max(output.rounds) > 1 for output in wanted), "some drafts must be accepted"
    engine = engine_for(family, at, rng, lambda *_: None, trained)
    check_tokens(engine, rng, at, params, [output.token_ids for output in wanted])
