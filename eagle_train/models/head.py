"""The frozen LM head of a target, with the scaling and soft-capping its family applies, and a copy of it in few bits,
which drafts are proposed with. Knows nothing of layers.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import align_module_device
from transformers import PreTrainedModel

from eagle_train.models.weights import full_tensor
from eagle_train.ops import head_argmax
from eagle_train.ops.linear import QuantisedLinear, linear


@dataclass(frozen=True)
class LMHead:
    """The frozen LM head: logits = cap(scale * (hidden @ weight.T + bias)), cap(x) = softcap * tanh(x / softcap)."""

    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def num_bytes(self) -> int:
        """Of the weight, as a product reads it."""
        return self.weight.numel() * self.weight.itemsize

    def of(self, tokens: torch.Tensor) -> "LMHead":
        """The head of these tokens alone, ids [V']."""
        return replace(self, weight=self.weight[tokens], bias=None if self.bias is None else self.bias[tokens])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        return self.capped(linear(hidden.to(self.weight.dtype), self.weight, self.bias))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """What the family makes of hidden @ weight.T + bias."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def most_likely(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` most likely tokens int64 [..., count] after hidden states [..., H]."""
        return self.greatest(hidden)[1] if count == 1 else self(hidden).topk(count).indices

    def greatest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The greatest logit [..., 1] after hidden states [..., H], and the lowest token int64 [..., 1] that has it.

        The logit is fp32 or of the weight's dtype. NaN counts as the greatest.
        """

        def by_logits() -> tuple[torch.Tensor, torch.Tensor]:
            value, token = self(hidden).max(-1, keepdim=True)  # on a CPU two to three times as fast as argmax
            return value, token

        if head_argmax.pays(hidden, self.weight, by_logits):
            return head_argmax.head_argmax(hidden, self.weight, self.bias, self.scale, self.softcap)
        return by_logits()


@dataclass(frozen=True)
class QuantisedLMHead(LMHead):
    """An LM head whose weight is in few bits, as `product` has it; `weight` has its shape and dtype alone, on no
    device, so that no kernel reads it."""

    product: QuantisedLinear | None = None

    @property
    def num_bytes(self) -> int:
        assert self.product is not None, "made by `quantised`"
        return self.product.codes.nbytes + self.product.scales.nbytes

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.product is not None, "made by `quantised`"
        logits = self.product(hidden.to(self.weight.dtype))
        return self.capped(logits[..., : len(self.weight)])


_ROWS = 2**14  # of a weight that are rounded at a time: copies in fp32 are small


@torch.no_grad()
def quantised(head: LMHead, made: type[QuantisedLinear]) -> QuantisedLMHead:
    """A copy of `head` with its weight in few bits, on its device, with that device's product.

    Tokens are filled up to a multiple of what the product needs; inputs must be one (`made.inputs`).
    """
    tokens, inputs = head.weight.shape
    assert inputs % made.inputs == 0, "whoever calls checks it"
    more = -tokens % made.outputs
    parts = [made.rounded(rows, None) for rows in F.pad(head.weight, (0, 0, 0, more)).split(_ROWS)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    product = made(codes, scales, None if head.bias is None else F.pad(head.bias, (0, more))).eval()
    product.use_kernel(head.weight.dtype)
    return QuantisedLMHead(head.weight.to("meta"), None, head.scale, head.softcap, product)


def head_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The matrix that ends a model, or its language model; None where there is none."""
    head = model.get_output_embeddings()
    return model.get_decoder().get_output_embeddings() if head is None else head


def lm_head_of(model: PreTrainedModel) -> LMHead:
    """The LM head with the scaling and soft-capping its family applies."""
    head: Any = head_of(model)
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    if scale is None:
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    softcap = getattr(config, "final_logit_softcapping", None)
    with align_module_device(head):
        bias = None if getattr(head, "bias", None) is None else full_tensor(head.bias)
        return LMHead(full_tensor(head.weight), bias, scale, softcap)
