"""Checks a written artifact against the trained draft before it gets its final name: tensors, names, outputs.

A failure is a bug of ours, not a mistake of the user. Knows nothing of how artifacts are written.
"""

import copy
from pathlib import Path

import torch
from torch import nn

from eagle_train.artifacts import layouts
from eagle_train.artifacts.format import Artifact, load_draft, read_tensors
from eagle_train.artifacts.tensors import file_tensors
from eagle_train.drafts import Draft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.models.draft_quantisation import quant_of
from eagle_train.ops.linear import QuantisedLinear

_SAMPLE = 32  # slots
# The largest relative error of a quantised matrix's product with random inputs. Normally distributed weights rounded to
# nearest have 0.1 in INT4 and 0.04 in FP8; error feedback is slightly worse on such inputs.
_BOUNDS = {"fp8": 0.1, "int4": 0.3}


@torch.no_grad()
def verify(directory: Path, about: Artifact, draft: Draft, trained: Draft) -> float:
    """Read the directory back and assert that it is right. `draft` was written, and was made from `trained`.

    Every tensor equals the one that was written; names and shapes are the engine's; every quantised matrix is within
    `_BOUNDS` of the trained one; an unquantised draft's outputs equal, to the bit, those of the trained draft in the
    written precision. Returns the relative error of the draft's outputs on a sample.
    """
    dtype = getattr(torch, about.dtype)
    back = load_draft(directory, about.target)
    written, wanted = file_tensors(back, dtype), file_tensors(draft, dtype)
    assert written.keys() == wanted.keys(), f"{directory}: {sorted(written.keys() ^ wanted.keys())}"
    for name, tensor in wanted.items():
        same = written[name].dtype == tensor.dtype and torch.equal(_as_bits(written[name]), _as_bits(tensor))
        assert same, f"{directory}: {name} is not what was written"
    if about.layout != "native":
        check_names(directory, about)
    for name, module in back.named_modules():
        own = trained.get_submodule(name)
        if isinstance(module, QuantisedLinear) and isinstance(own, nn.Linear):
            x = _noise(_SAMPLE, own.in_features)
            off = _distance(module(x), own(x))
            assert off <= _BOUNDS[module.scheme], f"{directory}: {name} is {off:.0%} off what was trained"
    off = _distance(_outputs(back), _outputs(_rounded(trained, dtype)))
    assert off == 0 or quant_of(trained) != about.quant, f"{directory}: outputs are {off:.1%} off what was trained"
    return off


def check_names(directory: Path, about: Artifact) -> None:
    """Assert that the file has the engine's names and no others, a matrix whole or in its packed parts."""
    shapes = layouts.expected_shapes(about.layout, about.draft, about.target)
    tensors = read_tensors(directory, file=layouts.weights_file(about.layout, about.draft))
    names = {name.rpartition(".")[0] for name in tensors}
    assert names == {name.rpartition(".")[0] for name in shapes}, f"{directory}: not the names {about.layout} loads"
    for name, tensor in tensors.items():
        assert name not in shapes or tuple(tensor.shape) == shapes[name], f"{directory}: {name} {tuple(tensor.shape)}"


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def _rounded(trained: Draft, dtype: torch.dtype) -> Draft:
    """The trained draft, its weights rounded to a dtype and widened to fp32 again."""
    draft = copy.deepcopy(trained)
    for parameter in draft.parameters():
        parameter.copy_(parameter.to(dtype).float())
    return draft


def _outputs(draft: Draft) -> torch.Tensor:
    """States [1, _SAMPLE, W] in the passes that all parameters take part in, side by side, for fixed random embeddings
    and target's states, and logits of LM heads of its own."""
    config, width = draft.config, draft.config.hidden_size
    embeddings, states = _noise(1, _SAMPLE, (2 + len(config.target_layers)) * width).tensor_split((width,), dim=-1)
    target, places = TargetStates.split(states, config.target_layers), torch.arange(_SAMPLE)[None]
    rows = Rows(embeddings, target, places, [[_SAMPLE]], lambda tokens: _noise(*tokens.shape, width))
    found = draft.eval().unrolled(draft, rows, config.levels or config.whole_passes)
    heads = [draft.own_head(level) for level in range(config.own_heads)]
    logits = [head(draft.read(each)) for head, each in zip(heads, found, strict=False) if head]
    return torch.cat((*found, *logits), dim=-1)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """The error of `found` relative to the norm of `right`."""
    return ((found - right).norm() / right.norm().clamp(min=torch.finfo(right.dtype).tiny)).item()
