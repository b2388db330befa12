"""The product with a weight matrix, as decoding needs it: in fp32 on a CPU, of few rows in bf16 and fp16 on a GPU, in
INT4 and in FP8. Knows no models.

Source of the figures: one Zen 5 core, torch 2.13 (MKL), fp32, the 112 matrices of 16 layers x 256; of the FP8 ones, a
matrix of 1024 x 256; of the packed ones and of pieces, draft layers of 256 with 1024 inside, from memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.hardware import batches_products, computes_fp8, has_int4_product
from eagle_train.ops import few_rows
from eagle_train.ops.kernels import is_plain
from eagle_train.ops.torch_private import (
    fp8_product,
    fp16_prepacked,
    fp16_product,
    int4_packed,
    int4_product,
    tensor_version,
)
from eagle_train.ops.weight_codes import (
    FP8,
    GROUP,
    dequantise,
    pack_int4,
    quantise_fp8,
    quantise_int4,
    quantise_rows_fp8,
    unpack_int4,
)

FEW_ROWS = range(1, 7)
SMALL_WEIGHT = 2**21  # elements; beyond, the plain product is the faster one from four rows on
MOST_INPUTS = 2048  # beyond, the plain product is the faster one of one row
PIECE = 16  # outputs

CodesAndScales = tuple[torch.Tensor, torch.Tensor]

INNER_TILES = 8  # of the GPU's INT4 layout; 16 inputs each, so that a group is a whole number of them


class Linear(nn.Linear):
    """`nn.Linear` that is fast for the few rows of a tree; its parameters and its results are the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]. `F.linear` is its plain twin, under autocast too."""
    kind, dtype = x.device.type, x.dtype
    ours = dtype == torch.float32 if kind == "cpu" else kind == "cuda" and dtype in few_rows.DTYPES
    # Autocast knows F.linear; an operator of ours would be given a draft's weights in fp32 with activations in bf16.
    if not ours or torch.is_autocast_enabled(kind):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias) if torch.is_grad_enabled() else torch.ops.eagle_train.linear(x, weight, bias)
    return _linear_on_cpu(x, weight, bias) if kind == "cpu" else _linear_on_gpu(x, weight, bias)


def _linear_on_gpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` in bf16 or fp16."""
    way = few_rows.fastest(x, weight)
    return F.linear(x, weight, bias) if way is None else few_rows.product(x, weight, bias, way)


