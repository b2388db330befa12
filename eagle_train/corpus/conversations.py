"""Rows of every format as conversations in OpenAI's form: messages with known roles, tool calls, tools, weights.

Knows nothing of files, templates or tokens.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_train.corpus.channels import folded
from eagle_train.corpus.columns import CUT, FINISH_REASONS, FORMATS, VARIABLES, column, tools_column
from eagle_train.errors import UserError, check, one_line, shown

SUPERVISE = ("assistant", "last", "all")
_CALL = "function_call"  # the role of a turn whose content is a call or a list of calls in JSON
# Speakers, in lower case, and the role that chat templates know.
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
    _CALL: _CALL,
    "tool_call": _CALL,
}
_TEXTS = ("text", "input_text", "output_text")  # the types of content parts that are text
_REASONING_PARTS = (
    "thinking",
    "reasoning",
)  # the types of parts that are reasoning, in a key of the same name or `text`
REASONING_FIELDS = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # the names of the reasoning field in templates and servers
# What a ShareGPT turn may have beside speaker and text.
_EXTRAS = ("weight", "name", "tool_calls", "tool_call_id", "channel", "recipient", *REASONING_FIELDS)

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages with known roles. `tools`: OpenAI function schemas, or None. `muted`: numbers of the assistant messages
    that are not supervised (OpenAI's weight 0). `variables`: the chat template's own for this row, over
    `data.template_kwargs`. `cut`: numbers of the assistant messages that ended at a token limit, without a stop."""

    messages: list[Message]
    tools: list[dict] | None = None
    muted: frozenset[int] = frozenset()
    variables: Mapping[str, Any] = field(default_factory=dict)
    cut: frozenset[int] = frozenset()


def conversation_of(
    row: Mapping, data_format: str, columns: Mapping[str, str | None], roles: Mapping[str, str] = ROLES
) -> Conversation:
    """A row of any format but text. Raises UserError as `to_messages` does, and for invalid tools, weights and
    variables."""
    messages = to_messages(row, data_format, columns, roles)
    muted = [number for number, message in enumerate(messages) if _weight_of(message) == 0]
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    cut = _cut_in(row, messages)
    return Conversation(messages, _tools_of(row, columns), frozenset(muted), _variables_of(row, columns), cut)


def _cut_in(row: Mapping, messages: list[Message]) -> frozenset[int]:
    """The answers that the row's finish reasons, if there is one for each answer, say were cut."""
    reasons, answers = row.get(FINISH_REASONS), [number for number, each in enumerate(messages) if is_answer(each)]
    if not isinstance(reasons, list) or len(reasons) != len(answers):
        return frozenset()
    return frozenset(number for number, reason in zip(answers, reasons, strict=True) if reason == CUT)


def to_messages(
    row: Mapping, data_format: str, columns: Mapping[str, str | None], roles: Mapping[str, str] = ROLES
) -> list[Message]:
    """A row of messages, sharegpt or prompt_response as messages with a known role and text content.

    `columns` maps the format's keys (`FORMATS`, `BESIDE`) to the row's columns; the default is a column of the key's
    name. `roles`: see `ROLES`; keys are in lower case. Other fields of a message (reasoning_content, say) are kept for
    the template unless they are None. Harmony's messages in channels become one a turn. Calls become OpenAI's
    `tool_calls`, with mappings as arguments where these are JSON objects. Raises UserError, without the row's place,
    for a row without turns and for invalid roles, contents and calls.
    """
    if data_format == "messages":
        turns = _turns_of(row, "messages", columns)
    elif data_format == "sharegpt":
        turns = _from_sharegpt(_turns_of(row, "conversations", columns))
    else:
        assert data_format == "prompt_response", data_format
        prompt, response = (column(row, key, columns) for key in FORMATS["prompt_response"])
        answers = _as_turns(response, "assistant")
        _check_answers(answers, columns, roles)
        turns = [*_with_input(_as_turns(prompt, "user"), row, columns), *answers]
    check(len(turns) > 0, "the row has no turns")
    turns = folded(turns, lambda role: isinstance(role, str) and _known_role(role, roles) == "assistant")
    return [*_system_of(row, columns, turns), *(_validated(turn, roles) for turn in turns)]


