"""What is asked for a measurement: questions as the target reads them, prompts of a given length, and when they arrive.

Knows nothing of who answers.
"""

from dataclasses import dataclass, replace

import torch

from eagle_train.errors import check
from eagle_train.inference import Engine, SamplingParams
from evals.questions import Question, read_questions


def prompt_of(engine: Engine, question: Question, turn: int, messages: list[dict], before: int = 0) -> list[int]:
    """The token ids that put a turn to the target. Raises UserError, naming the question, where they do not fit.

    `before`: how many tokens earlier answers, not known yet, may take up.
    """
    name, limit = f"question {question.id}, turn {turn}", engine.target.max_positions
    tokens = engine.requests.tokens_of(messages, name)
    answers = f", {before} of them for earlier answers (lower max_tokens)" if before else ""
    check(
        len(tokens) + before < limit,
        f"{name}: the prompt takes {len(tokens) + before} tokens{answers}; the context of {engine.target.name} holds "
        f"{engine.target.context}, one of them for the answer",
    )
    return tokens


@dataclass(frozen=True)
class Asked:
    """A prompt that arrives so many seconds after the start."""

    question: Question
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0


class Prompts:
    """Of the first turns of a file's questions, or of random tokens where `path` is None."""

    def __init__(self, engine: Engine, path: str | None, params: SamplingParams):
        self.target, self.params = engine.target, params
        self.texts: list[tuple[Question, list[int]]] = []
        if path is not None:
            for question in read_questions(path):
                messages = [*question.history, {"role": "user", "content": question.turns[0]}]
                self.texts.append((question, prompt_of(engine, question, 1, messages)))

    def batches(self, count: int, size: int, length: int | None) -> list[list[Asked]]:
        """So many batches of prompts of exactly this length, those of a file taken evenly over it; None: as they are.

        Each has a seed of its own. Raises UserError for one that leaves too little of the context for an answer.
        """
        asked, limit, room = [], self.target.max_positions, self.params.max_tokens
        for number in range(count * size):
            question, prompt = self.prompt(number, count * size, length)
            check(
                len(prompt) + room <= limit,
                f"max_tokens={room}: a prompt has {len(prompt)} tokens, and the context of {self.target.name} "
                f"{self.target.context}",
            )
            asked.append(Asked(question, prompt, replace(self.params, seed=self.params.seed + number)))
        return [asked[start : start + size] for start in range(0, len(asked), size)]

    def prompt(self, number: int, count: int, length: int | None) -> tuple[Question, list[int]]:
        """Prompt `number` of `count`: random tokens, or the end of a question behind those before it in the file."""
        if not self.texts:
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
    """When so many requests come that come at random, `rate` a second on average (a Poisson process)."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.empty(count, dtype=torch.float64).exponential_(rate, generator=generator)
    return gaps.cumsum(0).tolist()


def arriving(batches: list[list[Asked]], rate: float, seed: int) -> list[list[Asked]]:
    """The same batches, whose requests come at random times; each batch has its own."""
    played = []
    for number, batch in enumerate(batches):
        at = arrival_times(len(batch), rate, seed + number)
        played.append([replace(each, arrival=second) for each, second in zip(batch, at, strict=True)])
    return played
