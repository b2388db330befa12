"""Renderers of the families' chat templates (`chat_templates`), and what of a rendering is supervised."""

from itertools import groupby
from typing import Any

from eagle_train.corpus.conversations import Conversation, conversation_of
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.tokens import Document
from tests.support import chat_templates
from tests.support.chat_templates import DAY


def renderer_of(name: str, merges: int = 0, supervise: str = "assistant", **kwargs: Any) -> ChatRenderer:
    tokenizer = chat_templates.tokenizer_of(name, merges)
    return ChatRenderer(tokenizer, supervise, chat_templates.stop_ids(name, tokenizer), kwargs, DAY)


def produced_ranges(document: Document) -> list[tuple[int, int]]:
    """Ranges [start, end) of produced tokens."""
    found, start = [], 0
    for produced, group in groupby(document.produced.tolist()):
        end = start + len(list(group))
        found += [(start, end)] if produced else []
        start = end
    return found


def supervised_texts(renderer: ChatRenderer, documents: list[Document]) -> list[str]:
    return [renderer.decode(each.tokens[a:b].tolist()) for each in documents for a, b in produced_ranges(each)]


def to_conversation(row: dict) -> Conversation:
    return conversation_of(row, "messages", {})
