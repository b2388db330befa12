"""P-EAGLE drafts as vLLM loads them, and in the format of speculators: EAGLE-3's layouts with `mask_hidden`.

vLLM reads the mask token as `pard_token`, speculators as `mask_token_id`. SGLang has no P-EAGLE.
Here `draft` is a `PeagleConfig`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from eagle_train.drafts.eagle3_layouts import Eagle3Layout, Speculators, Vllm
from eagle_train.drafts.layouts import Layout, Refused, Shapes, Tensors
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.target import Identity

MASK = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of a config.json that name the mask token, in the order in which vLLM reads them."""


class _WithMask(Eagle3Layout):
    """`mask_hidden` with as many dimensions as the engine has."""

    dimensions = 2
    vllm: ClassVar[Mapping[str, Any]] = {"method": "eagle3", "parallel_drafting": True}  # EAGLE-3 with mask slots to it

    def tensors(self, draft: Any, tensors: Tensors, embedding: torch.Tensor | None) -> dict[str, torch.Tensor]:
        found = super().tensors(draft, tensors, embedding)
        return found | {MASK: found[MASK].view(self._mask_shape(draft))}

    def ours(self, draft: Any, tensors: Tensors) -> dict[str, torch.Tensor]:
        found = super().ours(draft, tensors)
        return found | ({MASK: found[MASK].flatten()} if MASK in found else {})

    def shapes(self, draft: Any, target: Identity) -> Shapes:
        return super().shapes(draft, target) | {MASK: self._mask_shape(draft)}

    def _mask_shape(self, draft: Any) -> tuple[int, ...]:
        return (*[1] * (self.dimensions - 1), draft.fc_inputs)


class _Vllm(_WithMask, Vllm):
    serves = """\
```bash
vllm serve {target} --speculative-config '{vllm}'
```

Fewer `num_speculative_tokens` are possible, and cost it nothing but these tokens."""

    def config(self, draft: Any, quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        return _without_chains(super().config(draft, quant, dtype, target)) | {"pard_token": draft.mask_token}


class _Speculators(_WithMask, Speculators):
    dimensions = 3
    algorithm, architecture = "peagle", "PEagleSpeculator"

    def own_reasons(self, draft: Any, quant: Quant) -> dict[str, bool]:
        return {"has for P-EAGLE no norm of each fused layer, and this draft has them (draft.fc_norm)": draft.fc_norm}

    def config(self, draft: Any, quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        return _without_chains(super().config(draft, quant, dtype, target)) | {"mask_token_id": draft.mask_token}


def _without_chains(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json that does not say what a chain's next slot is fed."""
    return {name: value for name, value in values.items() if name != "norm_output"}


LAYOUTS: dict[str, Layout] = {
    "vllm": _Vllm(),
    "sglang": Refused("has no P-EAGLE"),
    "speculators": _Speculators(),
}
