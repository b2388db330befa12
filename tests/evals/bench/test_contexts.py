"""Acceptance by context: which bucket a round is in, and questions behind documents."""

import json
from dataclasses import replace

import pytest

from eagle_train.errors import UserError
from eagle_train.inference import Requests
from eagle_train.models.loading import TargetConfig, load_target
from evals.bench import statistics
from evals.bench.contexts import acceptance, by_context, counted, packed, rounds_of, rows_of
from evals.bench.questions import Question
from evals.bench.report import contexts, contexts_beside
from evals.bench.requests import chat_tokens
from tests.support.eval_inputs import make_home
from tests.support.measuring import answer


def decoded(prompt: int, rounds: list[int], line: int = 1, **stats: list[int]):
    """An answer to a prompt of so many tokens."""
    made = answer(line=line, **stats)
    return replace(made, prompt=[7] * prompt, output=replace(made.output, rounds=rounds))


@pytest.mark.usefixtures("few")
def test_a_round_is_in_the_bucket_of_the_tokens_before_it():
    """The prompt's and the first token, which no round commits: 63 + 1 is the last context of the first bucket."""
    found = by_context([decoded(63, [1, 3, 62, 2]), decoded(127, [4], line=2)], limit=300)
    assert [(row["from"], row["to"], row["rounds"], row["questions"]) for row in found] == [
        (1, 64, 1, 1),
        (65, 128, 3, 2),
        (129, 256, 1, 1),
    ]
    assert [row["tpc"] for row in found] == [1, (3 + 62 + 4) / 3, 2]
    low, high = found[1]["tpc_interval"]
    assert low <= found[1]["tpc"] <= high
    assert found[0]["tpc_interval"] is None


def test_acceptance_is_of_the_rounds_that_draft_so_deep():
    """As elsewhere: a round without a draft counts for TPC alone, drafts behind an answer's end count as accepted."""
    answers = [decoded(63, [1, 3, 62, 2], drafted=[0, 2, 1, 2], accepted=[0, 2, 0, 2])]
    assert [row["acceptance_per_depth"] for row in by_context(answers, limit=300)] == [[], [1 / 2, 1], [1, 1]]
    stats = {"accepted_per_depth": [2, 2], "drafted_per_depth": [3, 2]}
    assert statistics.acceptance([decoded(63, [], **stats)]) == [2 / 3, 1]
    (one,) = by_context([decoded(63, [1, 1], drafted=[1, 1], accepted=[1, 0])], limit=64)
    assert contexts([one]) == "All 2 rounds have contexts of 1 to 64 tokens."
    many = [one | {"rounds": 12345, "questions": 1000}, one | {"acceptance_per_depth": []}]
    assert "| 1,000 | 12,345 | 1.00 | 0.50 |" in contexts(many)
    assert "| nothing drafted |" in contexts(many)


@pytest.mark.usefixtures("few")
def test_runs_are_summed_before_they_are_divided():
    """As they are read from files: another seed's rounds count as many, and no seed stands for all."""
    first = [decoded(63, [1, 3], drafted=[2, 2], accepted=[0, 2]), decoded(80, [2], line=2, drafted=[1], accepted=[1])]
    second = [decoded(63, [1] * 4, drafted=[2] * 4, accepted=[0] * 4)]
    runs = [json.loads(json.dumps(counted(rounds_of(answers), 300))) for answers in (first, second)]
    found = rows_of(runs)
    assert [(row["from"], row["to"], row["rounds"], row["questions"], row["tpc"]) for row in found] == [
        (1, 64, 2, 1, 1.0),
        (65, 128, 5, 2, 8 / 5),
    ]
    assert [row["acceptance_per_depth"] for row in found] == [[0, 0], [2 / 5, 1 / 4]]
    assert acceptance(runs) == [2 / 7, 1 / 6]
    assert rows_of(runs[:1]) == by_context(first, 300)
    low, high = found[1]["tpc_interval"]
    assert 1 <= low < 8 / 5 < high <= 2.5


def test_decodings_stand_beside_one_another_by_context():
    drafted = decoded(63, [1, 3], drafted=[2, 2], accepted=[0, 2])
    told = contexts_beside({"a": by_context([drafted], 300), "b": by_context([decoded(70, [1])], 300)})
    assert "| by context, tokens | 1 to 64 | 65 to 128 |" in told
    assert "| a | 0.0 %; TPC 1.00 | 100.0 %; TPC 3.00 |\n| b |  | no draft; TPC 1.00 |" in told
    one = by_context([decoded(70, [1])], 300)
    assert contexts_beside({"a": one, "b": one}) == "All rounds have contexts of 65 to 128 tokens."


def test_the_last_bucket_ends_with_the_context():
    (row,) = by_context([decoded(280, [1, 1])], limit=300)
    assert (row["from"], row["to"], row["acceptance_per_depth"]) == (257, 300, [])


DOCUMENTS = [Question(i, i, None, [], [f"ask {i}"], "x" * (5 * i)) for i in range(1, 8)]
QUESTION = Question(1, 5, "a", [], ["Why?", "How?"])


@pytest.fixture(scope="module")
def requests(tmp_path_factory) -> Requests:
    home = make_home(tmp_path_factory.mktemp("contexts"))
    return Requests(load_target(TargetConfig(str(home / "target")), "cpu"))


def first_prompt(requests: Requests, question: Question) -> list[int]:
    asked = [*question.history, {"role": "user", "content": question.turns[0]}]
    return chat_tokens(requests, question, asked, "it")


def test_documents_stand_as_earlier_turns_before_a_question(requests):
    """As many as fit, each whole, with its answer; the question and its turns are as before."""
    found = packed(requests, [QUESTION], DOCUMENTS, [10, 60, 150])
    assert [(each.id, each.turns, each.line) for each in found] == [
        (f"5 at {n}", ["Why?", "How?"], 1) for n in (10, 60, 150)
    ]
    sizes = [len(first_prompt(requests, each)) for each in found]
    assert all(size <= length for size, length in zip(sizes, (10, 60, 150), strict=True))
    assert sizes[0] < sizes[1] < sizes[2]
    assert 150 - sizes[2] < 50  # no more than a document is left
    assert [message["role"] for message in found[2].history] == ["user", "assistant"] * (len(found[2].history) // 2)
    texts = {each.turns[0]: each.reference for each in DOCUMENTS}
    for asked, told in zip(found[2].history[::2], found[2].history[1::2], strict=True):
        assert texts[asked["content"]] == told["content"]


def test_a_question_is_no_document_of_itself(requests):
    """Nor is another document left out: each question begins at its own place."""
    own = replace(DOCUMENTS[1], line=9)
    (found,) = packed(requests, [own], DOCUMENTS, [250])
    assert "ask 2" not in {message["content"] for message in found.history}
    first, second = packed(requests, [QUESTION, replace(QUESTION, line=2)], DOCUMENTS, [60])
    assert first.history != second.history


def test_what_cannot_be_packed_is_refused(requests):
    with pytest.raises(UserError, match="documents: no row has an answer"):
        packed(requests, [QUESTION], [replace(each, reference=None) for each in DOCUMENTS], [100])
    with pytest.raises(UserError, match="context_lengths=5: question 5 alone has 10 tokens; give longer ones"):
        packed(requests, [QUESTION], DOCUMENTS, [5])
