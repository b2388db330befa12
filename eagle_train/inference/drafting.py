"""Drafting: the draft's cache is aligned with the target's, then a tree of tokens grows level by level.

Paper sections 3 (stage 3), 3.2 and 3.4; DESIGN sections 3.1, 3.5. Knows nothing of validation or requests.

Shapes: A active rows, N tree nodes, P tokens of a path (depth + 1), H hidden, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from eagle_train.inference.kv_cache import KVCache, Prefix, Suffix
from eagle_train.inference.sampling import propose
from eagle_train.inference.tree import Tree
from eagle_train.models.draft import Draft, Head
from eagle_train.models.target import Target


@dataclass
class Pending:
    """What the last round left for the draft: the tokens it committed, each with the hidden state before it.

    tokens [A, P] int64, hidden [A, P, H], counts [A] int64: how many of a row's P are real. The last real one is the
    pending token, which neither model has in its cache yet; the target has those before it, the draft has not.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    counts: torch.Tensor

    @property
    def last(self) -> torch.Tensor:
        """The pending token [A]."""
        return self.tokens.gather(1, self.counts.unsqueeze(1) - 1).squeeze(1)

    def rows(self, order: torch.Tensor) -> "Pending":
        """The rows `order`, in that order."""
        return Pending(self.tokens[order], self.hidden[order], self.counts[order])

    def narrowed(self, width: int) -> "Pending":
        """Without the padding beyond the first `width` tokens."""
        return Pending(self.tokens[:, :width], self.hidden[:, :width], self.counts)

    def followed_by(self, other: "Pending") -> "Pending":
        """These rows, then the other's."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        tokens = [F.pad(x.tokens, (0, width - x.tokens.shape[1])) for x in (self, other)]
        hidden = [F.pad(x.hidden, (0, 0, 0, width - x.hidden.shape[1])) for x in (self, other)]
        return Pending(torch.cat(tokens), torch.cat(hidden), torch.cat((self.counts, other.counts)))


@dataclass(frozen=True)
class Level:
    """A level of a tree as the drafting needs it: which nodes get children, and where those go."""

    parents: torch.Tensor  # nodes of this level that have children, as indices into the tree
    above: torch.Tensor  # each parent's own parent, as an index into the level before's `parents`
    ancestors: torch.Tensor  # bool [parents, inner nodes so far, root left out]
    children: torch.Tensor  # the next level's nodes
    parent_of: torch.Tensor  # each child's parent, as an index into `parents`
    rank_of: torch.Tensor  # each child's rank among its parent's children
    most: int  # children of one node
    noise: slice  # which of a round's random numbers the multinomial modes use here


@dataclass(frozen=True)
class Plan:
    """A tree with what the drafting precomputes from it."""

    tree: Tree

    @cached_property
    def levels(self) -> list[Level]:
        return levels_of(self.tree)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no two nodes that have children stand side by side."""
        return all(len(level.parents) == 1 for level in self.levels)

    @property
    def num_draws(self) -> int:
        """Random numbers a round uses for each row: one at its end, a coin per node, the multinomial drafts' noise."""
        return 1 + self.tree.num_nodes + (self.levels[-1].noise.stop if self.levels else 0)


def levels_of(tree: Tree) -> list[Level]:
    """The levels that have children, from the root's down."""
    depth, parent = tree.depth.tolist(), list(tree.parents)
    levels, inner, before, drawn = [], [], [], 0
    for d in range(tree.max_depth):
        children = [node for node in range(tree.num_nodes) if depth[node] == d + 1]
        parents = sorted({parent[node] for node in children})
        inner += parents if d > 0 else []
        ranks = tree.child_rank[children].tolist()
        levels.append(
            Level(
                parents=torch.tensor(parents),
                above=torch.tensor([before.index(parent[node]) for node in parents] if d > 0 else []),
                ancestors=tree.ancestors[parents][:, inner] if d > 0 else torch.ones(1, 0, dtype=torch.bool),
                children=torch.tensor(children),
                parent_of=torch.tensor([parents.index(parent[node]) for node in children]),
                rank_of=torch.tensor(ranks),
                most=max(ranks) + 1,
                noise=slice(drawn, drawn + len(parents) * (max(ranks) + 1)),
            )
        )
        before, drawn = parents, levels[-1].noise.stop
    return levels


def align(draft: Draft, target: Target, cache: KVCache, prefix: Prefix, pending: Pending) -> torch.Tensor:
    """Let the draft read what the last round committed, with the target's hidden states (EAGLE's alignment).

    `prefix` is the draft's own. Returns the draft's hidden state at the pending token [A, H].
    """
    steps = torch.arange(pending.tokens.shape[1], device=pending.tokens.device)
    positions = prefix.lengths.unsqueeze(1) + steps
    embeddings = target.embed(pending.tokens)
    hidden = draft(embeddings, pending.hidden, positions, cache.extend(prefix, positions))
    return hidden[torch.arange(len(hidden), device=hidden.device), pending.counts - 1]


def draft_tree(
    draft: Draft,
    target: Target,
    head: Head,
    cache: KVCache,
    prefix: Prefix,
    root_hidden: torch.Tensor,
    root_token: torch.Tensor,
    plan: Plan,
    mode: str,
    temperature: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Grow the tree below the pending token. `prefix` is the draft's after `align`, the root included.

    `mode`, `temperature` [A] and `noise` [A, draws] are `propose`'s; greedy needs neither of the latter two. Returns
    tokens [A, N] and, where children are drawn at random, the distribution q [A, N, V] of each node's children.
    """
    active = len(root_token)
    tokens = root_token.unsqueeze(1).repeat(1, plan.tree.num_nodes)
    hidden = root_hidden.unsqueeze(1)
    suffix = Suffix(draft.config.num_layers)
    q = None
    for depth, level in enumerate(plan.levels):
        if depth > 0:
            inner = tokens[:, level.parents]
            positions = (prefix.lengths + (depth - 1)).unsqueeze(1).expand(active, inner.shape[1])
            if plan.is_chain:  # what a chain leaves in the cache is what `align` writes anew
                attend = cache.extend(prefix.grown(depth - 1), positions)
            else:
                attend = cache.tree(prefix, suffix, positions, level.ancestors)
            hidden = draft(target.embed(inner), hidden[:, level.above], positions, attend)
        draws = None if noise is None else noise[:, level.noise].unflatten(1, (-1, level.most))
        proposed, distribution = propose(head.lm_head(hidden), level.most, mode, temperature, draws)
        tokens[:, level.children] = head.tokens(proposed)[:, level.parent_of, level.rank_of]
        if distribution is not None:
            distribution = head.spread(distribution)
            q = q if q is not None else distribution.new_zeros(active, plan.tree.num_nodes, distribution.shape[-1])
            q[:, level.parents] = distribution
    return tokens, q