def _turns_of(row: Mapping, key: str, columns: Mapping[str, str | None]) -> list:
    """The column of turns, which may be JSON text. Raises UserError unless it is a list."""
    value, name = column(row, key, columns), f"the column {columns.get(key, key)!r}: the turns"
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value, name)
    check(isinstance(value, list), f"{name} must be a list, not {type(value).__name__}")
    return value


def _as_turns(given: Any, role: str) -> list:
    """A prompt or a response: a list of messages, which may be JSON text, or the content of one message."""
    value = given
    if isinstance(given, str) and given.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(given) or given  # [] is no list of messages, but a text
    return value if _is_turns(value) else [{"role": role, "content": given}]


def _check_answers(turns: list, columns: Mapping[str, str | None], roles: Mapping[str, str]) -> None:
    """Raise UserError for a response that is a whole conversation: the prompt would stand twice."""
    name = columns.get("response", "response")
    speaker = turns[0]["role"] if turns else "assistant"
    check(
        _role_of(speaker, roles) in ("assistant", "tool", _CALL),
        f"the column {name!r} begins with a turn of {speaker}, so it is a conversation and no response: "
        f"set data=messages data.columns.messages={name}",
    )


def _with_input(turns: list, row: Mapping, columns: Mapping[str, str | None]) -> list:
    """The prompt with the row's input on a new line behind it (Alpaca), if that is mapped and not empty."""
    name = columns.get("input")
    given = row.get(name) if name else None
    if given is None or given == "":
        return turns
    check(isinstance(given, str), f"the column {name!r} must be text, not {type(given).__name__}")
    asked = turns[-1]["content"] if turns else None
    check(isinstance(asked, str), f"the column {name!r} is appended to the prompt, which must be text")
    return [*turns[:-1], {**turns[-1], "content": f"{asked}\n{given}"}]


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)


def _from_sharegpt(turns: list) -> list[Message]:
    """ShareGPT's {"from", "value"} turns as messages, with the speaker as role."""
    messages = []
    for turn in turns:
        known = isinstance(turn, dict) and ("from" in turn or "role" in turn)
        check(known, f"a turn must be an object with 'from' and 'value', not {shown(turn)}")
        turn = {key: value for key, value in turn.items() if value is not None}
        extras = {key: turn[key] for key in _EXTRAS if key in turn}
        content = turn.get("value", turn.get("content"))
        messages.append({"role": turn.get("from", turn.get("role")), "content": content, **extras})
    return messages


def _system_of(row: Mapping, columns: Mapping[str, str | None], turns: list) -> list[Message]:
    """The system message of the column that `data.columns.system` names, if it is not empty."""
    if not columns.get("system"):
        return []
    content = column(row, "system", columns)
    if content is None or content == "":
        return []
    check(isinstance(content, str), f"the system column must be text, not {type(content).__name__}")
    first = turns[0].get("role") if isinstance(turns[0], dict) else None
    check(first != "system", f"the row has a system message and a column {columns['system']!r}: leave one out")
    return [{"role": "system", "content": content}]


