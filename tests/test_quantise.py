"""Codes and scales: what fits comes back bit by bit, what does not is within half a step, groups are apart."""

import pytest
import torch

from eagle_train.ops.quantise import FP8, GROUP, dequantise, fp8, int4, one_a_byte, two_a_byte


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("least", "most"), [(-8, 7), (-7, 7), (-8, -1), (-8, 0), (0, 7)])
def test_an_int4_weight_comes_back_bit_by_bit(least, most):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(least, most + 1, (5, 3 * GROUP), generator=generator).to(torch.int8)
    scales = random(5, 3).abs().add(0.01).bfloat16()
    found, found_scales = int4(dequantise(codes, scales))
    assert torch.equal(found, codes)
    assert torch.equal(found_scales, scales)
    assert (found_scales.dtype, found.dtype) == (torch.bfloat16, torch.int8)


def test_an_fp8_weight_comes_back_bit_by_bit():
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    codes = every[~every.float().isnan()].repeat(3, 1)
    scales = torch.tensor([[1.0], [2.0**-9], [96.0]])  # few bits each, so that the products are exact
    found, found_scales = fp8(dequantise(codes, scales))
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found_scales, scales)


def test_int4_errs_by_half_a_step_and_less_than_the_plain_scale():
    weight = random(16, 4 * GROUP, seed=1)
    codes, scales = int4(weight)
    wide = scales.float().repeat_interleave(GROUP, dim=1)
    error = (dequantise(codes, scales) - weight).abs()
    clipped = (codes == 7) | (codes == -8)
    assert (error <= wide / 2)[~clipped].all()
    assert (error <= 2.04 * wide)[clipped].all()  # the largest, of about 9 steps, ends at the code 7
    step = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7
    plain = step.repeat_interleave(GROUP, dim=1)
    ours, other = error.square().sum(), ((weight / plain).round() * plain - weight).square().sum()
    assert 0.7 < ours / other < 0.8


def test_fp8_errs_by_half_its_last_bit():
    weight = random(64, 256, seed=2)
    codes, scales = fp8(weight)
    bound = torch.maximum(weight.abs() * 2.0**-4, scales * 2.0**-10)  # three bits behind the first; below, fixed steps
    assert ((dequantise(codes, scales) - weight).abs() <= bound * (1 + 1e-6)).all()
    assert torch.equal(codes.float().abs().amax(1), torch.full((64,), 448.0))


def test_an_outlier_costs_its_own_group_or_row_alone():
    weight = random(4, 2 * GROUP)
    spoilt = weight.clone()
    spoilt[1, 5] = 1e9
    (codes, scales), (others, other_scales) = int4(weight), int4(spoilt)
    assert torch.equal(codes[1, GROUP:], others[1, GROUP:])
    assert torch.equal(scales[1, 1], other_scales[1, 1])
    assert others[1, :GROUP].count_nonzero() == 1
    kept = [0, 2, 3]
    assert torch.equal(codes[kept], others[kept])
    (codes, _), (others, _) = fp8(weight), fp8(spoilt)
    assert torch.equal(codes[kept].float(), others[kept].float())
    assert others[1].float().count_nonzero() == 1


@pytest.mark.parametrize("quantise", [int4, fp8])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e36])
def test_zeros_and_the_ends_of_fp32(quantise, size):
    weight = size * random(2, 2 * GROUP)
    weight[0, :GROUP] = 0
    codes, scales = quantise(weight)
    back = dequantise(codes, scales)
    assert (scales > 0).all()  # no division by zero made a code
    assert back.isfinite().all()
    assert back[0, :GROUP].count_nonzero() == 0
    assert (back - weight).abs().max() <= weight.abs().max()
    if size > 1:
        assert (back - weight).double().norm() < 0.15 * weight.double().norm()


def test_two_codes_a_byte():
    codes = torch.tensor([[1, -8, 7, 0]], dtype=torch.int8)
    assert two_a_byte(codes).tolist() == [[0x90, 0xF8]]
    every = torch.cartesian_prod(*2 * [torch.arange(-8, 8)]).to(torch.int8)
    assert torch.equal(one_a_byte(two_a_byte(every)), every)
