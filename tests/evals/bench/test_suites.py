"""Suites: their files and the hub, templates, thinking, categories, and what is refused."""

import json
from collections import Counter

import datasets
import pytest
from datasets import Dataset, DatasetDict

from eagle_train.errors import UserError
from evals.bench.suites import PROMPT, Suite, suite_named, suite_names
from evals.bench.tasks import MT_BENCH, SPEC_BENCH, read_tasks
from tests.support.eval_inputs import write_rows

HUMAN_EVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    pass"}
GSM8K = {"question": "1 + 1?", "answer": "#### 2"}


def spec_bench() -> list[dict]:
    """Rows as Spec-Bench has them: 80 questions of two turns, 80 each of five other kinds of one."""
    talks = [{"category": kind, "turns": [f"{kind} {i}", "And then?"]} for kind in MT_BENCH for i in range(10)]
    others = [
        {"category": kind, "turns": [f"{kind} {i}"], "reference": ["a"]} for kind in SPEC_BENCH for i in range(80)
    ]
    return [{"question_id": place, **row} for place, row in enumerate(talks + others, 81)]


def read(name: str, path, **given):
    return suite_named(name, {"path": str(path), **given}).read()


def test_spec_benchs_480_questions(tmp_path):
    questions = read("spec_bench", write_rows(tmp_path / "question.jsonl", spec_bench()))
    assert len(questions) == 480
    assert Counter(len(question.turns) for question in questions) == {1: 400, 2: 80}
    assert len({question.category for question in questions}) == 13
    assert (questions[0].id, questions[0].turns) == (81, ["writing 0", "And then?"])


@pytest.mark.parametrize(("name", "row"), [("humaneval", HUMAN_EVAL), ("gsm8k", GSM8K)])
def test_the_template_stands_around_a_question(tmp_path, name, row):
    path = write_rows(tmp_path / "q.jsonl", [row])
    template = suite_named(name).template
    text = row.get("prompt") or row["question"]
    assert text not in template
    assert [question.turns for question in read(name, path)] == [[template.replace(PROMPT, text)]]
    assert [question.turns for question in read(name, path, template=None)] == [[text]]


def test_a_template_is_for_the_first_turn_alone(tmp_path):
    path = write_rows(tmp_path / "q.jsonl", [{"turns": ["a", "b"]}])
    assert read("own", path, template="<{prompt}>")[0].turns == ["<a>", "b"]


@pytest.mark.parametrize(("thinking", "variables"), [(None, {}), (True, {"enable_thinking": True})])
def test_thinking_is_told_to_the_template(tmp_path, thinking, variables):
    (question,) = read("gsm8k", write_rows(tmp_path / "q.jsonl", [GSM8K]), thinking=thinking)
    assert question.variables == variables


def test_a_set_of_ones_own(tmp_path):
    rows = [{"text": "Hallo?", "language": "de"}, {"text": "Ça va ?", "language": "fr"}]
    path = write_rows(tmp_path / "q.jsonl", rows)
    questions = read("own", path, columns={"prompt": "text"}, category="language")
    assert [(question.category, question.turns) for question in questions] == [("de", ["Hallo?"]), ("fr", ["Ça va ?"])]


def test_no_two_questions_of_several_files_are_one(tmp_path):
    """Intervals, counts and seeds know a question by its line, and each file begins at 1."""
    rows = [{"prompt": f"{language} {number}", "language": language} for language in ("de", "fr") for number in (1, 2)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "set", num_shards=2)
    questions = read("own", tmp_path / "set", category="language")
    assert [(each.line, each.id, each.turns) for each in questions] == [
        (place, place, [row["prompt"]]) for place, row in enumerate(rows, 1)
    ]
    write_rows(tmp_path / "q.jsonl", rows)
    (tmp_path / "q.jsonl").write_text("\n" + (tmp_path / "q.jsonl").read_text())
    assert [each.line for each in read("own", tmp_path / "q.jsonl")] == [2, 3, 4, 5]  # of one file its own


def maths(count: int, start: int = 0) -> list[dict]:
    return [{"question": f"{place} + 1?", "answer": "#### 2"} for place in range(start, start + count)]