def _linear_on_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` in fp32: by the weight in fp16 where it is kept so (`keep_fp16_copy`), whatever the number of rows.

    Else the product of few rows is faster with the weight on the left, where nothing of it is rearranged: 3.0 ms
    against 5.2 for 4 rows, 2.7 against 4.6 for 2, 5.1 against 6.0 for 6. One row's is fastest by pieces of the weight:
    a batch of products reads them at 16 GB/s from memory and at 25 from the cache, where a product with a vector reads
    7 and 23, and one of two rows 14 and 12.
    """
    rows, (outputs, inputs) = x.numel() // x.shape[-1], weight.shape
    if is_plain("linear"):
        return F.linear(x, weight, bias)
    few = FEW_ROWS.start <= rows < FEW_ROWS.stop
    if rows > 0 and not (x.requires_grad and torch.is_grad_enabled()) and (packed := fp16_copy_of(weight)) is not None:
        out = fp16_product(x if x.ndim > 1 else x.unsqueeze(0), packed)
    elif few and rows == 1 and inputs <= MOST_INPUTS and outputs % PIECE == 0 and batches_products():
        pieces = weight.unflatten(0, (-1, PIECE))
        row = x.reshape(1, 1, inputs).expand(len(pieces), -1, -1)
        out = pieces.bmm(row.mT)  # by its strides a row that is turned, not a column: that takes many times as long
    elif few and rows > 1 and weight.numel() <= SMALL_WEIGHT:
        out = weight.mm(x.reshape(rows, inputs).t()).t().contiguous()
    else:
        return F.linear(x, weight, bias)
    out = out.view(*x.shape[:-1], outputs)
    return out if bias is None else out + bias


# For torch.compile, which would look into it, and cannot into what is packed, or what is timed.
torch.library.define("eagle_train::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("eagle_train::linear", "CPU", _linear_on_cpu)
torch.library.impl("eagle_train::linear", "CUDA", _linear_on_gpu)


@torch.library.register_fake("eagle_train::linear")
def linear_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.no_grad()
def keep_fp16_copy(weight: torch.Tensor) -> None:
    """Keep a frozen weight [N, K] in fp16 beside itself, where a CPU then has a product for it.

    In bf16, as checkpoints are, nearly every number is one of fp16 too: the weight is packed where what is lost of it
    is less than fp32 would round off, and then products differ from fp32's by the order of their sums alone. They read
    half as much, in the order of the memory: the matrices of 14 draft layers take 2.3 ms for one row and 5.2 otherwise,
    2.7 and 11.2 for 4, 166 and 208 for 512.
    """
    plain = type(weight) in (torch.Tensor, nn.Parameter) and not weight.is_inference()
    there = plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad
    if not there or torch.backends.quantized.engine not in ("x86", "fbgemm") or fp16_copy_of(weight) is not None:
        return
    lost = torch.linalg.vector_norm(weight - weight.half())
    if lost <= torch.linalg.vector_norm(weight) * 2**-24:
        copied = tensor_version(weight), fp16_prepacked(weight.contiguous())
        weight.fp16_copy = copied  # type: ignore[attr-defined]


def fp16_copy_of(weight: torch.Tensor) -> Any:
    """What `keep_fp16_copy` made of a weight, unless it was changed since."""
    version, packed = getattr(weight, "fp16_copy", (None, None))
    return packed if version is not None and version == tensor_version(weight) else None


class QuantisedLinear(nn.Module):
    """A weight [N, K] in few bits, and a bias [N] as it is; for inference. `twin` is its plain product, on any device.

    Made from the codes and scales of ops/weight_codes.py, or by `of` from the weight itself. They lie in buffers of
    integers, bit by bit: a model's conversion to another dtype leaves them alone. `use_kernel`, once the module is on
    its device, puts them into the order of that device's own product.
    """

    scheme = ""  # its name
    inputs = 1  # K must be a multiple of it
    outputs = 16  # N must be
    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.num_outputs, self.has_kernel = len(codes), False
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def of(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, moments: torch.Tensor | None = None
    ) -> "QuantisedLinear":
        """Of a weight [N, K], rounded to nearest, or by the second moments [K, K] of its inputs (ops.weight_codes)."""
        codes, scales = cls.rounded(weight, moments)
        return cls(codes, scales, bias)

    @staticmethod
    def rounded(weight: torch.Tensor, moments: torch.Tensor | None) -> CodesAndScales:
        """The codes and scales of a weight [N, K], as ops/weight_codes.py makes them."""
        raise NotImplementedError

    @classmethod
    def gpu_bytes(cls, outputs: int, inputs: int) -> int:
        """Bytes of a weight [N, K] without a bias as the kernel of a GPU reads it; N is filled up to a multiple of
        `outputs`."""
        raise NotImplementedError

    def parts(self) -> CodesAndScales:
        """The codes [N, K] and scales that it was made from, before it has a kernel."""
        raise NotImplementedError

    def twin(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, K] to [rows, N] by a plain product."""
        raise NotImplementedError

    def use_kernel(self, dtype: torch.dtype) -> None:
        """Take the order of this device's own product, once; `dtype`: of the activations."""
        raise NotImplementedError

    def kernel(self, x: torch.Tensor) -> torch.Tensor:
        """`twin` by the device's own product."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] to [..., N] in x's dtype."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) == 0:  # an expert that no token chose; the kernels want a row
            return x.new_empty(*x.shape[:-1], self.num_outputs)
        out = (self.kernel(rows) if self.has_kernel else self.twin(rows)).to(x.dtype)
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


class Int4Linear(QuantisedLinear):
    """A weight in INT4; activations as they are. The kernels' activations and results are bf16."""

    scheme = "int4"
    inputs = GROUP
    rounded = staticmethod(quantise_int4)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__(pack_int4(codes), scales.view(torch.int16), bias)

    @classmethod
    def gpu_bytes(cls, outputs: int, inputs: int) -> int:
        rows = outputs + -outputs % cls.outputs
        return rows * inputs // 2 + 2 * 2 * rows * inputs // GROUP  # a scale and a zero point of each group, in bf16

    def parts(self) -> CodesAndScales:
        """Codes, int8 [N, K], and scales, bf16 [N, K / GROUP]."""
        assert not self.has_kernel, "a kernel keeps them in an order of its own"
        return unpack_int4(self.codes), self.scales.view(torch.bfloat16)

    def twin(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), dequantise(*self.parts()))

    def use_kernel(self, dtype: torch.dtype) -> None:
        """A GPU that has no such product keeps the twin, and a CPU that has none the weight widened, in fp32."""
        scales, on_cpu = self.scales.view(torch.bfloat16).t(), self.codes.device.type == "cpu"
        if not has_int4_product(self.codes.device):
            if on_cpu:
                self.codes, self.has_kernel = dequantise(*self.parts()), True
            return
        self.codes = int4_packed(unpack_int4(self.codes).int() + 8 if on_cpu else self.codes, INNER_TILES)
        self.scales = torch.stack((scales, torch.zeros_like(scales)), dim=-1).view(torch.int16)  # and zero points
        self.has_kernel = True

    def kernel(self, x: torch.Tensor) -> torch.Tensor:
        if self.codes.dtype == torch.float32:
            return linear(x.float(), self.codes)
        return int4_product(x.bfloat16().contiguous(), self.codes, GROUP, self.scales.view(torch.bfloat16))


class Fp8Linear(QuantisedLinear):
    """A weight in FP8 with a scale for each output; activations in FP8 too, with a scale for each row, found anew."""

    scheme = "fp8"
    inputs = 16
    rounded = staticmethod(quantise_fp8)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__(codes.view(torch.uint8), scales.view(torch.int32), bias)

    @classmethod
    def gpu_bytes(cls, outputs: int, inputs: int) -> int:
        return (outputs + -outputs % cls.outputs) * (inputs + 4)

    def parts(self) -> CodesAndScales:
        """Codes, FP8 [N, K], and scales, fp32 [N, 1]."""
        assert not self.has_kernel, "a kernel may keep them widened"
        return self.codes.view(FP8), self.scales.view(torch.float32)

    def twin(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise_rows_fp8(x)
        return F.linear(dequantise(codes, scales), dequantise(*self.parts()))

    def use_kernel(self, dtype: torch.dtype) -> None:
        """Where the device does not multiply in FP8, the codes are widened, in fp32 or bf16 as `dtype` is.

        That is how torch's own FP8 product helps itself there, but in every call: 1.06 ms on a CPU, against 0.04 for
        the product alone. The values are the same, the memory is not.
        """
        if not computes_fp8(self.codes.device):
            wide = dtype if dtype == torch.float32 else torch.bfloat16  # sums of codes would overflow fp16
            self.codes = self.codes.view(FP8).to(wide)
        self.has_kernel = True

    def kernel(self, x: torch.Tensor) -> torch.Tensor:
        (codes, scales), own = quantise_rows_fp8(x), self.scales.view(torch.float32).t()
        if self.codes.dtype == torch.uint8:
            return fp8_product(codes, self.codes.view(FP8).t(), scales, own)
        return linear(codes.to(self.codes.dtype), self.codes).float() * scales * own


class FrozenFp8Linear(Fp8Linear):
    """`Fp8Linear` for the many rows of training's frozen target: the sums are fast ones, and memory stays halved also
    where the device has no FP8 product, because codes are widened in each call. It stays where it is, in its dtypes,
    once it has a kernel."""

    def use_kernel(self, dtype: torch.dtype) -> None:
        """A device that has no such product keeps the twin."""
        if computes_fp8(self.codes.device):
            self.codes, self.scales = self.codes.view(FP8), self.scales.view(torch.float32).t()
            self.has_kernel = True

    def twin(self, x: torch.Tensor) -> torch.Tensor:
        (codes, scales), (weight, own) = quantise_rows_fp8(x), self.parts()
        wide = x.dtype if x.dtype == torch.float32 else torch.bfloat16  # sums of codes would overflow fp16
        return F.linear(codes.to(wide), weight.to(wide)).float() * own.t() * scales

    def kernel(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise_rows_fp8(x)
        return fp8_product(codes, self.codes.t(), scales, self.scales, fast_sums=True)


def concat_outputs(*modules: Linear | QuantisedLinear) -> Linear | QuantisedLinear:
    """One module with the outputs of several of one kind side by side, all with a bias or none; for inference."""
    first = modules[0]
    biased = first.bias is not None
    assert all(type(module) is type(first) and (module.bias is not None) == biased for module in modules)
    bias = torch.cat([module.bias for module in modules if module.bias is not None]) if biased else None
    if isinstance(first, QuantisedLinear):
        parts = [module.parts() for module in modules if isinstance(module, QuantisedLinear)]
        return type(first)(torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts]), bias)
    weight = torch.cat([module.weight for module in modules if isinstance(module, Linear)])
    one = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    if bias is not None:
        one.bias = nn.Parameter(bias, requires_grad=False)
    one.weight = nn.Parameter(weight, requires_grad=False)
    return one
