"""The product of few rows against its plain twin: on a GPU, or in Triton's interpreter without one."""

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.ops import few_rows as module
from eagle_train.ops import linear as linear_module
from eagle_train.ops.few_rows import MOST_ROWS, Way, fastest, product, supports, ways
from eagle_train.ops.kernels import plain
from eagle_train.ops.linear import linear
from tests.support.assembly import compiled_kernel

pytest.importorskip("triton", reason="it comes with torch for CUDA, and with xgrammar")
from tests.support.moved_bytes import moved_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]
SIZES = [(1, 3, 16), (2, 5, 8200), (4, 130, 72), (16, 65, 264), (17, 64, 520), (64, 130, 72)]  # rows, outputs, inputs
EACH = [(size, way) for size in SIZES for way in ways(size[0])]


def whole_numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small ones: sums are exact in whatever order, and numbers of either dtype."""
    return torch.randint(-1, 2, shape, device=DEVICE).to(dtype)


@pytest.fixture
def everywhere(monkeypatch) -> dict[Way | None, float]:
    """The kernel is for this device, and each way takes as long as is given here, or 3 seconds; None is torch's."""
    times: dict[Way | None, float] = {None: 2.0}

    def seconds(work, device, calls):
        work()
        return times.get(work.keywords.get("way"), 3.0)

    monkeypatch.setattr(module, "_runs_on", lambda device: True)
    monkeypatch.setattr(module, "gpu_seconds", seconds)
    monkeypatch.setattr(module, "_found", {})
    return times


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "way"), EACH)
def test_it_equals_the_twin(size, way, dtype, has_bias):
    rows, outputs, inputs = size
    torch.manual_seed(rows)
    x, weight = whole_numbers(rows, inputs, dtype=dtype), whole_numbers(outputs, inputs, dtype=dtype)
    bias = whole_numbers(outputs, dtype=dtype) if has_bias else None
    found = product(x, weight, bias, way)
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert (found.dtype, found.shape) == (dtype, (rows, outputs))
    assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("way", [ways(1)[0], ways(1)[-1]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once(dtype, way):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((2, 1000), (70, 1000), (70,)))
    found, wanted = product(x, weight, bias, way), x.double() @ weight.double().T + bias.double()
    near = 2 * torch.finfo(dtype).eps * wanted.abs() + 1e-4  # the interpreter cuts bf16 off, and sums are fp32
    assert ((found.double() - wanted).abs() <= near).all()


def test_leading_dimensions_and_strides():
    torch.manual_seed(0)
    weight, wide = whole_numbers(90, 32, dtype=torch.float16), whole_numbers(2, 3, 64, dtype=torch.float16)
    x = wide[..., ::2]
    assert torch.equal(product(x, weight), F.linear(x, weight))
    assert torch.equal(product(x[0, 0], weight), F.linear(x[0, 0], weight))


@pytest.mark.parametrize("way", ways(2))
def test_what_is_no_number_stays_in_its_row_and_its_output(way):
    x, weight = torch.ones(2, 24, device=DEVICE).half(), torch.ones(40, 24, device=DEVICE).half()
    x[1, 5], weight[7, 23] = torch.nan, torch.inf
    found = product(x, weight, way=way)
    assert found[1].isnan().all()
    assert found[0, 7].isinf()
    others = [output for output in range(40) if output != 7]
    assert (found[0, others] == 24).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="it is Triton's interpreter that counts")
