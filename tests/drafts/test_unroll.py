"""drafts/unroll.py: all slots at once give what drafting gives chain by chain, and acceptance counts these chains."""

from contextlib import nullcontext

import pytest
import torch

from eagle_train.drafts.unroll import unroll
from eagle_train.ops.kernels import plain
from eagle_train.training.evaluate import chain_acceptance
from eagle_train.training.parallelize import recomputed
from tests.support.flash_on_cpu import flash_on_cpu
from tests.support.reference_chains import (
    LENGTHS,
    PASSES,
    chains,
    documents,
    draft_inputs,
    exact_draft,
    positions_of,
)
from tests.support.tiny import shared_target, tiny_draft

ROW = sum(LENGTHS[0])
IROPE = {"irope": True, "attention_chunk": 4, "num_layers": 3}
WINDOW, SINK = {"window": 6, "sink": True}, {"sink": True, "first_token": "skip"}
KINDS = [
    {},
    {"first_token": "skip", "norms": "full"},
    IROPE,
    IROPE | {"first_token": "skip"},
    WINDOW,
    SINK,
    {"window": 3, "first_token": "skip"},  # shorter than the deepest chains
    {"window": 1, "sink": True},
]
IDS = ["default", "skip, all norms", "irope", "skip, irope", "window, sink", "sink", "window 3, skip", "window 1, sink"]


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


def weighted(states: dict[tuple[int, int, int], torch.Tensor]) -> torch.Tensor:
    """A sum in which every number of every chain, {(row, slot, depth): [H]}, has a weight of its own."""
    ends = torch.stack([states[key] for key in sorted(states)])
    return (ends * torch.arange(ends.numel(), dtype=ends.dtype).sin().view(ends.shape)).sum()


@pytest.mark.parametrize("way", ["cpu", "tiled", "cuda", "recomputed"])
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_gradients_are_those_of_chains_drafted_slot_by_slot(kind, way):
    """By each kernel, and where a layer runs again in the backward pass, after later passes have run."""
    draft = exact_draft(**kind).requires_grad_(True)
    embeddings, previous, positions = draft_inputs(draft)
    previous.requires_grad_(True)
    wanted = [previous, *draft.parameters()]
    expected = {}
    for row, place in documents(LENGTHS):
        for (depth, slot), state in chains(draft, embeddings[row, place], previous[row, place]).items():
            expected[row, place.start + slot, depth] = state
    gradients = torch.autograd.grad(weighted(expected), wanted)
    for layer in draft.layers if way == "recomputed" else ():
        layer.forward = recomputed(layer.forward)
    with {"tiled": lambda: plain("attention"), "cuda": flash_on_cpu}.get(way, nullcontext)():
        states = unroll(draft, embeddings, previous, positions, LENGTHS, PASSES)
        found = torch.autograd.grad(weighted({key: states[key[2]][key[0], key[1]] for key in expected}), wanted)
    for one, other in zip(found, gradients, strict=True):
        assert (one - other).norm() < (1e-4 if way == "cuda" else 1e-5) * other.norm()  # its log-sum-exp is fp32


def test_what_is_kept_grows_as_the_tokens_do():
    """For the backward pass of three passes; whole score matrices would grow with the square."""
    draft = tiny_draft(shared_target()).requires_grad_(True)

    def kept(length: int) -> int:
        sizes, lengths = {}, [[length]]

        def keep(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x  # held: no address is used twice
            return x

        embeddings, previous = torch.randn(2, 1, length, draft.config.hidden_size)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            unroll(draft, embeddings, previous, positions_of(lengths), lengths, 3)
        return sum(size for size, _ in sizes.values())

    weights = sum(parameter.nbytes for parameter in draft.parameters())
    once, twice = (kept(length) - weights for length in (256, 512))
    assert once > 0
    assert twice <= 2.01 * once


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

    def choose(state: torch.Tensor, depth: int) -> torch.Tensor:
        assert state is states[depth]
        return state.squeeze(-1).long()

    held, possible = chain_acceptance(states, best, choose, supervised, positions)
    assert (held.tolist(), possible.tolist()) == counted_by_hand(picks, best, supervised, lengths)
    assert held[0] > held[-1] > 0
    assert held.dtype == possible.dtype == torch.float64


def test_acceptance_of_a_draft_that_is_always_right_and_of_one_that_is_right_once():
    positions, best = torch.arange(6)[None], torch.zeros(1, 6)
    supervised = positions > 0
    right, wrong = torch.zeros(1, 6, 1), torch.ones(1, 6, 1)

    def shares(*states: torch.Tensor) -> list[float]:
        held, possible = chain_acceptance(list(states), best, lambda state, _: state[..., 0], supervised, positions)
        return (held / possible).tolist()

    assert shares(right, right, right) == [1.0, 1.0, 1.0]
    assert shares(right, wrong, right) == [1.0, 0.0, 0.0]  # a chain ends where it is first wrong
