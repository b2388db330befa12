"""The fast product of few rows against `F.linear`, its plain twin; products in few bits against theirs and torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_train.ops import linear as module
from eagle_train.ops.linear import (
    Fp8Linear,
    FrozenFp8Linear,
    Int4Linear,
    fp16_copy_of,
    keep_fp16_copy,
    linear,
)
from eagle_train.ops.torch_private import fp8_product
from eagle_train.ops.weight_codes import dequantise, quantise_fp8, quantise_int4, quantise_rows_fp8

needs_packing = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="this CPU has no product for fp16 weights"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 6, 7])
@pytest.mark.parametrize("outputs", [40, 48])
def test_equals_the_plain_twin(outputs: int, rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(outputs, 24), torch.randn(outputs)
    arguments = (x.to(dtype), weight.to(dtype), bias.to(dtype) if has_bias else None)
    ours, plain = linear(*arguments), F.linear(*arguments)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("shape", [(1, 4, 24), (4, 1, 24), (2, 3, 24), (24,)])
def test_keeps_the_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(48, 24)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    strided = torch.randn(*shape[:-1], 48)[..., ::2]
    torch.testing.assert_close(linear(strided, weight), F.linear(strided, weight))


@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_equal_the_plain_twin(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 24, requires_grad=True), (torch.randn(48, 24) / 24**0.5).requires_grad_()  # a layer's
    ours = torch.autograd.grad(linear(x, weight).square().sum(), (x, weight))
    plain = torch.autograd.grad(F.linear(x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(ours, plain)


def test_only_few_rows_of_small_weights_leave_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = [], F.linear
    monkeypatch.setattr(module.F, "linear", lambda x, *others: calls.append(tuple(x.shape)) or plain(x, *others))
    for rows in (1, 4, 7):
        linear(torch.randn(rows, 8), torch.randn(16, 8))
    assert calls == [(7, 8)]
    linear(torch.randn(1, 8), torch.randn(24, 8))  # no whole number of pieces
    monkeypatch.setattr(module, "SMALL_WEIGHT", 100)
    monkeypatch.setattr(module, "MOST_INPUTS", 7)
    for rows in (1, 4):
        linear(torch.randn(rows, 8), torch.randn(16, 8))
    assert calls[1:] == [(1, 8), (1, 8), (4, 8)]


def packable(*shape: int) -> torch.Tensor:
    """A frozen weight as bf16 checkpoints have them, packed."""
    weight = torch.randn(shape).bfloat16().float() / 16
    keep_fp16_copy(weight)
    return weight


@pytest.fixture
def packed_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of all products with a packed weight."""
    rows, found = [], module.fp16_copy_of

    def noting(weight: torch.Tensor) -> object:
        packed = found(weight)
        rows.append(packed is not None)
        return packed

    monkeypatch.setattr(module, "fp16_copy_of", noting)
    return rows


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (130, 24)])
def test_packed_weights_equal_the_plain_twin(
    shape: tuple[int, ...], has_bias: bool, packed_products: list[int]
) -> None:
    """To fp32's own precision: far closer than products of fp16 are."""
    x, weight, bias = torch.randn(shape), packable(40, 24), torch.randn(40) if has_bias else None
    packed_products.clear()
    plain = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    ours = linear(x, weight, bias)
    assert packed_products == [True]
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, plain.float(), rtol=1e-6, atol=1e-6)
    halves = F.linear(x.half().double(), weight.double(), None if bias is None else bias.double())
    assert not torch.allclose(ours.double(), halves, rtol=1e-6, atol=1e-6)


