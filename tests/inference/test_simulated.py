"""Simulated acceptance: rounds accept with the given probabilities, whatever was drafted."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

from eagle_train.inference import Eagle, Engine, SamplingParams, SimulatedAcceptance, dynamic
from eagle_train.inference.drafters.lookahead import Lookahead, LookaheadOptions
from tests.support.graph_recorder import recorded
from tests.support.measuring import SHARES, simulated_engine
from tests.support.oracle import Oracle
from tests.support.reference_answers import PROMPTS, answers
from tests.support.tiny import random_tokens, shared_target, tiny_draft

KEYS = ("accepted_per_depth", "drafted_per_depth")


@pytest.mark.parametrize("tree", ["chain2", "chain3", "d3_bf2", "n8", dynamic(6, 3, 2)])
def test_rounds_accept_with_the_given_rates(tree):
    shares = [0.8, 0.6, 0.3, 0.2, 0.1]
    engine = simulated_engine(tree, rows=40, shares=shares)
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    outputs = engine.generate(random_tokens(*[4] * 40), params)
    hits, rounds = (torch.tensor([getattr(o.stats, key) for o in outputs]).sum(0) for key in KEYS)
    assert len(hits) == engine.dispatcher.deepest
    for hit, tried, share in zip(hits.tolist(), rounds.tolist(), shares, strict=False):
        assert stats.binomtest(hit, tried, share).pvalue > 1e-3


@pytest.mark.parametrize(("shares", "depth"), [([0, 0, 0], 0), ([1, 0, 0], 1), ([1, 1, 0], 2), ([1, 1, 1], 3)])
@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
def test_certain_acceptance_is_exact(tree, shares, depth):
    class Checked(SimulatedAcceptance):
        def __call__(self, inputs, tree, verified):
            accepted = super().__call__(inputs, tree, verified)
            assert accepted.node.tolist() == [inputs.plan.tree.levels[depth][0]]
            return accepted

    engine = simulated_engine(tree, shares=shares, simulated=Checked)
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    output = engine.generate(random_tokens(4), params)[0]
    assert output.rounds == [depth + 1] * (12 // (depth + 1))


def test_acceptance_depends_on_seed_and_position_alone():
    prompts, params = random_tokens(4, 9, 6), SamplingParams(max_tokens=40, ignore_eos=True)
    together = simulated_engine("chain3", rows=3).generate(prompts, params)
    alone = simulated_engine("chain3", rows=1).generate(prompts, params)
    assert [output.rounds for output in together] == [output.rounds for output in alone]
    assert len({tuple(output.rounds) for output in together}) == 3


def drafters() -> dict:
    """Of chains, of trees that differ by row, and of a tree of its own."""
    target = shared_target()
    own = Lookahead(LookaheadOptions(3, 3, 2))
    return {"eagle": Eagle(tiny_draft(target), target), "oracle": Oracle(answers("llama")), "own": own}


@pytest.mark.parametrize("names", [["oracle"], ["own"], ["eagle", "oracle", "own"]])
def test_where_trees_differ_by_row_each_accepts_what_it_has(names):
    """With certain acceptance a round commits as many tokens as the row's tree is deep, and one more. A request without
    a drafter beside them has one token a round."""
    some = {name: drafters()[name] for name in names}
    engine = Engine(shared_target(), some, "d2_bf2", max_batch_size=5, acceptance=SimulatedAcceptance([1.0] * 6))
    asked = [*names, "none", names[0]]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, drafter=name) for name in asked]
    outputs = engine.generate(PROMPTS[: len(asked)], params)
    for name, output in zip(asked, outputs, strict=True):
        drafted, accepted = output.stats.drafted_per_depth, output.stats.accepted_per_depth
        if name == "none":
            assert (output.rounds, drafted) == ([1] * 19, [])
        else:
            assert accepted[:-1] == drafted[:-1]  # the last round may be cut
            assert max(output.rounds) > 1


@pytest.mark.parametrize("names", [["eagle"], ["eagle", "oracle"]])
def test_a_request_has_its_rounds_whatever_drafts_beside_it(names):
    def engine() -> Engine:
        some, simulated = {name: drafters()[name] for name in names}, SimulatedAcceptance(SHARES)
        return Engine(shared_target(), some, "chain3", max_batch_size=3, acceptance=simulated)

    params, alone = SamplingParams(max_tokens=20, ignore_eos=True), engine()
    outputs = engine().generate(PROMPTS[:3], [params, replace(params, drafter="none"), params])
    for place in (0, 2):
        assert outputs[place].rounds == alone.generate([PROMPTS[place]], params)[0].rounds
    assert outputs[1].rounds == [1] * 19


def test_trees_by_row_are_recorded():
    eager, replayed = (simulated_engine(dynamic(6, 3, 2)) for _ in range(2))
    params = [SamplingParams(max_tokens=12, ignore_eos=True, seed=seed) for seed in range(3)]
    wanted, found = (each.generate(PROMPTS[:3], params) for each in (eager, recorded(replayed)))
    assert [output.rounds for output in found] == [output.rounds for output in wanted]
    assert len({tuple(output.rounds) for output in found}) > 1
