"""Attention through a block table against its plain twin: on a GPU, or in Triton's interpreter where there is none."""

import itertools
import re

import pytest
import torch

from eagle_train.ops import paged
from eagle_train.ops.attention import plain_partial
from eagle_train.ops.rule import Rule
from eagle_train.ops.visible_slots import VisibleSlots
from tests.support.assembly import compiled_kernel
from tests.support.launches import Launches

pytest.importorskip("triton", reason="it comes with torch for CUDA, and with xgrammar")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16
NUMBERS = dict.fromkeys(("q_row", "q_head", "q_token", "table_row", "tokens", "splits"), "i32")
NUMBERS |= {"scale": "fp32", "cap": "fp32"}
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
RULES = {
    "all": Rule(0.3),
    "window": Rule(0.3, window=40),
    "chunk": Rule(0.3, chunk=48),
    "softcap": Rule(0.3, softcap=2.0),
    "skip_first": Rule(0.3, skip_first=True),
    "skip_three": Rule(0.3, skip_first=3),
}


def a_table(lengths: list[int], spare: int) -> tuple[torch.Tensor, int]:
    """Each row's blocks, in no order, behind two that nobody has; and how many blocks there are."""
    needed = [-(-(length + spare) // BLOCK) for length in lengths]
    order = (torch.randperm(sum(needed)) + 2).tolist()
    rows = [[order.pop() for _ in range(count)] for count in needed]
    return torch.tensor([row + [1] * (max(needed) - len(row)) for row in rows], device=DEVICE), 2 + sum(needed)


def stores(blocks: int, heads: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one memory; NaN where nobody writes."""
    memory = torch.full((2, blocks * BLOCK, heads, width), torch.nan, device=DEVICE, dtype=dtype)
    return memory[0], memory[1]


def fill(store: torch.Tensor, table: torch.Tensor, length: torch.Tensor) -> None:
    """Random numbers in each row's first `length` slots."""
    for row, count in zip(table, length.tolist(), strict=True):
        slots = (row[:, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()[:count]
        store[slots] = torch.randn(count, *store.shape[1:], device=DEVICE).to(store.dtype)


def twin(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, seen: VisibleSlots, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathered, in float64, without the slots that nobody sees."""
    slots = (table[:, :, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten(1)[:, : seen.count]
    k, v = (store[slots].transpose(1, 2).double().nan_to_num(0.0) for store in (keys, values))
    return plain_partial(q.double(), k, v, seen.mask(rule), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "tokens", "heads", "kv_heads", "width", "dtype"),
    [
        ([0, 1, 37, 64], 4, 4, 2, 16, torch.float32),
        ([130], 1, 8, 2, 32, torch.bfloat16),
        ([700, 5], 7, 6, 2, 16, torch.float16),
        ([300, 0, 90], 20, 8, 2, 64, torch.float32),
    ],
)
def test_it_equals_the_twin(lengths, tokens, heads, kv_heads, width, dtype, causal, rule):
    torch.manual_seed(0)
    table, blocks = a_table(lengths, tokens)
    (keys, values), before = stores(blocks, kv_heads, width, dtype), torch.tensor(lengths, device=DEVICE)
    for store in (keys, values):
        fill(store, table, before + tokens * causal)
    q = torch.randn(len(lengths), tokens, heads, width, device=DEVICE).to(dtype).transpose(1, 2)
    positions = before[:, None] + torch.arange(tokens, device=DEVICE)
    seen = VisibleSlots(positions, None if causal else before[:, None], max(lengths) + tokens * causal, whole=False)
    first, ends = seen.runs(RULES[rule])
    given = RULES[rule].scale, RULES[rule].softcap
    out, lse = paged.paged_attention(q, keys, values, table, BLOCK, first, ends, *given)
    wanted, wanted_lse = twin(q, keys, values, table, seen, RULES[rule])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=4 * BOUNDS[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=0, atol=BOUNDS[dtype])
    assert torch.equal(out == 0, wanted == 0)


@pytest.fixture
def unwritten(monkeypatch) -> list[torch.Tensor]:
    """The new tensors, with NaN wherever nobody writes."""
    made, own = [], torch.Tensor.new_empty

    def new_empty(*given, **options):
        new = own(*given, **options)
        if new.is_floating_point():
            made.append(new.fill_(torch.nan))
        return new

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return made


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_parts_are_merged(splits, unwritten, monkeypatch):
    """Also those in which a query sees nothing."""
    monkeypatch.setattr(paged, "_division", lambda programs, slots, has_room: (splits, 64))
    test_it_equals_the_twin([700, 0, 5], 7, 6, 2, 16, torch.float32, False, "window")


def test_of_splits_without_slots_nothing_is_written(unwritten, monkeypatch):
    """Recordings are of a whole context's width, and most of it is empty."""
    monkeypatch.setattr(paged, "_division", lambda programs, slots, has_room: (paged._MERGED + 2, 64))
    test_it_equals_the_twin([300, 5], 1, 2, 1, 16, torch.float32, False, "all")
    parts, lse = unwritten[:2]
    there = ~lse.isinf()  # [2, 1, 2, splits]: each of the first row's 5 steps has a split; the second row has one step
    assert there.sum((1, 2, 3)).tolist() == [2 * 5, 2]
    assert not parts[there].isnan().any()
    assert parts[~there].isnan().all()


def test_rows_are_divided_to_keep_a_gpu_busy():
    assert paged._division(8, 2048, True) == (16, 128)
    assert paged._division(8, 2048, False) == (16, 64)
    assert paged._division(8, 100, True) == (1, 128)
    assert paged._division(8, 100_000, True) == (66, 64)
    assert paged._division(512, 100_000, True) == (1, 64)
    assert paged._division(2000, 64, True) == (1, 128)


@pytest.mark.parametrize(("queries", "slots"), [(16, 64), (16, 128), (64, 64)])
def test_on_hopper_it_has_room_and_nothing_is_spilled(queries, slots):
    pointers = dict.fromkeys(("q", "keys", "values"), "*bf16") | {"table": "*i64", "first": "*i32", "ends": "*i32"}
    sizes = {"GROUP": 4, "KV_HEADS": 8, "KEY_WIDTH": 128, "VALUE_WIDTH": 128, "BLOCK": 16}
    constants = sizes | {"QUERIES": queries, "SLOTS": slots, "HAS_CAP": False, "IN_FP32": False}
    types = pointers | {"out": "*fp32", "lse": "*fp32"} | NUMBERS
    made = compiled_kernel("eagle_train.ops.paged_kernel", "attend_split", types, constants, num_warps=4, num_stages=2)
    assert made["stack"] == made["local"] == 0
    assert made["shared"] <= 99 * 2**10  # of GPUs of 8.6 and 8.9, the least that any has
    copies = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\S+),", made["ptx"]))
    assert copies == {"0x10"}
    assert re.search(r"wgmma\.mma_async|mma\.sync", made["ptx"])


@pytest.mark.parametrize("width", [16, 128, 256])
def test_on_hopper_merging_loads_16_bytes_at_a_time_and_spills_nothing(width):
    types = dict.fromkeys(("out", "lse", "merged_lse"), "*fp32") | {"merged": "*bf16", "splits": "i32"}
    sizes = {"VALUE_WIDTH": width, "LANES": paged._MERGED}
    made = compiled_kernel("eagle_train.ops.paged_kernel", "merge_splits", types, sizes, num_warps=4)
    assert made["stack"] == made["local"] == 0
    assert re.search(r"ld\.global\S*\.v4\.b32", made["ptx"])


@pytest.mark.skipif(DEVICE != "cpu", reason="it is Triton's interpreter whose kernels say what they were made with")
def test_growing_texts_compile_few_kernels(monkeypatch):
    """Else requests wait for a compiler, again and again, where rounds are not recorded, and in prompts behind a
    prefix."""
    launches = Launches(paged._kernels())
    monkeypatch.setattr(paged, "_kernels", lambda: launches.kernels)
    store = torch.zeros(64, 2, 64)
    for rows, tokens, blocks in itertools.product([1, 2, 3, 16], range(1, 33), [*range(1, 40), 64, 500, 1111, 2048]):
        q = torch.zeros(rows, tokens, 8, 64).transpose(1, 2)
        ends = torch.zeros(rows, tokens, dtype=torch.int32)
        paged.paged_attention(q, store, store, torch.zeros(rows, blocks, dtype=torch.long), 16, ends, ends, 1.0)
    for rows, tokens in itertools.product(range(1, 9), range(1, 33)):
        new = torch.zeros(rows, tokens, 2, 64).transpose(1, 2)
        paged.write(new, new, store, store, torch.zeros(rows, tokens, dtype=torch.long))
    attend, merge, write = (len(each) for each in launches.made)
    # By the tile of queries, and whether there are splits; of the least tile by how many slots are read at a time too.
    assert attend <= 6
    assert merge == write == 1


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 128), ("fp32", 256), ("bf16", 256)])
def test_on_smaller_gpus_it_has_room(monkeypatch, dtype, width):
    """Of compute capability 8.6, as `paged_attention` asks for it, with the most queries."""
    asked = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **given: asked.update(given)

    monkeypatch.setattr(paged, "_kernels", lambda: (Kernel(),) * 3)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    q, store = torch.zeros(1, 8, 64, width, dtype=kind), torch.zeros(64, 1, width, dtype=kind)
    ends = torch.zeros(1, 64, dtype=torch.int32)
    paged.paged_attention(q, store, store, torch.zeros(1, 4, dtype=torch.long), 16, ends, ends, 1.0)
    asked = {key: value for key, value in asked.items() if key != "LANES"} | {"IN_FP32": False}
    options = {key: asked.pop(key) for key in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("q", "keys", "values"), f"*{dtype}") | {"table": "*i64", "first": "*i32", "ends": "*i32"}
    types = pointers | {"out": "*fp32", "lse": "*fp32"} | NUMBERS
    made = compiled_kernel("eagle_train.ops.paged_kernel", "attend_split", types, asked, capability=86, **options)
    assert made["shared"] <= 99 * 2**10


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)],
)
@pytest.mark.parametrize("widths", [(16, 16), (32, 16), (192, 128)])
def test_new_tokens_are_written_into_their_slots(widths, given, dtype):
    """From views with gaps, in any order of slots; into no others."""
    torch.manual_seed(0)
    stores = [torch.zeros(40, 3, width, device=DEVICE, dtype=dtype) for width in widths]
    k, v = (torch.randn(2, 5, 3 + n, 2 * width, device=DEVICE).to(given) for n, width in enumerate(widths))
    k, v = (x[:, :, :3, ::2].transpose(1, 2) for x in (k, v))
    slots = torch.randperm(40, device=DEVICE)[:10].view(2, 5)
    paged.write(k, v, *stores, slots)
    for store, x in zip(stores, (k, v), strict=True):
        wanted = torch.zeros_like(store)
        wanted[slots] = x.transpose(1, 2).to(dtype)
        assert torch.equal(store, wanted)


