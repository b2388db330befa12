"""The product of few rows against its plain twin: on a GPU, or in Triton's interpreter without one."""

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.ops import few_rows as module
from eagle_train.ops import linear as linear_module
from eagle_train.ops.few_rows import MOST_ROWS, TILES, fastest, product, supports
from eagle_train.ops.kernels import plain
from eagle_train.ops.linear import linear
from tests.support.assembly import compiled_kernel

pytest.importorskip("triton", reason="it comes with torch for CUDA, and with xgrammar")
from tests.support.moved_bytes import moved_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]
SIZES = [(1, 3, 16), (4, 130, 72), (16, 65, 264), (17, 64, 520), (64, 130, 72)]  # rows, outputs, inputs


def whole_numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small ones: sums are exact in whatever order, and numbers of either dtype."""
    return torch.randint(-1, 2, shape, device=DEVICE).to(dtype)


@pytest.fixture
def everywhere(monkeypatch) -> list[tuple[int | None, float]]:
    """The kernel is for this device, and each way takes as long as is given here: tiles, and None for torch's."""
    times: list[tuple[int | None, float]] = [(tile, 1.0) for tile in TILES] + [(None, 2.0)]
    called = []

    def seconds(work, device, calls):
        work()
        called.append(work)
        return times[(len(called) - 1) % len(times)][1]

    monkeypatch.setattr(module, "_runs_on", lambda device: True)
    monkeypatch.setattr(module, "gpu_seconds", seconds)
    monkeypatch.setattr(module, "_found", {})
    return times


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_it_equals_the_twin(rows, outputs, inputs, dtype, has_bias, tile):
    torch.manual_seed(rows)
    x, weight = whole_numbers(rows, inputs, dtype=dtype), whole_numbers(outputs, inputs, dtype=dtype)
    bias = whole_numbers(outputs, dtype=dtype) if has_bias else None
    found = product(x, weight, bias, tile)
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert (found.dtype, found.shape) == (dtype, (rows, outputs))
    assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once(dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((5, 1000), (70, 1000), (70,)))
    found, wanted = product(x, weight, bias), x.double() @ weight.double().T + bias.double()
    near = 2 * torch.finfo(dtype).eps * wanted.abs() + 1e-4  # the interpreter cuts bf16 off, and sums are fp32
    assert ((found.double() - wanted).abs() <= near).all()


def test_leading_dimensions_and_strides():
    torch.manual_seed(0)
    weight, wide = whole_numbers(90, 32, dtype=torch.float16), whole_numbers(2, 3, 64, dtype=torch.float16)
    x = wide[..., ::2]
    assert torch.equal(product(x, weight), F.linear(x, weight))
    assert torch.equal(product(x[0, 0], weight), F.linear(x[0, 0], weight))


def test_what_is_no_number_stays_in_its_row_and_its_output():
    x, weight = torch.ones(3, 24, device=DEVICE).half(), torch.ones(40, 24, device=DEVICE).half()
    x[1, 5], weight[7, 23] = torch.nan, torch.inf
    found = product(x, weight, tile=16)
    assert found[1].isnan().all()
    assert found[[0, 2], 7].isinf().all()
    others = [output for output in range(40) if output != 7]
    assert (found[0, others] == 24).all()
    assert (found[2, others] == 24).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="it is Triton's interpreter that counts")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 200, 72), (40, 100, 200)])
