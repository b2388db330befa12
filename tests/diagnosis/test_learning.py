"""What is said of a draft's learning by its figures alone."""

from types import SimpleNamespace

import pytest
import torch

from eagle_train.diagnosis import learning
from eagle_train.diagnosis.learning import drift, table_hits
from eagle_train.diagnosis.measure import Measured
from eagle_train.diagnosis.texts import Text, read_by_target
from tests.support.tiny import shared_target


def made(taken: list[int]) -> Measured:
    accepted, count = torch.tensor(taken).double(), len(taken)
    places = torch.arange(count)
    return Measured(accepted, (accepted > 0).double(), places % 10, places, torch.ones(count))


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
    found = drift(made([taken[place] for place in order]), seed=0)
    assert [each.cause for each in found.findings] == (["drift"] if drifts else [])


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
