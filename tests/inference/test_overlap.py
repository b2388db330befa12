"""Rounds that start before the host has the results of the previous one: the same outputs, and no waiting. Paper
section 3.3.
"""

from contextlib import contextmanager
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest
import torch

from eagle_train.drafts import Draft
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.cache.prefix_cache import HostKV
from eagle_train.inference.decode.sampling import DRAFT_MODES
from eagle_train.inference.drafters.eagle import ALIGNMENTS, Eagle
from eagle_train.models.target import Target
from eagle_train.ops import transfer
from tests.support.graph_recorder import no_values
from tests.support.inside import drafter_of, inside, results_withheld
from tests.support.reference_answers import (
    GREEDY,
    LENGTH,
    PROMPTS,
    TREES,
    answers,
    cut,
    finish_without_waiting,
    guide,
    token_ids,
)
from tests.support.tiny import (
    continued,
    random_tokens,
    shared_target,
    tiny_draft,
    tiny_target,
    tiny_tokenizer,
    trained_draft,
)

PARAMS = [
    SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop_token_ids=stops)
    for seed, (temperature, top_p, max_tokens, stops) in enumerate(
        [
            (0.0, 1.0, 20, None),
            (1.0, 0.9, 20, (3, 7, 11, 40)),
            (0.7, 1.0, 1, None),
            (1.3, 1.0, 2, None),
            (0, 1, 9, (5,)),
        ]
    )
]


FAMILIES = ["llama4", "qwen3_moe", "gpt_oss", "gemma2"]


def engine_for(
    family: str = "llama", tree: str = "chain3", alignment: str = "accepted", draft: Draft | None = None, **options
) -> Engine:
    target = shared_target(family)
    return Engine(target, Eagle(draft or tiny_draft(target), target, alignment), tree, **options)


@cache
def a_draft() -> Draft:
    return trained_draft(shared_target("llama"), steps=60)


# Each pair of a tree, a way of drafting and an alignment.
EACH = [
    (tree, drafting, ALIGNMENTS[(row + place) % 2])
    for row, tree in enumerate(TREES)
    for place, drafting in enumerate(DRAFT_MODES)
]


@pytest.mark.parametrize(("tree", "drafting", "alignment"), EACH)
def test_outputs_and_calls_are_the_same(tree, drafting, alignment):
    found = []
    for overlap in (False, True):
        engine = engine_for("llama", tree, alignment, a_draft(), max_batch_size=3, drafting=drafting, overlap=overlap)
        outputs = engine.generate(PROMPTS, PARAMS)
        found.append([(one.token_ids, one.finish_reason, one.rounds, one.stats.calls) for one in outputs])
    assert found[0] == found[1]
    assert max(found[0][0][2]) > 1  # it accepts what it drafts, now and then


def test_a_round_begins_before_the_one_before_is_known():
    """While a sequence can continue, a round is always in flight; each is reported one step later."""
    engine = engine_for(overlap=True)
    guide(engine, answers("llama"), lambda _: 1)
    request = engine.add(PROMPTS[0], GREEDY)
    told = []
    while engine.has_unfinished:
        told.append([len(update.token_ids) for update in engine.step()])
        assert (inside(engine).in_flight is not None) == (2 <= len(told) < 10)
    assert told == [[1], [], [2], [2], [2], [2], [2], [2], [2], [1]]
    assert request.generated == answers("llama")[0][:LENGTH]


