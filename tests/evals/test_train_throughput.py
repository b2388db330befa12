"""evals.train_throughput on a tiny shape: the figures add up."""

import json

import pytest

from evals import train_throughput
from evals.bench.training_steps import StepConfig
from tests.support.command_line import call

SMALL = {"vocab": 64, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "layers": 2, "draft_layers": 1}
SIZES = {**SMALL, "row_tokens": 512, "micro_batch_rows": 1, "tokens_per_step": 1024, "rounds": 2, "steps": 1}
BOTH = {"compile": False, "naive": True, "target_quant": "none"}


def test_figures_are_medians_of_the_rounds_and_memory_the_first_ones():
    """Three rounds of two steps; the second round is disturbed."""
    config = StepConfig(out="", device="cpu", seed=0, tflops=None, **BOTH, **SIZES | {"steps": 2})

    def results(seconds: float, memory: int) -> dict:
        parts = {"target": seconds / 2, "waiting for data": seconds / 10}
        return {"seconds": [seconds * 0.4, seconds * 0.6], "tokens": 1000, "parts": parts, "memory": memory}

    rounds = {
        "ours": [results(2.0, 100), results(9.0, 700), results(2.0, 700)],
        "naive": [results(8.0, 400), results(40.0, 400), results(6.0, 500)],
    }
    floors = [[0.8, 1.9], [0.8, 1.9], [4.5, 9.0], [4.5, 0.1], [0.8, 1.9], [0.8, 1.9]]
    found = train_throughput.figures(config, rounds, floors)
    assert found["ours"] == {"step_s": pytest.approx(1.2), "tokens_per_s": 500.0, "peak_memory": 100}
    assert found["naive"]["step_s"] == pytest.approx((3.6 + 4.8) / 2)
    assert found["memory_of_naive"] == 0.25
    assert found["faster_than_naive"] == pytest.approx(4.0)  # of 4, 40 / 9 and 3
    assert found["floor_s"] == 0.8  # the faster way's median
    assert found["step_over_floor"] == pytest.approx(1.5)
    assert found["parts_s"] == {"target": 0.5, "waiting for data": 0.1}
    assert found["data_wait"] == pytest.approx(0.1)
    found = found | {"device": "cpu"}
    found["ours"]["peak_memory"] = 3 * 2**20  # no tenth of a GiB
    assert train_throughput.text(found).splitlines()[0].endswith("500 tokens/s      3.0 MiB at most")


def test_the_command_writes_and_prints_its_figures(tmp_path, capsys):
    out = tmp_path / "found.json"
    assert (
        call(train_throughput.main, f"out={out}", "tflops=1", *(f"{key}={value}" for key, value in SIZES.items())) == 0
    )
    found = json.loads(out.read_text())
    assert found["memory_of_naive"] == found["ours"]["peak_memory"] / found["naive"]["peak_memory"] > 0
    assert found["mfu"] == found["tflops_per_s"] > 0
    assert 0 <= found["data_wait"] < 1
    said = capsys.readouterr().out
    assert "times its products alone" in said
    assert f"written to {out}" in said


@pytest.mark.parametrize("override", ["rounds=0", "row_tokens=128", "vocab=0", "device=tpu"])
def test_mistakes_are_one_line(tmp_path, capsys, override):
    assert call(train_throughput.main, f"out={tmp_path / 'x.json'}", override) == 2
    assert capsys.readouterr().err.startswith(f"error: {override}")
