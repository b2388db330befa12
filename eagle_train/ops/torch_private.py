"""Every private symbol of torch that this package uses, each behind a function with a public name.

Private: a leading underscore, `torch._C`, or an operator of `torch.ops` that has no documented function. Such symbols
may change with any release, so pyproject.toml bounds torch from above by the newest release that was tested here. Each
docstring says what the symbol is for and which public API is missing. All were tested with torch 2.13, and have the
same arguments in 2.11. Knows nothing of attention rules, models or formats: arguments go through as they are.

tests/test_private_api.py finds private API that is used anywhere else. What takes long to import (the compiler,
DTensor) is imported by the functions that need it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "DispatchMode",
    "all_threads",
    "bf16_on_other_cpus",
    "compile_errors",
    "default_store",
    "dtensor_offset",
    "flash_attention_on_cpu",
    "flash_attention_varlen",
    "flash_gradients_on_cpu",
    "flash_gradients_varlen",
    "fp8_operator",
    "fp8_product",
    "fp16_prepacked",
    "fp16_product",
    "has_hooks",
    "int4_packed",
    "int4_product",
    "strided_shard",
    "tensor_version",
    "with_own_graphs",
    "with_own_sizes",
    "with_static_floats",
    "without_torch_function",
]

P = ParamSpec("P")
R = TypeVar("R")

DispatchMode = TorchDispatchMode
"""Sees each operator below autograd, for measurements. Missing: torch documents the class, but exports it nowhere."""

_fp16_product = torch.ops.quantized.linear_dynamic_fp16.default._op
"""Bound once, and without the look at its arguments: both take longer than some products of one row."""


# --- attention


def flash_attention_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU's flash attention of q [B,Q,T,D] over k, v [B,K,S,D]: output [B,Q,T,D] and log-sum-exp [B,Q,T], fp32 or,
    of fp64, fp64.

    `mask` is added to scores and has their dtype. `is_causal`: query i sees keys 0 to i. A query that sees no key gets
    log-sum-exp 0.

    Missing: `F.scaled_dot_product_attention` runs the same kernel and drops the log-sum-exp, without which the
    attention over a prefix and that over a tree cannot be merged.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale
    )


def flash_gradients_on_cpu(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q [B,Q,T,D] and k, v [B,K,T,D] in the CPU's causal flash attention, in their dtypes.

    `grad`, `out` [B,Q,T,D] and `lse` [B,Q,T] may be those of more keys than these.

    Missing: autograd calls it with the output and the log-sum-exp of these keys alone.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, True, scale=scale
    )


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    is_causal: bool,
    scale: float,
    window: int | None,
    used_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA's flash attention of sequences that lie one behind another: q [tokens,Q,D] over k, v [tokens,K,D], bf16 or
    fp16. Returns the output [tokens,Q,D] and the log-sum-exp [Q,tokens], fp32, inf for a query without keys.

    `starts_q`, `starts_k` int32 [N + 1]; `used_k` int32 [N]: how many keys a sequence has, wherever the next begins.
    `window`: how many positions a query sees, its own included.

    Missing: `torch.nn.attention.varlen.varlen_attn` calls this operator, but its arguments changed between 2.11 and
    2.13, while the operator's did not.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts_q,
        starts_k,
        longest_q,
        longest_k,
        0.0,  # dropout
        is_causal,
        False,  # no mask to debug by
        scale=scale,
        window_size_left=-1 if window is None else window - 1,  # beside the query's own position
        window_size_right=0 if is_causal else -1,
        seqused_k=used_k,
    )
    return out, lse


def flash_gradients_varlen(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q [tokens,Q,D] and k, v [tokens,K,D] in `flash_attention_varlen`, in their dtypes.

    `grad`, `out` [tokens,Q,D] and `lse` [Q,tokens], fp32, may be those of more keys than these.

    Missing: autograd calls it with the output and the log-sum-exp of these keys alone.
    """
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        starts_q,
        starts_k,
        longest_q,
        longest_k,
        0.0,  # dropout
        is_causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # a random state, which is for dropout
        q.new_empty(0),
        scale=scale,
        window_size_left=-1 if window is None else window - 1,  # beside the query's own position
        window_size_right=0 if is_causal else -1,
    )


# --- products


def fp16_prepacked(weight: torch.Tensor) -> Any:
    """A copy of a contiguous fp32 weight [N, K] on a CPU, in fp16 and in the order that `fp16_product` reads.

    Missing: `torch.ao.nn.quantized.dynamic.Linear` is the documented way, a module that is deprecated as a whole.
    """
    return torch.ops.quantized.linear_prepack_fp16(weight, None)


def fp16_product(x: torch.Tensor, prepacked: Any) -> torch.Tensor:
    """x fp32 [..., K], of two or more dimensions, with a `fp16_prepacked` weight: fp32 [..., N].

    Missing: see `fp16_prepacked`.
    """
    return _fp16_product(x, prepacked)


