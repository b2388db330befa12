"""What a device is made for decides every precision that nobody named."""

import pytest
import torch

from eagle_train import hardware
from eagle_train.distributed import CommonError, World
from eagle_train.hardware import computes_bf16, computes_fp8, low_precision, warn_of_emulation
from eagle_train.models.loading import TargetConfig, load_target, training_dtype
from eagle_train.ops import attention
from eagle_train.ops.threads import num_threads
from eagle_train.training import muon


@pytest.fixture
def made_for(monkeypatch):
    """Let the CPU be one that has bf16 products, or has none."""
    return lambda has: monkeypatch.setattr(hardware, "_cpu_computes_bf16", lambda: has)


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ((False, False), None, False),
        ((True, False), None, True),
        ((False, True), None, True),
        ((True, True), "AVX2", False),  # as one emulates a lesser CPU
        ((True, True), "AVX512_CORE", False),
        ((True, True), "avx512_core_amx", True),
        ((True, True), "DEFAULT", True),
        ((True, True), "", True),
    ],
)
def test_a_cpu_computes_bf16_where_it_has_the_instructions_and_may_use_them(monkeypatch, flags, limit, expected):
    monkeypatch.setattr(hardware.platform, "machine", lambda: "x86_64")
    has = dict(zip(("avx512_bf16", "amx_tile"), flags, strict=True))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(hardware, "_cpu_computes_bf16", hardware._cpu_computes_bf16.__wrapped__)
    assert computes_bf16("cpu") == expected
    assert low_precision("cpu") == (torch.bfloat16 if expected else torch.float32)
    assert ("BF16" in hardware.instructions()) == expected


@pytest.mark.parametrize("has", [True, False])
def test_training_and_attention_ask_it(made_for, monkeypatch, has):
    made_for(has)
    assert training_dtype(TargetConfig("x"), "cpu").dtype == ("bfloat16" if has else "float32")
    assert training_dtype(TargetConfig("x", dtype="bfloat16"), "cpu").dtype == "bfloat16"
    asked = []
    monkeypatch.setattr(attention, "causal_matmul", lambda *given: asked.append(given))
    q, k = torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 1, 5, 8).bfloat16()
    attention.causal_attention(q, k, k, attention.Rule(0.3))
    assert bool(asked) == has


def test_ranks_train_in_one_dtype(made_for, monkeypatch):
    made_for(False)
    ranks, others = World(size=2), [("float32", "b")]
    monkeypatch.setattr(World, "exchange", lambda self, own: [own, *others])
    assert training_dtype(TargetConfig("x"), "cpu", ranks).dtype == "float32"
    others[:] = [("bfloat16", "b")]
    assert training_dtype(TargetConfig("x", dtype="bfloat16"), "cpu", ranks).dtype == "bfloat16"
    with pytest.raises(CommonError, match=r"^target.dtype=auto: bfloat16 on b, float32 on .*; give target.dtype="):
        training_dtype(TargetConfig("x"), "cpu", ranks)


@pytest.mark.parametrize("has", [True, False])
def test_muon_computes_in_what_the_device_has(made_for, monkeypatch, has):
    made_for(has)
    seen, mm = set(), torch.Tensor.__matmul__

    def noting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.add(x.dtype)
        return mm(x, y)

    monkeypatch.setattr(torch.Tensor, "__matmul__", noting)
    muon._orthogonalised(torch.randn(6, 4))
    assert seen == {torch.bfloat16 if has else torch.float32}


def test_a_precision_that_was_named_and_is_emulated_is_warned_of(made_for, tmp_path):
    made_for(False)
    with pytest.warns(UserWarning, match=r"^target\.dtype=bfloat16: this cpu computes in bf16 by emulation, 5 to 15"):
        warn_of_emulation("target.dtype", torch.bfloat16, "cpu")
    with pytest.warns(UserWarning, match=r"^target\.dtype=bfloat16: "):
        load_target(TargetConfig("data/tiny_target", dtype="bfloat16"), "cpu")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_fp8_that_was_named_and_is_emulated_is_warned_of(monkeypatch, recwarn, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    has = capability >= (8, 9)
    warn_of_emulation("train.target_quant", torch.float8_e4m3fn, "cuda")
    assert (len(recwarn), computes_fp8("cuda"), computes_fp8("cpu")) == (not has, has, False)
    if not has:
        assert str(recwarn[0].message).startswith("train.target_quant=fp8: this cuda has no FP8 products and widens")


@pytest.mark.parametrize(
    ("has", "dtype", "told"), [(True, "bfloat16", 0), (False, "float32", 0), (False, "bfloat16", 1)]
)
def test_nothing_is_said_where_nothing_is_emulated(made_for, recwarn, has, dtype, told):
    made_for(has)
    warn_of_emulation("target.dtype", getattr(torch, dtype), "cpu")
    assert len(recwarn) == told


def test_a_torch_without_onednn_has_no_bf16(monkeypatch):
    """As on macOS, whose torch does not know the operator either."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "_cpu_computes_bf16", hardware._cpu_computes_bf16.__wrapped__)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    for machine in ("arm64", "x86_64"):
        monkeypatch.setattr(hardware.platform, "machine", lambda named=machine: named)
        assert not computes_bf16("cpu")
        assert "BF16" not in hardware.instructions()


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5, 2),
        ({"cpu.max": "50000 100000\n"}, 0.5, 1),
        ({"cpu.max": "max 100000\n"}, None, 3),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, 3),
        ({}, None, 3),
    ],
    ids=str,
)
def test_torch_has_no_more_threads_than_a_container_has_cpus(monkeypatch, tmp_path, files, quota, threads):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert hardware.cpu_quota() == quota
    with num_threads(3):
        hardware.keep_to_quota()
        assert torch.get_num_threads() == threads
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        torch.set_num_threads(3)
        hardware.keep_to_quota()
        assert torch.get_num_threads() == 3


def test_an_arm_processor_has_a_name(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    monkeypatch.setattr(hardware, "_CPU_INFO", info)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert hardware.cpu_name() == "CPU implementer 0x41, part 0xd40"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "neoverse-v1"})
    assert hardware.cpu_name() == "neoverse-v1"
    info.write_text("model name\t: AMD EPYC\n")
    assert hardware.cpu_name() == "AMD EPYC"
