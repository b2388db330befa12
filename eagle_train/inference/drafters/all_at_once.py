"""Drafts all levels of a tree at once, by heads that each propose a token further ahead (Medusa). DESIGN section 3.5.

Nothing that is proposed for a level depends on what was for another: a node at depth d has the most likely tokens of
level d's state below it, the same below every parent. Knows nothing of validation or requests.

Shapes: A active rows, Q nodes of a level that have children, L levels that the draft can propose, H hidden.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eagle_train.drafts import Draft
from eagle_train.errors import check
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Level, Outcome, Pending, TreePlan
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.drafters.growing import Nodes
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Compiled, Forward
from eagle_train.ops.rule import Attend


class _Levels(Nodes):
    """The states [A, L, H] of all levels, handed out one after the other; nobody attends."""

    def __init__(self, states: torch.Tensor):
        self.suffix = None
        self._states, self.depth = states, 0

    def next_states(self, count: int) -> torch.Tensor:
        """[A, Q, H] of the next level, the same at each of `count` nodes."""
        self.depth += 1
        return self._states[:, self.depth].unsqueeze(1).expand(-1, count, -1)

    def dynamic(self) -> "Nodes":
        return self


class ByLevels(Eagle):
    """Proposes with a draft that has a state for each level of a tree before any token of it is chosen. A subclass
    defines `levels`. Of `Eagle` it has the LM head, whole, divided or in few bits.

    Raises UserError for another `alignment` than accepted.
    """

    reason = "keeps nothing that it drafted"  # why there is no other alignment

    def __init__(self, draft: Draft, target: Target, alignment: str = "accepted"):
        right = f"draft={draft.config.kind} {self.reason}; must be accepted"
        check(alignment == "accepted", f"draft.alignment={alignment}: {right}")
        super().__init__(draft, target)
        self.needs = replace(self.needs, levels=draft.config.levels)

    def levels(self, round: DraftRound) -> torch.Tensor:
        """The draft's states [A, L, W] for the plan's levels or more, in a round with a tree that has some."""
        raise NotImplementedError

    def propose(self, round: DraftRound) -> Drafted:
        plan, pending, choice = round.plan, round.pending, round.choice
        if plan.tree.num_nodes == 1:
            return self.follow(round)
        states = self.levels(round)
        if isinstance(plan.tree, Tree) and choice.mode == "greedy" and choice.guidance is None:
            return self._by_rank(plan.tree, pending.last, states)
        self.head = self.heads[0]
        return self.grow(plan, states[:, :1], pending.last, _Levels(states), choice)

    def follow(self, round: DraftRound) -> Drafted:
        """A round without drafts."""
        return Drafted(round.pending.last)

    def _by_rank(self, tree: Tree, root_token: torch.Tensor, states: torch.Tensor) -> Drafted:
        """A static tree of the most likely tokens, by one product with each LM head."""
        most, count = max(tree.fanout), len(self.heads)
        read = self.readable(states[:, : tree.max_depth]).split(tree.max_depth if count == 1 else 1, dim=1)
        columns = [head.lm_head.most_likely(each, most) for head, each in zip(self.heads, read, strict=False)]
        best = self.head.tokens(torch.cat(columns, 1))  # [A, D, most]
        places = (tree.depth[1:] - 1) * most + tree.child_rank[1:]
        return Drafted(torch.cat((root_token, best.flatten(1).index_select(1, places)), 1))

    def level_states(self, tokens: torch.Tensor, above: torch.Tensor, level: Level, nodes: Nodes) -> torch.Tensor:
        assert isinstance(nodes, _Levels)
        states = nodes.next_states(tokens.shape[1])
        self.head = self.heads[min(nodes.depth, len(self.heads) - 1)]
        return states


class AllAtOnce(ByLevels):
    """Proposes with a draft whose kind drafts all levels from the target's hidden state behind the pending token. It
    has no cache."""

    reason = "processes no token again"

    def __init__(self, draft: Draft, target: Target, alignment: str = "accepted"):
        super().__init__(draft, target, alignment)
        self.compiled_levels: Forward | None = None  # `level_by_level`

    def use_cache(self, num_kv_heads: int) -> None:
        """It needs none."""

    def level_by_level(self, hidden: torch.Tensor, attend: Attend | None) -> torch.Tensor:
        """The draft's states [A, L, H], from the target's behind the pending token [A, 1, H]."""
        return self.draft(None, hidden).view(len(hidden), -1, hidden.shape[-1])

    def compile(self, sizes: Iterable[tuple[int, TreePlan]]) -> list[Callable[[], None]]:
        run = self.compiled_levels = Compiled(self.level_by_level, self.target.device)
        width, some = self.draft.config.hidden_size, self.target.embedding
        return [partial(run.prepare, some.new_zeros(rows, 1, width)) for rows in sorted({rows for rows, _ in sizes})]

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
    ) -> None:
        """Nothing is kept of prompts."""

    def levels(self, round: DraftRound) -> torch.Tensor:
        hidden = round.pending.hidden.take_along_dim(round.pending.end.unsqueeze(2), dim=1)
        return self.run_levels(hidden, None)

    def run_levels(self, *given: Any) -> torch.Tensor:
        """`level_by_level`, compiled where it was."""
        return (self.compiled_levels or self.level_by_level)(*given)

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        return Drafter.rewind(self, round, drafted, outcome)
