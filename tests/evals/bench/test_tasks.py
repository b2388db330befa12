"""The tasks of a comparison: formats by their rows, licences, names."""

import re

import pytest

from eagle_train.errors import UserError
from eagle_train.settings import CONF_DIR
from eagle_train.usage import usage
from evals.bench.suites import suite_names
from evals.bench.tasks import MT_BENCH, NOT_STATED, SPEC_BENCH, read_tasks
from tests.support.eval_inputs import write_rows


def bench_rows(*categories: str) -> list[dict]:
    return [{"question_id": i, "category": each, "turns": ["a"]} for i, each in enumerate(categories)]


HUMAN_EVAL = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": "", "canonical_solution": ""}


@pytest.mark.parametrize(
    ("rows", "form", "licence"),
    [
        (bench_rows(*MT_BENCH, *SPEC_BENCH), "Spec-Bench", "Apache-2.0"),
        (bench_rows("rag"), "Spec-Bench", "Apache-2.0"),
        (bench_rows(*MT_BENCH), "MT-Bench", "CC BY 4.0 (questions); Apache-2.0, as published in FastChat"),
        (bench_rows("writing", "mine"), "rows of turns", NOT_STATED),
        ([HUMAN_EVAL], "HumanEval", "MIT"),
        ([{"question": "1 + 1?", "answer": "2"}], "GSM8K", "MIT"),
        ([{"question": "1 + 1?"}], "rows of question", NOT_STATED),
        ([{"prompt": "a"}], "rows of prompt", NOT_STATED),
        ([{"prompt": "a", "license": "CC0"}], "rows of prompt", "CC0"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "rows of messages", NOT_STATED),
    ],
)
def test_formats_are_found_from_rows(tmp_path, rows, form, licence):
    (task,) = read_tasks([str(write_rows(tmp_path / "some.jsonl", rows))])
    assert (task.name, task.format, task.licence, len(task.questions)) == ("some", form, licence, len(rows))


def test_a_text_is_a_prompt_a_line(tmp_path):
    (tmp_path / "mine.txt").write_text("a\nb\n")
    (task,) = read_tasks([str(tmp_path / "mine.txt")])
    assert (task.format, task.licence) == ("a prompt a line", NOT_STATED)
    assert [question.turns for question in task.questions] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: cc-by-4.0\n---\n", "cc-by-4.0"),
        ("# Mine\n\n**Licence:** BSD 3-Clause.\n", "BSD 3-Clause"),
        ("# License\n\nSee elsewhere: there.\n", "MIT"),
    ],
)
def test_a_readme_beside_the_file_says_the_licence(tmp_path, text, licence):
    (tmp_path / "README.md").write_text(text)
    (task,) = read_tasks([str(write_rows(tmp_path / "q.jsonl", [HUMAN_EVAL]))])
    assert task.licence == licence


def test_spec_benchs_thirteen_categories_are_six_groups(tmp_path):
    categories = (*MT_BENCH, *SPEC_BENCH)
    (task,) = read_tasks([str(write_rows(tmp_path / "q.jsonl", bench_rows(*categories)))])
    groups = [task.group(question) for question in task.questions]
    assert len(set(categories)) == 13
    assert groups == ["mt_bench"] * 8 + list(SPEC_BENCH)
    (own,) = read_tasks([str(write_rows(tmp_path / "own.jsonl", bench_rows("writing", "mine")))])
    assert [own.group(question) for question in own.questions] == ["writing", "mine"]


def test_names(tmp_path):
    paths = [tmp_path / folder / "q.jsonl" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        write_rows(path, [{"prompt": "a"}])
    first, second = map(str, paths)
    assert [task.name for task in read_tasks([first])] == ["q"]
    assert [task.name for task in read_tasks([first, second])] == [first, second]
    assert [task.name for task in read_tasks({"one": first, "two": second})] == ["one", "two"]
    assert [task.name for task in read_tasks(first)] == ["q"]
    with pytest.raises(UserError, match=r"^tasks: .*q\.jsonl is there twice; give a mapping, "):
        read_tasks([first, first])


def test_suites_in_a_list_are_named_too(tmp_path):
    path = write_rows(tmp_path / "q.jsonl", [{"prompt": "a"}])
    own, sums = {"suite": "own", "path": str(path)}, tmp_path / "gsm8k.jsonl"
    write_rows(sums, [{"question": "1 + 1?", "answer": "2"}])
    both = read_tasks([{**own, "thinking": True}, {**own, "thinking": False}])
    assert [(task.name, task.suite["thinking"]) for task in both] == [("q_1", True), ("q_2", False)]
    named = read_tasks([own, {"suite": "gsm8k", "path": str(sums)}, {"path": str(sums)}])
    assert [task.name for task in named] == ["q", "gsm8k_1", "gsm8k_2"]
    assert [task.questions[0].key for task in named] == ["tasks.q", "tasks.gsm8k_1", "tasks.gsm8k_2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"tasks=\[\]: must be a file or a suite, a list of these, or a mapping"),
        (None, r"tasks=None: must be a file or a suite, a list"),
        ([3], r"tasks=\[3\]: must be a file or a suite, a list"),
        ({"a": None}, r"tasks=\{'a': None\}: must be a file or a suite, a list"),
        ({"a": {"suite": "b"}}, r"tasks\.a='b': must be one of gsm8k, "),
        ({"a": {"suite": "gsm8k", "paths": "b"}}, r"tasks\.a\.paths: no such key; did you mean path\?"),
        ({}, r"tasks=\{\}: must be a file or a suite, a list"),
        (["nowhere.jsonl"], r"^tasks=nowhere\.jsonl: no such file"),
        ("nowhere.txt", r"^tasks=nowhere\.txt: no such file"),
        ({"a": "nowhere.jsonl"}, r"^tasks\.a=nowhere\.jsonl: no such file"),
        ([{"path": "nowhere.jsonl"}], r"^tasks\.nowhere\.path=nowhere\.jsonl: no such file; give own's"),
        ({"a": {"suite": "own", "template": "Hi"}}, r"^tasks\.a\.template='Hi': must hold \{prompt\}"),
        (
            {"suite": "spec_bench", "path": "q.jsonl"},
            r"^tasks=\{.*\}: is a suite without a name; give tasks=\{NAME: \{suite: \.\.\.\}\}",
        ),
        ({"path": "q.jsonl", "thinking": True}, r"^tasks=\{.*\}: is a suite without a name"),
        ("spec_bench", r"^tasks\.spec_bench\.path is needed: .*; give \{suite: spec_bench, path: FILE\}, from https"),
    ],
)
def test_what_is_no_task_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        read_tasks(given)


def test_help_names_each_suite():
    said = usage(CONF_DIR, "compare", {})
    assert [name for name in suite_names() if not re.search(rf"\bsuites?:.*\b{name}\b", said)] == []
