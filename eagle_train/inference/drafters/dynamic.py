"""Trees that grow where the draft is confident (EAGLE-2: Li et al., 2024). DESIGN section 3.5.

In each level the `top_k` nodes of the highest joint probability are expanded, each by its `top_k` most likely tokens.
Of all nodes that were seen, the most probable ones are the row's tree. All on the device, without a wait for it, but
where a grammar is asked what may follow the expanded nodes. Knows nothing of which model drafts.

Shapes: A active rows, K top_k, E expanded nodes so far, M nodes that were seen, N nodes of a tree, H hidden.
"""

from collections.abc import Callable

import torch

from eagle_train.inference.decode.row_trees import DynamicTree, RowTrees
from eagle_train.inference.drafters.drafter import Drafted
from eagle_train.inference.grammar.guided import NodeMasks

_States = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_Best = Callable[[torch.Tensor, int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def grow_dynamic(
    tree: DynamicTree,
    root: tuple[torch.Tensor, torch.Tensor],
    states_at: _States,
    best: _Best,
    masks: NodeMasks | None,
) -> Drafted:
    """Draft below the root: its token int64 [A, 1], and the draft's states there [A, 1, H].

    `states_at`: the draft's states [A, K, H] at tokens [A, K], from the states above each [A, K, H], with the mask of
    these K expanded nodes over all E, bool [A, K, E]. `best`: of states [A, T, H] the most likely tokens int64
    [A, T, K] and their log-probabilities, float32, among those that are allowed, bool [A, T, V]; None: all are.
    `masks`: of the rows' grammars, which know the root and the expanded nodes.
    """
    root_token, hidden = root
    rows, most = len(root_token), tree.top_k
    tokens, logs = best(hidden, most, None if masks is None else masks.allowed([0]))  # [A, 1, K]
    seen_tokens, seen_logs = [tokens.flatten(1)], [logs.flatten(1)]
    seen_parents = [torch.full_like(seen_tokens[0], -1)]  # of each seen node, as a seen node; -1: the root
    places = [torch.full_like(seen_tokens[0], -1)]  # of each seen node among the expanded ones; -1: it is not expanded
    ancestors = torch.zeros(rows, 1, 0, dtype=torch.bool, device=root_token.device)  # [A, of the last expanded, E]
    grown, parents = root_token, torch.zeros_like(root_token)  # [A, 1 + E]: of the root and the expanded nodes
    for depth in range(1, tree.max_depth):
        chosen = seen_logs[-1].topk(most, dim=1).indices  # [A, K] of the last level
        expanded = torch.arange((depth - 1) * most, depth * most, device=chosen.device).expand_as(chosen)
        places[-1] = places[-1].scatter(1, chosen, expanded)
        above = (chosen // most).unsqueeze(2)  # [A, K, 1]: their parents' numbers among those expanded last
        own = torch.eye(most, dtype=torch.bool, device=chosen.device).expand(rows, -1, -1)
        ancestors = torch.cat((ancestors.take_along_dim(above, 1), own), 2)  # [A, K, E]
        own_tokens, allowed = seen_tokens[-1].gather(1, chosen), None
        if masks is not None:
            first = grown.shape[1]
            before = first - most if depth > 1 else 0  # the first of the last level
            grown, parents = torch.cat((grown, own_tokens), 1), torch.cat((parents, before + chosen // most), 1)
            masks.set_nodes(grown, parents)
        hidden = states_at(own_tokens, hidden.take_along_dim(above, 1), ancestors)
        if masks is not None:  # the host waited for the tokens alone
            allowed = masks.allowed(list(range(first, first + most)))
        tokens, logs = best(hidden, most, allowed)  # [A, K, K]
        seen = sum(x.shape[1] for x in seen_tokens[:-1])  # before the last level
        seen_parents.append((seen + chosen).repeat_interleave(most, 1))
        seen_logs.append((seen_logs[-1].gather(1, chosen).unsqueeze(2) + logs).flatten(1))
        seen_tokens.append(tokens.flatten(1))
        places.append(torch.full_like(seen_tokens[-1], -1))
    return _most_probable(tree, root_token, *(torch.cat(x, 1) for x in (seen_tokens, seen_logs, seen_parents, places)))


def _most_probable(
    tree: DynamicTree,
    root_token: torch.Tensor,
    tokens: torch.Tensor,
    logs: torch.Tensor,
    parents: torch.Tensor,
    places: torch.Tensor,
) -> Drafted:
    """The tree of the most probable of M seen nodes. A node is never above its parent, which is seen before it; the
    stable sort takes the first among equals, so that no node is taken without its parent."""
    kept = logs.argsort(dim=1, descending=True, stable=True)[:, : tree.num_nodes - 1].sort(1).values  # [A, N - 1]
    rows, nodes = len(kept), tree.num_nodes
    numbers = torch.arange(1, nodes, device=kept.device).expand_as(kept)
    number = torch.zeros_like(tokens).scatter(1, kept, numbers)  # [A, M]: of seen nodes, as nodes of the tree
    above = parents.gather(1, kept)
    above = torch.where(above < 0, 0, number.gather(1, above.clamp(min=0)))
    root, real = torch.zeros_like(root_token), torch.ones(rows, nodes, dtype=torch.bool, device=kept.device)
    trees = RowTrees(torch.cat((root, above), 1), real, tree.max_depth)
    drafted = torch.cat((root_token, tokens.gather(1, kept)), 1)
    return Drafted(drafted, trees=trees, places=torch.cat((root - 1, places.gather(1, kept)), 1))
