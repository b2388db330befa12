"""Rows of the user's data as conversations: roles, tool calls, tools and weights, whatever format they came in.

Knows nothing of files, templates or tokens.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_train.corpus.columns import FORMATS, column, tools_column
from eagle_train.errors import UserError, check, shown

SUPERVISE = ("assistant", "last", "all")
CALL = "function_call"  # the role of a turn whose content is a call, or a list of calls, in JSON
# Who speaks, in lower case, and the role that chat templates know.
ROLES = {
    "human": "user",
    "prompter": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    CALL: CALL,
    "tool_call": CALL,
}
TEXTS = ("text", "input_text", "output_text")  # the types of parts that are text
THOUGHTS = ("thinking", "reasoning")  # of those that are reasoning, under a key of the same name or `text`
REASONING = ("reasoning_content", "reasoning", "thinking")  # the names that templates and servers have for it
# What a ShareGPT turn may have beside its speaker and its text.
EXTRAS = ("weight", "name", "tool_calls", "tool_call_id", *REASONING)

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages of known roles. `tools`: OpenAI function schemas, or None. `muted`: numbers of the assistant's messages
    that are not to be learnt (OpenAI's weight 0)."""

    messages: list[Message]
    tools: list[dict] | None = None
    muted: frozenset[int] = frozenset()


def conversation_of(
    row: Mapping, data_format: str, columns: Mapping[str, str | None], roles: Mapping[str, str] = ROLES
) -> Conversation:
    """A row of any format but text. Raises UserError as `to_messages` does, and for tools and weights that are none."""
    messages = to_messages(row, data_format, columns, roles)
    muted = [number for number, message in enumerate(messages) if weight_of(message) == 0]
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    return Conversation(messages, tools_of(row, columns), frozenset(muted))


def to_messages(
    row: Mapping, data_format: str, columns: Mapping[str, str | None], roles: Mapping[str, str] = ROLES
) -> list[Message]:
    """A row of the formats messages, sharegpt or prompt_response as messages of a known role and text content.

    `columns` maps the format's keys (`FORMATS`, `BESIDE`) to the row's columns; a key left out is its own column's
    name. `roles`: see `ROLES`; keys are in lower case. Other fields of a message (reasoning_content, say) are kept for
    the template, unless they are None; calls are OpenAI's `tool_calls`, their arguments mappings where they are JSON
    objects. Raises UserError, without the row's place, for a row without turns and for roles, contents and calls that
    are none.
    """
    if data_format == "messages":
        turns = turns_of(row, "messages", columns)
    elif data_format == "sharegpt":
        turns = from_sharegpt(turns_of(row, "conversations", columns))
    else:
        assert data_format == "prompt_response", data_format
        prompt, response = (column(row, key, columns) for key in FORMATS["prompt_response"])
        turns = [*with_input(as_turns(prompt, "user"), row, columns), *as_turns(response, "assistant")]
    check(len(turns) > 0, "the row has no turns")
    return [*system_of(row, columns, turns), *(validated(turn, roles) for turn in turns)]


def turns_of(row: Mapping, key: str, columns: Mapping[str, str | None]) -> list:
    """The column of turns, which may be written as JSON. Raises UserError unless it is a list."""
    value, told = column(row, key, columns), f"the column {columns.get(key, key)!r}: the turns"
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, told)
    check(isinstance(value, list), f"{told} must be a list, not {type(value).__name__}")
    return value


def as_turns(said: Any, role: str) -> list:
    """A prompt or a response: messages, which may be written as JSON, or the content of a single one."""
    value = said
    if isinstance(said, str) and said.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(said)
    return value if is_turns(value) else [{"role": role, "content": said}]


def with_input(turns: list, row: Mapping, columns: Mapping[str, str | None]) -> list:
    """A prompt with the row's input, if that is mapped and not empty, on a line of its own behind it (Alpaca)."""
    name = columns.get("input")
    given = row.get(name) if name else None
    if given is None or given == "":
        return turns
    check(isinstance(given, str), f"the column {name!r} must be text, not {type(given).__name__}")
    asked = turns[-1]["content"] if turns else None
    check(isinstance(asked, str), f"the column {name!r} goes on a prompt that is text")
    return [*turns[:-1], {**turns[-1], "content": f"{asked}\n{given}"}]


