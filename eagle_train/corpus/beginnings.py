"""Where what the model itself writes begins in an answer as a template renders it: behind the prompt that a server is
given, with which the rendering may or may not begin. DESIGN section 3.1.

Found out by rendering answers of two contents. Knows nothing of where answers end.
"""

from functools import cached_property

from eagle_train.corpus.chat import REASONING, Conversation, Message, content_of, is_answer, reasoning_of
from eagle_train.corpus.contents import end_of
from eagle_train.corpus.template import GENERATION_PROMPT, SENTINELS, ChatTemplate, Refused
from eagle_train.corpus.thoughts import (
    closings_of,
    inline_tags,
    is_closing,
    opening_of,
    thought_of,
    whole_tags,
    with_fields,
)
from eagle_train.errors import check

QUESTION = "".join(SENTINELS)  # the content of a message before those of SENTINELS


class Beginnings:
    """Of one template. Methods raise UserError where the template refuses a conversation, or where what the model
    writes cannot be known."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self.fielded: dict[tuple[str, str], bool] = {}  # whether reasoning between such tags is better given as a field

    def header(self, prompt: str, answered: str, conversation: Conversation, number: int) -> str:
        """What stands between prompt and answer in a template without a generation prompt: a server's to write, too.

        It is what is there whatever the answer. White space alone is the model's: prompts of such templates end where
        the model begins ([/INST]).
        """
        message, written = conversation.messages[number], answered[len(prompt) :]
        begins = written.lstrip()
        said = (content_of(message).strip(), reasoning_of(message).strip())
        if any(text and begins.startswith(text) for text in said):
            return ""
        before, tools = conversation.messages[:number], conversation.tools
        if self.always_prompts:
            return ""
        if GENERATION_PROMPT in self.template.variables(tools):
            is_left_out = self.usual_header[0].strip() and before and not is_answer(before[-1])  # here, and not always
            if is_left_out or self.template.render(before, tools) != prompt:
                return ""
        head = self.head(before, tools)
        header = whole_tags(in_common(head[len(prompt) :], written)) if head.startswith(prompt) else ""
        return header if header.strip() else ""

    @cached_property
    def always_prompts(self) -> bool:
        """Whether the template ends every conversation with a generation prompt, asked for one or not: it stands behind
        question and answer alike, and goes when something follows."""
        question = {"role": "user", "content": QUESTION}
        asked = [question, {"role": "assistant", "content": SENTINELS[0]}, question]
        try:
            texts = [self.template.render(asked[:size]) for size in (1, 2, 3)]
        except Refused:
            return False
        ending = texts[1][len(whole_tags(in_common(texts[1], texts[2]))) :]
        return ending.strip() != "" and texts[0].endswith(ending)

    def head(self, before: list[Message], tools: list[dict] | None) -> str:
        """What the template writes up to where an answer's content begins: what answers have in common."""
        answers = [[*before, {"role": "assistant", "content": content}] for content in SENTINELS]
        return in_common(*(self.template.render(messages, tools) for messages in answers))

    def after_other_prompt(self, prompt: str, answered: str, conversation: Conversation, number: int) -> str:
        """What the model writes after a generation prompt with which the answer, as it is rendered, does not begin.

        Messages before are rendered in another way, or the prompt has begun the model's reasoning, which is left out of
        conversations, or has ended it. Raises UserError where the row does not tell what the model would write.
        """
        message, before, tools = conversation.messages[number], conversation.messages[:number], conversation.tools
        head = self.head(before, tools)
        begin = self.begin(prompt, head, before, tools)
        if begin is not None and answered.startswith(head[:begin]):
            return answered[begin:]
        shared = whole_tags(in_common(prompt, head))
        tail, extra = prompt[len(shared) :], head[len(shared) :]
        tags = self.opened(prompt, tools)
        ending = (tail or prompt)[-60:] if tags is None else prompt[prompt.rfind(tags[0]) :]
        told = f"turn {number + 1}: the chat template's generation prompt ends in {ending!r}"
        if tags is not None:
            thought = thought_of(message, tags[1], tags[0])
            check(
                thought is not None,
                f"{told}, so the model writes its reasoning first, and the turn has none: give it as reasoning_content "
                f"or as {tags[0]}...{tags[1]} in the content{self.thinking('false', tools)}, or give another template "
                "(target.chat_template=FILE)",
            )
            begun = in_common(prompt, answered)
            if not prompt[len(begun) :].strip() and answered[len(begun) :].lstrip().startswith(thought.strip()):
                return answered[len(begun) :]  # but for a line's end it begins so after all
            rest = answered[len(in_common(head, answered)) :]
            return joined(thought, tags[1], extra, rest, tail, message)
        is_ended = is_closing(tail) if tail.strip() else not extra.strip()
        # The rendering has ended it as well, in another way; or it says nothing of it, and begins the answer at once.
        known = head if not extra.strip() or is_closing(extra) else shared
        fix = "give answers that begin so"
        if reasoning_of(message):
            fix = f"leave reasoning out of the data{self.thinking('true', tools)}"
        check(
            is_ended and answered.startswith(known) and not reasoning_of(message),
            f"{told}, with which the answer that it renders does not begin: what the model writes there is unknown; "
            f"{fix}, or change data.template_kwargs or target.chat_template",
        )
        return answered[len(known) :]

    def begin(self, prompt: str, head: str, before: list[Message], tools: list[dict] | None) -> int | None:
        """Where in an answer's head what the model writes begins, by how a prompt ends and a head does; None where they
        do not end in the same way."""
        if before:
            ending, heading = self.endings(before, tools)
            if ending.strip() and prompt.endswith(ending) and head.endswith(heading) and heading.startswith(ending):
                return len(head) - len(heading) + len(ending)
            if heading.strip() and head.endswith(heading) and ending.endswith(heading) and prompt.endswith(ending):
                return len(head)
        header, own = self.usual_header
        if not header.strip() or not prompt.endswith(header):
            return None
        if head.endswith(header + own):
            return len(head) - len(own)
        return len(head) if prompt == head + header else None  # an answer goes on where the last one ended

    def endings(self, before: list[Message], tools: list[dict] | None) -> tuple[str, str]:
        """What a prompt and an answer's head have behind the last message's content; empty where that is not seen."""
        asked = [*before[:-1], {**before[-1], "content": QUESTION}]
        try:
            texts = self.template.render(asked, tools, prompt=True), self.head(asked, tools)
        except Refused:
            return "", ""
        ending, heading = (text.rpartition(QUESTION)[2] for text in texts)
        return (ending, heading) if all(QUESTION in text for text in texts) else ("", "")

    @cached_property
    def usual_header(self) -> tuple[str, str]:
        """The generation prompt behind a plain question, and what an answer to it begins with behind that; empty where
        it does not begin so."""
        question = [{"role": "user", "content": QUESTION}]
        try:
            plain, prompt = self.template.render(question), self.template.render(question, prompt=True)
            head = self.head(question, None)
        except Refused:
            return "", ""
        is_usual = prompt.startswith(plain) and head.startswith(prompt)
        return (prompt[len(plain) :], head[len(prompt) :]) if is_usual else ("", "")

    def opened(self, prompt: str, tools: list[dict] | None) -> tuple[str, str] | None:
        """The tag of reasoning that a prompt leaves open and the one that closes it, if it leaves one open."""
        tag = opening_of(prompt)
        if tag is None:
            return None
        known, vocabulary = self.template.source(tools), self.template.tokenizer.get_added_vocab()
        return next(((tag, each) for each in closings_of(tag) if each in known or each in vocabulary), None)

    def thinking(self, wanted: str, tools: list[dict] | None) -> str:
        """How a template is told to reason or not, as far as the names of its variables tell."""
        known = [name for name in ("enable_thinking", "thinking") if name in self.template.variables(tools)]
        return f", set data.template_kwargs={{{known[0]}: {wanted}}}" if known else ""

    def with_fields(self, conversation: Conversation) -> Conversation:
        """The conversation with the reasoning within contents as fields, where the template writes such a field in a
        way of its own and would put it before, empty, or write other tags than the content has."""
        for tags in dict.fromkeys(filter(None, map(inline_tags, conversation.messages))):
            if self.is_fielded(tags):
                conversation = with_fields(conversation, tags)
        return conversation

    def is_fielded(self, tags: tuple[str, str]) -> bool:
        if tags not in self.fielded:
            self.fielded[tags] = self.probe_field(tags)
        return self.fielded[tags]

    def probe_field(self, tags: tuple[str, str]) -> bool:
        opening, closing = tags
        question, (thought, content) = [{"role": "user", "content": QUESTION}], SENTINELS
        answers = (
            {"role": "assistant", "content": content, REASONING[0]: thought},
            {"role": "assistant", "content": f"{opening}\n{thought}\n{closing}\n\n{content}"},
        )
        try:
            prompt = self.template.render(question, prompt=True)
            field, inline = (self.template.render([*question, answer]) for answer in answers)
        except Refused:
            return False
        begin = len(whole_tags(in_common(prompt, inline)))
        at = inline.find(f"{opening}\n{thought}", begin)
        is_behind = at >= 0 and inline[begin:at].strip() != ""
        own = field.rpartition(QUESTION)[2]
        return thought in own and (is_behind or opening not in own)


def in_common(one: str, other: str) -> str:
    """What both texts begin with."""
    size = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def joined(thought: str, closer: str, extra: str, rest: str, tail: str, message: Message) -> str:
    """The reasoning and the answer as the model writes them behind a prompt that ends in `tail`: with the lines between
    them that the prompt suggests. `extra`: what the template has in the place of the tail; `rest`: the answer."""
    has_lines = tail.endswith("\n")
    thought = thought.strip("\n") + ("\n" if has_lines else "")
    if extra.startswith(closer):
        return thought + extra + rest
    content = content_of(message).rpartition(closer)[2]
    end = end_of(content, rest) if content.strip() else 0
    start = 0 if end is None else max(0, end - len(content.strip()))
    return thought + closer + ("\n\n" if has_lines else "") + (rest[start:] if content.strip() else rest)
