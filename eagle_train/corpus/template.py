"""A target's chat template: renders messages to the text that a serving engine would give the target. DESIGN 3.1.

Training, the engine, the evaluations and `eagle-regenerate` all render through it. Which form of messages a template
needs, and what it cannot render, is found out by rendering probes, never from a model's name.
"""

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eagle_train.corpus.conversations import REASONING_FIELDS, Message, reasoning_of
from eagle_train.corpus.tokens import Span
from eagle_train.errors import HALF, SURROGATE, UserError, check, one_line
from eagle_train.transformers_private import compiled_template

_CLOCK = "strftime_now"  # the function by which templates read the clock
GENERATION_PROMPT = "add_generation_prompt"
_RESERVED = (
    *("messages", "tools", "documents", "chat_template", GENERATION_PROMPT, "conversations", _CLOCK),
    *("continue_final_message", "return_assistant_tokens_mask", "tokenize"),
)
SENTINELS = ("Zq7", "kX4")  # contents of probes: unlikely in templates, without a common letter
CALL_PROBE: dict[str, Any] = {
    "type": "function",
    "id": "Zq7Zq7Zq7",
    "function": {"name": "probe", "arguments": {"of": "form"}},
}

# transformers caches a compiled template, with the spans of the current rendering in it, for all threads.
_RENDERING = threading.Lock()


class Refused(UserError):
    """The template raised an error on a conversation, often deliberately, to say what it does not support."""


class TemplateFault(UserError):
    """The template does not render even the plainest conversation, so no row is at fault."""


def check_template_kwargs(kwargs: Mapping[str, Any], field: str) -> None:
    """Raise UserError for names that are no variables, and for variables that are set for every rendering."""
    for name in kwargs:
        check(isinstance(name, str) and name.isidentifier(), f"{field}: {name!r} must be a variable's name")
        check(name not in _RESERVED, f"{field}.{name}: is set for each rendering; leave it out")


def as_date(date: str) -> datetime.datetime:
    """The date that templates get. Raises UserError unless it has the form 2026-07-31."""
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise UserError(f"data.date={date}: must be a date, as 2026-07-31") from error


