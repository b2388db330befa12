"""Makes sure that a template renders all that it is given: a short text may be found in a rendering by coincidence.

So a conversation of the same shape, with a distinct long number for each text, has to pass the same check. The result
is cached by shape, so further rows of a shape cost nothing. DESIGN section 3.1.
"""

import json
import re
from collections.abc import Callable
from itertools import count
from typing import Any

from eagle_train.corpus.conversations import REASONING_FIELDS, Conversation, Message
from eagle_train.corpus.reasoning import ANY_TAG
from eagle_train.corpus.template import Refused
from eagle_train.errors import UserError

MOST = 4096  # shapes in the cache
_FIRST, _STEP = 7_013_468_521, 7_919  # the numbers have one length, so none contains another
_LETTERS = str.maketrans("123456789bcdefghijklmnopqrstuvwxyz", "0" * 9 + "a" * 25)

_Check = Callable[[Conversation], object]
"""Raises UserError if a part of a conversation is missing from its rendering."""


class RoundTrip:
    """Caches for each shape of a conversation whether its check passed."""

    def __init__(self) -> None:
        self.known: dict[tuple, bool] = {}

    def check(self, conversation: Conversation, check: _Check, *which: object) -> None:
        """Raise UserError if a conversation passed `check` only by coincidence.

        A template may treat texts by their values, so a shape that fails is no reason to refuse a row: its own texts,
        each with a number appended, must fail as well. `which`: what else `check` depends on, for the cache key.
        """
        asked = Numbers(is_appended=False).conversation(conversation)
        key = (_shape_of(asked), *which)
        if key not in self.known:
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = not _fails(check, asked)
        if not self.known[key]:
            numbers = Numbers(is_appended=True)
            try:
                check(numbers.conversation(conversation))
            except Refused:  # the template refuses such values
                return
            except UserError as error:
                raise UserError(numbers.without(str(error))) from error


def _fails(check: _Check, conversation: Conversation) -> bool:
    try:
        check(conversation)
    except UserError:
        return True
    return False


def _shape_of(asked: Conversation) -> str:
    """A key that is equal for conversations whose ids differ only in letters and digits."""
    messages = []
    for message in asked.messages:
        ids = {"tool_call_id": _shape(message["tool_call_id"])} if "tool_call_id" in message else {}
        calls = [{**call, "id": _shape(call.get("id"))} for call in message.get("tool_calls") or []]
        messages.append({**message, **ids, **({"tool_calls": calls} if calls else {})})
    return json.dumps([messages, asked.tools], default=str)


def _shape(name: object) -> str:
    return str(name).lower().translate(_LETTERS)


class Numbers:
    """Replaces a conversation's texts by numbers, or appends them if `is_appended`. Reasoning tags are kept."""

    def __init__(self, is_appended: bool):
        self.is_appended, self.numbers = is_appended, count(_FIRST, _STEP)
        self.names: dict[str, str] = {}  # new names of functions: equal in calls, results and tools
        self.ids: dict[str, str] = {}  # new ids of calls: equal in calls and results
        self.used: list[str] = []

    def conversation(self, conversation: Conversation) -> Conversation:
        tools = None if conversation.tools is None else [self.tool(tool) for tool in conversation.tools]
        return Conversation([self.message(message) for message in conversation.messages], tools, conversation.muted)

    def without(self, text: str) -> str:
        """An error message without the appended numbers."""
        for number in self.used:
            text = text.replace(number, "")
        return text

    def number(self) -> str:
        self.used.append(str(next(self.numbers)))
        return self.used[-1]

    def text(self, text: str) -> str:
        if not text.strip():
            return text
        if self.is_appended:
            return text + self.number()
        return "".join(
            self.number() if at % 2 == 0 and part.strip() else part for at, part in enumerate(ANY_TAG.split(text))
        )

    def name(self, name: str) -> str:
        if name not in self.names:
            self.names[name] = f"{name if self.is_appended else 'f'}{self.number()}"
        return self.names[name]

    def value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.name(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        if isinstance(value, str):
            return self.text(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return int(self.number()) if is_whole and not self.is_appended else value

    def arguments(self, arguments: Any) -> Any:
        """Arguments in JSON stay JSON."""
        if not isinstance(arguments, str):
            return self.value(arguments)
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return self.text(arguments)
        return json.dumps(self.value(value), ensure_ascii=False) if isinstance(value, dict) else self.text(arguments)

    def call(self, call: dict) -> dict:
        function = call["function"]
        asked = {"name": self.name(function["name"]), "arguments": self.arguments(function["arguments"])}
        return {**call, **self.id_of(call, function["name"]), "function": {**function, **asked}}

    def id_of(self, call: dict, name: str) -> dict[str, str]:
        """The call's id, if it is text, with the function's new name for the old: Kimi's templates render the id alone
        (functions.NAME:0)."""
        old = call.get("id")
        if not isinstance(old, str):
            return {}
        whole = rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"  # no part of a word: random ids may hold a short name
        self.ids[old] = re.sub(whole, lambda _: self.name(name), old)
        return {"id": self.ids[old]}

    def message(self, message: Message) -> Message:
        texts = {
            key: self.text(message[key]) for key in ("content", *REASONING_FIELDS) if isinstance(message.get(key), str)
        }
        calls = {"tool_calls": [self.call(call) for call in message["tool_calls"]]} if message.get("tool_calls") else {}
        is_result = message["role"] == "tool" and isinstance(message.get("name"), str)
        names = {"name": self.name(message["name"])} if is_result else {}
        answered = message.get("tool_call_id")
        ids = {"tool_call_id": self.ids[answered]} if isinstance(answered, str) and answered in self.ids else {}
        return {**message, **texts, **calls, **names, **ids}

    def tool(self, tool: dict) -> dict:
        """Replaces the function's name, and drops the rest of its schema, which would make a shape for each row."""
        function = {"name": self.name(tool["function"]["name"]), "description": "", "parameters": {"type": "object"}}
        return {
            **tool,
            "function": function if not self.is_appended else {**tool["function"], "name": function["name"]},
        }
