"""The columns of rows: which each format reads, which look like data and are not read, and which one was meant.

Knows nothing of what is in them, but for whether it looks like a conversation.
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
# What rows may have in columns of their own. `system` and Alpaca's `input`, which goes on a prompt, are read where they
# are mapped, `tools` also where they are not: a call makes no sense without them.
CONVERSED = ("system", "tools")
BESIDE = {
    "messages": CONVERSED,
    "sharegpt": CONVERSED,
    "prompt_response": ("input", *CONVERSED),
    "text": (),
}
# Where a prompt and its response are in data sets of others.
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input", "inputs")
RESPONSES = ("response", "completion", "output", "answer", "chosen", "solution", "target")
# Columns by whose names one would expect them to be part of the conversation.
TELLING = re.compile(
    "system|system_prompt|tools|functions|inputs?|instructions?|outputs?|responses?|completion|prompt|query|question"
    "|answer|history|context|documents|messages|conversations?|dialog|text|reasoning|reasoning_content|thinking|chosen"
    "|rejected|images?|videos?|audios?|tool_calls|weight",
    re.IGNORECASE,
)
# As above, of a turn.
TELLING_OF_A_TURN = re.compile(
    "reasoning_\\w+|thoughts?|refusal|images?|videos?|audios?|train\\w*|loss\\w*|mask\\w*|citations|attachments",
    re.IGNORECASE,
)


def column(row: Mapping, key: str, columns: Mapping[str, str | None]) -> Any:
    """The row's value for a key of the format. Raises UserError, with what was perhaps meant, if there is none."""
    name = columns.get(key, key)
    inner = None if name in row else next((key for key, value in row.items() if holds_rows(value, name)), None)
    check(
        inner is None, f"no column {name!r}, but rows within {inner!r} that have one: give a file of these, one a line"
    )
    check(name in row, f"no column {name!r}; the row has {', '.join(row) or 'none'}: {meant(row, key)}")
    return row[name]


def holds_rows(value: Any, name: str | None) -> bool:
    """Whether a value is a row with a column of this name, or a list or a mapping of such rows."""
    inner = [value, *value.values()] if isinstance(value, dict) else value
    return isinstance(inner, list) and any(isinstance(each, dict) and name in each for each in inner[:2])


def meant(row: Mapping, key: str) -> str:
    """What to set so that the row is read, as far as its columns tell."""
    found = [next((name for name in names if name in row), None) for names in (PROMPTS, RESPONSES)]
    turns = next((name for name, value in row.items() if format_of(value) is not None), None)
    if None not in found:
        data_format, named = "prompt_response", dict(zip(FORMATS["prompt_response"], found, strict=True))
        named |= {"input": "input"} if "input" in row and "input" not in found else {}
    elif turns is not None:
        data_format = format_of(row[turns])
        named = {FORMATS[data_format][0]: turns}
    elif "text" in row and key != "text":
        return "set data=text"
    else:
        return f"set data.columns.{key}"
    is_other = key not in FORMATS[data_format]
    told = [f"data.columns.{key}={name}" for key, name in named.items() if key != name or key == "input"]
    return "set " + " ".join([*([f"data={data_format}"] if is_other else []), *told])


def format_of(value: Any) -> str | None:
    """The format of what looks like turns."""
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict):
        return None
    if {"role", "content"} <= first.keys():
        return "messages"
    return "sharegpt" if {"from", "value"} <= first.keys() else None


def unread_columns(row: Mapping, data_format: str, columns: Mapping[str, str | None]) -> list[str]:
    """The row's columns, and fields of its turns (messages.NAME), that look like data, are not empty and are not
    read."""
    keys = FORMATS[data_format]
    read = {columns.get(key, key) for key in keys} | {columns.get(key) for key in BESIDE[data_format]}
    read |= {tools_column(row, columns)} if "tools" in BESIDE[data_format] else set()
    others = {name: value for name, value in row.items() if name not in read and not is_empty(value)}
    names = [name for name, value in others.items() if TELLING.fullmatch(str(name)) or format_of(value) is not None]
    turns = row.get(columns.get(keys[0], keys[0]))
    fields = {
        name: None
        for turn in (turns if isinstance(turns, list) else [])
        for name, value in (turn.items() if isinstance(turn, dict) else ())
        if name != "reasoning_content" and TELLING_OF_A_TURN.fullmatch(str(name)) and not is_empty(value)
    }
    return [*names, *(f"{columns.get(keys[0], keys[0])}.{name}" for name in fields)]


def is_empty(value: Any) -> bool:
    return value in (None, "", [], {})


def tools_column(row: Mapping, columns: Mapping[str, str | None]) -> str | None:
    """Where the tools are: OpenAI's older rows have them in `functions`."""
    is_older = "tools" not in columns and row.get("tools") is None and row.get("functions") is not None
    return "functions" if is_older else columns.get("tools", "tools")