@pytest.mark.parametrize(
    ("size", "way"), [(size, way) for size in [(1, 200, 72), (2, 21, 8200), (40, 100, 200)] for way in ways(size[0])]
)
def test_the_weight_is_read_once(size, way):
    """Beside it each tile reads the rows, and the result is written once."""
    rows, outputs, inputs = size
    x, weight = whole_numbers(rows, inputs, dtype=torch.float16), whole_numbers(outputs, inputs, dtype=torch.float16)
    with moved_bytes(weight) as moved:
        found = product(x, weight, way=way)
    read = weight.nbytes + -(-outputs // way.tile) * x.nbytes
    assert moved == {"weight": weight.nbytes, "read": read, "written": found.nbytes}


def test_the_fastest_way_is_taken_and_timed_once(everywhere):
    x, weight = whole_numbers(9, 32, dtype=torch.float16), whole_numbers(48, 32, dtype=torch.float16)
    second = ways(9)[1]
    everywhere[second] = 0.5
    assert fastest(x, weight) == second
    everywhere[ways(8)[2]] = 0.3
    assert fastest(x[:8], weight) == ways(8)[2]  # fewer rows, to a power of two
    everywhere[None] = 0.1
    assert fastest(whole_numbers(16, 32, dtype=torch.float16), weight) == second  # as many
    assert fastest(whole_numbers(9, 48, dtype=torch.float16), whole_numbers(32, 48, dtype=torch.float16)) is None


@pytest.mark.parametrize("rows", [1, 2])
def test_of_very_few_rows_the_threads_products_are_ways_too(rows, everywhere):
    x, weight = whole_numbers(rows, 32, dtype=torch.float16), whole_numbers(48, 32, dtype=torch.float16)
    everywhere[ways(rows)[0]] = 0.5
    assert not fastest(x, weight).by_matrix_unit
    assert all(way.by_matrix_unit for way in ways(3))


def test_a_gpu_with_little_shared_memory_has_fewer_ways():
    least = 99 * 2**10  # of GPUs of 8.6 and 8.9
    assert set(ways(1)) > set(ways(1, least)) >= set(ways(64, least)) > set()


def test_torchs_product_is_taken_where_it_is_faster(everywhere, monkeypatch):
    everywhere[None] = 0.1
    x, weight = whole_numbers(3, 32, dtype=torch.float16), whole_numbers(48, 32, dtype=torch.float16)
    assert fastest(x, weight) is None
    monkeypatch.setattr(linear_module.few_rows, "product", None)
    assert torch.equal(linear_module._linear_on_gpu(x, weight, None), F.linear(x, weight))


def test_linear_on_a_gpu_takes_it_with_its_bias(everywhere, monkeypatch):
    taken, own, best = [], product, ways(6)[1]
    everywhere[best] = 0.5
    monkeypatch.setattr(module, "product", lambda *given, **named: taken.append(given) or own(*given, **named))
    x, weight, bias = (whole_numbers(*shape, dtype=torch.float16) for shape in ((2, 3, 32), (48, 32), (48,)))
    assert torch.equal(linear_module._linear_on_gpu(x, weight, bias), F.linear(x, weight, bias))
    taken.clear()
    linear_module._linear_on_gpu(x, weight, bias)
    assert [given[1:] for given in taken] == [(weight, bias, best)]


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


SHAPES = [(1, 4096), (4, 14336), (20, 14336), (64, 4104)]


@pytest.mark.parametrize(("rows", "inputs", "way"), [(*shape, way) for shape in SHAPES for way in ways(shape[0])])
def test_on_hopper_16_bytes_are_loaded_at_a_time_and_nothing_is_spilled(rows, inputs, way):
    layout = module._layout(rows, way)
    options = {name: layout.pop(name) for name in ("num_warps", "num_stages")}
    types = {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*bf16", "rows": "i32", "outputs": "i32"}
    constants = layout | {"INPUTS": inputs, "HAS_BIAS": True} | ({"IN_FP32": False} if way.by_matrix_unit else {})
    kernel = "product_of_tile" if way.by_matrix_unit else "product_by_vectors"
    made = compiled_kernel("eagle_train.ops.few_rows_kernel", kernel, types, constants, **options)
    assert made["stack"] == made["local"] == 0
    assert made["shared"] <= 227 * 2**10
    assert made["registers"] <= 65536 // (32 * way.warps) // 2  # two programs at a time, at least
    if way.by_matrix_unit:
        copies = Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\S+),", made["ptx"]))
        assert set(copies) == {"0x10"}, copies
        assert re.search(r"wgmma\.mma_async|mma\.sync", made["ptx"])
    else:
        loads = Counter(re.findall(r"ld\.global\S*", made["ptx"]))
        assert loads.keys() <= {"ld.global.v4.b32", "ld.global.b16"}, loads  # 16 bytes, and a number of the bias
        loop = made["ptx"][: made["ptx"].index("shfl")]
        assert "bar.sync" not in loop  # what is read is exchanged with no other thread, but sums


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
