"""Random requests of all kinds, with a store too small for them, for as long as one likes: no leak, no wrong token, no
hang.

Every request must get the tokens of plain decoding, sampled ones too.

    SOAK=2000 SEED=7 pytest tests/inference/test_soak.py    makes it a long one, of other requests, trees and faults
"""

import copy
import os
import random
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from threading import Event

import pytest
import torch

from eagle_train.inference import Engine, Output, SamplingParams
from eagle_train.inference.cache.block_pool import BlockPool
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.eagle import ALIGNMENTS, Eagle
from eagle_train.inference.parallel.disaggregated import PrefillServer, RemotePrefill
from eagle_train.inference.requests.sequence import Sequence
from tests.support.inside import pool_of
from tests.support.local_prefill import LocalPrefill
from tests.support.tiny import random_tokens, tiny_target, tiny_tokenizer, trained_draft

COUNT = int(os.environ.get("SOAK", "45"))
ROWS = 6
KINDS = 60  # different requests, whose answers are found out by plain decoding
STEPS_EACH = 40  # more than any request needs, on average
DEADLY = ["deaf", "silent", "torn", "astray"]  # faults of a prefill process, which is then dropped
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
    """Prompts of all lengths, some with common prefixes, with parameters of all kinds."""
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
        if rng.random() < 0.25:  # it outgrows what it was admitted with
            params = replace(params, max_tokens=48, stop=None, ignore_eos=True, grammar=None)
        made.append(Request(rng.choice([[], *stems]) + tail, params))
    return made


@cache
def models() -> tuple:
    """A target in float64, so that no rounding decides between two tokens, and a draft that is right at times."""
    return tiny_target("gemma2", tiny_tokenizer(), torch.float64), trained_draft(tiny_target("gemma2"), steps=60)


def drafter(alignment: str = "accepted") -> Eagle:
    target, draft = models()
    return Eagle(copy.deepcopy(draft), target, alignment)


def table(rng: random.Random) -> dict:
    """No speculation, two chains, a full and a pruned tree, up to random batch sizes."""
    trees = [chain(0), *rng.sample([rng.choice(["chain1", "chain3"]), "d3_bf2", "n8"], 2)]
    return dict(zip([*sorted(rng.sample(range(1, 5), 2)), ROWS], rng.sample(trees, 3), strict=True))


class Faulty(LocalPrefill):
    """A prefill process whose answers come while it is `open`. Now and then one is that it could not read, and the
    decode process reads those prompts itself; a mortal one may be gone before, with, or in the midst of an answer, or
    answer something else, and is dropped."""

    def __init__(self, rng: random.Random, other: int, mortal: bool):
        self.other, self.rng, self.met = other, rng, Counter()
        self.often = {"none": 0.7, "unread": 0.3} | dict.fromkeys(DEADLY, mortal * 3 / COUNT)
        self.server = PrefillServer(models()[0], drafter(), prefill_tokens=8, prefix_cache=True)
        self.open, self.changed = Event(), {}

    def send(self, message, timeout):
        super().send(message, timeout)
        (self.fault,) = self.rng.choices(list(self.often), self.often.values())
        self.met[self.fault] += 1
        self.fail("deaf")

    def recv(self, timeout):
        answer = super().recv(timeout)
        self.fail("silent")
        if self.fault == "unread":
            return {"number": answer["number"]}
        return answer | ({"number": -1} if self.fault == "astray" else {})

    def recv_tensor(self, tensor, timeout):
        self.fail("torn")
        return super().recv_tensor(tensor, timeout)

    def fail(self, fault: str) -> None:
        if self.fault == fault:
            raise RuntimeError("Connection closed by peer")


def shake(rng: random.Random, lines: list[Faulty]) -> None:
    """Some prefill processes are slow for a while."""
    for line in lines:
        if rng.random() < 0.2:
            line.open.clear() if line.open.is_set() else line.open.set()


def check_free(pool: BlockPool) -> None:
    assert sorted([*pool.free, *pool.idle]) == list(range(SCRATCH + 1, SCRATCH + 1 + pool.total))
    assert not any(pool.users)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("apart", [False, True], ids=["one engine", "prefill apart"])
def test_requests_of_all_kinds(apart, seed):
    rng = random.Random(f"{os.environ.get('SEED', '0')} {seed} {apart}")
    target, kinds, alignment, tree = models()[0], requests(rng), rng.choice(ALIGNMENTS), table(rng)
    settings = {"max_batch_size": ROWS, "kv_tokens": 13 * BLOCK, "prefix_cache": True, "host_kv_tokens": 20 * BLOCK}
    settings["overlap"] = rng.random() < 0.5
    lines = [Faulty(random.Random(rng.random()), other, mortal=other > 1) for other in (1, 2, 3) if apart]
    prefill = RemotePrefill(lines) if apart else None
    settings |= {} if apart else {"prefill_tokens": 16}
    engine = Engine(target, drafter(alignment), tree, prefill=prefill, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "prefill process . is dropped")
        asked, outputs = served(engine, kinds, rng, lines)
    plain = Engine(target).generate([kind.prompt for kind in kinds], [kind.params for kind in kinds])
    truth = dict(zip(kinds, plain, strict=True))
    for request, kind in asked:
        if not request.generated:
            assert request.finish_reason == "cancelled"
            continue
        whole = truth[kind]
        if request.finish_reason == "cancelled":
            assert request.generated == whole.token_ids[: len(request.generated)]
        else:
            output = outputs[request]
            assert (output.token_ids, output.text) == (whole.token_ids, whole.text), kind
            assert output.finish_reason == whole.finish_reason
    check_free(pool_of(engine))
    assert {request.finish_reason for request, _ in asked} >= {"cancelled", "stop", "length"}
    assert sum(request.stats.cached_tokens for request, _ in asked) > 0
    assert any(max(request.rounds, default=0) > 1 for request, _ in asked), "some drafts must be accepted"
    if apart:
        check_lines(prefill, lines)


def served(
    engine: Engine, kinds: list[Request], rng: random.Random, lines: list[Faulty]
) -> tuple[list[tuple[Sequence, Request]], dict[Sequence, Output]]:
    """Requests that arrive a few at a time, some of them cancelled. Returns the outputs of the others."""
    coming, asked, outputs = iter(rng.choices(kinds, k=COUNT)), [], {}
    for _ in range(STEPS_EACH * COUNT):
        for kind in islice(coming, rng.choice([0, 0, 1, 3])):
            asked.append((engine.add(kind.prompt, kind.params), kind))
        if asked and rng.random() < 0.05:
            engine.cancel(rng.choice(asked[-8:])[0])
        shake(rng, lines)
        outputs |= {update.request: update.output for update in engine.step() if update.output is not None}
        if len(asked) == COUNT and not engine.has_unfinished:
            break
    assert len(asked) == COUNT
    assert not engine.has_unfinished, "it hangs"
    return asked, outputs


def check_lines(prefill: RemotePrefill, lines: list[Faulty]) -> None:
    """Prefill processes that were not given up still work, and hold no blocks."""
    for line in lines:
        line.open.set()
    prefill.close()
    assert lines[0] in prefill._tasks
    assert len(prefill._tasks) < len(lines)
    for line in lines:
        assert line in prefill._tasks or any(line.met[fault] for fault in DEADLY)
        check_free(line.server._parts.scheduler.pool)
