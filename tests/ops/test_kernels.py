"""Whether Triton's kernels are used: where its driver starts, and else torch's, after one warning."""

import sys
import warnings
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from eagle_train import hardware
from eagle_train.ops import few_rows, fused_loss, head_argmax, kernels, paged


@pytest.fixture
def gpu(monkeypatch):
    """Let each device be a GPU; sets what asking Triton's driver does."""

    def driver(asked) -> None:
        module = ModuleType("triton.runtime.driver")
        module.driver = SimpleNamespace(active=SimpleNamespace(get_current_device=asked))
        monkeypatch.setitem(sys.modules, "triton.runtime.driver", module)
        kernels.starts_triton.cache_clear()

    for module in (few_rows, head_argmax, paged):
        monkeypatch.setattr(module, "is_gpu", lambda device, capability: True)
        monkeypatch.setattr(module, "_runs_on", module._runs_on.__wrapped__)
    yield driver
    kernels.starts_triton.cache_clear()


def all_say() -> set[bool]:
    device = torch.device("cuda")
    logits = SimpleNamespace(device=device, dtype=torch.bfloat16)
    return {*(module._runs_on(device) for module in (few_rows, head_argmax, paged)), fused_loss.supports(logits)}


def test_where_its_driver_starts_kernels_are_used(gpu):
    gpu(lambda: 0)
    assert all_say() == {True}


def test_without_a_compiler_torchs_are_after_one_warning(gpu):
    def fails() -> int:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one via CC")

    gpu(fails)
    with pytest.warns(UserWarning, match="compiler") as told:
        assert all_say() == {False}
    said = "Triton does not start, and kernels are torch's: RuntimeError: Failed to find C compiler."
    assert [str(each.message) for each in told] == [said]


def test_without_triton_nothing_is_said(gpu, monkeypatch):
    gpu(lambda: 0)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all_say() == {False}


def test_a_gpu_is_made_the_current_one_and_a_cpu_is_not(monkeypatch):
    """Triton starts kernels there, wherever their tensors are."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: f"on {device}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert hardware.current(torch.device("cuda:1")) == "on cuda:1"
    for name in ("cpu", "cuda", "cuda:0"):
        with hardware.current(torch.device(name)):
            pass


def test_kernels_start_where_their_tensors_are(monkeypatch):
    """With another GPU than the current one, Triton would give one's addresses to the other."""
    within, started = [torch.device("cpu")], []

    @contextmanager
    def current(device):
        within.append(device)
        yield
        within.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **named: started.append(within[-1].type)

    for module in (few_rows, fused_loss, head_argmax, paged):
        monkeypatch.setattr(module, "current", current)
    for module, count in ((few_rows, 2), (head_argmax, 2), (paged, 3)):
        monkeypatch.setattr(module, "_kernels", lambda count=count: (Kernel(),) * count)
    monkeypatch.setattr(fused_loss, "_kernel", Kernel)
    x, weight = torch.zeros(2, 32, device="meta").half(), torch.zeros(48, 32, device="meta").half()
    few_rows.product(x, weight)
    head_argmax.head_argmax(x, weight)
    fused_loss.fused_loss(x, x, "ce")
    q, store = torch.zeros(1, 2, 1, 16, device="meta"), torch.zeros(4096, 2, 16, device="meta")
    ends = torch.zeros(1, 1, dtype=torch.int32, device="meta")
    table = torch.zeros(1, 256, dtype=torch.long, device="meta")
    paged.paged_attention(q, store, store, table, 16, ends, ends, 1.0)
    paged.write(q, q, store, store, ends.long())
    assert started == ["meta"] * 7
    assert len(within) == 1
