"""evals.train_throughput on a tiny shape: the figures add up."""

import json
from dataclasses import replace

import pytest

from eagle_train.hardware import computes_fp8
from eagle_train.training.cost.measured import StepPlan
from evals import train_throughput
from evals.bench.training_plan import beside_the_plan
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
    parts = {"  draft, forward": 0.3, "  draft, backward": 0.6, "draft and loss": 1.0, "optimiser": 0.1}
    found["parts_s"] |= parts
    plan = StepPlan({"target": 1.0, "loss": 0.2, "draft": 0.9, "optimiser": 0.0}, {}, 10)
    found = found | {"device": "cpu", "plan": beside_the_plan(found, plan, "cpu")}
    rows = {row["part"]: row["measured"] for row in found["plan"]["seconds"]}
    assert rows == pytest.approx({"target": 0.5, "loss": 0.1, "draft": 0.9, "optimiser": 0.1, "all": 1.2})
    on_gpu = replace(plan, memory={"target's weights": 20.0, "draft's activations": 70.0, "CUDA": 1.0})
    memory = beside_the_plan(found, on_gpu, "cuda")["bytes"]
    assert [(row["planned"], row["measured"]) for row in memory] == [(20, 10), (70, 90), (90, 100)]
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
    assert "the plan, of a step" in said
    assert all(row["planned"] > 0 for row in found["plan"]["seconds"] if row["part"] != "optimiser")  # AdamW's is none
    assert f"written to {out}" in said


@pytest.mark.parametrize("override", ["rounds=0", "row_tokens=128", "vocab=0", "device=tpu"])
def test_mistakes_are_one_line(tmp_path, capsys, override):
    assert call(train_throughput.main, f"out={tmp_path / 'x.json'}", override) == 2
    assert capsys.readouterr().err.startswith(f"error: {override}")


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["none", "fp8"])
def test_a_gpus_peak_memory_is_the_plans(tmp_path, quant):
    """Of a step large enough that what no plan counts, kernels' workspaces and gaps between blocks, is little of it."""
    if quant == "fp8" and not computes_fp8("cuda"):
        pytest.skip("this GPU has no FP8 products")
    out = tmp_path / "found.json"
    shape = ("vocab=32000", "hidden=1024", "intermediate=3072", "heads=8", "kv_heads=4", "layers=8", "draft_layers=3")
    size = ("row_tokens=2048", "micro_batch_rows=4", "tokens_per_step=16384", "rounds=1", "steps=2")
    given = (f"out={out}", "device=cuda", "naive=false", f"target_quant={quant}", *shape, *size)
    assert call(train_throughput.main, *given) == 0
    memory = {row["part"]: row["ratio"] for row in json.loads(out.read_text())["plan"]["bytes"]}
    assert memory["target's weights"] == pytest.approx(1, rel=0.05)
    assert memory["all, without CUDA's own"] == pytest.approx(1, rel=0.15)
