"""Drafting: what the engine asks of whoever proposes tokens, and what it hands over.

Paper section 3 (stage 3); DESIGN section 3.5. A drafter is one file in drafters/. Knows nothing of validation or
requests.

Shapes: A active rows, N tree nodes, D tree depth, P tokens of a path (depth + 1), T tokens of a prompt, H hidden,
V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from eagle_train.inference.cache.paged_kv import PagedKV, Prefix, Suffix
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.grammar.guided import Guidance

MOST_UNREAD = 32  # tokens of a row, with a hidden state each, that may wait for a drafter while nothing is drafted


@dataclass
class Pending:
    """What the last rounds left for the drafter: tokens they committed, each with the hidden state before it.

    tokens [A, P] int64, hidden [A, P, H], counts [A] int64: how many of a row's P are real. The last real one is the
    pending token, which neither model has in its cache yet; `lengths` [A] int64 tokens precede it.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor

    @cached_property
    def end(self) -> torch.Tensor:
        """Where the pending token is [A, 1]."""
        return self.counts.unsqueeze(1) - 1

    @property
    def last(self) -> torch.Tensor:
        """The pending token [A, 1]."""
        return self.tokens.gather(1, self.end)

    @property
    def read(self) -> torch.Tensor:
        """How many tokens the drafter has read [A]: all before these."""
        return self.lengths + 1 - self.counts

    def rows(self, order: torch.Tensor | slice) -> "Pending":
        """The rows `order`, in that order."""
        return Pending(self.tokens[order], self.hidden[order], self.counts[order], self.lengths[order])

    def newest(self, counts: torch.Tensor, most: int) -> "Pending":
        """The last `counts` [A] real tokens of each row: 1 to `most`."""
        place = (self.counts - counts).unsqueeze(1) + torch.arange(most, device=self.tokens.device)
        place = place.clamp(max=self.tokens.shape[1] - 1)
        hidden = self.hidden.take_along_dim(place.unsqueeze(2), dim=1)
        return Pending(self.tokens.gather(1, place), hidden, counts, self.lengths)

    def append_token(self, newer: "Pending") -> "Pending":
        """These, and behind them the one token that a round without drafts brought each row."""
        place = self.counts.unsqueeze(1)
        tokens = F.pad(self.tokens, (0, 1)).scatter(1, place, newer.tokens)
        hidden = F.pad(self.hidden, (0, 0, 0, 1))
        hidden = hidden.scatter(1, place.unsqueeze(2).expand_as(newer.hidden), newer.hidden)
        return Pending(tokens, hidden, self.counts + 1, newer.lengths)

    def narrow(self, width: int) -> "Pending":
        """The same where no row has more than `width` real tokens."""
        if width == self.tokens.shape[1]:
            return self
        tokens, hidden = (x.narrow_copy(1, 0, width) for x in (self.tokens, self.hidden))
        return replace(self, tokens=tokens, hidden=hidden)

    def concat_rows(self, other: "Pending") -> "Pending":
        """These rows, then the other's."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        tokens = [F.pad(x.tokens, (0, width - x.tokens.shape[1])) for x in (self, other)]
        hidden = [F.pad(x.hidden, (0, 0, 0, width - x.hidden.shape[1])) for x in (self, other)]
        rows = [torch.cat(pair) for pair in ((self.counts, other.counts), (self.lengths, other.lengths))]
        return Pending(torch.cat(tokens), torch.cat(hidden), *rows)


@dataclass(frozen=True)
class Choice:
    """How a node's children are chosen: `propose`'s mode; temperature [A] and noise [A, draws] unless it is greedy.

    `guidance`: what grammars let follow a node, None where no row has one. A drafter that does not ask it proposes what
    will be refused.
    """

    mode: str = "greedy"
    temperature: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    guidance: Guidance | None = None


class Drafted(NamedTuple):
    """A tree for each row."""

    tokens: torch.Tensor  # int64 [A, N], the pending token at the root
    q: torch.Tensor | None  # [A, N, V]: what each node's children were drawn from, where they were drawn at random
    suffix: Suffix | None  # of nodes, what is not in the drafter's caches yet; it may have more rows


class Drafter(Protocol):
    """Whoever proposes tokens. What it keeps of a sequence lies in the blocks that the engine gives that sequence, so
    that forgetting one, sharing and keeping them is the engine's affair alone. Whatever is proposed, the outputs stay
    the target's own.
    """

    caches: list[PagedKV]
    """What it keeps in the blocks; the engine sees to their size."""

    def compile(self, sizes: "Iterable[tuple[int, TreePlan]]") -> list[Callable[[], None]]:
        """Run forwards by torch.compile from now on. Returns calls that have it done for these batch sizes, each with
        its plan; they raise UserError where torch.compile fails."""

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
    ) -> None:
        """Texts, or what follows a prefix of them: tokens [A, T], padded on the right, the target's hidden states
        [A, T, H], and `before` [A, H], that of the token before the first; None where every prefix is empty."""

    def propose(self, plan: "TreePlan", prefix: Prefix, read: Prefix, pending: Pending, choice: Choice) -> Drafted:
        """A tree for each row, whose pending tokens `prefix` precedes, and `read` the first of those in `pending`.

        Where there is no grammar it may be recorded (ops/graphs.py): so it asks for no tensor's values, and keeps
        nothing that differs from round to round but in the caches.
        """

    def rewind(
        self, plan: "TreePlan", prefix: Prefix, suffix: Suffix | None, node: torch.Tensor, pending: Pending
    ) -> Pending:
        """The proposed tree's nodes down to `node` [A] were accepted, which left `pending` of the round. `prefix`: as
        for `propose`; `suffix`: its result's.

        Returns what of it `propose` is to be given next: the newest tokens, the pending one at least.
        """


@dataclass(frozen=True)
class Level:
    """A level of a tree as the drafting needs it: which nodes get children, and where those go."""

    parents: torch.Tensor  # nodes of this level that have children, as indices into the tree
    inner: torch.Tensor | None  # the same as indices into the level; None: all of it
    above: torch.Tensor | None  # each one's own parent, as an index into the level before's `parents`; None: the same
    ancestors: torch.Tensor  # bool [parents, inner nodes so far, root left out]
    proposal: torch.Tensor | None  # which of the tokens proposed [parents * most] the next level's are; None: all
    most: int  # children of one node
    noise: slice  # which of a round's random numbers the multinomial modes use here


@dataclass(frozen=True)
class TreePlan:
    """A tree with what the drafting precomputes from it."""

    tree: Tree

    @cached_property
    def levels(self) -> list[Level]:
        return levels_of(self.tree)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no two nodes that have children stand side by side."""
        return all(len(level.parents) == 1 for level in self.levels)

    @cached_property
    def place(self) -> torch.Tensor:
        """int64 [N]: where a node stands among those with children, the root left out; 0 for all others."""
        inner = [node for level in self.levels[1:] for node in level.parents.tolist()]
        place = torch.zeros_like(self.tree.depth)
        place[inner] = torch.arange(len(inner), device=place.device)
        return place

    @property
    def num_draws(self) -> int:
        """Random numbers of a row's round with drawn drafts: one at its end, a coin per node, the drafts' noise."""
        return 1 + self.tree.num_nodes + (self.levels[-1].noise.stop if self.levels else 0)


