"""Text from tokens as they come: what of it is new and stays, and whether it holds a stop string.

What a token adds to a text depends on its neighbours: the first one's space is left out, a character's bytes may be
divided over several, and a run of byte tokens is one text or none. So the last few are always decoded together, at a
cost that does not grow with the answer, and what may still change is held back.

Knows tokenizers; nothing of requests, models or tensors.
"""

from typing import Any

from eagle_train.transformers_private import decodes_as_usual

UNDECODED = "\ufffd"  # stands for bytes that are no character, or not yet
CONTEXT = 8  # tokens: after the four bytes that a character has at most, it no longer matters where decoding began


class Texts:
    """How a tokenizer makes text of tokens: special ones and those it does not know are left out, spaces are not."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        # What most tokenizers ask, and no more than that: in two thirds of the time.
        self.backend = tokenizer.backend_tokenizer if decodes_as_usual(tokenizer) else None
        self.shown: dict[int, bool] = {}
        names = [f"<0x{byte:02X}>" for byte in range(256)]  # as SentencePiece calls them
        tokens = [token for token in tokenizer.convert_tokens_to_ids(names) if token is not None]
        self.bytes = {token for token in tokens if tokenizer.convert_ids_to_tokens(token) in names}

    def decode(self, tokens: list[int]) -> str:
        if self.backend is not None:
            return self.backend.decode(tokens, skip_special_tokens=True)
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def shows(self, token: int) -> bool:
        """Whether a token adds anything to a text. Two are looked at, as the first one's space is left out."""
        if token not in self.shown:
            self.shown[token] = self.decode([token, token]) != ""
        return self.shown[token]


class Detokenizer:
    """One answer's text. `text`: what was told of it, in pieces. `num_read`: how many tokens were read.

    A run of byte tokens at the end is open: all of it is undecoded if it ends as no text. What is before it is settled.
    """

    def __init__(self, texts: Texts, stop_strings: tuple[str, ...] = ()):
        self.texts, self.stop_strings = texts, stop_strings
        self.text: list[str] = []
        self.num_read = 0
        self.window: list[int] = []  # the last tokens that show
        self.settled = 0  # of these tokens
        self.told = 0  # of the characters of these tokens' text

    def read(self, tokens: list[int]) -> None:
        self.num_read += len(tokens)
        for token in filter(self.texts.shows, tokens):
            self.window.append(token)
            if token not in self.texts.bytes:
                self.settled = len(self.window)

    def has_stopped(self) -> bool:
        """Whether the text holds a stop string, asked for after each token. What is undecoded does not count yet.

        An open run is decoded from its beginning: byte tokens are one text or none."""
        text = self.texts.decode(self.window)[self.told :]
        if text.endswith(UNDECODED):
            text = text[:-1] if self.settled == len(self.window) else ""
        return any(string in text for string in self.stop_strings)

    def tell(self, last: bool) -> str:
        """What is new. Held back until more is read: a character that is not whole yet, and what may be the beginning
        of a stop string. `last`: nothing will be read any more; the text ends before the first stop string in it."""
        whole = self.texts.decode(self.window if last else self.window[: self.settled])
        new = whole[self.told :]
        if last:
            new = new[: min((new.index(string) for string in self.stop_strings if string in new), default=None)]
        else:
            new = new.removesuffix(UNDECODED)  # all bytes that may become one character are one of these
            new = new[: self.undecided(new)]
            self.shorten(whole, self.told + len(new))
        self.text.append(new)
        return new

    def undecided(self, text: str) -> int:
        """Where in a text begins what may be the beginning of a stop string."""
        places = range(len(text)) if self.stop_strings else ()
        begins = (n for n in places if any(string.startswith(text[n:]) for string in self.stop_strings))
        return next(begins, len(text))

    def shorten(self, whole: str, told: int) -> None:
        """So much is told of `whole`, the settled tokens' text; what no later text needs leaves the window."""
        untold, self.told = whole[told:], told
        start = self.settled - CONTEXT
        if start < CONTEXT:  # not worth its cost
            return
        text = self.texts.decode(self.window[start : self.settled])
        if text.endswith(untold):
            self.window, self.settled, self.told = self.window[start:], self.settled - start, len(text) - len(untold)
