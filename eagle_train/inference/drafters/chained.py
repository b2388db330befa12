"""Drafts with modules in a chain, of which each makes another level of a tree (MTP). DESIGN section 3.5.

Module d makes level d. It reads the pending tokens with the states that the module before it gave at the tokens before,
so that it has true keys and values of its own at all of them, and in the same forward all nodes above its level that
have children. What it gave at nodes is used in no other round. Levels beyond the last module are drafted by that one,
whose nodes then follow one another. Knows nothing of validation or requests.

Shapes: A active rows, P pending tokens of a row at most, Q nodes of a level that have children, E those of all levels
so far, T = P + E, T' the same of the module before, D modules, H hidden, W the draft's states.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from eagle_train.drafts import Draft
from eagle_train.errors import check
from eagle_train.inference.cache.block_ends import LastStates
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.drafters.drafter import MAX_PENDING, Drafted, DraftRound, Level, TreePlan, pick
from eagle_train.inference.drafters.eagle import Eagle, paired
from eagle_train.inference.drafters.growing import Nodes
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Compiled, Forward
from eagle_train.ops.rule import Attend, Rule
from eagle_train.ops.transfer import to_device


class _Read(Nodes):
    """The tokens that a round's next module reads: the pending ones, then all nodes with children above its level.

    tokens, positions int64 [A, T]; fed [A, T, H]. `kept`: what each module gave at the pending tokens, [A, P, H]. A
    chain's nodes are written to the cache, where the next round writes over them; a tree's keys and values are in a
    suffix of each module.
    """

    suffix = None  # nothing of a node is kept

    def __init__(self, cache: PagedKV, round: DraftRound, before: Sequence[torch.Tensor]):
        """`before`: what each module but the last gave at the token before the pending ones, [A, 1, H]."""
        pending = round.pending
        self._cache, self._draft_prefix, self._behind_root = cache, round.draft_prefix, round.prefix.advanced(1)
        self._is_chain, self._is_dynamic, self._depth = round.plan.is_chain, False, 0
        self._end, self.count = pending.end.unsqueeze(2), pending.tokens.shape[1]
        self.tokens, self.positions = pending.tokens, round.draft_prefix.positions(self.count)
        self.fed, self._before, self.kept = pending.hidden, before, list[torch.Tensor]()
        self._given = pending.hidden  # [A, T', H], by the last module
        none = pending.tokens.new_zeros(1, 0)
        self._parents = none  # int64 [A or 1, E]: 0 for the root, else the parent's number among the nodes, from 1 on
        self._seen = none.new_zeros(0, 0, dtype=torch.bool)  # [E, E] or [A, E, E]: the nodes' ancestors, themselves too

    def dynamic(self) -> "_Read":
        self._is_dynamic = True
        return self

    def add(self, tokens: torch.Tensor, level: Level) -> None:
        """Have the nodes of a further level read, tokens int64 [A, Q]."""
        ancestors = self._next(level)
        new, known = tokens.shape[1], self._parents.shape[1]
        numbers = torch.arange(1, known + 1, device=tokens.device)
        # A node's parent is the last of its ancestors: levels follow one another.
        parents = (ancestors[..., :known] * numbers).amax(-1) if known else tokens.new_zeros(1, new)
        parents = parents if parents.ndim == 2 else parents.unsqueeze(0)
        rows = max(len(parents), len(self._parents))
        self._parents = torch.cat((self._parents.expand(rows, -1), parents.expand(rows, -1)), 1)
        above = torch.cat((self.root(self._given), self._given[:, self.count :]), 1)
        fed = above.take_along_dim(self._parents.unsqueeze(2), dim=1)
        self.fed = torch.cat((self.fed, fed), 1)
        before = F.pad(self._seen, (0, new))
        before = before.expand(len(ancestors), -1, -1) if ancestors.ndim == 3 else before
        self._seen = torch.cat((before, ancestors), -2)
        self.tokens = torch.cat((self.tokens, tokens), 1)
        own = self._behind_root.advanced(self._depth - 1).positions(1)
        self.positions = torch.cat((self.positions, own.expand(-1, new)), 1)

    def only_pending(self) -> None:
        """Have no node read."""
        self.tokens, self.positions = self.tokens[:, : self.count], self.positions[:, : self.count]
        self._parents = self._parents[:, :0]

    def root(self, states: torch.Tensor) -> torch.Tensor:
        """Of what a module has at all tokens [A, T, ..] that at the pending one [A, 1, ..]."""
        return states.take_along_dim(self._end, dim=1)

    def was_read(self, given: torch.Tensor) -> None:
        """A module has read: `given` [A, T, H] is what it gives to the next one."""
        self._given = given
        self.kept.append(given[:, : self.count])
        if len(self.kept) <= len(self._before):
            self.fed = torch.cat((self._before[len(self.kept) - 1], self.kept[-1][:, :-1]), 1)

    def attend(self) -> Attend:
        """How the tokens attend: the pending ones as in a prefill, and the nodes to these and to their ancestors."""
        count = self.count
        committed = self._cache.extend(self._draft_prefix, self.positions[:, :count])
        if self._parents.shape[1] == 0:
            return committed
        of_nodes = self._attend_to(self.positions[:, count:], self._seen, Suffix(), self._behind_root)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            # In this order: a chain's nodes lie where padding behind the pending tokens does.
            first = committed(layer, q[:, :, :count], k[:, :, :count], v[:, :, :count], rule)
            return torch.cat((first, of_nodes(layer, q[:, :, count:], k[:, :, count:], v[:, :, count:], rule)), 2)

        return attend

    def next_level(self, active: int, level: Level) -> tuple[torch.Tensor, Attend]:
        """As of `Nodes`, of the last module, which has read the levels before."""
        ancestors, last = self._next(level), self._behind_root.advanced(self._depth - 1)
        positions = last.positions(1).expand(active, ancestors.shape[-2])
        return positions, self._attend_to(positions, ancestors, self._of_last, last)

    def _next(self, level: Level) -> torch.Tensor:
        """The ancestors of a further level's nodes, bool [Q, E] or [A, Q, E]."""
        self._depth += 1
        return self.ancestors if self._is_dynamic else level.ancestors

    def _attend_to(self, positions: torch.Tensor, ancestors: torch.Tensor, suffix: Suffix, before: Prefix) -> Attend:
        """How nodes attend: of a chain behind `before`, else with those in `suffix`."""
        self._of_last = suffix
        if self._is_chain:
            return self._cache.extend(before, positions)
        return self._cache.tree(self._behind_root, suffix, positions, ancestors)


