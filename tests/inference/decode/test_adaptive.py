"""Which tree a round gets where it goes by acceptance and cost: a simulated engine, against the best fixed choice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from eagle_train.errors import UserError
from eagle_train.inference import Eagle, Engine, SamplingParams
from eagle_train.inference.decode.acceptance import Acceptance
from eagle_train.inference.decode.adaptive import Adaptive, Told
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.named_trees import AutoTree, load_tree
from eagle_train.inference.decode.round_costs import RoundCosts
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.drafter import Needs, TreePlan
from eagle_train.inference.requests.prefiller import LocalPrefiller
from eagle_train.inference.runner import Runner
from tests.support.graph_recorder import recorded
from tests.support.inside import inside, runner_of
from tests.support.reference_answers import GREEDY, PROMPTS, answers, cut, token_ids
from tests.support.tiny import shared_target, tiny_draft

PLAIN = TreePlan(chain(0))
LENGTHS = (1, 2, 3, 5, 7)
ROUNDS = 8_000


def no_reading(drafter: str, tokens: float) -> float:
    """Prompts cost a drafter nothing."""
    return 0.0


@dataclass
class Machine:
    """A round of B rows in trees of N nodes and depth D takes 10 + node * B * N + draft * D (ms), give or take."""

    node: float
    draft: float
    growth: float = 0.0  # of the time, over the run: contexts grow
    jitter: float = 0.1
    skew: dict[int, float] = field(default_factory=dict)  # by depth: how far off times at the start are
    others: float = 0.0  # what other programs add to all times, while they run
    random: Random = field(default_factory=lambda: Random(0))
    are_there: bool = False

    def mean(self, plan: TreePlan, rows: int) -> float:
        tree = plan.tree
        return 10 + self.node * rows * tree.num_nodes + self.draft * tree.max_depth

    def once(self, plan: TreePlan, rows: int, done: float = 0.0) -> float:
        slow = 3.0 if self.random.random() < 0.01 else 1.0  # something else ran
        self.are_there ^= self.random.random() < 0.01  # they come and go, every hundred rounds
        slow *= 1 + self.others * self.are_there
        return self.mean(plan, rows) * (1 + self.growth * done) * slow * (1 + self.jitter * self.random.random())

    def at_the_start(self, plan: TreePlan, rows: int) -> float:
        return self.once(plan, rows) * self.skew.get(plan.tree.max_depth, 1.0)


@dataclass(eq=False)
class Request:
    alpha: float
    drafter: str | None = "one"
    acceptance: Acceptance | None = None
    left: int = 200


def accepted(alpha: float, depth: int, random: Random) -> int:
    count = 0
    while count < depth and random.random() < alpha:
        count += 1
    return count


def rate(machine: Machine, alphas: list[float], depth: int) -> float:
    """Tokens a ms of a batch of such rows with chains of this length."""
    tokens = sum(sum(alpha**d for d in range(depth + 1)) for alpha in alphas)
    return tokens / machine.mean(TreePlan(chain(depth)), len(alphas))


def run(
    machine: Machine,
    alphas: list[float],
    lengths: tuple[int, ...] = LENGTHS,
    rounds: int = ROUNDS,
    following: Callable[[float], float] = lambda alpha: alpha,
) -> float:
    """Tokens a ms (of mean times) that the choice brings, over the best fixed one's. Requests end after 200 tokens, and
    others follow, like them or as `following` says."""
    dispatcher = Dispatcher(AutoTree(lengths))
    costs = RoundCosts([PLAIN, *dispatcher.choices(1)], [1, 2, 4, 8, 16], machine.at_the_start)
    adaptive = Adaptive(dispatcher, PLAIN, costs, no_reading)

    def arrives(alpha: float) -> Request:
        return Request(alpha, "one" if adaptive.opens("one", 200, len(alphas)) else None, adaptive.new())

    rows, tokens, took = [arrives(alpha) for alpha in alphas], 0, 0.0
    for place in range(rounds):
        plan = adaptive.choose(rows)
        depth = plan.tree.max_depth
        told = []
        for row in rows:
            drafts = depth if row.drafter else 0
            told.append(Told(row, drafts, accepted(row.alpha, drafts, machine.random)))
            row.left -= 1 + told[-1].accepted
            tokens += 1 + told[-1].accepted
        took += machine.mean(plan, len(rows))
        if adaptive.observe(plan, told, len(rows), machine.once(plan, len(rows), place / rounds)):
            for row in rows:
                row.drafter = None
        ended = [row for row in rows if row.left <= 0]
        rows = [row for row in rows if row.left > 0] + [arrives(following(row.alpha)) for row in ended]
    return tokens / took / max(rate(machine, alphas, depth) for depth in (0, *lengths))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("machine", [(0.02, 0.3), (0.5, 0.3), (0.02, 3.0), (2.0, 0.1)], ids=str)
def test_it_is_as_good_as_the_best_length(rows, alpha, machine):
    """Within 3 %, while contexts grow, and whatever the machine."""
    assert run(Machine(*machine, growth=0.5), [alpha] * rows) > 0.97


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("skew", [{1: 1.2, 2: 1.2}, {3: 1.2}, {5: 0.8, 7: 0.8}], ids=str)
def test_times_that_were_wrong_at_the_start_are_found_out(skew, seed):
    assert run(Machine(0.1, 1.5, skew=skew, random=Random(seed)), [0.7], rounds=20_000) > 0.97


@pytest.mark.parametrize("skew", [{5: 0.7, 7: 0.7}, {0: 0.6}, {1: 1.4}], ids=str)
def test_times_that_were_far_off_at_the_start_are_soon_found_out(skew):
    """Within some answers' rounds: something else ran while these plans were timed."""
    assert run(Machine(0.15, 4.6, skew=skew), [0.8] * 8, rounds=700) > 0.95


