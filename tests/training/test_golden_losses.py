"""A fixed short run has the losses that it always had: what changes them is meant to, and writes them anew.

`python -m tests.support.golden` does, in the commit that says why.
"""

import json

import pytest

from tests.support.golden import FILE, NAMES, STEPS, losses

# AVX2, AVX-512 and no vector instructions at all differ by 3e-7 in 40 steps. A rate that is 1 % higher moves the loss
# by 1e-3, a weight of the loss that is 5 % higher by 2e-2.
TOLERANCE = 1e-4


def farthest(found: dict[str, list[float]]) -> float:
    """The largest relative difference from the golden losses."""
    golden = json.loads(FILE.read_text())
    pairs = [pair for name in NAMES for pair in zip(found[name], golden[name], strict=True)]
    assert len(pairs) == STEPS * len(NAMES)
    return max(abs(now / was - 1) for now, was in pairs)


def test_the_losses_are_the_golden_ones():
    advice = "if the change is meant to alter losses: python -m tests.support.golden, and say why in the commit"
    assert farthest(losses()) < TOLERANCE, advice


@pytest.mark.parametrize(
    "change",
    [{"ce_weight": 0.105}, {"l1_weight": 1.05}, {"feature_noise": 0.1}, {"optim": {"lr": 1.01e-3}}],
    ids=lambda change: next(iter(change)),
)
def test_a_small_change_of_the_recipe_is_seen(change):
    assert farthest(losses(**change)) > 5 * TOLERANCE
