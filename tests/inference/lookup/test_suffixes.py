"""Suffix lookup: requests, earlier answers and the limits of a draft."""

import random
import re

import pytest

from eagle_train.errors import OptionError
from eagle_train.inference.lookup.suffixes import AnswerPool, SuffixLookup, SuffixOptions


def followed(options: SuffixOptions, *texts: tuple[list[int], list[int]]) -> SuffixLookup:
    """After requests 0, 1, ... with these prompts and answers; all but the last have ended."""
    lookup = SuffixLookup(options)
    for key, (prompt, answer) in enumerate(texts):
        lookup.follow(key, prompt, answer)
        if key < len(texts) - 1:
            lookup.leave(key)
    return lookup


def test_a_draft_by_the_text_itself():
    lookup = followed(SuffixOptions(), ([5, 1, 2, 3, 4], [8, 1, 2, 3]))
    draft = lookup.draft(0, 16)
    assert (draft.tokens, draft.parents, draft.probabilities) == ([4, 8, 1], [0, 1, 2], [1, 1, 1])


def test_answers_but_not_prompts_are_known_to_others():
    lookup = followed(SuffixOptions(), ([1, 2, 3], [4, 5, 6]), ([3, 4], []))
    assert lookup.draft(1, 16).tokens == [5]  # a match of 4 alone, since 3 is of the prompt
    lookup = followed(SuffixOptions(), ([1, 2, 3], [4, 5, 6]), ([2, 3], []))
    assert lookup.draft(1, 16).tokens == []


def test_the_more_promising_of_two_is_taken():
    answers = ([0], [1, 2, 3, 4, 5])
    assert followed(SuffixOptions(), answers, ([2, 9, 1, 2], [])).draft(1, 16).tokens == [3, 4]  # two against one
    assert followed(SuffixOptions(), answers, ([1, 2, 9, 1, 2], [])).draft(1, 16).tokens == [9, 1]  # equal: its own
    assert followed(SuffixOptions(), answers, ([1, 2, 9, 1, 2], [])).draft(1, 1).tokens == [9]


@pytest.mark.parametrize(
    ("given", "depth"),
    [
        ({}, 4),
        ({"max_spec_factor": 0.5}, 2),
        ({"max_spec_factor": 0.7}, 2),
        ({"max_spec_factor": 0.5, "max_spec_offset": 1.5}, 3),
        ({"max_spec_factor": 0.0, "max_spec_offset": 5}, 5),
        ({"max_match": 3}, 3),
        ({"max_nodes": 2}, 2),
        ({"max_spec_factor": 1e308, "max_spec_offset": 1e308, "max_match": 100}, 12),
    ],
)
def test_a_draft_is_as_deep_as_its_match_is_long(given, depth):
    lookup = followed(SuffixOptions(**given), ([1, 2, 3, 4, *range(20, 32)], [1, 2, 3, 4]))
    assert lookup.draft(0, 12).tokens == [*range(20, 32), 1, 2, 3, 4][:depth]


def test_a_text_is_read_in_any_pieces():
    rng = random.Random(0)
    prompt, answer = ([rng.randrange(3) for _ in range(size)] for size in (9, 60))
    whole, pieces = SuffixLookup(SuffixOptions()), SuffixLookup(SuffixOptions())
    for end in range(0, 61, 3):
        pieces.follow("a", prompt, answer[:end])
        pieces.follow("a", prompt, answer[:end])
    whole.follow("a", prompt, answer)
    assert pieces.draft("a", 16) == whole.draft("a", 16) != ([], [], [])
    for lookup in (whole, pieces):
        lookup.leave("a")
        lookup.follow("b", [], answer[:30])
    assert pieces.draft("b", 16) == whole.draft("b", 16) != ([], [], [])


def test_without_a_pool_other_requests_change_nothing():
    rng = random.Random(1)
    texts = [[rng.randrange(3) for _ in range(80)] for _ in range(5)]
    alone = SuffixLookup(SuffixOptions(pool_tokens=0))
    beside = followed(SuffixOptions(pool_tokens=0), *(([1], text) for text in texts[1:]), ([], []))
    for end in range(1, 81):
        for lookup in (alone, beside):
            lookup.follow("a", texts[0][:5], texts[0][5:end])
        assert alone.draft("a", 16) == beside.draft("a", 16)


def test_requests_leave_nothing_behind_but_answers():
    lookup = followed(SuffixOptions(pool_tokens=10), ([1, 2], [3, 4, 5]), ([1], [6, 7]), ([0], [1]))
    lookup.leave(2)
    lookup.leave(2)
    assert len(lookup) == 0
    assert lookup._pool.tokens == 6


def test_the_oldest_answers_leave_whole():
    pool = AnswerPool(6, 8)
    for answer in ([1, 2, 3], [], [4, 5]):
        pool.add(answer)
    assert (pool.tokens, pool.tree.match([1]).length) == (5, 1)
    pool.add([6, 7])
    assert (pool.tokens, pool.tree.match([1]), pool.tree.match([4]).length) == (4, None, 1)
    pool.add(list(range(10, 20)))
    assert (pool.tokens, pool.tree.match([6]), pool.tree.match([13]), pool.tree.match([14]).length) == (
        6,
        None,
        None,
        1,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_match": 0}, "max_match=0: must be a whole number, at least 1"),
        ({"max_nodes": True}, "max_nodes=True: must be a whole number, at least 1"),
        ({"pool_tokens": -1}, "pool_tokens=-1: must be a whole number, at least 0"),
        ({"min_probability": 1.5}, "min_probability=1.5: must be a number from 0 to 1"),
        ({"min_probability": float("nan")}, "min_probability=nan: must be a number from 0 to 1"),
        ({"max_spec_factor": "x"}, "max_spec_factor='x': must be a number from 0 on"),
        ({"max_spec_offset": float("inf")}, "max_spec_offset=inf: must be a number from 0 on"),
        (
            {"max_spec_factor": 0.01},
            "max_spec_factor=0.01: no draft is a token deep: max_spec_factor * max_match + max_spec_offset is 0; "
            "it must be at least 1",
        ),
    ],
)
def test_a_wrong_option_is_one_line(given, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        SuffixOptions(**given)