def is_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)


def from_sharegpt(turns: list) -> list[Message]:
    """ShareGPT's {"from", "value"} turns as messages, whose roles are the speakers' names."""
    told = []
    for turn in turns:
        known = isinstance(turn, dict) and ("from" in turn or "role" in turn)
        check(known, f"a turn must be an object with 'from' and 'value', not {shown(turn)}")
        turn = {key: value for key, value in turn.items() if value is not None}
        extras = {key: turn[key] for key in EXTRAS if key in turn}
        content = turn.get("value", turn.get("content"))
        told.append({"role": turn.get("from", turn.get("role")), "content": content, **extras})
    return told


def system_of(row: Mapping, columns: Mapping[str, str | None], turns: list) -> list[Message]:
    """The system message of a column of its own, if `data.columns.system` names one that is not empty."""
    if not columns.get("system"):
        return []
    content = column(row, "system", columns)
    if content is None or content == "":
        return []
    check(isinstance(content, str), f"the system column must be text, not {type(content).__name__}")
    first = turns[0].get("role") if isinstance(turns[0], dict) else None
    check(first != "system", f"the row has a system message and a column {columns['system']!r}: leave one out")
    return [{"role": "system", "content": content}]


def validated(turn: Any, roles: Mapping[str, str] = ROLES) -> Message:
    """A message with its role mapped, its text parts joined and its calls in OpenAI's form. Raises UserError."""
    check(isinstance(turn, dict), f"a turn must be an object with role and content, not {type(turn).__name__}")
    kept = {key: value for key, value in turn.items() if value is not None}
    check("role" in kept or "from" not in kept, "a turn has 'from' and no role: data.format=sharegpt reads such turns")
    role, content = role_of(kept.get("role"), roles), kept.get("content")
    if role == CALL:
        return {**kept, "role": "assistant", "content": "", "tool_calls": calls_of(content)}
    check_reasoning(kept)
    given = [calls for key in ("function_call", "tool_calls") if (calls := kept.pop(key, None))]
    check(len(given) < 2, "a turn has function_call and tool_calls: leave one out")
    check(not given or role == "assistant", f"a turn of {role} has calls of tools; the assistant alone may call them")
    for calls in given:
        kept["tool_calls"] = calls_of(calls)
        is_blank = content is None or (isinstance(content, str) and not content.strip())
        content = "" if is_blank else content
    if role == "tool":
        content = as_result(content)
    elif role == "assistant":
        kept, content = without_thoughts(kept, content)
    content = joined(content, role)
    check(isinstance(content, str), f"the content of a turn of {role} must be text, not {type(content).__name__}")
    return {**kept, "role": role, "content": content}


def check_reasoning(turn: Mapping) -> None:
    """Raise UserError for reasoning that is no text, and where it has several names and is not the same."""
    told = {key: turn[key] for key in REASONING if turn.get(key) not in (None, "")}
    for key, value in told.items():
        check(isinstance(value, str), f"a turn's {key} must be text, not {type(value).__name__}")
    check(len(set(told.values())) < 2, f"a turn has {' and '.join(told)}, which differ: leave one out")


