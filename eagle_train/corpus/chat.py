"""Rows of the user's data as conversations: roles, tool calls, tools and weights, whatever format they came in.

Knows nothing of files, templates or tokens.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_train.config import UserError, check, shown

# What each format reads: the keys of `data.columns`, each naming a column of the row.
FORMATS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_response": ("prompt", "response"),
    "text": ("text",),
}
# What conversations of any format may have in columns of their own. `system` is read where it is mapped, `tools` also
# where it is not: a call makes no sense without them.
BESIDE = ("system", "tools")
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
        turns = [*as_turns(prompt, "user"), *as_turns(response, "assistant")]
    check(len(turns) > 0, "the row has no turns")
    return [*system_of(row, columns, turns), *(validated(turn, roles) for turn in turns)]


def column(row: Mapping, key: str, columns: Mapping[str, str | None]) -> Any:
    """The row's value for a key of the format. Raises UserError if the row has no such column."""
    name = columns.get(key, key)
    inner = None if name in row else next((key for key, value in row.items() if holds_rows(value, name)), None)
    check(
        inner is None, f"no column {name!r}, but rows within {inner!r} that have one: give a file of these, one a line"
    )
    check(name in row, f"no column {name!r}; the row has {', '.join(row) or 'none'}: set data.columns.{key}")
    return row[name]


def holds_rows(value: Any, name: str) -> bool:
    """Whether a value is a row with a column of this name, or a list or a mapping of such rows."""
    inner = [value, *value.values()] if isinstance(value, dict) else value
    return isinstance(inner, list) and any(isinstance(each, dict) and name in each for each in inner[:2])


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
    given = [calls for key in ("function_call", "tool_calls") if (calls := kept.pop(key, None))]
    check(len(given) < 2, "a turn has function_call and tool_calls: leave one out")
    check(not given or role == "assistant", f"a turn of {role} has calls of tools; the assistant alone may call them")
    for calls in given:
        kept["tool_calls"] = calls_of(calls)
        content = "" if content is None else content
    content = joined(content, role)
    check(isinstance(content, str), f"the content of a turn of {role} must be text, not {type(content).__name__}")
    return {**kept, "role": role, "content": content}


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
        is_text = isinstance(part, dict) and part.get("type") in TEXTS and isinstance(part.get("text"), str)
        check(is_text, f"the content of a turn of {role} must be text, not list: its part {shown(part)} is none")
    return "".join(part["text"] for part in parts)


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
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        check(isinstance(arguments, dict), f"a tool call's arguments must be an object, not {shown(arguments)}")
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def parsed(value: Any, what: str) -> Any:
    """A value, or what its JSON says. Raises UserError for text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UserError(f"{what} must be JSON, not {shown(value)}") from error


# Columns by whose names one would expect them to be part of the conversation.
TELLING = re.compile(
    "system|system_prompt|tools|functions|inputs?|instructions?|outputs?|responses?|completion|prompt|query|question"
    "|answer|history|context|documents|messages|conversations?|dialog|text|reasoning|reasoning_content|thinking|chosen"
    "|rejected|images?|videos?|audios?|tool_calls|weight",
    re.IGNORECASE,
)


def unread_columns(row: Mapping, data_format: str, columns: Mapping[str, str | None]) -> list[str]:
    """The row's columns that look like data, are not empty and are not read."""
    read = {columns.get(key, key) for key in FORMATS[data_format]} | {columns.get("system")}
    read |= set() if data_format == "text" else {tools_column(row, columns)}
    others = {name: value for name, value in row.items() if name not in read and value not in (None, "", [], {})}
    return [name for name, value in others.items() if TELLING.fullmatch(str(name)) or looks_like_turns(value)]


def looks_like_turns(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and ({"role", "content"} <= first.keys() or {"from", "value"} <= first.keys())


def tools_column(row: Mapping, columns: Mapping[str, str | None]) -> str | None:
    """Where the tools are: OpenAI's older rows have them in `functions`."""
    is_older = "tools" not in columns and row.get("tools") is None and row.get("functions") is not None
    return "functions" if is_older else columns.get("tools", "tools")


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
