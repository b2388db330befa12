"""Texts as the tokens that a server and its model produce together, with a mask of the model's.

A server tokenises the prompt alone and the model writes its own tokens after it: no token spans the prompt's end, even
where the tokenizer would put one there. Knows nothing of conversations. DESIGN section 3.1.
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
    """tokens int64 [n]; produced bool [n]: whether the assistant wrote the token. `text`: their text, empty where it is
    not needed."""

    tokens: torch.Tensor
    produced: torch.Tensor
    text: str = ""


def check_text(text: str) -> None:
    """Raise UserError for text that is not valid Unicode."""
    check(SURROGATE.search(text) is None, "the text holds half of a surrogate pair")


class Encoder:
    """A tokenizer with exact offsets that adds no special tokens.

    Raises UserError for a tokenizer without offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        check(
            tokenizer.is_fast,
            f"the target's tokenizer, {type(tokenizer).__name__}, gives no offsets: it needs a tokenizer.json",
        )
        self.tokenizer = _with_whole_offsets(tokenizer)
        self.added = frozenset(tokenizer.added_tokens_decoder)  # texts are split at these first

    def __call__(self, text: str) -> Encoding:
        """Raises UserError for text that is not valid Unicode."""
        check_text(text)
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)

    def whole(self, text: str, spans: Sequence[Span] | None = None) -> Document:
        """Tokens of the text; produced are those with a character of a span, or all without spans."""
        encoding = self(text)
        return document(encoding.ids, _produced_by(encoding.offsets, spans), text)

    def served(self, text: str, cuts: Sequence[int], spans: Sequence[Span]) -> Document | None:
        """As `whole`, if server and model would produce these tokens: the text up to each of `cuts` has the same tokens
        alone. None if not."""
        encoding = self(text)
        ids, offsets = encoding.ids, encoding.offsets
        if not all(self._is_cut(text, ids, offsets, cut) for cut in cuts):
            return None
        return document(ids, _produced_by(offsets, spans), text)

    def _is_cut(self, text: str, ids: list[int], offsets: list[Span], at: int) -> bool:
        """Whether the tokens of text[:at] are the first tokens of the whole text.

        Only the part behind the last added token is tokenised again: texts are split at added tokens first.
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
        """The tokens of the prompt alone, then those of `written`.

        `spans` are ranges of both texts together. Tokenizers that add a space before every text get a line break first,
        whose tokens are dropped.
        """
        before, decode = self(prompt), self.tokenizer.decode
        known = len(decode(before.ids))

        def is_exact(ids: list[int]) -> bool:
            return decode(before.ids + ids)[known:] == written

        plain = self._behind("", written)
        found = plain if is_exact(plain[0]) else self._behind("\n", written)
        ids, offsets = found if found is plain or is_exact(found[0]) else plain
        offsets = before.offsets + [(start + len(prompt), end + len(prompt)) for start, end in offsets]
        return document(before.ids + ids, _produced_by(offsets, spans), prompt + written)

    def _behind(self, lead: str, written: str) -> tuple[list[int], list[Span]]:
        """The tokens of `written` behind `lead`, whose own are dropped, and their ranges of `written`."""
        skipped = len(self(lead).ids) if lead else 0
        encoding = self(lead + written)
        offsets = [(start - len(lead), end - len(lead)) for start, end in encoding.offsets[skipped:]]
        return encoding.ids[skipped:], offsets


def document(ids: list[int], produced: torch.Tensor, text: str) -> Document:
    return Document(torch.tensor(ids, dtype=torch.int64), produced, text)


def _produced_by(offsets: list[Span], spans: Sequence[Span] | None) -> torch.Tensor:
    """bool [n]: which tokens have a character of a span; all without spans."""
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


def _with_whole_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy with exact offsets. Byte-level post-processors trim spaces from offsets, so an answer's leading space
    would belong to no token; the special tokens that they add come from the chat template here."""
    tokenizer = copy.deepcopy(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    backend.no_truncation()
    backend.no_padding()
    return tokenizer


def misfit(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> str | None:
    """A remark on a tokenizer with tokens beyond the target's embeddings, or with far fewer tokens; None for others."""
    known = set(tokenizer.get_vocab().values())
    unknown = sum(token >= num_embeddings for token in known)
    if unknown:
        return (
            f"{unknown} of the tokenizer's {len(known)} tokens are beyond the target's {num_embeddings} embeddings; "
            "texts that contain one of them are refused"
        )
    if len(known) < num_embeddings / 2:
        return (
            f"the tokenizer has {len(known)} tokens, and the target {num_embeddings} embeddings; is it the one that "
            "the target was trained with?"
        )
    return None
