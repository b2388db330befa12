"""Random requests of all kinds, with a store too small for them, for as long as one likes: no leak, no wrong token, no
hang.

Every request must get the tokens of plain decoding, sampled ones too.

    SOAK=2000 SEED=7 pytest tests/inference/test_soak.py    makes it a long one, of other requests, trees and faults
"""

import copy
import os
import random
import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import pytest
import torch

from eagle_train.inference import Engine, Output, PrefillServer, SamplingParams
from eagle_train.inference.cache.block_pool import BlockPool
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.drafter import Drafted, DraftRound, Needs, Outcome, Pending, RowText
from eagle_train.inference.drafters.eagle import ALIGNMENTS, Eagle
from eagle_train.inference.drafters.text_drafter import TextDrafter, TextTree
from eagle_train.inference.parallel.disaggregated import RemotePrefill
from eagle_train.inference.parallel.lines import Header
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
        self.rng, self.met = rng, Counter()
        self.often = {"none": 0.7, "unread": 0.3} | dict.fromkeys(DEADLY, mortal * 3 / COUNT)
        super().__init__(other, server=PrefillServer(models()[0], drafter(), prefill_tokens=8, prefix_cache=True))

    def send(self, message, timeout):
        super().send(message, timeout)
        (self.fault,) = self.rng.choices(list(self.often), self.often.values())
        self.met[self.fault] += 1
        self.fails_at = self.rng.randrange(6) if self.fault == "unread" else None
        self.breaks_at = {"silent": 0, "torn": self.rng.randrange(1, 6)}.get(self.fault)
        if self.fault == "deaf":
            raise RuntimeError("Connection closed by peer")

    def changed(self, header, body):
        return Header(-1, *header[1:]) if self.fault == "astray" else header, body


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
    truth = plainly(asked)
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


def plainly(asked: list[tuple[Sequence, Request]]) -> dict[Request, Output]:
    """Without drafts, what each of the requests that came has for an answer."""
    kinds = list(dict.fromkeys(kind for _, kind in asked))
    params = [replace(kind.params, drafter=None) for kind in kinds]
    return dict(zip(kinds, Engine(models()[0]).generate([kind.prompt for kind in kinds], params), strict=True))


class Unsteady(Eagle):
    """A draft of its own kind of trouble, now and then; checked as a user's drafter is."""

    needs = Needs()

    def __init__(self, rng: random.Random, often: float):
        super().__init__(copy.deepcopy(models()[1]), models()[0])
        self.rng, self.often, self.met = rng, often, Counter()

    def prefill(self, *given: torch.Tensor) -> None:
        if self.rng.random() < self.often / 4:
            self.met["prefill"] += 1
            raise RuntimeError("cannot read")
        super().prefill(*given)

    def propose(self, round: DraftRound) -> Drafted:
        drafted = super().propose(round)
        if self.rng.random() > self.often:
            return drafted
        row, tokens = self.rng.randrange(len(drafted.tokens)), drafted.tokens.clone()
        fault = self.rng.choice(["raises", "shape", "outside", "negative", "nan"])
        self.met[fault] += 1
        if fault == "raises":
            raise RuntimeError("out of order")
        if fault == "shape":
            return Drafted(tokens[:, 1:])
        if fault in ("outside", "negative"):
            tokens[row, -1] = -1 if fault == "negative" else 10**6
            return drafted._replace(tokens=tokens)
        q = torch.full((*tokens.shape, len(models()[0].lm_head.weight)), 1 / 96, dtype=torch.float64)
        q[row, 0, 3] = torch.nan
        return drafted._replace(q=q)

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        left = super().rewind(round, drafted, outcome)
        if self.rng.random() < self.often / 4:
            self.met["rewind"] += 1
            return None
        return left


class UnsteadyTexts(TextDrafter):
    """The same on the host, with some late drafts; keeps the keys of requests that are there."""

    timeout_s = 0.2

    def __init__(self, rng: random.Random, often: float):
        self.rng, self.often, self.met, self.there, self.late = rng, often, Counter(), set(), 2

    def draft(self, text: RowText, most: int) -> list[int] | TextTree:
        self.there.add(text.key)
        if self.rng.random() > self.often:
            return TextTree([text.answer[-1], text.prompt[0], text.prompt[-1]], [0, 0, 1])
        fault = self.rng.choice(["raises", "kind", "outside", "cycle", "lengths", "late"])
        fault = fault if fault != "late" or self.late else "raises"
        self.met[fault] += 1
        self.late -= fault == "late"
        if fault in ("raises", "late"):
            time.sleep(0.5 if fault == "late" else 0)
            raise RuntimeError("out of order")
        return {
            "kind": "tokens",
            "outside": [96],
            "cycle": TextTree([1, 2], [0, 2]),
            "lengths": TextTree([1], [0, 0]),
        }[fault]

    def leave(self, key: int) -> None:
        self.there.discard(key)
        if self.rng.random() < self.often:
            self.met["leave"] += 1
            raise RuntimeError("cannot forget")


@pytest.mark.parametrize("seed", range(2))
def test_requests_with_drafters_that_fault_at_random(seed):
    rng = random.Random(f"{os.environ.get('SEED', '0')} {seed} faults")
    target, often = models()[0], min(0.4, 0.05 + 18 / COUNT)  # a request has one fault at most
    kinds = [
        Request(kind.prompt, replace(kind.params, drafter=rng.choice(["eagle", "tensors", "texts", "none"])))
        for kind in requests(rng)
    ]
    unsteady = Unsteady(random.Random(rng.random()), often), UnsteadyTexts(random.Random(rng.random()), often)
    drafters = {"eagle": drafter(), "tensors": unsteady[0], "texts": unsteady[1]}
    settings = {"max_batch_size": ROWS, "kv_tokens": 16 * BLOCK, "prefix_cache": True, "overlap": rng.random() < 0.5}
    engine = Engine(target, drafters, rng.choice(["chain3", "d2_bf2"]), prefill_tokens=16, **settings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asked, outputs = served(engine, kinds, rng, [])
    truth = plainly(asked)
    for request, kind in asked:
        whole = truth[kind]
        if request.finish_reason == "cancelled":
            assert request.generated == whole.token_ids[: len(request.generated)]
        else:
            assert (outputs[request].token_ids, outputs[request].text) == (whole.token_ids, whole.text), kind
    check_free(pool_of(engine))
    told = [str(each.message) for each in said if "goes on without drafts" in str(each.message)]
    assert told
    assert len(told) <= len(asked)
    assert sum(unsteady[0].met.values()) > 0
    assert sum(unsteady[1].met.values()) > 0
    assert len(unsteady[1].there) <= unsteady[1].met["leave"]
    assert any(max(request.rounds, default=0) > 1 for request, kind in asked if kind.params.drafter == "eagle")


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
