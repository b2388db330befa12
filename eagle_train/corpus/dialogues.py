"""A row as a dialogue whose answers are written anew, turn by turn, each after those already given.

Knows nothing of who answers.
"""

from dataclasses import dataclass, field

from eagle_train.corpus.chat import REASONING, Message, conversation_of
from eagle_train.corpus.row_log import line_of
from eagle_train.corpus.rows import CAN_SKIP, PlacedRow, Row, behind_place, parse
from eagle_train.corpus.source import DataConfig
from eagle_train.errors import UserError

TURN_SEEDS = 1 << 20  # far enough apart that no two requests share a seed


@dataclass
class Dialogue:
    """The data's row `number` on its way. `turns`: the messages before each answer. `messages`: those asked so far, and
    their answers. `failed`: why it is left out, if it is; `given_up`: because a server did not answer. `reasoning`: the
    name that the server has for it. `retold`: answers that have the text, but not the tokens of what was written."""

    number: int
    turns: list[list[Message]]
    failed: str | None = None
    tools: list[dict] | None = None
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    given_up: bool = False
    reasoning: str = REASONING[0]
    retold: int = 0

    def ask(self) -> bool:
        """Go on to the next turn; False if there is none, or no use in it. After a call comes its result, which nobody
        has."""
        turn = len(self.finish_reasons)
        is_calling = bool(self.messages and self.messages[-1].get("tool_calls"))
        if self.failed is not None or turn == len(self.turns) or is_calling:
            return False
        self.messages += self.turns[turn]
        return True

    def take(self, answer: Message, finish_reason: str) -> None:
        self.messages.append(answer)
        self.finish_reasons.append(finish_reason)

    @property
    def seed(self) -> int:
        """The turn's own; it follows from the row."""
        return self.number + len(self.finish_reasons) * TURN_SEEDS

    @property
    def sent(self) -> list[Message]:
        """The messages for a server, the reasoning under its own name for it."""
        names = {REASONING[0]: self.reasoning}
        return [{names.get(key, key): value for key, value in message.items()} for message in self.messages]

    @property
    def row(self) -> Row:
        """What is written of it: a row of `messages`, with the tools that there were."""
        tools = {"tools": self.tools} if self.tools else {}
        return {"row": self.number, "messages": self.messages, **tools, "finish_reasons": self.finish_reasons}


def dialogue_of(number: int, placed: PlacedRow, data: DataConfig) -> Dialogue:
    """A row as the messages before each of its answers. One of another format is left out where `data.malformed` says
    so; else raises UserError, with its place."""
    try:
        conversation = conversation_of(parse(*placed), data.format, data.columns, data.speakers)
        messages, tools = conversation.messages, conversation.tools
        line_of({"messages": messages, "tools": tools})
    except UserError as error:
        told = behind_place(placed[0], error)
        if data.malformed == "skip":
            return Dialogue(number, [], told)
        raise UserError(f"{told}; {CAN_SKIP}") from error
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif turns[-1]:
            turns.append([])
    turns = [turn for turn in turns if turn]
    failed = None if turns else "it has no message but the assistant's"
    if any(message["role"] == "tool" for message in messages):
        failed = "it has a tool's results, which a new answer may not have asked for"
    return Dialogue(number, turns, failed, tools)
