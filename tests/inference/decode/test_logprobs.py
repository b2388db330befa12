"""Log-probabilities are those of the target's own logits, of the tokens that were committed. DESIGN section 3.9."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from eagle_train.inference import Engine, Output, SamplingParams, TokenLogprobs
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.logprobs import LogprobRows
from eagle_train.inference.decode.sampling import DRAFT_MODES
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from tests.support.inside import scheduler_of
from tests.support.reference_answers import LENGTH, PROMPTS, TREES, answers, guide
from tests.support.tiny import shared_target, tiny_draft, tiny_target, tiny_tokenizer, trained_draft

COUNTS = [0, 3, None, 1, 7]  # by row


def asked(**params) -> list[SamplingParams]:
    """Of PROMPTS, one each."""
    return [SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=count, seed=5, **params) for count in COUNTS]


def check_logprobs(target: Target, prompts: list[list[int]], params: list[SamplingParams], outputs: list[Output]):
    """Against the model's own forward over each whole text."""
    target.model.set_attn_implementation("eager")
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        if own.logprobs is None:
            assert output.logprobs is None
            continue
        with torch.no_grad():
            logits = target.model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        table = logits.log_softmax(-1)
        assert [each.token_id for each in output.logprobs] == output.token_ids
        for row, each in zip(table, output.logprobs, strict=True):
            best = row.topk(own.logprobs)
            assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
            assert [token for token, _ in each.top] == best.indices.tolist()
            assert [number for _, number in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    target.model.set_attn_implementation("eagle_train")


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("overlap", [False, True])
def test_of_greedy_answers(tree, overlap):
    """Whatever is accepted, after preemptions too."""
    target, rng, lost = shared_target(), random.Random(0), []
    for depth_of in (lambda _: 0, lambda _: rng.randint(0, 3)):
        engine = Engine(target, tiny_draft(target), tree, overlap=overlap, max_batch_size=3, kv_tokens=3 * BLOCK)
        guide(engine, answers("llama"), depth_of)
        preempt = scheduler_of(engine).preempt
        scheduler_of(engine).preempt = lambda sequence, preempt=preempt: lost.append(sequence) or preempt(sequence)
        outputs = engine.generate(PROMPTS, asked())
        check_logprobs(target, PROMPTS, asked(), outputs)
    assert {1, 2, 3} <= {n for output in outputs for n in output.rounds}
    assert lost


@pytest.mark.parametrize("drafting", DRAFT_MODES)
def test_before_everything_that_is_changed(drafting):
    """Temperature, truncation, biases and penalties do not show in them."""
    target = shared_target()
    params = asked(
        temperature=1.5, top_p=0.9, min_p=0.05, repetition_penalty=1.3, logit_bias={5: 3}, presence_penalty=1
    )
    engine = Engine(target, trained_draft(target, steps=60), "d3_bf2", drafting=drafting, max_batch_size=3)
    outputs = engine.generate(PROMPTS, params)
    check_logprobs(target, PROMPTS, params, outputs)
    assert max(n for output in outputs for n in output.rounds) > 1


def test_before_grammars():
    target = tiny_target("llama", tiny_tokenizer())
    params = [replace(each, grammar={"regex": "[a-f]{9}"}) for each in asked()]
    check_logprobs(target, PROMPTS, params, Engine(target, tiny_draft(target), "n8").generate(PROMPTS, params))


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": (answers("llama")[2][6],)}, {"stop": "gU"}])
def test_updates_make_up_the_output(params):
    """Also where the answer ends within a round, and the tokens behind its end are dropped."""
    target = tiny_target("llama", tiny_tokenizer())
    for depth, overlap in product((0, 3), (False, True)):
        engine = Engine(target, tiny_draft(target), "chain3", overlap=overlap)
        guide(engine, [answers("llama")[2]] * 9, lambda _, depth=depth: depth)
        for count in (None, 2):
            told: list[TokenLogprobs] = []
            engine.add(PROMPTS[2], replace(SamplingParams(max_tokens=LENGTH, logprobs=count), **params))
            while engine.has_unfinished:
                for update in engine.step():
                    assert (update.logprobs is None) == (count is None)
                    assert count is None or [each.token_id for each in update.logprobs] == update.token_ids
                    told += update.logprobs or []
                    output = update.output
            assert output.logprobs == (None if count is None else told)
            assert len(told) == (0 if count is None else len(output.token_ids))
        assert not params or len(output.token_ids) < LENGTH


class OneOf(Ranks):
    """One of several ranks, which only notes what it would exchange."""

    def __init__(self, rank: int, size: int):
        self.group, self.rank, self.size, self.divided = "others", rank, size, True

    def all(self, batch, *own):
        self.sent = own[0]
        return (torch.zeros(batch, own[0].shape[1], dtype=torch.int64),)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_rank_computes_its_own_rows(size):
    torch.manual_seed(0)
    counts, logits = [1, None, 2, None], torch.randn(4, 5, 9)
    path, tokens = torch.randint(5, (4, 3)), torch.randint(9, (4, 3))
    rows, parts = LogprobRows(counts), []
    whole = rows.compute(logits, path, tokens, Ranks())
    for rank in range(size):
        ranks = OneOf(rank, size)
        rows.compute(ranks.own(logits), path, tokens, ranks)
        parts.append(ranks.sent)
    assert torch.equal(torch.cat(parts)[:4].view(4, 3, 5), whole._arriving.wait())
    found = whole.of([[int(token) for token in row] for row in tokens])
    for row, count in enumerate(counts):
        assert (found[row] is None) == (count is None)
        for place, each in enumerate(found[row] or []):
            table = logits[row, path[row, place]].log_softmax(-1)
            assert each.logprob == pytest.approx(float(table[tokens[row, place]]))
            assert each.top == [(int(i), pytest.approx(float(table[i]))) for i in table.topk(count).indices]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflowed_logits_have_numbers(dtype):
    logits = torch.tensor([[[0.0, torch.inf, -torch.inf, 1.0]]], dtype=dtype)
    zero = torch.zeros(1, 1, dtype=torch.long)
    ((found,),) = LogprobRows([2]).compute(logits, zero, zero + 1, Ranks()).of([[1]])
    assert found.logprob == 0.0
    assert found.top[0] == (1, 0.0)


@pytest.mark.parametrize("other", [None, 0, 40, 96])
def test_what_a_row_is_told_is_its_own(other):
    """Among equals the token of the lowest id is first, however many another row asks for."""
    torch.manual_seed(0)
    logits = torch.randint(-3, 4, (2, 1, 96)).bfloat16()
    path, tokens = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
    ((told,), _) = LogprobRows.of([5, other]).compute(logits, path, tokens, Ranks()).of([[0], [0]])
    wanted = sorted(range(96), key=lambda token: (-float(logits[0, 0, token]), token))[:5]
    assert [token for token, _ in told.top] == wanted
