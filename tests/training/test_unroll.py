"""training/unroll.py: all slots at once give what drafting gives chain by chain, and acceptance counts these chains."""

import pytest
import torch

from eagle_train.training.evaluate import chain_acceptance
from eagle_train.training.unroll import unroll
from tests.support.reference_chains import (
    LENGTHS,
    PASSES,
    chains,
    documents,
    draft_inputs,
    exact_draft,
    positions_of,
)

ROW = sum(LENGTHS[0])
IROPE = {"irope": True, "attention_chunk": 4, "num_layers": 3}
KINDS = [{}, {"first_token": "skip", "norms": "full"}, IROPE, IROPE | {"first_token": "skip"}]
IDS = ["default", "skip, all norms", "irope", "skip, irope"]


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_every_pass_equals_chains_drafted_slot_by_slot(kind):
    draft = exact_draft(**kind)
    embeddings, previous, positions = draft_inputs(draft)
    states = unroll(draft, embeddings, previous, positions, LENGTHS, PASSES)
    assert [state.shape for state in states] == [embeddings.shape] * PASSES
    compared = 0
    for row, place in documents(LENGTHS):
        for (depth, slot), expected in chains(draft, embeddings[row, place], previous[row, place]).items():
            actual = states[depth][row, place.start + slot]
            assert (actual - expected).norm() < 1e-5 * expected.norm(), (row, place, depth, slot)
            compared += 1
    slots = [length - draft.config.first_slot for row in LENGTHS for length in row]
    assert compared == sum(max(0, count - depth) for count in slots for depth in range(PASSES))


def test_a_chain_lives_on_its_own_states_and_not_on_the_targets():
    draft = exact_draft()
    embeddings, previous, positions = draft_inputs(draft, [[ROW]])
    states = unroll(draft, embeddings, previous, positions, [[ROW]], PASSES)
    moved = previous.clone()
    moved[:, 11:] += 1.0  # what the target says of slot 10 and later
    after = unroll(draft, embeddings, moved, positions, [[ROW]], PASSES)
    for depth, (one, other) in enumerate(zip(states, after, strict=True)):
        changed = (one != other).any(-1)[0]
        assert not changed[depth : 11 + depth].any()  # a chain rooted at slot 10 or before has not heard of it
        assert changed[11 + depth :].all()


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_gradients_flow_through_every_pass(kind):
    draft = exact_draft(**kind).requires_grad_(True)
    embeddings, previous, positions = draft_inputs(draft)
    previous.requires_grad_(True)
    states = unroll(draft, embeddings, previous, positions, LENGTHS, PASSES)
    for depth, state in enumerate(states):
        (state * (positions >= depth).unsqueeze(-1)).square().sum().backward(retain_graph=True)
        gradients = {"previous": previous.grad} | {name: weight.grad for name, weight in draft.named_parameters()}
        assert [name for name, gradient in gradients.items() if not gradient.isfinite().all()] == [], depth
        assert [name for name, gradient in gradients.items() if not gradient.any()] == [], depth
        ends = previous.grad[:, ROW - depth :]  # no chain of this depth has its root so late
        assert not ends.any()
        previous.grad = None
        draft.zero_grad()


def counted_by_hand(
    picks: list[torch.Tensor], best: torch.Tensor, supervised: torch.Tensor, lengths: list[list[int]]
) -> tuple[list[int], list[int]]:
    """Chain by chain: how many were accepted down to each depth, and how many there were."""
    held, possible = [0] * len(picks), [0] * len(picks)
    for row, place in documents(lengths):
        for root in range(place.start, place.stop):
            holds = True
            for depth, pick in enumerate(picks):
                slot = root + depth
                if slot >= place.stop or not supervised[row, slot]:
                    break
                possible[depth] += 1
                holds = holds and bool(pick[row, slot] == best[row, slot])
                held[depth] += holds
    return held, possible


def test_acceptance_counts_chains():
    lengths = [[30, 7, 3, 24], [1, 2, 61]]
    positions, generator = positions_of(lengths), torch.Generator().manual_seed(0)
    supervised = torch.rand(positions.shape, generator=generator) < 0.9
    best = torch.randint(2, positions.shape, generator=generator)
    picks = [torch.where(torch.rand(best.shape, generator=generator) < 0.8, best, 1 - best) for _ in range(PASSES)]
    states = [pick.unsqueeze(-1).float() for pick in picks]
    held, possible = chain_acceptance(states, best, lambda state: state.squeeze(-1).long(), supervised, positions)
    assert (held.tolist(), possible.tolist()) == counted_by_hand(picks, best, supervised, lengths)
    assert held[0] > held[-1] > 0
    assert held.dtype == possible.dtype == torch.float64


def test_acceptance_of_a_draft_that_is_always_right_and_of_one_that_is_right_once():
    positions, best = torch.arange(6)[None], torch.zeros(1, 6)
    supervised = positions > 0
    right, wrong = torch.zeros(1, 6, 1), torch.ones(1, 6, 1)

    def shares(*states: torch.Tensor) -> list[float]:
        held, possible = chain_acceptance(list(states), best, lambda state: state[..., 0], supervised, positions)
        return (held / possible).tolist()

    assert shares(right, right, right) == [1.0, 1.0, 1.0]
    assert shares(right, wrong, right) == [1.0, 0.0, 0.0]  # a chain ends where it is first wrong
