"""Cumulative sums that torch.compile leaves whole. Knows nothing of what is summed."""

import torch

# On a GPU the code that torch 2.11's compiler writes for a long cumulative sum cannot hold the reductions that it
# would put beside it (an argmax over the same row, say), and compiling fails. It does not look into an operator.
torch.library.define("eagle_train::cumulative_sum", "(Tensor x, ScalarType dtype) -> Tensor")


@torch.library.impl("eagle_train::cumulative_sum", "CompositeExplicitAutograd")
def _cumulative_sum(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.cumsum(-1, dtype=dtype)


@torch.library.register_fake("eagle_train::cumulative_sum")
def _cumulative_sum_shape(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def cumulative_sum(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., V] summed up to and with each place of its last dimension, in `dtype`; no gradient."""
    if torch.compiler.is_compiling():
        return torch.ops.eagle_train.cumulative_sum(x, dtype)
    return x.cumsum(-1, dtype=dtype)
