"""Questions with all their turns, arrivals, and variants that take turns."""

from dataclasses import replace
from pathlib import Path

import pytest

from eagle_train.errors import UserError
from eagle_train.inference import Engine, Output, Requests, SamplingParams, Stats
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from evals.bench import answering, statistics
from evals.bench.answering import Run, answer_questions, run_in_turn, serve, take_turns, warm_up
from evals.bench.questions import read_questions
from evals.bench.requests import check_fit
from evals.bench.statistics import Answer
from tests.support.clock import taking
from tests.support.eval_inputs import CONTEXT, make_home, write_rows
from tests.support.measuring import NO_QUESTION, answer, drafting_run, timed_requests
from tests.support.tiny import random_tokens, shared_target


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("mt_bench"))


@pytest.fixture(scope="module")
def target(home):
    return load_target(TargetConfig(str(home / "target")), "cpu")


def test_the_second_turn_holds_the_engines_own_first_answer(home, target):
    engine = Engine(target, max_batch_size=2)
    questions = read_questions(str(home / "questions.jsonl"))
    questions[1] = replace(questions[1], turns=questions[1].turns[:1])
    first, second = answer_questions(engine, Requests(target), questions, SamplingParams(max_tokens=6, ignore_eos=True))
    assert [(a.question.id, a.turn) for a in first + second] == [(81, 1), (82, 1), (101, 1), (81, 2), (101, 2)]
    for before, after in zip((first[0], first[2]), second, strict=True):
        roles = ("user", "assistant", "user")
        contents = (before.question.turns[0], before.output.text, before.question.turns[1])
        history = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        assert after.prompt == Requests(target).tokens_of(history, "")
        assert before.output.text in target.tokenizer.decode(after.prompt)
    assert questions[0].history == []  # a second engine starts afresh


def test_sampled_answers_do_not_depend_on_the_batch_size(home, target):
    questions = read_questions(str(home / "questions.jsonl"))
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    engine, requests = Engine(target), Requests(target)
    together = [answer for turn in answer_questions(engine, requests, questions, params) for answer in turn]
    alone = []
    for question in questions:
        alone += [answer for turn in answer_questions(engine, requests, [question], params) for answer in turn]
    answers = {(a.question.id, a.turn): a.output.token_ids for a in together}
    assert answers == {(a.question.id, a.turn): a.output.token_ids for a in alone}
    twice = [replace(questions[0], line=line) for line in (1, 2)]
    first, second = answer_questions(engine, Requests(target), twice, params)[0]
    assert first.prompt == second.prompt
    assert first.output.token_ids != second.output.token_ids


def test_a_prompt_beyond_the_context_names_its_question(home, target, tmp_path):
    requests = Requests(target)
    long, tool = "x" * CONTEXT, {"role": "tool", "content": "x"}
    rows = [
        {"question_id": "first", "turns": [long]},
        {"question_id": "second", "turns": ["a", "b"]},
        {"id": "tool", "messages": [tool, {"role": "user", "content": "x"}]},
    ]
    first, second, with_tool = read_questions(str(write_rows(tmp_path / "q.jsonl", rows)))
    with pytest.raises(UserError, match=r"question first, turn 1: the prompt takes 262 tokens; .* holds 256"):
        check_fit(requests, [first], 8)
    assert check_fit(requests, [second], CONTEXT - 15) == CONTEXT
    assert check_fit(requests, [second], 8) == 14 + 3 * 8  # the second turn, its answer, and room for the first
    with pytest.raises(UserError, match=r"question second, turn 2: .* 245 of them for earlier answers \(lower max_tok"):
        check_fit(requests, [second], CONTEXT - 11)
    with pytest.raises(UserError, match=r"question tool, turn 1: the chat template refuses .* no tools here"):
        check_fit(requests, [with_tool], 8)


def test_both_engines_are_warmed_up_and_take_turns(home, target, monkeypatch):
    asked = []

    def recorded(engine, requests, batch, params):
        asked.append((engine, [question.id for question in batch], params.max_tokens))
        engine.stage_times.seconds["prefill"] += 1
        return [[answer()]]

    monkeypatch.setattr(answering, "answer_questions", recorded)
    plain, fast = Run(Engine(target), Requests(target)), drafting_run(home, target)
    questions = read_questions(str(home / "questions.jsonl"))
    run_in_turn([plain, fast], questions, SamplingParams(max_tokens=99), batch_size=2)
    p, f = plain.engine, fast.engine
    warm_up = [(p, [81, 82], 16), (f, [81, 82], 16)]
    assert asked == [*warm_up, (p, [81, 82], 99), (f, [81, 82], 99), (f, [101], 99), (p, [101], 99)]
    assert len(plain.answers) == len(fast.answers) == 2
    assert p.stage_times.seconds == f.stage_times.seconds == {"prefill": 2}


def test_waiting_counts_from_the_arrival(clock, monkeypatch):
    """One row, a second per target call: the second request waits for the first, the third for none."""
    taking(monkeypatch, clock, Target, "hidden_states", 1.0)
    engine = Engine(shared_target(), max_batch_size=1)
    requests = timed_requests(*random_tokens(5, 6, 7), arrivals=[0.0, 0.5, 100.0], max_tokens=3, ignore_eos=True)
    outputs = serve(engine, requests)
    assert [output.stats.ttft_s for output in outputs] == [1.0, 3.5, 1.0]
    assert [output.stats.intervals_s for output in outputs] == [[1.0, 1.0]] * 3
    answers = [Answer(NO_QUESTION, 1, each.prompt, output) for each, output in zip(requests, outputs, strict=True)]
    assert statistics.tokens_per_s(answers, [each.arrival for each in requests]) == 9 / 103
    alone = engine.generate([each.prompt for each in requests], requests[0].params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


def test_a_warm_up_asks_nothing_that_is_asked_later():
    asked = []
    warm_up({"a": asked.append}, timed_requests([1, 2, 3], [4, 5]))
    assert [[each.prompt for each in batch] for batch in asked] == [[[3, 2, 1], [5, 4]]]


def test_variants_take_turns_on_every_batch_after_a_warm_up():
    said = []
    output = Output([1], None, "length", Stats(), [])
    variants = {name: lambda batch, name=name: (said.append((name, batch[0].prompt[0])), [output])[1] for name in "abc"}
    done = []
    answered = take_turns(
        variants, [timed_requests([1]), timed_requests([2]), timed_requests([3])], on_batch=done.append
    )
    assert done == [1, 2, 3]
    turns = ["a1", "b1", "c1", "b2", "c2", "a2", "c3", "a3", "b3"]
    assert ["".join(map(str, each)) for each in said] == ["a1", "b1", "c1", *turns]
    assert [answers[0].prompt for answers in answered["b"]] == [[1], [2], [3]]
