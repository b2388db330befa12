"""Trees that are drafted level by level, by a model that reads a token after the other: all but its forward is here.

Paper sections 2 and 3.2; DESIGN section 3.5. Knows nothing of validation or requests.

Shapes: A active rows, N tree nodes, Q nodes of a level that have children, H the width of the model's states, V the
target's vocabulary, V' the tokens that are proposed.
"""

from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.decode.sampling import propose, restrict
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import (
    Choice,
    Drafted,
    Drafter,
    DraftRound,
    Level,
    Outcome,
    Pending,
    TreePlan,
    pick,
)
from eagle_train.inference.drafters.dynamic import grow_dynamic
from eagle_train.inference.grammar.guided import NodeMasks
from eagle_train.models.head import LMHead
from eagle_train.ops.rule import Attend


class ProposingHead(Protocol):
    """An LM head, and which of the target's tokens its columns are."""

    lm_head: Any
    """Logits [..., V'] of states [..., H]; `most_likely(states, count)` gives columns int64 [..., count]."""

    def tokens(self, indices: torch.Tensor) -> torch.Tensor:
        """The target's ids of columns."""

    def columns(self, values: torch.Tensor) -> torch.Tensor:
        """Those of the target's columns [..., V] that `lm_head` has, [..., V']."""

    def spread(self, distribution: torch.Tensor) -> torch.Tensor:
        """A distribution [..., V'] as one over the target's tokens, [..., V]."""


class FirstTokens:
    """An LM head's columns for the first V' tokens, which have the target's ids. A `ProposingHead`."""

    def __init__(self, lm_head: LMHead, count: int, size: int):
        """`count`: V'; `size`: V."""
        self.count, self.size = count, size
        bias = None if lm_head.bias is None else lm_head.bias[:count]
        self.lm_head: Any = lm_head
        if count < len(lm_head.weight):
            self.lm_head = replace(lm_head, weight=lm_head.weight[:count], bias=bias)

    def tokens(self, indices: torch.Tensor) -> torch.Tensor:
        return indices

    def columns(self, values: torch.Tensor) -> torch.Tensor:
        return values[..., : self.count]

    def spread(self, distribution: torch.Tensor) -> torch.Tensor:
        return F.pad(distribution, (0, self.size - self.count))


class Nodes:
    """A round's drafted nodes: where each level attends, and where its keys and values go.

    The root, the pending token, is in the cache; each level attends to it and to its own ancestors. `suffix`: keys and
    values of nodes that have children; None for a chain, whose nodes have no siblings and are written to the cache at
    once. `ancestors` bool [A, K, E], of a dynamic tree alone: of the level that comes next, see dynamic.py.
    """

    ancestors: torch.Tensor

    def __init__(self, cache: PagedKV, plan: TreePlan, prefix: Prefix):
        """`prefix`: the tokens before the root."""
        self.suffix = None if plan.is_chain else Suffix()
        self.prefix, self._behind_root = prefix, prefix.advanced(1)
        self._cache, self._depth = cache, 0

    def next_level(self, active: int, level: Level) -> tuple[torch.Tensor, Attend]:
        """The positions int64 [A, Q] of a level's nodes that have children, level by level, and how they attend."""
        before = self._behind_root.advanced(self._depth)
        self._depth += 1
        positions = before.positions(1).expand(active, len(level.parents))
        if self.suffix is None:
            return positions, self._cache.extend(before, positions)
        return positions, self._cache.tree(self._behind_root, self.suffix, positions, level.ancestors)

    def dynamic(self) -> "Nodes":
        """The same for a dynamic tree."""
        return _DynamicNodes(self._cache, self._behind_root)


class _DynamicNodes(Nodes):
    """Nodes of trees that differ by row."""

    def __init__(self, cache: PagedKV, behind_root: Prefix):
        self.suffix = Suffix()
        self._cache, self._behind_root, self._depth = cache, behind_root, 0

    def next_level(self, active: int, level: Level) -> tuple[torch.Tensor, Attend]:
        assert self.suffix is not None
        positions = self._behind_root.advanced(self._depth).positions(1).expand(active, self.ancestors.shape[1])
        self._depth += 1
        return positions, self._cache.tree(self._behind_root, self.suffix, positions, self.ancestors)


N = TypeVar("N", bound=Nodes)


