"""MT-Bench: figures against numbers worked out by hand, question files as they come, both turns, and the whole command.

The target is a tiny random Llama with a byte tokenizer; it writes nonsense, which is all the measuring needs.
"""

import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from eagle_train.artifacts import card
from eagle_train.errors import UserError
from eagle_train.inference import Engine, Output, SamplingParams, Stats
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.tree import chain, full
from eagle_train.models.draft import Draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from evals import figures, mt_bench, quantisation, replay, report, stopwatch
from evals.figures import Answer
from evals.mt_bench import Run, ask, check_fit, measure
from evals.questions import Question, read_questions
from tests.support.command_line import call
from tests.support.eval_inputs import CONTEXT, arguments, make_home, write_rows


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("mt_bench"))


@pytest.fixture(scope="module")
def target(home):
    return load_target(TargetConfig(str(home / "target")))


@pytest.fixture
def late(clock, monkeypatch) -> None:
    """A device that does its work when it is waited for. Seconds: target 3, draft 2."""
    work = [0.0]

    def wait() -> None:
        clock[0], work[0] = clock[0] + work[0], 0.0

    def told(owner: type, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def launched(*arguments, **options):
            work[0] += seconds
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, launched)

    told(Target, "hidden_states", 3)
    told(Draft, "forward", 2)
    monkeypatch.setattr(stopwatch, "wait_for_gpu", wait)
    for module in (stopwatch, mt_bench):
        monkeypatch.setattr(module, "runs_ahead", lambda device: True)


def answer(token_ids=(), category=None, turn=1, line=1, reason="stop", **stats) -> Answer:
    question = Question(line, line, category, [], ["?"])
    return Answer(question, turn, [7], Output(list(token_ids), "", reason, Stats(**stats), []))


# Figures


def test_tpc_is_summed_before_it_is_divided():
    assert figures.tpc([answer(calls=1, tokens=4), answer(calls=9, tokens=9)]) == 13 / 10
    assert figures.tpc([answer()]) is None


