"""inference/lookup/suffix_array.py: suffixes in the order of their first tokens, as a plain sort gives it."""

import random

import numpy as np
import pytest

from eagle_train.inference.lookup.suffix_array import ORDER, SEPARATOR, TOKEN_LIMIT, sorted_suffixes


def by_plain_sort(tokens: list[int]) -> list[int]:
    starts = [start for start, token in enumerate(tokens) if token != SEPARATOR]
    return sorted(starts, key=lambda start: (tokens[start : start + ORDER], start))


def text(rng: random.Random) -> list[int]:
    """Documents of few different tokens, some of them in long repetitions."""
    alphabet = rng.choice([[0], [0, 1], [5, TOKEN_LIMIT - 1], list(range(300))])
    tokens: list[int] = []
    for _ in range(rng.randint(1, 5)):
        piece = rng.choices(alphabet, k=rng.randint(1, 12))
        tokens += piece * rng.choice([1, 1, 9]) + [SEPARATOR]
    return tokens


@pytest.mark.parametrize("seed", range(200))
def test_the_order_is_that_of_a_plain_sort(seed):
    tokens = text(random.Random(seed))
    assert sorted_suffixes(np.array(tokens, dtype=np.uint32)).tolist() == by_plain_sort(tokens)


def test_beyond_the_order_suffixes_lie_by_position():
    tokens = [7] * (3 * ORDER) + [SEPARATOR]
    found = sorted_suffixes(np.array(tokens, dtype=np.uint32)).tolist()
    assert found[: 2 * ORDER + 1] == list(range(2 * ORDER + 1))
    assert found == by_plain_sort(tokens)
