"""Acceptance by context: rounds in buckets of the tokens before them, and questions behind packed documents.

DESIGN section 3.8.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

Round = tuple[int, int, int, int, int]
"""A round of decoding: its question's line, the tokens before it, how many it commits, how deep it drafts, and how many
drafts are accepted."""

Bucket = dict[str, Any]
"""What a run has in a bucket, as JSON: its end `to`; `questions`, [line, tokens, calls] of each; and `drafts`: [how
deep a round drafts, how many drafts are accepted, rounds]."""


def by_context(answers: Iterable[Answer], limit: int) -> list[dict[str, Any]]:
    """TPC and acceptance by context, see `rows_of`, in buckets whose ends are powers of two, the last one `limit`.

    The context of a round is the tokens before it: the prompt, and what was answered so far.
    """
    return rows_of([counted(rounds_of(answers), limit)])


def rounds_of(answers: Iterable[Answer]) -> Iterator[Round]:
    """The rounds that an engine decoded."""
    for answer in answers:
        context, stats = len(answer.prompt) + 1, answer.output.stats
        for kept, drafted, accepted in zip_longest(answer.output.rounds, stats.drafted, stats.accepted, fillvalue=0):
            yield answer.question.line, context, kept, drafted, accepted
            context += kept


def counted(rounds: Iterable[Round], limit: int) -> list[Bucket]:
    """A run's buckets, in order. `limit`: as of `by_context`."""
    counts: dict[int, dict[int, list[int]]] = {}
    drafts: dict[int, Counter[tuple[int, int]]] = {}
    for line, context, kept, drafted, accepted in rounds:
        end = _end(context, limit)
        own = counts.setdefault(end, {}).setdefault(line, [0, 0])
        own[:] = own[0] + kept, own[1] + 1
        drafts.setdefault(end, Counter())[drafted, accepted] += 1
    return [
        {
            "to": end,
            "questions": [[line, *each] for line, each in own.items()],
            "drafts": [[*pair, rounds] for pair, rounds in sorted(drafts[end].items())],
        }
        for end, own in sorted(counts.items())
    ]


def rows_of(runs: Iterable[Sequence[Bucket]]) -> list[dict[str, Any]]:
    """TPC and acceptance in each bucket, of all runs together.

    `acceptance_per_depth`: as `statistics.acceptance`, of the bucket's rounds. `tpc_interval`: 95 %, over the
    questions; what another run would change is not in it.
    """
    counts: dict[int, dict[int, list[int]]] = {}
    buckets: dict[int, list[Bucket]] = {}
    for bucket in chain.from_iterable(runs):
        buckets.setdefault(bucket["to"], []).append(bucket)
        for line, tokens, calls in bucket["questions"]:
            own = counts.setdefault(bucket["to"], {}).setdefault(line, [0, 0])
            own[:] = own[0] + tokens, own[1] + calls
    found = []
    for end, asked in sorted(counts.items()):
        tokens, calls = map(sum, zip(*asked.values(), strict=True))
        found.append(
            {
                "from": _start(end),
                "to": end,
                "rounds": calls,
                "questions": len(asked),
                "tpc": tokens / calls,
                "tpc_interval": question_interval(list(asked.values())),
                "acceptance_per_depth": acceptance([buckets[end]]),
            }
        )
    return found


def acceptance(runs: Iterable[Sequence[Bucket]]) -> list[float]:
    """As `statistics.acceptance`, of all rounds of these runs."""
    drafts = [each for bucket in chain.from_iterable(runs) for each in bucket["drafts"]]
    shares = []
    for depth in range(1, max((drafted for drafted, *_ in drafts), default=0) + 1):
        reached = [(accepted, rounds) for drafted, accepted, rounds in drafts if drafted >= depth]
        hits = sum(rounds for accepted, rounds in reached if accepted >= depth)
        shares.append(hits / sum(rounds for _, rounds in reached))
    return shares


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
