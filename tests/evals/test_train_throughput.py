"""evals/train_throughput.py on a tiny shape: both steps train, the products are all there, the figures add up."""

import json
from pathlib import Path

import pytest
import torch

from evals import train_throughput as bench
from evals.train_throughput import Config, Naive, Ours, Products
from tests.support.command_line import call, read_jsonl

SMALL = {"vocab": 64, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "layers": 2, "draft_layers": 1}
SIZES = {**SMALL, "row_tokens": 512, "micro_batch_rows": 1, "tokens_per_step": 1024, "rounds": 2, "steps": 1}


@pytest.fixture(scope="module")
def config() -> Config:
    return Config(out="", device="cpu", seed=0, tflops=None, **SIZES)


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("documents")
    bench.write_documents(path / "documents.jsonl", config)
    return str(path)


def test_documents_are_of_mixed_length_and_their_words_one_token_each(config, folder):
    tokenizer = bench.word_tokenizer(config.vocab)
    rows = [row["text"] for row in read_jsonl(Path(folder) / "documents.jsonl")]
    lengths = [len(tokenizer(row)["input_ids"]) for row in rows]
    assert lengths == [len(row.split()) for row in rows]
    assert (min(lengths), max(lengths)) == (bench.SHORTEST, pytest.approx(bench.LONGEST, rel=0.02))
    assert not any(0 in tokenizer(row)["input_ids"] for row in rows[:50])


def test_the_naive_step_fills_its_budget_with_padding_and_learns(config, folder):
    naive = Naive(config, folder, "cpu")
    tokens, mask = next(naive.batches)
    assert tokens.numel() <= config.tokens_per_step
    assert 0.3 < mask.float().mean() < 0.95
    before = naive.draft.fc.weight.clone()
    assert naive.run(1) > 0
    assert not torch.equal(before, naive.draft.fc.weight)


def test_our_steps_floor_holds_every_product_of_the_step(config, folder):
    ours = Ours(config, folder, "cpu")
    ours.run(1)
    inner = {"  draft, forward", "  draft, backward"}
    assert set(ours.seconds) == {"target", "draft and loss", "clip", "optimiser", "waiting for data"} | inner
    assert sum(ours.seconds[part] for part in inner) < ours.seconds["draft and loss"]
    weights = ours.draft.fc.weight.clone()
    assert min(ours.floor()) > 0
    assert torch.equal(weights, ours.draft.fc.weight)  # measured, not trained
    x, weight = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    with Products() as products:
        torch.nn.functional.linear(x, weight).sum().backward()
    assert [call.__name__ for call, _ in products.calls] == ["mm", "mm"]
    shapes = [[tuple(operand.shape) for operand in operands] for _, operands in products.calls]
    assert shapes[0] == [(6, 4), (4, 5)]
    assert {shape for operands in shapes[1:] for shape in operands} <= {(5, 6), (6, 4), (4, 6), (6, 5)}
    assert products.calls[0][1][1].stride() == weight.t().stride()
    products.replay()


def test_figures_are_medians_of_the_rounds_and_memory_the_first_ones():
    """Three rounds of two steps; the second is disturbed."""
    config = Config(out="", device="cpu", seed=0, tflops=None, **SIZES | {"steps": 2})

    def told(seconds: float, memory: int) -> dict:
        parts = {"target": seconds / 2, "waiting for data": seconds / 10}
        return {"seconds": [seconds * 0.4, seconds * 0.6], "tokens": 1000, "parts": parts, "memory": memory}

    rounds = {
        "ours": [told(2.0, 100), told(9.0, 700), told(2.0, 700)],
        "naive": [told(8.0, 400), told(40.0, 400), told(6.0, 500)],
    }
    floors = [[0.8, 1.9], [0.8, 1.9], [4.5, 9.0], [4.5, 0.1], [0.8, 1.9], [0.8, 1.9]]
    found = bench.figures(config, rounds, floors)
    assert found["ours"] == {"step_s": pytest.approx(1.2), "tokens_per_s": 500.0, "peak_memory": 100}
    assert found["naive"]["step_s"] == pytest.approx((3.6 + 4.8) / 2)
    assert found["memory_of_naive"] == 0.25
    assert found["faster_than_naive"] == pytest.approx(4.0)  # of 4, 40 / 9 and 3
    assert found["floor_s"] == 0.8  # the faster way's median
    assert found["step_over_floor"] == pytest.approx(1.5)
    assert found["parts_s"] == {"target": 0.5, "waiting for data": 0.1}
    assert found["data_wait"] == pytest.approx(0.1)


def test_the_command_writes_and_tells_its_figures(tmp_path, capsys):
    out = tmp_path / "found.json"
    assert call(bench.main, f"out={out}", "tflops=1", *(f"{key}={value}" for key, value in SIZES.items())) == 0
    found = json.loads(out.read_text())
    assert found["memory_of_naive"] == found["ours"]["peak_memory"] / found["naive"]["peak_memory"] > 0
    assert found["mfu"] == found["tflops_per_s"] > 0
    assert 0 <= found["data_wait"] < 1
    said = capsys.readouterr().out
    assert "times its products alone" in said
    assert f"written to {out}" in said


@pytest.mark.parametrize("override", ["rounds=0", "row_tokens=128", "vocab=0", "device=tpu"])
def test_mistakes_are_one_line(tmp_path, capsys, override):
    assert call(bench.main, f"out={tmp_path / 'x.json'}", override) == 2
    assert capsys.readouterr().err.startswith(f"error: {override}")