@needs_packing
def test_what_is_packed() -> None:
    """What fp16 holds as well as fp32 does, is frozen, and stays as it was."""
    assert fp16_copy_of(packable(40, 24)) is not None
    for weight in (
        torch.randn(40, 24),
        torch.randn(40, 24).bfloat16().float() * 1e5,
        torch.randn(40, 24).bfloat16().float() * 2**-20,
        torch.randn(40, 24).bfloat16(),
        nn.Parameter(torch.randn(40, 24).bfloat16().float()),
    ):
        keep_fp16_copy(weight)
        assert fp16_copy_of(weight) is None
    x, weight = torch.randn(4, 24), packable(40, 24)
    weight.mul_(2)
    assert fp16_copy_of(weight) is None
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


@needs_packing
def test_packed_weights_and_gradients() -> None:
    x, weight = torch.randn(4, 24, requires_grad=True), packable(40, 24)
    (ours,) = torch.autograd.grad(linear(x, weight).square().sum(), x)
    (plain,) = torch.autograd.grad(F.linear(x, weight).square().sum(), x)
    torch.testing.assert_close(ours, plain)
    assert not linear(x.detach(), weight).requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_has_its_dtype(compiled: bool) -> None:
    """As of training's draft, whose weights are in fp32, where it is measured without gradients."""
    x, weight = torch.randn(3, 24), torch.randn(40, 24)
    product = torch.compile(linear, backend="aot_eager") if compiled else linear
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, plain = product(x, weight), F.linear(x, weight)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, plain)


@needs_packing
def test_packed_weights_compiled(packed_products: list[int]) -> None:
    weight = packable(40, 24)
    with torch.no_grad():
        product = torch.compile(lambda x: linear(x * 2, weight) + 1, dynamic=True, fullgraph=True)
        for rows in (1, 4, 9):
            x = torch.randn(rows, 24)
            torch.testing.assert_close(product(x), F.linear(x * 2, weight) + 1)
    assert packed_products[-3:] == [True] * 3


