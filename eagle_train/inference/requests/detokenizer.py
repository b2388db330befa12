"""Streaming detokenisation: the text of an answer while its tokens come, and whether it holds a stop string.

A token's text depends on its neighbours: a tokenizer drops the first token's space, a character's bytes may be spread
over several tokens, and a run of byte tokens is decoded as a whole or not at all. So the last few tokens are decoded
together, at a cost that does not grow with the answer, and text that later tokens may still change is held back.

Knows tokenizers; nothing of requests, models or tensors.
"""

from functools import cached_property
from typing import Any

from eagle_train.transformers_private import decodes_as_usual

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8, or not yet
_CONTEXT = 8  # tokens decoded before new ones: a character has at most 4 bytes, so earlier tokens change nothing


class Texts:
    """Decodes tokens with a tokenizer. Special and unknown tokens have no text; spaces are kept as they are."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        # The Rust tokenizer, where the Python one adds nothing: two thirds of the time.
        self._backend = tokenizer.backend_tokenizer if decodes_as_usual(tokenizer) else None
        self._shown: dict[int, bool] = {}
        names = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece's byte tokens
        tokens = [token for token in tokenizer.convert_tokens_to_ids(names) if token is not None]
        self.bytes = {token for token in tokens if tokenizer.convert_ids_to_tokens(token) in names}

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, decoded together."""
        if self._backend is not None:
            return self._backend.decode(tokens, skip_special_tokens=True)
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def shows(self, token: int) -> bool:
        """Whether a token has text. Decoded twice in a row, since the first one's space is dropped."""
        if token not in self._shown:
            self._shown[token] = self.decode([token, token]) != ""
        return self._shown[token]

    @cached_property
    def unshown(self) -> dict[str, int]:
        """The tokens that have a name in prompts and no text in answers, by name: special tokens."""
        names = {str(token): number for number, token in self.tokenizer.added_tokens_decoder.items()}
        names |= zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True)
        return {name: token for name, token in names.items() if name and not self.shows(token)}


class Detokenizer:
    """The text of one answer. `text`: the pieces that `new_text` returned; `num_tokens`: the tokens that were added.

    A run of byte tokens at the end is open: further bytes decide whether it decodes to a text or to none. The tokens
    before it are settled.
    """

    def __init__(
        self, texts: Texts, stop_strings: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
    ):
        """`include_stop`: the text ends with its first stop string, not before it. `min_tokens`: a stop string that is
        complete with the first so many tokens is text like any other."""
        self.texts, self.stop_strings = texts, stop_strings
        self.include_stop, self.min_tokens = include_stop, min_tokens
        self.text: list[str] = []
        self.num_tokens = 0
        self._window: list[int] = []  # the last tokens that have text
        self._settled = 0  # how many of these are settled
        self._told = 0  # how many characters of their text `new_text` has returned
        self._free = 0  # characters behind these before whose end no stop string counts

    def add(self, tokens: list[int]) -> None:
        """Append the answer's next tokens."""
        early = max(0, self.min_tokens - self.num_tokens) if self.stop_strings else 0
        for token in tokens[:early]:
            self._append([token])
            self._free = max(self._free, len(self._untold()))  # the text of an open run is not there for a while
        self._append(tokens[early:])

    def _append(self, tokens: list[int]) -> None:
        self.num_tokens += len(tokens)
        for token in filter(self.texts.shows, tokens):
            self._window.append(token)
            if token not in self.texts.bytes:
                self._settled = len(self._window)

    def has_stop_string(self) -> bool:
        """Whether the text holds a stop string; to be called after each token. Bytes that are no character yet do not
        count."""
        return bool(self._stops_in(self._untold()))

    def _untold(self) -> str:
        """The text that `new_text` has not returned, without bytes that are no character yet."""
        text = self.texts.decode(self._window)[self._told :]
        if text.endswith(_REPLACEMENT):
            text = text[:-1] if self._settled == len(self._window) else ""
        return text

    def _stops_in(self, text: str) -> list[tuple[int, int]]:
        """Where each stop string that counts begins and ends for the first time in the text that is not told yet."""
        found = [(text.find(each, max(0, self._free - len(each) + 1)), len(each)) for each in self.stop_strings]
        return [(start, start + length) for start, length in found if start >= 0]

    def new_text(self, final: bool) -> str:
        """The text since the last call. An incomplete character, and what may be the beginning of a stop string, are
        held back. `final`: no token will follow; nothing is held back, and the text ends at its first stop string.
        """
        whole = self.texts.decode(self._window if final else self._window[: self._settled])
        new = whole[self._told :]
        if final:
            stops = self._stops_in(new)
            new = new[: min((end if self.include_stop else start for start, end in stops), default=None)]
        else:
            new = new.removesuffix(_REPLACEMENT)  # the bytes of an incomplete character decode to one
            new = new[: self._stop_prefix(new)]
            self._drop_context(whole, self._told + len(new))
            self._free = max(0, self._free - len(new))
        self.text.append(new)
        return new

    def _stop_prefix(self, text: str) -> int:
        """The place in a text at which a prefix of a stop string begins that the text ends with; else its length."""
        places = range(len(text)) if self.stop_strings else ()
        begins = (n for n in places if any(string.startswith(text[n:]) for string in self.stop_strings))
        return next(begins, len(text))

    def _drop_context(self, whole: str, told: int) -> None:
        """Note that `told` characters of `whole`, the settled tokens' text, were returned, and drop tokens from the
        window that later decoding does not need."""
        untold, self._told = whole[told:], told
        start = self._settled - _CONTEXT
        if start < _CONTEXT:  # not worth its cost
            return
        text = self.texts.decode(self._window[start : self._settled])
        if text.endswith(untold):
            self._window, self._settled, self._told = (
                self._window[start:],
                self._settled - start,
                len(text) - len(untold),
            )
