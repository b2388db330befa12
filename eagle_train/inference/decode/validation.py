"""Validation: the target reads a whole tree in one call. Paper sections 3 (stage 4) and 3.1; DESIGN section 3.6."""

import torch

from eagle_train.inference.cache.paged_kv import PagedKV, Prefix, Suffix
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Forward


def validate(
    target: Target, read: Forward, cache: PagedKV, prefix: Prefix, tree: Tree, tokens: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
    """One target call over the tree's tokens [A, N], the pending token at its root.

    `read` is the target's `hidden_states`, compiled or not. Returns hidden states [A, N, H], logits [A, N, V] of the
    rank's own rows, and the nodes' keys and values, which are not in the cache yet; None for a chain: it is causal as
    any text, so its nodes are written at once where they would be committed.
    """
    if tree.is_chain:
        suffix, positions = None, prefix.positions(tree.num_nodes)
        attend = cache.extend(prefix, positions)
    else:
        suffix, positions = Suffix(), prefix.lengths.unsqueeze(1) + tree.depth
        attend = cache.tree(prefix, suffix, positions, tree.ancestors)
    hidden = read(tokens, positions, attend)
    return hidden, target.lm_head(ranks.own(hidden)), suffix
