"""Pools of n-grams, against a plain search of all texts, and their memory."""

import random
import re
from itertools import product

import pytest

from eagle_train.errors import OptionError
from eagle_train.inference.lookup.ngrams import NgramOptions, NgramPools

Place = tuple[int, int]  # a text's number, and an index into it


class Plain:
    """The same by its definition: every draft searches all that was read, token by token in the order of its coming."""

    def __init__(self, options: NgramOptions):
        self.options = options
        self.texts: list[list[int]] = []
        self.number: dict[str, int] = {}  # by request
        self.came: list[Place] = []
        self.one: dict[tuple[int, ...], Place] = {}  # where one match is kept

    def follow(self, key: str, prompt: list[int], answer: list[int]) -> None:
        if key not in self.number:
            self.number[key] = len(self.texts)
            self.texts.append([])
        number = self.number[key]
        text = self.texts[number]
        for token in [*prompt, *answer][len(text) :]:
            text.append(token)
            self.came.append((number, len(text) - 1))
            self.keep_one(number)
        kept = self.options.pool_tokens if self.options.is_public_pool else len(self.came)
        left = self.came[-kept:]
        self.one = {pattern: place for pattern, place in self.one.items() if place in left}
        self.came = left

    def keep_one(self, number: int) -> None:
        last, length = len(self.texts[number]) - 1, self.options.max_draft_len
        for pattern in self.before(number, last):
            self.one.setdefault(pattern, (number, last))
        full = (number, last + 1 - length)
        if full in self.came:
            self.one |= dict.fromkeys(self.before(*full), full)

    def before(self, number: int, index: int) -> list[tuple[int, ...]]:
        """The patterns before the token `index` of a text, the longest first."""
        sizes = range(min(self.options.max_matching_ngram_size, index), 0, -1)
        return [tuple(self.texts[number][index - size : index]) for size in sizes]

    def draft(self, key: str, most: int) -> list[int]:
        number = self.number[key]
        for pattern in self.before(number, len(self.texts[number])):
            if self.options.is_keep_all:
                found = [place for place in self.came if pattern in self.before(*place)]
                found = found if self.options.is_use_oldest else found[::-1]
            else:
                found = [self.one[pattern]] if pattern in self.one else []
            if found:
                text, first = found[0]
                return self.texts[text][first : first + min(most, self.options.max_draft_len)]
        return []

    def leave(self, key: str) -> None:
        del self.number[key]


def drafts_of_random_texts(options: NgramOptions, seed: int) -> list[tuple[list[int], list[int]]]:
    """Both implementations' drafts while three requests at a time grow, end and are followed by others."""
    rng = random.Random(seed)
    fast, letters = NgramPools(options), rng.randint(1, 4)
    twins: dict[str, Plain] = {}
    public, texts, found = Plain(options), {}, []
    for step in range(40):
        slot = rng.randrange(3)
        key = next((name for name in texts if name.endswith(f"-{slot}")), f"{step}-{slot}")
        prompt, answer = texts.setdefault(key, ([rng.randrange(letters) for _ in range(rng.randint(1, 6))], []))
        answer += [rng.randrange(letters) for _ in range(rng.randint(0, 4))]
        plain = public if options.is_public_pool else twins.setdefault(key, Plain(options))
        for pools in (fast, plain):
            pools.follow(key, prompt, answer)
        most = rng.randint(0, 5)
        found.append((fast.draft(key, most), plain.draft(key, most)))
        if rng.random() < 0.15:
            del texts[key]
            for pools in (fast, plain):
                pools.leave(key)
    return found


@pytest.mark.parametrize(("public", "keep_all", "oldest"), list(product((False, True), repeat=3)))
def test_drafts_are_those_of_a_plain_search(public, keep_all, oldest):
    drafted = 0
    for seed in range(60):
        length, size, limit = 1 + seed % 4, 1 + seed % 3, 1 + seed * 7 % 50
        options = NgramOptions(length, size, public, keep_all, oldest, limit)
        for fast, plain in drafts_of_random_texts(options, seed):
            assert fast == plain, (seed, options)
            drafted += bool(plain)
    assert drafted > 500


TEXT = [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2, 9, 1, 2]


@pytest.mark.parametrize(
    ("options", "draft"),
    [
        (NgramOptions(3), [3, 4, 5]),
        (NgramOptions(3, is_use_oldest=False), [9, 1, 2]),
        (NgramOptions(4, is_use_oldest=False), [9, 1, 2]),  # the newest match has three tokens yet
        (NgramOptions(4, is_keep_all=False), [6, 7, 8, 1]),  # so it is not the largest
        (NgramOptions(3, is_keep_all=False), [9, 1, 2]),
    ],
)
def test_which_match_is_used(options, draft):
    pools = NgramPools(options)
    pools.follow("a", TEXT[:6], TEXT[6:])
    assert pools.draft("a", 9) == draft
    assert pools.draft("a", 2) == draft[:2]


def test_the_longest_pattern_is_used():
    pools = NgramPools(NgramOptions(2, 3))
    pools.follow("a", [2, 7, 1, 2, 8, 0, 1, 2], [9, 0, 1, 2])
    assert pools.draft("a", 2) == [9, 0]


def test_a_private_pool_knows_its_own_text_alone():
    pools = NgramPools(NgramOptions())
    pools.follow("a", [1, 2, 3, 4], [])
    pools.follow("b", [1, 2], [])
    assert pools.draft("b", 4) == []
    pools.leave("a")
    pools.leave("b")
    pools.leave("b")
    assert (len(pools), pools.tokens) == (0, 0)


def test_a_public_pool_keeps_texts_until_newer_tokens_come():
    pools = NgramPools(NgramOptions(is_public_pool=True, pool_tokens=7))
    pools.follow("a", [1, 2, 3, 4], [5])
    pools.leave("a")
    pools.follow("b", [1, 2], [])
    assert pools.draft("b", 4) == [3, 4, 5]
    pools.follow("b", [1, 2], [6])
    pools.follow("c", [1, 2], [])
    assert pools.draft("c", 4) == [6]  # the first three of the ten tokens have left, and with them the first match
    assert pools.tokens == 7


@pytest.mark.parametrize("keep_all", [True, False])
def test_the_memory_of_a_public_pool_is_bounded(keep_all):
    rng = random.Random(0)
    pools = NgramPools(NgramOptions(is_public_pool=True, is_keep_all=keep_all, pool_tokens=100))
    for request in range(200):
        pools.follow(request, [rng.randrange(3) for _ in range(50)], [])
        pools.leave(request)
    assert pools.tokens == 100
    public = pools._public
    assert len(public._by_number) <= 2
    assert len(public._places.used) <= 400
    linked = (getattr(public._places, "_next", {}), getattr(public._places, "_newest", {}))
    assert all(len(links) <= 400 for links in linked)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_draft_len": 0}, "max_draft_len=0: must be a whole number above 0"),
        ({"max_matching_ngram_size": True}, "max_matching_ngram_size=True: must be a whole number above 0"),
        ({"max_matching_ngram_size": 33}, "max_matching_ngram_size=33: must be at most 32; drafter=suffix looks for"),
        ({"pool_tokens": 1.5}, "pool_tokens=1.5: must be a whole number above 0"),
        ({"is_keep_all": 1}, "is_keep_all=1: must be true or false"),
        ({"is_use_oldest": "yes"}, "is_use_oldest='yes': must be true or false"),
        ({"is_public_pool": None}, "is_public_pool=None: must be true or false"),
    ],
)
def test_a_wrong_option_is_one_line(given, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        NgramOptions(**given)
