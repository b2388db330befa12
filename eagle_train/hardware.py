"""What a device is made for: each choice of a precision, a kernel or a path asks here. DESIGN section 3.0.

Knows nothing of models. An environment that limits what a library may use (ONEDNN_MAX_CPU_ISA) counts like a CPU
without it.
"""

import os
import platform
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch

from eagle_train.errors import check
from eagle_train.ops.torch_private import bf16_on_other_cpus

INT4_GPU, FP8_GPU = (8, 0), (8, 9)  # compute capability from which on a GPU has the product
# Values of ONEDNN_MAX_CPU_ISA with which oneDNN has bf16 products: AVX-512 BF16, AMX, AVX10 and newer.
_BF16_ISAS = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10", "DEFAULT", "ALL")
_CPU_INFO, _CGROUP = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup")
_COST = "computes in bf16 by emulation, 5 to 15 times as slow as in fp32"


def is_gpu(device: torch.device, capability: tuple[int, int] = (0, 0)) -> bool:
    """Whether it is a GPU with at least this compute capability."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability


def computes_bf16(device: torch.device | str) -> bool:
    """Whether the device has bf16 products of its own. Where it has none they are emulated, and fp32 is faster.

    A CPU: AVX-512 BF16 or AMX, or Arm's BF16. A GPU: Ampere or newer, or what ROCm says.
    """
    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and _cpu_computes_bf16()


def computes_fp8(device: torch.device | str) -> bool:
    """Whether the device has FP8 (E4M3) products of its own: a GPU from Ada and Hopper on."""
    return is_gpu(torch.device(device), FP8_GPU)


def low_precision(device: torch.device | str) -> torch.dtype:
    """What to compute in where rounding to bf16 does no harm: bf16 where the device is made for it, else fp32."""
    return torch.bfloat16 if computes_bf16(device) else torch.float32


def warn_of_emulation(field: str, dtype: torch.dtype, device: torch.device | str, plain: str = "none") -> None:
    """Say what a precision costs that the user named in `field` and the device does not have. `plain`: the value of
    `field` that is faster than FP8."""
    kind = torch.device(device).type
    if dtype == torch.bfloat16 and not computes_bf16(device):
        warnings.warn(f"{field}=bfloat16: this {kind} {_COST}; auto is faster", stacklevel=2)
    if dtype == torch.float8_e4m3fn and not computes_fp8(device):
        warnings.warn(
            f"{field}=fp8: this {kind} has no FP8 products and widens each number; {plain} is faster", stacklevel=2
        )


def measured_speed(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """FLOP/s of products of matrices that fill the device, on all its threads, measured for about so long."""
    device = torch.device(device)
    size = 1024 if device.type == "cpu" else 8192
    x = torch.randn(size, size, device=device).to(dtype)

    def products(number: int) -> float:
        started = time.perf_counter()
        for _ in range(number):
            x @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    products(2)  # which load libraries and wake threads
    number = max(3, round(seconds / (products(3) / 3)))
    return number * 2 * size**3 / products(number)


def device_memory(device: torch.device | str) -> int | None:
    """Bytes of a GPU's memory; None for a CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def instructions() -> str:
    """The vector instructions that torch uses on this CPU, for reports: AVX2, AVX512, AVX512 BF16 AMX."""
    own = [torch.backends.cpu.get_cpu_capability()]
    own += ["BF16"] if _cpu_computes_bf16() else []
    own += ["AMX"] if _cpu_computes_bf16() and torch.cpu.get_capabilities().get("amx_tile", False) else []
    return " ".join(own)


@cache
def batches_products() -> bool:
    """Whether a batch of fp32 products is one call of a CPU's library (MKL). Else torch makes one after the other."""
    return torch.backends.mkl.is_available()


def has_int4_product(device: torch.device) -> bool:
    """Whether the device has products with INT4 weights. A CPU without vector instructions that torch was compiled
    for takes 12 to 190 times as long for one as for the product with the weight widened."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX")
    return is_gpu(device, INT4_GPU)


@cache
def _cpu_computes_bf16() -> bool:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return bf16_on_other_cpus()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    allowed = limit.upper().startswith(_BF16_ISAS)
    has = torch.cpu.get_capabilities()
    return (
        torch.backends.mkldnn.is_available()
        and allowed
        and (has.get("avx512_bf16", False) or has.get("amx_tile", False))
    )


def current(device: torch.device) -> AbstractContextManager:
    """Makes a GPU the current one of this thread meanwhile: Triton's kernels start there, wherever their tensors are.
    Nothing for a CPU, and for a GPU that is the current one."""
    is_current = device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def resolve_device(name: str) -> str:
    """`auto` is the GPU if there is one. Raises UserError for a device that is not there."""
    check(name in ("auto", "cpu", "cuda"), f"device={name}: must be auto, cpu or cuda")
    check(name != "cuda" or torch.cuda.is_available(), "device=cuda: no GPU is visible; use device=cpu")
    return "cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu")


def cpu_quota() -> float | None:
    """How many CPUs' time the container of this process may use; None where no limit is told. Linux's cgroups, of
    both versions: https://docs.kernel.org/admin-guide/cgroup-v2.html, `cpu.max`."""
    newer, older = (_CGROUP / name for name in ("cpu.max", "cpu/cpu.cfs_quota_us"))
    if newer.exists():
        most, period = newer.read_text().split()
    elif older.exists():
        most, period = older.read_text().strip(), older.with_name("cpu.cfs_period_us").read_text().strip()
    else:
        return None
    return None if most in ("max", "-1") else int(most) / int(period)


def keep_to_quota() -> None:
    """Let torch use no more threads than the container has CPUs: with more, all are stopped for a part of each tenth of
    a second. Whoever sets OMP_NUM_THREADS has chosen."""
    quota = cpu_quota()
    if quota is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), max(1, int(quota))))


def cpu_name() -> str:
    """The processor's name as Linux tells it, else what torch and Python know; empty if none does.

    Of an ARM processor Linux tells numbers: `CPU implementer 0x41, part 0xd40` is a Neoverse V1.
    """
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    numbers = [told.get(key) for key in ("CPU implementer", "CPU part")]
    arm = "CPU implementer {}, part {}".format(*numbers) if all(numbers) else None
    names = (told.get("model name"), torch.cpu.get_capabilities().get("cpu_name"), arm, platform.processor())
    return next((str(name) for name in names if name), "")
