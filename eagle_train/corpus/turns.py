"""A conversation as its assistant's turns: for each the prompt that a server would be given, and what the model itself
writes after it, to and including the stop that ends it. DESIGN section 3.1.

Knows nothing of tokens or files.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from eagle_train.config import check
from eagle_train.corpus.chat import REASONING, Conversation, Message, content_of, reasoning_of
from eagle_train.corpus.contents import check_read, check_tools, end_of, end_of_answer
from eagle_train.corpus.kept import Kept
from eagle_train.corpus.template import CALL_PROBE, GENERATION_PROMPT, SENTINELS, ChatTemplate, Refused
from eagle_train.corpus.thoughts import (
    behind_tag,
    closings_of,
    inline_tags,
    is_closing,
    opening_of,
    thought_of,
    whole_tags,
    with_fields,
)
from eagle_train.corpus.tokens import Span

QUESTION = "".join(SENTINELS)  # the content of a message before those of SENTINELS


@dataclass(frozen=True)
class Turn:
    """`prompt`: what a server would be given. `written`: what the model writes after it. `spans`: characters of both
    together that are produced, by the template's own markers; None: all that is written."""

    prompt: str
    written: str
    spans: tuple[Span, ...] | None = None

    @property
    def text(self) -> str:
        return self.prompt + self.written

    @property
    def produced(self) -> list[Span]:
        return [(len(self.prompt), len(self.text))] if self.spans is None else list(self.spans)


