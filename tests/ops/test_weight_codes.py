"""Codes and scales: what fits comes back bit by bit, what does not is within half a step, groups are apart.

Error feedback against least squares, solved anew for every column.
"""

from collections.abc import Iterable

import pytest
import torch

from eagle_train.ops import weight_codes as module
from eagle_train.ops.weight_codes import (
    DAMPING,
    FP8,
    FP8_MAX,
    GROUP,
    STEPS,
    TOPS,
    dequantise,
    pack_int4,
    quantise_fp8,
    quantise_int4,
    quantise_rows_fp8,
    unpack_int4,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("least", "most"), [(-8, 7), (-7, 7), (-8, -1), (-8, 0), (0, 7)])
def test_an_int4_weight_comes_back_bit_by_bit(least, most):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(least, most + 1, (5, 3 * GROUP), generator=generator).to(torch.int8)
    scales = random(5, 3).abs().add(0.01).bfloat16()
    found, found_scales = quantise_int4(dequantise(codes, scales))
    assert torch.equal(found, codes)
    assert torch.equal(found_scales, scales)
    assert (found_scales.dtype, found.dtype) == (torch.bfloat16, torch.int8)


def test_an_fp8_weight_comes_back_bit_by_bit():
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    codes = every[~every.float().isnan()].repeat(3, 1)
    scales = torch.tensor([[1.0], [2.0**-9], [96.0]])  # few bits each, so that the products are exact
    found, found_scales = quantise_fp8(dequantise(codes, scales))
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found_scales, scales)


def test_int4_errs_by_half_a_step_and_less_than_the_plain_scale():
    weight = random(16, 4 * GROUP, seed=1)
    codes, scales = quantise_int4(weight)
    wide = scales.float().abs().repeat_interleave(GROUP, dim=1)
    error = (dequantise(codes, scales) - weight).abs()
    clipped = (codes == 7) | (codes == -8)
    assert (error <= wide / 2)[~clipped].all()
    assert (error <= 3.05 * wide)[clipped].all()  # the largest, of about 10 steps, ends at the code 7
    step = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7
    plain = step.repeat_interleave(GROUP, dim=1)
    ours, other = error.square().sum(), ((weight / plain).round() * plain - weight).square().sum()
    assert 0.6 < ours / other < 0.7


def test_fp8_errs_by_half_its_last_bit():
    weight = random(64, 256, seed=2)
    codes, scales = quantise_fp8(weight)
    bound = torch.maximum(weight.abs() * 2.0**-4, scales * 2.0**-10)  # three bits behind the first; below, fixed steps
    assert ((dequantise(codes, scales) - weight).abs() <= bound * (1 + 1e-6)).all()
    assert set(codes.float().abs().amax(1).tolist()) <= set(TOPS)


def rounded_by(group: list[float], scale: float, scheme: str) -> list[float]:
    """What becomes of a group's weights with this scale."""
    if scheme == "quantise_int4":
        return [min(max(round(value / scale), -8), 7) * scale for value in group]
    return (torch.tensor(group, dtype=torch.float64) / scale).float().to(FP8).double().mul(scale).tolist()


def lost(group: list[float], rounded: list[float]) -> float:
    return sum((one - other) ** 2 for one, other in zip(group, rounded, strict=True))


def least(group: list[float], tried: Iterable[float], scheme: str) -> float:
    """The least squared error of a group, by one scale after another."""
    largest, keep = max(map(abs, group)), torch.bfloat16 if scheme == "quantise_int4" else torch.float32
    scales = [torch.tensor(largest / steps).to(keep).item() for steps in tried]
    return min(lost(group, rounded_by(group, scale, scheme)) for scale in scales)


@pytest.mark.parametrize(
    ("scheme", "tried", "plain", "fine", "gain"),
    [
        ("quantise_int4", STEPS, (7, 7.5), [sign * steps / 16 for sign in (1, -1) for steps in range(80, 240)], 0.98),
        ("quantise_fp8", TOPS, (448,), [448 * 2 ** (-i / 64) for i in range(64)], 0.85),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "lopsided"])
