"""Harmony's messages (gpt-oss), one for each channel of a turn, as one message a turn in OpenAI's form.

Knows nothing of roles, columns or templates.
"""

from collections.abc import Callable
from typing import Any

from eagle_train.errors import UserError, check

_FUNCTIONS = "functions."  # the recipients that are the row's tools
_OWN = ("channel", "recipient", "content_type")  # what only Harmony's messages have


def folded(turns: list, is_answer: Callable[[Any], bool]) -> list:
    """Turns with each of the assistant's made of its messages in channels; other turns unchanged. `is_answer`: whether
    a role is the assistant's.

    `analysis` is reasoning, `final` the content, and a message to functions.NAME a call. Raises UserError for other
    channels and recipients, and for what OpenAI's form has no place for: a preamble before calls, reasoning that
    nothing follows.
    """
    in_channel = [
        isinstance(turn, dict) and bool(turn.get("channel")) and is_answer(turn.get("role")) for turn in turns
    ]
    if not any(in_channel):
        return turns
    made: list = []
    group: list[dict] = []
    for turn, is_part in zip(turns, in_channel, strict=True):
        if group and (not is_part or _is_next(turn, group[-1])):
            made.append(_turn_of(group))
            group = []
        if is_part:
            group.append(turn)
        else:
            made.append(_named(turn))
    return made + ([_turn_of(group)] if group else [])


def _is_next(message: dict, last: dict) -> bool:
    """Whether a message begins the next turn: behind the content, and behind calls if it is none."""
    return last["channel"] == "final" or (_called(last) is not None and _called(message) is None)


def _called(message: dict) -> str | None:
    """The function that a message calls; None if it is no call. Raises UserError for another recipient."""
    to = message.get("recipient")
    if to in (None, "", "all", "user"):
        return None
    if isinstance(to, str) and to.startswith(_FUNCTIONS) and to != _FUNCTIONS:
        return to.removeprefix(_FUNCTIONS)
    raise UserError(f"a turn's recipient must be functions.NAME, or none, not {to!r}: no chat template renders it")


def _turn_of(group: list[dict]) -> dict:
    """One turn of the messages of its channels."""
    thoughts, calls, finals = [], [], []
    for message in group:
        channel, name = message["channel"], _called(message)
        if name is not None:
            calls.append({"name": name, "arguments": _text_of(message.get("content"))})
        elif channel == "analysis":
            thoughts.append(message)
        elif channel == "final":
            finals.append(message)
        else:
            check(channel == "commentary", f"a turn's channel must be analysis, commentary or final, not {channel!r}")
            raise UserError(
                "a turn has text in the channel commentary, which chat templates have no place for: leave it out, or "
                "give it the recipient functions.NAME if it is a call"
            )
    check(len(thoughts) < 2, "a turn has two messages in the channel analysis: join them, or leave one out")
    check(bool(calls or finals), "a turn has the channel analysis alone: a call or the channel final must follow it")
    weights = {str(message.get("weight", 1)) for message in group}
    check(len(weights) == 1, "the channels of a turn have different weights: give all of them the same")
    kept = {key: value for message in group for key, value in message.items() if key not in _OWN}
    reasoning = [{"type": "thinking", "thinking": each.get("content")} for each in thoughts]
    contents = [part for each in finals for part in _parts_of(each.get("content"))]
    return {**kept, "content": [*reasoning, *contents], **({"tool_calls": calls} if calls else {})}


def _parts_of(content: Any) -> list:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _text_of(content: Any) -> Any:
    """A content's parts of text as one text; any other content unchanged."""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] if isinstance(part, dict) and "text" in part else str(part) for part in content)


def _named(turn: Any) -> Any:
    """A tool's result with the function's own name."""
    name = turn.get("name") if isinstance(turn, dict) else None
    if not isinstance(name, str) or not name.startswith(_FUNCTIONS):
        return turn
    return {**turn, "name": name.removeprefix(_FUNCTIONS)}
