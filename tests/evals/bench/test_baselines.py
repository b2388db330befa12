"""`transformers.generate` as the baseline: its weights, tokens, times and threads."""

from itertools import count

import pytest
import torch
from torch import nn

from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.ops.linear import Linear
from eagle_train.ops.norm import FastNorm
from evals.bench.answering import serve
from evals.bench.baselines import TokenClock, Transformers, check_has, stock_model
from tests.support.measuring import timed_requests
from tests.support.tiny import random_tokens, shared_target


@pytest.mark.parametrize("family", ["llama", "llama4"])
def test_transformers_runs_its_own_layers_on_the_same_weights(family):
    target = shared_target(family)
    model = stock_model(target)
    assert model.config._attn_implementation == "sdpa"
    assert target.model.config._attn_implementation == "eagle_train"
    for ours, module in ((True, target.model), (False, model)):
        kinds = {type(each) for each in module.modules()}
        assert (any(issubclass(kind, Linear) for kind in kinds), nn.Linear in kinds) == (ours, not ours)
        of_family = {
            "llama": lambda each: isinstance(each, FastNorm),
            "llama4": lambda each: getattr(each, "routed", False),
        }
        assert any(map(of_family[family], module.modules())) == ours
    for own, theirs in zip(target.model.parameters(), model.parameters(), strict=True):
        assert own is theirs


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("lookup", [None, 5])
def test_transformers_gives_the_engines_tokens(lookup, ignore_eos):
    target = shared_target()
    engine = Engine(target, max_batch_size=2)
    prompts = random_tokens(7) if lookup else random_tokens(7, 12)
    first = engine.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
    stop = frozenset() if ignore_eos else frozenset(first[4:5])  # one that does come up
    batch = timed_requests(*prompts, max_tokens=30, ignore_eos=ignore_eos, stop_token_ids=tuple(stop))
    ours, theirs = serve(engine, batch), Transformers(stock_model(target), stop, lookup)(batch)
    for own, other in zip(ours, theirs, strict=True):
        assert other.token_ids == own.token_ids
        assert other.finish_reason == own.finish_reason
        assert len(other.stats.intervals_s) == len(own.stats.intervals_s)
        assert other.stats.ttft_s > 0
        if lookup and ignore_eos:
            assert other.stats.calls < other.stats.tokens  # a random Llama repeats itself
    assert (ours[0].finish_reason == "length") == ignore_eos


def test_transformers_takes_min_p():
    """With min-p 1 none but the most likely token is left, whatever the temperature."""
    target = shared_target()
    (likely,) = Engine(target).generate(random_tokens(7), SamplingParams(max_tokens=20, ignore_eos=True))
    other = Transformers(stock_model(target), frozenset())

    def drawn(min_p: float) -> list[int]:
        asked = {"temperature": 3.0, "min_p": min_p, "max_tokens": 20, "ignore_eos": True}
        return other(timed_requests(*random_tokens(7), **asked))[0].token_ids

    assert drawn(1.0) == likely.token_ids
    assert drawn(0.0) != likely.token_ids


@pytest.mark.parametrize(
    "key", ["logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"]
)
def test_what_transformers_does_not_do_is_refused(key):
    value = {5: 1.0} if key == "logit_bias" else 2
    with pytest.raises(UserError, match=rf"^{key}=.*: transformers\.generate, which is compared, does not do the same"):
        check_has(SamplingParams(**{key: value}))
    check_has(SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1))


def test_times_of_streamed_tokens_by_hand(clock):
    """A step's tokens share the time since the step before; those after a stop token do not count."""
    stream = TokenClock()
    stream.put(torch.tensor([[7, 7]]))  # the prompt
    for second, tokens in ((1.0, [[3, 4]]), (3.0, [5]), (5.0, [[6, 2, 8]])):
        clock[0] = second
        stream.put(torch.tensor(tokens))
    output = stream.output([3, 4, 5, 6, 2, 8], frozenset([2]))
    assert output.token_ids == [3, 4, 5, 6, 2]
    assert output.finish_reason == "stop"
    assert (output.stats.ttft_s, output.stats.intervals_s) == (1.0, [0.0, 2.0, 1.0, 1.0])
    assert (output.stats.calls, output.stats.tokens, output.rounds) == (2, 3, [1, 2])
    assert stream.output([3, 4, 5], frozenset()).finish_reason == "length"


@pytest.mark.parametrize(("all_of_them", "tried", "fastest"), [(1, [1], 1), (6, [1, 2, 4, 6], 4), (4, [1, 2, 4], 1)])
def test_transformers_uses_the_fastest_number_of_threads(clock, monkeypatch, all_of_them, tried, fastest):
    """Medians of three trials in turn, after a warm-up: one disturbance changes nothing."""
    target, now, calls = shared_target(), [], count()
    monkeypatch.setattr(torch, "get_num_threads", lambda: all_of_them)
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    other = Transformers(target.model, frozenset())

    def slow(asked):
        turn, number = next(calls) // len(tried), now[-1]
        disturbed = number == fastest if turn == 0 else turn == 3
        clock[0] += 100.0 if disturbed else 1.0 + abs(number - fastest)
        return []

    monkeypatch.setattr(other, "answers", slow)
    other.tune(timed_requests([7]))
    assert now == [number for each in tried * 4 for number in (each, all_of_them)]
    assert other.threads == fastest


def test_ranks_try_and_take_as_many_threads_as_one_another(monkeypatch):
    """This rank has more than another, and the first one is fastest with two."""
    monkeypatch.setattr(Ranks, "least_of_hosts", lambda ranks, own: [min(4, *own)])
    monkeypatch.setattr(Ranks, "agreed", lambda ranks, own: torch.full_like(own, 2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    other, tried = Transformers(shared_target().model, frozenset()), []
    monkeypatch.setattr(other, "answers", lambda batch: tried.append(other.threads) or [])
    other.tune(timed_requests([7]))
    assert (set(tried), other.threads) == ({1, 2, 4}, 2)
