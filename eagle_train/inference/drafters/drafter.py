"""The interface of drafters, which propose trees of tokens, and the data that the engine gives them.

A drafter is one file in drafters/. Knows nothing of validation or requests. Paper section 3 (stage 3), DESIGN section
3.5.

Shapes: A active rows, N tree nodes, P pending tokens of a row at most, T tokens of a prompt, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.grammar.guided import Guidance

# The most pending tokens of a row while nothing is drafted, each with a hidden state. The drafter then processes them
# in one forward, at nearly the cost per token of a prefill.
MAX_PENDING = 32


@dataclass
class Pending:
    """Committed tokens that the drafter has not processed, each with the target's hidden state at the token before.

    tokens int64 [A, P]; hidden [A, P, H]; counts int64 [A]: how many of a row's P are real, at least one; the rest is
    padding. A row's last real token is the pending token, which is in neither model's cache; lengths int64 [A]: the
    number of tokens before it.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor

    @cached_property
    def end(self) -> torch.Tensor:
        """int64 [A, 1]: the pending token's place among the P."""
        return self.counts.unsqueeze(1) - 1

    @property
    def last(self) -> torch.Tensor:
        """int64 [A, 1]: the pending token."""
        return self.tokens.gather(1, self.end)

    @property
    def draft_lengths(self) -> torch.Tensor:
        """int64 [A]: the number of tokens in the drafter's cache, all those before `tokens`."""
        return self.lengths + 1 - self.counts

    def rows(self, order: torch.Tensor | slice) -> "Pending":
        """The rows `order`, in this order."""
        return Pending(self.tokens[order], self.hidden[order], self.counts[order], self.lengths[order])

    def newest(self, counts: torch.Tensor, most: int) -> "Pending":
        """The last `counts` int64 [A] real tokens of each row, from 1 to `most` of them."""
        place = (self.counts - counts).unsqueeze(1) + torch.arange(most, device=self.tokens.device)
        place = place.clamp(max=self.tokens.shape[1] - 1)
        hidden = self.hidden.take_along_dim(place.unsqueeze(2), dim=1)
        return Pending(self.tokens.gather(1, place), hidden, counts, self.lengths)

    def append_token(self, newer: "Pending") -> "Pending":
        """These, and then the one token of each row that a round without drafts committed."""
        place = self.counts.unsqueeze(1)
        tokens = F.pad(self.tokens, (0, 1)).scatter(1, place, newer.tokens)
        hidden = F.pad(self.hidden, (0, 0, 0, 1))
        hidden = hidden.scatter(1, place.unsqueeze(2).expand_as(newer.hidden), newer.hidden)
        return Pending(tokens, hidden, self.counts + 1, newer.lengths)

    def narrow(self, width: int) -> "Pending":
        """The same with P = `width`; no row may have more real tokens."""
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
    """How a node's children are chosen: the mode of `sampling.propose`; temperature float32 [A] and noise float64
    [A, draws] are None for greedy.

    `guidance`: the tokens that the rows' grammars allow after a node; None without a grammar. Other drafts are rejected
    in verification.
    """

    mode: str = "greedy"
    temperature: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    guidance: Guidance | None = None


class Drafted(NamedTuple):
    """A tree for each row. Siblings may be the same token; then only the first can be accepted.

    Without `q` a node is accepted if it equals the target's own draw, which is exact for any way of drafting. So `q` is
    needed only if children were drawn from a distribution as `Choice.mode` says, and may always be None.
    """

    tokens: torch.Tensor  # int64 [A, N], the pending token at the root
    q: torch.Tensor | None  # [A, N, V]: the distribution each node's children were drawn from, or None
    suffix: Suffix | None  # the nodes' keys and values that are not in the drafter's cache; it may have padding rows


