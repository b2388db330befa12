"""evals.gating: which requests have good drafts, shares of the best fixed choice, and the whole command."""

import json

import pytest

from eagle_train.inference import Engine, SamplingParams
from evals import gating
from evals.bench.choosing import LOADS, ROUNDS, OfGoodRequests, raced, spread
from evals.bench.requests import TimedRequest
from evals.bench.session import Session
from evals.gating import compared
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home
from tests.support.tiny import shared_target, tiny_draft


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("gating"))


def test_each_loads_good_requests():
    batch = [TimedRequest(None, [1], SamplingParams(max_tokens=100)) for _ in range(5)]
    good = {load: [each.params.seed % 2 for each in spread(batch, LOADS[load])] for load in LOADS}
    assert good == {"noise": [0] * 5, "half": [1, 0, 1, 0, 1], "good": [1] * 5, "own": [1] * 5}
    assert len({each.params.seed for each in spread(batch, 2)}) == 5


def test_answers_end_at_different_times():
    batch = [TimedRequest(None, [1], SamplingParams(max_tokens=80)) for _ in range(40)]
    lengths = sorted(each.params.max_tokens for each in spread(batch, 1))
    assert lengths == pytest.approx([20 + 1.5 * place for place in range(40)], abs=5)
    assert len(set(lengths)) > 30, "none ends with another"
    for first in (0, 1):  # those with good drafts, and those without
        own = sorted(each.params.max_tokens for each in spread(batch, 2)[first::2])
        assert own == pytest.approx([20 + 3 * place for place in range(20)], abs=8)
    assert spread([TimedRequest(None, [1], SamplingParams(max_tokens=2))], 1)[0].params.max_tokens == 2


def test_engines_take_turns_of_some_rounds(monkeypatch):
    """All are counted from their requests' arrival to their last step, and for their own steps alone."""
    target, stepped, now = shared_target("llama"), [], [0.0]
    acceptance = OfGoodRequests([1.0] * 3)
    engines = {
        "plain": Engine(target, acceptance=acceptance),
        "chain3": Engine(target, tiny_draft(target), "chain3", acceptance=acceptance),
    }
    own, seconds = Engine.step, {"plain": 2.0, "chain3": 5.0}

    def step(self):
        stepped.append(next(name for name, engine in engines.items() if engine is self))
        now[0] += seconds[stepped[-1]]
        return own(self)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr("evals.bench.choosing.time.perf_counter", lambda: now[0])
    found = raced(engines, [TimedRequest(None, [1, 2], SamplingParams(max_tokens=101, ignore_eos=True, seed=1))])
    # The first step prefills, and samples a token; then a round has four with drafts.
    assert ROUNDS % 4 == 0
    drafted = ROUNDS // 4 + 1
    assert stepped[: ROUNDS + drafted + 3] == [*["plain"] * ROUNDS, *["chain3"] * drafted, *["plain"] * 3]
    assert (stepped.count("plain"), stepped.count("chain3")) == (101, 26)
    assert found == {"plain": 101 / (101 * 2.0), "chain3": 101 / (26 * 5.0)}


class Config:
    tree = "chain3"


def test_shares_are_of_the_best_fixed_choice_of_each():
    found = {"plain": [10.0, 10.0], "chain3": [8.0, 8.0], "chain1": [20.0, 16.0]}
    found |= {"gate": [9.0, 9.0], "auto": [18.0, 16.0]}
    row = compared(found, Config())
    assert row["gate"] == {"best": "plain", "share": pytest.approx(0.9), "interval": None}
    assert row["auto"] == {"best": "chain1", "share": pytest.approx(0.95), "interval": None}


def test_the_whole_command(home, tmp_path, capsys, monkeypatch):
    """With the choices' rounds: noise commits one token a round, and good drafts more, whatever the draft is."""
    out = tmp_path / "out"
    simulated, engine = list[bool](), Session.engine

    def noted(self, *given, acceptance, **options):
        simulated.append(acceptance is not None)
        return engine(self, *given, acceptance=acceptance, **options)

    monkeypatch.setattr(Session, "engine", noted)
    few = ["batch_sizes=[2]", "repeats=1", "settle=0", "max_tokens=6", "others=[chain1]", f"out={out}"]
    assert call(gating.main, *arguments(home), *few) == 0
    told = capsys.readouterr().out
    assert "gate / best" in told
    assert "| --- |" not in told  # columns are wide enough for what stands in them
    found = json.loads((out / "results.json").read_text())
    assert [(row["batch_size"], row["load"]) for row in found["rows"]] == [(2, load) for load in LOADS]
    assert all(set(row["tokens_per_s"]) == {"plain", "chain3", "chain1", "gate", "auto"} for row in found["rows"])
    assert found["left"] == 0
    assert simulated == [True] * 15 + [False] * 5  # five engines a load, the last with the draft's own acceptance
    assert "every second request" in (out / "report.md").read_text()
    assert "Rows still to come: 2." in gating.markdown(found | {"left": 2})


def test_other_drafters_are_measured_by_their_own_acceptance(home, tmp_path):
    """Without draft=; a draft that is not given is one line."""
    few = ["batch_sizes=[2]", "repeats=1", "settle=0", "max_tokens=6", "others=[]", f"out={tmp_path}"]
    own = [f"target.path={home}/target", f"questions={home}/questions.jsonl", *few]
    assert call(gating.main, *own, "drafter=ngram", "temperature=1") == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["load"] for row in found["rows"]] == ["own"]
    assert found["drafter"] == "ngram"
    assert "make_ngram" in (text := (tmp_path / "report.md").read_text())
    assert "temperature 1" in text


def test_good_requests_alone_are_accepted():
    """Rows without a drafter, or with an even seed, commit one token a round."""
    target = shared_target("llama")
    engine = Engine(target, tiny_draft(target), "chain3", acceptance=OfGoodRequests([1.0] * 3))
    cases = [(1, None), (2, None), (1, "none")]
    params = [SamplingParams(max_tokens=9, ignore_eos=True, seed=seed, drafter=name) for seed, name in cases]
    outputs = engine.generate([[1, 2, 3]] * len(cases), params)
    assert [output.rounds for output in outputs] == [[4, 4], [1] * 8, [1] * 8]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("acceptance=1", "acceptance=1.0: must be between 0 and 1"),
        ("draft.path=null", "draft is needed: give draft=DIR, or drafter=ngram, say"),
        ("repeats=0", "repeats=0: must be at least 1"),
        ("min_tokens=9", "min_tokens=9: no answer ends early here; leave it out"),
        ("others=[chain9]", "tree=chain9: must be from 1 to 7 deep"),
    ],
)
def test_a_mistake_is_one_line(home, tmp_path, capsys, given, said):
    assert call(gating.main, *arguments(home), f"out={tmp_path}", given) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
