"""Where in a rendered conversation the model's own text begins: behind the prompt that a server would give it.

The rendering with the answer may not begin with that prompt; then the start is found by rendering answers with two
contents. Knows nothing of where answers end (turns.py). DESIGN section 3.1.
"""

from dataclasses import replace
from functools import cached_property

from eagle_train.corpus.content_checks import end_of
from eagle_train.corpus.conversations import (
    REASONING_FIELDS,
    Conversation,
    Message,
    content_of,
    is_answer,
    reasoning_of,
)
from eagle_train.corpus.reasoning import (
    REASONING_TAGS,
    closes_reasoning,
    closings_of,
    inline_tags,
    is_closing,
    opening_of,
    reasoning_text,
    whole_tags,
    with_field,
    with_opening,
    without_empty_reasoning,
    without_repetition,
)
from eagle_train.corpus.template import GENERATION_PROMPT, SENTINELS, ChatTemplate, Refused
from eagle_train.errors import UserError, check, shown

_QUESTION = "".join(SENTINELS)  # the content of a question before an answer of SENTINELS


class AnswerStarts:
    """Finds answer starts under one template.

    Methods raise UserError if the template refuses a conversation, or if the model's text cannot be known.
    """

    def __init__(self, template: ChatTemplate):
        self.template = template
        self.fielded: dict[tuple[str, str], bool] = {}  # by tags of inline reasoning: whether to give it as a field

    def header(self, prompt: str, answered: str, conversation: Conversation, number: int) -> str:
        """The text between prompt and answer in a template without a generation prompt, which a server would add.

        It is what precedes every answer. White space alone belongs to the model: prompts of such templates end where
        the model begins ([/INST]).
        """
        message, written = conversation.messages[number], answered[len(prompt) :]
        begins = written.lstrip()
        contents = (content_of(message).strip(), reasoning_of(message).strip())
        if any(text and begins.startswith(text) for text in contents):
            return ""
        before, tools = conversation.messages[:number], conversation.tools
        if self._always_prompts:
            return ""
        if GENERATION_PROMPT in self.template.variables(tools):
            is_left_out = (
                self._usual_header[0].strip() and before and not is_answer(before[-1])
            )  # only in this conversation
            if is_left_out or self.template.render(before, tools) != prompt:
                return ""
        head = self.head(before, tools)
        header = whole_tags(in_common(head[len(prompt) :], written)) if head.startswith(prompt) else ""
        return header if header.strip() else ""

    @cached_property
    def _always_prompts(self) -> bool:
        """Whether the template adds a generation prompt to every conversation, whether it is requested or not: behind
        questions and answers alike, and not where another message follows."""
        question = {"role": "user", "content": _QUESTION}
        asked = [question, {"role": "assistant", "content": SENTINELS[0]}, question]
        try:
            texts = [self.template.render(asked[:size]) for size in (1, 2, 3)]
        except Refused:
            return False
        ending = texts[1][len(whole_tags(in_common(texts[1], texts[2]))) :]
        return ending.strip() != "" and texts[0].endswith(ending)

    def head(self, before: list[Message], tools: list[dict] | None) -> str:
        """The rendering up to the answer's content: what renderings of different answers have in common."""
        answers = [[*before, {"role": "assistant", "content": content}] for content in SENTINELS]
        return in_common(*(self.template.render(messages, tools) for messages in answers))

    def asked(self, prompt: str, conversation: Conversation, number: int) -> Conversation:
        """The conversation, its answer without the empty reasoning block that the prompt has already."""
        if not closes_reasoning(prompt):
            return conversation
        messages = list(conversation.messages)
        messages[number] = without_empty_reasoning(messages[number])
        return replace(conversation, messages=messages)

    def begun(self, prompt: str, conversation: Conversation, number: int) -> tuple[str, str] | None:
        """The tag that closes the reasoning which the prompt begins, and the row's reasoning; None if it begins none.

        Raises UserError if the row has none: what the template renders in its place, no model writes.
        """
        message, tools = conversation.messages[number], conversation.tools
        tags = self._open_tag(prompt, tools)
        if tags is None:
            self._check_closed(prompt, message, number, tools)
            return None
        opening, closing = tags
        reasoning = reasoning_text(message, closing, opening)
        if reasoning is None:
            raise UserError(
                f"turn {number + 1}: the chat template's generation prompt ends in {prompt[prompt.rfind(opening) :]!r},"
                " so the model writes reasoning first, and the turn has none: give it as reasoning_content or as "
                f"{opening}...{closing} in the content{self.thinking('false', tools)}, or give another template "
                "(target.chat_template=FILE)"
            )
        return closing, reasoning

    def _check_closed(self, prompt: str, message: Message, number: int, tools: list[dict] | None) -> None:
        """Raise UserError for reasoning behind a prompt that closes the reasoning."""
        has_more = bool(reasoning_of(message)) or inline_tags(message) is not None
        check(
            not (has_more and closes_reasoning(prompt)),
            f"turn {number + 1}: the chat template's generation prompt ends in {prompt[-40:]!r}, which closes the "
            "reasoning, and the turn has some: what the model writes there is unknown; leave reasoning out of the data"
            f"{self.thinking('true', tools)}, or change data.template_kwargs or target.chat_template",
        )

    def check_reasoning(self, written: str, begun: tuple[str, str] | None, number: int) -> None:
        """Raise UserError unless the model's text begins with the reasoning that the prompt begins (`begun`) and with
        the tag that closes it, white space aside."""
        if begun is None:
            return
        closing, reasoning = begun
        wanted, found = ("".join(text.split()) for text in (reasoning + closing, written))
        check(
            found.startswith(wanted),
            f"turn {number + 1}: the chat template does not continue its generation prompt with the turn's reasoning, "
            f"{shown(reasoning.strip())}, but with {shown(written)}: give it as reasoning_content, or give another "
            "template (target.chat_template=FILE)",
        )

    def after_other_prompt(
        self, prompt: str, answered: str, conversation: Conversation, number: int, begun: tuple[str, str] | None
    ) -> str:
        """The model's text behind a generation prompt with which the rendered answer does not begin.

        Either earlier messages are rendered differently, or the prompt opens the reasoning (`begun`: see there), which
        renderings of answers leave out, or closes it. Raises UserError if the row does not determine what the model
        would write.
        """
        message, before, tools = conversation.messages[number], conversation.messages[:number], conversation.tools
        head = self.head(before, tools)
        begin = self.begin(prompt, head, before, tools)
        if begin is not None and answered.startswith(head[:begin]):
            return answered[begin:]
        shared = whole_tags(in_common(prompt, head))
        tail, extra = prompt[len(shared) :], head[len(shared) :]
        if begun is not None:
            closing, reasoning = begun
            same = len(in_common(prompt, answered))
            if not prompt[same:].strip() and answered[same:].lstrip().startswith(reasoning.strip()):
                return answered[same:]  # it differs only in white space
            rest = answered[len(in_common(head, answered)) :]
            return _reasoning_and_answer(reasoning, closing, extra, rest, tail, message)
        is_ended = is_closing(tail) if tail.strip() else not extra.strip()
        # The rendering closes the reasoning as well, differently, or has no tags and begins with the answer.
        known = head if not extra.strip() or is_closing(extra) else shared
        fix = "give answers that begin so"
        if reasoning_of(message):
            fix = f"leave reasoning out of the data{self.thinking('true', tools)}"
        check(
            is_ended and answered.startswith(known) and not reasoning_of(message),
            f"turn {number + 1}: the chat template's generation prompt ends in {(tail or prompt)[-60:]!r}, with which "
            f"its rendered answer does not begin: what the model writes there is unknown; {fix}, or change "
            "data.template_kwargs or target.chat_template",
        )
        return answered[len(known) :]

    def begin(self, prompt: str, head: str, before: list[Message], tools: list[dict] | None) -> int | None:
        """Where the model's text begins in `head`, from the ends of prompt and head; None if these do not match."""
        if before:
            ending, heading = self._endings(before, tools)
            if ending.strip() and prompt.endswith(ending) and head.endswith(heading) and heading.startswith(ending):
                return len(head) - len(heading) + len(ending)
            if heading.strip() and head.endswith(heading) and ending.endswith(heading) and prompt.endswith(ending):
                return len(head)
        header, own = self._usual_header
        if not header.strip() or not prompt.endswith(header):
            return None
        if head.endswith(header + own):
            return len(head) - len(own)
        return len(head) if prompt == head + header else None  # the answer continues the one before

    def _endings(self, before: list[Message], tools: list[dict] | None) -> tuple[str, str]:
        """What prompt and head have behind the last message's content; empty where that content is not found."""
        asked = [*before[:-1], {**before[-1], "content": _QUESTION}]
        try:
            texts = self.template.render(asked, tools, prompt=True), self.head(asked, tools)
        except Refused:
            return "", ""
        ending, heading = (text.rpartition(_QUESTION)[2] for text in texts)
        return (ending, heading) if all(_QUESTION in text for text in texts) else ("", "")

    @cached_property
    def _usual_header(self) -> tuple[str, str]:
        """The generation prompt behind a plain question, and what every answer to it begins with after that; both empty
        if renderings of answers do not begin with that prompt."""
        question = [{"role": "user", "content": _QUESTION}]
        try:
            plain, prompt = self.template.render(question), self.template.render(question, prompt=True)
            head = self.head(question, None)
        except Refused:
            return "", ""
        is_usual = prompt.startswith(plain) and head.startswith(prompt)
        return (prompt[len(plain) :], head[len(prompt) :]) if is_usual else ("", "")

    def _open_tag(self, prompt: str, tools: list[dict] | None) -> tuple[str, str] | None:
        """The reasoning tag that a prompt leaves open, and the tag that closes it; None if it leaves none open."""
        tag = opening_of(prompt)
        if tag is None:
            return None
        known, vocabulary = self.template.source(tools), self.template.tokenizer.get_added_vocab()
        told = next((each for each in closings_of(tag) if each in known or each in vocabulary), None)
        closing = told or dict(REASONING_TAGS).get(tag)  # OLMo 3 writes it as text, and its template reads none
        return None if closing is None else (tag, closing)

    def thinking(self, wanted: str, tools: list[dict] | None) -> str:
        """Which variable switches the reasoning, as far as the names of the template's variables show."""
        known = [name for name in ("enable_thinking", "thinking") if name in self.template.variables(tools)]
        return f", set data.template_kwargs={{{known[0]}: {wanted}}}" if known else ""

    def with_fields(self, conversation: Conversation) -> Conversation:
        """The conversation with inline reasoning as fields, if the template has its own place for the field.

        Left in the content, such a template would add an empty reasoning block before it, or use other tags. What is
        left in the content gets the opening tag that it lacks.
        """
        messages = [self._with_field(message, number) for number, message in enumerate(conversation.messages)]
        return replace(conversation, messages=messages)

    def _with_field(self, message: Message, number: int) -> Message:
        try:
            message = without_repetition(message)
        except UserError as error:
            raise UserError(f"turn {number + 1}: {error}") from error
        tags = inline_tags(message)
        if tags is None:
            return message
        return with_field(message, tags) if self._wants_field(tags) else with_opening(message, tags)

    def _wants_field(self, tags: tuple[str, str]) -> bool:
        if tags not in self.fielded:
            self.fielded[tags] = self._probe_wants_field(tags)
        return self.fielded[tags]

    def _probe_wants_field(self, tags: tuple[str, str]) -> bool:
        opening, closing = tags
        question, (reasoning, content) = [{"role": "user", "content": _QUESTION}], SENTINELS
        answers = (
            {"role": "assistant", "content": content, REASONING_FIELDS[0]: reasoning},
            {"role": "assistant", "content": f"{opening}\n{reasoning}\n{closing}\n\n{content}"},
        )
        try:
            prompt = self.template.render(question, prompt=True)
            field, inline = (self.template.render([*question, answer]) for answer in answers)
        except Refused:
            return False
        begin = len(whole_tags(in_common(prompt, inline)))
        at = inline.find(f"{opening}\n{reasoning}", begin)
        if at >= 0 and closes_reasoning(inline[:at]):
            return True  # also of a template that then leaves the field out, for which the row is refused
        is_behind = at >= 0 and inline[begin:at].strip() != ""
        own = field.rpartition(_QUESTION)[2]
        return reasoning in own and (is_behind or opening not in own)


def in_common(one: str, other: str) -> str:
    """The common prefix of two texts."""
    size = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _reasoning_and_answer(reasoning: str, closer: str, extra: str, rest: str, tail: str, message: Message) -> str:
    """Reasoning and answer as the model writes them behind a prompt that ends in `tail`, with the line breaks that the
    prompt's own suggest. `extra`: what the rendering has instead of the tail; `rest`: the answer."""
    has_lines = tail.endswith("\n")
    reasoning = reasoning.strip("\n") + ("\n" if has_lines else "")
    if extra.startswith(closer):
        return reasoning + extra + rest
    content = content_of(message).rpartition(closer)[2]
    end = end_of(content, rest) if content.strip() else 0
    start = 0 if end is None else max(0, end - len(content.strip()))
    return reasoning + closer + ("\n\n" if has_lines else "") + (rest[start:] if content.strip() else rest)
