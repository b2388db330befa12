"""The reasoning that models write before an answer: its tags, in prompts and in contents.

Text and message functions; knows nothing of templates. DESIGN section 3.1.
"""

import re

from eagle_train.corpus.conversations import (
    REASONING_FIELDS,
    Conversation,
    Message,
    content_of,
    is_answer,
    reasoning_of,
)

# The tags around it, by models.
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("◁think▷", "◁/think▷"),
)
ANY_TAG = re.compile("(" + "|".join(re.escape(tag) for tags in REASONING_TAGS for tag in tags) + ")")
# Closing tags: behind them an answer begins; templates drop what precedes them.
CLOSING_TAG = re.compile("|".join(re.escape(closing) for _, closing in REASONING_TAGS))
# A tag at a text's end: <think>, [THINK], <|START_THINKING|>, ◁think▷.
_LAST_TAG = re.compile(r"(<[^<>]+>|\[[^\[\]]+\]|◁[^◁▷]+▷)\s*\Z")
_CUT_TAG = re.compile(r"(<[^<>\s]*|\[[^\[\]\s]*|◁[^◁▷\s]*)\Z")
_NAME = re.compile("think|thought|reason", re.IGNORECASE)


def opening_of(text: str) -> str | None:
    """The opening tag that a text ends with, None if it ends with none."""
    text = text.rstrip()
    if known := next((opening for opening, _ in REASONING_TAGS if text.endswith(opening)), None):
        return known
    found = _LAST_TAG.search(text)
    return found[1] if found and _NAME.search(found[1]) and not is_closing(text) else None


def closings_of(tag: str) -> list[str]:
    """The tags that may close a tag."""
    spelled = (tag[0] + "/" + tag[1:], tag.replace("START", "END"), tag.replace("start", "end"))
    known = [closing for opening, closing in REASONING_TAGS if opening == tag]
    return [*known, *(closing for closing in spelled if closing != tag)]


def is_closing(text: str) -> bool:
    """Whether a text ends with a closing tag: </think>, <|END_THINKING|>, <channel|>."""
    found = _LAST_TAG.search(text)
    if found is None:
        return False
    tag = found[1]
    is_right_half = tag.endswith("|>") and not tag.startswith("<|")
    return tag[1] == "/" or "END" in tag or "_end" in tag or is_right_half


def whole_tags(text: str) -> str:
    """The text without an incomplete tag at its end."""
    return _CUT_TAG.sub("", text)


def behind_tag(message: Message, prompt: str) -> Message:
    """The message without its first tag (<think>), if the prompt ends with the same tag."""
    tag, content = _LAST_TAG.search(prompt), content_of(message).lstrip()
    if tag is None or not content.startswith(tag[1]):
        return message
    return {**message, "content": content[len(tag[1]) :]}


def reasoning_text(message: Message, closing: str, opening: str) -> str | None:
    """A message's reasoning, from its field or between tags in its content; None if it has none."""
    if reasoning := reasoning_of(message):
        return reasoning
    text, closed, _ = content_of(message).rpartition(closing)
    return text.strip().removeprefix(opening) if closed else None


def inline_tags(message: Message) -> tuple[str, str] | None:
    """The tags around the reasoning at the beginning of an answer's content; None without any."""
    content = content_of(message).lstrip()
    if not is_answer(message) or reasoning_of(message):
        return None
    return next(((one, other) for one, other in REASONING_TAGS if content.startswith(one) and other in content), None)


def cut_tag(message: Message) -> str | None:
    """The tag of a thought that an answer's content begins and never ends; None without such a thought."""
    content = content_of(message)
    if not is_answer(message) or reasoning_of(message):
        return None
    last = ((opening, content.rpartition(closing)[2].lstrip()) for opening, closing in REASONING_TAGS)
    return next((opening for opening, rest in last if rest.startswith(opening)), None)


def _with_field(message: Message, tags: tuple[str, str]) -> Message:
    """The message with its inline reasoning moved into a field."""
    opening, closing = tags
    text, _, content = content_of(message).partition(closing)
    reasoning = text.lstrip().removeprefix(opening).strip()
    return {**message, "content": content.lstrip("\n"), **({REASONING_FIELDS[0]: reasoning} if reasoning else {})}


def with_fields(conversation: Conversation, tags: tuple[str, str]) -> Conversation:
    """The conversation with the inline reasoning between these tags moved into fields."""
    messages = [_with_field(each, tags) if inline_tags(each) == tags else each for each in conversation.messages]
    return Conversation(messages, conversation.tools, conversation.muted)