def as_result(content: Any) -> Any:
    """What a tool gave as the text that it is for a model: values in JSON, and nothing as no text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(is_text_part(part) for part in content):
        return content
    return "" if content is None else json.dumps(content, ensure_ascii=False)


def without_thoughts(turn: Message, content: Any) -> tuple[Message, Any]:
    """A turn and its content, without the parts of it that are reasoning, which is then a field of the turn."""
    if not isinstance(content, list):
        return turn, content
    thoughts = [part for part in content if isinstance(part, dict) and part.get("type") in THOUGHTS]
    if not thoughts:
        return turn, content
    check(not reasoning_of(turn), "a turn has reasoning within its content and beside it: leave one out")
    texts = [part.get(part["type"], part.get("text")) for part in thoughts]
    reasoning = "".join(joined(text, "assistant") or "" for text in texts)
    return {**turn, REASONING[0]: reasoning}, [part for part in content if part not in thoughts]


def role_of(speaker: Any, roles: Mapping[str, str]) -> str:
    check(isinstance(speaker, str), f"a turn's role must be a string, not {speaker!r}")
    name = speaker.strip().lower()
    known = roles.get(name, roles.get(re.sub(r"[\s-]+", "_", name)))
    check(
        known is not None,
        f"a turn's role must be one of {', '.join(roles)}, not {speaker!r}; 'data.roles={{{speaker}: user}}' maps it",
    )
    return known


def joined(content: Any, role: str) -> Any:
    """A content of text parts as one text; any other as it is. Raises UserError for a part that is no text."""
    if not isinstance(content, list):
        return content
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content if part is not None]
    for part in parts:
        check(
            is_text_part(part),
            f"the content of a turn of {role} must be text, not list: its part {shown(part)} is none",
        )
    return "".join(part["text"] for part in parts)


def is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXTS and isinstance(part.get("text"), str)


def calls_of(value: Any) -> list[dict]:
    """A call or a list of calls, as they are or in JSON, in OpenAI's form. Raises UserError for what is none."""
    value = parsed(value, "a tool call")
    calls = value if isinstance(value, list) else [value]
    check(len(calls) > 0, "a turn of calls has none")
    return [call_of(parsed(call, "a tool call")) for call in calls]


def call_of(call: Any) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    check(isinstance(name, str) and name != "", f"a tool call must have a name and arguments, not {shown(call)}")
    beside = {key: value for key, value in call.items() if key in ("id", "index") and value is not None}
    arguments = function.get("arguments", function.get("parameters"))
    return {**beside, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def arguments_of(arguments: Any) -> Any:
    """A call's arguments as a mapping; text that is no JSON object, which a model may have written, as it is."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        check(isinstance(arguments, dict), f"a tool call's arguments must be an object, not {shown(arguments)}")
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(value, str):  # JSON twice over
        inner = arguments_of(value)
        return inner if isinstance(inner, dict) else arguments
    return value if isinstance(value, dict) else arguments


def parsed(value: Any, what: str) -> Any:
    """A value, or what its JSON says. Raises UserError for text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UserError(f"{what} must be JSON, not {shown(value)}") from error


def tools_of(row: Mapping, columns: Mapping[str, str | None]) -> list[dict] | None:
    """The row's tools as OpenAI function schemas, None without any. Raises UserError for what is no such schema."""
    name = tools_column(row, columns)
    value, field = row.get(name) if name else None, f"the column {name!r}"
    value = None if value == "" else parsed(value, field)
    if value is None or value in ([], {}):
        return None
    return [tool_of(parsed(tool, field), field) for tool in (value if isinstance(value, list) else [value])] or None


def tool_of(tool: Any, field: str) -> dict:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    check(
        named, f"{field} must hold function schemas, not {shown(tool)}; data.columns.tools=null leaves the column out"
    )
    return tool if "function" in tool else {"type": "function", "function": tool}


def weight_of(message: Message) -> int:
    """OpenAI's weight of a message, 1 unless said. Raises UserError for one that is neither 0 nor 1."""
    weight = message.get("weight", 1)
    weight = {"0": 0, "1": 1}.get(weight, weight) if isinstance(weight, str) else weight
    check(weight in (0, 1), f"a turn's weight must be 0 or 1, not {weight!r}")
    return int(weight)


def reasoning_of(message: Message) -> str:
    """What the assistant thought before a message, under whatever name; empty if there is none."""
    return next((message[key] for key in REASONING if isinstance(message.get(key), str) and message[key]), "")


def content_of(message: Message) -> str:
    """A message's text; empty where it has none beside its calls."""
    return message["content"] or ""


def is_answer(message: Message) -> bool:
    return message["role"] == "assistant"
