"""How requests are answered in a measurement: question by question with all turns, or as they arrive; and variants that
answer the same batches in turn, so that other load on the machine affects all alike. DESIGN section 3.8.

Knows nothing of statistics.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from eagle_train.drafts import Draft
from eagle_train.inference import Drafter, Eagle, Engine, Output, Requests, SamplingParams, Update
from eagle_train.inference import Sequence as Request
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.progress import progress
from evals.bench.questions import Question
from evals.bench.requests import TimedRequest, turn_tokens
from evals.bench.statistics import Answer, AnswerBatch

WARM_UP_TOKENS = 16
TURN_SEEDS = 1 << 20  # far enough apart that no two requests of a run share a seed

Answering = Callable[[Sequence[TimedRequest]], list[Output]]
"""Answers a batch: one output per request."""

T = TypeVar("T")


def answer_questions(
    engine: Engine, requests: Requests, questions: Sequence[Question], params: SamplingParams
) -> list[AnswerBatch]:
    """All turns: the questions' first turns together, then their second ones with the engine's own first answers."""
    histories = [list(question.history) for question in questions]
    answered = []
    for turn in range(1, max(len(question.turns) for question in questions) + 1):
        asked = [pair for pair in zip(questions, histories, strict=True) if len(pair[0].turns) >= turn]
        for question, messages in asked:
            messages.append({"role": "user", "content": question.turns[turn - 1]})
        prompts = [turn_tokens(requests, question, turn, messages) for question, messages in asked]
        outputs = engine.generate(prompts, [seeded(params, question, turn) for question, _ in asked])
        for (_, messages), output in zip(asked, outputs, strict=True):
            messages.append({"role": "assistant", "content": output.text})
        rows = zip(asked, prompts, outputs, strict=True)
        answered.append([Answer(question, turn, prompt, output) for (question, _), prompt, output in rows])
    return answered


def seeded(params: SamplingParams, question: Question, turn: int) -> SamplingParams:
    """The parameters of one turn of one question: no other turn has its seed."""
    return params.with_seed_after(question.line + turn * TURN_SEEDS)


@dataclass
class Run:
    """An engine, its drafter, and its answers so far by batch: the answers of a batch were decoded together."""

    engine: Engine
    requests: Requests
    drafter: Drafter | None = None
    batches: list[AnswerBatch] = field(default_factory=list)

    def ask(self, questions: Sequence[Question], params: SamplingParams) -> None:
        """Answer all turns of a batch of questions, and keep the answers."""
        self.batches += answer_questions(self.engine, self.requests, questions, params)

    @property
    def draft(self) -> Draft:
        """The draft of an EAGLE drafter; no other run has one."""
        assert isinstance(self.drafter, Eagle)
        return self.drafter.draft

    @property
    def answers(self) -> list[Answer]:
        """All answers so far."""
        return list(chain.from_iterable(self.batches))


def batches_of(questions: Sequence[T], size: int) -> list[Sequence[T]]:
    """The questions in batches; the last may be smaller."""
    return [questions[start : start + size] for start in range(0, len(questions), size)]


def run_in_turn(runs: Sequence[Run], questions: Sequence[Question], params: SamplingParams, batch_size: int) -> None:
    """All runs answer all questions in turn, after a warm-up; another one begins with every batch."""
    batches = batches_of(questions, batch_size)
    warm_up = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
    for run in runs:
        answer_questions(run.engine, run.requests, batches[0], warm_up)
        run.engine.stage_times.clear()
    bar = progress(len(batches), "batch")
    for number, batch in enumerate(batches):
        for run in rotated(runs, number):
            run.ask(batch, params)
        bar.update(number + 1)
    bar.close()


def take_turns(
    variants: Mapping[str, Answering],
    batches: Sequence[Sequence[TimedRequest]],
    warm_up: int = 1,
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[str, list[AnswerBatch]]:
    """The answers of all variants to all batches, after the first `warm_up` batches as a warm-up; another variant
    begins with every batch.

    `on_batch`: called with the number of answered batches, after each.
    """
    for answer in variants.values():
        for batch in batches[:warm_up]:
            answer(batch)
    answered: dict[str, list[AnswerBatch]] = {name: [] for name in variants}
    for number, batch in enumerate(batches):
        for name in rotated(list(variants), number):
            pairs = zip(batch, variants[name](batch), strict=True)
            answered[name].append([Answer(each.question, 1, each.prompt, output) for each, output in pairs])
        on_batch(number + 1)
    return answered


def warm_up(variants: Mapping[str, Answering], batch: Sequence[TimedRequest]) -> None:
    """All variants answer a batch of other prompts than these."""
    for answer in variants.values():
        answer(backwards(batch))


def backwards(batch: Sequence[TimedRequest]) -> list[TimedRequest]:
    """Other prompts of the same lengths, for a warm-up: these, from their last token to their first. A drafter may
    remember answers, and would draft those to the prompts themselves better than in service."""
    return [replace(each, prompt=each.prompt[::-1]) for each in batch]


def rotated(variants: Sequence[T], number: int) -> list[T]:
    """The variants in the order in which they answer batch `number`."""
    first = number % len(variants)
    return [*variants[first:], *variants[:first]]


def arrived(engine: Engine, requests: Sequence[TimedRequest], now: float) -> int:
    """How many of the requests, in order of arrival, had come `now` seconds after the start: on every rank as many as
    the last of their clocks says, because all ranks' engines must be given the same."""
    if not requests:
        return 0
    count = sum(each.arrival <= now for each in requests)
    return Ranks(engine.target.together, engine.target.device).least(count)


def serve(
    engine: Engine, requests: Sequence[TimedRequest], on_step: Callable[[list[Update]], None] = lambda updates: None
) -> list[Output]:
    """The outputs of requests that are given to the engine when they arrive; `requests` is in order of arrival.

    The time to a first token counts from the arrival. `on_step`: called with what each step reports.
    """
    added: list[Request] = []
    started = time.perf_counter()
    while len(added) < len(requests) or engine.has_unfinished:
        now = time.perf_counter() - started
        waiting = requests[len(added) :]
        for each in waiting[: arrived(engine, waiting, now)]:
            added.append(engine.add(each.prompt, each.params))
            added[-1].arrival = started + each.arrival
        if engine.has_unfinished:
            on_step(engine.step())
        else:
            time.sleep(max(0.0, requests[len(added)].arrival - now))
    return [engine.output(each) for each in added]
