"""What went into a template must come out: where the contents and calls of messages are in a rendered text.

White space may differ, for templates trim, and text may be written as JSON has it; nothing else. DESIGN section 3.1.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from eagle_train.corpus.chat import Message, content_of, is_answer, reasoning_of
from eagle_train.corpus.thoughts import REASONED
from eagle_train.errors import UserError, check, shown

SPACE = re.compile(r"\s+")


class NoJson(UserError):
    """A call's arguments are not written as JSON: perhaps they are when they are given in another form."""


def end_of(wanted: str, text: str, start: int = 0) -> int | None:
    """Where `wanted` ends in `text`, from `start` on or, if it is not there, from the beginning; None if it is not in
    it at all."""
    wanted = wanted.strip()
    for form in spellings(wanted):
        at = text.find(form, start)
        at = text.find(form) if at < 0 < start else at
        if at >= 0:
            return at + len(form)
    return end_of_letters(wanted, text)


def spellings(text: str) -> Iterator[str]:
    yield text
    for is_ascii in (False, True):
        if (escaped := json.dumps(text, ensure_ascii=is_ascii)[1:-1]) != text:
            yield escaped


def end_of_letters(wanted: str, text: str) -> int | None:
    """As `end_of`, but for white space, wherever it is."""
    letters = SPACE.sub("", wanted)
    at = SPACE.sub("", text).find(letters)
    if at < 0:
        return None
    places = [place for place, letter in enumerate(text) if not letter.isspace()]
    return places[at + len(letters) - 1] + 1


def end_of_answer(message: Message, written: str, name: str) -> int:
    """Where the last of what an assistant's message holds ends in what was written. Raises UserError, calling the
    message by `name`, where some of it is not there."""
    end = 0
    if reasoning := reasoning_of(message):
        found = end_of(reasoning, written)
        check(
            found is not None,
            f"the chat template leaves out the reasoning of {name}, {shown(reasoning)}: leave the field out of the "
            "data, or give a template that renders it (target.chat_template=FILE)",
        )
        end = found
    if content_of(message).strip():
        end = max(end, needed(message["content"], written, end, name))
    return max([end, *(end_of_call(call, written, end, name) for call in message.get("tool_calls") or [])])


def needed(content: str, text: str, start: int, name: str) -> int:
    found = end_of(content, text, start)
    check(found is not None, f"the content of {name}, {shown(content)}, is not in what the chat template makes of it")
    return found


def end_of_call(call: dict, written: str, start: int, name: str) -> int:
    """Where a call's name and arguments, compared by value, end at the latest.

    Raises UserError where they are not there. A name alone may be missing: some templates have one tool at most.
    """
    function = call["function"]
    told = f"the call of {function['name']} in {name} is not in the rendering"
    fix = "give a chat template that renders tool calls (target.chat_template=FILE)"
    arguments = function["arguments"]
    values = list(leaves(arguments))
    end = end_of(function["name"], written, start)
    check(end is not None or bool(values), f"{told}: {fix}")
    end = start if end is None else end
    if is_repr(arguments, written):
        raise NoJson(f"{told} as JSON: the chat template writes its arguments as Python has them")
    for value in values:
        found = end_of_value(value, written, end)
        check(found is not None, f"{told} with its argument {shown(value)}: {fix}")
        end = max(end, found)
    return end


def is_repr(arguments: Any, written: str) -> bool:
    """Whether arguments were made text of by Python, or are JSON twice over."""
    if isinstance(arguments, dict):
        return bool(arguments) and repr(arguments) in written and json.dumps(arguments) != repr(arguments)
    again = json.dumps(arguments, ensure_ascii=False)[1:-1]
    return again != arguments and again in written and arguments not in written


def leaves(value: Any) -> Iterator[Any]:
    """The keys and values within arguments, in their order. Text in JSON is its values."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def end_of_value(value: Any, text: str, start: int) -> int | None:
    if isinstance(value, str):
        return end_of(value, text, start)
    found = (end_of(form, text, start) for form in (json.dumps(value), str(value)))
    return next((end for end in found if end is not None), None)


def check_read(messages: list[Message], first: int, prompt: str, start: int = 0) -> None:
    """Raise UserError unless the prompt holds what the messages from number `first` on say, most likely behind
    `start`. Of what the assistant said before, templates drop the reasoning."""
    for number, message in enumerate(messages[first:], first):
        name, content = f"turn {number + 1} ({message['role']})", content_of(message)
        for call in message.get("tool_calls") or []:
            end_of_call(call, prompt, start, name)
        if not content.strip():
            continue
        found = end_of(content, prompt, start)
        if found is None and is_answer(message):
            found = end_of(REASONED.split(content)[-1], prompt, start)
        fix = "; 'data.roles={developer: system}' makes it a system message" if message["role"] == "developer" else ""
        lost = f"the content of {name}, {shown(content)}, is not in what the chat template makes of it{fix}"
        check(found is not None, lost)


def check_tools(tools: list[dict] | None, prompt: str) -> None:
    """Raise UserError unless the prompt names every tool."""
    for tool in tools or []:
        name = tool["function"]["name"]
        check(
            end_of(name, prompt) is not None,
            f"the chat template does not render the row's tools ({name}): give one that does "
            "(target.chat_template=FILE), or leave them out (data.columns.tools=null)",
        )
