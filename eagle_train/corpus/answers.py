"""What a target wrote, as a message: the fields of which its chat template makes the very same text.

Nothing is known of a model's name: an answer is taken apart in the ways that models write reasoning and calls of tools,
and the first way that the template renders back is the right one. Knows nothing of engines, servers or files.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_train.corpus.chat import REASONING, Message, conversation_of
from eagle_train.corpus.render import ChatRenderer, call_forms
from eagle_train.corpus.thoughts import THOUGHT
from eagle_train.errors import UserError, shown

PROBE = "Zq7kX4"  # an answer that no template takes apart
UNDECODED = "\ufffd"  # what bytes that are no text are decoded to

# <|channel|>analysis<|message|>, and of calls to=functions.NAME before the channel or behind it.
CHANNEL = re.compile(
    r"(?: to=(?P<first>[^\s<]+))?<\|channel\|>(?P<channel>\w+)(?: to=(?P<second>[^\s<]+))?[^<]*"
    r"(?:<\|constrain\|>\w+)?<\|message\|>(?P<body>.*)",
    re.DOTALL,
)
TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
BRACKETED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL)
LEADS = ("<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", "<tool_call>")  # of calls that are one JSON value


@dataclass(frozen=True)
class Written:
    """What a target wrote to a prompt, special tokens as they are written. `text`: without the stop token that ended
    it; `was_cut`: there was none. `token_ids`: of the text."""

    prompt: str
    text: str
    token_ids: list[int]
    was_cut: bool


class AnswerReader:
    """Takes apart what a target wrote, and renders as training does."""

    def __init__(self, renderer: ChatRenderer):
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self.stops = tuple(filter(None, renderer.stops))
        self.added = frozenset(self.tokenizer.added_tokens_decoder)

    def prompt(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        """What a server would be given. Raises UserError where the template refuses the conversation."""
        return self.renderer.template.render(messages, tools, prompt=True)

    def rendered(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        """What training says that the model wrote as the last message. Raises UserError where that is unknown."""
        row, first = {"messages": list(messages), "tools": tools}, None
        for form in call_forms(self.renderer.finder.beginnings.with_fields(conversation_of(row, "messages", {}))):
            try:
                text = self.renderer.finder.turn(form, len(messages) - 1).text
                return text.removeprefix(self.prompt(form.messages[:-1], tools))
            except UserError as error:
                first = first or error
        raise first

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def written(self, prompt: str, token_ids: list[int], was_cut: bool) -> Written:
        """What the target's tokens say, the last of which is a stop token unless they were cut."""
        own = token_ids if was_cut else token_ids[:-1]
        text = self.renderer.decode(own, self.tokens(prompt))
        return Written(prompt, text.rstrip(UNDECODED) if was_cut else text, own, was_cut)

    def message(self, messages: list[Message], tools: list[dict] | None, written: Written) -> tuple[Message, bool]:
        """The answer to `messages`, and whether its text has the same tokens again. Raises UserError where it cannot be
        told in fields: rendered, it would not be what the target wrote."""
        ending = self.ending(messages, tools)
        for fields in ways(written, tools, self.tokenizer):
            message = {"role": "assistant", **fields}
            found = self.agrees([*messages, message], tools, written, ending)
            if found is not None:
                return message, found
        where = "the answer was cut within its reasoning or a call (max_tokens), or " if written.was_cut else ""
        raise UserError(f"{where}the chat template does not render the answer back: {shown(written.text)}")

    def agrees(
        self, messages: list[Message], tools: list[dict] | None, written: Written, ending: str | None
    ) -> bool | None:
        """Whether the last message, rendered, has the tokens that were written; None if it has not even the text.

        Behind the text there may be a stop, or what the template ends all answers with, but nothing more: what it adds
        to an answer that was cut, the target did not write."""
        try:
            text = self.rendered(messages, tools)
        except Exception:  # no way for this answer; a template is a program, and may fail in any way
            return None
        rest = text[len(written.text) :]
        if not text.startswith(written.text) or not (rest in ("", ending) or rest.startswith(self.stops)):
            return None
        start = len(self.tokens(written.prompt))
        tokens = self.tokens(written.prompt + text)[start : start + len(written.token_ids)]
        special = [token for token in self.tokens(written.text) if token in self.added]
        if special != [token for token in written.token_ids if token in self.added]:
            return None  # letters that look like a special token
        same = tokens == written.token_ids
        return same if same or UNDECODED not in written.text else None

    def ending(self, messages: list[Message], tools: list[dict] | None) -> str | None:
        """What the template ends an answer with, None if that is not to be seen."""
        try:
            text = self.rendered([*messages, {"role": "assistant", "content": PROBE}], tools)
        except Exception:  # as above
            return None
        return text.rpartition(PROBE)[2] if PROBE in text else None


