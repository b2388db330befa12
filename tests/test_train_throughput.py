"""evals/train_throughput.py on a tiny shape: both steps train, the products are all there, the figures add up."""

import json
from pathlib import Path

import pytest
import torch
from command_line import call, read_jsonl

from evals import train_throughput as bench
from evals.train_throughput import Config, Naive, Ours, Products

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
    assert set(ours.seconds) == {"target", "draft, forward", "loss", "draft, backward", "clip", "optimiser"}
    weights = ours.draft.fc.weight.clone()
    assert ours.floor() > 0
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


def test_the_command_writes_and_tells_its_figures(tmp_path, capsys):
    out = tmp_path / "found.json"
    assert call(bench.main, f"out={out}", "tflops=1", *(f"{key}={value}" for key, value in SIZES.items())) == 0
    found = json.loads(out.read_text())
    ours, naive = found["ours"], found["naive"]
    assert found["faster_than_naive"] == pytest.approx(ours["tokens_per_s"] / naive["tokens_per_s"], rel=0.5)
    assert found["memory_of_naive"] == pytest.approx(ours["peak_memory"] / naive["peak_memory"])
    assert found["mfu"] == pytest.approx(found["tflops_per_s"])
    assert 0 <= found["data_wait"] < 1
    said = capsys.readouterr().out
    assert "times its products alone" in said
    assert f"written to {out}" in said


@pytest.mark.parametrize("override", ["rounds=0", "row_tokens=128", "vocab=0", "device=tpu"])
def test_mistakes_are_one_line(tmp_path, capsys, override):
    assert call(bench.main, f"out={tmp_path / 'x.json'}", override) == 2
    assert capsys.readouterr().err.startswith(f"error: {override}")
