"""Suffix trees, against a plain search of all texts, and what is left of texts that were removed."""

import random
from fractions import Fraction

import pytest

from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.lookup import suffix_tree
from eagle_train.inference.lookup.suffix_tree import LookupTree, SuffixTree

DEPTH = 10
Place = tuple[int, int]  # a text's number, and an index into it


class Plain:
    """The same by its definition, from scratch each time."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = [[]]

    def places(self, tokens: list[int]) -> list[Place]:
        """Where a token follows these."""
        size = len(tokens)
        return [
            (number, first + size)
            for number, text in enumerate(self.texts)
            for first in range(len(text) - size)
            if text[first : first + size] == tokens
        ]

    def match(self, tail: list[int]) -> tuple[int, list[Place]] | None:
        for length in range(len(tail), 0, -1):
            if places := self.places(tail[-length:]):
                return length, places
        return None

    def draft(self, places: list[Place], most: int, depth: int, least: float) -> list[tuple[tuple[int, ...], float]]:
        """Paths with their probabilities, in the order in which they are taken."""
        taken: list[tuple[tuple[int, ...], float]] = []
        open_ones = self.children((), 1.0, places) if depth > 0 else {}
        while open_ones and len(taken) < most:
            best = max(open_ones, key=lambda path: (open_ones[path][0], -len(path), max(open_ones[path][1])))
            probability, behind = open_ones.pop(best)
            if probability < least:
                break
            taken.append((best, probability))
            if len(best) < depth:
                open_ones |= self.children(best, probability, behind)
        return taken

    def children(self, path: tuple[int, ...], probability: float, places: list[Place]) -> dict:
        followed = [(number, at) for number, at in places if at < len(self.texts[number])]
        tokens = {self.texts[number][at] for number, at in followed}
        found = {}
        for token in tokens:
            behind = [(number, at + 1) for number, at in followed if self.texts[number][at] == token]
            found[*path, token] = (probability * (len(behind) / len(followed)), behind)
        return found


def paths_of(draft: LookupTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def check_same(fast: SuffixTree, plain: Plain, tail: list[int], rng: random.Random) -> int:
    """The number of drafted tokens."""
    found, wanted = fast.match(tail), plain.match(tail)
    assert (found and found.length) == (wanted and wanted[0])
    if found is None or wanted is None:
        return 0
    most, depth, least = rng.randint(0, 9), rng.randint(0, DEPTH - found.length), rng.choice((0, 0.1, 0.3, 1))
    draft = fast.draft(found, most, depth, least)
    taken = plain.draft(wanted[1], most, depth, least)
    assert sorted(zip(paths_of(draft), draft.probabilities, strict=True)) == sorted(taken)
    check_order(draft, [path for path, _ in taken])
    return len(taken)


def check_order(draft: LookupTree, taken: list[tuple[int, ...]]) -> None:
    """Level by level, the likeliest sibling first."""
    assert Tree((-1, *draft.parents)).num_nodes == len(draft.tokens) + 1
    for parent in set(draft.parents):
        siblings = [path for path, above in zip(paths_of(draft), draft.parents, strict=True) if above == parent]
        assert siblings == sorted(siblings, key=taken.index)


@pytest.mark.parametrize("few", [1, 3, 32])
def test_one_text_that_grows(monkeypatch, few):
    monkeypatch.setattr(suffix_tree, "_FEW", few)
    drafted = 0
    for seed in range(100):
        rng = random.Random(seed)
        fast, plain, letters = SuffixTree(DEPTH), Plain(), rng.randint(1, 4)
        for _ in range(15):
            new = [rng.randrange(letters) for _ in range(rng.randint(1, 6))]
            fast.append(new)
            plain.texts[-1] += new
            assert fast.tail(7) == plain.texts[-1][-7:]
            drafted += check_same(fast, plain, fast.tail(rng.randint(1, 7)), rng)
    assert drafted > 1000


@pytest.mark.parametrize("few", [1, 3, 32])
def test_texts_that_come_and_go(monkeypatch, few):
    monkeypatch.setattr(suffix_tree, "_FEW", few)
    drafted = 0
    for seed in range(60):
        rng = random.Random(seed)
        fast, plain, letters = SuffixTree(DEPTH), Plain(), rng.randint(1, 4)
        for _ in range(25):
            text = [rng.randrange(letters) for _ in range(rng.randint(0, 12))]
            fast.append(text)
            plain.texts[-1] += text
            if rng.random() < 0.6:
                fast.begin()
                plain.texts.append([])
            if len(plain.texts) > rng.randint(2, 6):
                fast.remove_first()
                del plain.texts[0]
            tail = [rng.randrange(letters) for _ in range(rng.randint(1, 7))]
            drafted += check_same(fast, plain, tail, rng)
    assert drafted > 1000


def test_a_long_match_is_found_by_reading_backwards():
    text = list(range(50))
    for length in range(1, 49):
        tree = SuffixTree(100)
        tree.append([*text, 77, *text[49 - length : 49]])
        match = tree.match(tree.tail(60))
        assert match.length == length
        assert tree.draft(match, 3, 3, 0.5).tokens[:1] == [49]


def test_estimates_by_hand():
    """After 1: 2 three times of four, else 3. After 1 2: 4 twice of three, else 5. Of 5 and 6 the last one is taken."""
    tree = SuffixTree(DEPTH)
    tree.append([1, 2, 4, 1, 2, 5, 1, 3, 6, 1, 2, 4, 9, 1])
    draft = tree.draft(tree.match([8, 1]), 4, 2, 0.25)
    assert draft.tokens == [2, 3, 4, 6]
    assert draft.parents == [0, 0, 1, 2]
    assert draft.probabilities == pytest.approx([3 / 4, 1 / 4, 1 / 2, 1 / 4])
    assert draft.expected == pytest.approx(float(Fraction(7, 4)))
    assert tree.draft(tree.match([8, 1]), 2, 2, 0).tokens == [2, 4]
    assert tree.draft(tree.match([8, 1]), 4, 1, 0.3).tokens == [2]


def test_the_last_one_comes_first_among_equals():
    tree = SuffixTree(DEPTH)
    tree.append([1, 2, 0, 1, 3, 0, 1])
    assert tree.draft(tree.match([1]), 2, 1, 0).tokens == [3, 2]


def test_nothing_is_left_of_texts_that_were_removed():
    rng = random.Random(0)
    tree = SuffixTree(DEPTH)
    for _ in range(40):
        tree.append([rng.randrange(2) for _ in range(30)])
        tree.begin()
    assert len(nodes_below(tree._root)) > 40
    for _ in range(40):
        tree.remove_first()
    assert (nodes_below(tree._root), tree._root.few, tree._root.followed, len(tree._text)) == ([], {}, 0, 2)


@pytest.mark.parametrize("period", [1, 3, 1000])
def test_a_token_costs_a_bounded_number_of_steps(period):
    """As many as there are open nodes; at most `depth`, also where the text repeats itself."""
    tree = SuffixTree(DEPTH)
    tree.append([place % period for place in range(5000)])
    assert len(tree._open) <= DEPTH
    assert len(nodes_below(tree._root)) <= min(period, 5000 // 33) * DEPTH


def nodes_below(node: suffix_tree._Node) -> list[suffix_tree._Node]:
    return [each for child in node.nodes.values() for each in (child, *nodes_below(child))]
