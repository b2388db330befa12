"""Finds contents, reasoning and tool calls of messages in rendered text; what is missing there was lost.

White space may differ, as templates trim, and text may be escaped as in JSON; nothing else. DESIGN section 3.1.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from eagle_train.corpus.conversations import Message, content_of, is_answer, reasoning_of
from eagle_train.corpus.reasoning import CLOSING_TAG, inline_tags
from eagle_train.errors import UserError, check, shown

_RENDERS_CALLS = "give a chat template that renders tool calls (target.chat_template=FILE)"
_SPACE = re.compile(r"\s+")


class NotAsJson(UserError):
    """A call's arguments were rendered, but not as JSON: another form of the call may help."""


def end_of(wanted: str, text: str, start: int = 0) -> int | None:
    """Where `wanted` ends in `text`, searched from `start` on and then from the beginning; None if it is missing."""
    wanted = wanted.strip()
    for form in _spellings(wanted):
        at = text.find(form, start)
        at = text.find(form) if at < 0 < start else at
        if at >= 0:
            return at + len(form)
    return _end_of_letters(wanted, text)


def _spellings(text: str) -> Iterator[str]:
    yield text
    for is_ascii in (False, True):
        if (escaped := json.dumps(text, ensure_ascii=is_ascii)[1:-1]) != text:
            yield escaped


def _end_of_letters(wanted: str, text: str) -> int | None:
    """As `end_of`, ignoring white space everywhere."""
    letters = _SPACE.sub("", wanted)
    at = _SPACE.sub("", text).find(letters)
    if at < 0:
        return None
    places = [place for place, letter in enumerate(text) if not letter.isspace()]
    return places[at + len(letters) - 1] + 1


def end_of_answer(message: Message, written: str, name: str) -> int:
    """Where the last of an assistant message's reasoning, content and calls ends in `written`.

    Raises UserError, which calls the message `name`, if some of it is missing.
    """
    end = 0
    if reasoning := reasoning_of(message):
        found = end_of(reasoning, written)
        if found is None:
            raise UserError(
                f"the chat template leaves out the reasoning of {name}, {shown(reasoning)}: leave it out of the "
                "data, or give a template that renders it (target.chat_template=FILE)"
            )
        end = found
    if content_of(message).strip():
        end = max(end, _end_of_content(message, written, end, name))
    calls = message.get("tool_calls") or []
    _check_number(calls, written, name)
    return max([end, *(_end_of_call(call, written, end, name) for call in calls)])


def _end_of_content(message: Message, text: str, start: int, name: str) -> int:
    content = content_of(message)
    found = end_of(content, text, start)
    if found is None:
        raise UserError(f"the content of {name}, {shown(content)}, is not in the chat template's rendering")
    tag = CLOSING_TAG.search(content) if inline_tags(message) is None else None  # a word of the answer
    if tag is not None and not any(form in text for form in _spellings(content.strip())):
        raise UserError(
            f"the chat template takes {tag[0]!r} in the content of {name}, {shown(content)}, for the end of reasoning, "
            "and changes the text: leave the row out"
        )
    return found


def _check_number(calls: list[dict], written: str, name: str) -> None:
    """Raise UserError where the model's text names a function less often than a turn calls it: the arguments of a lost
    call may stand in those of another. Templates that leave out the names have none."""
    for function, count in Counter(call["function"]["name"] for call in calls).items():
        found = written.count(function)
        check(
            found == 0 or found >= count,
            f"{count - found} of the {count} calls of {function} in {name} are not in the rendering: {_RENDERS_CALLS}",
        )


def _end_of_call(call: dict, written: str, start: int, name: str) -> int:
    """Where the last of a call's name and arguments ends; arguments are compared by value.

    Raises UserError if some are missing. The name alone may be: some templates have one tool at most.
    """
    function = call["function"]
    problem = f"the call of {function['name']} in {name} is not in the rendering"
    arguments = function["arguments"]
    values = list(_leaves(arguments))
    found = end_of(function["name"], written, start)
    check(found is not None or bool(values), f"{problem}: {_RENDERS_CALLS}")
    end = start if found is None else found
    if _is_repr(arguments, written):
        raise NotAsJson(f"{problem} as JSON: the chat template writes its arguments in Python's syntax")
    for value in values:
        found = _end_of_value(value, written, end)
        if found is None:
            raise UserError(f"{problem} with its argument {shown(value)}: {_RENDERS_CALLS}")
        end = max(end, found)
    return end


def _is_repr(arguments: Any, written: str) -> bool:
    """Whether arguments were written in Python's syntax, or encoded as JSON twice."""
    if isinstance(arguments, dict):
        return bool(arguments) and repr(arguments) in written and json.dumps(arguments) != repr(arguments)
    again = json.dumps(arguments, ensure_ascii=False)[1:-1]
    return again != arguments and again in written and arguments not in written


def _leaves(value: Any) -> Iterator[Any]:
    """The keys and values within arguments, in their order; JSON text is decoded."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _end_of_value(value: Any, text: str, start: int) -> int | None:
    if isinstance(value, str):
        return end_of(value, text, start)
    found = (end_of(form, text, start) for form in (json.dumps(value), str(value)))
    return next((end for end in found if end is not None), None)


def check_read(messages: list[Message], first: int, prompt: str, start: int = 0) -> None:
    """Raise UserError unless the prompt holds contents and calls of the messages from number `first` on.

    They are searched from `start` on first. Earlier reasoning may be missing: templates drop it.
    """
    for number, message in enumerate(messages[first:], first):
        name, content = f"turn {number + 1} ({message['role']})", content_of(message)
        for call in message.get("tool_calls") or []:
            _end_of_call(call, prompt, start, name)
        if not content.strip():
            continue
        found = end_of(content, prompt, start)
        if found is None and is_answer(message):
            found = end_of(CLOSING_TAG.split(content)[-1], prompt, start)
        fix = "; 'data.roles={developer: system}' makes it a system message" if message["role"] == "developer" else ""
        lost = f"the content of {name}, {shown(content)}, is not in the chat template's rendering{fix}"
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