@pytest.mark.parametrize("machine", [(0.02, 0.3), (0.5, 1.0), (2.0, 0.1)], ids=str)
@pytest.mark.parametrize("alphas", [[0.0] * 8, [0.9, 0.0] * 4], ids=["noise", "half"])
def test_a_gate_costs_at_most_2_percent(alphas, machine):
    """Against the better of a chain of three and no drafts, for noise, and for drafts that are right for half."""
    assert run(Machine(*machine), alphas, lengths=(3,), rounds=12_000) > 0.98


@pytest.mark.parametrize("seed", [0, 1])
def test_where_requests_differ_each_soon_has_what_is_best_for_it(seed):
    """Every second one has good drafts: they bring more than no drafts for all, which is the best fixed choice."""
    machine = Machine(0.3, 2.8, jitter=0.05, random=Random(seed))
    of_good_ones = run(machine, [0.8], lengths=(3,), following=lambda alpha: 0.8 - alpha)
    plain = rate(machine, [0.8], 0) / rate(machine, [0.8], 3)
    assert of_good_ones > 1.15 * plain


@pytest.mark.parametrize("rows", [1, 8])
def test_how_much_requests_differ_is_found_out(monkeypatch, rows):
    """What few drafts of each say by chance is left out."""
    found = []
    for alphas in ((0.6, 0.6), (0.8, 0.0)):
        seen, trust_by = list[float](), Acceptance.trust_by
        monkeypatch.setattr(
            Acceptance, "trust_by", lambda self, x, own=trust_by, seen=seen: seen.append(x) or own(self, x)
        )
        both = dict(zip(alphas, reversed(alphas), strict=True))
        run(Machine(0.02, 0.3), [alphas[0]] * rows, lengths=(3,), rounds=4_000, following=both.__getitem__)
        monkeypatch.undo()
        found.append(sum(seen[len(seen) // 2 :]) / len(seen[len(seen) // 2 :]))
    assert found[0] == pytest.approx(0, abs=0.005)
    assert found[1] > 0.1


def test_what_becomes_better_is_found_and_what_becomes_worse_is_left():
    machine = Machine(0.5, 1.0)
    dispatcher = Dispatcher("chain3")
    costs = RoundCosts([PLAIN, *dispatcher.choices(1)], [1], machine.once)
    adaptive, row, drafted = Adaptive(dispatcher, PLAIN, costs, no_reading), Request(0.0), []
    row.acceptance = adaptive.new()
    for alpha, rounds in ((0.0, 3000), (0.95, 6000), (0.0, 3000)):
        for _ in range(rounds):
            plan = adaptive.choose([row])
            depth = plan.tree.max_depth
            adaptive.observe(plan, [Told(row, depth, accepted(alpha, depth, machine.random))], 1, machine.once(plan, 1))
            drafted.append(depth > 0)
    share = [sum(drafted[start:end]) / (end - start) for start, end in ((0, 3000), (6000, 9000), (9500, 12000))]
    assert share[0] < 0.02
    assert share[1] > 0.98
    assert share[2] < 0.02


def trial_of(hits: int, beside: int = 0) -> list[int]:
    """Depths of 200 rounds after drafts were long not accepted. When they are tried again, `hits` of four are.
    `beside`: what a request brings beside its own token that lost its drafter while the round was on its way."""
    dispatcher, row = Dispatcher("chain1"), Request(0.0)
    plans = [PLAIN, *dispatcher.choices(1)]
    costs = RoundCosts(plans, [1], lambda plan, rows: 1.0 + 0.6 * plan.tree.max_depth)
    adaptive, depths = Adaptive(dispatcher, PLAIN, costs, no_reading), []
    for _ in range(40):  # long known not to be accepted
        adaptive._all.add(1, 0)
    row.acceptance = adaptive.new()
    adaptive._idle = 0
    for _ in range(200):
        plan = adaptive.choose([row])
        depth = plan.tree.max_depth
        depths.append(depth)
        drafted = sum(depths)
        told = [Told(row, depth, int(depth > 0 and drafted % 4 < hits))]
        told += [Told(Request(0.0, None), 0, beside)] if beside else []
        adaptive.observe(plan, told, 1, 1.0 + 0.6 * depth)
    return depths


def test_a_trial_that_goes_well_goes_on():
    """Of 4 rounds; one that is worth its time has more, until drafts are believed to pay."""
    assert sum(trial_of(0)) == sum(trial_of(0, beside=2)) == 4
    assert sum(trial_of(3)) > 40


def in_part(times: dict[int, float], taken: dict[int, float], rounds: int) -> tuple[RoundCosts, list[int]]:
    """Rounds of two rows, one of which has drafts, of which 3 of 10 are accepted. `times`: at the start, by the depth
    of a chain, and what they take then. Returns the rounds' depths too."""
    dispatcher, random, depths = Dispatcher("chain1"), Random(0), []
    costs = RoundCosts([PLAIN, *dispatcher.choices(2)], [2], lambda plan, rows: times[plan.tree.max_depth])
    adaptive = Adaptive(dispatcher, PLAIN, costs, no_reading)
    rows = [Request(0.3, name, adaptive.new()) for name in ("one", None)]
    for _ in range(rounds):
        plan = adaptive.choose(rows)
        depths.append(plan.tree.max_depth)
        told = [Told(rows[0], depths[-1], accepted(0.3, depths[-1], random)), Told(rows[1], 0, 0)]
        adaptive.observe(plan, told, 2, taken[depths[-1]])
    return costs, depths


def test_where_some_rows_alone_draft_a_wrong_time_is_found_out():
    """Chains were thought to cost nearly nothing, and take as long again as a plain round."""
    _, depths = in_part({0: 1.0, 1: 1.05}, {0: 1.0, 1: 1.9}, 3000)
    assert sum(depths[:8]) > 0
    assert sum(depths[1500:]) < 100


def test_rounds_in_which_some_rows_alone_draft_say_little_of_others():
    """They take less."""
    costs, depths = in_part({0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.02}, 6000)
    chain1 = TreePlan(chain(1))
    assert sum(depths[-100:]) > 50
    assert costs.seconds(chain1, 2, in_part=True) / costs.seconds(PLAIN, 2) == pytest.approx(1.02, rel=0.05)
    assert costs.seconds(chain1, 2) / costs.seconds(PLAIN, 2) > 1.8


@pytest.mark.parametrize(("rows", "answers"), [(8, 500), (4, 200)])
def test_drafts_are_tried_again_where_requests_are_replaced_one_by_one(rows, answers):
    """Those that are to try them keep their drafters until enough are there."""
    machine, dispatcher, alpha = Machine(0.1, 0.3), Dispatcher("chain3"), 0.0
    costs = RoundCosts([PLAIN, *dispatcher.choices(1)], [1, 2, 4, 8], machine.at_the_start)
    adaptive, drafted = Adaptive(dispatcher, PLAIN, costs, no_reading), []

    def arrives(left: int = answers) -> Request:
        return Request(alpha, "one" if adaptive.opens("one", answers, rows) else None, adaptive.new(), left)

    going = [arrives(answers * (place + 1) // rows) for place in range(rows)]
    for place in range(10_000):
        alpha = 0.95 if place >= 3000 else 0.0
        plan = adaptive.choose(going)
        drafted.append(plan.tree.max_depth)
        told = []
        for row in going:
            depth = drafted[-1] if row.drafter else 0
            told.append(Told(row, depth, accepted(alpha, depth, machine.random)))
            row.left -= 1 + told[-1].accepted
        if adaptive.observe(plan, told, rows, machine.once(plan, rows)):
            for row in going:
                row.drafter = None
        going = [row if row.left > 0 else arrives() for row in going]
    assert sum(map(bool, drafted[1000:3000])) < 100
    assert sum(map(bool, drafted[9000:])) > 900


def test_that_all_becomes_slower_is_not_held_against_the_plan_in_use():
    """Other programs come and add a third to all times, while rounds of one plan alone are seen."""
    plans = [PLAIN, TreePlan(chain(3))]
    costs = RoundCosts(plans, [1], lambda plan, rows: 1.0 + plan.tree.max_depth)
    for place in range(80):
        costs.observe(plans[1], 1, 4.0 * (1.0 if place < 40 else 1.35))
    assert costs.seconds(plans[1], 1) == pytest.approx(4.0 * 1.35, rel=0.02)
    assert costs.seconds(PLAIN, 1) == pytest.approx(1.35, rel=0.04)


@pytest.mark.parametrize("others", [0.0, 0.35])
def test_choices_are_good_ones_while_other_programs_come_and_go(others):
    """On average over machines and drafts, and none is a bad one."""
    cases = [((0.02, 3.0), 1, 0.6), ((1.2, 0.3), 8, 0.8), ((0.5, 2.0), 1, 0.8), ((0.5, 0.3), 8, 0.0)]
    found = [
        run(Machine(*machine, others=others, random=Random(seed)), [alpha] * rows, rounds=2000)
        for machine, rows, alpha in cases
        for seed in range(3)
    ]
    assert sum(found) / len(found) > 0.985
    assert min(found) > 0.93


def test_the_first_round_behind_another_plans_tells_nothing_of_times():
    """It takes longer, whatever its plan: the drafter reads what was decoded without it."""
    plans = [PLAIN, TreePlan(chain(1))]
    costs = RoundCosts(plans, [1], lambda plan, rows: 1.0 + plan.tree.max_depth)
    for _ in range(50):
        for plan, rounds in zip(plans, (8, 2), strict=True):
            for place in range(rounds):
                costs.observe(plan, 1, (1.0 + plan.tree.max_depth) * (1.0 if place else 3.0))
    assert [costs.seconds(plan, 1) for plan in plans] == pytest.approx([1.0, 2.0], rel=0.01)


def test_what_was_seen_before_a_doubt_is_believed_and_what_comes_counts_for_more():
    seen = Acceptance(600)
    for _ in range(100):
        seen.add(1, 0)
    before = seen.rates(1)[0]
    seen.doubt()
    assert seen.rates(1)[0] == pytest.approx(before, abs=0.1)
    for _ in range(12):
        seen.add(1, 1)
    assert seen.rates(1)[0] > 0.25
    for _ in range(3):  # nothing new is seen: the prior does not come back
        seen.doubt()
        for _ in range(4):
            seen.add(1, 0)
    assert seen.rates(1)[0] < 0.25


def test_that_a_request_may_be_a_good_one_makes_no_draft_deeper():
    """Half of the requests accept all: chains of 1 bring most by what is known of a new one, of 2 if it is good."""
    times = {0: 1.4, 1: 1.2, 2: 1.65}
    dispatcher = Dispatcher(AutoTree((1, 2)))
    plans = [PLAIN, *dispatcher.choices(1)]
    costs = RoundCosts(plans, [1], lambda plan, rows: times[plan.tree.max_depth])
    adaptive = Adaptive(dispatcher, PLAIN, costs, no_reading)
    for number in range(200):
        row = Request(0.0, acceptance=adaptive.new())
        for _ in range(10):
            adaptive.observe(plans[2], [Told(row, 2, 2 * (number % 2))], 1, times[2])
    assert adaptive.choose([Request(0.5, acceptance=adaptive.new())]) is plans[1]


def test_a_slow_first_round_makes_no_plan_cheaper_than_the_others():
    times = {0: 1.0, 1: 2.0, 3: 4.0}
    dispatcher = Dispatcher(AutoTree((1, 3)))
    plans = [PLAIN, *dispatcher.choices(1)]
    costs = RoundCosts(plans, [1], lambda plan, rows: times[plan.tree.max_depth])
    for number in range(24):
        costs.observe(plans[1], 1, 1.1 * times[1] * (1.6 if number == 0 else 1.0))
    plain, *others = (costs.seconds(plan, 1) for plan in plans)
    assert plain == pytest.approx(1.1, rel=0.1)
    assert [each / plain for each in others] == pytest.approx([2.0, 4.0], rel=0.02)


@pytest.mark.parametrize("slower", [1.8, 2.5])
@pytest.mark.parametrize("before", [0, 40])
def test_times_that_jump_say_nothing_of_plans_by_each_other(before, slower):
    """Something else runs for a while, and is gone when the next requests come, which have another plan."""
    plans = [PLAIN, *map(TreePlan, map(chain, (1, 2)))]
    costs = RoundCosts(plans, [1], lambda plan, rows: 1.0 + plan.tree.max_depth)
    phases = [(plans[2], before, 1.0), (plans[2], 40, slower), (plans[1], 40, 1.0), (plans[1], 40, slower)]
    for plan, rounds, factor in phases:
        costs.unsettle()
        for _ in range(rounds):
            costs.observe(plan, 1, (1.0 + plan.tree.max_depth) * factor)
    expected = [slower * (1.0 + plan.tree.max_depth) for plan in plans]
    assert [costs.seconds(plan, 1) for plan in plans] == pytest.approx(expected, rel=0.04)


def test_what_slows_a_plan_at_the_start_makes_it_no_dearer_than_deeper_ones():
    """Something else ran while chains of 1 were timed."""
    plans = [PLAIN, *map(TreePlan, map(chain, (1, 2, 3)))]
    times = {0: 1.0, 1: 9.0, 2: 1.5, 3: 1.75}
    costs = RoundCosts(plans, [1], lambda plan, rows: times[plan.tree.max_depth])
    assert [costs.seconds(plan, 1) for plan in plans] == [1.0, 1.5, 1.5, 1.75]


@pytest.mark.parametrize(("answer", "depth"), [(None, 7), (1000, 7), (7, 1)])
def test_drafts_behind_the_end_of_an_answer_bring_nothing(answer, depth):
    """All are accepted. Chains of 7 bring 1.25 times the tokens a second of chains of 1, but of short answers."""
    dispatcher, times = Dispatcher(AutoTree((1, 7))), {0: 1.0, 1: 1.0, 7: 3.2}
    plans = [PLAIN, *dispatcher.choices(1)]
    adaptive = Adaptive(
        dispatcher, PLAIN, RoundCosts(plans, [1], lambda plan, _: times[plan.tree.max_depth]), no_reading
    )
    row = Request(1.0, acceptance=Acceptance(10_000))
    for _ in range(10_000):
        row.acceptance.add(7, 7)
    for _ in range(0 if answer is None else 50):
        adaptive.opening.lengths.answered(answer)
    assert adaptive.choose([row]).tree.max_depth == depth


@pytest.mark.parametrize(("better", "depth"), [(1.02, 1), (1.05, 2)])
def test_of_drafts_that_are_as_good_the_shallowest_are_taken(better, depth):
    """Chains of 2 bring `better` times the tokens a second of chains of 1, and both more than no drafts."""
    dispatcher, row = Dispatcher(AutoTree((1, 2))), Request(0.5)
    plans = [PLAIN, *dispatcher.choices(1)]
    first, both = Acceptance(100).shares(2)
    times = {0: 1.5, 1: 1 + first, 2: (1 + first + both) / better}
    costs = RoundCosts(plans, [1], lambda plan, rows: times[plan.tree.max_depth])
    adaptive = Adaptive(dispatcher, PLAIN, costs, no_reading)
    row.acceptance = adaptive.new()
    assert adaptive.choose([row]).tree.max_depth == depth


def test_what_counts_is_how_long_requests_take():
    """Chains of 2 bring 4 % more tokens a second than of 1 while a request that accepts all and one that accepts none
    are there; the first one leaves, and both took longer on average."""
    dispatcher, everyone = Dispatcher(AutoTree((1, 2))), Acceptance(600)
    plans = [PLAIN, *dispatcher.choices(2)]
    rows = [Request(alpha, acceptance=Acceptance(96, everyone)) for alpha in (1.0, 0.0)]
    for row in rows:
        for _ in range(300):
            row.acceptance.add(2, int(2 * row.alpha))
    tokens = [sum(1 + sum(row.acceptance.shares(depth)) for row in rows) for depth in (0, 1, 2)]
    times = [1.0, 1.1, 1.1 * tokens[2] / tokens[1] / 1.04]
    costs = RoundCosts(plans, [2], lambda plan, rows: times[plan.tree.max_depth])
    adaptive = Adaptive(dispatcher, PLAIN, costs, no_reading)
    assert {adaptive.choose(rows).tree.max_depth for _ in range(16)} == {1}


def test_a_choice_is_thought_over_ever_less_often_and_with_other_rows(monkeypatch):
    """After four rounds, then after eight, as long as nothing changes, and no plan is to be timed."""
    dispatcher, asked = Dispatcher(AutoTree((1, 2))), []
    costs = RoundCosts([PLAIN, *dispatcher.choices(1)], [1], Machine(0.5, 1.0).once)
    adaptive = Adaptive(dispatcher, PLAIN, costs, no_reading)
    rows = [Request(0.5, acceptance=adaptive.new()) for _ in range(4)]
    monkeypatch.setattr(dispatcher, "choices", lambda rows, own=dispatcher.choices: asked.append(rows) or own(rows))
    thinks = []
    for batch in [rows] * 16 + [rows[:3]] * 7 + [rows[1:]] * 2:
        before = len(asked)
        adaptive.choose(batch)
        thinks.append(len(asked) > before)
    assert [place for place, thought in enumerate(thinks) if thought] == [0, 4, 12, 16, 20, 23]
    assert asked == [4, 4, 4, 3, 3, 3]


@pytest.mark.parametrize("opens", [False, True])
def test_what_rounds_brought_counts_before_the_next_choice_and_before_a_request_opens(opens):
    """Though it is taken in for several rounds at once."""
    dispatcher = Dispatcher(AutoTree((1, 2)))
    costs = RoundCosts([PLAIN, *dispatcher.choices(1)], [1], Machine(0.5, 1.0).once)
    found = []
    for accepts in (0, 2):
        adaptive = Adaptive(dispatcher, PLAIN, costs, no_reading)
        row = Request(0.5, acceptance=adaptive.new())
        for _ in range(3):
            adaptive.choose([row])
            adaptive.observe(dispatcher.choices(1)[1], [Told(row, 2, accepts)] * 40, 1, None)
        assert adaptive.new().rates(1)[0] == pytest.approx(0.7, abs=0.05)  # not taken in yet
        if opens:
            found.append((adaptive.opens("one", 200, 1), adaptive.new().rates(1)[0] > 0.9))
        else:
            depths = [adaptive.choose([row]).tree.max_depth for _ in range(4)]
            found.append((depths[-1] > 0, adaptive.new().rates(1)[0] > 0.9))
    assert found == [(False, False), (True, True)]


def test_a_plan_that_is_only_timed_does_not_stay():
    """Chains of 2 bring 1 % less than chains of 1: too little for a change, in either direction."""
    dispatcher, row = Dispatcher(AutoTree((1, 2))), Request(1.0)
    plans = [PLAIN, *dispatcher.choices(1)]
    times = {0: 1.8, 1: 2.0, 2: 3.0 * 1.01}
    costs = RoundCosts(plans, [1], lambda plan, rows: times[plan.tree.max_depth])
    adaptive, depths = Adaptive(dispatcher, PLAIN, costs, no_reading), []
    row.acceptance = adaptive.new()
    for _ in range(1500):
        plan = adaptive.choose([row])
        depth = plan.tree.max_depth
        depths.append(depth)
        adaptive.observe(plan, [Told(row, depth, depth)], 1, times[depth])
    assert 0 < depths[300:].count(2) <= 4 * 10


def test_batches_whose_contexts_grow_make_no_plan_look_cheaper_than_others():
    """Each begins with short ones, and ends with fewer rows."""
    plans = [PLAIN, TreePlan(chain(3))]
    costs = RoundCosts(plans, [4, 8], lambda plan, rows: 1.0 + plan.tree.max_depth)
    for _ in range(50):
        for place in range(40):
            costs.observe(PLAIN, 8 if place < 20 else 4, 1.0 + 0.02 * place)
    assert costs.seconds(plans[1], 8) / costs.seconds(PLAIN, 8) == pytest.approx(4.0, rel=0.02)


def test_rounds_at_the_start_are_timed_as_they_come_later():
    """Behind rounds of the same plan: the first one after another plan's takes longer."""
    dispatcher, last = Dispatcher(AutoTree((1, 3))), [None]

    def seconds(plan: TreePlan, rows: int) -> float:
        changed, last[0] = plan is not last[0], plan
        return 1.0 + plan.tree.max_depth + 5.0 * changed

    plans = [PLAIN, *dispatcher.choices(1)]
    costs = RoundCosts(plans, [1], seconds)
    assert [costs.seconds(plan, 1) for plan in plans] == [1.0, 2.0, 4.0]


def test_acceptance_is_what_was_seen():
    seen = Acceptance(100)
    assert seen.shares(2) == pytest.approx([0.7, 0.49])
    for _ in range(200):
        seen.add(3, 1)
    first, second, third = seen.shares(3)
    assert first > 0.95
    assert second < 0.15
    assert third < 0.2 * second
    other = Acceptance(50, seen)
    assert other.shares(2) == pytest.approx([first, second], abs=0.01)
    for _ in range(100):
        other.add(2, 0)
    assert other.shares(1)[0] < 0.25
    assert other.shares(5) == sorted(other.shares(5), reverse=True)


def test_a_depth_that_a_request_did_not_try_is_believed_half_as_far_from_the_others_as_the_one_above():
    everyone = Acceptance(600)
    for number in range(1000):
        everyone.add(2, 2 if number % 3 else number % 2)
    first, second = everyone.rates(2)
    worse, better = Acceptance(96, everyone), Acceptance(96, everyone)
    for _ in range(50):
        worse.add(1, 0)
        better.add(1, 1)
    assert worse.rates(2)[1] == pytest.approx(second * (worse.rates(1)[0] / first) ** 0.5)
    assert second < better.rates(2)[1] < 1


def test_costs_are_interpolated_and_corrected():
    machine = Machine(1.0, 0.0, jitter=0.0)
    plans = [PLAIN, TreePlan(chain(3))]
    costs = RoundCosts(plans, [1, 4, 8], machine.mean)
    assert costs.seconds(plans[1], 6) == pytest.approx(machine.mean(plans[1], 6))
    for _ in range(100):
        for plan, times in zip(plans, (2.0, 3.0), strict=True):
            for _ in range(5):
                costs.observe(plan, 4, times * machine.mean(plan, 4))
    for plan, times in zip(plans, (2.0, 3.0), strict=True):
        assert costs.seconds(plan, 4) == pytest.approx(times * machine.mean(plan, 4), rel=0.05)
    assert costs.seconds(plans[0], 8) > 1.5 * machine.mean(plans[0], 8)  # other sizes grow alike


def test_ranks_agree_on_times():
    """Of each the least: of those at the start, and of what is observed."""

    class Other:
        def least_of_hosts(self, numbers: list[int]) -> list[int]:
            return [min(number, round(next(theirs) * 1e9)) for number in numbers]

    plans, theirs = [PLAIN, TreePlan(chain(1))], iter([1.0, 1.5, 0.5])
    costs = RoundCosts(plans, [1], lambda plan, rows: 2.0 - plan.tree.max_depth, Other())
    assert [costs.seconds(plan, 1) for plan in plans] == [1.0, 1.0]
    for _ in range(4):
        costs.observe(PLAIN, 1, 3.0)
    assert costs.seconds(PLAIN, 1) == pytest.approx(0.5, rel=0.02)


# --- in an engine


@pytest.mark.parametrize(
    "options", [{"tree": "auto"}, {"tree": "d2_bf2", "gate": True}, {"tree": "auto", "overlap": True}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_plain_decoding(options, temperature):
    target = shared_target("llama")
    params = SamplingParams(temperature, max_tokens=16, ignore_eos=True, seed=5)
    plain = token_ids(Engine(target).generate(PROMPTS, params))
    engine = Engine(target, Eagle(tiny_draft(target), target), **options, max_batch_size=3)
    for _ in range(3):
        assert token_ids(engine.generate(PROMPTS, params)) == plain
    assert inside(engine).in_flight is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_round_that_follows_a_prefill_tells_nothing_of_times(monkeypatch, overlap):
    """It takes longer, whatever its plan."""
    target, log, told = shared_target("llama"), [], []
    engine = Engine(target, Eagle(tiny_draft(target), target), "auto", max_batch_size=2, overlap=overlap)
    run, prefill, observe = Runner.run, LocalPrefiller.prefill, Adaptive.observe
    monkeypatch.setattr(Runner, "run", lambda *given: log.append("round") or run(*given))

    def prefilling(self, chunks, is_decoding):
        log.extend(["prefill"] * bool(chunks))
        return prefill(self, chunks, is_decoding)

    def observed(self, plan, rows, number, seconds):
        told.append(seconds is not None)
        return observe(self, plan, rows, number, seconds)

    monkeypatch.setattr(LocalPrefiller, "prefill", prefilling)
    monkeypatch.setattr(Adaptive, "observe", observed)
    engine.generate(PROMPTS[:4], SamplingParams(0.0, max_tokens=12, ignore_eos=True))
    follows = [before == "prefill" for before, this in pairwise(log) if this == "round"]
    assert sum(follows) > 1
    assert len(told) == len(follows)
    assert not any(known for known, first in zip(told, follows, strict=True) if first)
    assert overlap or told == [not first for first in follows]
    assert any(told)


@pytest.mark.parametrize(
    ("tree", "rows"), [({1: "chain2", 3: chain(0)}, 3), ({4: "chain1", 5: "chain2", 6: "chain1"}, 5)], ids=str
)
def test_a_table_of_trees_is_gated_at_every_batch_size(tree, rows):
    """Also where it has no drafts, and where its tree is that of no batch size which is a power of two."""
    target, params = shared_target("llama"), SamplingParams(max_tokens=40, ignore_eos=True)
    engine = Engine(target, Eagle(tiny_draft(target), target), tree, gate=True, max_batch_size=max(tree))
    asked = PROMPTS[:rows]
    assert token_ids(engine.generate(asked, params)) == token_ids(Engine(target).generate(asked, params))


def test_rounds_at_the_start_are_like_later_ones():
    """One row is not ragged, and the drafter has as many tokens to read as are accepted of half a chain, and one."""

    class Noting(Eagle):
        def propose(self, round):
            rows, pending = round.pending.tokens.shape
            seen.add((rows, round.plan.tree.max_depth, pending, round.draft_prefix.ragged))
            return super().propose(round)

    seen: set[tuple[int, int, int, bool]] = set()
    target = shared_target("llama")
    Engine(target, Noting(tiny_draft(target), target), AutoTree((1, 3)), max_batch_size=2)
    assert seen == {(rows, depth, pending, rows > 1) for rows in (1, 2) for depth, pending in ((1, 2), (3, 3))}


def test_drafting_is_part_of_what_a_round_takes():
    """Each length is timed with its drafts, those of a drafter that has the host wait too."""

    class Noting(Eagle):
        def propose(self, round):
            drafted.append(round.plan.tree.max_depth)
            return super().propose(round)

    class Waiting(Noting):
        needs = Needs()

    target = shared_target("llama")
    for kind in (Noting, Waiting):
        drafted: list[int] = []
        Engine(target, kind(tiny_draft(target), target), "auto", max_batch_size=2)
        assert set(drafted) == {tree.max_depth for tree in AutoTree().trees()}


def test_requests_without_drafter_and_several_drafters():
    target = shared_target("llama")
    drafters = {name: Eagle(tiny_draft(target), target) for name in ("a", "b")}
    engine = Engine(target, drafters, "auto")
    params = [SamplingParams(max_tokens=16, ignore_eos=True, drafter=name) for name in ("a", "b", "none", None, "a")]
    assert token_ids(engine.generate(PROMPTS, params)) == cut(answers("llama"))


def test_requests_without_a_drafter_keep_nothing_for_it():
    """No token waits to be read by a drafter that they do not have; alone, and once those that draft have left."""
    target = shared_target("llama")
    engine = Engine(target, Eagle(tiny_draft(target), target), "chain2", max_batch_size=2)
    for name, length in (("none", 40), (None, 4)):
        engine.add(PROMPTS[0], SamplingParams(max_tokens=length, ignore_eos=True, drafter=name))
    widths = []
    while engine.has_unfinished:
        engine.step()
        widths.append(inside(engine).batch.pending.tokens.shape[1])
    assert widths[-20:-1] == [1] * 19


def test_auto_of_drafters_whose_trees_differ_by_row():
    from eagle_train.inference import TextDrafter

    class Last(TextDrafter):
        def draft(self, text, most):
            return [text.answer[-1]] * most

    engine = Engine(shared_target("llama"), Last(), "auto")
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))


@pytest.mark.parametrize("options", [{"tree": "auto"}, {"tree": "d2_bf2", "gate": True}])
def test_rounds_without_drafts_are_recorded_too(options):
    """Of every number of rows; answers stay."""
    target = shared_target("llama")
    engine = Engine(target, Eagle(tiny_draft(target), target), **options, max_batch_size=3)
    graphs = runner_of(recorded(engine)).graphs
    assert {size[0] for size, tree in graphs.validation.made if tree.num_nodes == 1} == {1, 2, 3}
    assert {size[0] for size, plan, _ in graphs.ends.made if plan.tree.num_nodes == 1} == {1, 2, 3}
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))


def test_what_cannot_be_auto_is_one_line():
    for lengths in ((), (3, 1), (1, 1)):
        with pytest.raises(UserError, match=r"^tree.lengths is .*; they must increase$"):
            AutoTree(lengths)
    with pytest.raises(UserError, match=r"^tree.lengths is 0; it must be a whole number, at least 1$"):
        AutoTree((0, 1))
    assert load_tree("auto") == AutoTree()
