"""A row of the data whose assistant messages are written anew, turn by turn, each after the new ones before it.

Knows nothing of who answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_train.corpus.columns import CUT, FINISH_REASONS, VARIABLES
from eagle_train.corpus.conversations import REASONING_FIELDS, Message, conversation_of
from eagle_train.corpus.rows import CAN_SKIP, PlacedRow, Row, behind_place, parse
from eagle_train.corpus.source import DataConfig
from eagle_train.errors import UserError
from eagle_train.regeneration.row_log import line_of

_TURN_SEEDS = 1 << 20  # so far apart that, of the first million rows, no two requests share a seed
# Finish reasons of answers that are the model's own; the last one is older text-generation-inference's for a stop.
_ENDS = ("stop", CUT, "tool_calls", "function_call", "eos_token")


@dataclass
class Dialogue:
    """Row `number` of the data, in flight.

    `turns`: the messages before each answer. `messages`: those sent so far, and their answers. `failed`: why the row is
    left out, None while it is not; `given_up`: because a server did not answer, `refused`: because it would not.
    `reasoning`: the server's name for the reasoning field. `retokenised`: how many answers have the text that was
    written, but other tokens. `variables`: the row's own of the chat template.
    """

    number: int
    turns: list[list[Message]]
    failed: str | None = None
    tools: list[dict] | None = None
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    given_up: bool = False
    refused: bool = False
    reasoning: str = REASONING_FIELDS[0]
    retokenised: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)

    def next_turn(self) -> bool:
        """Add the messages of the next turn; False if there is none or it cannot be asked.

        A tool call ends the dialogue: its result is unknown. So does an answer that was cut: its end is.
        """
        turn = len(self.finish_reasons)
        is_calling, is_cut = bool(self.messages and self.messages[-1].get("tool_calls")), CUT in self.finish_reasons
        if self.failed is not None or turn == len(self.turns) or is_calling or is_cut:
            return False
        self.messages += self.turns[turn]
        return True

    def check_end(self, finish_reason: str | None) -> bool:
        """Whether an answer that ended for this reason is the model's own; for another, the row is left out."""
        if finish_reason not in _ENDS:
            self.failed = f"its answer broke off (finish_reason: {finish_reason or 'none'})"
        return self.failed is None

    def add_answer(self, answer: Message, finish_reason: str) -> None:
        self.messages.append(answer)
        self.finish_reasons.append(finish_reason)

    @property
    def seed(self) -> int:
        """The turn's own seed, a function of row and turn."""
        return self.number + len(self.finish_reasons) * _TURN_SEEDS

    @property
    def sent(self) -> list[Message]:
        """The messages for a server, with its own name for the reasoning field."""
        names = {REASONING_FIELDS[0]: self.reasoning}
        return [{names.get(key, key): value for key, value in message.items()} for message in self.messages]

    @property
    def row(self) -> Row:
        """The output row: `messages`, tools and variables if there are any, and why each answer ended."""
        beside = {"tools": self.tools, VARIABLES: self.variables}
        given = {key: value for key, value in beside.items() if value}
        return {"row": self.number, "messages": self.messages, **given, FINISH_REASONS: self.finish_reasons}


def dialogue_of(number: int, placed: PlacedRow, data: DataConfig) -> Dialogue:
    """The dialogue of a row.

    A malformed row becomes a failed dialogue with `data.malformed=skip`; otherwise raises UserError with its place.
    """
    try:
        conversation = conversation_of(parse(*placed), data.format, data.columns, data.speakers)
        messages, tools = conversation.messages, conversation.tools
        line_of({"messages": messages, "tools": tools, VARIABLES: conversation.variables})
    except UserError as error:
        reason = behind_place(placed[0], error)
        if data.malformed == "skip":
            return Dialogue(number, [], reason)
        raise UserError(f"{reason}; {CAN_SKIP}") from error
    turns = _turns_of(messages)
    failed = None if turns else "it has no message but the assistant's"
    if any(message["role"] == "tool" for message in messages):
        failed = "it has a tool's results, which a new answer may not have asked for"
    return Dialogue(number, turns, failed, tools, variables=conversation.variables)


def _turns_of(messages: list[Message]) -> list[list[Message]]:
    """The messages between the assistant's."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif turns[-1]:
            turns.append([])
    return [turn for turn in turns if turn]
