"""The most likely token without logits against its plain twin: on a GPU, or in Triton's interpreter without one."""

import math
import re

import pytest
import torch

from eagle_train.models.head import LMHead
from eagle_train.ops import head_argmax as module
from eagle_train.ops.head_argmax import head_argmax, pays, supports
from eagle_train.ops.kernels import plain
from tests.support.assembly import compiled_kernel

pytest.importorskip("triton", reason="it comes with torch for CUDA, and with xgrammar")
from tests.support.moved_bytes import moved_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RULES = {
    "plain": {},
    "cap": {"softcap": 30.0},
    "all": {"bias": True, "scale": -1.7, "softcap": 20.0},
    "below zero": {"bias": True, "scale": 0.5, "shift": -4096.0},
}
SIZES = [(1, 3, 16), (5, 130, 72), (16, 65, 136), (17, 129, 64), (64, 130, 72)]  # rows, tokens, inputs


def whole_numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small ones: sums are exact in whatever order, and many are equal."""
    return torch.randint(-3, 4, shape, device=DEVICE).to(dtype)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [...] as a number of `dtype`: rounded to nearest, but bf16 in Triton's interpreter, which cuts it off."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        return (x.view(torch.int32) & -(2**16)).view(torch.float32)
    return x.to(dtype).float()


def twin(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By exact sums, which are rounded as the plain path's."""
    sums = hidden.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    logits = rounded(sums.float(), weight.dtype)
    if scale != 1.0:
        logits = rounded(logits * scale, weight.dtype)
    value, token = logits.max(-1, keepdim=True)
    return value if softcap is None else softcap * torch.tanh(value / softcap), token


def check_equal(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    (value, token), (wanted_value, wanted_token) = found, wanted
    assert (value.dtype, token.dtype) == (torch.float32, torch.int64)
    assert torch.equal(token, wanted_token)
    torch.testing.assert_close(value, wanted_value, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "tokens", "inputs"), SIZES)
def test_it_equals_the_twin_and_the_lowest_of_equal_tokens_is_taken(rows, tokens, inputs, dtype, rule):
    torch.manual_seed(0)
    hidden, weight = (whole_numbers(count, inputs, dtype=dtype) for count in (rows, tokens))
    given = {**RULES[rule]}
    if given.pop("bias", False):
        given["bias"] = whole_numbers(tokens, dtype=dtype) + given.pop("shift", 0.0)
    check_equal(head_argmax(hidden, weight, **given), twin(hidden, weight, **given))


