"""The interface of drafters, which propose trees of tokens, and the data that the engine gives them.

A drafter is one file in drafters/. Knows nothing of validation or requests. Paper section 3 (stage 3), DESIGN section
3.5.

Shapes: A active rows, N tree nodes, P pending tokens of a row at most, T tokens of a prompt, H the target's width, S
the width of its states that the drafter gets, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from eagle_train.inference.cache.block_ends import BlockEnds
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.row_trees import AnyTree, PlanTree, RowTrees
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.grammar.guided import Guidance, NodeMasks
from eagle_train.models.stages import Stages
from eagle_train.ops.transfer import to_device

# The most pending tokens of a row while nothing is drafted, each with a hidden state. The drafter then processes them
# in one forward, at nearly the cost per token of a prefill.
MAX_PENDING = 32


@dataclass
class Pending:
    """Committed tokens that the drafter has not processed, each with the target's hidden state at the token before.

    tokens int64 [A, P]; hidden [A, P, S]; counts int64 [A]: how many of a row's P are real, at least one; the rest is
    padding. A row's last real token is the pending token, which is in neither model's cache; lengths int64 [A]: the
    number of tokens before it. `is_full`: the host knows that nothing is padding, which saves kernels.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    is_full: bool = False

    @cached_property
    def end(self) -> torch.Tensor:
        """int64 [A, 1]: the pending token's place among the P."""
        return self.counts.unsqueeze(1) - 1

    @property
    def last(self) -> torch.Tensor:
        """int64 [A, 1]: the pending token."""
        if not self.is_full:
            return self.tokens.gather(1, self.end)
        width = self.tokens.shape[1]
        # A view's strides would be others in each round, for which a compiled forward would be compiled again.
        return self.tokens if width == 1 else self.tokens.narrow_copy(1, width - 1, 1)

    @property
    def draft_lengths(self) -> torch.Tensor:
        """int64 [A]: the number of tokens in the drafter's cache, all those before `tokens`."""
        return self.lengths + 1 - self.counts

    def rows(self, order: torch.Tensor | slice) -> "Pending":
        """The rows `order`, in this order."""
        parts = (self.tokens[order], self.hidden[order], self.counts[order], self.lengths[order])
        return Pending(*parts, is_full=self.is_full)

    def newest(self, counts: torch.Tensor, most: int) -> "Pending":
        """The last `counts` int64 [A] real tokens of each row, from 1 to `most` of them."""
        place = (self.counts - counts).unsqueeze(1) + torch.arange(most, device=self.tokens.device)
        place = place.clamp(max=self.tokens.shape[1] - 1)
        hidden = self.hidden.take_along_dim(place.unsqueeze(2), dim=1)
        return Pending(self.tokens.gather(1, place), hidden, counts, self.lengths)

    def append_token(self, newer: "Pending") -> "Pending":
        """These, and then the one token of each row that a round without drafts committed."""
        if self.is_full:
            tokens = torch.cat((self.tokens, newer.tokens), 1)
            hidden = torch.cat((self.hidden, newer.hidden), 1)
            return Pending(tokens, hidden, self.counts + 1, newer.lengths, is_full=True)
        place = self.counts.unsqueeze(1)
        tokens = F.pad(self.tokens, (0, 1)).scatter(1, place, newer.tokens)
        hidden = F.pad(self.hidden, (0, 0, 0, 1))
        hidden = hidden.scatter(1, place.unsqueeze(2).expand_as(newer.hidden), newer.hidden)
        return Pending(tokens, hidden, self.counts + 1, newer.lengths)

    def narrow(self, width: int, is_full: bool) -> "Pending":
        """The same with P = `width`; no row may have more real tokens, and if `is_full` none has fewer."""
        if (width, is_full) == (self.tokens.shape[1], self.is_full):
            return self
        tokens, hidden = self.tokens, self.hidden
        if width < tokens.shape[1]:
            tokens, hidden = (x.narrow_copy(1, 0, width) for x in (tokens, hidden))
        return replace(self, tokens=tokens, hidden=hidden, is_full=is_full)

    def with_rows(self, rows: list[int], other: "Pending") -> "Pending":
        """These, with the other's as the rows `rows`."""
        both = self.concat_rows(other)
        order = list(range(len(self.counts)))
        for place, row in enumerate(rows):
            order[row] = len(order) + place
        return both.rows(to_device(order, self.tokens.device, torch.long))

    def concat_rows(self, other: "Pending") -> "Pending":
        """These rows, then the other's."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        is_full = all(x.is_full and x.tokens.shape[1] == width for x in (self, other))
        tokens = [F.pad(x.tokens, (0, width - x.tokens.shape[1])) for x in (self, other)]
        hidden = [F.pad(x.hidden, (0, 0, 0, width - x.hidden.shape[1])) for x in (self, other)]
        counts, lengths = (torch.cat(pair) for pair in ((self.counts, other.counts), (self.lengths, other.lengths)))
        return Pending(torch.cat(tokens), torch.cat(hidden), counts, lengths, is_full)


@dataclass(frozen=True)
class Choice:
    """How a node's children are chosen: the mode of `sampling.propose`; temperature float32 [A] and noise float64
    [A, draws] are None for greedy. In a drawn mode, too, rows at temperature 0 have the most likely tokens.

    `guidance`: the tokens that the rows' grammars allow after a node; None without a grammar. Other drafts are rejected
    in verification.
    """

    mode: str = "greedy"
    temperature: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    guidance: NodeMasks | None = None

    def rows(self, order: list[int], index: torch.Tensor) -> "Choice":
        """The same of the rows `order`; `index`: the same numbers on the device."""
        temperature, noise = (None if x is None else x[index] for x in (self.temperature, self.noise))
        assert isinstance(self.guidance, Guidance | None), "a recording has all rows"
        guidance = None if self.guidance is None else self.guidance.of(order)
        return Choice(self.mode, temperature, noise, guidance)


@dataclass(frozen=True)
class Needs:
    """What a drafter declares, once.

    - `layers`: layers of the target, 0 the first, whose outputs it wants. `Pending.hidden` then has S = H * (1 +
      layers) columns: what the LM head reads, and behind it the outputs of these layers in this order.
    - `texts`: the host's copy of each row's committed tokens. A round then waits for the results of the one before, and
      its drafting is not recorded.
    - `logits`: the target's logits at every node, afterwards. Ranks of a divided target then sample all rows each.
    - `tree`: the tree that it always proposes, in place of the engine's.
    - `by_row`: its trees differ by row: it is given an `OpenTree` with as many nodes as the engine's tree.
    - `levels`: the most levels that its trees can have below the root; None: any number.
    - `grows`: it grows an engine's `DynamicTree`, by probabilities of its own.
    - `waits`: it may have the host wait for the device. If it does not, its part of rounds is recorded as CUDA graphs.
    - `checks`: what it returns is checked in every round, and what it raises is a fault of its rows.
    """

    layers: tuple[int, ...] = ()
    texts: bool = False
    logits: bool = False
    tree: PlanTree | None = None
    by_row: bool = False
    levels: int | None = None
    grows: bool = False
    waits: bool = True
    checks: bool = True


class RowText(NamedTuple):
    """A row's committed tokens, on the host. The lists are the engine's: read them only."""

    key: int  # of the request, as long as it is in the engine
    prompt: list[int]
    answer: list[int]  # the last token is the pending one


@dataclass(frozen=True)
class DraftRound:
    """What a drafter is given for a round.

    `plan`: the tree to propose. `prefix`: the tokens before the pending one; `draft_prefix`: those before
    `pending.tokens`, which are in the drafter's cache. `vocab_size`: V. `texts`: one for each row where `Needs.texts`
    is set. `target_cache`: the target's keys and values, which hold the tokens of `prefix`; None for a drafter that is
    recorded.
    """

    plan: "TreePlan"
    prefix: Prefix
    draft_prefix: Prefix
    pending: Pending
    choice: Choice
    vocab_size: int
    texts: list[RowText] | None = None
    target_cache: PagedKV | None = None

    def rows(self, order: list[int]) -> "DraftRound":
        """The same of some rows."""
        index = to_device(order, self.pending.tokens.device, torch.long)
        texts = None if self.texts is None else [self.texts[row] for row in order]
        prefixes = (self.prefix.rows(order), self.draft_prefix.rows(order))
        pending, choice = self.pending.rows(index), self.choice.rows(order, index)
        return DraftRound(self.plan, *prefixes, pending, choice, self.vocab_size, texts, self.target_cache)


class Computed(NamedTuple):
    """What drafting has computed of the target's forward: its first `layers` layers, at the n nodes of the plan's tree
    that have children (`TreePlan.inner`).

    A chain's keys and values of these layers are in the target's cache, where a chain's validation writes them.
    """

    stages: Stages  # runs the other layers
    layers: int
    states: torch.Tensor  # [A, n, H]: after these layers
    suffix: Suffix | None  # these nodes' keys and values in these layers, and in others maybe; None for a chain


class Drafted(NamedTuple):
    """A tree for each row. Siblings may be the same token; then only one can be accepted, in a static tree the first
    unless it says `siblings_repeat`.

    Without `q` a node is accepted if it equals the target's own draw, which is exact for any way of drafting that does
    not know this draw. So `q` is needed only if children were drawn from a distribution as `Choice.mode` says, and may
    always be None; it must be with `trees`. It sums to 1 at each node with children. Whether they were drawn from it
    cannot be checked: if they were not, tokens of requests with a temperature are not the target's.
    """

    tokens: torch.Tensor  # int64 [A, N], the pending token at the root
    q: torch.Tensor | None = None  # [A, N, V]: the distribution each node's children were drawn from, or None
    suffix: Suffix | None = None  # nodes' keys and values that are not in the drafter's cache; padding rows may follow
    trees: RowTrees | None = None  # each row's own tree of N nodes, fewer than the plan's maybe; None: the plan's
    places: torch.Tensor | None = None  # of a dynamic tree, int64 [A, N]: the nodes' places in `suffix`; -1: none
    faults: Mapping[int, str] = MappingProxyType({})  # rows that it could not draft for, with the reason
    computed: Computed | None = None  # what validation may go on from, with the plan's tree; not where it is checked

    def rows(self, order: list[int]) -> "Drafted":
        """The same of some rows, without what validation goes on from."""
        index = to_device(order, self.tokens.device, torch.long)
        q, places = (None if x is None else x[index] for x in (self.q, self.places))
        suffix = None if self.suffix is None else self.suffix.rows(index)
        trees = None if self.trees is None else self.trees.rows(lambda x: x[index])
        faults = {place: self.faults[row] for place, row in enumerate(order) if row in self.faults}
        return Drafted(self.tokens[index], q, suffix, trees, places, faults)


@dataclass(frozen=True)
class Outcome:
    """What a drafter is told after verification, of the tree that it proposed.

    `pending`: the round's committed tokens, with the target's states.
    """

    tree: AnyTree
    node: torch.Tensor  # int64 [A]: the deepest accepted node
    pending: Pending
    hidden: torch.Tensor  # [A, N, S]: the target's states at every node, see `Needs.layers`
    logits: torch.Tensor | None  # [A, N, V]: its logits at every node, where `Needs.logits` is set

    @cached_property
    def path(self) -> torch.Tensor:
        """int64 [A, P]: the nodes from the root to `node`, padded with it."""
        return self.tree.paths_to(self.node)


class Drafter:
    """Proposes tokens. Whatever it proposes, the outputs have the target's distribution. A subclass defines `propose`.

    State of a sequence that is in `caches` and `block_states` is in the sequence's blocks, so that eviction, prefix
    reuse and offload cover it. Other state is on the host, by `RowText.key`, until `leave`.
    """

    needs = Needs()
    caches: Sequence[PagedKV] = ()
    """Its caches; the engine resizes them together with the target's."""
    block_states: Sequence[BlockEnds] = ()
    """What else it keeps for each block; likewise."""
    models: Sequence[torch.nn.Module] = ()
    """The models that it runs; the engine looks whether they have parts for which the host may wait."""

    def compile(self, sizes: Iterable[tuple[int, "TreePlan"]]) -> list[Callable[[], None]]:
        """Use torch.compile from now on. Returns functions that compile for these pairs of batch size and plan; they
        raise UserError if torch.compile fails."""
        return []

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
    ) -> None:
        """Prefill prompts, or chunks of them, after their prefixes: tokens int64 [A, T], padded on the right; positions
        int64 [A, T]; hidden [A, T, S]: the target's states at the tokens; before [A, S]: those at the prefixes' last
        tokens, None if all prefixes are empty; counts: how many of each row's T tokens are real.

        Where this, `propose` or `rewind` raises, it is called again for each half of the rows."""

    def propose(self, round: DraftRound) -> Drafted:
        """A tree for each row. The drafter writes its keys and values of `pending.tokens` to the slots after
        `draft_prefix`.

        It may be captured as a CUDA graph if `Needs.waits` is False (ops/graphs.py), in parts where it reads
        `Choice.guidance`: it must not synchronise with the device, nor keep state of a round outside the caches.
        """
        raise NotImplementedError

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        """Called after verification, with what `propose` was given and returned.

        Returns the part of `outcome.pending` that the next `propose` gets: the newest tokens, at least the pending one,
        which is what a drafter without caches is given. Where it is checked, `counts` and the width alone are read.
        """
        return outcome.pending.newest(torch.ones_like(outcome.pending.counts), 1)

    def leave(self, key: int) -> None:
        """The request of this `RowText.key` has ended: keep nothing of it."""