def _validated(turn: Any, roles: Mapping[str, str] = ROLES) -> Message:
    """A turn with its role mapped, its text parts joined and its calls in OpenAI's form. Raises UserError."""
    check(isinstance(turn, dict), f"a turn must be an object with role and content, not {type(turn).__name__}")
    kept = {key: value for key, value in turn.items() if value is not None and not _is_blank_reasoning(key, value)}
    check("role" in kept or "from" not in kept, "a turn has 'from' and no role: data.format=sharegpt reads such turns")
    role, content = _role_of(kept.get("role"), roles), kept.get("content")
    if role == _CALL:
        return {**kept, "role": "assistant", "content": "", "tool_calls": _calls_of(content)}
    _check_reasoning(kept)
    both = [_decoded(kept.pop(key, None), "a tool call") for key in ("function_call", "tool_calls")]
    given = [calls for calls in both if calls]
    check(len(given) < 2, "a turn has function_call and tool_calls: leave one out")
    check(not given or role == "assistant", f"a turn of {role} has calls of tools; only the assistant may have them")
    for calls in given:
        kept["tool_calls"] = _calls_of(calls)
        is_blank = content is None or (isinstance(content, str) and not content.strip())
        content = "" if is_blank else content
    if role == "tool":
        content = _as_result(content)
    elif role == "assistant":
        kept, content = _reasoning_as_field(kept, content)
    content = _joined(content, role)
    check(isinstance(content, str), f"the content of a turn of {role} must be text, not {type(content).__name__}")
    return {**kept, "role": role, "content": content}


def _is_blank_reasoning(key: str, value: Any) -> bool:
    """Whether a field of a turn is reasoning without text. Templates would write it as a thought that is empty, and
    look for none within the content."""
    return key in REASONING_FIELDS and isinstance(value, str) and not value.strip()


def _check_reasoning(turn: Mapping) -> None:
    """Raise UserError for reasoning that is no text, and for reasoning fields that differ."""
    given = {key: turn[key] for key in REASONING_FIELDS if key in turn}
    for key, value in given.items():
        check(isinstance(value, str), f"a turn's {key} must be text, not {type(value).__name__}")
    check(len(set(given.values())) < 2, f"a turn has {' and '.join(given)}, which differ: leave one out")


def _as_result(content: Any) -> Any:
    """A tool's result as text: values as JSON, None as an empty text. Raises UserError for other values."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return content
    try:
        return "" if content is None else json.dumps(content, ensure_ascii=False)
    except TypeError as error:  # Arrow has times, say
        raise UserError(f"a tool's result must be text or values of JSON: {one_line(error)}") from error


def _reasoning_as_field(turn: Message, content: Any) -> tuple[Message, Any]:
    """The turn with its reasoning parts moved from the content into a field, and the remaining content."""
    if not isinstance(content, list):
        return turn, content
    thoughts = [part for part in content if isinstance(part, dict) and part.get("type") in _REASONING_PARTS]
    if not thoughts:
        return turn, content
    check(not reasoning_of(turn), "a turn has reasoning within its content and beside it: leave one out")
    reasoning = "".join(map(_thought_of, thoughts))
    field = {} if _is_blank_reasoning(REASONING_FIELDS[0], reasoning) else {REASONING_FIELDS[0]: reasoning}
    return {**turn, **field}, [part for part in content if part not in thoughts]


def _thought_of(part: Mapping) -> str:
    """The text of a part that is reasoning. Raises UserError where it is under no name that is known."""
    text = next((part[key] for key in (part["type"], "text") if part.get(key) is not None), None)
    text = _joined(text, "assistant")
    check(isinstance(text, str), f"the reasoning within a turn's content must be text, and {shown(part)} has none")
    return text


def _role_of(speaker: Any, roles: Mapping[str, str]) -> str:
    check(isinstance(speaker, str), f"a turn's role must be a string, not {speaker!r}")
    known = _known_role(speaker, roles)
    if known is None:
        raise UserError(
            f"a turn's role must be one of {', '.join(roles)}, not {speaker!r}; "
            f"'data.roles={{{speaker}: user}}' maps it"
        )
    return known


def _known_role(speaker: str, roles: Mapping[str, str]) -> str | None:
    name = speaker.strip().lower()
    return roles.get(name, roles.get(re.sub(r"[\s-]+", "_", name)))


def _joined(content: Any, role: str) -> Any:
    """A list of text parts as one text; any other content unchanged. Raises UserError for a part that is no text, and
    for several strings: nothing says that they are one text, and not one answer each."""
    if not isinstance(content, list):
        return content
    texts = [part for part in content if isinstance(part, str) and part.strip()]
    check(
        len(texts) < 2 or any(isinstance(part, dict) for part in content),
        f"the content of a turn of {role} is a list of {len(texts)} texts, {shown(content)}: give one a row, or parts "
        "of one text as {type: text, text: ...}",
    )
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content if part is not None]
    for part in parts:
        check(
            _is_text_part(part),
            f"the content of a turn of {role} must be text, not list: its part {shown(part)} is none",
        )
    return "".join(part["text"] for part in parts)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)


def _calls_of(value: Any) -> list[dict]:
    """A call or a list of calls, as objects or JSON text, in OpenAI's form. Raises UserError for anything else."""
    value = _parsed(value, "a tool call")
    calls = value if isinstance(value, list) else [value]
    check(len(calls) > 0, "a turn of tool calls has no call")
    return [_call_of(_parsed(call, "a tool call")) for call in calls]


