"""That what was written is what was trained, proved before it is given its name: tensors, the engine's names, outputs.

A failure here is ours, not the user's. Knows nothing of how things are written.
"""

import copy
from pathlib import Path

import torch
from torch import nn

from eagle_train.artifacts import layouts
from eagle_train.artifacts.compressed_tensors_format import file_tensors
from eagle_train.artifacts.format import Artifact, load_draft, read_tensors
from eagle_train.models.draft import Draft
from eagle_train.models.draft_quantisation import quant_of
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.linear import QuantisedLinear

SAMPLE = 32  # slots
# How far the product of a quantised matrix may be from the trained one's, as a share of its norm, for random inputs.
# Normal weights rounded to nearest are at 0.1 in INT4 and 0.04 in FP8; error feedback is a little worse on such inputs.
BOUNDS = {"fp8": 0.1, "int4": 0.3}


@torch.no_grad()
def prove(directory: Path, about: Artifact, draft: Draft, trained: Draft) -> float:
    """Read the directory back. `draft` is what was written, `trained` what it was made from, in fp32 if unquantised.

    Every tensor is as it was, names and shapes are the engine's, every quantised matrix is its trained one within
    `BOUNDS`, and what is not quantised gives the trained draft's outputs, in the written precision, to the bit. Returns
    how far the outputs of the whole draft are from those on a sample, as a share of their norm.
    """
    dtype = getattr(torch, about.dtype)
    back = load_draft(directory, about.target)
    written, wanted = file_tensors(back, dtype), file_tensors(draft, dtype)
    assert written.keys() == wanted.keys(), f"{directory}: {sorted(written.keys() ^ wanted.keys())}"
    for name, tensor in wanted.items():
        same = written[name].dtype == tensor.dtype and torch.equal(as_bits(written[name]), as_bits(tensor))
        assert same, f"{directory}: {name} is not what was written"
    if about.engine != "native":
        check_names(directory, about)
    for name, module in back.named_modules():
        own = trained.get_submodule(name)
        if isinstance(module, QuantisedLinear) and isinstance(own, nn.Linear):
            x = noise(SAMPLE, own.in_features)
            off = distance(module(x), own(x))
            assert off <= BOUNDS[module.scheme], f"{directory}: {name} is {off:.0%} off what was trained"
    off = distance(outputs(back), outputs(rounded(trained, dtype)))
    assert off == 0 or quant_of(trained) != about.quant, f"{directory}: outputs are {off:.1%} off what was trained"
    return off


def check_names(directory: Path, about: Artifact) -> None:
    """The engine's names, each matrix either whole or as its packed parts, and nothing else."""
    shapes = layouts.contract(about.engine, about.draft, about.target)
    names = {name.rpartition(".")[0] for name in read_tensors(directory)}
    assert names == {name.rpartition(".")[0] for name in shapes}, f"{directory}: not the names {about.engine} loads"
    for name, tensor in read_tensors(directory).items():
        assert name not in shapes or tuple(tensor.shape) == shapes[name], f"{directory}: {name} {tuple(tensor.shape)}"


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def rounded(trained: Draft, dtype: torch.dtype) -> Draft:
    """The trained draft with weights of a precision, in fp32."""
    draft = copy.deepcopy(trained)
    for parameter in draft.parameters():
        parameter.copy_(parameter.to(dtype).float())
    return draft


def outputs(draft: Draft) -> torch.Tensor:
    """Hidden states [1, SAMPLE, H] for made-up embeddings and hidden states, always the same."""
    embeddings, hidden = noise(2, SAMPLE, draft.config.hidden_size).unsqueeze(1)
    return draft.eval()(embeddings, hidden, torch.arange(SAMPLE)[None], packed_attention([[SAMPLE]]))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """As a share of what is right."""
    return ((found - right).norm() / right.norm().clamp(min=torch.finfo(right.dtype).tiny)).item()
