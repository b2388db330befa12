"""A target's output as a message, in fields (content, reasoning, tool calls) that its chat template renders back.

Independent of a model's name: an answer is parsed in all ways in which models write reasoning and tool calls, and the
first parse that the template renders back to the same text is taken. Knows nothing of engines, servers or files.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_train.corpus.conversations import REASONING_FIELDS, Message, conversation_of
from eagle_train.corpus.reasoning import REASONING_TAGS
from eagle_train.corpus.render import ChatRenderer, call_forms
from eagle_train.errors import UserError, shown

_PROBE = "Zq7kX4"  # an answer that no template changes
_UNDECODED = "\ufffd"  # what bytes that are no UTF-8 are decoded to

# <|channel|>analysis<|message|>; calls have to=functions.NAME before the channel or behind it.
_CHANNEL = re.compile(
    r"(?: to=(?P<first>[^\s<]+))?<\|channel\|>(?P<channel>\w+)(?: to=(?P<second>[^\s<]+))?[^<]*"
    r"(?:<\|constrain\|>\w+)?<\|message\|>(?P<body>.*)",
    re.DOTALL,
)
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_BRACKETED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL)
_LEADS = (
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "<tool_call>",
)  # tokens before calls that are one JSON value


@dataclass(frozen=True)
class Written:
    """A target's output for a prompt, special tokens as text. `text`: without the stop token that ended it; `was_cut`:
    there was none. `token_ids`: of the text."""

    prompt: str
    text: str
    token_ids: list[int]
    was_cut: bool


class AnswerParser:
    """Parses a target's output, and renders messages as training does."""

    def __init__(self, renderer: ChatRenderer):
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self.stops = tuple(filter(None, renderer.stops))
        self.added = frozenset(self.tokenizer.added_tokens_decoder)

    def prompt(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        """The text that a server would give the target. Raises UserError if the template refuses the conversation."""
        return self.renderer.template.render(messages, tools, prompt=True)

    def rendered(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        """The model's text of the last message, as training finds it. Raises UserError if that is unknown."""
        row, problems = {"messages": list(messages), "tools": tools}, []
        for form in call_forms(self.renderer.finder.answer_starts.with_fields(conversation_of(row, "messages", {}))):
            try:
                text = self.renderer.finder.turn(form, len(messages) - 1).text
                return text.removeprefix(self.prompt(form.messages[:-1], tools))
            except UserError as error:
                problems.append(error)
        raise problems[0]

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def written(self, prompt: str, token_ids: list[int], was_cut: bool) -> Written:
        """The target's tokens as text; the last one is a stop token unless they were cut."""
        own = token_ids if was_cut else token_ids[:-1]
        text = self.renderer.decode(own, self.tokens(prompt))
        return Written(prompt, text.rstrip(_UNDECODED) if was_cut else text, own, was_cut)

    def message(self, messages: list[Message], tools: list[dict] | None, written: Written) -> tuple[Message, bool]:
        """The answer to `messages`, and whether its rendering has the same tokens.

        Raises UserError if no fields render back to what the target wrote.
        """
        ending = self._ending(messages, tools)
        for fields in _possible_fields(written, tools, self.tokenizer):
            message = {"role": "assistant", **fields}
            found = self._renders_back([*messages, message], tools, written, ending)
            if found is not None:
                return message, found
        where = "the answer was cut within its reasoning or a call (max_tokens), or " if written.was_cut else ""
        raise UserError(f"{where}the chat template does not render the answer back: {shown(written.text)}")

    def _renders_back(
        self, messages: list[Message], tools: list[dict] | None, written: Written, ending: str | None
    ) -> bool | None:
        """Whether the last message, rendered, has the tokens that were written; None if not even the text.

        Behind the text only a stop token may follow, or what the template adds to every answer: the target did not
        write more.
        """
        try:
            text = self.rendered(messages, tools)
        except Exception:  # not these fields; a template is a program and may raise anything
            return None
        rest = text[len(written.text) :]
        if not text.startswith(written.text) or not (rest in ("", ending) or rest.startswith(self.stops)):
            return None
        start = len(self.tokens(written.prompt))
        tokens = self.tokens(written.prompt + text)[start : start + len(written.token_ids)]
        special = [token for token in self.tokens(written.text) if token in self.added]
        if special != [token for token in written.token_ids if token in self.added]:
            return None  # ordinary tokens that spell a special token
        same = tokens == written.token_ids
        return same if same or _UNDECODED not in written.text else None

    def _ending(self, messages: list[Message], tools: list[dict] | None) -> str | None:
        """The text that the template adds behind every answer; None if that cannot be found."""
        probe = {"role": "assistant", "content": _PROBE}
        for message in (probe, {**probe, REASONING_FIELDS[0]: "x"}):  # where a prompt begins it, there must be some
            with contextlib.suppress(Exception):  # as above
                text = self.rendered([*messages, message], tools)
                return text.rpartition(_PROBE)[2] if _PROBE in text else None
        return None


def _possible_fields(
    written: Written, tools: list[dict] | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """Possible fields of an answer, the most specific first and the bare text last."""
    yield from _by_schema(written, tools, tokenizer)
    yield from _in_channels(written.text)
    for reasoning, rest in _split_reasoning(written):
        for calls, content in _split_calls(rest, tools):
            yield {"content": content, **reasoning, **({"tool_calls": calls} if calls else {})}


def _by_schema(
    written: Written, tools: list[dict] | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """With the tokenizer's own response schema, if it has one."""
    if getattr(tokenizer, "response_template", None) is None:
        return
    try:
        fields = tokenizer.parse_response(written.text, prefix=written.prompt, tools=tools)
    except Exception:  # an answer outside the schema
        return
    fields = {key: value for key, value in fields.items() if key != "role" and value is not None}
    yield {"content": "", **fields}


def _trimmed(text: str) -> list[str]:
    """The text, and the text without line breaks and blanks that a template may add around it."""
    lines = (text.removeprefix("\n").removesuffix("\n"), text.removeprefix("\n"), text.removeprefix("\n\n"))
    return list(
        dict.fromkeys((text, *lines, text.strip("\n"), text.lstrip("\n"), text.removesuffix("\n"), text.strip()))
    )


def _split_reasoning(written: Written) -> Iterator[tuple[dict[str, str], str]]:
    """Pairs of reasoning, under each name of its field, and the rest; then the whole text without reasoning."""
    for opening, closing in REASONING_TAGS:
        thought, found, rest = written.text.partition(closing)
        is_open = thought.lstrip().startswith(opening)
        if not found:
            continue
        thought = thought.lstrip()[len(opening) :] if is_open else thought
        if not thought.strip():
            yield from (({}, text) for text in _trimmed(rest))
        for text, content, name in product(_trimmed(thought), _trimmed(rest), REASONING_FIELDS):
            yield {name: text}, content
    yield from (({}, text) for text in _trimmed(written.text))


def _in_channels(text: str) -> Iterator[dict[str, Any]]:
    """Fields of an answer in channels: analysis, commentary (calls, and text before them) and final."""
    parts = text.split("<|start|>assistant")
    found = [match for part in parts if (match := _CHANNEL.fullmatch(part))]
    if len(found) < len(parts):
        return
    thought: list[str] = []
    content: list[str] = []
    calls: list[dict | None] = []
    for part in found:
        body, to = part["body"].removesuffix("<|end|>"), part["first"] or part["second"]
        if to:
            calls.append(_call(to.removeprefix("functions."), _value_of(body)))
        else:
            (thought if part["channel"] == "analysis" else content).append(body)
    if any(each is None for each in calls):
        return
    thoughts = [{name: "\n".join(thought)} for name in reversed(REASONING_FIELDS)] if thought else [{}]
    fields = {"content": "\n".join(content), **({"tool_calls": calls} if calls else {})}
    yield from ({**fields, **reasoning} for reasoning in thoughts)


def _split_calls(text: str, tools: list[dict] | None) -> Iterator[tuple[list[dict], str]]:
    """Pairs of tool calls, if there are tools, and the text before them; then no calls and all of the text."""
    for parse in _PARSERS if tools else ():
        for before, calls in parse(text):
            known = [each for each in calls if each is not None]
            if known and len(known) == len(calls):
                yield from ((known, content) for content in (_trimmed(before) if before.strip() else [""]))
    yield [], text


def _tagged(text: str) -> Iterator[tuple[str, list[dict | None]]]:
    """<tool_call> around each, with JSON (Qwen, Hermes), <function=> (Qwen3-Coder) or <arg_key> (GLM) in it."""
    before, found, after = text.partition("<tool_call>")
    if found and not _TAGGED.sub("", found + after).strip():
        bodies = _TAGGED.findall(found + after)
        yield before, [_json_call(_value_of(body)) for body in bodies]
        for read in (_value_or_text, str):
            yield before, [_function_call(body, read) or _keyed_call(body, read) for body in bodies]


def _bracketed(text: str) -> Iterator[tuple[str, list[dict | None]]]:
    """Mistral's [TOOL_CALLS]name[ARGS]{...}, one after the other."""
    before, found, after = text.partition("[TOOL_CALLS]")
    if found and not _BRACKETED.sub("", found + after).strip():
        calls = [(_call(name, _value_of(body)), number) for name, number, body in _BRACKETED.findall(found + after)]
        yield before, [each and {**each, **({"id": number} if number else {})} for each, number in calls]


def _bare(text: str) -> Iterator[tuple[str, list[dict | None]]]:
    """A JSON object (Llama) or a list of them (older Mistral, Phi-4), perhaps behind a token that begins calls."""
    for lead in ("", *_LEADS):
        before, found, after = ("", "", text) if not lead else text.partition(lead)
        value = _value_of(after.removesuffix("<|/tool_call|>")) if found or not lead else None
        if isinstance(value, dict | list):
            yield before, [_json_call(each) for each in (value if isinstance(value, list) else [value])]


_PARSERS = (_tagged, _bracketed, _bare)


def _no_number(name: str) -> None:
    raise ValueError(name)


def _value_of(text: str) -> Any:
    """The value of JSON text; None for other text, with NaN among it, which Python's parser would accept."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _call(name: str, arguments: Any) -> dict | None:
    """A call in OpenAI's form; None if the arguments are no object."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function} if isinstance(arguments, dict) else None


def _json_call(value: Any) -> dict | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    made = _call(value["name"], value.get("arguments", value.get("parameters", {})))
    return made and {**made, **({"id": value["id"]} if isinstance(value.get("id"), str) else {})}


def _value_or_text(text: str) -> Any:
    value = _value_of(text)
    return text if value is None else value


def _function_call(body: str, parse_value: Callable[[str], Any]) -> dict | None:
    found = _FUNCTION.fullmatch(body.strip())
    return found and _call(found[1], {key: parse_value(value) for key, value in _PARAMETER.findall(found[2])})


def _keyed_call(body: str, parse_value: Callable[[str], Any]) -> dict | None:
    name, _, rest = body.strip().partition("\n")
    arguments = {key: parse_value(value) for key, value in _ARGUMENT.findall(rest)}
    is_call = re.fullmatch(r"[\w.-]+", name.strip()) and not _ARGUMENT.sub("", rest).strip()
    return _call(name.strip(), arguments) if is_call else None