def test_no_tokens_are_written():
    store = torch.zeros(16, 2, 16, device=DEVICE)
    none = torch.zeros(1, 2, 0, 16, device=DEVICE)
    paged.write(none, none, store, store, torch.zeros(1, 0, dtype=torch.long, device=DEVICE))
    assert not store.any()


def test_values_may_have_another_width():
    torch.manual_seed(0)
    table, blocks = a_table([70, 20], 0)
    keys, _ = stores(blocks, 2, 32, torch.float32)
    values, _ = stores(blocks, 2, 16, torch.float32)
    lengths = torch.tensor([70, 20], device=DEVICE)
    for store in (keys, values):
        fill(store, table, lengths)
    q = torch.randn(2, 4, 3, 32, device=DEVICE)
    seen = VisibleSlots(lengths[:, None] + torch.arange(3, device=DEVICE), lengths[:, None], 70, whole=False)
    out, _ = paged.paged_attention(q, keys, values, table, BLOCK, *seen.runs(Rule(0.3)), 0.3)
    torch.testing.assert_close(out.double(), twin(q, keys, values, table, seen, Rule(0.3))[0], rtol=0, atol=1e-5)


def test_a_cpu_takes_the_plain_way():
    assert not paged.supports(torch.zeros(1, 4, 1, 16), torch.zeros(16, 2, 16), torch.zeros(16, 2, 16))
    assert not paged.writes(torch.zeros(16, 2, 16), torch.zeros(16, 2, 16))
