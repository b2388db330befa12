"""Ranks and tokens per call: what a tree makes of ranks is what the engine makes of the tree."""

from pathlib import Path

import pytest
import torch

from eagle_train.artifacts.format import load_draft
from eagle_train.inference import Engine, SamplingParams, chain, full, pruned
from eagle_train.models.loading import TargetConfig, load_target
from evals.bench import contexts
from evals.bench.questions import Question
from evals.bench.statistics import Answer
from evals.bench.tree_search import Candidate, acceptance, ranks_of, tpc_of
from tests.support.eval_inputs import make_home

PROMPTS = [[5, 9, 60], [7], [100, 3, 200, 41, 8], [66, 120]]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("tune_trees"))


@pytest.mark.parametrize("tree", [chain(1), chain(3), full(2, 3), pruned(6, [[0.5, 0.3, 0.1]] * 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_trees_calls_are_the_engines(home, monkeypatch, tree, temperature):
    """At temperature 0 to the last call; sampled, a token is committed from the draft exactly when it was drafted."""
    target = load_target(TargetConfig(str(home / "target")), "cpu")
    draft = load_draft(home / "draft")
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=4)
    outputs = Engine(target, draft, tree).generate(PROMPTS, params)
    ranks = [
        ranks_of(target, draft, prompt, output.token_ids, 3, 3) for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    tokens, calls = (sum(getattr(o.stats, name) for o in outputs) for name in ("tokens", "calls"))
    assert 1.2 < tokens / calls < tree.max_depth + 0.9
    assert tpc_of(tree, ranks) == tokens / calls
    monkeypatch.setattr(contexts, "LEAST", 8)
    asked = [Question(number, number, None, [], ["?"]) for number in range(len(PROMPTS))]
    answers = [Answer(*each) for each in zip(asked, [1] * len(PROMPTS), PROMPTS, outputs, strict=True)]
    found = Candidate("it", tree, 1.0).about(answers, ranks, 40)["by_context"]
    assert [row["to"] for row in found] == [8, 16, 32, 40]
    # Behind an answer's end the engine knows of drafts what ranks do not.
    assert [_without(row) for row in found] == [_without(row) for row in contexts.by_context(answers, 40)]
    assert found[1]["acceptance_per_depth"] == contexts.by_context(answers, 40)[1]["acceptance_per_depth"]


def _without(row: dict) -> dict:
    return {key: value for key, value in row.items() if key != "acceptance_per_depth"}


def test_shares_by_depth_and_rank():
    ranks = [torch.tensor([[0, 1], [2, 0], [0, 0]]), torch.tensor([[1, 2]])]
    # Depth 0: ranks 0, 2, 0, 1, of which 2 is a miss; depth 1, of the three that held: 1, 0, 2.
    assert acceptance(ranks, 2, 2) == [[0.5, 0.25], [pytest.approx(1 / 3), pytest.approx(1 / 3)]]


def test_a_trees_tpc_by_hand():
    answer = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 2]])
    # chain2: root 0 takes one and stops (2 tokens), root 2 takes one and the answer ends after its own (2).
    assert tpc_of(chain(2), [answer]) == 2.0
    assert tpc_of(chain(0), [answer]) == 1.0
    # Two children a node: root 0 takes ranks 0 and 1 (3 tokens), root 3 misses (1).
    assert tpc_of(full(2, 2), [answer]) == 2.0
    assert tpc_of(chain(2), [torch.zeros(0, 2, dtype=torch.int64)]) == 1.0
