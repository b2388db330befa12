"""evals.loss_times on a CPU: each loss and chunk by torch's products, and by the kernel where the device has it."""

import json
import sys

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.ops import kernels
from evals import loss_times

SMALL = ["rows=32", "vocab=64", "hidden=16", "device=cpu", "chunks=[8,32]", "repeats=1"]


def test_each_loss_is_timed_by_chunk(tmp_path, monkeypatch, capsys):
    out = tmp_path / "loss.json"
    monkeypatch.setattr(sys, "argv", ["loss_times", *SMALL, f"out={out}"])
    assert loss_times.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["loss"], row["way"], row["chunk_rows"]) for row in rows] == [
        (kind, "plain", chunk) for kind in ("ce", "lk") for chunk in (8, 32)
    ]
    assert all(row["ms"] > 0 and row["bytes"] is None for row in rows)
    assert capsys.readouterr().out.count("rows a chunk") == 4


def test_the_kernel_is_left_out_where_the_plain_way_is_timed(monkeypatch):
    seen: list[bool] = []
    monkeypatch.setattr(loss_times, "is_fused_loss", lambda logits, kind: True)
    monkeypatch.setattr(loss_times, "_step", lambda *_: seen.append(kernels.is_plain("loss")))
    config = loss_times.Config(rows=2, vocab=8, hidden=4, dtype="float32", chunks=[2], kinds=["ce"], repeats=1)
    rows = loss_times.measure(config, "cpu")
    assert [row["way"] for row in rows] == ["fused", "plain"]
    half = len(seen) // 2
    assert seen == [False] * half + [True] * half


@pytest.mark.gpu
def test_the_kernel_is_faster_and_takes_less_memory():
    config = loss_times.Config(hidden=1024, chunks=[1024], kinds=["ce"], repeats=3)
    fused, plain = loss_times.measure(config, "cuda")
    assert (fused["way"], plain["way"]) == ("fused", "plain")
    assert fused["ms"] < plain["ms"]
    assert 0 < fused["bytes"] < plain["bytes"]
    torch.cuda.empty_cache()


@pytest.mark.parametrize("given", [{"rows": 0}, {"chunks": []}, {"kinds": ["l1"]}, {"dtype": "auto"}])
def test_mistakes_are_one_line(given):
    with pytest.raises(UserError, match=f"^{next(iter(given))}="):
        loss_times.Config(**given)