def test_the_weight_is_read_once(rows, outputs, inputs, tile):
    """Beside it each tile reads the rows, and the result is written once."""
    x, weight = whole_numbers(rows, inputs, dtype=torch.float16), whole_numbers(outputs, inputs, dtype=torch.float16)
    with moved_bytes(weight) as moved:
        found = product(x, weight, tile=tile)
    read = weight.nbytes + -(-outputs // tile) * x.nbytes
    assert moved == {"weight": weight.nbytes, "read": read, "written": found.nbytes}


def test_the_fastest_way_is_taken_and_timed_once(everywhere):
    x, weight = whole_numbers(3, 32, dtype=torch.float16), whole_numbers(48, 32, dtype=torch.float16)
    everywhere[1] = (TILES[1], 0.5)
    assert fastest(x, weight) == TILES[1]
    everywhere[:] = [(None, 9.0)]
    assert fastest(x[:1], weight) == TILES[1]  # as many rows, up to a power of two from 16 on
    assert fastest(whole_numbers(3, 48, dtype=torch.float16), whole_numbers(32, 48, dtype=torch.float16)) is not None


def test_torchs_product_is_taken_where_it_is_faster(everywhere, monkeypatch):
    everywhere[3] = (None, 0.1)
    x, weight = whole_numbers(3, 32, dtype=torch.float16), whole_numbers(48, 32, dtype=torch.float16)
    assert fastest(x, weight) is None
    monkeypatch.setattr(linear_module.few_rows, "product", None)
    assert torch.equal(linear_module._linear_on_gpu(x, weight, None), F.linear(x, weight))


def test_linear_on_a_gpu_takes_it_with_its_bias(everywhere, monkeypatch):
    taken, own = [], product
    monkeypatch.setattr(module, "product", lambda *given, **named: taken.append(given) or own(*given, **named))
    x, weight, bias = (whole_numbers(*shape, dtype=torch.float16) for shape in ((2, 3, 32), (48, 32), (48,)))
    assert torch.equal(linear_module._linear_on_gpu(x, weight, bias), F.linear(x, weight, bias))
    taken.clear()
    linear_module._linear_on_gpu(x, weight, bias)
    assert [given[1:] for given in taken] == [(weight, bias, TILES[0])]


def test_what_it_is_not_for(everywhere):
    x, weight = whole_numbers(3, 32, dtype=torch.float16), whole_numbers(48, 32, dtype=torch.float16)
    assert supports(x, weight)
    assert supports(x, nn.Parameter(weight, requires_grad=False))
    assert not supports(x.expand(MOST_ROWS // 2, 3, 32), weight)  # more rows
    assert not supports(x[:0], weight)
    assert not supports(x.bfloat16(), weight)
    assert not supports(x.float(), weight.float())
    assert not supports(x[:, :20], weight[:, :20].contiguous())  # rows of 40 bytes
    assert not supports(x[:, :16], weight[:, :16])  # with gaps
    assert not supports(x, weight.flatten()[1:].new_empty(48 * 32 + 1)[1:].view(48, 32))  # not at a border of 16 bytes
    learnt = nn.Parameter(weight)
    assert not supports(x, learnt)
    with torch.no_grad():
        assert supports(x, learnt)
        with plain("linear"):
            assert not supports(x, learnt)


@pytest.mark.skipif(DEVICE == "cuda", reason="this device has it")
def test_other_devices_have_torchs_product():
    x, weight = whole_numbers(3, 32, dtype=torch.float16), whole_numbers(48, 32, dtype=torch.float16)
    assert fastest(x, weight) is None


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 4096), (20, 14336), (64, 4104)])
def test_on_hopper_16_bytes_are_loaded_at_a_time_and_nothing_is_spilled(rows, inputs, tile):
    layout = module._layout(rows, tile)
    options = {name: layout.pop(name) for name in ("num_warps", "num_stages")}
    types = {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*bf16", "rows": "i32", "outputs": "i32"}
    constants = layout | {"INPUTS": inputs, "HAS_BIAS": True, "IN_FP32": False}
    made = compiled_kernel("eagle_train.ops.few_rows_kernel", "product_of_tile", types, constants, **options)
    copies = Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\S+),", made["ptx"]))
    assert set(copies) == {"0x10"}, copies
    assert re.search(r"wgmma\.mma_async|mma\.sync", made["ptx"])
    assert made["stack"] == made["local"] == 0
    assert made["shared"] <= 99 * 2**10  # of GPUs of 8.6 and 8.9, the least that any has
    assert made["registers"] <= 168  # three programs of 128 threads at a time, at least


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_on_a_gpu_linear_is_near_torchs_product_alone_compiled_and_recorded(rows):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(rows, 4096, device="cuda").bfloat16(),
        torch.randn(6144, 4096, device="cuda").bfloat16() / 64,
    )
    wanted = x.double() @ weight.double().T

    def near(found: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)

    with torch.inference_mode():
        near(linear(x, weight))
        near(torch.compile(linear, fullgraph=True, dynamic=True)(x, weight))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear(x, weight)
        found.zero_()
        graph.replay()
        near(found)
