"""The two training steps on a tiny shape: both train, and all products of a step are recorded."""

import dataclasses
from pathlib import Path

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.ops import linear
from evals.bench import training_steps
from evals.bench.training_steps import Naive, Ours, Products, StepConfig
from tests.support.command_line import read_jsonl

SMALL = {"vocab": 64, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "layers": 2, "draft_layers": 1}
SIZES = {**SMALL, "row_tokens": 512, "micro_batch_rows": 1, "tokens_per_step": 1024, "rounds": 2, "steps": 1}


@pytest.fixture(scope="module")
def config() -> StepConfig:
    return StepConfig(
        out="", device="cpu", seed=0, tflops=None, compile=False, naive=True, target_quant="none", **SIZES
    )


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("documents")
    training_steps.write_documents(path / "documents.jsonl", config)
    return str(path)


def test_documents_are_of_mixed_length_and_their_words_one_token_each(config, folder):
    tokenizer = training_steps.word_tokenizer(config.vocab)
    rows = [row["text"] for row in read_jsonl(Path(folder) / "documents.jsonl")]
    lengths = [len(tokenizer(row)["input_ids"]) for row in rows]
    assert lengths == [len(row.split()) for row in rows]
    assert (min(lengths), max(lengths)) == (training_steps.SHORTEST, pytest.approx(training_steps.LONGEST, rel=0.02))
    assert not any(0 in tokenizer(row)["input_ids"] for row in rows[:50])


def test_the_naive_step_fills_its_budget_with_padding_and_learns(config, folder):
    naive = Naive(config, folder, "cpu")
    tokens, mask = next(naive.batches)
    assert tokens.numel() <= config.tokens_per_step
    assert 0.3 < mask.float().mean() < 0.95
    before = naive.draft.fc.weight.clone()
    assert naive.run(1) > 0
    assert not torch.equal(before, naive.draft.fc.weight)


def test_the_floor_has_every_product_of_the_step(config, folder):
    ours = Ours(config, folder, "cpu")
    ours.run(1)
    inner = {"  draft, forward", "  draft, backward"}
    assert set(ours.parts.seconds) == {"target", "draft and loss", "clip", "optimiser", "waiting for data"} | inner
    assert sum(ours.parts.seconds[part] for part in inner) < ours.parts.seconds["draft and loss"]
    weights = ours.draft.fc.weight.clone()
    assert min(ours.floor()) > 0
    assert torch.equal(weights, ours.draft.fc.weight)  # measured, not trained
    x, weight = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    with Products() as products:
        torch.nn.functional.linear(x, weight).sum().backward()
    assert [call.__name__ for call, *_ in products.calls] == ["mm", "mm"]
    shapes = [[tuple(operand.shape) for operand in operands] for _, operands, _ in products.calls]
    assert shapes[0] == [(6, 4), (4, 5)]
    assert {shape for operands in shapes[1:] for shape in operands} <= {(5, 6), (6, 4), (4, 6), (6, 5)}
    assert products.calls[0][1][1].stride() == weight.t().stride()
    products.replay()


def test_the_floor_of_a_step_in_fp8_has_its_products(config, folder, monkeypatch):
    """As on a GPU that has them; a CPU computes them too, if slowly."""
    monkeypatch.setattr(linear, "computes_fp8", lambda device: True)
    with pytest.warns(UserWarning, match="target_quant=fp8"):
        ours = Ours(dataclasses.replace(config, target_quant="fp8"), folder, "cpu")
    ours.run(1)
    batch = ours.trainer.lookahead.to_device(next(ours.stream))
    with Products() as products:
        training_steps.target_states(ours.target, batch)
    low = [call.__name__ for call, *_ in products.calls].count("_scaled_mm")
    assert low == config.layers * 7
    products.replay()
    with pytest.raises(UserError, match=r"^train\.target_quant=fp4: must be none or fp8"):
        dataclasses.replace(config, target_quant="fp4")