def test_what_rounding_makes_equal_is_equal():
    """2049 is none of fp16's numbers: the plain path sees 2048 twice."""
    weight = torch.tensor([[1.0], [2048.0], [2049.0], [7.0]], device=DEVICE) @ torch.ones(1, 16, device=DEVICE) / 16
    hidden = torch.ones(1, 16, device=DEVICE)
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0], device=DEVICE)
    weight[2] = weight[1]
    assert head_argmax(hidden, weight, bias)[1].item() == 2
    assert head_argmax(hidden, weight.half(), bias.half())[1].item() == 1
    by_scale = torch.tensor([[0.0], [1.0], [1.0 + 2**-10]], device=DEVICE).expand(3, 16) / 16
    assert head_argmax(hidden, by_scale.half().contiguous())[1].item() == 2
    assert head_argmax(hidden, by_scale.half().contiguous(), scale=2**-24)[1].item() == 1  # a subnormal number


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_any_numbers(rows, dtype):
    """Sums in another order may be rounded to the next number: the token is the greatest but for that."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(count, 200, device=DEVICE).to(dtype) for count in (rows, 1000))
    value, token = head_argmax(hidden, weight)
    logits, step = hidden.double() @ weight.double().T, max(torch.finfo(dtype).eps, 2**-20)  # sums are fp32
    chosen, most = logits.gather(-1, token), logits.amax(-1, keepdim=True)
    assert (chosen >= most * (1 - 2 * step)).all()
    assert ((value.double() - chosen).abs() <= 2 * step * chosen.abs()).all()


@pytest.mark.parametrize("scale", [1.0, -2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_counts_as_torch_counts_it(dtype, scale):
    """NaN is the greatest, above infinity, and the first of several is taken; of nothing but -inf too."""
    bias = torch.zeros(4, 200)
    bias[0, [150, 70]] = torch.nan
    bias[1, [10, 130, 199]] = torch.tensor([torch.inf, torch.nan, torch.inf])
    bias[2] = -torch.inf * scale
    bias[3, [3, 90]] = torch.inf * scale
    hidden, weight = torch.zeros(2, 16, device=DEVICE).to(dtype), torch.zeros(200, 16, device=DEVICE).to(dtype)
    wanted = []
    for each in bias.to(DEVICE, dtype):
        expected = (each.float() * scale).max(-1, keepdim=True)
        value, token = head_argmax(hidden, weight, each, scale)
        assert token.tolist() == [expected.indices.tolist()] * 2
        assert torch.equal(value.nan_to_num(1e4), expected.values.nan_to_num(1e4).expand(2, 1))
        wanted += expected.indices.tolist()
    assert wanted == [70, 130, 0, 3]


def test_a_row_that_is_no_number_takes_the_first_token_and_leaves_others_alone():
    torch.manual_seed(0)
    hidden, weight = (whole_numbers(count, 32, dtype=torch.float16) for count in (3, 130))
    hidden[1, 5] = torch.nan
    value, token = head_argmax(hidden, weight)
    wanted_value, wanted = twin(hidden, weight)
    assert token[1].item() == 0
    assert value[1].isnan().item()
    assert torch.equal(token[[0, 2]], wanted[[0, 2]])
    assert torch.equal(value[[0, 2]], wanted_value[[0, 2]])


def test_zero_and_negative_zero_are_equal():
    weight = torch.zeros(3, 16, device=DEVICE, dtype=torch.float16)
    weight[0], weight[2] = -(2.0**-24), -1.0  # a product of -2^-48 is rounded to -0
    hidden = torch.full((1, 16), 2.0**-24, device=DEVICE, dtype=torch.float16)
    assert math.copysign(1.0, (hidden.float() @ weight[:1].float().T).half().item()) == -1.0
    assert head_argmax(hidden, weight)[1].item() == 0


def test_leading_dimensions_strides_and_dtypes_of_hidden_states():
    torch.manual_seed(0)
    weight, wide = whole_numbers(90, 32, dtype=torch.float16), whole_numbers(2, 3, 64, dtype=torch.float16)
    hidden = wide[..., ::2]
    value, token = head_argmax(hidden, weight)
    assert value.shape == token.shape == (2, 3, 1)
    check_equal((value, token), twin(hidden, weight))
    check_equal(head_argmax(hidden[0, 0], weight), twin(hidden[0, 0], weight))
    weight = torch.tensor([[0.0], [1.0]], device=DEVICE) * torch.tensor([1.0, -1.0] + 14 * [0.0], device=DEVICE)
    hidden = torch.tensor([[2049.0, 2048.0] + 14 * [0.0]], device=DEVICE)  # 2048 and 2048 in fp16
    assert head_argmax(hidden, weight)[1].item() == 1
    assert head_argmax(hidden, weight.half())[1].item() == 0


def test_tiles_are_many(monkeypatch):
    monkeypatch.setattr(module, "_LANES", 4)
    torch.manual_seed(0)
    hidden, weight = (whole_numbers(count, 16, dtype=torch.float16) for count in (9, 64 * 9 + 5))
    check_equal(head_argmax(hidden, weight), twin(hidden, weight))


@pytest.mark.skipif(DEVICE != "cpu", reason="it is Triton's interpreter that counts")
@pytest.mark.parametrize(("rows", "tokens", "inputs"), [(1, 200, 72), (40, 300, 200)])
def test_the_weight_is_read_once_and_no_logits_are_written(rows, tokens, inputs):
    """The floor is the weight's bytes. Beside it each tile reads the hidden states, and 8 bytes of each row are written
    and read."""
    hidden, weight = (whole_numbers(count, inputs, dtype=torch.float16) for count in (rows, tokens))
    with moved_bytes(weight) as moved:
        head_argmax(hidden, weight)
    tiles = -(-tokens // (64 if rows <= 16 else 128))
    assert moved["weight"] == weight.nbytes
    assert moved["read"] == weight.nbytes + tiles * (hidden.nbytes + 8 * rows)
    assert moved["written"] == 8 * rows * tiles + (8 + 4) * rows


@pytest.mark.parametrize(("rows", "inputs"), [(1, 4096), (20, 4104), (64, 4096)])
def test_on_hopper_16_bytes_are_loaded_at_a_time_and_nothing_is_spilled(rows, inputs):
    layout = module._layout(rows)
    options = {name: layout.pop(name) for name in ("num_warps", "num_stages")}
    types = {"hidden": "*bf16", "weight": "*bf16", "bias": "*bf16", "best": "*i64", "rows": "i32", "scale": "fp32"}
    constants = layout | {"VOCABULARY": 128_256, "INPUTS": inputs, "HAS_BIAS": False, "HAS_SCALE": False}
    kernel = "eagle_train.ops.head_argmax_kernel", "best_of_tile"
    made = compiled_kernel(*kernel, types, constants | {"IN_FP32": False}, **options)
    loads = re.findall(r"\b(?:cp\.async\.c[ag]\S*|ld\.global\S*) [^;]*", made["ptx"])
    assert len(loads) > 8
    assert all(load.startswith("cp.async.cg") and ", 0x10" in load for load in loads), loads
    assert "wgmma.mma_async" in made["ptx"]
    assert (made["stack"], made["local"]) == (0, 0)
    assert made["registers"] <= 128  # 4 warps of 128 registers, 4 times on a processor


def test_a_cpu_takes_the_plain_way():
    assert not supports(torch.zeros(1, 16).half(), torch.zeros(8, 16).half())


def test_what_it_is_for(monkeypatch):
    monkeypatch.setattr(module, "_runs_on", lambda device: device.type == "cpu")
    hidden, weight = torch.zeros(2, 32, 16), torch.zeros(8, 16, dtype=torch.float16)
    assert supports(hidden, weight)
    assert supports(hidden[0, 0], weight.bfloat16())
    assert not supports(hidden, weight.float())
    assert not supports(torch.zeros(65, 16), weight)
    assert not supports(hidden[:0], weight)
    assert not supports(hidden, weight[:0])
    assert not supports(hidden, weight.to("meta"))
    assert not supports(hidden.to("meta"), weight)
    assert not supports(hidden[..., :12], weight[:, :12].contiguous())
    assert not supports(hidden[..., :8], weight[:, :8])
    with plain("linear"):
        assert not supports(hidden, weight)


def test_the_faster_way_is_found_once_for_each_size(monkeypatch):
    seconds = {"kernel": 1.0, "logits": 2.0}
    timed: list[str] = []

    def noted(work, device, calls):
        timed.append("logits" if work is by_logits else "kernel")
        return seconds[timed[-1]]

    def by_logits() -> None:
        raise AssertionError("it is timed alone")

    monkeypatch.setattr(module, "_runs_on", lambda device: True)
    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(module, "gpu_seconds", noted)
    weight = torch.zeros(8, 16).half()
    for rows in (1, 2, 16):
        assert pays(torch.zeros(rows, 16).half(), weight, by_logits)
    assert timed == ["kernel", "logits"]
    seconds["logits"] = 0.5
    assert not pays(torch.zeros(17, 16).half(), weight, by_logits)
    assert not pays(torch.zeros(1, 16).half(), torch.zeros(9, 16).half(), by_logits)
    assert pays(torch.zeros(1, 16).half(), weight, by_logits)
    assert timed == ["kernel", "logits"] * 3
    assert not pays(torch.zeros(1, 16), weight.float(), by_logits)
    assert len(timed) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 17, 64])
def test_on_a_gpu_it_is_the_plain_path(rows, dtype):
    """With a CUDA graph too. Where logits lie closer than their sums are exact, either may be chosen."""
    torch.manual_seed(0)
    weight = (torch.randn(128_256, 4096, device="cuda") / 64).to(dtype)
    hidden, head = torch.randn(rows, 4096, device="cuda").to(dtype), LMHead(weight)
    assert supports(hidden, weight)
    token = head.most_likely(hidden, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = head.most_likely(hidden, 1)
    graph.replay()
    assert torch.equal(recorded, token)
    with plain("linear"):
        logits = head(hidden)
        assert not supports(hidden, weight)
    most = logits.amax(-1, keepdim=True)
    assert (logits.gather(-1, token) >= most - 2 * torch.finfo(dtype).eps * most.abs()).all()
    assert (token == logits.argmax(-1, keepdim=True)).float().mean() >= 0.9