@dataclass(frozen=True)
class Level:
    """Index tables for drafting one level of a tree: which of its nodes have children, and where the children go.

    Q nodes of the level have children, at most `most` each. `None` stands for the identity.
    """

    numbers: list[int]  # [Q]: the nodes with children, as nodes of the tree
    parents: torch.Tensor  # int64 [Q]: the same on the device
    inner: torch.Tensor | None  # int64 [Q]: the same as indices into the level
    above: torch.Tensor | None  # int64 [Q]: the parent of each, as an index into `parents` of the level before
    ancestors: torch.Tensor  # bool [Q, nodes with children in this and earlier levels, the root excluded]
    proposal: torch.Tensor | None  # int64 [next level]: each node's index among the Q * most proposed tokens
    most: int  # the most children of a node
    noise: slice  # the columns of a round's random numbers that the multinomial modes use in this level


@dataclass(frozen=True)
class TreePlan:
    """A tree with its tables for drafting. Those for verification are in `Tree`. An `OpenTree` has no tables.

    `parts`: of an engine with several drafters, the plan of each by name; `tree` has room for all of them.
    """

    tree: PlanTree
    parts: "tuple[tuple[str, TreePlan], ...]" = ()

    @property
    def device(self) -> torch.device:
        """Of the tables."""
        return self.tree.depth.device if isinstance(self.tree, Tree) else torch.device("cpu")

    def of(self, name: str) -> "TreePlan":
        """The plan of the drafter `name`."""
        return dict(self.parts)[name] if self.parts else self

    @cached_property
    def levels(self) -> list[Level]:
        """The levels that have children, the root's first; none of an `OpenTree`, whose drafts are not drawn."""
        return _levels_of(self.tree) if isinstance(self.tree, Tree) else []

    @cached_property
    def is_chain(self) -> bool:
        """Whether no two nodes with children are at the same depth."""
        return isinstance(self.tree, Tree) and all(len(level.parents) == 1 for level in self.levels)

    @cached_property
    def place(self) -> torch.Tensor:
        """int64 [N]: a node's index among those with children, the root excluded, which is its place in the drafter's
        suffix; 0 for the root and for leaves."""
        assert isinstance(self.tree, Tree)
        inner = [node for level in self.levels[1:] for node in level.parents.tolist()]
        place = torch.zeros_like(self.tree.depth)
        place[inner] = torch.arange(len(inner), device=place.device)
        return place

    @cached_property
    def inner(self) -> torch.Tensor:
        """int64 [n]: the nodes that have children, the root first; none for a root alone."""
        nodes = [node for level in self.levels for node in level.parents.tolist()]
        return torch.tensor(nodes, dtype=torch.long, device=self.device)

    @cached_property
    def leaves(self) -> torch.Tensor:
        """int64 [N - n]: the nodes that have none."""
        inner = set(self.inner.tolist())
        nodes = [node for node in range(self.tree.num_nodes) if node not in inner]
        return torch.tensor(nodes, dtype=torch.long, device=self.device)

    @cached_property
    def by_node(self) -> torch.Tensor:
        """int64 [N]: each node's place among `inner` and then `leaves`."""
        return torch.cat((self.inner, self.leaves)).argsort()

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
                numbers=parents,
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