# The largest relative error of a row's product against the twin's: both are exact but for sums and for results in bf16.
BOUNDS = {(Int4Linear, torch.float32): 2**-8, (Fp8Linear, torch.float32): 1e-6}
ROWS = [(0, 256), (1, 256), (3, 256), (2, 4, 256), (2, 0, 256), (256,), (65, 256)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("made", [Int4Linear, Fp8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_kernel_equals_its_twin(made, has_bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bias = random(48, seed=2).to(dtype) if has_bias else None
    quantised, x = made.of(random(48, 256), bias), random(*shape, seed=1).to(dtype)
    twin = quantised(x)
    if has_bias:
        torch.testing.assert_close(twin, made.of(random(48, 256))(x) + bias)
    quantised.use_kernel(dtype)
    assert quantised.has_kernel
    check_close(quantised(x), twin, BOUNDS.get((made, dtype), 2**-7))
    assert (twin.dtype, twin.shape) == (dtype, (*shape[:-1], 48))


def test_a_cpu_without_int4_products_keeps_the_weight_widened(monkeypatch) -> None:
    """There the product takes up to 190 times as long."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(module, "int4_product", None)
    made, x = Int4Linear.of(random(48, 256)), random(5, 256, seed=1)
    twin = made(x)
    made.use_kernel(torch.float32)
    torch.testing.assert_close(made(x), twin)


def test_one_row_is_multiplied_in_pieces_only_where_a_batch_is_one_call(monkeypatch) -> None:
    weight, x, used = random(48, 256), random(1, 256, seed=1), list[bool]()
    monkeypatch.setattr(F, "linear", lambda *given, plain=F.linear: used.append(True) or plain(*given))
    for has in (True, False):
        monkeypatch.setattr(module, "batches_products", lambda has=has: has)
        torch.testing.assert_close(module._linear_on_cpu(x, weight, None), x @ weight.t())
        assert bool(used) != has


def check_close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    found, wanted = found.float(), wanted.float()
    assert ((found - wanted).norm(dim=-1) <= bound * wanted.norm(dim=-1)).all()


def test_the_twins_are_products_of_what_codes_and_scales_stand_for() -> None:
    weight, x = random(48, 256), random(5, 256, seed=1)
    torch.testing.assert_close(Int4Linear.of(weight)(x), x @ dequantise(*quantise_int4(weight)).t())
    (codes, scales), (own, own_scales) = quantise_rows_fp8(x), quantise_fp8(weight)
    theirs = torch._scaled_mm(codes, own.t(), scale_a=scales, scale_b=own_scales.t(), out_dtype=torch.float32)
    torch.testing.assert_close(Fp8Linear.of(weight)(x), theirs)


def test_the_product_of_gpus_with_fp8_units() -> None:
    """torch's own, which a CPU has too, if slowly."""
    quantised, x = Fp8Linear.of(random(48, 256)), random(5, 256, seed=1)
    twin = quantised(x)
    quantised.has_kernel = True
    check_close(quantised(x), twin, 2**-8)


def test_fp8_activations_have_a_scale_for_each_row() -> None:
    quantised, x = Fp8Linear.of(random(48, 256)), random(4, 256, seed=1)
    loud = torch.cat((x, 1e6 * x[:1]))
    torch.testing.assert_close(quantised(loud)[:4], quantised(x))
    quantised.use_kernel(torch.float32)
    torch.testing.assert_close(quantised(loud)[:4], quantised(x))


@pytest.mark.parametrize("made", [Int4Linear, Fp8Linear])
def test_a_conversion_of_the_model_leaves_codes_and_scales_alone(made) -> None:
    weight, x = 1e-5 * random(48, 256), random(3, 256, seed=1)
    model = nn.Sequential(made.of(weight))
    before = model(x)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(model.to(dtype)(x), before)
    model[0].use_kernel(torch.float32)
    before = model(x)
    assert torch.equal(model.to(torch.bfloat16).to(torch.float32)(x), before)


def test_what_a_weight_takes_up() -> None:
    size = {
        made: sum(buffer.nbytes for buffer in made.of(random(64, 256)).buffers()) for made in (Int4Linear, Fp8Linear)
    }
    assert size == {Int4Linear: 64 * 128 + 64 * 2 * 2, Fp8Linear: 64 * 256 + 64 * 4}
    ready = Int4Linear.of(random(64, 256))
    ready.use_kernel(torch.float32)
    assert sum(buffer.nbytes for buffer in ready.buffers()) == 64 * 128 + 64 * 2 * 4  # a zero point beside each scale


def frozen_with_kernel(weight: torch.Tensor, monkeypatch, bias: torch.Tensor | None = None) -> FrozenFp8Linear:
    """As on a GPU with FP8 units: torch's product is one that a CPU has too, if slowly."""
    made = FrozenFp8Linear.of(weight, bias)
    with monkeypatch.context() as patched:
        patched.setattr(module, "computes_fp8", lambda device: True)
        made.use_kernel(torch.bfloat16)
    assert made.has_kernel
    return made


LAST_BIT = 2**-4  # of E4M3: the most that rounding takes from a number, as a share of it
LEAST = 2**-10  # and as a share of its scale, below the least number with all its bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("inputs", [16, 272, 1024])
def test_a_frozen_product_errs_by_what_e4m3_rounds(monkeypatch, inputs: int, has_kernel: bool, dtype) -> None:
    """Against the product of the given numbers in fp64: row by row, within the bound of each entry, and on average."""
    weight, bias = random(48, inputs), random(48, seed=2).to(dtype)
    size = torch.logspace(-6, 6, 40).unsqueeze(1)  # a scale for each row
    x = (size * random(40, inputs, seed=1)).to(dtype)
    made = frozen_with_kernel(weight, monkeypatch, bias) if has_kernel else FrozenFp8Linear.of(weight, bias)
    found, wanted = made(x).double() - bias.double(), x.double() @ weight.double().t()
    assert found.dtype == torch.float64
    (_, scales), (_, own) = quantise_rows_fp8(x), quantise_fp8(weight)
    sizes = x.double().abs() @ weight.double().abs().t()
    below = scales * weight.abs().sum(1) + own.t() * x.float().abs().sum(1, keepdim=True)
    bias_bits = 2**-8 * (wanted.abs() + bias.double().abs())
    assert ((found - wanted).abs() <= ((1 + LAST_BIT) ** 2 - 1) * sizes + LEAST * 1.1 * below + 4 * bias_bits).all()
    loud = (size > 1e-2).squeeze(1)  # the bias rounds off nothing of these
    error = ((found - wanted).norm(dim=1) / wanted.norm(dim=1))[loud]
    assert error.max() < 0.08
    assert error.median() < 0.045  # each factor's is 0.026


@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_frozen_product_of_nothing_and_of_the_largest_numbers_is_a_number(monkeypatch, has_kernel: bool) -> None:
    weight = random(32, 64)
    weight[3] = 0
    made = frozen_with_kernel(weight, monkeypatch) if has_kernel else FrozenFp8Linear.of(weight)
    x = torch.stack([torch.zeros(64), random(64, seed=1), 1e36 * random(64, seed=1), 1e-36 * random(64, seed=1)])
    x = torch.cat([x, x[1:2]]).bfloat16()
    x[4, 7] = 3e4  # beside it the others are small
    found = made(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, (5, 32))
    assert found.isfinite().all()
    assert not found[0].any()
    assert not found[:, 3].any()
    check_close(found[2] / 2.0**119, found[1] * (1e36 / 2.0**119), 0.05)
    check_close(found[4:], x[4:] @ weight.bfloat16().t(), 0.06)
    assert made(x[:0]).shape == (0, 32)


def test_a_frozen_products_kernel_is_its_twin_with_fast_sums(monkeypatch) -> None:
    weight, x, asked = random(48, 256), random(2, 5, 256, seed=1).bfloat16(), []

    def noting(*given, fast_sums: bool = False) -> torch.Tensor:
        asked.append(fast_sums)
        return fp8_product(*given)

    monkeypatch.setattr(module, "fp8_product", noting)
    check_close(frozen_with_kernel(weight, monkeypatch)(x), FrozenFp8Linear.of(weight)(x), 2**-7)
    assert asked == [True]


def test_a_gpus_product_takes_a_frozen_modules_layouts(monkeypatch) -> None:
    """torch checks dtypes, strides and sizes as a GPU does, without one."""
    made = frozen_with_kernel(random(48, 256), monkeypatch, random(48).bfloat16())
    with FakeTensorMode():
        for name, buffer in list(made.named_buffers()):
            strided = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cuda")
            setattr(made, name, strided)
        for shape in ((1, 256), (2, 7, 256)):
            out = made(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
            assert (out.shape, out.dtype, out.device.type) == ((*shape[:-1], 48), torch.bfloat16, "cuda")
        made.codes = torch.empty(256, 48, dtype=made.codes.dtype, device="cuda").t()
        with pytest.raises(RuntimeError, match="col"):
            made(torch.empty(1, 256, dtype=torch.bfloat16, device="cuda"))


def test_a_frozen_weight_stays_small_where_a_device_has_no_fp8() -> None:
    made = FrozenFp8Linear.of(random(64, 256))
    made.use_kernel(torch.bfloat16)
    made(random(3, 256))
    assert sum(buffer.nbytes for buffer in made.buffers()) == 64 * 256 + 64 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("made", [Int4Linear, Fp8Linear, FrozenFp8Linear])
@pytest.mark.parametrize("shape", ROWS)
def test_a_gpus_kernel_equals_the_twin(made, shape: tuple[int, ...]) -> None:
    """The twin runs there too: a GPU divides by FP8's largest with another rounding than a CPU, and codes differ."""
    quantised, x = made.of(random(48, 256)).cuda(), random(*shape, seed=1).bfloat16().cuda()
    twin = quantised(x)
    quantised.use_kernel(torch.bfloat16)
    check_close(quantised(x), twin, 2**-7)