class ChatTemplate:
    """A tokenizer's chat template and its other inputs beside the messages.

    `kwargs`: values of its own variables (`enable_thinking`, say). `date`: the date that it gets when it reads the
    clock, as 2026-07-31; None: the time of the rendering, as in servers, by `clock`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ):
        self.tokenizer, self.date, self.clock = tokenizer, date, clock
        self.special_tokens = dict(tokenizer.special_tokens_map)
        self.kwargs, self.has_read_clock = dict(kwargs or {}), False
        check_template_kwargs(self.kwargs, "template_kwargs")
        self.parts: dict[tuple[str, bool], bool] = {}  # whether a role's contents must be lists of parts

    def render(self, messages: Sequence[Message], tools: list[dict] | None = None, prompt: bool = False) -> str:
        """The conversation as text; as a `prompt`, with the generation prompt behind it.

        Raises Refused if the template raises an error, TemplateFault if it cannot be compiled.
        """
        return self.rendered(self._formed(messages, tools), tools, **{GENERATION_PROMPT: prompt})[0]

    def marked(self, messages: Sequence[Message], tools: list[dict] | None = None) -> tuple[str, list[Span]]:
        """The conversation as text, and the spans in the template's {% generation %} markers. Raises as `render`."""
        return self.rendered(self._formed(messages, tools), tools, return_assistant_tokens_mask=True)

    def prompt_tokens(self, messages: Sequence[Message], tools: list[dict] | None = None) -> list[int]:
        """The token ids of the conversation with its generation prompt: what the target continues."""
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        text = self.render(given, tools, prompt=True)
        check(not SURROGATE.search(text), f"the conversation holds {HALF}")
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def source(self, tools: list[dict] | None = None) -> str:
        """The template's text; some tokenizers have another one for tools. Raises TemplateFault without any."""
        if self.tokenizer.chat_template is None:
            raise TemplateFault(
                "the target's tokenizer has no chat template: give target.chat_template=FILE, or use data.format=text"
            )
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise TemplateFault(f"the chat template: {one_line(error)}") from error

    def compiled(self, source: str) -> Any:
        try:
            return compiled_template(source)
        except TemplateSyntaxError as error:
            raise TemplateFault(f"the chat template, line {error.lineno}: {one_line(error)}") from error
        except TemplateError as error:
            raise TemplateFault(f"the chat template: {one_line(error)}") from error

    def rendered(self, messages: list[Message], tools: list[dict] | None, **options: bool) -> tuple[str, list[Span]]:
        source = self.source(tools)
        compiled = self.compiled(source)
        given = {**self.special_tokens, **self.kwargs, **options}
        try:
            with _RENDERING, self._clock_of(compiled):
                texts, spans = render_jinja_template([messages], tools, chat_template=source, **given)
        except TemplateError as error:
            raise Refused(f"the chat template refuses the conversation: {one_line(error)}") from error
        except Exception as error:  # a template is a program and may raise anything
            kind = type(error).__name__
            raise Refused(f"the chat template fails on the conversation: {kind}: {one_line(error)}") from error
        return texts[0], spans[0] if spans else []

    @contextmanager
    def _clock_of(self, compiled: Any) -> Iterator[None]:
        """Set the clock of a compiled template, which all of the process shares, within a `with` block."""
        compiled.globals[_CLOCK] = self.now
        try:
            yield
        finally:
            del compiled.globals[_CLOCK]

    def now(self, format: str) -> str:
        """The clock that templates read."""
        self.has_read_clock = True
        now = self.clock() if self.date is None else as_date(self.date)
        return now.strftime(format)

    def variables(self, tools: list[dict] | None = None) -> frozenset[str]:
        """The names of variables that the template reads and does not set."""
        return self._variables[tools is not None]

    @cached_property
    def _variables(self) -> tuple[frozenset[str], frozenset[str]]:
        sources = [self.source(), self.source([{}])]
        trees = [self.compiled(source).environment.parse(source) for source in sources]
        found = [frozenset(meta.find_undeclared_variables(tree)) for tree in trees]
        return found[0], found[1]

    @property
    def switches(self) -> list[str]:
        """The names of its own variables: those that it reads and nothing else sets."""
        set_by_others = {*_RESERVED, *self.special_tokens, *self.compiled(self.source()).globals}
        return sorted(self.variables() - set_by_others)

    @property
    def reads_clock(self) -> bool:
        """Whether the template may read the clock."""
        return _CLOCK in self.source() or _CLOCK in self.source([{}])

    def has_markers(self, tools: list[dict] | None = None) -> bool:
        """Whether the template marks with {% generation %} what the assistant writes."""
        return _is_marked(self.source(tools))

    def _formed(self, messages: Sequence[Message], tools: list[dict] | None) -> list[Message]:
        """The messages with contents in the form that the template needs: text, or a list of parts."""
        has_tools = tools is not None
        return [self._formed_message(message, has_tools) for message in messages]

    def _formed_message(self, message: Message, has_tools: bool) -> Message:
        if any(message.get(key) for key in REASONING_FIELDS):
            if self._wants_reasoning_part:
                message = _with_reasoning_part(message)
            elif self._reasoning_field not in (None, REASONING_FIELDS[0]):
                message = {**_without_reasoning(message), self._reasoning_field: reasoning_of(message)}
        return _in_parts(message) if self._wants_parts(message.get("role", ""), has_tools) else _in_text(message)

    @cached_property
    def _reasoning_field(self) -> str | None:
        """The field that the template renders reasoning of, None for none. From transformers 5.18 on a template is
        given any of them under all names."""
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        shown = (name for name in REASONING_FIELDS if self.shows([question, {**answer, name: SENTINELS[0]}], False))
        return next(shown, None)

    @cached_property
    def _wants_reasoning_part(self) -> bool:
        """Whether the template renders reasoning only as a part of the content (Magistral)."""
        answer = {"role": "assistant", "content": "a", REASONING_FIELDS[0]: SENTINELS[0]}
        as_part = [{"role": "user", "content": "q"}, _with_reasoning_part(answer)]
        if self._reasoning_field is not None or not self.shows(as_part, False):
            return False
        text, part = self.rendered(as_part, None)[0], as_part[1]["content"][0]
        return not any(
            form(part)[1:-1] in text for form in (repr, json.dumps)
        )  # else it wrote the part itself, not its text

    def _wants_parts(self, role: str, has_tools: bool = False) -> bool:
        """Whether the template renders a role's content only as a list of parts."""
        key = (role, has_tools)
        if key not in self.parts:
            self.parts[key] = False  # for the rendering of the probe itself
            self.parts[key] = self._probe_wants_parts(role, has_tools)
        return self.parts[key]

    def _probe_wants_parts(self, role: str, has_tools: bool) -> bool:
        """Whether the content is rendered as parts, but lost or refused as text."""
        user, call = {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL_PROBE]}
        asked = {"role": role, "content": SENTINELS[0]}
        if role == "tool":
            asked |= {"tool_call_id": CALL_PROBE["id"], "name": CALL_PROBE["function"]["name"]}
        usual: dict[str, list[Message]] = {"user": [], "assistant": [user], "tool": [user, call]}
        probe = [*usual[role], asked] if role in usual else [asked, user]
        formed = [_in_parts(m) if m is not asked and self._wants_parts(m["role"], has_tools) else m for m in probe]
        as_text = self.shows(formed, has_tools)
        return not as_text and self.shows([_in_parts(m) if m is asked else m for m in formed], has_tools)

    def shows(self, probe: list[Message], has_tools: bool) -> bool:
        """Whether a probe's rendering has its content."""
        tools = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}]
        try:
            return SENTINELS[0] in self.rendered(probe, tools if has_tools else None)[0]
        except Refused:
            return False

    @cached_property
    def fault(self) -> str | None:
        """Why no conversation at all can be rendered; None if the plainest can."""
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        first = None
        for plain in ([question, answer], [{"role": "system", "content": "s"}, question, answer], [question]):
            try:
                self.render(plain)
                return None
            except Refused as error:
                first = first or str(error)
        return f"{first}; it does so with the plainest question and answer too: give another, target.chat_template=FILE"


@lru_cache
def _is_marked(source: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


def _with_reasoning_part(message: Message) -> Message:
    """The message with its reasoning as the first part of its content."""
    reasoning, text = reasoning_of(message), message.get("content")
    parts = [{"type": "thinking", "thinking": reasoning}, *([{"type": "text", "text": text}] if text else [])]
    return {**_without_reasoning(message), "content": parts}


def _without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in REASONING_FIELDS}


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return message if not isinstance(content, str) else {**message, "content": [{"type": "text", "text": content}]}


def _in_text(message: Message) -> Message:
    """The message with its text parts joined; unchanged if it has parts of another kind."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) and "text" in part for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}