def test_acceptance_is_summed_depth_by_depth():
    deep = answer(accepted_per_depth=[3, 1], drafted_per_depth=[4, 4])
    flat = answer(accepted_per_depth=[1], drafted_per_depth=[2])
    assert figures.acceptance([deep, flat]) == [4 / 6, 1 / 4]
    assert figures.conditional([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, None]


def test_repeated_ngrams():
    assert figures.repeated_ngrams([[1, 2, 1, 2, 1]], n=2) == 2 / 4
    assert figures.repeated_ngrams([list(range(8)) * 2, range(10), range(7)]) == 1 / (9 + 3)
    assert figures.repeated_ngrams([range(7)]) == 0


def test_latency():
    batches = [
        [
            answer(ttft_s=0.5, intervals_s=[1.0, 2.0], calls=2),
            answer(ttft_s=1.5, intervals_s=[3.0] * 7, calls=7),
        ],
        [answer(ttft_s=1.0, intervals_s=[104.0], calls=1)],
    ]
    found = figures.latency(batches)
    assert (found["ttft_s"], found["ttft_p50_s"]) == (1.0, 1.0)
    assert (found["ttit_s"], found["ttit_p50_s"]) == (12.8, 3.0)
    assert found["ttit_p99_s"] == pytest.approx(3.0 + 0.91 * 101)  # between the 9th and the 10th of ten
    assert found["rounds"] == 8  # a batch's rounds are its longest answer's
    seconds = {"prefill": 3.0, "drafting": 0.4, "validation": 1.6}
    found = figures.stages(seconds, {"prefill": 2, "drafting": 5, "validation": 8}, batches=2)
    assert found["stage_ms_per_round"] == pytest.approx({"drafting": 50.0, "validation": 200.0})
    assert (found["prefill_ms_per_batch"], found["draft_latency_ms"]) == (1500, 80)
    assert "draft_latency_ms" not in figures.stages({"prefill": 1.0, "validation": 1.0}, {"validation": 1}, batches=1)


def test_speed_up_over_everything_and_the_median_batch():
    plain = [[answer([1, 2], intervals_s=[2.0] * 4)], [answer([3], intervals_s=[2.0])], [answer([3], intervals_s=[9])]]
    fast = [[answer([1, 2], intervals_s=[1.0] * 4)], [answer([4], intervals_s=[0.5])], [answer([3], intervals_s=[3])]]
    found = figures.compare(plain, fast)
    assert found["speedup"] == pytest.approx((19 / 6) / (7.5 / 6))
    assert found["speedup_batch_median"] == 3.0
    assert found["differing_answers"] == 1
    with pytest.raises(UserError, match="no decoding was measured"):
        figures.compare([[answer([1])]], [[answer([1])]])


def test_counts_and_groups():
    answers = [
        answer([1] * 5, "maths", 1, 1, "stop", calls=1, tokens=4),
        answer([1] * 6, "maths", 2, 1, "length", calls=4, tokens=5),
        answer([1] * 10, "art", 1, 2, "length", calls=3, tokens=9),
    ]
    found = figures.counts(answers, max_tokens=10)
    assert found == {
        "questions": 2,
        "prompts": 3,
        "tokens": 18,
        "calls": 8,
        "mean_answer_tokens": 7,
        "finish_reasons": {"stop": 1, "context": 1, "length": 1},
    }
    tpc = {(group["category"], group["turn"]): group["tpc"] for group in figures.groups(answers)}
    assert tpc == {
        ("art", 1): 3,
        ("art", 2): None,
        ("art", None): 3,
        ("maths", 1): 4,
        ("maths", 2): 5 / 4,
        ("maths", None): 9 / 5,
        (None, 1): 13 / 4,
        (None, 2): 5 / 4,
        (None, None): 18 / 8,
    }


def test_a_speed_up_beyond_tpc_is_an_error():
    with pytest.raises(UserError, match=r"2\.300 exceeds 2\.200 .* timing cannot be right"):
        figures.check_timing({"tpc": 2.2, "speedup": 2.3, "speedup_batch_median": 1.0})
    figures.check_timing({"tpc": 2.2, "speedup": 2.2, "speedup_batch_median": 2.3})


def test_a_report_that_cannot_be_right_is_not_written(home, tmp_path, monkeypatch, capsys):
    faster = {"speedup": 9.0, "speedup_batch_median": 9.0, "differing_answers": 0}
    monkeypatch.setattr(figures, "compare", lambda plain, speculative: faster)
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", "limit=1")) == 2
    assert list((tmp_path / "out").iterdir()) == []
    captured = capsys.readouterr()
    assert "the timing cannot be right" in captured.err
    assert "TPC" not in captured.out


# Questions


def test_the_shapes_of_rows(tmp_path):
    system, user, model = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
    rows = [
        {"question_id": 5, "category": "maths", "turns": ["a", "b"], "reference": ["x", "y"]},
        {"id": "os:walk", "messages": [system, user, model, {"role": "user", "content": "c"}, model]},
        "",
        {"prompt": "d", "category": 7},
        {"prompt": "e", "category": None},
    ]
    assert read_questions(str(write_rows(tmp_path / "q.jsonl", rows))) == [
        Question(1, 5, "maths", [], ["a", "b"], None),
        Question(2, "os:walk", None, [system, user, model], ["c"], "a"),
        Question(4, 4, "7", [], ["d"], None),
        Question(5, 5, None, [], ["e"], None),
    ]


def test_a_limit_is_spread_over_the_file(tmp_path):
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
        ([{"question": "a"}], r"q\.jsonl:1: the row has no turns, messages or prompt; it has question"),
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
def test_rows_that_ask_nothing_are_refused(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        read_questions(str(write_rows(tmp_path / "q.jsonl", rows)))


# Asking


def test_the_second_turn_holds_the_engines_own_first_answer(home, target):
    engine = Engine(target, max_batch_size=2)
    questions = read_questions(str(home / "questions.jsonl"))
    questions[1] = replace(questions[1], turns=questions[1].turns[:1])
    first, second = ask(engine, questions, SamplingParams(max_tokens=6, ignore_eos=True))
    assert [(a.question.id, a.turn) for a in first + second] == [(81, 1), (82, 1), (101, 1), (81, 2), (101, 2)]
    for before, after in zip((first[0], first[2]), second, strict=True):
        roles = ("user", "assistant", "user")
        contents = (before.question.turns[0], before.output.text, before.question.turns[1])
        history = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        assert after.prompt == engine.requests.tokens_of(history, "")
        assert before.output.text in target.tokenizer.decode(after.prompt)
    assert questions[0].history == []  # a second engine starts afresh


def test_sampled_answers_do_not_depend_on_the_batch_size(home, target):
    questions = read_questions(str(home / "questions.jsonl"))
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    engine = Engine(target)
    together = [answer for batch in ask(engine, questions, params) for answer in batch]
    alone = [answer for question in questions for batch in ask(engine, [question], params) for answer in batch]
    answers = {(a.question.id, a.turn): a.output.token_ids for a in together}
    assert answers == {(a.question.id, a.turn): a.output.token_ids for a in alone}
    twice = [replace(questions[0], line=line) for line in (1, 2)]
    first, second = ask(engine, twice, params)[0]
    assert first.prompt == second.prompt
    assert first.output.token_ids != second.output.token_ids


def test_a_prompt_beyond_the_context_names_its_question(home, target, tmp_path):
    engine = Engine(target)
    long, tool = "x" * CONTEXT, {"role": "tool", "content": "x"}
    rows = [
        {"question_id": "first", "turns": [long]},
        {"question_id": "second", "turns": ["a", "b"]},
        {"id": "tool", "messages": [tool, {"role": "user", "content": "x"}]},
    ]
    first, second, with_tool = read_questions(str(write_rows(tmp_path / "q.jsonl", rows)))
    with pytest.raises(UserError, match=r"question first, turn 1: the prompt takes 262 tokens; .* holds 256"):
        check_fit(engine, [first], 8)
    check_fit(engine, [second], CONTEXT - 15)
    with pytest.raises(UserError, match=r"question second, turn 2: .* 245 of them for earlier answers \(lower max_tok"):
        check_fit(engine, [second], CONTEXT - 11)
    with pytest.raises(UserError, match=r"question tool, turn 1: the chat template refuses .* no tools here"):
        check_fit(engine, [with_tool], 8)


def test_both_engines_are_warmed_up_and_take_turns(home, target, monkeypatch):
    asked = []

    def recorded(engine, batch, params):
        asked.append((engine, [question.id for question in batch], params.max_tokens))
        engine.stage_seconds["prefill"] += 1
        return [[answer()]]

    monkeypatch.setattr(mt_bench, "ask", recorded)
    plain, fast = Run(Engine(target)), Run(Engine(target, str(home / "draft")))
    questions = read_questions(str(home / "questions.jsonl"))
    measure([plain, fast], questions, SamplingParams(max_tokens=99), batch_size=2)
    p, f = plain.engine, fast.engine
    warm_up = [(p, [81, 82], 16), (f, [81, 82], 16)]
    assert asked == [*warm_up, (p, [81, 82], 99), (f, [81, 82], 99), (f, [101], 99), (p, [101], 99)]
    assert len(plain.answers) == len(fast.answers) == 2
    assert p.stage_seconds == f.stage_seconds == {"prefill": 2}


@pytest.mark.parametrize(("tree", "children"), [(chain(3), 1), (full(2, 3), 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_what_is_served_is_what_was_trained(home, target, tree, children, temperature):
    """The replayed share of accepted first tokens is the engine's own; another draft's is not."""
    run = Run(Engine(target, str(home / "draft"), tree))
    questions = read_questions(str(home / "questions.jsonl"))
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=3)
    run.batches = ask(run.engine, questions, params)
    found = mt_bench.train_serve_check(run, 16)
    assert 0.2 < found["depth_1_served"] < 0.95
    assert found["depth_1_as_trained"] == pytest.approx(found["depth_1_served"], abs=1e-12)
    assert found["agreement_on_reference_answers"] is None
    other = Draft(run.engine.drafter.draft.config).init_weights(1)
    served = [(a.prompt, a.output) for a in run.answers]
    assert replay.served_as_trained(target, other, served, children)[0] < found["depth_1_served"] - 0.1


# Stages, on a device that does what it is told while the host goes on


def test_a_gpu_is_waited_for_around_each_stage(home, target, late):
    """Seconds: target 3, draft 2, which pass when they are waited for; a round of chain3 drafts three times."""
    engine, params = Engine(target, str(home / "draft"), overlap=True), SamplingParams(max_tokens=9, ignore_eos=True)
    run = Run(engine)
    for question in read_questions(str(home / "questions.jsonl")):
        run.ask([question], params)
    told, batches = dict(engine.stage_seconds), list(run.batches)
    found = mt_bench.stages(run, SimpleNamespace(params=params))
    decoding = {"drafting": 6000, "validation": 3000, "sampling": 0, "bookkeeping": 0}
    assert found == {"stage_ms_per_round": decoding, "prefill_ms_per_batch": 5000, "draft_latency_ms": 6000}
    assert (engine.stage_seconds, run.batches) == (told, batches)  # it was a batch apart


@pytest.mark.usefixtures("noisy")
def test_the_run_itself_waits_for_no_gpu(home, tmp_path, monkeypatch):
    """20 ms a wait: a stage has one in it, and a token's time none."""
    for module in (stopwatch, mt_bench):
        monkeypatch.setattr(module, "runs_ahead", lambda device: True)
    waits, measure = [], mt_bench.measure
    monkeypatch.setattr(stopwatch, "wait_for_gpu", lambda: (waits.append(1), time.sleep(0.02)))

    def left_alone(*arguments):
        measure(*arguments)
        assert not waits

    monkeypatch.setattr(mt_bench, "measure", left_alone)
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", "limit=1", "max_tokens=4")) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["draft_latency_ms"] == found["stage_ms_per_round"]["drafting"] >= 20
    assert found["plain_stage_ms_per_round"]["validation"] >= 20


def test_the_report_says_where_stages_were_watched():
    assert "GPU" not in report.by_stage(found_figures())
    assert "Of a batch of its own, in which the GPU is waited for" in report.by_stage(found_figures(device="cuda"))


# A table of trees


def served(home, target, tree, batch_size: int) -> Run:
    run = Run(Engine(target, str(home / "draft"), tree, max_batch_size=batch_size))
    questions = read_questions(str(home / "questions.jsonl"))[:batch_size]
    run.batches = ask(run.engine, questions, SamplingParams(max_tokens=40, ignore_eos=True))
    return run


@pytest.mark.parametrize(
    ("table", "batch_size", "trees"),
    [
        (chain(3), 2, "chain3"),
        ({1: chain(3), 4: full(3, 2)}, 1, "chain3"),
        ({1: chain(3), 4: full(3, 2)}, 3, "chain3 (batch size 1), tree of 14 nodes, depth 3 (batch size 2 to 3)"),
        ({1: chain(0), 4: chain(3)}, 2, "no draft (batch size 1), chain3 (batch size 2)"),
        ({1: chain(2), 2: chain(2), 4: chain(3)}, 2, "chain2"),
    ],
)
def test_the_trees_that_batches_of_this_size_get(table, batch_size, trees):
    assert mt_bench.labels(Dispatcher(table), batch_size) == trees


@pytest.mark.parametrize(
    ("table", "batch_size", "checked"),
    [
        ({1: chain(3), 4: full(3, 2)}, 1, True),
        ({1: chain(3), 4: full(3, 2)}, 2, False),
        ({1: chain(3), 4: chain(1)}, 2, True),
        ({1: chain(0), 4: chain(3)}, 2, False),
    ],
)
def test_the_check_is_of_trees_whose_roots_have_as_many_children(home, target, table, batch_size, checked):
    found = mt_bench.train_serve_check(served(home, target, table, batch_size), batch_size)
    if checked:
        assert found["depth_1_as_trained"] == pytest.approx(found["depth_1_served"], abs=1e-12)
    else:
        assert found["depth_1_as_trained"] is None
    assert 0 < found["agreement_on_own_answers"] < 1


def test_a_table_that_drafts_only_for_larger_batches_is_refused(home, tmp_path, capsys):
    table = tmp_path / "table.yaml"
    table.write_text("1: {parents: [-1]}\n4: {parents: [-1, 0, 1]}\n")
    given = arguments(home, f"out={tmp_path}/out", f"tree={table}")
    for command in (mt_bench.main, quantisation.main):
        assert call(command, *given) == 2
        assert "error: tree: it drafts nothing at batch sizes up to batch_size=1, so" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_where_no_batch_had_a_size_that_is_drafted_for_a_line_says_so(home, tmp_path, capsys):
    """Both questions' answers end together, so that there never is a batch of one."""
    table = tmp_path / "table.yaml"
    table.write_text("1: {parents: [-1, 0]}\n2: {parents: [-1]}\n")
    write_rows(tmp_path / "questions.jsonl", [{"prompt": "a"}] * 2)
    given = [f"out={tmp_path}/out", f"tree={table}", "batch_size=2", f"questions={tmp_path}/questions.jsonl"]
    assert call(mt_bench.main, *arguments(home, *given)) == 2
    assert "error: tree: no round was of a batch size that it drafts for" in capsys.readouterr().err


# The report


def found_figures(**changes) -> dict:
    """Figures of a good draft."""
    stages = {"drafting": 2.0, "validation": 5.0}
    latency = {f"{key}_{suffix}": 0.004 for key in ("ttft", "ttit") for suffix in ("s", "p50_s", "p99_s")}
    group = {"category": None, "turn": None, "prompts": 64, "tpc": 2.98, "acceptance_per_depth": [0.8, 0.64]}
    after = figures.conditional(changes.get("acceptance_per_depth", [0.8, 0.64]))
    return {
        "tpc": 2.98,
        "speedup": 1.7,
        "speedup_batch_median": 1.72,
        "differing_answers": 0,
        "acceptance_per_depth": [0.8, 0.64],
        "acceptance_after_depth_before": after,
        **latency,
        **{f"plain_{name}": value for name, value in latency.items()},
        "stage_ms_per_round": stages,
        "plain_stage_ms_per_round": {"validation": 4.0},
        "prefill_ms_per_batch": 9.0,
        "plain_prefill_ms_per_batch": 8.0,
        "repeated_8grams": 0.042,
        **{"questions": 64, "prompts": 64, "tokens": 298, "calls": 100, "mean_answer_tokens": 40},
        "finish_reasons": {"stop": 60, "length": 4},
        "per_category_and_turn": [{**group, "turn": 1}, group],
        "train_serve_check": {
            "depth_1_served": 0.8,
            "depth_1_as_trained": 0.8,
            "agreement_on_own_answers": 0.8,
            "agreement_on_reference_answers": 0.7,
        },
        **{
            "quant": "none",
            "tree": "chain2",
            "temperature": 0.0,
            "batch_size": 1,
            "target": "t",
            "dtype": "bfloat16",
            "device": "cpu",
        },
        "draft_training": {"tokens": 12345},
        "config": {"draft": {"path": "d"}, "questions": "q.jsonl", "seed": 0, "temperature": 0.0},
        "provenance": {"torch": "2", "gpu": None, "load_average": [1.0, 2.0]},
    } | changes


def test_summary():
    lines = report.summary(found_figures()).splitlines()
    assert lines[0] == "TPC 2.98 (chain2, temperature 0, 64 prompts; repeated 8-grams 4.2 %)"
    assert lines[1] == "acceptance by depth 0.80 0.64"
    assert lines[-1] == "answers that differ from plain decoding's: 0 of 64"
    assert "differ" not in report.summary(found_figures(differing_answers=None))


CHECK = found_figures()["train_serve_check"]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({}, "Both ways agree."),
        ({"train_serve_check": {**CHECK, "depth_1_as_trained": 0.9}}, "They disagree"),
        ({"train_serve_check": {**CHECK, "depth_1_as_trained": None}}, "Train/serve check: left out"),
        ({"train_serve_check": {**CHECK, "agreement_on_reference_answers": 0.9}}, "train it on the target's answers"),
        ({"acceptance_per_depth": [0.5, 0.4]}, "trained on 12,345 tokens. Train it longer"),
        ({"acceptance_per_depth": [0.8, 0.4]}, "falls from 80.0 % to 50.0 %: its features drift"),
        ({"speedup": 0.9}, "slower here"),
        ({"stage_ms_per_round": {"drafting": 6.0, "validation": 4.0}}, "Drafting is 60.0 % of a round"),
        ({"repeated_8grams": 0.2}, "The target repeats itself"),
        ({"differing_answers": 3}, "3 answers differ from plain decoding's: rounding in bfloat16"),
        ({"differing_answers": 3, "dtype": "float32"}, "fp32 should not"),
        ({"finish_reasons": {"context": 2}}, "2 answers were cut short"),
    ],
)
def test_the_diagnosis_says_why(changes, finding):
    good, found = report.diagnosis(found_figures()), report.diagnosis(found_figures(**changes))
    assert finding in "\n".join(found)
    if changes:
        assert len(good) == 2
        assert found != good
        assert f"- {found[-1]}" in report.markdown(found_figures(**changes))


def test_depths_of_several_trees_follow_on_none():
    """Their rounds are not the same at every depth."""
    one, several = found_figures(), found_figures(acceptance_per_depth=[0.8, 0.4], acceptance_after_depth_before=None)
    assert report.by_depth(one).splitlines()[3] == "| 2 | 64.0 % | 80.0 % |"
    assert report.by_depth(several).splitlines()[3] == "| 2 | 40.0 % |"
    assert "drift" not in "\n".join(report.diagnosis(several))


def test_the_table_of_categories_and_turns():
    shares = {"acceptance_per_depth": [0.5]}
    groups = [
        {"category": category, "turn": turn, "prompts": 4, "tpc": tpc, **shares}
        for category, values in {"maths": (3.0, None, 2.5), None: (2.0, 1.5, 1.75)}.items()
        for turn, tpc in zip((1, 2, None), values, strict=True)
    ]
    assert report.by_category_and_turn(groups).splitlines() == [
        "| category | prompts | TPC, turn 1 | TPC, turn 2 | TPC | acceptance by depth |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| maths | 4 | 3.00 |  | 2.50 | 0.50 |",
        "| all | 4 | 2.00 | 1.50 | 1.75 | 0.50 |",
    ]


def test_any_text_stays_in_its_cell():
    """A category may be called anything; the table has its columns still."""
    groups = [
        {"category": name, "turn": None, "prompts": 4, "tpc": 3.0, "acceptance_per_depth": [0.5]}
        for name in ("a|b", "c\\|d", "e\nf", "|", None)
    ]
    header, _, *rows = report.by_category_and_turn(groups).splitlines()
    assert len(rows) == len(groups)
    cells = [re.split(r"(?<!\\)(?:\\\\)*\|", row) for row in (header, *rows)]
    assert {len(row) for row in cells} == {6}
    assert [row[1].strip() for row in cells[1:]] == [r"a\|b", r"c\\\|d", "e f", r"\|", "all"]
    assert card.table(["a"], [["b|c\nd"]]).splitlines()[2] == r"| b\|c d |"


def test_categories_are_told_from_the_row_of_all():
    """Whatever they are called; prompts without one are accounted for."""
    groups = [
        {"category": name, "turn": None, "prompts": count, "tpc": 3.0, "acceptance_per_depth": [0.5]}
        for name, count in {"all": 3, "*x* <b>": 2, "y" * 200: 1, None: 8}.items()
    ]
    _, _, *rows = report.by_category_and_turn(groups).splitlines()
    names = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    assert names == ["| all", r"| \*x\* \<b>", "| " + "y" * 59 + "…", "| all prompts"]
    assert rows[-1] == "2 of the prompts have no category."


def test_a_report_says_what_its_words_mean():
    config = {**found_figures()["config"], "draft": {"path": "d|*"}, "questions": "q_"}
    text = report.markdown(found_figures(target="a`b", config=config))
    assert "Target ``a`b``, bfloat16 on cpu; draft `d|*`; chain2;" in text
    assert all(f"{word}: " in text for word in ("TPC", "TTFT", "TTIT"))
    assert "Answers ended: 4 at max_tokens, 60 at a stop." in text
    assert "nan" not in text.lower()


@pytest.mark.parametrize(
    ("shares", "after", "text"),
    [([0.0, 0.0], [0.0, None], "| 2 | 0.0 % |  |"), ([0.9], [0.9], "| 1 | 90.0 % | 90.0 % |")],
)
def test_reports_of_drafts_that_are_never_or_always_accepted(shares, after, text, tmp_path):
    found = found_figures(acceptance_per_depth=shares, acceptance_after_depth_before=after, tpc=1.0)
    assert text in report.markdown(found)
    report.plot_acceptance(found, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 3}, "temperature 0"),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 0}, "temperature 0.7, top-p 0.9"),
        (
            {"temperature": 1.0, "top_p": 1.0, "top_k": 20, "drafting": "multinomial_without_replacement"},
            "temperature 1, top-p 1, top-k 20, multinomial without replacement drafts",
        ),
    ],
)
def test_reports_say_how_tokens_are_chosen(config, told):
    assert report.sampling(config) == told
    found = found_figures(config={**found_figures()["config"], **config})
    assert f"; {told}; batches of " in report.markdown(found)
    assert f"(chain2, {told}, 64 prompts; " in report.summary(found)
    assert f"(chain2, {told}, 1 prompt; " in report.summary({**found, "prompts": 1})


