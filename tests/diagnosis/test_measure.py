"""Chains from every slot against a plain loop, and intervals over prompts."""

from types import SimpleNamespace

import pytest
import torch

from eagle_train.diagnosis.compare import calls
from eagle_train.diagnosis.measure import (
    FEWEST,
    Measured,
    between,
    difference,
    hits,
    interval,
    measured,
    served_tpc,
    unexplained,
)
from eagle_train.diagnosis.texts import Text, read_by_target
from eagle_train.drafts import Head, planned_config
from eagle_train.inference.requests.sequence import Stats
from evals.bench import statistics
from evals.bench.statistics import decoded_tpc
from tests.support.tiny import random_tokens, shared_target, tiny_mtp, trained_draft


@pytest.fixture(scope="module")
def part():
    prompts, answers = random_tokens(5, 3, 7), random_tokens(9, 12, 2, seed=1)
    texts = [Text(number, *pair) for number, pair in enumerate(zip(prompts, answers, strict=True))]
    (part,) = read_by_target(shared_target(), texts, ())
    return part


def test_chains_are_those_of_a_plain_loop(part):
    target = shared_target()
    draft = trained_draft(target)
    found = measured(target, draft, [part], depth=3)
    right = [each[0].tolist() for each in hits(draft, Head(draft, target.lm_head), part, part.best, 3)]
    taken, owners = [], []
    for text, start in zip(part.texts, part.starts, strict=True):
        for slot in range(len(text.prompt) - 1, len(text.tokens) - 1):
            count = 0
            while count < 3 and slot + count < len(text.tokens) - 1 and right[count][start + slot + count]:
                count += 1
            taken.append(count)
            owners.append(text.number)
    assert (found.taken.tolist(), found.owner.tolist()) == (taken, owners)
    assert 0 < found.tokens < 3
    assert found.agreement == pytest.approx(sum(each > 0 for each in taken) / len(taken))
    assert found.per_depth(3) == [
        pytest.approx(sum(each >= depth for each in taken) / len(taken)) for depth in (1, 2, 3)
    ]


def test_each_of_several_modules_is_compared(part):
    draft = tiny_mtp(shared_target(), modules=2)
    found = {call.name for call in calls(shared_target(), draft, part)}
    assert found == {"rotary", *(name.rpartition(".")[0] for name, _ in draft.named_parameters())}


def test_each_lm_head_of_a_drafts_own_is_compared(part):
    draft = planned_config(shared_target().config, {"kind": "medusa", "own_head": True, "heads": 3}).module()
    draft.init_weights(0, shared_target().lm_head)
    found = {call.name for call in calls(shared_target(), draft, part)}
    assert found == {name.rpartition(".")[0] for name, _ in draft.named_parameters()}


def test_an_interval_is_over_prompts_and_not_over_slots():
    """A hundred slots of two prompts are no more than two prompts."""
    values = torch.cat((torch.zeros(50), torch.ones(50))).double()
    few = interval(values, torch.arange(100) // 50)
    many = interval(values, torch.arange(100))
    assert (few.low, few.high) == (0.0, 1.0)
    assert few.mean == many.mean == 0.5
    assert 0.3 < many.low < 0.45 < 0.55 < many.high < 0.7


def test_the_tpc_that_was_served_is_that_of_its_calls():
    """A short answer counts for its calls, and one without drafted tokens for nothing."""
    served = {1: (2, 8), 4: (3, 6), 5: (0, 0)}  # calls, tokens
    outputs = {number: SimpleNamespace(stats=Stats(*counts)) for number, counts in served.items()}
    found = served_tpc(outputs)
    assert found.mean == pytest.approx(14 / 5)
    assert found.mean == decoded_tpc([SimpleNamespace(output=each) for each in outputs.values()], max_tokens=9)
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(4.0))
    assert served_tpc({5: outputs[5]}) is None


def made(first: list[float], sure: list[float]) -> Measured:
    right, count = torch.tensor(first).double(), len(first)
    return Measured(right, right, torch.arange(count) % 10, torch.arange(count), torch.tensor(sure))


def test_what_an_easier_text_explains_is_no_gain():
    """Both drafts are right where the target is sure, and one text has more of such slots."""
    easy = made([1.0] * 90 + [0.0] * 30, [0.9] * 90 + [0.3] * 30)
    hard = made([1.0] * 30 + [0.0] * 90, [0.9] * 30 + [0.3] * 90)
    assert difference(easy, hard).mean == pytest.approx(0.5)
    assert unexplained(easy, hard).mean == pytest.approx(0.0)
    worse = made([1.0] * 45 + [0.0] * 75, [0.9] * 90 + [0.3] * 30)
    assert unexplained(worse, hard).mean == pytest.approx(-0.375)
    assert unexplained(made([1.0] * 5, [0.9] * 5), hard) is None
    few = easy.where(easy.owner < FEWEST - 1)
    assert len(few.owner) > 50
    assert unexplained(few, hard) is None
    assert unexplained(easy, few) is None


def test_the_fewest_prompts_are_those_of_evaluations():
    assert FEWEST == statistics.FEWEST
    assert interval(torch.ones(9), torch.arange(9) % (FEWEST - 1)).bounds is None
    assert interval(torch.ones(9), torch.arange(9) % FEWEST).bounds == [1.0, 1.0]


def test_texts_of_other_lengths_are_compared_prompt_by_prompt():
    one, other = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = between(one, torch.tensor([0, 0, 1]), other, torch.tensor([0, 1, 1, 2]))
    assert found.mean == 0.5  # of prompt 0 alone: 1, of prompt 1: 0
