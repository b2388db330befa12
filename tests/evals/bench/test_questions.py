"""Question files: the shapes of their rows, limits, and rows that are refused."""

import json

import pytest

from eagle_train.corpus.source import tell_bundled
from eagle_train.errors import UserError
from evals.bench.questions import Question, read_questions
from tests.support.eval_inputs import write_rows


def test_the_shapes_of_rows(tmp_path):
    system, user, model = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
    rows = [
        {"question_id": 5, "category": "maths", "turns": ["a", "b"], "reference": ["x", "y"]},
        {"id": "os:walk", "messages": [system, user, model, {"role": "user", "content": "c"}, model]},
        "",
        {"prompt": "d", "category": 7},
        {"prompt": "e", "category": None},
        {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
        {"question": "1 + 1?", "answer": "#### 2"},
    ]
    assert read_questions(str(write_rows(tmp_path / "q.jsonl", rows))) == [
        Question(1, 5, "maths", [], ["a", "b"], None),
        Question(2, "os:walk", None, [system, user, model], ["c"], "a"),
        Question(4, 4, "7", [], ["d"], None),
        Question(5, 5, None, [], ["e"], None),
        Question(6, "HumanEval/0", None, [], ["def f():"], None),
        Question(7, 7, None, [], ["1 + 1?"], "#### 2"),
    ]


def test_lines_of_a_text(tmp_path):
    (tmp_path / "q.txt").write_text("a b\n\n  \nc\n")
    assert read_questions(str(tmp_path / "q.txt")) == [
        Question(1, 1, None, [], ["a b"], None),
        Question(4, 4, None, [], ["c"], None),
    ]
    (tmp_path / "q.txt").write_bytes("\ufeffone\u2028line\x85\r\ntwo".encode())
    assert [(each.line, each.turns) for each in read_questions(str(tmp_path / "q.txt"))] == [
        (1, ["one\u2028line\x85"]),
        (2, ["two"]),
    ]
    (tmp_path / "q.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"questions=\S+q\.txt: 'utf-8' codec"):
        read_questions(str(tmp_path / "q.txt"))


def test_a_limit_takes_questions_evenly_over_the_file(tmp_path):
    path = str(write_rows(tmp_path / "q.jsonl", [{"prompt": str(i)} for i in range(10)]))
    rows = [{"turns": [str(i)]} for i in range(10)]
    (tmp_path / "q.json").write_text(json.dumps(rows, indent=2))
    assert read_questions(str(tmp_path / "q.json")) == read_questions(path)
    assert [question.turns for question in read_questions(path, 4)] == [["0"], ["2"], ["5"], ["7"]]
    assert len(read_questions(path, 99)) == 10


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"questions=\S+: the file is empty"),
        (['{"prompt": "a"}', '{"prompt": '], r"q\.jsonl:2: not JSON"),
        ([{"prompt": "a"}, ["b"]], r"q\.jsonl:2: a row must be a JSON object"),
        ([{"text": "a"}], r"q\.jsonl:1: the row has no turns, messages, prompt or question; it has text"),
        ([{"question": ""}], r"q\.jsonl:1: question: a turn must be a text, not ''"),
        ([{"turns": []}], r"q\.jsonl:1: turns: the row has no turns"),
        ([{"turns": ["a", " "]}], r"q\.jsonl:1: turns: a turn must be a text, not ' '"),
        ([{"turns": "a"}], r"q\.jsonl:1: turns: the row has no turns"),
        ([{"prompt": 3}], r"q\.jsonl:1: prompt: a turn must be a text, not 3"),
        ([{"messages": []}], r"q\.jsonl:1: the row has no turns"),
        ([{"messages": [{"role": "system", "content": "a"}]}], r"q\.jsonl:1: the row has no turns of a user"),
        ([{"prompt": "a", "category": ["b"]}], r"q\.jsonl:1: category=\['b'\]: must be a text or a number"),
        ([{"prompt": "a", "question_id": float("nan")}], r"q\.jsonl:1: question_id=nan: must be a text or a number"),
        ([{"prompt": "a", "question_id": [1]}], r"q\.jsonl:1: question_id=\[1\]: must be a text or a number"),
        ([{"prompt": "a", "category": float("inf")}], r"q\.jsonl:1: category=inf: must be a text or a number"),
        ([{"prompt": "a", "category": "\ud800"}], r"q\.jsonl:1: category='.*ud800': must be a text or a number"),
        ([{"prompt": "a", "category": True}], r"q\.jsonl:1: category=True: must be a text or a number"),
        ([{"messages": [{"role": "user"}]}], r"q\.jsonl:1: the content of a turn of user must be text"),
    ],
)
def test_rows_without_a_question_are_refused(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        read_questions(str(write_rows(tmp_path / "q.jsonl", rows)))


def test_questions_for_the_bundled_target_are_told_of(caplog):
    """They may be asked of any other, but not by oversight; a missing file says what makes it, and what to give."""
    caplog.set_level("INFO", "evals")
    path = "outputs/stdlib_chat/nothing.jsonl"
    tell_bundled(path, "/anywhere/data/tiny_target")
    tell_bundled("mine.jsonl", "me/target")
    assert caplog.messages == []
    tell_bundled(path, "me/target", key="tasks")
    said = f"note: tasks={path}: questions for the bundled target; give tasks=FILE with your own"
    assert caplog.messages == [said]
    makes = "python data/stdlib_chat.py outputs/stdlib_chat makes it, in a clone of the repository"
    with pytest.raises(UserError, match=f"questions={path}: no such file; {makes}; or give questions=FILE"):
        read_questions(path)