def copies(home) -> dict:
    """Copies of GSM8K's test split of three questions, each beside a training split that is another: paths by kind."""
    test, train = maths(3), maths(5, start=100)
    both = DatasetDict(test=Dataset.from_list(test), train=Dataset.from_list(train))
    both.save_to_disk(home / "saved")
    (home / "data").mkdir()
    for name, rows in (("test", test), ("test_socratic", train), ("train", train), ("train_socratic", train)):
        write_rows(home / "data" / f"{name}.jsonl", rows)
    for config, rows in (("main", test), ("socratic", train)):
        (home / "clone" / config).mkdir(parents=True)
        Dataset.from_list(rows).to_parquet(home / "clone" / config / "test-00000-of-00001.parquet")
        Dataset.from_list(train).to_parquet(home / "clone" / config / "train-00000-of-00001.parquet")
    files = [f"  - split: {split}\n    path: {{0}}/{split}-*" for split in ("train", "test")]
    declared = [
        f"- config_name: {{0}}\n  data_files:\n{chr(10).join(files)}".format(name) for name in ("main", "socratic")
    ]
    (home / "clone" / "README.md").write_text("---\nconfigs:\n" + "\n".join(declared) + "\n---\n# GSM8K\n")
    return {"saved": home / "saved", "split": home / "saved/test", "data": home / "data", "clone": home / "clone"}


@pytest.mark.parametrize("kind", ["saved", "split", "data", "clone"])
def test_of_a_directory_the_suites_own_split_is_read(tmp_path, kind):
    questions = read("gsm8k", copies(tmp_path)[kind], template=None)
    assert [question.turns for question in questions] == [[row["question"]] for row in maths(3)]


def test_a_config_of_a_clone_alone(tmp_path):
    path = copies(tmp_path)["clone"] / "main"
    assert len(read("gsm8k", path)) == 3


def test_the_hubs_columns_are_read_from_a_copy(tmp_path):
    row = {"prompt": ["a", "b"], "prompt_id": 7, "category": "math", "reference": []}
    DatasetDict(train=Dataset.from_list([row])).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "saved", write_rows(tmp_path / "rows.jsonl", [row])):
        (question,) = read("mt_bench", path)
        assert (question.id, question.turns, question.category) == (7, ["a", "b"], "math")
    with pytest.raises(UserError, match=r"it lacks question_id, turns; the row has category"):
        read("mt_bench", write_rows(tmp_path / "none.jsonl", [{"category": "math"}]))


def test_the_training_split_does_not_pass_as_the_suite(tmp_path):
    home = copies(tmp_path)
    Dataset.from_list(maths(5), split="train").save_to_disk(tmp_path / "set")
    places = [home["saved"] / "train", *(home["data"] / f"train{end}.jsonl" for end in ("", "_socratic"))]
    for path in (*places, tmp_path / "set", home["clone"] / "main/train-00000-of-00001.parquet"):
        with pytest.raises(
            UserError, match=rf"^suite\.path={path}: is the training split; GSM8K's questions are of the"
        ):
            read("gsm8k", path)
    assert len(read("own", home["data"] / "train.jsonl")) == 5, "a set of one's own may be any"
    DatasetDict(dev=Dataset.from_list(maths(1))).save_to_disk(tmp_path / "other")
    with pytest.raises(UserError, match=r"/other: has no split test; give the directory of one, .*/other/dev say"):
        read("gsm8k", tmp_path / "other")
    assert len(read("gsm8k", tmp_path / "other/dev")) == 1
    path = write_rows(tmp_path / "renamed.jsonl", maths(7473))
    with pytest.raises(
        UserError, match=r"has 7,473 questions, and GSM8K has 1,319: it is another set; give that, or s"
    ):
        read("gsm8k", path)


def test_a_part_of_a_suite_is_told(tmp_path, caplog):
    """Of one's own choice, say; the whole set is not."""
    caplog.set_level("INFO")
    assert len(suite_named("gsm8k", {"path": str(write_rows(tmp_path / "q.jsonl", maths(1319)))}).read(limit=2)) == 2
    assert caplog.text == ""
    read("gsm8k", write_rows(tmp_path / "q.jsonl", maths(9)))
    assert "q.jsonl has 9 questions, and GSM8K has 1,319: figures are of a part of it" in caplog.text


