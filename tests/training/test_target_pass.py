"""The target's forward of a packed row by torch.compile: the same states, and what becomes of it where that fails."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor

from eagle_train.corpus.stream import Batch
from eagle_train.errors import OptionError, UserError
from eagle_train.models.cached_target import CachedTarget
from eagle_train.models.head import LMHead
from eagle_train.models.target import Target
from eagle_train.ops.linear import FrozenFp8Linear
from eagle_train.training import assembly
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.target_pass import can_compile, target_states, to_device
from tests.support.tiny import random_tokens, tiny_model, tiny_target

LENGTHS = [[9, 3, 12], [24]]


def packed() -> Batch:
    """Two rows of 24 tokens."""
    tokens = torch.tensor([*random_tokens(24), *random_tokens(24)])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return Batch(tokens, positions, torch.ones_like(tokens, dtype=torch.bool), LENGTHS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_compiled_target_gives_the_same_states(family, graphs):
    target, batch = tiny_target(family), packed()
    plain = target_states(target, batch).hidden
    assert can_compile(target, 2, 24, wanted=True)
    made = len(graphs)
    torch.testing.assert_close(target_states(target, batch, compiled=True).hidden, plain)
    assert len(graphs) == made > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "llama4"])
def test_a_target_in_fp8_is_compiled_and_gives_the_same_states(family, graphs):
    """In fp32: in bf16 a last bit decides what a number is rounded to in FP8, and all that follows."""
    target, batch = tiny_target(family), packed()
    plain = target_states(target, batch).hidden
    target.round_to_fp8()
    low = target_states(target, batch).hidden
    assert can_compile(target, 2, 24, wanted=True)
    made = len(graphs)
    torch.testing.assert_close(target_states(target, batch, compiled=True).hidden, low, rtol=1e-3, atol=1e-3)
    assert len(graphs) == made > 0
    assert (low - plain).norm() > 0.01 * plain.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_multiplies_a_targets_layers_in_fp8(compiled):
    """Its kernels against their twins, which err as much."""
    plain, twin, low = (Target(tiny_model().bfloat16().cuda()) for _ in range(3))
    for target in (twin, low):
        target.round_to_fp8()
    for module in twin.model.modules():
        if isinstance(module, FrozenFp8Linear):
            module.codes, module.scales = module.codes.view(torch.uint8), module.scales.t().view(torch.int32)
            module.has_kernel = False
    batch = to_device(packed(), torch.device("cuda"))
    assert can_compile(low, 2, 24, wanted=compiled) == compiled
    states = [target_states(target, batch).hidden.float() for target in (plain, twin)]
    states.append(target_states(low, batch, compiled=compiled).hidden.float())
    errors = [(each - states[0]).norm() / states[0].norm() for each in states[1:]]
    assert 0.02 < errors[1] < 1.3 * errors[0]


@pytest.mark.parametrize("first_slot", [0, 1])
def test_the_host_knows_which_slots_each_pass_learns_from(first_slot):
    batch = packed()
    supervised = batch.positions >= 1
    supervised[0, 20], supervised[1, 5:] = False, False
    placed = to_device(replace(batch, supervised=supervised), torch.device("cpu"), first_slot, passes=4)
    rows = [(0, slot, position) for slot, position in enumerate(batch.positions[0].tolist())]
    rows += [(1, slot, position) for slot, position in enumerate(batch.positions[1].tolist())]
    for depth, slots in enumerate(placed.slots):
        learnt = [
            (row, slot) for row, slot, position in rows if supervised[row, slot] and position >= first_slot + depth
        ]
        assert slots.tolist() == [24 * row + slot for row, slot in learnt]
    assert torch.equal(placed.tokens, batch.tokens)
    assert placed.lengths == LENGTHS


def test_it_is_compiled_on_a_gpu_unless_told(monkeypatch):
    prepared: list[tuple[int, ...]] = []
    compiled = SimpleNamespace(prepare=lambda tokens, positions: prepared.append(tuple(tokens.shape)))
    target = SimpleNamespace(device=torch.device("cpu"), compiled=lambda layers: compiled)
    assert not can_compile(target, 2, 24, wanted=None)
    assert not can_compile(target, 2, 24, wanted=False)
    assert not prepared
    assert can_compile(target, 2, 24, wanted=True)
    assert prepared == [(2, 24)]


def test_where_compiling_fails():
    target = tiny_target(num_hidden_layers=1)
    broken = inductor.patch({"cpp.cxx": ("/nowhere/c++",), "fx_graph_cache": False})
    with broken, pytest.raises(OptionError, match=r"^compile=True: torch.compile fails: .+"):
        can_compile(target, 2, 24, wanted=True)


def test_nobody_who_asked_for_nothing_is_stopped_by_it(monkeypatch):
    def fails(*_: torch.Tensor) -> None:
        raise OptionError("compile=True: torch.compile fails: no compiler")

    gpu, zeros = SimpleNamespace(type="cuda"), torch.zeros
    target = SimpleNamespace(device=gpu, compiled=lambda layers: SimpleNamespace(prepare=fails))
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    with pytest.warns(UserWarning, match=r"no compiler; the run goes on without"):
        assert can_compile(target, 2, 24, wanted=None) is False


@pytest.mark.parametrize(
    ("settings", "device", "draft", "of_target"),
    [
        ({}, "cuda", True, True),
        ({}, "cpu", False, False),
        ({"backend": "fsdp2", "target": "fsdp2"}, "cuda", True, False),
        ({"backend": "deepspeed"}, "cuda", False, True),
        ({"backend": "deepspeed", "compile": True}, "cuda", True, True),
        ({"compile": False}, "cuda", False, False),
        ({"compile": True}, "cpu", True, True),
    ],
)
def test_what_a_job_compiles(monkeypatch, settings, device, draft, of_target):
    def can(target: SimpleNamespace, rows: int, tokens: int, wanted: bool | None, layers: tuple[int, ...]) -> bool:
        return target.device.type == "cuda" if wanted is None else wanted

    monkeypatch.setattr(assembly, "can_compile", can)
    monkeypatch.setattr(assembly, "try_compiler", lambda device: None)
    target = SimpleNamespace(device=torch.device(device))
    parallel, compiled = assembly.with_compiled_target(ParallelConfig(**settings), target, 2, 24, ())
    assert (parallel.compile, compiled) == (draft, of_target)


def test_of_what_is_read_from_disk_the_draft_alone_is_compiled_where_that_works():
    target = object.__new__(CachedTarget)
    target.lm_head = LMHead(torch.zeros(2, 2))
    parallel, compiled = assembly.with_compiled_target(ParallelConfig(compile=True), target, 2, 24, ())
    assert (parallel.compile, compiled) == (True, False)
    torch._dynamo.reset()
    broken = inductor.patch({"cpp.cxx": ("/nowhere/c++",), "fx_graph_cache": False})
    with broken, pytest.raises(UserError, match=r"^parallel.compile=True: torch.compile fails: .+"):
        assembly.with_compiled_target(ParallelConfig(compile=True), target, 2, 24, ())
