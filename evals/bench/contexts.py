"""Acceptance by context: rounds in buckets of the tokens before them, and questions behind packed documents.

DESIGN section 3.8.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from eagle_train.corpus.conversations import Message
from eagle_train.errors import check
from eagle_train.inference import Requests
from evals.bench.questions import Question
from evals.bench.requests import chat_tokens
from evals.bench.statistics import Answer, question_interval

LEAST = 64  # tokens: shorter contexts are one bucket


def by_context(answers: Iterable[Answer], limit: int) -> list[dict[str, Any]]:
    """TPC and acceptance by context, in buckets whose ends are powers of two, the last one `limit`.

    The context of a round is the tokens before it: the prompt, and what was answered so far. `acceptance_per_depth`:
    as `statistics.acceptance`, of the bucket's rounds. `tpc_interval`: 95 %, over the questions.
    """
    rounds: dict[int, list[tuple[int, int, int]]] = {}
    counts: dict[int, dict[int, list[int]]] = {}
    for answer in answers:
        context = len(answer.prompt) + 1
        stats = answer.output.stats
        for kept, drafted, accepted in zip_longest(answer.output.rounds, stats.drafted, stats.accepted, fillvalue=0):
            end = _end(context, limit)
            rounds.setdefault(end, []).append((kept, drafted, accepted))
            own = counts.setdefault(end, {}).setdefault(answer.question.line, [0, 0])
            own[:] = own[0] + kept, own[1] + 1
            context += kept
    return [
        {
            "from": _start(end),
            "to": end,
            "rounds": len(own),
            "questions": len(counts[end]),
            "tpc": sum(kept for kept, _, _ in own) / len(own),
            "tpc_interval": question_interval(list(counts[end].values())),
            "acceptance_per_depth": _acceptance([pair for _, *pair in own]),
        }
        for end, own in sorted(rounds.items())
    ]


def _acceptance(rounds: Sequence[Sequence[int]]) -> list[float]:
    """The share of the rounds that draft so deep which accept down to depth 1, 2, ...; each round: how deep it drafts,
    and how many drafts are accepted."""
    reached = [[accepted >= depth for drafted, accepted in rounds if drafted >= depth]
               for depth in range(1, max(drafted for drafted, _ in rounds) + 1)]  # fmt: skip
    return [sum(each) / len(each) for each in reached]


def _end(context: int, limit: int) -> int:
    """The last context of the bucket that this one is in."""
    return min(max(LEAST, 1 << (context - 1).bit_length()), limit)


def _start(end: int) -> int:
    return 1 if end <= LEAST else (1 << (end - 1).bit_length()) // 2 + 1


def packed(
    requests: Requests, questions: Sequence[Question], documents: Sequence[Question], lengths: Sequence[int]
) -> list[Question]:
    """Each question at each length: behind as many documents, questions with their answers, as earlier turns of one
    chat, as make its first prompt at most so many tokens. Whole documents, so that it is as long up to one of them.

    Documents are taken in their order from the question's own place on; none is the question itself. Raises UserError
    where they have no answers, or a question alone is longer.
    """
    answered = [each for each in documents if each.reference is not None]
    check(len(answered) > 0, "documents: no row has an answer; give a file with `messages`, or `question` and `answer`")
    sized = [(each, len(chat_tokens(requests, each, _turns_of(each), f"document {each.id}"))) for each in answered]
    found = []
    for length in lengths:
        for place, question in enumerate(questions):
            start = (place + 1) % len(sized)
            before = _before(requests, question, [*sized[start:], *sized[:start]], length)
            found.append(replace(question, id=f"{question.id} at {length}", history=before + question.history))
    return found


def _turns_of(document: Question) -> list[Message]:
    """A document as turns of a chat."""
    answer = {"role": "assistant", "content": document.reference}
    return [*document.history, {"role": "user", "content": document.turns[0]}, answer]


def _before(
    requests: Requests, question: Question, documents: Iterable[tuple[Question, int]], length: int
) -> list[Message]:
    """The turns of the documents, given with their tokens, that fit before a question, the first one next to it."""
    own = [*question.history, {"role": "user", "content": question.turns[0]}]
    name, chosen = f"question {question.id}", list[list[Message]]()
    used = len(chat_tokens(requests, question, own, name))
    check(used <= length, f"context_lengths={length}: {name} alone has {used} tokens; give longer ones")
    for document, tokens in documents:
        if used + tokens <= length and document.turns[0] not in question.turns:
            chosen.insert(0, _turns_of(document))
            used += tokens
    while len(chat_tokens(requests, question, [*chain.from_iterable(chosen), *own], name)) > length:
        chosen.pop(0)  # templates may write more around a turn than around a chat of one
    return list(chain.from_iterable(chosen))