def int4_packed(codes: torch.Tensor, inner_tiles: int) -> torch.Tensor:
    """INT4 codes [N, K] in the order that `int4_product` reads on their device.

    On a CPU int32 [N, K] from 0 to 15; on a GPU uint8 [N, K / 2], the even ones in the upper half.

    Missing: torch has no public product with INT4 weights; torchao's calls this one.
    """
    on_cpu = codes.device.type == "cpu"
    aten = torch.ops.aten
    convert = aten._convert_weight_to_int4pack_for_cpu if on_cpu else aten._convert_weight_to_int4pack
    return convert(codes, inner_tiles)


def int4_product(x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    """x bf16 [rows, K] with an `int4_packed` weight: bf16 [rows, N]. `scales` bf16 [K / group, N, 2]: scale and zero
    point of each group. Missing: see `int4_packed`."""
    aten = torch.ops.aten
    product = aten._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else aten._weight_int4pack_mm
    return product(x, packed, group, scales)


def fp8_product(
    codes: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    fast_sums: bool = False,
) -> torch.Tensor:
    """FP8 [rows, K] with FP8 [K, N], column-major, on a GPU: bf16 [rows, N].

    `scales` fp32 [rows, 1] and `weight_scales` fp32 [1, N] multiply the result. `fast_sums`: Hopper adds up in the
    tensor core's own registers, of about 14 bits, and does not promote partial sums to fp32.

    Missing: `F.scaled_mm` runs another operator, `_scaled_mm_v2`, which was not measured here.
    """
    return torch._scaled_mm(
        codes, weight, scale_a=scales, scale_b=weight_scales, out_dtype=torch.bfloat16, use_fast_accum=fast_sums
    )


def fp8_operator() -> Any:
    """The operator that `fp8_product` runs, as a dispatch mode sees it. Missing: see `fp8_product`."""
    return torch.ops.aten._scaled_mm


def tensor_version(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place. Missing: the attribute is documented, but has no public name."""
    return tensor._version


# --- modules


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks run before or after a module's own forward. Missing: a public way to ask."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


# --- torch.compile


def compile_errors() -> type[Exception]:
    """What torch.compile raises where tracing or code generation fails. Missing: a public base class of its errors."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def with_own_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """The same function with a code object of its own, for torch.compile.

    Graphs are kept by code object, so that functions that one `def` makes share them and the limit on their number.
    Missing: torch 2.11 has no `torch.compile(isolate_recompiles=True)`, which 2.13 has.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def with_own_sizes(compiled: Callable[P, R]) -> Callable[P, R]:
    """A function by torch.compile, with a size of its own for each dimension: two that are equal once need not be.

    Missing: `torch.compile(dynamic=True)` gives equal sizes one symbol, and has no option against it.
    """
    from torch.fx.experimental import _config

    config: Any = _config  # torch gives the module its `patch` when it is imported
    return config.patch(use_duck_shape=False)(compiled)


def with_static_floats(compiled: Callable[P, R]) -> Callable[P, R]:
    """A function in which torch.compile takes Python's floats for constants; else it would trace twice.

    Missing: `torch.compiler.config` has no such option.
    """
    from torch._dynamo import config

    return config.patch(specialize_float=True)(compiled)


# --- tensors and processes


def without_torch_function() -> AbstractContextManager[None]:
    """Meanwhile subclasses of Tensor are plain tensors to torch's functions: for use inside `__torch_function__`.

    Missing: `super().__torch_function__` does this too, and makes all results members of the subclass.
    """
    return torch._C.DisableTorchFunctionSubclass()


def dtensor_offset(tensor: "DTensor") -> list[int]:
    """Where this rank's part of a divided tensor begins in the whole, one number for each dimension.

    Missing: DTensor has its parts' shapes and no places; only torch's own checkpoints know them.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
    return list(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def strided_shard(dim: int, split_factor: int) -> "Placement":
    """How a dimension lies that one mesh dimension divides after another: tensor parallelism, then FSDP2.

    Missing: torch makes such placements itself, and offers `Shard` alone.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def default_store() -> dist.Store:
    """The store by which the ranks of the default process group met.

    Missing: `init_process_group` makes it, and hands it to nobody.
    """
    return dist.distributed_c10d._get_default_store()


# --- measurements


def all_threads() -> Any:
    """`experimental_config` of torch.profiler for all threads of the process, those too that began before it.

    Missing: `torch.profiler.profile` records the thread that starts it, and has no other option for more.
    """
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


# --- what a CPU has


def bf16_on_other_cpus() -> bool:
    """Whether oneDNN has bf16 products on a CPU that is not x86. Missing: `torch.backends.mkldnn` does not tell."""
    # A torch without oneDNN, as macOS has it, does not know the operator.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