class Drafter(Protocol):
    """Proposes tokens. Whatever it proposes, the outputs have the target's distribution.

    Its state of a sequence is in the sequence's blocks, so that eviction, prefix reuse and offload cover it.
    """

    caches: list[PagedKV]
    """Its caches; the engine resizes them together with the target's."""

    def compile(self, sizes: "Iterable[tuple[int, TreePlan]]") -> list[Callable[[], None]]:
        """Use torch.compile from now on. Returns functions that compile for these pairs of batch size and plan; they
        raise UserError if torch.compile fails."""

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
    ) -> None:
        """Prefill prompts, or chunks of them, after their prefixes: tokens int64 [A, T], padded on the right; positions
        int64 [A, T]; hidden [A, T, H]: the target's hidden states at the tokens; before [A, H]: those at the prefixes'
        last tokens, None if all prefixes are empty."""

    def propose(
        self, plan: "TreePlan", prefix: Prefix, draft_prefix: Prefix, pending: Pending, choice: Choice
    ) -> Drafted:
        """A tree for each row. `prefix`: the tokens before the pending one; `draft_prefix`: those before
        `pending.tokens`, which are in the drafter's cache. The drafter writes its keys and values of `pending.tokens`
        to the slots after `draft_prefix`.

        Without a grammar it may be captured as a CUDA graph (ops/graphs.py): it must not synchronise with the device,
        nor keep state of a round outside the caches.
        """

    def rewind(
        self, plan: "TreePlan", prefix: Prefix, suffix: Suffix | None, node: torch.Tensor, pending: Pending
    ) -> Pending:
        """Called after verification. `node` int64 [A]: the deepest accepted node of the proposed tree; `pending`: the
        round's committed tokens; `prefix`: as for `propose`; `suffix`: that of its result.

        Returns the part of `pending` that the next `propose` gets: the newest tokens, at least the pending one.
        """


@dataclass(frozen=True)
class Level:
    """Index tables for drafting one level of a tree: which of its nodes have children, and where the children go.

    Q nodes of the level have children, at most `most` each. `None` stands for the identity.
    """

    parents: torch.Tensor  # int64 [Q]: the nodes with children, as nodes of the tree
    inner: torch.Tensor | None  # int64 [Q]: the same as indices into the level
    above: torch.Tensor | None  # int64 [Q]: the parent of each, as an index into `parents` of the level before
    ancestors: torch.Tensor  # bool [Q, nodes with children in this and earlier levels, the root excluded]
    proposal: torch.Tensor | None  # int64 [next level]: each node's index among the Q * most proposed tokens
    most: int  # the most children of a node
    noise: slice  # the columns of a round's random numbers that the multinomial modes use in this level


@dataclass(frozen=True)
class TreePlan:
    """A tree with its tables for drafting. Those for verification are in `Tree`."""

    tree: Tree

    @cached_property
    def levels(self) -> list[Level]:
        """The levels that have children, the root's first."""
        return _levels_of(self.tree)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no two nodes with children are at the same depth."""
        return all(len(level.parents) == 1 for level in self.levels)

    @cached_property
    def place(self) -> torch.Tensor:
        """int64 [N]: a node's index among those with children, the root excluded, which is its place in the drafter's
        suffix; 0 for the root and for leaves."""
        inner = [node for level in self.levels[1:] for node in level.parents.tolist()]
        place = torch.zeros_like(self.tree.depth)
        place[inner] = torch.arange(len(inner), device=place.device)
        return place

    @property
    def num_draws(self) -> int:
        """Random numbers of a row for a round with drawn drafts: one for the next token, one per node for its
        acceptance, and the drafts' noise."""
        return 1 + self.tree.num_nodes + (self.levels[-1].noise.stop if self.levels else 0)


def _levels_of(tree: Tree) -> list[Level]:
    device, parent = tree.depth.device, tree.parents  # on the tree's device: indexing by a CPU tensor synchronises
    levels, inner, before, drawn = [], [], [0], 0  # inner: nodes with children so far, without the root
    for d in range(tree.max_depth):
        (first, end), (_, last) = tree.levels[d : d + 2]
        children = list(range(end, last))  # the next level
        parents = sorted({parent[node] for node in children})
        inner += parents if d > 0 else []
        ranks = tree.child_rank[children].tolist()
        most = max(ranks) + 1
        # Each parent proposes `most` tokens, [Q * most] in all; a child of rank r takes the r-th of its parent's.
        places = [parents.index(parent[node]) * most + rank for node, rank in zip(children, ranks, strict=True)]
        levels.append(
            Level(
                parents=torch.tensor(parents, device=device),
                inner=_index([node - first for node in parents], end - first, device),
                above=_index([before.index(max(parent[node], 0)) for node in parents], len(before), device),
                ancestors=tree.ancestors[parents][:, inner],
                proposal=_index(places, len(parents) * most, device),
                most=most,
                noise=slice(drawn, drawn + len(parents) * most),
            )
        )
        before, drawn = parents, levels[-1].noise.stop
    return levels


def _index(places: list[int], count: int, device: torch.device) -> torch.Tensor | None:
    """`places` as a tensor; None where they are the identity of `count` places."""
    return None if places == list(range(count)) else torch.tensor(places, device=device)


def pick(x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """x [A, n, ...] at `places` int64 [m], [A, m, ...]; None: unchanged."""
    return x if places is None else x.index_select(1, places)
