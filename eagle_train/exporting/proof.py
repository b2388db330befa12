"""That what was written is what was trained, proved before it is given its name: tensors, the engine's names, outputs.

A failure here is ours, not the user's. Knows nothing of how things are written.
"""

from pathlib import Path

import torch

from eagle_train.models import layouts
from eagle_train.models.artifact import Artifact, load_draft, read_tensors
from eagle_train.models.compressed import file_tensors
from eagle_train.models.draft import Draft
from eagle_train.ops.attention import packed_attention

SAMPLE = 32  # slots
# How far the outputs of a quantised draft may be from the trained one's, as a share of their norm. On drafts of 256 and
# 4,096 wide, trained and fresh, INT4 was at most a third of this and FP8 a fifth.
BOUNDS = {"none": 0.0, "fp8": 0.15, "int4": 0.5}


def prove(directory: Path, about: Artifact, draft: Draft, trained: Draft) -> None:
    """Read the directory back. `draft` is what was written, `trained` what it was made from, in fp32, unquantised.

    Every tensor is as it was, names and shapes are the engine's, and on a sample the outputs are the trained draft's in
    the written precision: to the bit, or within `BOUNDS` where it is quantised.
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
    rounded = load_rounded(trained, dtype)
    found, right = sample(back), sample(rounded)
    error = ((found - right).norm() / right.norm()).item()
    bound = BOUNDS[about.quant.scheme]
    assert error <= bound, f"{directory}: outputs are {error:.1%} off, at most {bound:.0%} is to be expected"


def check_names(directory: Path, about: Artifact) -> None:
    """The engine's names, each matrix either whole or as its packed parts, and nothing else."""
    shapes = layouts.contract(about.engine, about.draft, about.target)
    names = {name.rpartition(".")[0] for name in read_tensors(directory)}
    assert names == {name.rpartition(".")[0] for name in shapes}, f"{directory}: not the names {about.engine} loads"
    for name, tensor in read_tensors(directory).items():
        assert name not in shapes or tuple(tensor.shape) == shapes[name], f"{directory}: {name} {tuple(tensor.shape)}"


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def load_rounded(trained: Draft, dtype: torch.dtype) -> Draft:
    """The trained draft with weights of a precision, in fp32."""
    draft = Draft(trained.config)
    draft.load_state_dict({name: tensor.to(dtype).float() for name, tensor in trained.state_dict().items()})
    return draft


@torch.no_grad()
def sample(draft: Draft) -> torch.Tensor:
    """Its outputs for made-up embeddings and hidden states, always the same."""
    generator = torch.Generator().manual_seed(0)
    width = draft.config.hidden_size
    embeddings, hidden = (torch.randn(1, SAMPLE, width, generator=generator) for _ in range(2))
    positions = torch.arange(SAMPLE)[None]
    return draft.eval()(embeddings, hidden, positions, packed_attention([[SAMPLE]]))