class Chained(Eagle):
    """Proposes with a draft of several modules. Raises UserError for another `alignment` than accepted: a module's
    states at a drafted token follow from the module's before."""

    def __init__(self, draft: Draft, target: Target, alignment: str = "accepted"):
        right = f"draft={draft.config.kind} with chained modules reads all accepted tokens again; must be accepted"
        check(alignment == "accepted", f"draft.alignment={alignment}: {right}")
        self.modules = draft.config.cached_layers
        super().__init__(draft, target)
        self.compiled_modules: list[Forward] = []  # `forward_of` each

    def use_cache(self, num_kv_heads: int) -> None:
        super().use_cache(num_kv_heads)
        width = (self.modules - 1) * self.draft.config.hidden_size
        self.last = LastStates(width, self.target.dtype, self.target.device)
        self.block_states = [self.last]

    def forward_of(self, module: int) -> Forward:
        """A module's states [A, T, W] at tokens [A, T]; `hidden` [A, T, H]: what each is fed, of the token before."""

        def forward(
            tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
        ) -> torch.Tensor:
            return self.draft(self.target.embed(tokens), hidden, positions, attend, module=module)

        return forward

    def run(self, module: int, *given: Any) -> torch.Tensor:
        """`forward_of` it, compiled where it was."""
        return (self.compiled_modules[module] if self.compiled_modules else self.forward_of(module))(*given)

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
    ) -> None:
        fed, embeddings, kept = paired(hidden, positions, before), self.target.embed(tokens), list[torch.Tensor]()
        of_last = self.last.before(prefix).chunk(self.modules - 1, dim=-1)
        for module in range(self.modules):
            attend = self.cache.extend(prefix, positions)
            if module == self.modules - 1:  # its states are not needed
                self.draft(embeddings, fed, positions, attend, positions[:, :0], module=module)
            else:
                kept.append(self.draft.fed(self.draft(embeddings, fed, positions, attend, module=module)))
                fed = torch.cat((of_last[module], kept[-1][:, :-1]), 1)
        self.last.write_last(prefix, torch.cat(kept, -1), to_device(counts, tokens.device, torch.long))

    def propose(self, round: DraftRound) -> Drafted:
        read = _Read(self.cache, round, self.last.before(round.draft_prefix).chunk(self.modules - 1, dim=-1))
        root = read.root(self.read(read))
        drafted = self.grow(round.plan, root, round.pending.last, read, round.choice)
        read.only_pending()
        while len(read.kept) < self.modules:  # more than the tree has levels
            self.read(read)
        self.last.write_last(round.draft_prefix, torch.cat(read.kept[:-1], -1), round.pending.counts)
        return drafted

    def read(self, read: _Read) -> torch.Tensor:
        """Have the next module read. Returns its states [A, T, W]."""
        states = self.run(len(read.kept), read.tokens, read.fed, read.positions, read.attend())
        read.was_read(self.draft.fed(states))
        return states

    def level_states(self, tokens: torch.Tensor, above: torch.Tensor, level: Level, nodes: Nodes) -> torch.Tensor:
        assert isinstance(nodes, _Read)
        if len(nodes.kept) < self.modules:
            nodes.add(tokens, level)
            return self.read(nodes)[:, -tokens.shape[1] :]
        fed = self.draft.fed(pick(above, level.above))
        return self.run(self.modules - 1, tokens, fed, *nodes.next_level(len(tokens), level))

    def compile(self, sizes: Iterable[tuple[int, TreePlan]]) -> list[Callable[[], None]]:
        self.compiled_modules = [
            Compiled(self.forward_of(module), self.target.device) for module in range(self.modules)
        ]
        shapes, sizes, last = set[tuple[int, int, int]](), list(sizes), self.modules - 1
        catches_up = any(plan.tree.num_nodes == 1 for _, plan in sizes)
        for rows, plan in sizes:
            tree = plan.tree
            inner = [len(level.parents) for level in plan.levels[1:]]  # nodes with children, by level
            if isinstance(tree, DynamicTree):
                inner = [tree.top_k] * (tree.max_depth - 1)
            counts = {*range(1, tree.max_depth + 2), *([2, MAX_PENDING] if catches_up else [])}  # accepted, and one
            for module in range(self.modules):
                nodes = sum(inner[:module]) if module <= len(inner) else 0  # else the tree has no such level
                shapes |= {(module, rows, count + nodes) for count in counts}
            shapes |= {(last, rows, nodes) for nodes in inner[last:]}
        return [partial(self._prepare, *shape) for shape in sorted(shapes)]

    def _prepare(self, module: int, rows: int, length: int) -> None:
        """Compile a module for tokens [rows, length]."""
        hidden = self.target.embedding.new_zeros(rows, length, self.draft.config.hidden_size)
        tokens = torch.zeros(rows, length, dtype=torch.long, device=hidden.device)
        forward = self.compiled_modules[module]
        assert isinstance(forward, Compiled)
        forward.prepare(tokens, hidden, tokens)
