"""Requests of all kinds through a store too small for them, as long as one likes: no leak, no wrong token, no hang.

SOAK=2000 pytest tests/test_soak.py    makes it a long one
"""

import os
import random
from dataclasses import dataclass
from itertools import islice
from threading import Event

import pytest
import torch
from test_disaggregated import Nearby
from tiny import random_tokens, tiny_target, tiny_tokenizer, trained_draft

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.disaggregated import DecodeEngine
from eagle_train.inference.paged_kv import BLOCK, WASTE
from eagle_train.inference.sequence import Sequence

COUNT = int(os.environ.get("SOAK", "60"))
KINDS = 60  # different requests, whose answers are found out one by one
STEPS_EACH = 40  # more than any request needs, on average
GRAMMARS = [
    None,
    None,
    {"regex": "[a-f]{2,9}(xy|z)?"},
    {"choice": ["yes", "no", "maybe not"]},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
]


@dataclass(frozen=True, eq=False)
class Request:
    prompt: list[int]
    params: SamplingParams


def requests(rng: random.Random) -> list[Request]:
    """Prompts of all lengths, some of which begin alike, with parameters of all kinds."""
    stems, made = random_tokens(20, 37, seed=rng.randrange(100)), []
    for index in range(KINDS):
        (tail,) = random_tokens(rng.randint(1, 24), seed=rng.randrange(10**6))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 20]),
            max_tokens=rng.randint(1, 24),
            seed=index,
            stop=rng.choice([None, None, "a", ("bc", "Z")]),
            ignore_eos=rng.random() < 0.5,
            grammar=rng.choice(GRAMMARS),
        )
        made.append(Request(rng.choice([[], *stems]) + tail, params))
    return made


class Faulty(Nearby):
    """A prefill process that fails now and then; the decode process then reads those prompts itself."""

    def __init__(self, rng: random.Random, target, draft):
        self.other, self.rng, self.failed = 1, rng, 0
        self.engine = Engine(target, draft, prefill_tokens=8, prefix_cache=True)
        self.open, self.changed = Event(), {}
        self.open.set()

    def hear(self, timeout):
        if self.rng.random() < 0.3:
            self.failed += 1
            return {"number": self.request["number"]}
        return super().hear(timeout)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["one engine", "prefill apart"])
def test_requests_of_all_kinds(apart, overlap):
    seed = int(os.environ.get("SEED", "0"))
    rng = random.Random(seed)
    target = tiny_target("gemma2", tiny_tokenizer(), torch.float64)  # no rounding decides between two tokens
    draft = trained_draft(tiny_target("gemma2"), steps=60)
    alone = Engine(target, draft, "d3_bf2", max_batch_size=1)
    kinds = requests(rng)
    truth = [alone.generate([kind.prompt], [kind.params])[0] for kind in kinds]
    settings = {"max_batch_size": 6, "kv_tokens": 16 * BLOCK, "prefix_cache": True, "host_kv_tokens": 20 * BLOCK}
    settings |= {"overlap": overlap}
    line = Faulty(random.Random(seed), target, draft) if apart else None
    make = DecodeEngine if apart else Engine
    engine = make(target, draft, "d3_bf2", **settings, **({"lines": [line]} if apart else {"prefill_tokens": 16}))
    coming = iter([rng.randrange(KINDS) for _ in range(COUNT)])
    asked: list[tuple[Sequence, int]] = []
    outputs = {}
    for _ in range(STEPS_EACH * COUNT):
        for index in islice(coming, rng.choice([0, 0, 1, 3])):
            asked.append((engine.add(kinds[index].prompt, kinds[index].params), index))
        if asked and rng.random() < 0.05:
            engine.cancel(rng.choice(asked[-8:])[0])
        for update in engine.step():
            if update.output is not None:
                outputs[update.request] = update.output
        if len(asked) == COUNT and not engine.scheduler.unfinished:
            break
    assert len(asked) == COUNT
    assert not engine.scheduler.unfinished, "it hangs"
    cancelled = 0
    for request, index in asked:
        if request.finish_reason == "cancelled":
            cancelled += 1
            assert request.generated == truth[index].token_ids[: len(request.generated)]
        else:
            assert outputs[request].token_ids == truth[index].token_ids, kinds[index]
            assert outputs[request].text == truth[index].text
            assert outputs[request].finish_reason == truth[index].finish_reason
    pool = engine.scheduler.pool
    assert sorted([*pool.free, *pool.idle]) == list(range(WASTE + 1, WASTE + 1 + pool.total))
    assert not any(pool.users)
    assert cancelled
    assert sum(request.stats.cached_tokens for request, _ in asked) > 0
    assert not apart or (line.failed > 0 and engine.errands)