def test_each_scale_is_the_best_of_those_tried(scheme, tried, plain, fine, gain, kind):
    """Never worse than the largest magnitude's, and hardly worse than the best of a fine grid."""
    weight = random(12, GROUP, seed=4)
    weight = {"normal": weight, "heavy-tailed": weight**3, "lopsided": weight.exp()}[kind]
    codes, scales = (quantise_int4 if scheme == "quantise_int4" else quantise_fp8)(weight)
    found = [lost(*pair) for pair in zip(weight.tolist(), dequantise(codes, scales).tolist(), strict=True)]
    ours, old, best = ([least(row, by, scheme) for row in weight.tolist()] for by in (tried, plain, fine))
    assert found == pytest.approx(ours, rel=1e-4)
    assert all(one <= other * 1.0001 for one, other in zip(found, old, strict=True))
    assert gain * sum(found) < sum(best)


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_fp8])
def test_what_a_scale_can_hold_comes_back_bit_by_bit(quantise):
    values = torch.cat((random(20), -random(20))).bfloat16().float()[:, None]
    alone = torch.zeros(len(values), GROUP)
    alone[:, 77:78] = values
    equal, zero = values.expand(-1, GROUP), torch.zeros(4, GROUP)
    for weight in (equal, alone, zero):
        assert torch.equal(dequantise(*quantise(weight)), weight)


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_fp8])
def test_a_weight_that_was_rounded_is_not_rounded_further(quantise):
    weight = random(64, 2 * GROUP, seed=6)
    once = dequantise(*quantise(weight))
    torch.testing.assert_close(dequantise(*quantise(once)), once, rtol=2e-7, atol=0)


def test_activations_have_the_largest_as_the_last_code():
    x = random(2, 3, 64, seed=7)
    codes, scales = quantise_rows_fp8(x)
    assert torch.equal(scales, x.abs().amax(-1, keepdim=True) / FP8_MAX)
    assert torch.equal(codes.float(), (x / scales).to(FP8).float())
    assert torch.equal(codes.float().abs().amax(-1), torch.full((2, 3), FP8_MAX))
    codes, scales = quantise_rows_fp8(torch.zeros(1, 64))
    assert not codes.float().any()
    assert scales > 0


def test_an_outlier_costs_its_own_group_or_row_alone():
    weight = random(4, 2 * GROUP)
    spoilt = weight.clone()
    spoilt[1, 5] = 1e9
    (codes, scales), (others, other_scales) = quantise_int4(weight), quantise_int4(spoilt)
    assert torch.equal(codes[1, GROUP:], others[1, GROUP:])
    assert torch.equal(scales[1, 1], other_scales[1, 1])
    assert others[1, :GROUP].count_nonzero() == 1
    kept = [0, 2, 3]
    assert torch.equal(codes[kept], others[kept])
    (codes, _), (others, _) = quantise_fp8(weight), quantise_fp8(spoilt)
    assert torch.equal(codes[kept].float(), others[kept].float())
    assert others[1].float().count_nonzero() == 1


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_fp8])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e36])
def test_zeros_and_the_ends_of_fp32(quantise, size):
    weight = size * random(2, 2 * GROUP)
    weight[0, :GROUP] = 0
    codes, scales = quantise(weight)
    back = dequantise(codes, scales)
    assert (scales != 0).all()  # no division by zero made a code
    assert back.isfinite().all()
    assert back[0, :GROUP].count_nonzero() == 0
    assert (back - weight).abs().max() <= weight.abs().max()
    if size > 1:
        assert (back - weight).double().norm() < 0.15 * weight.double().norm()


def test_two_codes_a_byte():
    codes = torch.tensor([[1, -8, 7, 0]], dtype=torch.int8)
    assert pack_int4(codes).tolist() == [[0x90, 0xF8]]
    every = torch.cartesian_prod(*2 * [torch.arange(-8, 8)]).to(torch.int8)
    assert torch.equal(unpack_int4(pack_int4(every)), every)


def correlated(rows: int, inputs: int) -> torch.Tensor:
    """Inputs [rows, inputs] that are mixtures of a quarter as many, and a little of their own; some are larger."""
    few = inputs // 4
    mixed = random(rows, few, seed=1) @ random(few, inputs, seed=2) / few**0.5
    return (mixed + 0.3 * random(rows, inputs, seed=3)) * torch.logspace(-0.5, 0.5, inputs)


