"""What is asked in a measurement: questions as the target reads them, prompts of a given length, arrival times, and the
room that these take in an engine.

Knows nothing of answers.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle_train.errors import check
from eagle_train.inference import Dispatcher, Drafter, Requests, SamplingParams
from eagle_train.inference.decode.dispatcher import ReplacedPlans
from eagle_train.inference.drafters.drafters import Drafters
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests import admission
from evals.bench.questions import Question


def turn_tokens(requests: Requests, question: Question, turn: int, messages: list[dict], before: int = 0) -> list[int]:
    """The token ids of a turn (from 1), whose chat is `messages`. Raises UserError, naming the question, where they do
    not fit the context.

    `before`: how many tokens earlier answers, not known yet, may take up.
    """
    name, target = f"question {question.id}, turn {turn}", requests.target
    tokens = chat_tokens(requests, question, messages, name)
    answers = f", {before} of them for earlier answers (lower max_tokens)" if before else ""
    check(
        len(tokens) + before < target.max_positions,
        f"{name}: the prompt takes {len(tokens) + before} tokens{answers}; the context of {target.name} holds "
        f"{target.context}, one of them for the answer",
    )
    return tokens


def chat_tokens(requests: Requests, question: Question, messages: list[dict], name: str) -> list[int]:
    """The token ids of a chat, rendered with the question's variables. Raises UserError where nothing reads them."""
    for variable, value in question.variables.items():
        check(
            variable in requests.template.variables(),
            f"{question.key}.thinking={str(value).lower()}: the chat template of {requests.target.name} reads no "
            f"{variable}; leave it out, or set the template's own variable by target.template_kwargs",
        )
    return requests.tokens_of(messages, name, question.variables)


def room_for(rows: int, longest: int, tree: Any, drafter: Drafter | None = None) -> int:
    """`admission.room_for` an engine with this tree and drafter, which are as of `deepest_of`."""
    return admission.room_for(rows, longest, deepest_of(tree, drafter))


def deepest_of(tree: Any, drafter: Drafter | None = None) -> int:
    """How deep an engine's drafts may be. `tree`: as for `Engine`; the drafter may have trees of its own in its place.
    None: one that has not."""
    dispatcher = tree if isinstance(tree, Dispatcher) else Dispatcher(tree)
    if drafter is not None:
        dispatcher = ReplacedPlans(dispatcher, Drafters({"": drafter}, Ranks(), 0).plan)
    return dispatcher.deepest


def prompt_hash(requests: Requests, question: Question, turn: int) -> str:
    """A short hash of the tokens of a turn's prompt (from 1), earlier answers left out: these are a run's own."""
    messages = list(question.history)
    for number, text in enumerate(question.turns[:turn], 1):
        messages += [{"role": "assistant", "content": ""}] if number > 1 else []
        messages.append({"role": "user", "content": text})
    tokens = chat_tokens(requests, question, messages, f"question {question.id}, turn {turn}")
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


def check_fit(requests: Requests, questions: Iterable[Question], max_tokens: int) -> int:
    """Raise UserError for a question whose prompts might not fit the context, before any is answered. Returns a
    bound of the tokens of a prompt and its answer."""
    longest, limit = 0, requests.target.max_positions
    for question in questions:
        messages = list(question.history)
        for turn, text in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": text})
            before = (turn - 1) * max_tokens
            tokens = turn_tokens(requests, question, turn, messages, before)
            # Earlier answers are read as texts, which may be more tokens than were generated.
            longest = max(longest, min(len(tokens) + 2 * before + max_tokens, limit))
            messages.append({"role": "assistant", "content": ""})
    return longest


def fits(requests: Requests, question: Question, max_tokens: int) -> bool:
    """Whether each turn has room in the context for its answer and for twice the earlier ones, see `check_fit`."""
    messages = list(question.history)
    for turn, text in enumerate(question.turns, 1):
        messages.append({"role": "user", "content": text})
        tokens = chat_tokens(requests, question, messages, f"question {question.id}, turn {turn}")
        if len(tokens) + (2 * turn - 1) * max_tokens > requests.target.max_positions:
            return False
        messages.append({"role": "assistant", "content": ""})
    return True


@dataclass(frozen=True)
class TimedRequest:
    """A prompt that arrives so many seconds after the start."""

    question: Question
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0


class PromptSource:
    """Prompts of the first turns of questions, or of random tokens where there are none."""

    def __init__(self, requests: Requests, questions: list[Question], params: SamplingParams):
        self.target, self.params = requests.target, params
        self.texts: list[tuple[Question, list[int]]] = []
        for question in questions:
            messages = [*question.history, {"role": "user", "content": question.turns[0]}]
            self.texts.append((question, turn_tokens(requests, question, 1, messages)))

    def longest(self, lengths: Iterable[int] | None) -> int:
        """The most tokens of a prompt and its answer. `lengths`: of the prompts; None: as they are."""
        most = max((len(tokens) for _, tokens in self.texts), default=0) if lengths is None else max(lengths)
        return most + self.params.max_tokens

    def batches(self, count: int, size: int, length: int | None) -> list[list[TimedRequest]]:
        """`count` batches of `size` prompts of exactly `length` tokens, taken evenly over the questions; None: each as
        long as it is.

        Each has its own seed. Raises UserError for a prompt that leaves too little of the context for an answer.
        """
        made, limit, room = [], self.target.max_positions, self.params.max_tokens
        for number in range(count * size):
            question, prompt = self.prompt(number, count * size, length)
            check(
                len(prompt) + room <= limit,
                f"max_tokens={room}: a prompt has {len(prompt)} tokens, and the context of {self.target.name} "
                f"{self.target.context}",
            )
            made.append(TimedRequest(question, prompt, self.params.with_seed_after(number)))
        return [made[start : start + size] for start in range(0, len(made), size)]

    def prompt(self, number: int, count: int, length: int | None) -> tuple[Question, list[int]]:
        """Prompt `number` of `count`: random tokens, or a question preceded by as many others as fill the length, whose
        beginning is cut off."""
        if not self.texts:
            assert length is not None
            assert self.params.seed is not None  # a command's is a number
            generator = torch.Generator().manual_seed(self.params.seed + number)
            tokens = torch.randint(self.target.identity.vocab_size, (length,), generator=generator).tolist()
            return Question(number, number, None, [], []), tokens
        place = number * len(self.texts) // count if count < len(self.texts) else number % len(self.texts)
        question, tokens = self.texts[place]
        while length is not None and len(tokens) < length:
            place -= 1
            tokens = self.texts[place % len(self.texts)][1] + tokens
        return question, tokens if length is None else tokens[-length:]


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start of a Poisson process of `rate` requests a second."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.empty(count, dtype=torch.float64).exponential_(rate, generator=generator)
    return gaps.cumsum(0).tolist()


def with_arrivals(batches: list[list[TimedRequest]], rate: float, seed: int) -> list[list[TimedRequest]]:
    """The same batches with random arrival times (`arrival_times`), each batch with its own."""
    timed = []
    for number, batch in enumerate(batches):
        at = arrival_times(len(batch), rate, seed + number)
        timed.append([replace(each, arrival=second) for each, second in zip(batch, at, strict=True)])
    return timed
