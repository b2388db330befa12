"""Whether a template keeps what it is given, by certainty: a short text may stand in a rendering by chance.

A conversation of the same shape, each of its texts another number, goes through the same check; no number is anywhere
by chance. What comes of a shape is remembered, so that further rows of it cost nothing. DESIGN section 3.1.
"""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

from eagle_train.corpus.chat import REASONING, Conversation, Message
from eagle_train.corpus.template import Refused
from eagle_train.corpus.thoughts import TAG
from eagle_train.errors import UserError

MOST = 4096  # shapes that are remembered
FIRST, STEP = 7_013_468_521, 7_919  # of the numbers: all of one length, so that none is within another
LETTERS = str.maketrans("123456789bcdefghijklmnopqrstuvwxyz", "0" * 9 + "a" * 25)

Check = Callable[[Conversation], object]
"""Raises UserError where some of a conversation is not in its rendering."""


class Kept:
    """Remembers of each shape of a conversation whether its check passed."""

    def __init__(self):
        self.known: dict[tuple, bool] = {}

    def check(self, conversation: Conversation, check: Check, *which: object) -> None:
        """Raise UserError where a conversation, which passed `check`, did so by chance.

        A template may treat a text by what is in it, so a shape that does not pass is no reason to refuse a row: its
        own texts must fail as well, each with a number behind it. `which`: what `check` depends on beside them.
        """
        asked = Numbers(is_behind=False).conversation(conversation)
        key = (shape_of(asked), *which)
        if key not in self.known:
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = not fails(check, asked)
        if not self.known[key]:
            numbers = Numbers(is_behind=True)
            try:
                check(numbers.conversation(conversation))
            except Refused:  # a template that takes no number there
                return
            except UserError as error:
                raise UserError(numbers.without(str(error))) from error


def fails(check: Check, conversation: Conversation) -> bool:
    try:
        check(conversation)
    except UserError:
        return True
    return False


def shape_of(asked: Conversation) -> str:
    """The same for conversations whose ids differ in letters and digits alone."""
    messages = []
    for message in asked.messages:
        ids = {"tool_call_id": _shape(message["tool_call_id"])} if "tool_call_id" in message else {}
        calls = [{**call, "id": _shape(call.get("id"))} for call in message.get("tool_calls") or []]
        messages.append({**message, **ids, **({"tool_calls": calls} if calls else {})})
    return json.dumps([messages, asked.tools], default=str)


def _shape(name: object) -> str:
    return str(name).lower().translate(LETTERS)


class Numbers:
    """Puts numbers in the place of a conversation's texts, or `is_behind` them. Reasoning's tags stay."""

    def __init__(self, is_behind: bool):
        self.is_behind, self.numbers = is_behind, count(FIRST, STEP)
        self.names: dict[str, str] = {}  # of functions, which calls, results and tools must have in common
        self.used: list[str] = []

    def conversation(self, conversation: Conversation) -> Conversation:
        tools = None if conversation.tools is None else [self.tool(tool) for tool in conversation.tools]
        return Conversation([self.message(message) for message in conversation.messages], tools, conversation.muted)

    def without(self, told: str) -> str:
        """A message in the words of the conversation as it was."""
        for number in self.used:
            told = told.replace(number, "")
        return told

    def number(self) -> str:
        self.used.append(str(next(self.numbers)))
        return self.used[-1]

    def text(self, text: str) -> str:
        if not text.strip():
            return text
        if self.is_behind:
            return text + self.number()
        return "".join(
            self.number() if at % 2 == 0 and part.strip() else part for at, part in enumerate(TAG.split(text))
        )

    def name(self, name: str) -> str:
        if name not in self.names:
            self.names[name] = f"{name if self.is_behind else 'f'}{self.number()}"
        return self.names[name]

    def value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.name(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        if isinstance(value, str):
            return self.text(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return int(self.number()) if is_whole and not self.is_behind else value

    def arguments(self, arguments: Any) -> Any:
        """JSON stays JSON."""
        if not isinstance(arguments, str):
            return self.value(arguments)
        try:
            value = json.loads(arguments)
        except ValueError:
            return self.text(arguments)
        return json.dumps(self.value(value), ensure_ascii=False) if isinstance(value, dict) else self.text(arguments)

    def call(self, call: dict) -> dict:
        function = call["function"]
        asked = {"name": self.name(function["name"]), "arguments": self.arguments(function["arguments"])}
        return {**call, "function": {**function, **asked}}

    def message(self, message: Message) -> Message:
        texts = {key: self.text(message[key]) for key in ("content", *REASONING) if isinstance(message.get(key), str)}
        calls = {"tool_calls": [self.call(call) for call in message["tool_calls"]]} if message.get("tool_calls") else {}
        is_result = message["role"] == "tool" and isinstance(message.get("name"), str)
        return {**message, **texts, **calls, **({"name": self.name(message["name"])} if is_result else {})}

    def tool(self, tool: dict) -> dict:
        """Of a schema the name; its other parts are as many as there are rows."""
        function = {"name": self.name(tool["function"]["name"]), "description": "", "parameters": {"type": "object"}}
        return {**tool, "function": function if not self.is_behind else {**tool["function"], "name": function["name"]}}