def levels_of(tree: Tree) -> list[Level]:
    """The levels that have children, from the root's down."""
    device, parent = tree.depth.device, tree.parents  # an index from elsewhere would have the host wait
    levels, inner, before, drawn = [], [], [0], 0
    for d in range(tree.max_depth):
        (first, end), (_, last) = tree.levels[d : d + 2]
        children = list(range(end, last))
        parents = sorted({parent[node] for node in children})
        inner += parents if d > 0 else []
        ranks = tree.child_rank[children].tolist()
        most = max(ranks) + 1
        places = [parents.index(parent[node]) * most + rank for node, rank in zip(children, ranks, strict=True)]
        levels.append(
            Level(
                parents=torch.tensor(parents, device=device),
                inner=index([node - first for node in parents], end - first, device),
                above=index([before.index(max(parent[node], 0)) for node in parents], len(before), device),
                ancestors=tree.ancestors[parents][:, inner],
                proposal=index(places, len(parents) * most, device),
                most=most,
                noise=slice(drawn, drawn + len(parents) * most),
            )
        )
        before, drawn = parents, levels[-1].noise.stop
    return levels


def index(places: list[int], count: int, device: torch.device) -> torch.Tensor | None:
    """`places` of `count`; None: all of them as they are."""
    return None if places == list(range(count)) else torch.tensor(places, device=device)


def pick(x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """x [A, n, ...] at some of its n places, or at all of them."""
    return x if places is None else x.index_select(1, places)
