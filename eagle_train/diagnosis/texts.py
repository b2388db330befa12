"""The prompts of an examination, answers to them, and what the target computed on both.

Answers are the target's own, as the engine wrote them, or the file's. Knows nothing of drafts but which of the target's
layers are asked for. DESIGN section 3.1.

Shapes: T tokens of a part, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from eagle_train.corpus.conversations import Message, conversation_of
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.rows import CAN_SKIP, PlacedRow, behind_place, parse
from eagle_train.corpus.source import DataConfig, open_source
from eagle_train.drafts import TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.errors import UserError, check
from eagle_train.inference import Requests
from eagle_train.models.target import Target

_PART_TOKENS = 8192  # of texts whose states exist at once


@dataclass(frozen=True)
class Question:
    """What is asked: the row's place, FILE:LINE, its messages up to the first answer, and its prompt's tokens.
    `given`: the tokens of the file's own answer, None where it has none, or none that can be rendered behind the
    prompt: `refused` says why, None for a row without one."""

    place: str
    messages: list[Message]
    prompt: list[int]
    given: list[int] | None
    refused: str | None = None


@dataclass(frozen=True)
class Text:
    """A prompt and an answer to it, token ids. `number`: of its question, from 0."""

    number: int
    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


@dataclass(frozen=True, eq=False)
class Part:
    """Texts in one packed row, and what the target computed on them.

    Its `states` are on the host, in the target's dtype, and the rest is on the target's device. `positions`, `lengths`
    and `embed`: see `Rows`. `best` int64 [1, T]: the target's most likely next token at each slot, and `sure` fp32
    [1, T], its probability; `counted` bool [1, T]: slots whose next token the answer has; `owner` int64 [1, T]: the
    question's number.
    """

    texts: Sequence[Text]
    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: list[list[int]]
    states: TargetStates
    embed: Callable[[torch.Tensor], torch.Tensor]
    best: torch.Tensor
    sure: torch.Tensor
    counted: torch.Tensor
    owner: torch.Tensor

    def rows(self) -> Rows:
        """What a draft is unrolled on, in fp32 on the device, made anew for each use: texts may be long and many, and
        no more than one part's states need be there."""

        def exact(states: torch.Tensor) -> torch.Tensor:
            return states.to(self.tokens.device).float()

        layers = {layer: exact(each) for layer, each in self.states.layers.items()}
        states = TargetStates(exact(self.states.hidden), layers)
        return Rows(self.embed(self.tokens), states, self.positions, self.lengths, self.embed)

    @property
    def starts(self) -> list[int]:
        """Where each text begins in the row."""
        starts = [0]
        for text in self.texts:
            starts.append(starts[-1] + len(text.tokens))
        return starts[:-1]


def read_questions(data: DataConfig, limit: int, requests: Requests, longest: int) -> list[Question]:
    """The first `limit` rows of the data that can be asked with `longest` tokens for an answer.

    Raises UserError where no row can be asked, and for a malformed row unless data.malformed is skip.
    """
    target = requests.target
    requests.template.date = data.date  # of prompts as of the answers behind them
    renderer = ChatRenderer(
        target.tokenizer, "assistant", requests.stop_ids, requests.template.kwargs, data.date, len(target.embedding)
    )
    found: list[Question] = []
    skipped: list[str] = []
    for placed in islice(open_source(data).rows(), 8 * limit):
        try:
            question = _question_of(placed, data, requests, renderer)
        except UserError as error:
            reason = behind_place(placed[0], error)
            check(data.malformed == "skip", f"{reason}; {CAN_SKIP}")
            skipped.append(reason)
            continue
        if question is not None and len(question.prompt) + longest < target.max_positions:
            found.append(question)
        if len(found) == limit:
            break
    most = target.max_positions - longest
    left_out = f"; {len(skipped)} rows were left out, the first: {skipped[0]}" if skipped else ""
    few = f"data.path={data.path}: fewer than two rows hold a prompt of less than {most} tokens"
    check(len(found) >= 2, few + left_out)
    return found


def _question_of(placed: PlacedRow, data: DataConfig, requests: Requests, renderer: ChatRenderer) -> Question | None:
    """A row up to its first answer; None for one without a user's turn, or with tools or variables of its own. Raises
    UserError for a malformed row, and for one that the chat template refuses."""
    place = placed[0]
    conversation = conversation_of(parse(*placed), data.format, data.columns, data.speakers)
    roles = [message["role"] for message in conversation.messages]
    if "user" not in roles or conversation.tools or conversation.variables:
        return None
    asked = roles.index("user")
    end = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    messages = conversation.messages[:end]
    prompt = requests.tokens_of(messages, place)
    answered = end < len(roles) and not conversation.messages[end].get("tool_calls")
    given, refused = _answer_in(renderer, conversation.messages[: end + 1], prompt) if answered else (None, None)
    return Question(place, messages, prompt, given, None if refused is None else f"{place}: {refused}")


def _answer_in(
    renderer: ChatRenderer, messages: list[Message], prompt: list[int]
) -> tuple[list[int] | None, str | None]:
    """The tokens behind the prompt, as training renders the conversation; or why there are none: it begins with another
    prompt, or cannot be rendered."""
    try:
        tokens = renderer(messages)[-1].tokens.tolist()
    except UserError as error:
        return None, str(error)
    behind = tokens[len(prompt) :]
    if tokens[: len(prompt)] != prompt:
        return None, "training renders the answer behind another prompt than this one"
    return (behind, None) if len(behind) > 1 else (None, "the answer is shorter than two tokens")


def read_by_target(target: Target, texts: Sequence[Text], layers: tuple[int, ...]) -> list[Part]:
    """What the target computes on the texts, with the outputs of these of its layers, in parts of bounded size."""
    parts: list[list[Text]] = []
    for text in texts:
        if not parts or sum(len(each.tokens) for each in parts[-1]) + len(text.tokens) > _PART_TOKENS:
            parts.append([])
        parts[-1].append(text)
    return [_part(target, each, layers) for each in parts]


@torch.no_grad()
def _part(target: Target, texts: Sequence[Text], layers: tuple[int, ...]) -> Part:
    lengths = [len(text.tokens) for text in texts]
    tokens = torch.tensor([[token for text in texts for token in text.tokens]], device=target.device)
    positions = torch.tensor([[place for length in lengths for place in range(length)]], device=target.device)
    owner = torch.tensor([[text.number for text in texts for _ in text.tokens]], device=target.device)
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    start = 0
    for text in texts:
        # The slot before the first token of the answer is counted; its last token has none behind it.
        counted[0, start + len(text.prompt) - 1 : start + len(text.tokens) - 1] = True
        start += len(text.tokens)
    counted &= positions >= 1
    states = TargetStates.split(target.own_states(tokens, positions, [lengths], layers), layers)
    likely = [target.lm_head(piece).float().softmax(-1).max(-1) for piece in states.hidden[0].split(1024)]
    sure, best = (torch.cat(each)[None] for each in zip(*likely, strict=True))
    kept = TargetStates(states.hidden.cpu(), {layer: each.cpu() for layer, each in states.layers.items()})

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        return target.embed(tokens).float()

    return Part(texts, tokens, positions, [lengths], kept, embed, best, sure, counted, owner)