class TurnFinder:
    """Finds the turns of conversations. `stops`: the texts of the tokens that end an answer; `specials`: of all special
    tokens. `notes`: what it noticed of the template that its user should know."""

    def __init__(self, template: ChatTemplate, stops: Sequence[str], specials: Sequence[str], notes: dict[str, None]):
        self.template, self.notes, self.kept = template, notes, Kept()
        self.fielded: dict[tuple[str, str], bool] = {}  # whether reasoning between such tags is better given as a field
        self.stops, self.specials = alternatives(stops), alternatives([*stops, *specials])

    def turns(self, conversation: Conversation, numbers: Sequence[int]) -> list[Turn]:
        """The turns of the assistant's messages of these numbers.

        Raises UserError where what a message says is not in what the template makes of it, or where what the model
        writes cannot be known.
        """
        found: list[Turn] = []
        read, seen = 0, 0  # messages that were looked for in a prompt; where the last one looked at ended
        for number in numbers:
            asked = Conversation(conversation.messages[: number + 1], conversation.tools)
            check_turn = partial(self.read_turn, number=number, read=read)
            found.append(check_turn(asked, seen=seen))
            turn = found[-1]
            self.kept.check(asked, check_turn, number, read)
            read, seen = number + 1, len(turn.text)
        return found

    def read_turn(self, conversation: Conversation, number: int, read: int, seen: int = 0) -> Turn:
        """A turn in whose prompt the messages from number `read` on are, most likely behind `seen`. Raises as `turns`
        does."""
        turn = self.turn(conversation, number)
        check_read(conversation.messages[:number], read, turn.prompt, seen)
        if read == 0:
            check_tools(conversation.tools, turn.prompt)
        return turn

    def turn(self, conversation: Conversation, number: int) -> Turn:
        messages, tools = conversation.messages, conversation.tools
        prompt, spans = self.template.render(messages[:number], tools, prompt=True), None
        if self.template.has_markers(tools):
            answered, spans = self.template.marked(messages[: number + 1], tools)
        else:
            answered = self.template.render(messages[: number + 1], tools)
        if answered.startswith(prompt):
            prompt += self.header(prompt, answered, conversation, number)
            written = answered[len(prompt) :]
        else:
            written = self.after_other_prompt(prompt, answered, conversation, number)
            spans = None if spans is None else moved(spans, answered, prompt, written)
        written = self.to_its_stop(prompt, written, conversation, number)
        if spans is None:
            return Turn(prompt, written)
        return self.marked(Turn(prompt, written), spans)

    def marked(self, turn: Turn, spans: list[Span]) -> Turn:
        """The turn with what of the template's markers is within what the model writes in it."""
        begin, size = len(turn.prompt), len(turn.text)
        cut = [(max(start, begin), min(end, size)) for start, end in spans]
        own = tuple((start, end) for start, end in cut if start < end)
        last = max((end for _, end in own), default=0) - len(turn.prompt)
        stops = list(self.stops.finditer(turn.written)) if self.stops else []
        if last > 0 and stops and last <= stops[-1].start():
            self.note(
                f"the chat template's {{% generation %}} markers leave out {stops[-1][0]!r}, which ends an answer: the "
                "draft will never learn to guess it"
            )
        return Turn(turn.prompt, turn.written, own)

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
        if GENERATION_PROMPT in self.template.variables(tools) and self.template.render(before, tools) != prompt:
            return ""
        head = self.head(before, tools)
        header = whole_tags(in_common(head[len(prompt) :], written)) if head.startswith(prompt) else ""
        return header if header.strip() else ""

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
                f"or as {tags[0]}...{tags[1]} in the content{self.without_thinking(tools)}, or give another template "
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
        fix = "leave reasoning out of the data" if reasoning_of(message) else "give answers that begin so"
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

    def without_thinking(self, tools: list[dict] | None) -> str:
        """How a template is told to leave reasoning out, as far as the names of its variables tell."""
        known = [name for name in ("enable_thinking", "thinking") if name in self.template.variables(tools)]
        return f", set data.template_kwargs={{{known[0]}: false}}" if known else ""

    def to_its_stop(self, prompt: str, written: str, conversation: Conversation, number: int) -> str:
        """What was written up to and including the first stop after all that the message says."""
        message = behind_tag(conversation.messages[number], prompt)
        said = end_of_answer(message, written, f"turn {number + 1}")
        if any(call["function"]["name"] not in written for call in message.get("tool_calls") or []):
            self.note("the chat template leaves out the names of tool calls: they are neither read nor learnt")
        self.check_unbroken(message, written[:said], number)
        if self.stops and (stop := self.stops.search(written, said)):
            return written[: stop.end()]
        if stop := self.next_header(conversation, number):
            return written + stop
        specials = list(self.specials.finditer(written, said)) if self.specials else []
        if not specials:
            self.note("the chat template ends an answer with no stop token: the draft will not learn where answers end")
            return written
        special = specials[-1]
        self.note(
            f"the chat template ends an answer with {special[0]!r}, which is no stop token of the target's "
            "(eos_token_id in generation_config.json, eos_token of the tokenizer): engines will not stop there"
        )
        return written[: special.end()]

    def check_unbroken(self, message: Message, written: str, number: int) -> None:
        """Raise UserError for a stop, which is none of the message's own text, before the last of what it says."""
        inner = self.stops.findall(written) if self.stops else []
        own = self.stops.findall(json.dumps(message, ensure_ascii=False)) if inner else []
        check(
            len(inner) <= len(own),
            f"turn {number + 1}: the chat template has {''.join(inner[:1])!r}, a stop token, between the parts of what "
            "the turn says (reasoning, content, calls): a model ends there; leave one of them out of the data",
        )

    def next_header(self, conversation: Conversation, number: int) -> str:
        """The stop token with which the next message's header begins: models of such templates end a turn with it.

        It is looked for behind an answer without reasoning, which stays as it is when something follows.
        """
        if not self.stops:
            return ""
        before, message = conversation.messages[:number], conversation.messages[number]
        calls = message.get("tool_calls")
        plain = {"role": "assistant", "content": SENTINELS[0]} | ({"content": "", "tool_calls": calls} if calls else {})
        result = {"role": "tool", "content": "x", "tool_call_id": (calls or [CALL_PROBE])[0].get("id"), "name": "x"}
        question = {"role": "user", "content": "x"}
        after = conversation.messages[number + 1 : number + 2] or [result if calls else question]
        try:
            answered = self.template.render([*before, plain], conversation.tools)
            text = self.template.render([*before, plain, *after], conversation.tools)
        except Refused:
            return ""
        if not calls:  # what is before may be rendered otherwise when something follows
            answered, text = (each.rpartition(SENTINELS[0])[2] for each in (answered, text))
        stop = self.stops.match(text, len(answered)) if text.startswith(answered) else None
        return stop[0] if stop else ""

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

    def note(self, text: str) -> None:
        self.notes.setdefault(text)


def alternatives(texts: Sequence[str]) -> re.Pattern | None:
    """Any of the texts, the longest first; None for none."""
    longest = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest))) if longest else None


def in_common(one: str, other: str) -> str:
    """What both texts begin with."""
    size = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def moved(spans: list[Span], answered: str, prompt: str, written: str) -> list[Span]:
    """Markers of a rendered answer, where the same text stands behind another prompt. What the model writes before that
    text is its reasoning, which the rendering has not: it counts as produced."""
    text = prompt + written
    same = len(text) - len(in_common(text[::-1], answered[::-1]))
    by = len(text) - len(answered)
    behind = [(max(start + by, same), end + by) for start, end in spans if end + by > same]
    return [(len(prompt), behind[0][1]), *behind[1:]] if behind and same > len(prompt) else behind


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
