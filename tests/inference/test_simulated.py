"""Simulated acceptance: rounds accept with the given probabilities, whatever was drafted."""

import pytest
import torch
from scipy import stats

from eagle_train.inference import SamplingParams, SimulatedAcceptance
from tests.support.measuring import simulated_engine
from tests.support.tiny import random_tokens

KEYS = ("accepted_per_depth", "drafted_per_depth")


@pytest.mark.parametrize("tree", ["chain2", "chain3", "d3_bf2", "n8"])
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
        def __call__(self, inputs, verified):
            accepted = super().__call__(inputs, verified)
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
