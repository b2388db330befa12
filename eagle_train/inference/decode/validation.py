"""Validation: one forward of the target over a whole tree. Paper sections 3 (stage 4) and 3.1; DESIGN section 3.6.

Knows nothing of drafters, sampling or requests.

Shapes: A active rows, N tree nodes, S the width of the states, V vocabulary.
"""

import torch

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Forward


def validate(
    target: Target, forward: Forward, cache: PagedKV, prefix: Prefix, tree: AnyTree, tokens: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
    """One target call over the tree's tokens, int64 [A, N], with the pending token at the root.

    `forward`: the target's `states`, compiled or not. Returns states [A, N, S]; logits [R, N, V] of the R
    rows that this rank samples; and the nodes' keys and values, which are not in the cache yet. These are None for a
    chain: it is causal like any text, so its nodes are written directly to the slots that follow the prefix.
    """
    if tree.is_chain:
        suffix, positions = None, prefix.positions(tree.num_nodes)
        attend = cache.extend(prefix, positions)
    else:
        suffix, positions = Suffix(), prefix.lengths.unsqueeze(1) + tree.depth
        attend = cache.tree(prefix, suffix, positions, tree.ancestors)
    hidden = forward(tokens, positions, attend)  # [A, N, S]
    return hidden, ranks.logits(target.lm_head, last_states(hidden, target)), suffix


def last_states(states: torch.Tensor, target: Target) -> torch.Tensor:
    """Of the target's states [..., S] what its LM head reads, [..., H]."""
    width = target.embedding.shape[1]
    return states if states.shape[-1] == width else states[..., :width]
