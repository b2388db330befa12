"""A target's chat template: messages in, the text that a serving engine would make of them out. DESIGN section 3.1.

Training, the engine, the evaluations and `eagle-regenerate` all render through it. What a template wants, and what
it cannot do, is found out by rendering, never by a model's name.
"""

import datetime
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eagle_train.corpus.chat import REASONING, Message, reasoning_of
from eagle_train.corpus.tokens import Span
from eagle_train.errors import HALF, SURROGATE, UserError, check, one_line
from eagle_train.transformers_private import compiled_template

CLOCK = "strftime_now"  # the function by which templates read the clock
GENERATION_PROMPT = "add_generation_prompt"
RESERVED = ("messages", "tools", "documents", "chat_template", GENERATION_PROMPT, "conversations", CLOCK)
RESERVED += ("continue_final_message", "return_assistant_tokens_mask", "tokenize")
SENTINELS = ("Zq7", "kX4")  # contents of probes: nothing that a template would look for, and no letter in common
CALL_PROBE = {"type": "function", "id": "Zq7Zq7Zq7", "function": {"name": "probe", "arguments": {"of": "form"}}}

# transformers keeps a template, and in it the spans of the rendering under way, for all threads of the process.
RENDERING = threading.Lock()


class Refused(UserError):
    """The template raised an error on a conversation: often its own, to say what it does not take."""


class TemplateFault(UserError):
    """The template does not render even the plainest conversation: no row is to blame."""


def check_template_kwargs(kwargs: Mapping[str, Any], field: str) -> None:
    """Raise UserError for what a template is given anyway."""
    for name in kwargs:
        check(isinstance(name, str) and name.isidentifier(), f"{field}: {name!r} must be a variable's name")
        check(name not in RESERVED, f"{field}.{name}: is set here for each rendering; leave it out")


def as_date(date: str) -> datetime.datetime:
    """The day that templates are told. Raises UserError unless it is as 2026-07-31."""
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise UserError(f"data.date={date}: must be a day, as 2026-07-31") from error


