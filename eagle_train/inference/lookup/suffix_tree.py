"""A suffix tree: what followed the longest known end of a text, by frequency. Knows nothing of models, engines or
tensors.

A suffix tree has every place of its texts below the tokens that follow there. Where few places share a beginning it
lists them and reads on in the text; a node is made where more than `_FEW` do. So a token costs as many steps as there
are ends of the text, the empty one included, that occur more often than that: 3 to 5 in prose or code, and at most
`depth` in texts that repeat themselves many times. Memory is 0.2 kB for each token, and up to `depth` / `_FEW` nodes of
0.4 kB more in such texts. Without the lists it would be `depth` nodes for each token.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_FEW = 32  # the most places that are listed
_END = -1  # stands before the first text and behind each


class LookupTree(NamedTuple):
    """Drafted tokens as a tree, without its root, the text's last token.

    `tokens[i]` is node i + 1, and `parents[i]` the node before it, 0 for the root. Nodes are listed level by level,
    siblings together, the likeliest first. `probabilities[i]`: of the path to the node, estimated.
    """

    tokens: list[int]
    parents: list[int]
    probabilities: list[float]

    @property
    def expected(self) -> float:
        """The number of tokens that are accepted, by the estimate."""
        return sum(self.probabilities)


class _Node:
    """The places behind a sequence of tokens that has many. A place is the index of the token that follows."""

    __slots__ = ("count", "few", "followed", "newest", "nodes")

    def __init__(self, count: int, newest: int):
        self.count = count  # of places, those where a text ends included
        self.followed = 0  # places that a token follows
        self.newest = newest  # the last place
        self.nodes: dict[int, _Node] = {}  # by the next token
        self.few: dict[int, list[int]] = {}  # likewise, of sequences that have few places; in ascending order


class Match(NamedTuple):
    """The end of a text as it is found in a tree: its `length`, and the places behind it, which a token follows."""

    length: int
    places: "_Node | list[int]"


class SuffixTree:
    """Texts, of which the last one may grow and the first ones may leave."""

    def __init__(self, depth: int):
        """`depth`: the most tokens of a sequence that is looked up, drafts included."""
        self.depth = depth
        self._text = [_END, _END]
        self._gone = 0  # tokens before `_text`: a place p is `_text[p - _gone]`
        self._root = _Node(0, 0)
        self._open = [self._root]  # by length: the nodes of the last text's ends

    def append(self, tokens: Sequence[int]) -> None:
        """Append to the last text."""
        text, few, depth = self._text, _FEW, self.depth
        for token in tokens:
            text[-1] = token
            text.append(_END)
            place = self._gone + len(text) - 1
            nodes = [self._root]
            for node in self._open:
                node.followed += 1
                child = node.nodes.get(token)
                if child is not None:
                    child.count += 1
                    child.newest = place
                    nodes.append(child)
                elif (places := node.few.get(token)) is None:
                    node.few[token] = [place]
                else:
                    places.append(place)
                    if len(places) > few:
                        del node.few[token]
                        node.nodes[token] = child = self._node_of(places, len(nodes))
                        nodes.append(child)
            self._open = nodes[:depth]

    def _node_of(self, places: list[int], length: int) -> _Node:
        """A node of a sequence of `length` tokens for its places, which are listed behind it now."""
        node = _Node(len(places), places[-1])
        for place in places if length < self.depth else ():
            token = self._text[place - self._gone]
            if token != _END:
                node.followed += 1
                node.few.setdefault(token, []).append(place + 1)
        return node

    def begin(self) -> None:
        """End the last text; what is appended from now on is another one."""
        self._text.append(_END)
        self._open = [self._root]

    def remove_first(self) -> None:
        """The first text leaves. It must not be the last one."""
        text, end = self._text, self._text.index(_END, 1)
        for first in range(1, end):
            node = self._root
            for index in range(first, min(first + self.depth, end)):
                token, place = text[index], self._gone + index + 1
                node.followed -= 1
                child = node.nodes.get(token)
                if child is None:
                    places = node.few[token]
                    places.remove(place)  # the first of the list, mostly
                    if not places:
                        del node.few[token]
                    break
                child.count -= 1
                if child.count == 0:
                    del node.nodes[token]
                    break
                node = child
        del text[:end]
        self._gone += end

    def tail(self, most: int) -> list[int]:
        """The last tokens, `most` at most, of a tree with one text."""
        return self._text[max(1, len(self._text) - 1 - most) : -1]

    def match(self, tail: list[int]) -> Match | None:
        """The longest end of `tail` that stands in the texts before another token; None where there is none."""
        known, unknown, node = 0, len(tail) + 1, None  # lengths; if one is in the texts, so are all below it
        while unknown - known > 1:
            doubled = max(1, 2 * known)
            length = doubled if doubled < unknown else (known + unknown) // 2
            places = self._places(tail, length)
            if isinstance(places, list) and places:
                return self._extended(tail, length, places)
            if isinstance(places, _Node) and places.followed > 0:
                known, node = length, places
            else:
                unknown = length
        return None if node is None else Match(known, node)

    def _places(self, tail: list[int], length: int) -> _Node | list[int]:
        """The places behind the last `length` tokens of `tail`; of a list, those that a token follows."""
        node = self._root
        for index in range(len(tail) - length, len(tail)):
            child = node.nodes.get(tail[index])
            if child is None:
                text, gone, rest = self._text, self._gone, tail[index + 1 :]
                behind = (place - gone for place in node.few.get(tail[index], ()))
                ends = [at + len(rest) for at in behind if text[at : at + len(rest)] == rest]
                return [gone + at for at in ends if text[at] != _END]
            node = child
        return node

    def _extended(self, tail: list[int], length: int, places: list[int]) -> Match:
        """The longest match among places behind the last `length` tokens of `tail`, by reading backwards."""
        text, gone = self._text, self._gone
        for step in (16, 4, 1):
            while length + step <= len(tail):
                before, far = tail[len(tail) - length - step : len(tail) - length], gone + length
                longer = [place for place in places if text[place - far - step : place - far] == before]
                if not longer:
                    break
                places, length = longer, length + step
        return Match(length, places)

    def draft(self, match: Match, most: int, depth: int, least: float) -> LookupTree:
        """What follows a match: from the likeliest node on, up to `most` nodes and `depth` levels below the root.

        A node's probability is its parent's times the share of the parent's places that it follows, each of which a
        token follows; only nodes whose probability is at least `least` are taken. Among equals the shallower comes
        first, then the one that occurred last. `match.length` + `depth` may not be above the tree's depth.
        """
        taken: list[tuple[int, int, float]] = []  # parent by its number among these, from 1; token; probability
        heap = [(-1.0, 0, 0, _END, 0, match.places)]
        while heap and len(taken) <= most:
            negative, level, _, token, parent, places = heapq.heappop(heap)
            taken.append((parent, token, -negative))
            if level < depth:
                for newest, after, probability, behind in self._children(places, -negative, least):
                    heapq.heappush(heap, (-probability, level + 1, -newest, after, len(taken) - 1, behind))
        return _level_by_level(taken)

    def _children(
        self, places: _Node | list[int], probability: float, least: float
    ) -> Iterator[tuple[int, int, float, _Node | list[int]]]:
        """Last place, token, probability and places of what follows `places`, itself of this probability."""
        if isinstance(places, _Node):
            total = places.followed
            for token, node in places.nodes.items():
                if (child := probability * (node.count / total)) >= least:
                    yield node.newest, token, child, node
            few = places.few if total > 0 and probability * (_FEW / total) >= least else {}
        else:
            few = self._behind(places)
            total = sum(map(len, few.values()))
        for token, listed in few.items():
            if (child := probability * (len(listed) / total)) >= least:
                yield listed[-1], token, child, listed

    def _behind(self, places: list[int]) -> dict[int, list[int]]:
        """The places one token on, by that token."""
        text, gone, found = self._text, self._gone, dict[int, list[int]]()
        for place in places:
            token = text[place - gone]
            if token != _END:
                found.setdefault(token, []).append(place + 1)
        return found


def _level_by_level(taken: list[tuple[int, int, float]]) -> LookupTree:
    """The tree of a list of (parent, token, probability), the root first."""
    below: list[list[int]] = [[] for _ in taken]
    for node, (parent, _, _) in enumerate(taken[1:], start=1):
        below[parent].append(node)
    order = [0]
    for node in order:
        order += below[node]
    number = {node: place for place, node in enumerate(order)}
    nodes = [taken[node] for node in order[1:]]
    return LookupTree(
        [token for _, token, _ in nodes], [number[node[0]] for node in nodes], [node[2] for node in nodes]
    )
