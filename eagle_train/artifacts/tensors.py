"""A draft's tensors as its file holds them, and back: quantised matrices in the formats of compressed-tensors.

INT4 is its `pack-quantized` format, FP8 its `float-quantized` format. Knows nothing of files or serving engines.
"""

from collections.abc import Mapping

import torch

from eagle_train.drafts import Draft
from eagle_train.errors import UserError, check
from eagle_train.models.draft_quantisation import SCHEMES, Quant, linear_modules
from eagle_train.ops.linear import QuantisedLinear
from eagle_train.ops.weight_codes import FP8, GROUP

_BITS = 4
_Spec = tuple[tuple[int, ...], torch.dtype]  # of a tensor


class TensorError(UserError):
    """A tensor of a draft's file that is missing, unexpected, not finite, or of the wrong shape or dtype."""


def same_weight(found: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a tensor of a file is this one, as far as precisions tell: fp16 lacks the small numbers of bf16, and each
    of the two may have been rounded, so that equal in either, or in bf16, is equal."""
    dtypes = (torch.bfloat16, found.dtype, own.dtype)
    return found.shape == own.shape and any(torch.equal(found.to(dtype), own.to(dtype)) for dtype in dtypes)


def _packed_tensors(scheme: str, module: QuantisedLinear) -> dict[str, torch.Tensor]:
    """A quantised module's tensors in their file format, by the last part of their names."""
    codes, scales = module.parts()
    if scheme == "fp8":
        return {"weight": codes, "weight_scale": scales}
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    shape = torch.tensor(codes.shape)
    return {"weight_packed": pack_to_int32(codes, _BITS), "weight_scale": scales, "weight_shape": shape}


def _quantised_module(scheme: str, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> QuantisedLinear:
    """The quantised module of such tensors, with its bias."""
    if scheme == "fp8":
        return SCHEMES[scheme](tensors["weight"], tensors["weight_scale"], bias)
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    codes = unpack_from_int32(tensors["weight_packed"], _BITS, torch.Size(tensors["weight_shape"].tolist()))
    return SCHEMES[scheme](codes, tensors["weight_scale"], bias)


def _specs(scheme: str, outputs: int, inputs: int) -> dict[str, _Spec]:
    """Shapes and dtypes of what `_packed_tensors` gives for a weight [outputs, inputs]."""
    if scheme == "fp8":
        return {"weight": ((outputs, inputs), FP8), "weight_scale": ((outputs, 1), torch.float32)}
    return {
        "weight_packed": ((outputs, inputs * _BITS // 32), torch.int32),
        "weight_scale": ((outputs, inputs // GROUP), torch.bfloat16),
        "weight_shape": ((2,), torch.int64),
    }


def file_tensors(draft: Draft, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All of a draft's tensors by name, on the CPU: quantised matrices packed, everything else in `dtype`."""
    modules = {name: module for name, module in draft.named_modules() if isinstance(module, QuantisedLinear)}
    own = {f"{name}.{part}" for name in modules for part in ("codes", "scales")}
    found = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in draft.state_dict().items()
        if name not in own
    }
    for name, module in modules.items():
        parts = _packed_tensors(module.scheme, module)
        found |= {f"{name}.{part}": tensor.cpu().contiguous() for part, tensor in parts.items()}
    return found


def load_tensors(draft: Draft, tensors: Mapping[str, torch.Tensor], place: str, quant: Quant | None = None) -> None:
    """Load what `file_tensors` gave into an unquantised draft, whose modules that `quant` names become quantised.

    `place` names the tensors' origin in errors. Raises TensorError for one that is missing, unexpected, not finite, or
    of the wrong shape or dtype.
    """
    quant = quant or Quant()
    small = {} if quant.scheme == "none" else linear_modules(draft, quant.scope)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
        name: (tuple(tensor.shape), None)
        for name, tensor in draft.state_dict().items()
        if name.removesuffix(".weight") not in small
    }
    for name, module in small.items():
        expected |= {f"{name}.{part}": spec for part, spec in _specs(quant.scheme, *module.weight.shape).items()}
    for name in sorted(expected.keys() ^ tensors.keys()):
        problem = "is missing" if name in expected else "is not part of this draft"
        raise TensorError(f"{place}: tensor {name} {problem}")
    for name, (shape, dtype) in expected.items():
        found = tensors[name]
        same = tuple(found.shape) == shape
        check(same, f"{place}: tensor {name} has shape {tuple(found.shape)}, must be {shape}", TensorError)
        right = found.is_floating_point() if dtype is None else found.dtype == dtype
        check(right, f"{place}: tensor {name} is {found.dtype}, must be {dtype or 'floating-point'}", TensorError)
    check_finite(tensors, place)
    for name, module in small.items():
        own = {part: tensors[f"{name}.{part}"] for part in _specs(quant.scheme, *module.weight.shape)}
        stated = own.get("weight_shape")
        check(
            stated is None or tuple(stated.tolist()) == tuple(module.weight.shape),
            f"{place}: tensor {name}.weight_shape is {stated}, must be {tuple(module.weight.shape)}",
            TensorError,
        )
        bias = None if module.bias is None else tensors[f"{name}.bias"].float()
        draft.set_submodule(name, _quantised_module(quant.scheme, own, bias))
    plain = {name: tensors[name].float() for name, (_, dtype) in expected.items() if dtype is None}
    draft.load_state_dict(plain, strict=False)  # the quantised modules are complete


def check_finite(tensors: Mapping[str, torch.Tensor], place: str) -> None:
    for name, tensor in tensors.items():
        whole = not tensor.is_floating_point() or bool(tensor.float().isfinite().all())
        check(whole, f"{place}: tensor {name} holds values that are not finite", TensorError)
