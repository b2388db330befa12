"""N-gram lookup: a draft is what followed the text's last few tokens where they stood before. Knows nothing of models,
engines or tensors.

The options have TensorRT-LLM's names (NGramDecodingConfig). A pattern is up to `max_matching_ngram_size` tokens that
follow each other in a text; a match of it is what follows there, up to `max_draft_len` tokens. A pool does not keep a
match, but where it begins, so a match grows as its text does. A token costs as many steps as patterns end before it,
and with the default options up to 0.4 kB; in a public pool 0.5 kB, and 0.9 kB where the oldest match is used.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from eagle_train.errors import OptionError, check

_Pattern = tuple[int, ...]
_MOST = 32  # tokens of a pattern: each token of a text has a pattern of every size, 7 kB for these
_SPAN = 1 << 32  # a place is the text's number times this, plus an index into the text


@dataclass(frozen=True)
class NgramOptions:
    """How drafts are looked up. Raises OptionError.

    - `max_draft_len`: the most tokens of a draft.
    - `max_matching_ngram_size`: the most tokens of a pattern, up to 32. The longest that has a match is used.
    - `is_public_pool`: one pool for all requests, which keeps the texts of those that have ended, too: drafts then
      depend on other requests, and outputs do not. False: a pool for each request, which leaves with it.
    - `is_keep_all`: keep all matches of a pattern. False: one, the largest and of these the newest: the first is kept
      until a newer one has all `max_draft_len` tokens.
    - `is_use_oldest`: of all matches, the oldest is used. False: the newest, which is short where a text repeats itself
      within `max_draft_len` tokens. Of no effect where one match is kept.
    - `pool_tokens`: the most tokens of all texts in a public pool; the oldest tokens leave first.
    """

    max_draft_len: int = 4
    max_matching_ngram_size: int = 4
    is_public_pool: bool = False
    is_keep_all: bool = True
    is_use_oldest: bool = True
    pool_tokens: int = 100_000

    def __post_init__(self) -> None:
        for name in ("max_draft_len", "max_matching_ngram_size", "pool_tokens"):
            value = getattr(self, name)
            right = isinstance(value, int) and not isinstance(value, bool) and value > 0
            check(right, f"{name}={value!r}: must be a whole number above 0", OptionError)
        size = self.max_matching_ngram_size
        most = f"must be at most {_MOST}; drafter=suffix looks for longer ends"
        check(size <= _MOST, f"max_matching_ngram_size={size}: {most}", OptionError)
        for name in ("is_public_pool", "is_keep_all", "is_use_oldest"):
            value = getattr(self, name)
            check(isinstance(value, bool), f"{name}={value!r}: must be true or false", OptionError)


class NgramPools:
    """The texts of requests, each by its key, and drafts for them."""

    def __init__(self, options: NgramOptions):
        self.options = options
        self._public = _Pool(options, options.pool_tokens) if options.is_public_pool else None
        self._pools: dict[Hashable, _Pool] = {}  # of the requests that are here

    def __len__(self) -> int:
        """The number of requests that are here."""
        return len(self._pools)

    @property
    def tokens(self) -> int:
        """The number of tokens in all pools, those of ended requests included."""
        pools = self._pools.values() if self._public is None else [self._public]
        return sum(pool.kept for pool in pools)

    def follow(self, key: Hashable, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Read what is new in the text of the request `key`, which begins with the first call and only grows."""
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._public or _Pool(self.options, None)
        pool.follow(key, prompt, answer)

    def draft(self, key: Hashable, most: int) -> list[int]:
        """What may follow the text of the request `key`: up to `max_draft_len` tokens, and up to `most`; none where no
        pattern has a match."""
        return self._pools[key].draft(key, min(most, self.options.max_draft_len))

    def leave(self, key: Hashable) -> None:
        """The request `key` has ended, if it is here. A public pool keeps its text until newer tokens push it out."""
        pool = self._pools.pop(key, None)
        if pool is not None:
            pool.leave(key)


@dataclass
class _Text:
    number: int
    tokens: list[int] = field(default_factory=list)
    dropped: int = 0  # of its tokens, the first ones, that have left the pool
    has_ended: bool = False

    def patterns(self, index: int, most: int) -> list[_Pattern]:
        """The patterns that end before the token `index`, of 1 to `most` tokens."""
        before = tuple(self.tokens[max(0, index - most) : index])
        return [before[-size:] for size in range(1, len(before) + 1)]


