"""The columns of rows: which ones each format reads, which unread ones look like data, and which one was meant.

Of their values it only knows whether they look like a conversation.
"""

import re
from collections.abc import Mapping
from typing import Any

from eagle_train.errors import check

# What each format reads: the keys of `data.columns`, each naming a column of the row.
FORMATS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_response": ("prompt", "response"),
    "text": ("text",),
}
# Further columns. `system` and Alpaca's `input`, which is appended to the prompt, are read where they are mapped, and
# `tools` and `chat_template_kwargs` always: a call makes no sense without its tools, nor does a rendering without the
# row's variables.
VARIABLES = "chat_template_kwargs"
_CONVERSED = ("system", "tools", VARIABLES)
BESIDE = {
    "messages": _CONVERSED,
    "sharegpt": _CONVERSED,
    "prompt_response": ("input", *_CONVERSED),
    "text": (),
}
# Why each answer of a row ended, in the rows of eagle-regenerate, and the reason of one that a token limit cut.
FINISH_REASONS, CUT = "finish_reasons", "length"
# Names that data sets use for a prompt and its response.
_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input", "inputs")
_RESPONSES = ("response", "completion", "output", "answer", "chosen", "solution", "target")
# Who asks, by the names in turns: a response that has these is a whole conversation.
_ASKING = ("user", "human", "prompter")
# Names of columns that are probably part of the conversation.
_TELLING = re.compile(
    "system|system_prompt|(\\w+_)?tools|functions|inputs?|instructions?|outputs?|responses?|completion|prompt|query"
    "|question|answer|history|context|documents|messages|conversations?|dialog|text|reasoning|reasoning_content"
    "|thinking|chosen|rejected|images?|videos?|audios?|tool_calls|weight|label|chat_template_kwargs",
    re.IGNORECASE,
)
# Likewise names of fields of a turn.
_TELLING_OF_A_TURN = re.compile(
    "reasoning_\\w+|thoughts?|refusal|images?|videos?|audios?|train\\w*|loss\\w*|mask\\w*|citations|attachments",
    re.IGNORECASE,
)


def column(row: Mapping, key: str, columns: Mapping[str, str | None]) -> Any:
    """The row's value for a key of the format. Raises UserError, with what was probably meant, if there is none."""
    name = columns.get(key, key)
    inner = None if name in row else next((key for key, value in row.items() if _holds_rows(value, name)), None)
    check(
        inner is None, f"no column {name!r}, but rows within {inner!r} that have one: give a file of these, one a line"
    )
    check(name in row, f"no column {name!r}; the row has {', '.join(row) or 'none'}: {_meant(row, key)}")
    return row[name]


def _holds_rows(value: Any, name: str | None) -> bool:
    """Whether a value is a row with a column of this name, or a list or a mapping of such rows."""
    inner = [value, *value.values()] if isinstance(value, dict) else value
    return isinstance(inner, list) and any(isinstance(each, dict) and name in each for each in inner[:2])


def _meant(row: Mapping, key: str) -> str:
    """The settings with which the row can be read, as far as its columns show."""
    found = [next((name for name in names if name in row), None) for names in (_PROMPTS, _RESPONSES)]
    conversations = {name: known for name, value in row.items() if (known := _format_of(value)) is not None}
    whole = found[1] if found[1] in conversations and _is_asked(row[found[1]]) else None
    if None not in found and whole is None:
        data_format, named = "prompt_response", dict(zip(FORMATS["prompt_response"], found, strict=True))
        named |= {"input": "input"} if "input" in row and "input" not in found else {}
    elif conversations:
        name = whole or min(conversations, key=lambda name: name == "rejected")  # the first that is not rejected
        data_format = conversations[name]
        named = {FORMATS[data_format][0]: name}
    elif "text" in row and key != "text":
        return "set data=text"
    else:
        return f"set data.columns.{key}=NAME"
    is_other = key not in FORMATS[data_format]
    settings = [f"data.columns.{key}={name}" for key, name in named.items() if key != name or key == "input"]
    return "set " + " ".join([*([f"data={data_format}"] if is_other else []), *settings])


def _is_asked(turns: list) -> bool:
    """Whether someone asks within the turns."""
    speakers = (turn.get("role", turn.get("from")) for turn in turns if isinstance(turn, dict))
    return any(str(speaker).lower() in _ASKING for speaker in speakers)


def _format_of(value: Any) -> str | None:
    """The format of a value that looks like turns; None for others."""
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict):
        return None
    if {"role", "content"} <= first.keys():
        return "messages"
    return "sharegpt" if {"from", "value"} <= first.keys() else None


def unread_columns(row: Mapping, data_format: str, columns: Mapping[str, str | None]) -> list[str]:
    """The row's columns, and fields of its turns (messages.NAME), that are not empty, look like data and are unread."""
    keys = FORMATS[data_format]
    read = {columns.get(key, key) for key in keys} | {columns.get(key) for key in BESIDE[data_format]}
    read |= {tools_column(row, columns), columns.get(VARIABLES, VARIABLES)} if BESIDE[data_format] else set()
    others = {name: value for name, value in row.items() if name not in read and not _is_empty(value)}
    names = [name for name, value in others.items() if _TELLING.fullmatch(str(name)) or _format_of(value) is not None]
    turns = row.get(columns.get(keys[0], keys[0]))
    fields = {
        name: None
        for turn in (turns if isinstance(turns, list) else [])
        for name, value in (turn.items() if isinstance(turn, dict) else ())
        if name != "reasoning_content" and _TELLING_OF_A_TURN.fullmatch(str(name)) and not _is_empty(value)
    }
    return [*names, *(f"{columns.get(keys[0], keys[0])}.{name}" for name in fields)]


def _is_empty(value: Any) -> bool:
    return value in (None, "", [], {})


def tools_column(row: Mapping, columns: Mapping[str, str | None]) -> str | None:
    """The name of the column of tools: OpenAI's older rows have them in `functions`."""
    is_older = "tools" not in columns and row.get("tools") is None and row.get("functions") is not None
    return "functions" if is_older else columns.get("tools", "tools")