def test_a_sequence_is_in_one_round_too_many_at_most():
    engine, rounds = engine_for(overlap=True), 0
    propose = drafter_of(engine).propose

    def counted(*arguments):
        nonlocal rounds
        rounds += 1
        return propose(*arguments)

    drafter_of(engine).propose = counted
    for max_tokens in (1, 2, 3, 12):
        rounds = 0
        (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert output.stats.calls <= rounds <= output.stats.calls + (max_tokens > 2)


@pytest.mark.parametrize("cancelled", [False, True])
def test_who_comes_after_one_that_has_ended(cancelled):
    """The superfluous last round of a finished request writes while the next request, prefilled already, needs its
    blocks."""
    prompts = random_tokens(20, 57)
    target = shared_target()
    truth = [continued(target, prompt, 20) for prompt in prompts]
    for ended_by in range(3, 8):
        engine = Engine(target, tiny_draft(target), "chain3", overlap=True, kv_tokens=64, max_batch_size=2)
        guide(engine, truth, lambda _: 3)
        stop = None if cancelled else (truth[0][ended_by],)
        first = engine.add(prompts[0], SamplingParams(max_tokens=20, stop_token_ids=stop, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
            if cancelled and len(first.generated) >= ended_by:
                engine.cancel(first)
        second = engine.add(prompts[1], SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
        assert second.generated == truth[1][:3]


def test_who_has_a_grammar_waits_for_its_results():
    target = tiny_target("llama", tiny_tokenizer())
    params = [SamplingParams(max_tokens=12, seed=seed, temperature=1.0) for seed in range(4)]
    params += [SamplingParams(max_tokens=12, seed=seed, grammar={"regex": "[a-z]{3,9}"}) for seed in range(2)]
    prompts = [prompt[:5] for prompt in (*PROMPTS, PROMPTS[0])]
    wanted, found = (
        token_ids(Engine(target, tiny_draft(target), overlap=overlap, max_batch_size=2).generate(prompts, params))
        for overlap in (False, True)
    )
    assert found == wanted


@contextmanager
def nobody_waits():
    def sent(values, device, dtype=None):
        with torch.utils._python_dispatch._disable_current_modes():
            return to_device(values, device, dtype)

    to_device = transfer.to_device
    modules = [
        "engine",
        "batch",
        "runner",
        "requests.prefiller",
        "cache.prefix",
        "decode.adjustments",
        "decode.logprobs",
        "decode.sampling",
        "decode.prefill",
        "cache.prefix_cache",
        "drafters.drafter",
        "drafters.drafters",
        "drafters.proposed",
    ]
    with no_values():
        for name in modules:
            patch(f"eagle_train.inference.{name}.to_device", sent).start()
        yield
        patch.stopall()


CASES = [*product(["llama"], TREES, DRAFT_MODES), *((family, "n8", "greedy") for family in FAMILIES)]


@pytest.mark.parametrize(("family", "tree", "drafting"), CASES)
def test_nothing_in_a_round_waits_for_the_device(family, tree, drafting):
    """Nothing until its results, which are read after the next round is launched."""
    odd = CASES.index((family, tree, drafting)) % 2
    for alignment, temperature in zip(ALIGNMENTS, (float(odd), 1.0 - odd), strict=True):
        engine = engine_for(family, tree, alignment, drafting=drafting, overlap=True, prefix_cache=True)
        for prompt in PROMPTS:
            engine.add(prompt, SamplingParams(temperature=temperature, top_p=0.9, max_tokens=30, ignore_eos=True))
        for _ in range(2):
            engine.step()
        with results_withheld(engine) as finished, nobody_waits():
            engine.step()
        (done,) = finished
        assert [gain.tokens for gain in done.result.gains()]


@pytest.mark.parametrize("drafting", DRAFT_MODES)
def test_nor_does_a_round_in_which_some_rows_alone_draft(drafting):
    engine = engine_for("llama", "n8", drafting=drafting, overlap=True)
    for prompt, name in zip(PROMPTS, (None, "none", *[None] * len(PROMPTS)), strict=False):
        engine.add(prompt, SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, drafter=name))
    for _ in range(2):
        engine.step()
    with results_withheld(engine) as finished, nobody_waits():
        engine.step()
    assert [gain.tokens for gain in finished[-1].result.gains()]


@pytest.mark.parametrize("drafting", DRAFT_MODES)
def test_nor_does_a_bias_min_p_or_a_log_probability(drafting):
    """Nor penalties, beyond the results of the round before."""
    given = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "min_p": 0.1, "logprobs": 2}
    for changes in ({}, {"repetition_penalty": 1.2, "frequency_penalty": 0.5}):
        engine = engine_for("llama", "n8", drafting=drafting, overlap=not changes)
        for prompt in PROMPTS:
            engine.add(prompt, SamplingParams(logit_bias={5: 1}, **given, **changes))
        for _ in range(2):
            engine.step()
        with results_withheld(engine) as finished, nobody_waits():
            engine.step()
        assert all(gain.logprobs for gain in finished[-1].result.gains())


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_nor_does_the_prefill_of_a_chunk(family, monkeypatch):
    """Between two rounds, while evicted blocks are copied to host memory, and the prompt's come back from there.

    Only the first token after a whole prompt is waited for.
    """
    target, (early, late) = shared_target(family), random_tokens(20, 75)
    options = {"max_batch_size": 2, "prefill_tokens": 8, "overlap": True, "prefix_cache": True}
    moved = []
    for way, move in (("put", HostKV.put), ("get", HostKV.get)):
        monkeypatch.setattr(HostKV, way, lambda *given, way=way, move=move: (moved.append(way), move(*given)))
    engine = Engine(target, tiny_draft(target), "n8", **options, kv_tokens=13 * BLOCK, host_kv_tokens=40 * BLOCK)
    engine.generate([late[:40], *random_tokens(90, 90)], SamplingParams(max_tokens=2))
    first, answer = engine.add(early, GREEDY), SamplingParams(max_tokens=4, ignore_eos=True)
    while len(first.generated) < 5:
        engine.step()
    second = engine.add(late, answer)
    moved.clear()
    with results_withheld(engine), nobody_waits():
        engine.step()
    assert set(moved) == {"put", "get"}
    assert 32 < second.num_computed < len(late)
    while engine.has_unfinished:
        engine.step()
    assert second.generated == Engine(target).generate([late], answer)[0].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
def test_nothing_in_a_round_waits_for_the_gpu(tree):
    model = shared_target("llama").model
    target = Target(type(model)(model.config).cuda())
    target.model.load_state_dict(model.state_dict())
    engine = Engine(target, tiny_draft(shared_target("llama")), tree)
    assert inside(engine).overlap
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    finish_without_waiting(engine)
    assert [request.generated for request in requests] == cut(answers("llama"))


def test_what_the_host_has_is_in_its_memory_whatever_device_is_the_default():
    with torch.device("meta"):
        made = transfer.to_device([1, 2], "cpu"), transfer.empty_pinned((2,), torch.long, "cpu")
    assert [x.device.type for x in made] == ["cpu", "cpu"]


@pytest.mark.gpu
def test_copies_beside_the_devices_work_have_what_was_computed_before():
    """And the memory of what is copied is not used again before."""
    side, copies = transfer.SideStream(torch.device("cuda")), []
    for number in range(50):
        copies.append(side.to_host(torch.full((1 << 20,), number, device="cuda")))
    assert [copy.wait().unique().tolist() for copy in copies] == [[number] for number in range(50)]
