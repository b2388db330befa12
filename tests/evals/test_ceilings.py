"""evals.ceilings on a tiny shape: its rates are those of its own times, and its matrices are the target's."""

import json

import pytest
import torch

from eagle_train.ops import head_argmax
from evals import ceilings
from evals.bench.random_models import ShapesConfig, random_target
from tests.support.command_line import call

QWEN = {"model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}


def test_rates_are_those_of_the_times(tmp_path, capsys):
    out = tmp_path / "found.json"
    assert call(ceilings.main, f"out={out}", "shapes=tiny", "device=cpu", "rows=[1,5]", "copied_mb=4", "repeats=3") == 0
    found = json.loads(out.read_text())
    assert found["copy_gb_per_s"] > 0
    assert found["launch_us"] > 0
    assert {one["rows"] for one in found["products"]} == {1, 5}
    assert found["most_likely"] == []  # a CPU has no kernel for it
    for one in found["products"]:
        (outputs, inputs), seconds = one["shape"], one["ms"] / 1e3
        assert one["tflops"] == pytest.approx(2 * one["rows"] * outputs * inputs / seconds / 1e12)
        assert one["gb_per_s"] == pytest.approx(outputs * inputs * 4 / seconds / 1e9)
    assert f"written to {out}" in capsys.readouterr().out


def test_the_most_likely_token_is_timed_where_the_device_has_a_kernel(tmp_path, capsys, monkeypatch):
    """With it, and without; of more rows than it takes nothing is."""
    calls, out = [], tmp_path / "found.json"

    def kernel(hidden, weight):
        calls.append(tuple(hidden.shape))
        return (hidden @ weight.T).max(-1, keepdim=True)

    monkeypatch.setattr(head_argmax, "_runs_on", lambda device: True)
    monkeypatch.setattr(head_argmax, "DTYPES", (torch.float32,))
    monkeypatch.setattr(head_argmax, "head_argmax", kernel)
    given = [f"out={out}", "shapes=tiny", "device=cpu", "rows=[1,64,65]", "copied_mb=4", "repeats=3"]
    assert call(ceilings.main, *given) == 0
    found = json.loads(out.read_text())
    vocabulary, inputs = next(one["shape"] for one in found["products"] if one["matrix"] == "LM head")
    assert [one["rows"] for one in found["most_likely"]] == [1, 64]
    assert calls == [(1, inputs)] * 6 + [(64, inputs)] * 6
    for one in found["most_likely"]:
        assert one["gb_per_s"] == pytest.approx(vocabulary * inputs * 4 / one["ms"] / 1e6)
        assert one["by_logits_ms"] > 0
    assert "likeliest       64 rows" in capsys.readouterr().out


def test_the_matrices_are_those_of_the_target():
    shape = ShapesConfig(QWEN | HEADS, None, "float32").target
    matrices = ceilings.matrices(shape)
    model = random_target(shape, torch.float32, "cpu").model
    layer, head = model.model.layers[0], model.lm_head.weight
    beside = {
        "qkv": [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        "o": [layer.self_attn.o_proj],
        "gate and up": [layer.mlp.gate_proj, layer.mlp.up_proj],
        "down": [layer.mlp.down_proj],
    }
    expected = {name: tuple(torch.cat([each.weight for each in group]).shape) for name, group in beside.items()}
    assert matrices == expected | {"LM head": tuple(head.shape)}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rows=[]", "rows=[]: must be numbers from 1 on"),
        ("repeats=0", "repeats=0: must be at least 1"),
        ("questions=x.jsonl", "questions: leave it out"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, override, said):
    assert call(ceilings.main, f"out={tmp_path / 'x.json'}", "shapes=tiny", "device=cpu", override) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
