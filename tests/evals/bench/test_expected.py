"""The formulas of speculative decoding, against sums over what may happen."""

import pytest

from evals.bench.expected import depth_shares, expected_speedup, expected_tokens, expected_tpc, mean_depth
from tests.support.measuring import answer


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_rounds_tokens_are_the_sum_over_its_depths(alpha, depth):
    """A token at depth d is committed if all d are accepted; the target's own always is."""
    assert expected_tokens(alpha, depth) == pytest.approx(sum(alpha**d for d in range(depth + 1)))


def test_rounds_of_several_depths():
    """Of 10 rounds 9 draft one token and 6 two more."""
    first = answer(calls=4, drafted_per_depth=[4, 2, 2])
    other = answer(calls=6, drafted_per_depth=[5, 4, 4, 0])
    plain = answer(calls=0)
    shares = depth_shares([[first, plain], [other]])
    assert shares == pytest.approx([0.1, 0.3, 0, 0.6, 0])
    assert mean_depth(shares) == pytest.approx(0.3 + 3 * 0.6)
    assert expected_tpc(0.5, shares) == pytest.approx(0.1 * 1 + 0.3 * 1.5 + 0.6 * 1.875)


def test_a_drafted_token_costs_a_part_of_a_call():
    assert expected_speedup(2.0, 3, 0) == 2.0
    assert expected_speedup(2.0, 3, 0.1) == pytest.approx(2 / 1.3)
