"""Chooses each round's tree by what it is expected to bring: tokens over time, no speculation among the choices.

Tokens by the acceptance of each request and of all (acceptance.py), time by a cost model (round_costs.py). A choice
stands unless another is clearly better. Where drafts do not pay, they are tried again, ever less often, and new
requests may have no drafters (opening.py). DESIGN 3.5.

Knows nothing of tensors or of how trees are drafted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from eagle_train.inference.decode.acceptance import Acceptance
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.opening import Opening, ReadSeconds
from eagle_train.inference.decode.round_costs import RoundCosts
from eagle_train.inference.drafters.drafter import TreePlan

_CLEARLY_WORSE = 0.97  # of plain decoding's tokens a second: drafts are on their way out
_BETTER = 1.03  # a change takes time too
_AS_GOOD = 0.97  # of the best drafts' tokens a second: the shallowest of those are taken
_FIRST_RETRY, _LAST_RETRY = 128, 2048  # plain rounds before drafts are tried again
_PLAIN_FIRST, _PLAIN_EVERY = 24, 512  # rounds after which some are plain, so that their time is known, and known again
_EVERY = 4  # rounds after which a choice is thought over, or earlier with other rows: thinking takes time
_SETTLED = 16  # the same while nothing changes
_TRY, _LONGEST_TRIAL = _EVERY, 32  # rounds of a trial, and of one that goes well
_PROBE_FIRST, _PROBE_EVERY = 16, 256  # rounds after which a plan that may be the best is timed; between: doubled
_PROBE = _EVERY  # rounds that it has
_MAY = 2.0  # standard deviations of a plan's time, by the current one's: so far may it be off
_CLOSES = 48  # plain rounds in a row, after which requests lose their drafters
_OF_REQUEST, _OF_ALL = 96, 600  # rounds that acceptance remembers
_FADES, _RISES = 0.99, 1.05  # what hope is multiplied by in a round
_KNOWN = 3  # rounds after which a request's acceptance is known well enough to be compared


class Row(Protocol):
    """A request that decodes."""

    drafter: str | None
    acceptance: Acceptance | None


class Told(NamedTuple):
    """What a round brought a row: how deep its drafts were, and how many of them were accepted."""

    row: Row
    depth: int
    accepted: int


class Adaptive:
    """The choice for an engine, with what it learns. Ranks of one target choose the same, as their costs agree."""

    def __init__(self, dispatcher: Dispatcher, plain: TreePlan, costs: RoundCosts, read: ReadSeconds):
        """`plain`: the plan without drafts. `read`: what a drafter takes to read a prompt."""
        self._dispatcher, self.plain, self._costs = dispatcher, plain, costs
        self._all, self.opening = Acceptance(_OF_ALL), Opening(self._token_seconds, read)
        self._variance = 0.0  # of acceptance at depth 1, over requests
        self._hope = 1.0  # how far new requests are believed to be good ones
        self._current = self._next = plain  # _current: the plan in use, but for those that are only timed
        self._trial, self._retry_after = 0, _FIRST_RETRY  # _trial: rounds of it that are left
        self._is_trial = False  # whether the last round was one of a trial
        self._tried = self._gained = 0  # in its rounds: tokens of plain decoding, and how many more there were
        self._idle = _FIRST_RETRY  # rounds since the last one with drafts: the first are a trial
        self._unpaid = 0  # rounds since drafts were last expected to pay
        self._pays = True  # or nearly
        self._chosen = self._thought = 0  # _thought: when the choice was last thought over
        self._considered: tuple[int, Row | None] = 0, None  # rows of that time, and the one that came last
        self._again = _EVERY  # rounds until it is thought over again
        self._told: list[tuple[list[Told], bool]] = []  # what rounds brought since, and whether they were of a trial
        self._probed, self._probe, self._probe_at = plain, 0, _PROBE_FIRST  # _probe: rounds that are left of timing it

    @property
    def is_closed(self) -> bool:
        """Whether drafts have not paid for long."""
        return self._unpaid >= _CLOSES

    def opens(self, drafter: str, most: int, rows: int) -> bool:
        """Whether a new request is to have its drafter, which costs its part of the prefill. `most`: tokens that it may
        write; `rows`: requests that decode with it, itself included."""
        return self.opening.opens(drafter, most, rows, self._is_retry_due)

    def _token_seconds(self, rows: int) -> tuple[float, float]:
        """Seconds that a token takes the engine without drafts, and if all rows have them, by what all requests
        accepted, and by the hope that a new one is a good one."""
        self._learn()
        plans, new = self._plans(rows), [self.new()]
        tokens = self._promised(plans, [self._all] * rows, rows)
        drafted = [
            self._costs.seconds(plan, rows) / (tokens[depth] + self._hope * self._hoped(depth, new))
            for plan in plans
            for depth in [plan.tree.max_depth]
        ]
        plain = self._costs.seconds(self.plain, rows) / rows
        return plain, min(drafted, default=plain)

    def new(self) -> Acceptance:
        """What a new request is believed to accept."""
        return Acceptance(_OF_REQUEST, self._all)

    def choose(self, rows: Sequence[Row]) -> TreePlan:
        """The plan of the next round."""
        if self._is_due(rows):
            self._think(rows)
        self._chosen += 1
        self.opening.decoded(len(rows))
        if _PLAIN_FIRST <= self._chosen % _PLAIN_EVERY < _PLAIN_FIRST + _PROBE:
            return self.plain
        return self._taken(self._next)

    def _is_due(self, rows: Sequence[Row]) -> bool:
        return self._chosen - self._thought >= self._again or self._are_others(rows)

    def _are_others(self, rows: Sequence[Row]) -> bool:
        """Whether requests have come or gone since the choice was thought over. New ones are the last rows."""
        number, newest = self._considered
        return len(rows) != number or rows[-1] is not newest

    def _think(self, rows: Sequence[Row]) -> None:
        """Find the plan of the next rounds."""
        self._learn()
        drafting = [row.acceptance for row in rows if row.drafter is not None and row.acceptance is not None]
        elapsed, self._thought = self._chosen - self._thought, self._chosen
        are_others, before = self._are_others(rows), self._next
        self._considered, self._next = (len(rows), rows[-1]), self.plain
        if drafting:
            plans = [self.plain, *self._plans(len(rows))]
            for each in drafting:
                self._note_spread(each, elapsed)
            self._next = plans[self._best(plans, drafting, len(rows), elapsed)]
        changes = are_others or self._next is not before or self._trial > 0 or self._probe > 0
        self._again = _EVERY if changes else min(2 * self._again, _SETTLED)

    def _learn(self) -> None:
        """Take in what rounds brought. Several at once take less time than each at its end, between rounds, for which
        the processor's caches are cold."""
        for told, is_trial in self._told:
            if is_trial:
                self._tried += len(told)
                self._gained += sum(each.accepted for each in told if each.depth > 0)  # by drafts
            for row, depth, accepted in told:
                if depth > 0 and row.acceptance is not None:
                    row.acceptance.add(depth, accepted)
                    self._all.add(depth, accepted)
        self._told.clear()

    def _note_spread(self, acceptance: Acceptance, rounds: int) -> None:
        """Follow how much requests differ from each other."""
        if acceptance.rounds >= _KNOWN:
            mean = self._all.rates(1)[0]
            by_chance = mean * (1 - mean) / acceptance.rounds  # of requests that are alike
            variance = (acceptance.seen - mean) ** 2 - by_chance
            self._variance += (variance - self._variance) * min(1.0, rounds / _OF_ALL)
            self._all.trust_by(self._variance)

    def _plans(self, rows: int) -> list[TreePlan]:
        """The plans with drafts that such a batch may have."""
        return [plan for plan in self._dispatcher.choices(rows) if plan.tree.max_depth > 0]

    def _promised(self, plans: Sequence[TreePlan], drafting: Sequence[Acceptance], rows: int) -> list[float]:
        """Tokens of a round of a batch, some of whose rows draft, by how deep drafts are, from 0 on.

        What counts is how long requests take. Where they differ, those that accept much leave early, so that a batch
        has more of the others than there are requests: so many more as the plan in use makes it. A row thus counts by
        how much sooner than by that plan it would end.
        """
        deepest = max((plan.tree.max_depth for plan in plans), default=0)
        used = min(self._current.tree.max_depth, deepest)
        alone = float(rows - len(drafting))  # have a token each
        totals = [alone] * (deepest + 1)
        tokens = alone
        for each in drafting:
            by_depth = self._kept(each.shares(deepest))
            tokens += by_depth[used]
            for depth, own in enumerate(by_depth):
                totals[depth] += by_depth[used] / own
        return [tokens * rows / total for total in totals]

    def _kept(self, shares: Sequence[float]) -> list[float]:
        """Tokens that a round brings a row, by how deep drafts are, from 0 on, but for those behind the answer's end:
        (E[n^2] / E[n] - 1) / 2 of a last round of n tokens, on average over where it ends (renewal theory)."""
        length = self.opening.lengths.answer
        tokens = squares = 1.0
        kept = [tokens]
        for depth, share in enumerate(shares, 1):
            tokens += share
            squares += (2 * depth + 1) * share
            kept.append(tokens / (1 + (squares / tokens - 1) / 2 / length))
        return kept

    def _hoped(self, depth: int, drafting: Sequence[Acceptance]) -> float:
        """Tokens that such drafts bring besides, if new requests are good ones. Where requests differ, one may be,
        and else the end of a good one could end all drafting."""
        if depth == 0 or self._variance <= 0:
            return 0.0
        first, *others = self._all.shares(depth)
        relative = 1 + sum(others) / max(first, 1e-3)
        return math.sqrt(self._variance) * relative * sum(each.novelty for each in drafting)

    def observe(self, plan: TreePlan, told: list[Told], rows: int, seconds: float | None) -> bool:
        """A round has ended; `told`: of no use where `plan` is the plain one; `seconds`: None where it is not known how
        long it took. Returns whether its rows lose their drafters, as they do not pay."""
        has_drafts = plan is not self.plain
        if seconds is None:
            self._costs.unsettle()
        else:
            in_part = has_drafts and any(each.row.drafter is None for each in told)
            self._costs.observe(plan, rows, seconds, in_part)
        if has_drafts:
            self._told.append((told, self._is_trial))
        is_trial = self._is_trial or self._trial > 0 or self._is_retry_due  # those that wait for it keep theirs
        return self.is_closed and self._unpaid % _CLOSES == 0 and not is_trial

    def _best(self, plans: list[TreePlan], drafting: Sequence[Acceptance], rows: int, elapsed: int) -> int:
        """The place of the plan with the most tokens a second; the current one's where none is clearly better.
        `elapsed`: rounds since this was asked last."""
        tokens = self._promised(plans, drafting, rows)
        in_part = len(drafting) < rows
        rates = [tokens[plan.tree.max_depth] / self._seconds(plan, rows, in_part) for plan in plans]
        if len(plans) > 1:  # hope says whether to draft, and not how deep
            first = max(range(1, len(plans)), key=rates.__getitem__)
            depth = plans[first].tree.max_depth
            lift = 1 + self._hope * self._hoped(depth, drafting) / tokens[depth]
            if lift * rates[first] > rates[0]:
                # It fades in rounds that it alone has drafts for, and comes back where drafts pay without it.
                self._hope = min(1.0, self._hope * (_RISES if rates[first] > rates[0] else _FADES) ** elapsed)
            rates[1:] = [lift * rate for rate in rates[1:]]
        best = self._most(plans, rates)
        if (probed := self._tried_out(plans, rates, rows, in_part)) is not None:
            return probed
        self._pays = max(rates[1:], default=0.0) > _CLEARLY_WORSE * rates[0]
        if self._tries(len(drafting), rows) and len(plans) > 1:
            return best or max(range(1, len(plans)), key=rates.__getitem__)
        stays = plans.index(self._current) if self._current in plans else best
        return best if rates[best] > _BETTER * rates[stays] else stays

    def _most(self, plans: list[TreePlan], rates: list[float]) -> int:
        """The place of the plan with the highest rate, and of drafts that are as good as these the shallowest: of many
        estimates the highest is too high, and deep drafts leave a batch's last requests more rounds alone."""
        most = max(rates)
        as_good = [place for place in range(1, len(plans)) if rates[place] >= _AS_GOOD * most]
        return min(as_good, key=lambda place: plans[place].tree.max_depth) if rates[0] < most else 0

    def _seconds(self, plan: TreePlan, rows: int, in_part: bool) -> float:
        """What a round is expected to take. `in_part`: whether some of the rows alone have drafters."""
        return self._costs.seconds(plan, rows, in_part and plan is not self.plain)

    def _tried_out(self, plans: list[TreePlan], rates: list[float], rows: int, in_part: bool) -> int | None:
        """The place of a plan that is to be timed now: now and then, for a few rounds, the most promising one as far
        as times may be off; most of the time None."""
        others = [place for place, plan in enumerate(plans) if plan is not self._current]
        if others and self._probe == 0 and self._chosen >= self._probe_at and self._trial == 0:
            self._probe_at = self._chosen + min(self._chosen, _PROBE_EVERY)
            kinds = [(plan, in_part and plan is not self.plain) for plan in plans]
            current = (self._current, in_part and self._current is not self.plain)
            doubts = [self._costs.doubt(kind, current, rows) for kind in kinds]
            most = [rate * math.exp(_MAY * doubt) for rate, doubt in zip(rates, doubts, strict=True)]
            place = max(others, key=most.__getitem__)
            self._probed, self._probe = plans[place], _PROBE if most[place] >= max(rates) else 0
        return plans.index(self._probed) if self._probe > 0 and self._probed in plans else None

    @property
    def _is_retry_due(self) -> bool:
        return self._idle >= self._retry_after

    def _tries(self, drafting: int, rows: int) -> bool:
        """Whether drafts are tried though they did not seem to pay. A trial that pays goes on, until they seem to."""
        if self._trial == 0:
            if self._is_trial and self._went_well(rows, drafting < rows):
                self._trial = _TRY
            elif self._is_retry_due and 2 * drafting >= rows:  # one that drafts among many would not pay
                self._trial, self._retry_after = _TRY, min(2 * self._retry_after, _LAST_RETRY)
                self._tried = self._gained = 0
                self._all.doubt()
        return self._trial > 0

    def _went_well(self, rows: int, in_part: bool) -> bool:
        """Whether the trial so far paid, and is not a long one."""
        costs = self._seconds(self._current, rows, in_part) / self._costs.seconds(self.plain, rows)
        return self._tried < _LONGEST_TRIAL * rows and self._tried + self._gained > costs * self._tried

    def _taken(self, plan: TreePlan) -> TreePlan:
        """Notes the choice."""
        self._idle = 0 if plan is not self.plain else self._idle + 1
        self._unpaid = 0 if self._pays else self._unpaid + 1
        if self._unpaid == 0:
            self._retry_after = _FIRST_RETRY
        if self._probe > 0:
            self._probe -= 1
            return plan
        self._is_trial, self._trial = self._trial > 0, max(0, self._trial - 1)
        self._current = plan
        return plan
