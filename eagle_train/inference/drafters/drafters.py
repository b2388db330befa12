"""The drafters of an engine: each row has one, or none. Who is at fault gets no more drafts, and nobody else notices.

Gives each drafter its rows of a round, and makes one batch of what they propose. Knows nothing of validation, or of
which request a row is. DESIGN section 3.5.

Shapes: A active rows, N nodes of the largest tree, T tokens, S width of the states, H the target's width.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from eagle_train.errors import OptionError, check, one_line
from eagle_train.inference.cache.block_ends import BlockEnds
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.row_trees import AnyTree, DynamicTree, OpenTree, RowTrees
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.checks import checked_drafts, checked_pending
from eagle_train.inference.drafters.drafter import Choice, Drafter, DraftRound, Outcome, Pending, TreePlan
from eagle_train.inference.drafters.proposed import Part, Proposed, chains, index_of, merged_q, tree_of
from eagle_train.inference.grammar.guided import Guidance
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.ops.transfer import to_device

R = TypeVar("R")
Seats = Sequence[str | None]
"""The name of each row's drafter; None: it has none."""


class Drafters:
    """Drafters by name, the first of which is the default; or none at all, for plain decoding."""

    def __init__(self, drafters: Mapping[str, Drafter], ranks: Ranks, width: int):
        """`width`: H."""
        self.by_name, self._ranks, self._width = dict(drafters), ranks, width
        needs = [each.needs for each in self.by_name.values()]
        self.layers = tuple(sorted({layer for each in needs for layer in each.layers}))
        if len(needs) == 1:  # which is given the states as they are
            self.layers = needs[0].layers
        self.need_logits = any(each.logits for each in needs)
        self.are_checked = len(needs) > 1 or any(each.checks or each.texts for each in needs)
        self.varies = len(needs) > 1 or any(each.by_row for each in needs)  # trees may differ by row

    @property
    def caches(self) -> list[PagedKV]:
        """Of all drafters. A draft has another one once it is divided."""
        return [cache for each in self.by_name.values() for cache in each.caches]

    @property
    def block_states(self) -> list[BlockEnds]:
        """What else drafters keep for each block."""
        return [states for each in self.by_name.values() for states in each.block_states]

    @property
    def have_plans(self) -> bool:
        """Whether they propose other trees than the engine's, as `plan` says."""
        return self.varies or any(each.needs.tree is not None for each in self.by_name.values())

    @property
    def only(self) -> Drafter | None:
        """The drafter, where there is one alone."""
        return next(iter(self.by_name.values())) if len(self.by_name) == 1 else None

    @property
    def recordable(self) -> bool:
        """Whether drafting, and what drafters are told, may be recorded."""
        only = self.only
        return not self.by_name or (only is not None and not only.needs.by_row and not only.needs.waits)

    def seat(self, wanted: str | None) -> str | None:
        """The name of a request's drafter: the wanted one, or the default for None; None for "none", and without any.

        Raises UserError for a name that is none."""
        names = list(self.by_name)
        check(wanted in (None, "none", *names), f"drafter={wanted}: this engine has {', '.join([*names, 'none'])}")
        if wanted is None:
            return next(iter(names), None)
        return None if wanted == "none" else wanted

    def caching(self, name: str | None) -> str:
        """The name of a request's drafter if it has caches, else the empty text."""
        return name if name is not None and self.by_name[name].caches else ""

    def reads_texts(self, name: str | None) -> bool:
        """Whether this drafter reads texts."""
        return name is not None and self.by_name[name].needs.texts

    def plan(self, plan: TreePlan) -> TreePlan:
        """A plan with room for what these drafters propose in its place. Raises UserError."""
        if plan.tree.num_nodes == 1 or not self.by_name:
            return plan
        if len(self.by_name) == 1:  # beside others the tree is theirs
            _check_grows(next(iter(self.by_name.values())), plan)
        own = {name: _plan_of(drafter, plan) for name, drafter in self.by_name.items()}
        if len(own) == 1:
            return own[next(iter(own))]
        trees = [each.tree for each in own.values()]
        tree = OpenTree(max(x.num_nodes for x in trees), max(x.max_depth for x in trees))
        return TreePlan(tree, tuple(own.items()))

    @property
    def levels(self) -> int | None:
        """The most levels below the root that all of them can draft; None: any number."""
        return min((each.needs.levels for each in self.by_name.values() if each.needs.levels is not None), default=None)

    def expect(self, plans: Iterable[TreePlan], mode: str) -> None:
        """These are the engine's plans. Raises OptionError where drafts cannot be drawn as `mode` says, or not so
        deep."""
        plans = list(plans)
        self.varies |= bool(self.by_name) and any(isinstance(plan.tree, OpenTree) for plan in plans)
        told = "several drafters draw nothing" if len(self.by_name) > 1 else "trees that differ by row are not drawn"
        check(mode == "greedy" or not self.varies, f"drafting={mode}: {told}; use greedy", OptionError)
        deepest = max((plan.tree.max_depth for plan in plans), default=0)
        most = self.levels
        told = f"tree: it has {deepest} levels, and the draft proposes {most} tokens ahead; use chain{most}, say"
        check(most is None or deepest <= most, told, OptionError)

    def compile(self, sizes: Iterable[tuple[int, TreePlan]]) -> list[Callable[[], None]]:
        """As of `Drafter`."""
        sizes, jobs = list(sizes), list[Callable[[], None]]()
        for name, drafter in self.by_name.items():
            jobs += drafter.compile([(rows, plan.of(name)) for rows, plan in sizes])
        return jobs

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
        seats: Seats,
    ) -> dict[int, str]:
        """As of `Drafter`; each is given its rows. Returns the rows whose drafter is at fault, and why."""
        reasons: dict[int, str] = {}
        for name, rows in _grouped(seats).items():
            ask = partial(self._prefill, name, prefix, tokens, positions, hidden, before, counts)
            _asked(self.by_name[name], rows, ask, reasons)
        return self._agreed_reasons(reasons, seats)

    def propose(self, round: DraftRound, seats: Seats, by_row: bool = False) -> Proposed:
        """The drafts of all rows.

        A plan of the root alone is for drafters with caches, which read what is pending; others are not asked.
        `by_row`: where plans leave the tree open, trees are `RowTrees`, whichever drafters take part.
        """
        parts, wrong, reasons = list[Part](), list[tuple[list[int] | None, torch.Tensor]](), dict[int, str]()
        only_reads = round.plan.tree.num_nodes == 1
        for name, rows in _grouped(seats).items():
            if only_reads and not self.by_name[name].caches:
                continue
            for part, bad in _asked(self.by_name[name], rows, partial(self._ask, name, round, len(seats)), reasons):
                parts.append(part)
                at = range(len(seats)) if part.rows is None else part.rows
                reasons |= {at[row]: reason for row, reason in part.drafted.faults.items()}
                wrong += [] if bad is None else [(part.rows, bad)]
        drafts = self._agreed(*self._merged(round, parts, by_row))
        bad = self._wrong(round, wrong, reasons)
        return Proposed(*drafts, parts, bad, reasons, self._undrafted(seats, bad))

    def rewind(self, parts: list[Part], outcome: Outcome) -> tuple[Pending, list[int], dict[int, str]]:
        """What each row's drafter reads next: the newest of `outcome.pending`; the pending token of rows without one.

        Also the rows whose drafter is at fault, and why.
        """
        if len(parts) == 1 and parts[0].rows is None and not parts[0].drafter.needs.checks:
            return self._rewound(parts[0], outcome), [], {}
        count, reasons = len(outcome.node), dict[int, str]()
        pending = outcome.pending.newest(torch.ones_like(outcome.pending.counts), 1)
        for part in parts:
            rows = list(range(count)) if part.rows is None else part.rows
            for some, left in _asked(part.drafter, rows, partial(self._rewound_rows, part, outcome), reasons):
                pending = left if len(some) == count else pending.with_rows(some, left)
        return pending, sorted(reasons), reasons

    def leave(self, name: str | None, key: int) -> None:
        """As of `Drafter`. What a user's raises is a warning."""
        if name is None:
            return
        try:
            self.by_name[name].leave(key)
        except Exception as error:  # whatever a user's code raises
            warnings.warn(f"drafter {name}: leave: {one_line(error)}", stacklevel=2)

    def _prefill(
        self,
        name: str,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
        rows: list[int],
    ) -> None:
        """Have a drafter prefill these rows."""
        if len(rows) < len(tokens):
            index = to_device(rows, tokens.device, torch.long)
            prefix, tokens, positions, hidden = prefix.rows(rows), tokens[index], positions[index], hidden[index]
            before = None if before is None else before[index]
        before = None if before is None else self._states(name, before)
        own = [counts[row] for row in rows]
        self.by_name[name].prefill(prefix, tokens, positions, self._states(name, hidden), before, own)

    def _ask(self, name: str, round: DraftRound, count: int, rows: list[int]) -> tuple[Part, torch.Tensor | None]:
        """Have a drafter propose for these rows of `count`. Also which were wrong, bool; None where it is not
        checked."""
        drafter, some = self.by_name[name], None if len(rows) == count else rows
        own = self._round_of(name, round, some)
        drafted, wrong = drafter.propose(own), None
        if drafter.needs.checks:
            drafted, wrong = checked_drafts(drafter, drafted, own)
        return Part(drafter, some, own, drafted), wrong

    def _round_of(self, name: str, round: DraftRound, rows: list[int] | None) -> DraftRound:
        """A drafter's part of a round."""
        own = round if rows is None else round.rows(rows)
        if len(self.by_name) == 1:
            return own
        plan, guidance = round.plan.of(name), own.choice.guidance
        pending = replace(own.pending, hidden=self._states(name, own.pending.hidden))
        assert isinstance(guidance, Guidance | None)
        masks = None if guidance is None else guidance.of(range(len(pending.counts)), plan.tree)
        return replace(own, plan=plan, pending=pending, choice=Choice(guidance=masks))

    def _merged(
        self, round: DraftRound, parts: list[Part], by_row: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, AnyTree]:
        """Tokens, q and tree of all rows. Rows without a part repeat the pending token, in a tree of the root alone
        where trees differ by row."""
        trees = [tree_of(part) for part in parts]
        if len(parts) == 1 and parts[0].rows is None:
            is_free = self._ranks.group is None and not (by_row and isinstance(trees[0], Tree))
            if is_free or not self.varies:
                return parts[0].drafted.tokens, parts[0].drafted.q, trees[0]
        last = round.pending.last
        if not self.varies:
            tree = trees[0] if trees else round.plan.tree
            assert isinstance(tree, Tree)
            tokens, q = last.repeat(1, tree.num_nodes), merged_q(parts, len(last))
            for part in parts:
                tokens[index_of(part.rows, last.device)] = part.drafted.tokens
            return tokens, q, tree
        if self._ranks.group is None and all(tree.is_chain for tree in trees):  # ranks' text drafters may differ
            return chains(last, parts, trees)
        most = round.plan.tree
        width = most.num_nodes if self._ranks.group is not None else max([1, *(tree.num_nodes for tree in trees)])
        tokens, parents = last.repeat(1, width), last.new_zeros(len(last), width)
        real = torch.zeros_like(parents, dtype=torch.bool)
        real[:, 0] = True
        for part, tree in zip(parts, trees, strict=True):
            place = (index_of(part.rows, last.device), slice(tree.num_nodes))
            tokens[place] = part.drafted.tokens
            parents[place] = tree.parents if isinstance(tree, RowTrees) else tree.parent
            real[place] = tree.real if isinstance(tree, RowTrees) else True
        return tokens, None, RowTrees(parents, real, most.max_depth)

    def _wrong(
        self, round: DraftRound, found: list[tuple[list[int] | None, torch.Tensor]], reasons: dict[int, str]
    ) -> torch.Tensor | None:
        """bool [A], see `Proposed`. `found`: by part."""
        if not found and not reasons:
            return None
        wrong = torch.zeros_like(round.pending.counts, dtype=torch.bool)
        for rows, each in found:
            wrong[index_of(rows, wrong.device)] = each
        if reasons:
            wrong[index_of(list(reasons), wrong.device)] = True
        return wrong

    def _undrafted(self, seats: Seats, wrong: torch.Tensor | None) -> torch.Tensor | None:
        """bool [A], see `Proposed`: rank 0's, on every rank. `wrong`: there on all ranks, or on none."""
        if wrong is None:
            return to_device([name is None for name in seats], self._ranks.device) if None in seats else None
        undrafted = wrong | to_device([name is None for name in seats], wrong.device)
        return self._ranks.agreed(undrafted.long()).bool()

    def _rewound_rows(self, part: Part, outcome: Outcome, rows: list[int]) -> tuple[list[int], Pending]:
        """These rows, and what the part's drafter returns of them."""
        is_whole = len(rows) == len(part.round.pending.counts)
        return rows, self._rewound(part if is_whole else part.of(rows), outcome)

    def _rewound(self, part: Part, outcome: Outcome) -> Pending:
        """What a part's drafter returns of its rows."""
        tree, own = tree_of(part), outcome
        if part.rows is not None:
            index = to_device(part.rows, outcome.node.device, torch.long)
            logits = None if outcome.logits is None else outcome.logits[index]
            own = Outcome(tree, outcome.node[index], outcome.pending.rows(index), outcome.hidden[index], logits)
        pending = own.pending
        if len(self.by_name) > 1:
            name = next(name for name, drafter in self.by_name.items() if drafter is part.drafter)
            mine = pending
            if part.drafter.needs.layers != self.layers:
                mine = replace(pending, hidden=self._states(name, pending.hidden))
            own = replace(own, tree=tree, pending=mine, hidden=self._states(name, own.hidden))
        left = part.drafter.rewind(part.round, part.drafted, own)
        if part.drafter.needs.checks:
            return checked_pending(part.drafter, left, pending)
        if own.pending is pending:
            return left
        return pending.newest(left.counts, left.tokens.shape[1])  # with the states of all

    def _states(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """Of the states [..., S] those that a drafter asked for, in its order."""
        wanted = self.by_name[name].needs.layers
        if wanted == self.layers:
            return hidden
        parts = hidden.split(self._width, dim=-1)
        return torch.cat([parts[0], *(parts[1 + self.layers.index(layer)] for layer in wanted)], dim=-1)

    def _agreed_reasons(self, reasons: dict[int, str], seats: Seats) -> dict[int, str]:
        """Rank 0's rows at fault, on every rank: requests must have the same drafters everywhere."""
        if self._ranks.group is None or not any(self.by_name[name].needs.checks for name in _grouped(seats)):
            return reasons
        at_fault = to_device([row in reasons for row in range(len(seats))], self._ranks.device, torch.long)
        rows = [row for row, is_wrong in enumerate(self._ranks.agreed(at_fault).tolist()) if is_wrong]
        return {row: reasons.get(row, "it raised on the first rank") for row in rows}

    def _agreed(
        self, tokens: torch.Tensor, q: torch.Tensor | None, tree: AnyTree
    ) -> tuple[torch.Tensor, torch.Tensor | None, AnyTree]:
        """Rank 0's drafts, on every rank: they may differ by rounding, and all must verify the same."""
        agreed = self._ranks.agreed
        if self._ranks.group is not None and isinstance(tree, RowTrees):
            tree = RowTrees(agreed(tree.parents), agreed(tree.real.long()).bool(), tree.max_depth)
        return agreed(tokens), None if q is None else agreed(q), tree


def _asked(drafter: Drafter, rows: list[int], ask: Callable[[list[int]], R], reasons: dict[int, str]) -> list[R]:
    """What asking a drafter for these rows gives. Where one that is checked raises, each half of the rows is asked for
    again, until those at fault are alone; `reasons` then has why, by row."""
    if not drafter.needs.checks:
        return [ask(rows)]
    try:
        return [ask(rows)]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a user's code raises
        if len(rows) == 1:
            reasons[rows[0]] = one_line(error)
            return []
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return [each for half in halves for each in _asked(drafter, half, ask, reasons)]


def _check_grows(drafter: Drafter, plan: TreePlan) -> None:
    """Raise UserError for a dynamic tree of a drafter that has none."""
    grows, name = drafter.needs.grows or not isinstance(plan.tree, DynamicTree), type(drafter).__name__
    check(grows, f"tree=dynamic: {name} has no probabilities by which a tree could grow; use chain3, say")


def _plan_of(drafter: Drafter, plan: TreePlan) -> TreePlan:
    """A drafter's own plan in place of the engine's."""
    needs, tree = drafter.needs, plan.tree
    if needs.tree is not None:
        tree = needs.tree.to(plan.device)
    if needs.by_row and isinstance(tree, Tree):
        return TreePlan(OpenTree(tree.num_nodes, tree.num_nodes - 1))
    if needs.tree is not None:
        return TreePlan(tree)
    name = type(drafter).__name__
    if isinstance(tree, DynamicTree):
        _check_grows(drafter, plan)
        return plan
    check(needs.by_row or isinstance(tree, Tree), f"tree: {name} proposes trees that are the same for all rows only")
    return plan


def _grouped(seats: Seats) -> dict[str, list[int]]:
    """The rows of each drafter."""
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(seats):
        if name is not None:
            groups.setdefault(name, []).append(row)
    return groups