@pytest.mark.parametrize("depth", [1, 2, 40])
def test_the_picture_has_all_of_its_names(tmp_path, depth):
    """Nothing of the legend lies outside the picture, and the curves have nearly all of its width."""
    shares = [0.8**d for d in range(1, depth + 1)]
    figure = report.figure_of(shares, [0.8] * depth)
    assert len(figure.axes[0].lines) == min(depth, 2)  # at depth 1 both would be the same
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    ticks = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(ticks))
    for box in (figure.legends[0].get_window_extent(), figure.axes[0].get_tightbbox()):
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
    assert figure.axes[0].get_window_extent().width > 0.8 * width
    report.plot_acceptance(found_figures(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(UserError, match=r"b\.png: cannot be written: "):
        report.plot_acceptance(found_figures(), tmp_path / "b.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


# The command


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["questions=nowhere.jsonl"], "error: questions=nowhere.jsonl: no such file"),
        (["draft.path=nowhere"], "error: draft=nowhere: no config.json"),
        (["tree.length=0"], "error: tree: it drafts nothing"),
        (["draft.alignment=first"], "error: draft.alignment=first: must be accepted or last"),
        (["drafting=best"], "error: drafting='best': must be one of greedy, multinomial, "),
        (["limit=few"], "error: limit: Value 'few'"),
        (["batch_size=0"], "error: batch_size=0: must be at least 1"),
        (["max_tokens=1"], "error: no answer has a second token"),
        (["depth=3"], "error: Could not override 'depth'"),
        (["out={home}/draft/config.json"], "error: out="),
    ],
)
def test_mistakes_are_one_line(home, tmp_path, capsys, overrides, message):
    overrides = [override.format(home=home) for override in overrides]
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *overrides)) == 2
    progress = re.compile(r"Loading weights|batch \d+/\d+, ")
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not progress.search(line)]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.usefixtures("noisy")
def test_the_alignment_is_the_drafters(home, tmp_path, monkeypatch):
    seen, measure = [], mt_bench.measure

    def watched(runs, *rest):
        seen.append(runs[1].engine.drafter.alignment)
        measure(runs, *rest)

    monkeypatch.setattr(mt_bench, "measure", watched)
    for override in ([], ["draft.alignment=last"]):
        assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *override)) == 0
        assert json.loads((tmp_path / "out" / "results.json").read_text())["alignment"] == seen[-1]
    assert seen == ["accepted", "last"]


