"""Whether a new request is to have its drafter: whether drafts save more than reading its prompt for them takes.

What is saved goes by what tokens take with and without drafts, at the batch sizes of the last rounds, and by how long
answers are. Where it is too little, some requests have drafters now and then, so that drafts can be tried again.
DESIGN section 3.5. Knows nothing of plans, acceptance or tensors.
"""

import math
from collections.abc import Callable

_SIZES = 16  # of batches, by powers of two
_KEPT = 1 - 1 / 512  # of how often they came, in a round
_RARE = 0.01  # the share of those that are left out
_LEAST, _MUCH = 0.01, 0.03  # share of plain decoding's time that drafts must save to stay, and to come back
_LOSS = 0.005  # share of plain decoding's time that trying again may take,
_FIRST_GAP, _LAST_GAP = 8, 16  # and batches of requests without drafters that pass before, at least and at most
_REQUESTS = 64  # that lengths remember

TokenSeconds = Callable[[int], tuple[float, float]]
"""What a token takes an engine that decodes so many rows, without drafts and with them."""
ReadSeconds = Callable[[str, float], float]
"""What a drafter, by its name, takes to read a prompt of so many tokens."""


class Lengths:
    """How many tokens requests read before they decode, and how many they write, on average over the last ones. The
    first token that a request writes is not counted: it comes from its prompt."""

    def __init__(self) -> None:
        self._read = self._begun = self._written = self._ended = 0.0

    def read(self, tokens: int, begun: int) -> None:
        """Tokens were read, and so many requests began to decode."""
        keep = (1 - 1 / _REQUESTS) ** begun
        self._read, self._begun = self._read * keep + tokens, self._begun * keep + begun

    def answered(self, tokens: int) -> None:
        """A request ended that wrote so many."""
        keep = 1 - 1 / _REQUESTS
        self._written, self._ended = self._written * keep + tokens - 1, self._ended * keep + 1

    @property
    def prompt(self) -> float:
        """Tokens that a request reads; those that the cache has are not counted."""
        return self._read / max(1.0, self._begun)

    @property
    def answer(self) -> float:
        """Tokens that a request decodes; infinite while no one has ended."""
        return max(1.0, self._written / self._ended) if self._ended else math.inf

    def decoded(self, most: int) -> float:
        """Tokens that a request will decode; it may write `most`."""
        return min(most - 1, (self._written + most - 1) / (self._ended + 1))


class Opening:
    """The choice for an engine, with what it learns."""

    def __init__(self, token_seconds: TokenSeconds, read_seconds: ReadSeconds):
        self._token_seconds, self._read_seconds = token_seconds, read_seconds
        self.lengths = Lengths()
        self._rounds = [0.0] * _SIZES  # how many of the last ones had 1, from 2 on, from 4 on ... rows; without
        self._alike, self._rows = 0, 1  # so many newest ones, which all had this many rows
        self._pays = True
        self._left = 0  # requests until drafts are tried again; below 0: as many have drafters

    def decoded(self, rows: int) -> None:
        """A round of so many rows."""
        if rows != self._rows:
            self._count_rounds()
            self._rows = rows
        self._alike += 1

    def _count_rounds(self) -> None:
        """Bring `_rounds` up to date."""
        kept = _KEPT**self._alike
        self._rounds = [share * kept for share in self._rounds]
        self._rounds[_place(self._rows)] += (1 - kept) / (1 - _KEPT)
        self._alike = 0

    def opens(self, drafter: str, most: int, rows: int, may_try: bool) -> bool:
        """Whether the next request is to have its drafter.

        `most`: tokens that it may write; `rows`: requests that decode with it, itself included; `may_try`: whether it
        is time to try drafts again, should they not pay.
        """
        if most == 1:  # it comes from the prompt
            return False
        saved = self._saved(drafter, most, rows)
        self._pays = saved > (_LEAST if self._pays else _MUCH)
        if not self._pays and self._left <= -rows:  # as many together: one that drafts alone would not pay
            self._left = rows * min(_LAST_GAP, max(_FIRST_GAP, round(-saved / _LOSS)))
        if self._left != 0 or may_try:
            self._left -= 1
        return self._pays or self._left < 0

    def _saved(self, drafter: str, most: int, rows: int) -> float:
        """The share of a request's time without drafts that these save, at the batch sizes of the last rounds."""
        self._count_rounds()
        if not any(self._rounds):
            self._rounds[_place(rows)] = 1
        least = _RARE * sum(self._rounds)
        shares = [(share * 2**place, 2**place) for place, share in enumerate(self._rounds) if share > least]
        both = [(tokens, *self._token_seconds(size)) for tokens, size in shares]
        plain = sum(tokens * without for tokens, without, _ in both)
        drafted = sum(tokens * own for tokens, _, own in both)
        reading = self._read_seconds(drafter, self.lengths.prompt) / self.lengths.decoded(most)  # for each token
        return (plain - drafted - reading * sum(tokens for tokens, *_ in both)) / plain


def _place(rows: int) -> int:
    return min(rows.bit_length(), _SIZES) - 1