def ways(written: Written, tools: list[dict] | None, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Fields that an answer may have, the more telling first and its bare text last."""
    yield from by_schema(written, tools, tokenizer)
    yield from in_channels(written.text)
    for reasoning, rest in reasoned(written):
        for calls, content in called(rest, tools):
            yield {"content": content, **reasoning, **({"tool_calls": calls} if calls else {})}


def by_schema(
    written: Written, tools: list[dict] | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """By the tokenizer's own description of its answers, where it has one."""
    if getattr(tokenizer, "response_template", None) is None:
        return
    try:
        fields = tokenizer.parse_response(written.text, prefix=written.prompt, tools=tools)
    except Exception:  # an answer that it does not describe
        return
    fields = {key: value for key, value in fields.items() if key != "role" and value is not None}
    yield {"content": "", **fields}


def trimmed(text: str) -> list[str]:
    """The text as it is, and without the lines and blanks that a template may put around it."""
    lines = (text.removeprefix("\n").removesuffix("\n"), text.removeprefix("\n"), text.removeprefix("\n\n"))
    return list(
        dict.fromkeys((text, *lines, text.strip("\n"), text.lstrip("\n"), text.removesuffix("\n"), text.strip()))
    )


def reasoned(written: Written) -> Iterator[tuple[dict[str, str], str]]:
    """The reasoning, under the names that templates have for it, and what follows it; then all without any."""
    for opening, closing in THOUGHT:
        thought, found, rest = written.text.partition(closing)
        is_open = thought.lstrip().startswith(opening)
        if not found:
            continue
        thought = thought.lstrip()[len(opening) :] if is_open else thought
        if not thought.strip():
            yield from (({}, text) for text in trimmed(rest))
        for text, content, name in product(trimmed(thought), trimmed(rest), REASONING):
            yield {name: text}, content
    yield from (({}, text) for text in trimmed(written.text))


def in_channels(text: str) -> Iterator[dict[str, Any]]:
    """Of answers in channels: analysis, commentary (calls, and what is said before them) and final."""
    found = [CHANNEL.fullmatch(part) for part in text.split("<|start|>assistant")]
    if not all(found):
        return
    thought, content, calls = [], [], []
    for part in found:
        body, to = part["body"].removesuffix("<|end|>"), part["first"] or part["second"]
        if to:
            calls.append(call(to.removeprefix("functions."), value_of(body)))
        else:
            (thought if part["channel"] == "analysis" else content).append(body)
    if any(each is None for each in calls):
        return
    thoughts = [{name: "\n".join(thought)} for name in reversed(REASONING)] if thought else [{}]
    fields = {"content": "\n".join(content), **({"tool_calls": calls} if calls else {})}
    yield from ({**fields, **reasoning} for reasoning in thoughts)


def called(text: str, tools: list[dict] | None) -> Iterator[tuple[list[dict], str]]:
    """Calls of tools, where there are tools, and the text before them; then no calls, and all of it as text."""
    for parse in PARSERS if tools else ():
        for before, calls in parse(text):
            if calls and all(each is not None for each in calls):
                yield from ((calls, content) for content in (trimmed(before) if before.strip() else [""]))
    yield [], text


def tagged(text: str) -> Iterator[tuple[str, list[dict | None]]]:
    """<tool_call> around each, with JSON (Qwen, Hermes), <function=> (Qwen3-Coder) or <arg_key> (GLM) in it."""
    before, found, after = text.partition("<tool_call>")
    if found and not TAGGED.sub("", found + after).strip():
        bodies = TAGGED.findall(found + after)
        yield before, [json_call(value_of(body)) for body in bodies]
        for read in (value_or_text, str):
            yield before, [function_call(body, read) or keyed_call(body, read) for body in bodies]


def bracketed(text: str) -> Iterator[tuple[str, list[dict | None]]]:
    """Mistral's [TOOL_CALLS]name[ARGS]{...}, one after the other."""
    before, found, after = text.partition("[TOOL_CALLS]")
    if found and not BRACKETED.sub("", found + after).strip():
        calls = [(call(name, value_of(body)), number) for name, number, body in BRACKETED.findall(found + after)]
        yield before, [each and {**each, **({"id": number} if number else {})} for each, number in calls]


def bare(text: str) -> Iterator[tuple[str, list[dict | None]]]:
    """A JSON object (Llama) or a list of them (older Mistral, Phi-4), behind a token perhaps that begins calls."""
    for lead in ("", *LEADS):
        before, found, after = ("", "", text) if not lead else text.partition(lead)
        value = value_of(after.removesuffix("<|/tool_call|>")) if found or not lead else None
        if isinstance(value, dict | list):
            yield before, [json_call(each) for each in (value if isinstance(value, list) else [value])]


PARSERS = (tagged, bracketed, bare)


def no_number(name: str) -> None:
    raise ValueError(name)


def value_of(text: str) -> Any:
    """The value of JSON, None for what is none. NaN, which Python reads, is none."""
    try:
        return json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError):
        return None


def call(name: str, arguments: Any) -> dict | None:
    """A call in OpenAI's form, None where the arguments are no object."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function} if isinstance(arguments, dict) else None


def json_call(value: Any) -> dict | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    made = call(value["name"], value.get("arguments", value.get("parameters", {})))
    return made and {**made, **({"id": value["id"]} if isinstance(value.get("id"), str) else {})}


def value_or_text(text: str) -> Any:
    value = value_of(text)
    return text if value is None else value


def function_call(body: str, read: Callable[[str], Any]) -> dict | None:
    found = FUNCTION.fullmatch(body.strip())
    return found and call(found[1], {key: read(value) for key, value in PARAMETER.findall(found[2])})


def keyed_call(body: str, read: Callable[[str], Any]) -> dict | None:
    name, _, rest = body.strip().partition("\n")
    arguments = {key: read(value) for key, value in ARGUMENT.findall(rest)}
    is_call = re.fullmatch(r"[\w.-]+", name.strip()) and not ARGUMENT.sub("", rest).strip()
    return call(name.strip(), arguments) if is_call else None
