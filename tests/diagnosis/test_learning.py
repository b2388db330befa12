"""What is said of a draft's learning by its figures alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle_train.diagnosis import learning
from eagle_train.diagnosis.learning import drift, table_hits
from eagle_train.diagnosis.measure import Measured
from eagle_train.diagnosis.texts import Text, read_by_target
from tests.support.tiny import shared_target, tiny_draft


def made(taken: list[int]) -> Measured:
    accepted, count = torch.tensor(taken).double(), len(taken)
    places = torch.arange(count)
    return Measured(accepted, (accepted > 0).double(), places // 10, places, torch.ones(count))


@pytest.mark.parametrize(
    ("taken", "drifts"),
    [
        ([1] * 80 + [3] * 10 + [0] * 10, True),  # nine of ten are right, and one of nine goes on
        ([1] * 20 + [3] * 60 + [0] * 20, False),
        ([1] * 30 + [2] * 15 + [0] * 55, False),  # the second is right as seldom as the first
        ([1] * 20 + [0] * 80, False),  # too few to be told
    ],
)
def test_a_draft_that_cannot_go_on_from_its_own_states(taken, drifts):
    order = torch.randperm(len(taken), generator=torch.Generator().manual_seed(0)).tolist()
    found = drift(made([taken[place] for place in order]), depth=3, seed=0)
    assert [each.cause for each in found.findings] == (["drift"] if drifts else [])


def test_drift_is_not_asked_where_no_second_token_can_be_taken():
    """Of chains of one token, and at a text's last slot: here every text has two slots, whose second ends it."""
    found = drift(made([1] * 100), depth=1, seed=0)
    assert (found.findings, [each.check for each in found.not_checked]) == ([], ["a chain's second token"])
    short, places = torch.tensor([2.0, 1.0] * 50).double(), torch.arange(100)
    own = Measured(short, (short > 0).double(), places // 2, places % 2, torch.ones(100))
    found = drift(own, depth=3, seed=0)
    assert (found.findings, found.figures) == ([], {"acceptance_of_second_after_first": 1.0})


@pytest.mark.parametrize(("table", "checked"), [(0.8, True), (0.95, False)])
def test_training_is_not_judged_where_a_table_knows_nearly_all(table, checked, monkeypatch):
    own = made([1] * 98 + [0] * 2)
    monkeypatch.setattr(learning, "_table_at_slots", lambda parts: torch.full((100,), table).double())
    found = learning.undertrained(own, [], True, {}, seed=0)
    assert (found.findings, not found.not_checked) == ([], checked)


@pytest.mark.parametrize("alike", [True, False])
def test_texts_of_which_the_target_is_surer_are_no_training_data(alike, monkeypatch):
    """The file's have twice the agreement. The target is as sure of its own, or only where the draft is right."""
    steps = torch.linspace(0, 0.1, 100)
    own, given = made([1, 0] * 50), replace(made([1] * 100), sure=0.8 + steps)
    own = replace(own, sure=(0.8 if alike else 0.8 * own.first.float()) + steps)
    monkeypatch.setattr(learning, "measured", lambda *_: given)
    found = learning.off_policy(None, None, own, [None], 3, seed=0)
    assert [each.cause for each in found.findings] == (["off_policy"] if alike else [])


def test_a_table_knows_the_other_prompts_alone():
    """Of three texts the first two say that 6 follows 5; the third has pairs of its own, which no other has."""
    texts = [Text(0, [4, 5], [6, 7]), Text(1, [8, 5], [6, 9]), Text(2, [11, 12], [13, 6])]
    (part,) = read_by_target(shared_target(), texts, ())
    hit = table_hits([part])
    usual = 6  # the most frequent token of the answers
    guesses = [usual, 6, usual, usual, usual, 6, usual, usual, usual, usual, usual, usual]
    assert hit.tolist() == [guess == best for guess, best in zip(guesses, part.best[0].tolist(), strict=True)]


@pytest.mark.parametrize("table_knows", [False, True])
def test_a_fall_that_a_table_has_too_is_the_texts(table_knows, monkeypatch):
    """Eight answers whose first 32 tokens are easy."""
    position = torch.arange(64).repeat(8)
    first = (position < 32).double()
    own = Measured(first, first, torch.arange(8).repeat_interleave(64), position, torch.ones(len(first)))
    hit = first if table_knows else torch.full_like(first, 0.5)
    monkeypatch.setattr(learning, "_table_at_slots", lambda parts: hit)
    draft = SimpleNamespace(config=SimpleNamespace(attention_width=0))
    found = learning.context(None, draft, [], own, 3, 0)
    assert [each.cause for each in found.findings] == ([] if table_knows else ["context"])
    assert found.not_checked == []


def test_a_fall_of_a_draft_that_attends_to_chunks_is_told_without_a_window(monkeypatch):
    """Which its layers cannot be given."""
    position = torch.arange(64).repeat(8)
    first = (position < 32).double()
    own = Measured(first, first, torch.arange(8).repeat_interleave(64), position, torch.ones(len(first)))
    monkeypatch.setattr(learning, "_table_at_slots", lambda parts: torch.full_like(first, 0.5))
    draft = tiny_draft(shared_target(), num_layers=2, irope=True, attention_chunk=16)
    found = learning.context(shared_target(), draft, [], own, 3, 0)
    assert [each.cause for each in found.findings] == ["context"]
    assert "window" not in found.findings[0].measured