class Growing(Drafter, Generic[N]):
    """Drafts the plan's tree from the states at the pending token. A subclass has the model: its `head`, and
    `level_states`, which says what the model computes."""

    head: ProposingHead

    def readable(self, states: torch.Tensor) -> torch.Tensor:
        """What `head` reads of the model's states [A, T, H]."""
        return states

    def level_states(self, tokens: torch.Tensor, above: torch.Tensor, level: Level, nodes: N) -> torch.Tensor:
        """The model's states [A, Q, H] at a level's nodes that have children: tokens int64 [A, Q]; `above` [A, Q', H]:
        the states of the level before, of which `level.above` are the nodes' parents'. It asks `nodes` once."""
        raise NotImplementedError

    def grow(
        self, plan: TreePlan, root_states: torch.Tensor, root_token: torch.Tensor, nodes: N, choice: Choice
    ) -> Drafted:
        """Draft the tree below the root token int64 [A, 1]; `root_states` [A, 1, H]: the model's states there. Returns
        what `propose` does."""
        if isinstance(plan.tree, DynamicTree):
            return self._grow_dynamic(plan.tree, root_states, root_token, nodes.dynamic(), choice.guidance)
        tokens, states, q = [root_token], root_states, None  # tokens [A, nodes] of each level
        for depth, level in enumerate(plan.levels):
            if depth > 0:
                if choice.guidance is not None:
                    choice.guidance.set_tokens(torch.cat(tokens, 1))
                states = self.level_states(pick(tokens[-1], level.inner), states, level, nodes)
            proposed, distribution = self.children(states, level, choice)
            tokens.append(pick(proposed.flatten(1), level.proposal))
            if distribution is not None:
                shape = (len(root_token), plan.tree.num_nodes, distribution.shape[-1])
                q = q if q is not None else distribution.new_zeros(shape)
                q[:, level.parents] = distribution
        return Drafted(torch.cat(tokens, 1), q, nodes.suffix)

    def _grow_dynamic(
        self,
        tree: DynamicTree,
        root_states: torch.Tensor,
        root_token: torch.Tensor,
        nodes: Nodes,
        masks: NodeMasks | None,
    ) -> Drafted:
        """As `grow`, of a tree that grows where the draft is confident."""
        places = torch.arange(tree.top_k, device=root_token.device)
        level = Level([], places, None, None, places, None, tree.top_k, slice(0, 0))

        def states_at(tokens: torch.Tensor, above: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
            nodes.ancestors = ancestors
            return self.level_states(tokens, above, level, cast(N, nodes))

        drafted = grow_dynamic(tree, (root_token, root_states), states_at, self.best, masks)
        return drafted._replace(suffix=nodes.suffix if tree.max_depth > 1 else None)

    def best(self, states: torch.Tensor, count: int, allowed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` most likely tokens after states [A, T, H], int64 [A, T, count], and their log-probabilities, of
        those that are `allowed`, bool [A, T, V]; None: of all. What is not allowed has -inf, also where the draft knows
        nothing else."""
        logits = self.head.lm_head(self.readable(states))
        if allowed is None:
            found = logits.float().log_softmax(-1).topk(count)
            return self.head.tokens(found.indices), found.values
        own = self.head.columns(allowed)
        found = restrict(logits, own).float().log_softmax(-1).topk(count)
        return self.head.tokens(found.indices), found.values.masked_fill(~own.any(-1, keepdim=True), -torch.inf)

    def children(self, states: torch.Tensor, level: Level, choice: Choice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`level.most` proposed tokens for each parent of the level, [A, Q, most], and q [A, Q, V] or None."""
        states = self.readable(states)
        noise = None if choice.noise is None else choice.noise[:, level.noise].unflatten(1, (-1, level.most))
        if choice.mode == "greedy" and choice.guidance is None:
            return self.head.tokens(self.head.lm_head.most_likely(states, level.most)), None
        logits = self.head.lm_head(states)
        if choice.guidance is not None:
            logits = restrict(logits, self.head.columns(choice.guidance.allowed(level.numbers)))
        proposed, q = propose(logits, level.most, choice.mode, choice.temperature, noise)
        return self.head.tokens(proposed), None if q is None else self.head.spread(q)


def keep_drafted(cache: PagedKV, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
    """`Drafter.rewind` of a model whose keys and values of accepted nodes stay in its cache: returns what it has not
    read, the target's last token and, where the node before it was a leaf, that one too."""
    plan, node, pending = round.plan, outcome.node, outcome.pending
    if drafted.suffix is not None:  # a leaf has no keys and values; its slot is written in the next round
        path = outcome.path[:, 1:]
        places = plan.place[path] if drafted.places is None else drafted.places.gather(1, path).clamp(min=0)
        cache.commit(drafted.suffix, round.prefix.advanced(1), places)
    if drafted.places is not None:
        is_leaf = drafted.places.gather(1, node.unsqueeze(1))[:, 0] < 0
    else:
        assert isinstance(plan.tree, Tree)
        is_leaf = plan.tree.children[node, 0] < 0
    return pending.newest(1 + (is_leaf & (node > 0)).long(), min(2, pending.tokens.shape[1]))
