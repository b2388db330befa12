"""The keys of sampling that commands share: as SamplingParams has them, and each read."""

import re
from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from eagle_train import generate
from eagle_train.inference import SamplingParams
from eagle_train.inference.requests.sampling_keys import KEYS, changed
from eagle_train.settings import CONF_DIR
from tests.support.command_line import call, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    root = tmp_path_factory.mktemp("target")
    save_target(root)
    return root


def test_the_keys_have_the_defaults_of_sampling_params():
    values = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "sampling/default.yaml"))
    assert tuple(values) == KEYS
    assert values == {each.name: each.default for each in fields(SamplingParams) if each.name in KEYS}
    assert changed(values) == {}
    assert changed({**values, "min_p": 0.1, "top_k": 3}, "top_k") == {"min_p": 0.1}


def test_several_answers_come_one_after_the_other_with_their_log_probabilities(target, capsys):
    given = [f"target={target}", "prompt=abc", "max_tokens=4", "device=cpu", "color=never", "temperature=1"]
    single = []
    for seed in (3, 4):
        assert call(generate.main, *given, f"seed={seed}") == 0
        single.append(capsys.readouterr().out)
    assert single[0] != single[1]
    assert call(generate.main, *given, "seed=3", "n=2") == 0
    out, err = capsys.readouterr()
    assert out == "".join(single)
    assert err.count(" tokens (") == 2
    assert call(generate.main, *given, "seed=3", "logprobs=1") == 0
    text, *lines = capsys.readouterr().out.removeprefix(single[0].rstrip("\n")).splitlines()
    assert text == ""
    assert 1 <= len(lines) <= 4
    assert all(re.fullmatch(r"'.*' -\d+\.\d{4}  \('.*' -\d+\.\d{4}\)", line) for line in lines)


@pytest.mark.parametrize("given", ["min_p=2", "logit_bias={5: 101}", "min_tokens=5", "n=0", "presence_penalty=3"])
def test_a_value_that_cannot_be_is_refused_before_the_target_is_read(given, capsys):
    assert call(generate.main, "target=/nowhere", "prompt=abc", "max_tokens=4", given) == 2
    assert f"error: {given.partition('=')[0]}=" in capsys.readouterr().err
