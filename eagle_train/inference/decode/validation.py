"""Validation: one forward of the target over a whole tree. Paper sections 3 (stage 4) and 3.1; DESIGN section 3.6.

Knows nothing of sampling or requests, and of drafters only what they may have computed of the target's forward.

Shapes: A active rows, N tree nodes, S the width of the states, V vocabulary.
"""

import torch

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import Computed, TreePlan
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


def validate_rest(
    target: Target,
    computed: Computed,
    cache: PagedKV,
    prefix: Prefix,
    plan: TreePlan,
    tokens: torch.Tensor,
    ranks: Ranks,
) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
    """As `validate` of the plan's tree, where drafting has computed a part of the forward. Leaves run through the first
    layers alone, and then all nodes through the others."""
    tree, order = plan.tree, torch.cat((plan.inner, plan.leaves))
    assert isinstance(tree, Tree)
    stages, first = computed.stages, range(computed.layers)
    rest = range(computed.layers, target.config.num_hidden_layers)
    suffix = None if tree.is_chain else Suffix()
    positions = prefix.positions(tree.num_nodes) if suffix is None else prefix.lengths.unsqueeze(1) + tree.depth
    at_leaves = positions.index_select(1, plan.leaves)
    if suffix is None:
        over_leaves, over_all = (
            cache.extend(prefix.advanced(tree.max_depth), at_leaves),
            cache.extend(prefix, positions),
        )
    else:
        assert computed.suffix is not None
        over_leaves = cache.tree(prefix, computed.suffix, at_leaves, tree.ancestors[plan.leaves][:, order])
        over_all = cache.tree(prefix, suffix, positions, tree.ancestors)
    leaves = tokens.index_select(1, plan.leaves)
    _, new = stages.part(lambda: target.hidden_states(leaves, at_leaves, over_leaves), first, keep=computed.layers - 1)
    assert new is not None
    states = torch.cat((computed.states, new), 1).index_select(1, plan.by_node)
    hidden, _ = stages.part(lambda: target.hidden_states(tokens, positions, over_all), rest, entry=states)
    if suffix is not None and computed.suffix is not None:
        for layer in first:
            k, v = (x.index_select(2, plan.by_node) for x in computed.suffix.layers[layer])
            suffix.layers[layer] = k, v
    return hidden, ranks.logits(target.lm_head, hidden), suffix


def last_states(states: torch.Tensor, target: Target) -> torch.Tensor:
    """Of the target's states [..., S] what its LM head reads, [..., H]."""
    width = target.embedding.shape[1]
    return states if states.shape[-1] == width else states[..., :width]
