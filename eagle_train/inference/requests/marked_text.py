"""An answer as a terminal shows it while it comes, accepted draft tokens marked. Knows nothing of how it is made."""

from eagle_train.inference.requests.detokenizer import Detokenizer
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.terminal import GREEN, RESET, printable


class MarkedText:
    """An answer as it comes, with what the draft proposed and the target accepted in green, or in brackets."""

    def __init__(self, text: Detokenizer, color: bool, on_terminal: bool = False):
        """`text`: of an answer of which it has no token yet. `on_terminal`: control characters are escaped."""
        self._text, self._rounds = text, 0  # that were told
        self._on_terminal = on_terminal
        self._before, self._after = (GREEN, RESET) if color else ("[", "]")

    def new_text(self, request: Sequence) -> str:
        """The text since the last call, of a request that has its first token."""
        pieces = [self._next_text(request, 1)] if self._text.num_tokens == 0 else []
        for count in request.rounds[self._rounds :]:
            if accepted := self._next_text(request, count - 1):
                pieces.append(self._before + accepted + self._after)
            pieces.append(self._next_text(request, 1))
        self._rounds = len(request.rounds)
        return "".join(pieces)

    def _next_text(self, request: Sequence, count: int) -> str:
        """The text of the next `count` tokens."""
        start = self._text.num_tokens
        self._text.add(request.generated[start : start + count])
        is_end = self._text.num_tokens == len(request.generated)
        told = self._text.new_text(final=is_end and request.finish_reason is not None)
        return printable(told) if self._on_terminal else told
