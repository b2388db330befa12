"""Tokens that a drafter has still to read: where the host knows that none is padding, fewer kernels do the same."""

from collections.abc import Callable
from itertools import count
from random import Random

import pytest
import torch

from eagle_train.inference import Eagle, Engine, SamplingParams
from eagle_train.inference.cache.block_pool import BLOCK
from eagle_train.inference.decode.adaptive import Adaptive
from eagle_train.inference.drafters.drafter import Pending
from tests.support.reference_answers import PROMPTS, token_ids
from tests.support.tiny import shared_target, tiny_draft


def of(rows: int, width: int, seed: int, *, is_full: bool) -> Pending:
    """Random tokens and states; nothing is padding."""
    random = torch.Generator().manual_seed(seed)
    tokens, hidden = torch.randint(99, (rows, width), generator=random), torch.randn(rows, width, 4, generator=random)
    lengths = torch.randint(5, 50, (rows,), generator=random)
    return Pending(tokens, hidden, torch.full((rows,), width), lengths, is_full=is_full)


@pytest.mark.parametrize(
    "change",
    [
        lambda pending, _: pending.append_token(of(3, 1, 1, is_full=True)),
        lambda pending, _: pending.append_token(of(3, 1, 1, is_full=True)).append_token(of(3, 1, 2, is_full=True)),
        lambda pending, _: pending.rows(torch.tensor([2, 0])),
        lambda pending, _: pending.rows(slice(1)),
        lambda pending, full: pending.concat_rows(of(2, 4, 3, is_full=full)),
        lambda pending, full: pending.concat_rows(of(2, 2, 3, is_full=full)),
        lambda pending, full: of(2, 5, 3, is_full=full).concat_rows(pending),
        lambda pending, full: pending.with_rows([1], of(1, 4, 3, is_full=full)),
    ],
    ids=["append", "append_twice", "rows", "slice", "as_wide", "narrower", "wider", "with_rows"],
)
def test_what_is_known_to_be_full_becomes_what_others_become(change: Callable[[Pending, bool], Pending]):
    full, other = (change(of(3, 4, 0, is_full=is_full), is_full) for is_full in (True, False))
    for name in ("tokens", "hidden", "counts", "lengths", "last", "end", "draft_lengths"):
        assert torch.equal(getattr(full, name), getattr(other, name)), name
    assert not other.is_full
    assert full.is_full == bool((full.counts == full.tokens.shape[1]).all())
    assert full.last.is_contiguous()


def test_it_is_narrowed_to_what_is_real():
    pending = of(2, 3, 0, is_full=True).concat_rows(of(1, 5, 1, is_full=True)).rows(torch.tensor([0, 1]))
    narrow = pending.narrow(3, is_full=True)
    assert narrow.is_full
    assert torch.equal(narrow.last, pending.last)
    assert narrow.narrow(3, is_full=True) is narrow
    assert not narrow.narrow(3, is_full=False).is_full


@pytest.mark.parametrize("overlap", [False, True])
def test_in_an_engine_none_is_called_full_that_is_not(monkeypatch, overlap):
    """With rounds with and without drafts by chance, rows without a drafter, a memory that is too small for all, and
    requests that come and go."""
    seen, make, random = [], Pending.__init__, Random(0)

    def noted(self, *given, **named):
        make(self, *given, **named)
        if self.is_full:
            seen.append(self.tokens.shape)
            assert bool((self.counts == self.tokens.shape[1]).all())

    target, turns = shared_target("llama"), count()
    params = [SamplingParams(max_tokens=24 + 3 * place, ignore_eos=True) for place in range(len(PROMPTS))]
    params[1] = SamplingParams(max_tokens=40, ignore_eos=True, drafter="none")
    plain = token_ids(Engine(target).generate(PROMPTS, params))
    engine = Engine(
        target, Eagle(tiny_draft(target), target), "auto", max_batch_size=4, kv_tokens=12 * BLOCK, overlap=overlap
    )

    def chosen(self, rows):
        return self.plain if next(turns) % 8 else random.choice(self._plans(len(rows)))

    monkeypatch.setattr(Adaptive, "choose", chosen)
    monkeypatch.setattr(Adaptive, "observe", lambda *given: False)
    monkeypatch.setattr(Pending, "__init__", noted)
    assert token_ids(engine.generate(PROMPTS, params)) == plain
    widths = {width for _, width in seen}  # behind a round with drafts, with overlap, the device alone knows
    assert widths >= ({1} if overlap else {1, 2, 3, 4})