class _Pool:
    """Texts, and the place that is used for each pattern in them."""

    def __init__(self, options: NgramOptions, limit: int | None):
        """`limit`: the most tokens of all texts."""
        self.kept = 0  # tokens of all texts
        self._options, self._limit = options, limit
        self._texts: dict[Hashable, _Text] = {}  # of requests that are here
        self._by_number: dict[int, _Text] = {}  # and of those that have ended
        self._numbers = 0
        self._runs: deque[tuple[_Text, int]] = deque()  # with a limit: the texts' tokens, in the order of their coming
        self._places: _Places = _Largest()
        if options.is_keep_all:
            self._places = _Oldest(forgets=limit is not None) if options.is_use_oldest else _Newest()

    def follow(self, key: Hashable, prompt: Sequence[int], answer: Sequence[int]) -> None:
        text = self._texts.get(key)
        if text is not None:
            self._append(text, answer[len(text.tokens) - len(prompt) :])
            return
        text = self._texts[key] = self._by_number[self._numbers] = _Text(self._numbers)
        self._numbers += 1
        self._append(text, [*prompt, *answer])

    def _append(self, text: _Text, tokens: Sequence[int]) -> None:
        sizes, length, places = self._options.max_matching_ngram_size, self._options.max_draft_len, self._places
        base = text.number * _SPAN
        for index, token in enumerate(tokens, start=len(text.tokens)):
            text.tokens.append(token)
            places.begin(text.patterns(index, sizes), base + index)
            full = index + 1 - length  # where the match begins that is now as long as a draft may be
            if places.asks_for_full and full >= text.dropped:
                places.fill(text.patterns(full, sizes), base + full)
        self.kept += len(tokens)
        if self._limit is not None and tokens:
            self._runs.append((text, len(tokens)))
            self._drop(self.kept - self._limit)

    def _drop(self, count: int) -> None:
        """The oldest `count` tokens leave."""
        while count > 0:
            text, length = self._runs.popleft()
            leaving = min(count, length)
            if leaving < length:
                self._runs.appendleft((text, length - leaving))
            for index in range(text.dropped, text.dropped + leaving):
                patterns = text.patterns(index, self._options.max_matching_ngram_size)
                self._places.end(patterns, text.number * _SPAN + index)
            text.dropped += leaving
            self.kept -= leaving
            count -= leaving
            self._forget(text)

    def draft(self, key: Hashable, most: int) -> list[int]:
        tokens, used = self._texts[key].tokens, self._places.used
        for size in range(min(self._options.max_matching_ngram_size, len(tokens)), 0, -1):
            place = used.get(tuple(tokens[-size:]))
            if place is not None:
                number, first = divmod(place, _SPAN)
                return self._by_number[number].tokens[first : first + most]
        return []

    def leave(self, key: Hashable) -> None:
        text = self._texts.pop(key)
        text.has_ended = True
        self._forget(text)

    def _forget(self, text: _Text) -> None:
        """Forget a text that has ended if all its tokens have left."""
        if text.has_ended and text.dropped == len(text.tokens):
            del self._by_number[text.number]


class _Places:
    """The place that is used for each pattern. Places come and leave in the same order."""

    asks_for_full = False  # whether `fill` is wanted

    def __init__(self) -> None:
        self.used: dict[_Pattern, int] = {}

    def begin(self, patterns: list[_Pattern], place: int) -> None:
        """The patterns' match at `place` begins, with one token."""
        raise NotImplementedError

    def fill(self, patterns: list[_Pattern], place: int) -> None:
        """The patterns' match at `place` has as many tokens as a draft may have."""

    def end(self, patterns: list[_Pattern], place: int) -> None:
        """The patterns' match at `place` leaves."""
        for pattern in patterns:
            if self.used.get(pattern) == place:
                del self.used[pattern]


class _Newest(_Places):
    """All matches are kept and the newest is used: older ones would leave before it, so it alone is remembered."""

    def begin(self, patterns: list[_Pattern], place: int) -> None:
        for pattern in patterns:
            self.used[pattern] = place


class _Largest(_Places):
    """One match is kept: the first, until a newer one is full."""

    asks_for_full = True

    def begin(self, patterns: list[_Pattern], place: int) -> None:
        for pattern in patterns:
            self.used.setdefault(pattern, place)

    fill = _Newest.begin


class _Oldest(_Places):
    """All matches are kept and the oldest is used. Where matches leave, each pattern's are linked, the oldest first;
    elsewhere the oldest alone is remembered."""

    def __init__(self, forgets: bool):
        super().__init__()
        self._forgets = forgets
        self._newest: dict[_Pattern, int] = {}
        self._next: dict[tuple[int, int], int] = {}  # by place and size of the pattern

    def begin(self, patterns: list[_Pattern], place: int) -> None:
        for pattern in patterns:
            if self.used.setdefault(pattern, place) != place and self._forgets:
                self._next[self._newest[pattern], len(pattern)] = place
            if self._forgets:
                self._newest[pattern] = place

    def end(self, patterns: list[_Pattern], place: int) -> None:
        for pattern in patterns:
            after = self._next.pop((place, len(pattern)), None)
            if after is None:
                del self.used[pattern], self._newest[pattern]
            else:
                self.used[pattern] = after
