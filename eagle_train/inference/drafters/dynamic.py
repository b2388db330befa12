"""Trees that grow where the draft is confident (EAGLE-2: Li et al., 2024). DESIGN section 3.5.

In each level the `top_k` nodes of the highest joint probability are expanded, each by its `top_k` most likely tokens.
Of all nodes that were seen, the most probable ones are the row's tree. All on the device, without a wait for it. Knows
nothing of which model drafts.

Shapes: A active rows, K top_k, E expanded nodes so far, M nodes that were seen, N nodes of a tree, H hidden.
"""

from collections.abc import Callable

import torch

from eagle_train.inference.decode.row_trees import DynamicTree, RowTrees
from eagle_train.inference.drafters.drafter import Drafted

_States = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_Best = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def grow_dynamic(
    tree: DynamicTree, root: tuple[torch.Tensor, torch.Tensor], states_at: _States, best: _Best
) -> Drafted:
    """Draft below the root: its token int64 [A, 1], and the draft's states there [A, 1, H].

    `states_at`: the draft's states [A, K, H] at tokens [A, K], from the states above each [A, K, H], with the mask of
    these K expanded nodes over all E, bool [A, K, E]. `best`: of states [A, T, H] the most likely tokens int64
    [A, T, K] and their log-probabilities, float32.
    """
    root_token, hidden = root
    rows, most = len(root_token), tree.top_k
    tokens, logs = best(hidden, most)  # [A, 1, K]
    seen_tokens, seen_logs = [tokens.flatten(1)], [logs.flatten(1)]
    seen_parents = [torch.full_like(seen_tokens[0], -1)]  # of each seen node, as a seen node; -1: the root
    places = [torch.full_like(seen_tokens[0], -1)]  # of each seen node among the expanded ones; -1: it is not expanded
    ancestors = torch.zeros(rows, 1, 0, dtype=torch.bool, device=root_token.device)  # [A, of the last expanded, E]
    for depth in range(1, tree.max_depth):
        chosen = seen_logs[-1].topk(most, dim=1).indices  # [A, K] of the last level
        expanded = torch.arange((depth - 1) * most, depth * most, device=chosen.device).expand_as(chosen)
        places[-1] = places[-1].scatter(1, chosen, expanded)
        above = (chosen // most).unsqueeze(2)  # [A, K, 1]: their parents' numbers among those expanded last
        own = torch.eye(most, dtype=torch.bool, device=chosen.device).expand(rows, -1, -1)
        ancestors = torch.cat((ancestors.take_along_dim(above, 1), own), 2)  # [A, K, E]
        hidden = states_at(seen_tokens[-1].gather(1, chosen), hidden.take_along_dim(above, 1), ancestors)
        tokens, logs = best(hidden, most)  # [A, K, K]
        first = sum(x.shape[1] for x in seen_tokens[:-1])  # of the last level among the seen nodes
        seen_parents.append((first + chosen).repeat_interleave(most, 1))
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
