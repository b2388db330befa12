"""Mistakes of a user's drafter: each is one line, or harmless, and never another answer."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.inference import Engine
from eagle_train.inference.drafters.drafter import Drafted
from tests.support.reference_answers import GREEDY, PROMPTS, answers, cut, token_ids
from tests.support.tiny import shared_target


class Wrong:
    """Proposes what `make` makes of right tokens int64 [A, N], and rewinds to `left` of what was committed."""

    def __init__(self, make: Callable[[torch.Tensor], Any], left: Callable[[Any], Any] = lambda pending: pending):
        self.make, self.left, self.caches = make, left, []

    def compile(self, sizes):
        return []

    def prefill(self, prefix, tokens, positions, hidden, before):
        pass

    def propose(self, plan, prefix, draft_prefix, pending, choice):
        made = self.make(pending.last.repeat(1, plan.tree.num_nodes))
        return Drafted(made, None, None) if isinstance(made, torch.Tensor) else made

    def rewind(self, plan, prefix, suffix, node, pending):
        return self.left(pending)


def decoded(drafter: Wrong) -> list[list[int]]:
    engine = Engine(shared_target("llama"), drafter, "d2_bf2", max_batch_size=2)
    return token_ids(engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("make", [lambda right: right.fill_(7), lambda right: right.new_full((), 7).expand_as(right)])
def test_another_token_at_the_root_changes_no_answer(make):
    assert decoded(Wrong(make)) == cut(answers("llama"))


def test_a_tensor_that_the_drafter_keeps_is_not_written_to():
    kept = torch.full((2, 7), 7)
    decoded(Wrong(lambda right: kept[: len(right)]))
    assert (kept == 7).all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda right: None, "propose returned NoneType; it must return a Drafted"),
        (lambda right: (right, None), "propose returned tuple; it must return a Drafted"),
        (lambda right: Drafted(right.tolist(), None, None), "propose gave tokens as list; it must be a tensor [2, 7]"),
        (lambda right: right[:, :3], "propose gave tokens of shape [2, 3]; it must be [2, 7]"),
        (lambda right: right[0], "propose gave tokens of shape [7]; it must be [2, 7]"),
        (lambda right: right.to("meta"), "propose gave tokens on meta; it must be on cpu"),
        (lambda right: right.float(), "propose gave tokens of torch.float32; they must be torch.int64"),
        (lambda right: right + 96, "propose gave the token "),
        (lambda right: right * 0 - 1, "propose gave the token -1; tokens must be from 0 to 95"),
        (
            lambda right: Drafted(right, torch.zeros(2, 7, 3), None),
            "propose gave q of shape [2, 7, 3]; it must be [2, 7, 96]",
        ),
    ],
)
def test_what_is_no_draft_is_one_line(make, said):
    with pytest.raises(UserError, match=re.escape(f"drafter Wrong: {said}")):
        decoded(Wrong(make))


def test_a_rewind_that_returns_nothing_is_one_line():
    said = "drafter Wrong: rewind returned NoneType; it must return the Pending it was given, or the newest of it"
    with pytest.raises(UserError, match=re.escape(said)):
        decoded(Wrong(lambda right: right, left=lambda pending: None))