class ChatTemplate:
    """A tokenizer's chat template and what it is given beside the messages.

    `kwargs`: values of its own variables (`enable_thinking`, say). `date`: the day that it is told when it reads the
    clock, as 2026-07-31; None: the moment of the rendering, as servers tell it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None, date: str | None = None
    ):
        self.tokenizer, self.date = tokenizer, date
        self.special_tokens = dict(tokenizer.special_tokens_map)
        self.kwargs, self.was_told_the_day = dict(kwargs or {}), False
        check_template_kwargs(self.kwargs, "template_kwargs")
        self.parts: dict[tuple[str, bool], bool] = {}  # whether contents of a role are wanted as parts, found by probes

    def render(self, messages: Sequence[Message], tools: list[dict] | None = None, prompt: bool = False) -> str:
        """The conversation as text, with the generation prompt behind it if it is to be a `prompt`.

        Raises Refused where the template does, TemplateFault where it cannot be read at all.
        """
        return self.rendered(self.formed(messages, tools), tools, **{GENERATION_PROMPT: prompt})[0]

    def marked(self, messages: Sequence[Message], tools: list[dict] | None = None) -> tuple[str, list[Span]]:
        """The conversation as text, and what the template's own {% generation %} markers hold. Raises as `render`."""
        return self.rendered(self.formed(messages, tools), tools, return_assistant_tokens_mask=True)

    def prompt_tokens(self, messages: Sequence[Message], tools: list[dict] | None = None) -> list[int]:
        """What the target is asked to go on from: the token ids of the conversation and its generation prompt."""
        said = [{key: value for key, value in message.items() if value is not None} for message in messages]
        text = self.render(said, tools, prompt=True)
        check(not SURROGATE.search(text), f"the conversation holds {HALF}")
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def source(self, tools: list[dict] | None = None) -> str:
        """The template's text; some tokenizers have one for tools and one without. Raises TemplateFault without any."""
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
            with RENDERING, self.clock_of(compiled):
                texts, spans = render_jinja_template([messages], tools, chat_template=source, **given)
        except TemplateError as error:
            raise Refused(f"the chat template refuses the conversation: {one_line(error)}") from error
        except Exception as error:  # a template is a program, which may fail in any way
            kind = type(error).__name__
            raise Refused(f"the chat template fails on the conversation: {kind}: {one_line(error)}") from error
        return texts[0], spans[0] if spans else []

    @contextmanager
    def clock_of(self, compiled: Any) -> Iterator[None]:
        """Meanwhile a compiled template, which the whole process shares, is told our time."""
        compiled.globals[CLOCK] = self.now
        try:
            yield
        finally:
            del compiled.globals[CLOCK]

    def now(self, format: str) -> str:
        """The clock that templates read."""
        self.was_told_the_day = True
        now = datetime.datetime.now() if self.date is None else as_date(self.date)
        return now.strftime(format)

    def variables(self, tools: list[dict] | None = None) -> frozenset[str]:
        """The names that the template looks up outside itself."""
        return self._variables[tools is not None]

    @cached_property
    def _variables(self) -> tuple[frozenset[str], frozenset[str]]:
        sources = [self.source(), self.source([{}])]
        trees = [self.compiled(source).environment.parse(source) for source in sources]
        found = [frozenset(meta.find_undeclared_variables(tree)) for tree in trees]
        return found[0], found[1]

    @property
    def reads_clock(self) -> bool:
        """Whether the template may read the clock."""
        return any(CLOCK in self.source(tools) for tools in (None, [{}]))

    def has_markers(self, tools: list[dict] | None = None) -> bool:
        """Whether the template says itself, by {% generation %}, what the assistant produces."""
        return is_marked(self.source(tools))

    def formed(self, messages: Sequence[Message], tools: list[dict] | None) -> list[Message]:
        """The messages with their contents as the template wants them: text, or a list of parts."""
        has_tools = tools is not None
        return [self.shaped(message, has_tools) for message in messages]

    def shaped(self, message: Message, has_tools: bool) -> Message:
        if any(message.get(key) for key in REASONING) and self.wants_thoughts:
            message = with_thought(message)
        return in_parts(message) if self.wants_parts(message.get("role", ""), has_tools) else in_text(message)

    @cached_property
    def wants_thoughts(self) -> bool:
        """Whether the template takes reasoning as a part of the content only (Magistral)."""
        answer = {"role": "assistant", "content": "a", REASONING[0]: SENTINELS[0]}
        as_field, as_part = ([{"role": "user", "content": "q"}, each] for each in (answer, with_thought(answer)))
        if self.shows(as_field, False) or not self.shows(as_part, False):
            return False
        text, part = self.rendered(as_part, None)[0], as_part[1]["content"][0]
        return not any(form(part)[1:-1] in text for form in (repr, json.dumps))  # it knows parts, and not their text

    def wants_parts(self, role: str, has_tools: bool = False) -> bool:
        """Whether the template takes a role's content as a list of parts only."""
        key = (role, has_tools)
        if key not in self.parts:
            self.parts[key] = False  # what its own probe is rendered with
            self.parts[key] = self.probed(role, has_tools)
        return self.parts[key]

    def probed(self, role: str, has_tools: bool) -> bool:
        """As text the content is lost, or the template fails; as parts it is there."""
        user, call = {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL_PROBE]}
        asked = {"role": role, "content": SENTINELS[0]}
        if role == "tool":
            asked |= {"tool_call_id": CALL_PROBE["id"], "name": CALL_PROBE["function"]["name"]}
        before = {"user": [], "assistant": [user], "tool": [user, call]}.get(role)
        probe = [asked, user] if before is None else [*before, asked]
        shaped = [in_parts(m) if m is not asked and self.wants_parts(m["role"], has_tools) else m for m in probe]
        as_text = self.shows(shaped, has_tools)
        return not as_text and self.shows([in_parts(m) if m is asked else m for m in shaped], has_tools)

    def shows(self, probe: list[Message], has_tools: bool) -> bool:
        """Whether a probe is rendered, with its content in it."""
        tools = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}]
        try:
            return SENTINELS[0] in self.rendered(probe, tools if has_tools else None)[0]
        except Refused:
            return False

    @cached_property
    def fault(self) -> str | None:
        """Why no conversation at all can be rendered, None if the plainest can."""
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        told = None
        for plain in ([question, answer], [{"role": "system", "content": "s"}, question, answer], [question]):
            try:
                self.render(plain)
                return None
            except Refused as error:
                told = told or str(error)
        return f"{told}; it does so with the plainest question and answer too: give another, target.chat_template=FILE"


@lru_cache
def is_marked(source: str) -> bool:
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


def with_thought(message: Message) -> Message:
    """The message with its reasoning as the first part of its content."""
    thought, text = reasoning_of(message), message.get("content")
    parts = [{"type": "thinking", "thinking": thought}, *([{"type": "text", "text": text}] if text else [])]
    return {**{key: value for key, value in message.items() if key not in REASONING}, "content": parts}


def in_parts(message: Message) -> Message:
    content = message.get("content")
    return message if not isinstance(content, str) else {**message, "content": [{"type": "text", "text": content}]}


def in_text(message: Message) -> Message:
    """The message with its text parts joined; with parts of another kind as it is."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) and "text" in part for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}
