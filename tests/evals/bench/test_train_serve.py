"""The train/serve check on tiny models: what is served is what was trained."""

from pathlib import Path

import pytest

from eagle_train.drafts import EagleDraft
from eagle_train.inference import Dispatcher, SamplingParams, chain, full
from eagle_train.models.loading import TargetConfig, load_target
from evals.bench.answering import Run, answer_questions
from evals.bench.questions import read_questions
from evals.bench.train_serve import served_as_trained, train_serve_check
from evals.bench.trees import tree_names
from tests.support.eval_inputs import make_home
from tests.support.measuring import drafting_run


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("mt_bench"))


@pytest.fixture(scope="module")
def target(home):
    return load_target(TargetConfig(str(home / "target")), "cpu")


def served(home, target, tree, batch_size: int) -> Run:
    run = drafting_run(home, target, tree, max_batch_size=batch_size)
    questions = read_questions(str(home / "questions.jsonl"))[:batch_size]
    run.batches = answer_questions(run.engine, run.requests, questions, SamplingParams(max_tokens=40, ignore_eos=True))
    return run


@pytest.mark.parametrize(("tree", "children"), [(chain(3), 1), (full(2, 3), 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_what_is_served_is_what_was_trained(home, target, tree, children, temperature):
    """The replayed share of accepted first tokens is the engine's own; another draft's is not."""
    run = drafting_run(home, target, tree)
    questions = read_questions(str(home / "questions.jsonl"))
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=3)
    run.batches = answer_questions(run.engine, run.requests, questions, params)
    found = train_serve_check(run, 16)
    assert 0.2 < found["depth_1_served"] < 0.95
    assert found["depth_1_as_trained"] == pytest.approx(found["depth_1_served"], abs=1e-12)
    assert found["agreement_on_reference_answers"] is None
    other = EagleDraft(run.drafter.draft.config).init_weights(1)
    served = [(a.prompt, a.output) for a in run.answers]
    assert served_as_trained(target, other, served, children)[0] < found["depth_1_served"] - 0.1


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
    assert tree_names(Dispatcher(table), batch_size) == trees


@pytest.mark.parametrize(
    ("table", "batch_size", "checked"),
    [
        ({1: chain(3), 4: full(3, 2)}, 1, True),
        ({1: chain(3), 4: full(3, 2)}, 2, False),
        ({1: chain(3), 4: chain(1)}, 2, True),
        ({1: chain(0), 4: chain(3)}, 2, False),
        ("dynamic", 1, False),
        ({1: chain(3), 4: "dynamic"}, 2, False),
    ],
)
def test_the_check_is_of_trees_whose_roots_have_as_many_children(home, target, table, batch_size, checked):
    found = train_serve_check(served(home, target, table, batch_size), batch_size)
    assert found["depth_1_served"] > 0
    if checked:
        assert found["depth_1_as_trained"] == pytest.approx(found["depth_1_served"], abs=1e-12)
    else:
        assert found["depth_1_as_trained"] is None
    assert 0 < found["agreement_on_own_answers"] < 1


@pytest.mark.parametrize("options", [{"tree": "auto"}, {"tree": "chain3", "gate": True}])
def test_nothing_is_checked_of_rounds_that_may_have_no_drafts(home, target, options):
    run = drafting_run(home, target, **options)
    question, params = read_questions(str(home / "questions.jsonl"))[:1], SamplingParams(max_tokens=8, ignore_eos=True)
    run.batches = answer_questions(run.engine, run.requests, question, params)
    assert train_serve_check(run, 1)["depth_1_as_trained"] is None