def _call_of(call: Any) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or name == "":
        raise UserError(f"a tool call must have a name and arguments, not {shown(call)}")
    beside = {key: value for key, value in call.items() if key in ("id", "index") and value is not None}
    arguments = function.get("arguments", function.get("parameters"))
    return {**beside, "type": "function", "function": {"name": name, "arguments": _arguments_of(arguments)}}


def _arguments_of(arguments: Any) -> Any:
    """A call's arguments as a mapping; text that is no JSON object, which a model may have written, is kept."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        check(isinstance(arguments, dict), f"a tool call's arguments must be an object, not {shown(arguments)}")
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, str):  # encoded as JSON twice
        inner = _arguments_of(value)
        return inner if isinstance(inner, dict) else arguments
    return value if isinstance(value, dict) else arguments


def _parsed(value: Any, what: str) -> Any:
    """A value, JSON text decoded. Raises UserError for text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} must be JSON, not {shown(value)}") from error


def _decoded(value: Any, what: str) -> Any:
    """As `_parsed`; None for blank text."""
    return None if isinstance(value, str) and not value.strip() else _parsed(value, what)


def _tools_of(row: Mapping, columns: Mapping[str, str | None]) -> list[dict] | None:
    """The row's tools as OpenAI function schemas, None without any. Raises UserError for anything else."""
    name = tools_column(row, columns)
    value, field = row.get(name) if name else None, f"the column {name!r}"
    value = _decoded(value, field)
    if value is None or value in ([], {}):
        return None
    return [_tool_of(_parsed(tool, field), field) for tool in (value if isinstance(value, list) else [value])] or None


def _tool_of(tool: Any, field: str) -> dict:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    check(named, f"{field} must hold function schemas, not {shown(tool)}; data.columns.tools=null ignores the column")
    return tool if "function" in tool else {"type": "function", "function": tool}


def _variables_of(row: Mapping, columns: Mapping[str, str | None]) -> dict[str, Any]:
    """The row's variables of the chat template, those that are None left out. Raises UserError unless they are an
    object."""
    name = columns.get(VARIABLES, VARIABLES)
    what = f"the column {name!r}"
    value = _decoded(row.get(name), what) if name else None
    if value is None:
        return {}
    check(isinstance(value, dict), f"{what} must hold an object of variables, not {shown(value)}")
    return {key: each for key, each in value.items() if each is not None}


def _weight_of(message: Message) -> int:
    """OpenAI's weight of a message, 1 by default. Raises UserError unless it is 0 or 1."""
    weight = message.get("weight", 1)
    weight = {"0": 0, "1": 1}.get(weight, weight) if isinstance(weight, str) else weight
    check(weight in (0, 1), f"a turn's weight must be 0 or 1, not {weight!r}")
    return int(weight)


def reasoning_of(message: Message) -> str:
    """A message's reasoning, whatever the field's name; empty without any."""
    return next((message[key] for key in REASONING_FIELDS if isinstance(message.get(key), str) and message[key]), "")


def content_of(message: Message) -> str:
    """A message's text; empty where the content is None, beside calls."""
    return message["content"] or ""


def is_answer(message: Message) -> bool:
    return message["role"] == "assistant"
