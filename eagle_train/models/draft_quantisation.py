"""A draft in few bits: the paper's quantised drafts (section 3, table 2). For inference; training knows nothing of it.

The target decides what is accepted, so that a draft's rounding costs acceptance, never the output.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from eagle_train.errors import OptionError, check
from eagle_train.ops.linear import Fp8Linear, Int4Linear, QuantisedLinear

M = TypeVar("M", bound=nn.Module)
SCHEMES = {made.scheme: made for made in (Int4Linear, Fp8Linear)}
SCOPES = ("ffn", "all_linear")


@dataclass
class Quant:
    """conf/quant. `scheme`: none, int4 (groups of 128) or fp8; `scope`: ffn (the paper's) or all_linear."""

    scheme: str = "none"  # none | int4 | fp8
    scope: str = "ffn"  # ffn | all_linear

    def __post_init__(self) -> None:
        known = ("none", *SCHEMES)
        check(self.scheme in known, f"quant.scheme={self.scheme}: must be one of {', '.join(known)}")
        check(self.scope in SCOPES, f"quant.scope={self.scope}: must be {' or '.join(SCOPES)}")

    def __str__(self) -> str:
        return self.scheme if self.scheme == "none" else f"{self.scheme} ({self.scope})"


def scheme_of_lm_head(kind: str, inputs: int) -> type[QuantisedLinear]:
    """What multiplies with a copy of an LM head of so many inputs in few bits; `kind`: fp8 or int4, as
    `EngineConfig.draft_lm_head`. Raises OptionError where that has no product for so many inputs."""
    made = SCHEMES[kind]
    check(
        inputs % made.inputs == 0,
        f"draft_lm_head={kind}: the LM head has {inputs} inputs, no multiple of {made.inputs}; use target",
        OptionError,
    )
    return made


@torch.no_grad()
def quantise_draft(draft: M, quant: Quant, moments: Mapping[str, torch.Tensor] | None = None) -> M:
    """The draft with the linear modules of the scope in few bits, and the rest as it is; `draft` is left alone.

    Weights are rounded as they are here, so give them as they were loaded, before any other rounding: to nearest, or
    with error feedback by the second moments [K, K] of each module's inputs (`moments`, by its name; see
    ops/weight_codes.py). With the scheme none, `draft` itself. Raises UserError for a matrix of a shape that the scheme
    has no product for, and for a draft that is quantised already.
    """
    if quant.scheme == "none":
        return draft
    draft = copy.deepcopy(draft)
    for name, module in modules_to_quantise(draft, quant).items():
        known = None if moments is None else moments[name]
        draft.set_submodule(name, SCHEMES[quant.scheme].of(module.weight, module.bias, known))
    return draft


def modules_to_quantise(draft: nn.Module, quant: Quant) -> dict[str, nn.Linear]:
    """The linear modules to be quantised, by name. Raises UserError as `quantise_draft` does."""
    already = quant_of(draft)
    check(already.scheme == "none", f"quant.scheme={quant.scheme}: the draft is quantised already, {already}; use none")
    reason = misfit(draft, quant)
    fits = [each for each in SCHEMES if misfit(draft, Quant(each, quant.scope)) is None] or ["none"]
    check(reason is None, f"quant.scheme={quant.scheme}: {reason}; quant={' or '.join(fits)} would do")
    return linear_modules(draft, quant.scope)


def misfit(draft: nn.Module, quant: Quant) -> str | None:
    """The first linear module that the scheme has no product for, in words; None where all have a right shape."""
    made = SCHEMES[quant.scheme]
    for name, module in linear_modules(draft, quant.scope).items():
        outputs, inputs = module.weight.shape
        if outputs % made.outputs or inputs % made.inputs:
            multiples = f"must be multiples of {made.outputs} and {made.inputs}"
            return f"{name} of the draft has {outputs} outputs and {inputs} inputs; {multiples}"
    return None


def linear_modules(draft: nn.Module, scope: str) -> dict[str, nn.Linear]:
    """The linear modules of a scope by name. The router of an MoE is in none: it is small, and it decides."""
    found = {name: module for name, module in draft.named_modules() if isinstance(module, nn.Linear)}
    inside = {name: module for name, module in found.items() if scope == "all_linear" or ".mlp." in name}
    return {name: module for name, module in inside.items() if not name.endswith(".router")}


def quant_of(draft: nn.Module) -> Quant:
    """How a draft is quantised."""
    found = {name: module for name, module in draft.named_modules() if isinstance(module, QuantisedLinear)}
    if not found:
        return Quant()
    (scheme,) = {module.scheme for module in found.values()}
    return Quant(scheme, "all_linear" if "fc" in found else "ffn")