def solved(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The weights [N, C] of columns x [rows, C] whose output is nearest to `wanted` [rows, N]."""
    return torch.linalg.lstsq(x, wanted).solution.t()


def one_by_one(weight: torch.Tensor, x: torch.Tensor, group: int, is_int4: bool) -> torch.Tensor:
    """What the codes stand for, fp64: after each column, the weights still to be rounded are solved for anew.

    x [rows, K] are the inputs, to which damping adds a row for each column.
    """
    weight, x = weight.double(), x.double()
    x = torch.cat((x, (DAMPING * x.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=x.dtype)))
    output, rounded = x @ weight.t(), torch.zeros_like(weight)
    # what an error of 1 costs where the columns behind make up for it as well as they can
    behind = [x[:, i] - x[:, i + 1 :] @ solved(x[:, i + 1 :], x[:, i : i + 1])[0] for i in range(x.shape[1])]
    costs = torch.stack([rest.square().sum() for rest in behind])
    errors = [[least(row, [top], "quantise_fp8") for top in TOPS] for row in weight.tolist()]
    tops = torch.tensor(TOPS)[torch.tensor(errors).argmin(1)]
    for column in range(x.shape[1]):
        free = solved(x[:, column:], output - x[:, :column] @ rounded[:, :column].t())
        if not is_int4:
            scales = weight.abs().amax(1).float() / tops
            codes = (free[:, 0] / scales).to(FP8).double()
        else:
            if column % group == 0:
                tried = [(free[:, :group].abs().amax(1) / steps).bfloat16().double() for steps in STEPS]
                errors = [
                    free[:, :group] - (free[:, :group] / s[:, None]).round().clamp(-8, 7) * s[:, None] for s in tried
                ]
                total = torch.stack([(error.square() * costs[column : column + group]).sum(1) for error in errors])
                scales = torch.stack(tried).gather(0, total.argmin(0, keepdim=True))[0]
            codes = (free[:, 0] / scales).round().clamp(-8, 7)
        rounded[:, column] = codes * scales
    return rounded


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_fp8])
def test_error_feedback_is_least_squares_column_by_column(quantise, monkeypatch):
    monkeypatch.setattr(module, "GROUP", 8)
    weight, x = random(6, 24), correlated(40, 24)
    found = dequantise(*quantise(weight, x.t() @ x))
    torch.testing.assert_close(found, one_by_one(weight, x, 8, quantise is quantise_int4).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("quantise", "inputs"), [(quantise_int4, 3 * GROUP), (quantise_fp8, 3 * GROUP), (quantise_fp8, GROUP + 16)]
)
def test_error_feedback_spares_the_output(quantise, inputs):
    """The sum of |X (W - Wq)^T|^2, on the inputs it was made for and on others like them."""
    x = correlated(4096, inputs)
    weight, (x, others) = random(32, inputs, seed=5), x.chunk(2)
    nearest, ours = dequantise(*quantise(weight)), dequantise(*quantise(weight, x.t() @ x))
    for given in (x, others):
        lost = [(given @ (rounded - weight).t()).square().sum() for rounded in (nearest, ours)]
        assert lost[1] < 0.7 * lost[0]


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_fp8])
@pytest.mark.parametrize("size", [0.0, 1e-6, 3.0])
def test_without_correlations_error_feedback_rounds_to_nearest(quantise, size):
    """As where nothing was seen."""
    weight = random(5, 2 * GROUP)
    for found, wanted in zip(quantise(weight, size * torch.eye(2 * GROUP)), quantise(weight), strict=True):
        assert torch.equal(found.float(), wanted.float())
        assert found.dtype == wanted.dtype


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_fp8])
def test_inputs_that_were_always_zero_are_rounded_to_nearest(quantise):
    weight, x = random(5, 2 * GROUP), correlated(300, 2 * GROUP)
    dead = torch.arange(2 * GROUP) % 7 == 3
    x[:, dead] = 0
    codes, scales = quantise(weight, x.t() @ x)
    wide = scales.float().repeat_interleave(2 * GROUP // scales.shape[1], dim=1)
    steps = (weight / wide)[:, dead]
    wanted = steps.round().clamp(-8, 7) if quantise is quantise_int4 else steps.to(FP8).float()
    assert torch.equal(codes.float()[:, dead], wanted)
    assert codes.float()[:, ~dead].isfinite().all()


def test_what_error_feedback_makes_larger_than_the_fp8_scale_ends_at_the_last_code():
    """The second column, the row's largest, is to make up for ten times the 14 that the first loses: 588."""
    x = random(64, 16)
    x[:, 0] = 10 * x[:, 1] + 0.01 * x[:, 0]
    weight = torch.tensor([[430, FP8_MAX, *7 * [416.0, 352.0]]])  # all but the first are codes, so the scale is 1
    codes, scales = quantise_fp8(weight, x.t() @ x)
    assert codes[0, :2].tolist() == [416, FP8_MAX]
    assert codes.float().isfinite().all()
    assert scales == 1