def test_the_hub_is_read_where_no_file_is_given(monkeypatch):
    """By a stand-in that has the columns of each repository."""
    rows = {
        "HuggingFaceH4/mt_bench_prompts": {"prompt": ["a", "b"], "prompt_id": 7, "category": "math", "reference": []},
        "openai/openai_humaneval": HUMAN_EVAL,
        "openai/gsm8k": GSM8K,
    }
    asked = []

    def load(path, name, *, split, streaming):
        asked.append((path, name, split))
        return Dataset.from_list([rows[path]]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = {name: suite_named(name).read()[0] for name in ("mt_bench", "humaneval", "gsm8k")}
    assert asked == [
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        ("openai/openai_humaneval", None, "test"),
        ("openai/gsm8k", "main", "test"),
    ]
    assert (found["mt_bench"].id, found["mt_bench"].turns, found["mt_bench"].category) == (7, ["a", "b"], "math")
    assert found["gsm8k"].reference == "#### 2"


def test_a_hub_that_is_not_reached_is_one_line(monkeypatch):
    def unreachable(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"suite\.hub\.path is openai/gsm8k; .*no network; give suite\.path=FILE"):
        suite_named("gsm8k").read()


@pytest.mark.parametrize(
    ("name", "rows", "given", "message"),
    [
        ("mt_bench", [GSM8K], {}, r"q\.jsonl:1: no row of MT-Bench, it lacks question_id, category, turns"),
        (
            "humaneval",
            [{"prompt": "a"}],
            {},
            r"q\.jsonl:1: no row of HumanEval, it lacks task_id, entry_point; the",
        ),
        (
            "mt_bench",
            [{"question_id": 1, "category": "rag", "turns": ["a"]}],
            {},
            r"q\.jsonl:1: category=rag: MT-Bench has writing, roleplay",
        ),
        ("own", [{"prompt": "a"}], {"category": "language"}, r"q\.jsonl:1: suite\.category=language: no such column"),
        (
            "own",
            [{"text": "a"}],
            {"columns": {"prompt": "words"}},
            r"q\.jsonl:1: suite\.columns\.prompt=words: no ",
        ),
        ("own", [{"prompt": "a"}], {"template": "Hi"}, r"suite\.template='Hi': must hold \{prompt\}"),
    ],
)
def test_what_is_refused(tmp_path, name, rows, given, message):
    path = write_rows(tmp_path / "q.jsonl", rows)
    with pytest.raises(UserError, match=message):
        read(name, path, **given)


def test_a_place_that_is_not_there():
    with pytest.raises(UserError, match=r"suite\.path=nowhere: no such file; give GSM8K's, from https://github"):
        read("gsm8k", "nowhere")
    with pytest.raises(UserError, match=r"suite\.path is needed: Spec-Bench is not read from the hub; give suite"):
        suite_named("spec_bench").read()
    with pytest.raises(UserError, match=r"suite='mtbench': must be one of gsm8k, humaneval, mt_bench, own, spec_bench"):
        suite_named("mtbench")
    with pytest.raises(UserError, match=r"^path='q': needs suite=NAME"):
        Suite(path="q")
    with pytest.raises(UserError, match=r"^thinking: needs suite=NAME"):
        Suite(thinking=False)


def test_each_suite_says_where_it_is_from():
    for name in set(suite_names()) - {"own"}:
        suite = suite_named(name)
        assert suite.title
        assert suite.licence
        assert suite.source.startswith("https://")


def test_tasks_may_name_suites(tmp_path):
    path = write_rows(tmp_path / "question.jsonl", spec_bench())
    (own,) = read_tasks({"own": {"path": str(path), "thinking": False}})
    assert (own.name, own.format, own.suite["thinking"]) == ("own", "own", False)
    (task,) = read_tasks({"bench": {"suite": "spec_bench", "path": str(path)}})
    assert (task.name, task.format, task.licence, len(task.questions)) == ("bench", "Spec-Bench", "Apache-2.0", 480)
    assert task.group(task.questions[0]) == "mt_bench"
    assert json.dumps(task.about())


def test_a_file_that_cannot_be_read_is_told_by_its_key(tmp_path):
    (tmp_path / "q.tsv").write_text("a\tb\n")
    with pytest.raises(UserError, match=r"^suite\.path is .*q\.tsv"):
        read("own", tmp_path / "q.tsv")
    with pytest.raises(UserError, match=r"^tasks\.mine\.path is .*q\.tsv"):
        read_tasks({"mine": {"path": str(tmp_path / "q.tsv")}})
