"""The assistant's turns of a conversation: for each the prompt that a server would render, and the model's text after
it, to and including the stop token that ends it. DESIGN section 3.1.

Knows nothing of tokens or files.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from eagle_train.corpus.answer_starts import AnswerStarts, in_common
from eagle_train.corpus.content_checks import check_read, check_tools, end_of_answer
from eagle_train.corpus.conversations import Conversation, Message, content_of, is_answer
from eagle_train.corpus.reasoning import behind_tag, cut_tag
from eagle_train.corpus.round_trip import RoundTrip
from eagle_train.corpus.template import CALL_PROBE, SENTINELS, ChatTemplate, Refused
from eagle_train.corpus.tokens import Span
from eagle_train.errors import check


@dataclass(frozen=True)
class Turn:
    """`prompt`: the server's text. `written`: the model's text after it. `spans`: character ranges of both together
    that the template's own markers hold, None: all of `written`."""

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
    """Finds the turns of conversations. `stops`: texts of the tokens that end an answer; `specials`: of all special
    tokens. `notes`: collects remarks on the template for the user, once each."""

    def __init__(self, template: ChatTemplate, stops: Sequence[str], specials: Sequence[str], notes: dict[str, None]):
        self.template, self.notes, self.round_trip = template, notes, RoundTrip()
        self.answer_starts = AnswerStarts(template)
        self.stops, self.specials = _alternatives(stops), _alternatives([*stops, *specials])

    def turns(self, conversation: Conversation, numbers: Sequence[int]) -> list[Turn]:
        """The turns of the assistant's messages with these numbers, but for those that no server asks for.

        Raises UserError if a message's content is missing from the rendering, or if the model's text cannot be known.
        """
        found: list[Turn] = []
        read, seen = 0, 0  # messages that were found in a prompt; where the last prompt ended
        for number in numbers:
            asked = Conversation(conversation.messages[: number + 1], conversation.tools, cut=conversation.cut)
            check_turn = partial(self._read_turn, number=number, read=read)
            turn = check_turn(asked, seen=seen)
            self.round_trip.check(asked, check_turn, number, read)
            if self._is_over(turn.prompt, asked):
                self.note("the chat template has nothing between two of the assistant's turns: the second is muted")
                continue
            found.append(turn)
            read, seen = number + 1, len(turn.text)
        return found

    def _is_over(self, prompt: str, conversation: Conversation) -> bool:
        """Whether a prompt ends with the stop of the answer before, and has no more: no server asks again there."""
        before = conversation.messages[:-1]
        if not before or not is_answer(before[-1]) or self.stops is None:
            return False
        ended = prompt.rstrip()
        is_stopped = any(stop.end() == len(ended) for stop in self.stops.finditer(ended))
        return is_stopped and prompt == self.template.render(before, conversation.tools)

    def _read_turn(self, conversation: Conversation, number: int, read: int, seen: int = 0) -> Turn:
        """A turn, checked to have the messages from number `read` on in its prompt, searched from `seen` on first.

        Raises as `turns` does.
        """
        turn = self.turn(conversation, number)
        check_read(conversation.messages[:number], read, turn.prompt, seen)
        if read == 0:
            check_tools(conversation.tools, turn.prompt)
        return turn

    def turn(self, conversation: Conversation, number: int) -> Turn:
        tools, spans = conversation.tools, None
        prompt = self.template.render(conversation.messages[:number], tools, prompt=True)
        conversation = self.answer_starts.asked(prompt, conversation, number)
        messages = conversation.messages
        tag = cut_tag(messages[number])
        check(
            tag is None,
            f"turn {number + 1}: its reasoning, which {tag} begins, never ends: the answer was probably cut; leave the "
            "row out or give it whole",
        )
        begun = self.answer_starts.begun(prompt, conversation, number)
        if self.template.has_markers(tools):
            answered, spans = self.template.marked(messages[: number + 1], tools)
        else:
            answered = self.template.render(messages[: number + 1], tools)
        if answered.startswith(prompt):
            prompt += self.answer_starts.header(prompt, answered, conversation, number)
            written = answered[len(prompt) :]
        else:
            written = self.answer_starts.after_other_prompt(prompt, answered, conversation, number, begun)
            spans = None if spans is None else _shifted(spans, answered, prompt, written)
        self.answer_starts.check_reasoning(written, begun, number)
        written = self.to_its_stop(prompt, written, conversation, number)
        turn = Turn(prompt, written) if spans is None else self.marked(Turn(prompt, written), spans)
        return _to_its_cut(turn, conversation.messages[number], number) if number in conversation.cut else turn

    def marked(self, turn: Turn, spans: list[Span]) -> Turn:
        """The turn with the parts of the template's marked spans that are in the model's text."""
        begin, size = len(turn.prompt), len(turn.text)
        cut = [(max(start, begin), min(end, size)) for start, end in spans]
        own = tuple((start, end) for start, end in cut if start < end)
        last = max((end for _, end in own), default=0) - len(turn.prompt)
        stops = list(self.stops.finditer(turn.written)) if self.stops else []
        if last > 0 and stops and last <= stops[-1].start():
            self.note(
                f"the chat template's {{% generation %}} markers leave out {stops[-1][0]!r}, which ends an answer: the "
                "draft will never learn to predict it"
            )
        return Turn(turn.prompt, turn.written, own)

    def to_its_stop(self, prompt: str, written: str, conversation: Conversation, number: int) -> str:
        """The model's text up to and including the first stop after all of the message's content."""
        message = behind_tag(conversation.messages[number], prompt)
        content_end = end_of_answer(message, written, f"turn {number + 1}")
        if any(call["function"]["name"] not in written for call in message.get("tool_calls") or []):
            self.note("the chat template leaves out the names of tool calls: they are neither rendered nor trained on")
        self._check_unbroken(message, written[:content_end], number)
        if self.stops and (stop := self.stops.search(written, content_end)):
            return written[: stop.end()]
        if header := self._next_header(conversation, number):
            return written + header
        specials = list(self.specials.finditer(written, content_end)) if self.specials else []
        if not specials:
            self.note("the chat template ends an answer with no stop token: the draft will not learn where answers end")
            return written
        special = specials[-1]
        self.note(
            f"the chat template ends an answer with {special[0]!r}, which is no stop token of the target's "
            "(eos_token_id in generation_config.json, eos_token of the tokenizer): engines will not stop there"
        )
        return written[: special.end()]

    def _check_unbroken(self, message: Message, written: str, number: int) -> None:
        """Raise UserError for a stop token, not of the message's own text, between the parts of the message."""
        if self.stops is None:
            return
        inner = self.stops.findall(written)
        own = self.stops.findall(json.dumps(message, ensure_ascii=False)) if inner else []
        check(
            len(inner) <= len(own),
            f"turn {number + 1}: the chat template has {''.join(inner[:1])!r}, a stop token, between the parts of "
            "the turn (reasoning, content, calls): a model ends there; leave one of them out of the data",
        )

    def _next_header(self, conversation: Conversation, number: int) -> str:
        """The stop token at the beginning of the next message's header: models with such templates end a turn with it.

        It is searched behind an answer without reasoning, whose rendering does not change when a message follows.
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
        if not calls:  # earlier messages may be rendered differently when one follows
            answered, text = (each.rpartition(SENTINELS[0])[2] for each in (answered, text))
        stop = self.stops.match(text, len(answered)) if text.startswith(answered) else None
        return stop[0] if stop else ""

    def note(self, text: str) -> None:
        self.notes.setdefault(text)


def _to_its_cut(turn: Turn, message: Message, number: int) -> Turn:
    """A turn that was cut: the stop that the template puts behind its text is none of the model's."""
    end = end_of_answer(behind_tag(message, turn.prompt), turn.written, f"turn {number + 1}")
    if not message.get("tool_calls"):  # white space at its end is its own
        content = content_of(message)
        end += len(in_common(content[len(content.rstrip()) :], turn.written[end:]))
    end += len(turn.prompt)
    return replace(turn, spans=tuple((start, min(stop, end)) for start, stop in turn.produced if start < end))


def _alternatives(texts: Sequence[str]) -> re.Pattern | None:
    """A pattern for any of the texts, the longest first; None without any."""
    longest = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest))) if longest else None


def _shifted(spans: list[Span], answered: str, prompt: str, written: str) -> list[Span]:
    """Marked spans of a rendered answer, moved to the same text behind another prompt.

    Text of the model before that is reasoning that the rendering lacks: it counts as produced.
    """
    text = prompt + written
    same = len(text) - len(in_common(text[::-1], answered[::-1]))
    by = len(text) - len(answered)
    behind = [(max(start + by, same), end + by) for start, end in spans if end + by > same]
    return [(len(prompt), behind[0][1]), *behind[1:]] if behind and same > len(prompt) else behind
