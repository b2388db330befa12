"""Grouped products of experts against a loop over them, with their gradients."""

import pytest
import torch
import torch.nn.functional as F

from eagle_train.ops import grouped

ROWS, EXPERTS, WIDTH, INNER = 23, 4, 16, 24
CHOSEN = {
    "all": torch.arange(ROWS) % EXPERTS,
    "not the first and not the last": torch.arange(ROWS) % 2 + 1,
    "one alone": torch.full((ROWS,), 2),
}


def matrices(seed: int, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], ...]:
    """Gates, ups and downs of each expert."""
    generator = torch.Generator().manual_seed(seed)

    def each(*shape: int) -> list[torch.Tensor]:
        made = [torch.randn(shape, generator=generator).to(dtype) / shape[1] ** 0.5 for _ in range(EXPERTS)]
        return [matrix.requires_grad_() for matrix in made]

    return each(INNER, WIDTH), each(INNER, WIDTH), each(WIDTH, INNER)


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_rows_are_sorted_by_expert_and_their_ends_are_told(chosen):
    order, ends = grouped.by_expert(chosen, EXPERTS)
    assert torch.equal(chosen[order], chosen.sort().values)
    assert ends.dtype == torch.int32
    assert torch.equal(ends.long(), torch.bincount(chosen, minlength=EXPERTS).cumsum(0))


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_the_products_of_all_experts_are_those_of_each_alone(chosen):
    gates, ups, downs = matrices(0)
    weights = [*gates, *ups, *downs]
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    order, ends = grouped.by_expert(chosen, EXPERTS)
    gate_up, down = grouped.stacked(rows.dtype, gates, ups), grouped.stacked(rows.dtype, downs)
    found = torch.zeros_like(rows).index_copy(0, order, grouped.swiglu(rows[order], gate_up, down, ends))
    expected = torch.stack(
        [
            (F.silu(row @ gates[expert].t()) * (row @ ups[expert].t())) @ downs[expert].t()
            for row, expert in zip(rows, chosen.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    slope = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad(found, [rows, *weights], slope)
    theirs = torch.autograd.grad(expected, [rows, *weights], slope, materialize_grads=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_stack_is_cast_while_it_is_made_and_its_gradients_return_in_the_matrices_dtypes():
    gates, ups, _ = matrices(0)
    stack = grouped.stacked(torch.bfloat16, gates, ups)
    for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        assert torch.equal(stack[expert], torch.cat((gate, up)).bfloat16())
    slope = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    stack.backward(slope)
    for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        assert gate.grad.dtype == torch.float32
        assert torch.equal(torch.cat((gate.grad, up.grad)), slope[expert].float())


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "served"),
    [
        ("cpu", torch.float32, (7, 9), True),
        ("cpu", torch.float64, (8, 8), False),
        ("cuda", torch.bfloat16, (48, 32), True),
        ("cuda", torch.bfloat16, (48, 36), False),  # 72 bytes
        ("cuda", torch.float32, (48, 36), True),
    ],
)
def test_what_has_a_grouped_product(device, dtype, widths, served):
    assert grouped.supports(torch.device(device), dtype, *widths) is served
