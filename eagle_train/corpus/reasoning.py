"""The reasoning that models write before an answer: its tags, in prompts and in contents.

Text and message functions; knows nothing of templates. DESIGN section 3.1.
"""

import re

from eagle_train.corpus.conversations import (
    REASONING_FIELDS,
    Message,
    content_of,
    is_answer,
    reasoning_of,
)
from eagle_train.errors import check, shown

# The tags around it, by models.
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ("<longcat_think>", "</longcat_think>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("◁think▷", "◁/think▷"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
ANY_TAG = re.compile("(" + "|".join(re.escape(tag) for tags in REASONING_TAGS for tag in tags) + ")")
# Closing tags: behind them an answer begins; templates drop what precedes them.
CLOSING_TAG = re.compile("|".join(re.escape(closing) for _, closing in REASONING_TAGS))
# A tag at a text's end: <think>, [THINK], <|START_THINKING|>, ◁think▷.
_LAST_TAG = re.compile(r"(<[^<>]+>|\[[^\[\]]+\]|◁[^◁▷]+▷)\s*\Z")
_CUT_TAG = re.compile(r"(<[^<>\s]*|\[[^\[\]\s]*|◁[^◁▷\s]*)\Z")
_NAME = re.compile("think|thought|reason", re.IGNORECASE)
# What stands beside a tag that a sentence speaks of, and beside none that a model writes: r1\n</think>\n\na1.
_BESIDE_WORD = " \t`'\""


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


def closes_reasoning(text: str) -> bool:
    """Whether a text ends with a known tag that closes reasoning."""
    return text.rstrip().endswith(tuple(closing for _, closing in REASONING_TAGS))


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
    """The tags around the reasoning at the beginning of an answer's content; None without any.

    The opening tag may be missing: where the prompt ends in it, the model does not write it.
    """
    if not is_answer(message) or reasoning_of(message):
        return None
    return _tags_around(content_of(message).lstrip())


def _tags_around(content: str) -> tuple[str, str] | None:
    """The tags around the reasoning that a content begins with; None without any."""
    whole = ((one, other) for one, other in REASONING_TAGS if content.startswith(one) and other in content)
    return next(whole, None) or next((tags for tags in REASONING_TAGS if _lacks_opening(content, *tags)), None)


def _lacks_opening(content: str, opening: str, closing: str) -> bool:
    """Whether a content has a closing tag without an opening one, and not as a word of a sentence."""
    before, found, after = content.partition(closing)
    beside = (before[-1:], after[:1])
    is_word = "\n" not in beside and any(each in tuple(_BESIDE_WORD) for each in beside)
    return found != "" and opening not in content and not is_word


def inline_reasoning(message: Message, tags: tuple[str, str]) -> str:
    """The reasoning between these tags in an answer's content, without white space around it."""
    opening, closing = tags
    return content_of(message).partition(closing)[0].lstrip().removeprefix(opening).strip()


def without_repetition(message: Message) -> Message:
    """The message without the reasoning in its content, where its field has the same, or the content's is empty.

    Raises UserError for two thoughts that differ: a template would write both.
    """
    content, reasoning = content_of(message), reasoning_of(message)
    tags = _tags_around(content.lstrip()) if is_answer(message) and reasoning else None
    if tags is None:
        return message
    inline = inline_reasoning(message, tags)
    if "".join(inline.split()) in ("", "".join(reasoning.split())):
        return {**message, "content": content.partition(tags[1])[2].lstrip("\n")}
    is_whole = content.lstrip().startswith(tags[0])  # else the closing tag may be a word of the answer
    check(
        not is_whole,
        f"reasoning stands in the content, {shown(inline)}, and beside it, {shown(reasoning)}: leave one out",
    )
    return message


def cut_tag(message: Message) -> str | None:
    """The tag of a thought that an answer's content begins and never ends; None without such a thought."""
    content = content_of(message)
    if not is_answer(message) or reasoning_of(message):
        return None
    last = ((opening, content.rpartition(closing)[2].lstrip()) for opening, closing in REASONING_TAGS)
    return next((opening for opening, rest in last if rest.startswith(opening)), None)


def with_field(message: Message, tags: tuple[str, str]) -> Message:
    """The message with its inline reasoning moved into a field; without a field if it is empty."""
    content, reasoning = content_of(message).partition(tags[1])[2], inline_reasoning(message, tags)
    return {**message, "content": content.lstrip("\n"), **({REASONING_FIELDS[0]: reasoning} if reasoning else {})}


def without_empty_reasoning(message: Message) -> Message:
    """The message without the reasoning block in its content, if that is empty."""
    tags = inline_tags(message)
    return message if tags is None or inline_reasoning(message, tags) else with_field(message, tags)


def with_opening(message: Message, tags: tuple[str, str]) -> Message:
    """The message with the opening tag of its inline reasoning, if that is missing."""
    opening, content = tags[0], content_of(message)
    return message if opening in content else {**message, "content": f"{opening}\n{content.lstrip()}"}
