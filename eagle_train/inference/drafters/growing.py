"""Trees that are drafted level by level, by a model that reads a token after the other: all but its forward is here.

Paper sections 2 and 3.2; DESIGN section 3.5. Knows nothing of validation or requests.

Shapes: A active rows, N tree nodes, Q nodes of a level that have children, H the width of the model's states, V the
target's vocabulary, V' the tokens that are proposed.
"""

from typing import Any, Protocol

import torch

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
from eagle_train.ops.rule import Attend

Places = torch.Tensor | None
"""Indices int64 [Q] into what has a place for each; None: all in their order."""


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


class Growing(Drafter):
    """Drafts the plan's tree from the states at the pending token. A subclass has the model: its `cache`, its `head`
    and `level_states`."""

    cache: PagedKV
    head: ProposingHead

    def level_states(
        self, tokens: torch.Tensor, above: torch.Tensor, places: Places, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The model's states [A, Q, H] at a level's nodes that have children: tokens and positions int64 [A, Q];
        `above` [A, Q', H]: the states of the level before, of which those at `places` are the nodes' parents'."""
        raise NotImplementedError

    def grow(
        self, plan: TreePlan, root_states: torch.Tensor, root_token: torch.Tensor, prefix: Prefix, choice: Choice
    ) -> Drafted:
        """Draft the tree below the root token int64 [A, 1] after `prefix`; `root_states` [A, 1, H]: the model's states
        there. Returns what `propose` does."""
        if isinstance(plan.tree, DynamicTree):
            return grow_dynamic(plan.tree, (root_token, root_states), prefix, self.cache, self.level_states, self.best)
        active, suffix = len(root_token), None if plan.is_chain else Suffix()
        tokens, states, q = [root_token], root_states, None  # tokens [A, nodes] of each level
        behind_root = prefix.advanced(1)
        for depth, level in enumerate(plan.levels):
            if depth > 0:
                if choice.guidance is not None:
                    choice.guidance.set_tokens(torch.cat(tokens, 1))
                inner, before = pick(tokens[-1], level.inner), behind_root.advanced(depth - 1)
                positions = before.positions(1).expand(active, inner.shape[1])
                if suffix is None:  # a chain has no siblings, so its nodes may be written to the cache at once
                    attend = self.cache.extend(before, positions)
                else:
                    attend = self.cache.tree(behind_root, suffix, positions, level.ancestors)
                states = self.level_states(inner, states, level.above, positions, attend)
            proposed, distribution = self.children(states, level, choice)
            tokens.append(pick(proposed.flatten(1), level.proposal))
            if distribution is not None:
                q = q if q is not None else distribution.new_zeros(active, plan.tree.num_nodes, distribution.shape[-1])
                q[:, level.parents] = distribution
        return Drafted(torch.cat(tokens, 1), q, suffix)

    def best(self, states: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` most likely tokens after states [A, T, H], int64 [A, T, count], and their log-probabilities."""
        found = self.head.lm_head(states).float().log_softmax(-1).topk(count)
        return self.head.tokens(found.indices), found.values

    def children(self, states: torch.Tensor, level: Level, choice: Choice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`level.most` proposed tokens for each parent of the level, [A, Q, most], and q [A, Q, V] or None."""
        noise = None if choice.noise is None else choice.noise[:, level.noise].unflatten(1, (-1, level.most))
        if choice.mode == "greedy" and choice.guidance is None:
            return self.head.tokens(self.head.lm_head.most_likely(states, level.most)), None
        logits = self.head.lm_head(states)
        if choice.guidance is not None:
            logits = restrict(logits, self.head.columns(choice.guidance.allowed(level.parents.tolist())))
        proposed, q = propose(logits, level.most, choice.mode, choice.temperature, noise)
        return self.head.tokens(proposed), None if q is None else self.head.spread(q)

    def keep_drafted(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        """`rewind` of a model whose own keys and values of accepted nodes stay: returns what it has not read, the
        target's last token and, where the node before it was a leaf, that one too."""
        plan, node, pending = round.plan, outcome.node, outcome.pending
        if drafted.suffix is not None:  # a leaf has no keys and values; its slot is written in the next round
            path = outcome.path[:, 1:]
            places = plan.place[path] if drafted.places is None else drafted.places.gather(1, path).clamp(min=0)
            self.cache.commit(drafted.suffix, round.prefix.advanced(1), places)
        if drafted.places is not None:
            is_leaf = drafted.places.gather(1, node.unsqueeze(1))[:, 0] < 0
        else:
            assert isinstance(plan.tree, Tree)
            is_leaf = plan.tree.children[node, 0] < 0
        return pending.newest(1 + (is_leaf & (node > 0)).long(), min(2, pending.tokens.shape[1]))
