"""The reasoning that models write before an answer: its tags, in prompts and in contents.

Knows nothing of templates: texts and messages in, texts and messages out. DESIGN section 3.1.
"""

import re

from eagle_train.corpus.chat import REASONING, Conversation, Message, content_of, is_answer, reasoning_of

# How models begin and end it.
THOUGHT = (
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
TAG = re.compile("(" + "|".join(re.escape(tag) for tags in THOUGHT for tag in tags) + ")")
# Behind these an answer begins; templates drop what is before.
REASONED = re.compile("|".join(re.escape(closing) for _, closing in THOUGHT))
# A tag at a text's end: <think>, [THINK], <|START_THINKING|>, ◁think▷.
LAST_TAG = re.compile(r"(<[^<>]+>|\[[^\[\]]+\]|◁[^◁▷]+▷)\s*\Z")
CUT_TAG = re.compile(r"(<[^<>\s]*|\[[^\[\]\s]*|◁[^◁▷\s]*)\Z")
NAME = re.compile("think|thought|reason", re.IGNORECASE)


def opening_of(text: str) -> str | None:
    """The tag that begins reasoning, if a text ends in one."""
    text = text.rstrip()
    if known := next((opening for opening, _ in THOUGHT if text.endswith(opening)), None):
        return known
    found = LAST_TAG.search(text)
    return found[1] if found and NAME.search(found[1]) and not is_closing(text) else None


def closings_of(tag: str) -> list[str]:
    """What may close a tag."""
    spelled = (tag[0] + "/" + tag[1:], tag.replace("START", "END"), tag.replace("start", "end"))
    known = [closing for opening, closing in THOUGHT if opening == tag]
    return [*known, *(closing for closing in spelled if closing != tag)]


def is_closing(text: str) -> bool:
    """Whether a text ends with a tag that closes something: </think>, <|END_THINKING|>, <channel|>."""
    found = LAST_TAG.search(text)
    if found is None:
        return False
    tag = found[1]
    is_right_half = tag.endswith("|>") and not tag.startswith("<|")
    return tag[1] == "/" or "END" in tag or "_end" in tag or is_right_half


def whole_tags(text: str) -> str:
    """The text without a tag that it breaks off in."""
    return CUT_TAG.sub("", text)


def behind_tag(message: Message, prompt: str) -> Message:
    """The message without the tag that it begins with if the prompt ends in that tag already (<think>)."""
    tag, content = LAST_TAG.search(prompt), content_of(message).lstrip()
    if tag is None or not content.startswith(tag[1]):
        return message
    return {**message, "content": content[len(tag[1]) :]}


def thought_of(message: Message, closing: str, opening: str) -> str | None:
    """A message's reasoning as the model writes it, None if it has none."""
    if reasoning := reasoning_of(message):
        return reasoning
    thought, closed, _ = content_of(message).rpartition(closing)
    return thought.strip().removeprefix(opening) if closed else None


def inline_tags(message: Message) -> tuple[str, str] | None:
    """The tags around the reasoning with which an answer's content begins, None where there is none."""
    content = content_of(message).lstrip()
    if not is_answer(message) or reasoning_of(message):
        return None
    return next(((one, other) for one, other in THOUGHT if content.startswith(one) and other in content), None)


def with_field(message: Message, tags: tuple[str, str]) -> Message:
    """The message with the reasoning within its content as a field of its own."""
    opening, closing = tags
    thought, _, content = content_of(message).partition(closing)
    reasoning = thought.lstrip().removeprefix(opening).strip()
    return {**message, "content": content.lstrip("\n"), **({REASONING[0]: reasoning} if reasoning else {})}


def with_fields(conversation: Conversation, tags: tuple[str, str]) -> Conversation:
    """The conversation with the reasoning between such tags in fields."""
    messages = [with_field(each, tags) if inline_tags(each) == tags else each for each in conversation.messages]
    return Conversation(messages, conversation.tools, conversation.muted)
