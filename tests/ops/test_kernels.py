"""Whether Triton's kernels are used: where its driver starts, and else torch's, after one warning."""

import sys
import warnings
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
    assert hardware.current(torch.device("cuda:1")) == "on cuda:1"
    with hardware.current(torch.device("cpu")):
        pass
