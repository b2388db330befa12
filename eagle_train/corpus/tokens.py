"""Texts as the tokens that a server and its model would have made of them, with a mask of what the model wrote.

A server tokenises a prompt alone, and the model then writes tokens of its own: none of them is across the prompt's end,
even where the tokenizer would put one there. Knows nothing of conversations. DESIGN section 3.1.
"""

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Encoding
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from eagle_train.errors import SURROGATE, check

Span = tuple[int, int]  # characters [start, end) of a text


@dataclass(frozen=True, eq=False)
class Document:
    """tokens int64 [n], and produced bool [n]: True where the assistant produced the token. `text`: what they are made
    of, empty where nobody needs it."""

    tokens: torch.Tensor
    produced: torch.Tensor
    text: str = ""


def check_text(text: str) -> None:
    """Raise UserError for what no token can be made of."""
    check(SURROGATE.search(text) is None, "the text holds half of a surrogate pair")


class Encoder:
    """A tokenizer with exact offsets, which adds nothing to a text.

    Raises UserError for a tokenizer that cannot tell which characters a token came from.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        check(
            tokenizer.is_fast,
            f"the target's tokenizer, {type(tokenizer).__name__}, gives no offsets: it needs a tokenizer.json",
        )
        self.tokenizer = with_whole_offsets(tokenizer)
        self.added = frozenset(tokenizer.added_tokens_decoder)  # texts are cut at these before anything else

    def __call__(self, text: str) -> Encoding:
        """Raises UserError for text that is no Unicode."""
        check_text(text)
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)

    def whole(self, text: str, spans: Sequence[Span] | None = None) -> Document:
        """Tokens of the text; produced are those that hold a character of a span, or all without spans."""
        encoding = self(text)
        return document(encoding.ids, produced_by(encoding.offsets, spans), text)

    def served(self, text: str, cuts: Sequence[int], spans: Sequence[Span]) -> Document | None:
        """As `whole`, if a server and its model would have cut the text into these tokens: the text up to each of
        `cuts` has the tokens that it has alone. None if not."""
        encoding = self(text)
        ids, offsets = encoding.ids, encoding.offsets
        if not all(self.is_cut(text, ids, offsets, cut) for cut in cuts):
            return None
        return document(ids, produced_by(offsets, spans), text)

    def is_cut(self, text: str, ids: list[int], offsets: list[Span], at: int) -> bool:
        """Whether the tokens of text[:at] are those that the whole text begins with.

        Only what is behind the last added token before is tokenised again: nothing before it has a say in that.
        """
        end = bisect_left(offsets, (at,))
        if end == 0:
            return True
        if offsets[end - 1][1] > at:
            return False
        first = end - 1
        while first > 0 and ids[first] not in self.added:
            first -= 1
        return first == end - 1 or self(text[offsets[first][0] if first else 0 : at]).ids == ids[first:end]

    def apart(self, prompt: str, written: str, spans: Sequence[Span]) -> Document:
        """The tokens of the prompt alone, and then those of what was written, none of which begins before it.

        `spans` are of both texts together. Tokenizers that begin every text with a space are given a line's end to
        begin with.
        """
        before, wanted = self(prompt), None
        decode = self.tokenizer.decode
        known = decode(before.ids)
        for lead in ("", "\n"):
            skipped = len(self(lead).ids) if lead else 0
            encoding = self(lead + written)
            ids = encoding.ids[skipped:]
            offsets = [(start - len(lead), end - len(lead)) for start, end in encoding.offsets[skipped:]]
            wanted = wanted or (ids, offsets)
            if decode(before.ids + ids)[len(known) :] == written:
                wanted = (ids, offsets)
                break
        ids, offsets = wanted
        offsets = before.offsets + [(start + len(prompt), end + len(prompt)) for start, end in offsets]
        return document(before.ids + ids, produced_by(offsets, spans), prompt + written)


def document(ids: list[int], produced: torch.Tensor, text: str) -> Document:
    return Document(torch.tensor(ids, dtype=torch.int64), produced, text)


def produced_by(offsets: list[Span], spans: Sequence[Span] | None) -> torch.Tensor:
    """bool [n]: which tokens, by their characters, hold some of a span; all without spans."""
    if spans is None:
        return torch.ones(len(offsets), dtype=torch.bool)
    produced = torch.zeros(len(offsets), dtype=torch.bool)
    for start, end in spans:
        if start < end:
            first, last = bisect_left(offsets, (start,)), bisect_left(offsets, (end,))
            while first > 0 and offsets[first - 1][1] > start:
                first -= 1
            produced[first:last] = True
    return produced


def with_whole_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy whose offsets are exact. Byte-level post-processors trim spaces from them, so that the space an answer
    begins with would belong to no token; special tokens, their other use, are the chat template's here."""
    tokenizer = copy.deepcopy(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    backend.no_truncation()
    backend.no_padding()
    return tokenizer


def misfit(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> str | None:
    """What to tell of a tokenizer that has tokens beyond a target's embeddings, or far fewer tokens; None of others."""
    known = set(tokenizer.get_vocab().values())
    unknown = sum(token >= num_embeddings for token in known)
    if unknown:
        return (
            f"{unknown} of the tokenizer's {len(known)} tokens are beyond the target's {num_embeddings} embeddings; "
            "texts that hold one of them are refused"
        )
    if len(known) < num_embeddings / 2:
        return (
            f"the tokenizer has {len(known)} tokens, and the target {num_embeddings} embeddings; is it the one that "
            "the target was trained with?"
        )
    return None