@pytest.mark.usefixtures("noisy")
def test_drafts_that_are_drawn(home, tmp_path):
    drawn = ["drafting=multinomial_without_replacement", "temperature=0.5", "tree=d3_bf2"]
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *drawn)) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["config"]["drafting"] == "multinomial_without_replacement"
    assert found["train_serve_check"]["depth_1_as_trained"] is None
    assert found["differing_answers"] is None
    assert "left out" in (tmp_path / "out" / "report.md").read_text()

    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *drawn[1:])) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["differing_answers"] == 0


def test_the_whole_command(home, tmp_path):
    out = tmp_path / "out"
    run = [sys.executable, "-m", "evals.mt_bench", *arguments(home, f"out={out}", "tree=chain5", "batch_size=2")]
    root = Path(__file__).parents[2]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"TPC \d\.\d\d \(chain5, temperature 0, 6 prompts; repeated 8-grams \d+\.\d %\)\n", done.stdout)
    assert sorted(path.name for path in out.iterdir()) == [
        "acceptance.png",
        "answers.jsonl",
        "report.md",
        "results.json",
    ]

    found = json.loads((out / "results.json").read_text())
    assert {"tpc", "speedup", "ttft_s", "ttit_s", "acceptance_per_depth", "plain_ttit_s"} <= found.keys()
    assert found["speedup"] == pytest.approx(found["plain_ttit_s"] / found["ttit_s"])
    assert found["differing_answers"] == 0
    assert (found["questions"], found["prompts"], len(found["acceptance_per_depth"])) == (3, 6, 5)
    assert found["config"]["seed"] == 0
    assert "torch" in found["provenance"]

    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert Counter(row["turn"] for row in rows) == {1: 3, 2: 3}
    assert sum(row["tokens"] for row in rows) / sum(row["calls"] for row in rows) == found["tpc"]
    assert "| writing | 4 |" in (out / "report.md").read_text()
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
