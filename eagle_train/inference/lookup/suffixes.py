"""Suffix lookup: a draft is a tree of what followed the longest known end of a request's text, in this text or in
earlier answers. Knows nothing of models, engines or tensors.

After *SuffixDecoding* (Oliaro et al., 2024).
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_train.errors import OptionError, check, shown
from eagle_train.inference.lookup.suffix_tree import LookupTree, SuffixTree

_NOTHING = LookupTree([], [], [])


@dataclass(frozen=True)
class SuffixOptions:
    """How drafts are looked up. Raises OptionError.

    - `max_match`: the most tokens of a text's end that are looked for. The longest match is used.
    - `max_nodes`: the most tokens of a draft.
    - `min_probability`: of a drafted token's path, the least estimate. A token's share is the number of places where it
      follows, divided by all; a path's is the product.
    - `max_spec_factor`, `max_spec_offset`: a draft is at most `max_spec_factor` * match length + `max_spec_offset`
      tokens deep, since what follows a short match is less sure.
    - `pool_tokens`: the most tokens of earlier answers that are kept for all requests; the oldest answers leave whole.
      Drafts then depend on other requests, and outputs do not. 0: none are kept.
    """

    max_match: int = 32
    max_nodes: int = 16
    min_probability: float = 0.1
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    pool_tokens: int = 100_000

    def __post_init__(self) -> None:
        for name, least in (("max_match", 1), ("max_nodes", 1), ("pool_tokens", 0)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            check(whole, f"{name}={shown(value)}: must be a whole number, at least {least}", OptionError)
        for name, most in (("min_probability", 1), ("max_spec_factor", math.inf), ("max_spec_offset", math.inf)):
            value = getattr(self, name)
            said = "from 0 to 1" if most == 1 else "from 0 on"
            check(_is_number(value, most), f"{name}={shown(value)}: must be a number {said}", OptionError)
        said = f"max_spec_factor={self.max_spec_factor}: no draft is a token deep"
        told = (
            f"max_spec_factor * max_match + max_spec_offset is {self.depth_of(self.max_match)}; it must be at least 1"
        )
        if self.max_depth < 1:
            raise OptionError(f"{said}: {told}", "max_spec_factor", "max_match", "max_spec_offset")

    def depth_of(self, match_length: int) -> int:
        """The most levels of a draft after a match of this length."""
        return math.floor(min(self.max_nodes, self.max_spec_factor * match_length + self.max_spec_offset))

    @property
    def max_depth(self) -> int:
        """The most levels of any draft."""
        return self.depth_of(self.max_match)


@dataclass
class _Request:
    tree: SuffixTree
    answered: int = 0  # tokens of the answer that were read


class SuffixLookup:
    """The texts of requests, each by its key, earlier answers, and drafts for requests."""

    def __init__(self, options: SuffixOptions):
        self.options = options
        self._depth = options.max_match + options.max_depth
        self._requests: dict[Hashable, _Request] = {}
        self._pool = AnswerPool(options.pool_tokens, self._depth)

    def __len__(self) -> int:
        """The number of requests that are here."""
        return len(self._requests)

    def follow(self, key: Hashable, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Read what is new in the text of the request `key`, which begins with the first call and only grows."""
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = _Request(SuffixTree(self._depth))
            request.tree.append(prompt)
        request.tree.append(answer[request.answered :])
        request.answered = len(answer)

    def draft(self, key: Hashable, most: int) -> LookupTree:
        """What may follow the text of the request `key`: up to `max_nodes` tokens, and up to `most`; none where nothing
        of the text's end is known.

        Of the drafts by the text itself and by earlier answers, the one of which more tokens should be accepted."""
        tree = self._requests[key].tree
        tail = tree.tail(self.options.max_match)
        found = [self._drafted(each, tail, min(most, self.options.max_nodes)) for each in (tree, self._pool.tree)]
        return max(found, key=lambda draft: draft.expected)  # the first among equals

    def _drafted(self, tree: SuffixTree, tail: list[int], most: int) -> LookupTree:
        match = tree.match(tail)
        if match is None:
            return _NOTHING
        depth = min(most, self.options.depth_of(match.length))
        return tree.draft(match, most, depth, self.options.min_probability)

    def leave(self, key: Hashable) -> None:
        """The request `key` has ended, if it is here. Its answer becomes an earlier one."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._pool.add(request.tree.tail(request.answered))


class AnswerPool:
    """A suffix tree of answers, `limit` tokens of them at most; the oldest leave whole."""

    def __init__(self, limit: int, depth: int):
        """`depth`: see `SuffixTree`."""
        self.tree = SuffixTree(depth)
        self.tokens = 0
        self._limit = limit
        self._lengths: deque[int] = deque()

    def add(self, answer: list[int]) -> None:
        """Keep an answer; of one with more than `limit` tokens, the last ones."""
        answer = answer[max(0, len(answer) - self._limit) :]
        if not answer:
            return
        while self.tokens + len(answer) > self._limit:
            self.tokens -= self._lengths.popleft()
            self.tree.remove_first()
        self.tree.append(answer)
        self.tree.begin()
        self.tokens += len(answer)
        self._lengths.append(len(answer))


def _is_number(value: Any, most: float) -> bool:
    """Whether it is an int or float from 0 to `most`, and finite; a bool is none."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and 0 <= value <= most and math.isfinite(value)
