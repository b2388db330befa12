"""evals.layer_skip: the agreement of a set of layers is what an engine accepts, and the YAML is read by the drafter."""

import json

import pytest
from omegaconf import OmegaConf

from eagle_train import generate
from eagle_train.inference import Engine, LayerSkip, SamplingParams
from evals import layer_skip
from evals.bench.layer_search import Found, Judge, search
from tests.support.command_line import call
from tests.support.eval_inputs import make_home
from tests.support.reference_answers import GREEDY, PROMPTS
from tests.support.tiny import tiny_target


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_agreement_is_what_an_engine_accepts(family):
    """At every place of the answers, by a round that begins there. Also of sets with gaps, and within windows."""
    target = tiny_target(family)
    outputs = Engine(target).generate(PROMPTS[:3], GREEDY)
    texts = [(prompt, output.token_ids) for prompt, output in zip(PROMPTS, outputs, strict=False)]
    judge, few = Judge(target, texts, depth=4), SamplingParams(max_tokens=3, ignore_eos=True)
    begun = [prompt + answer[:place] for prompt, answer in texts for place in range(len(answer) - 1)]
    for layers in ((0, 1), (0, 2), (1, 2), (0, 1, 2)):
        rounds = [each.rounds[0] for each in Engine(target, LayerSkip(target, layers), "chain1").generate(begun, few)]
        assert judge(layers).agreement == pytest.approx(rounds.count(2) / len(rounds))


def test_what_a_set_costs_and_brings():
    """All layers draft everything right, each at the cost of the target: nothing is gained."""
    target = tiny_target()
    found = Judge(target, [(PROMPTS[0], Engine(target).generate(PROMPTS[:1], GREEDY)[0].token_ids)], 3)((0, 1, 2))
    assert (found.agreement, found.cost, found.speedup) == (1.0, pytest.approx(1.0), pytest.approx(1.0))


def test_the_search_tries_beginnings_and_then_steps_of_one_layer():
    asked = []

    def judge(layers: tuple[int, ...]) -> Found:
        asked.append(layers)
        return Found(layers, 0.5, 0.5, 1, -len(set(layers) ^ {0, 3, 4}))

    found = search(judge, 6)
    assert found[0].layers == (0, 3, 4)
    assert asked[:5] == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)]
    assert len(set(asked)) == len(asked) < 2**6 - 1
    assert [each.speedup for each in found] == sorted((each.speedup for each in found), reverse=True)


def test_the_command_writes_what_the_drafter_reads(tmp_path, capsys):
    home = make_home(tmp_path)
    given = [f"target={home}/target", f"questions={home}/questions.jsonl", "max_tokens=8", "device=cpu"]
    assert call(layer_skip.main, *given, f"out={home}/out") == 0
    assert "drafter.layers=" in capsys.readouterr().out
    tried = json.loads((home / "out" / "layer_skip.json").read_text())["tried"]
    assert OmegaConf.load(home / "out" / "layers.yaml").layers == tried[0]["layers"]
    given = [f"target={home}/target", "prompt=abc", "max_tokens=8", "device=cpu", "drafter=layer_skip"]
    assert call(generate.main, *given, f"drafter.layers={home}/out/layers.yaml") == 0


def test_the_answers_are_sampled_as_is_asked(tmp_path, capsys):
    """With this bias every answer is one token, again and again."""
    home, shares = make_home(tmp_path), []
    given = [f"target={home}/target", f"questions={home}/questions.jsonl", "max_tokens=16", "depth=1", "device=cpu"]
    for bias in ("null", "{5: 100}"):
        assert call(layer_skip.main, *given, f"logit_bias={bias}", f"out={home}/out") == 0
        shares.append(json.loads((home / "out" / "layer_skip.json").read_text())["looping_answers"])
    assert shares[0] < shares[1] == 1
