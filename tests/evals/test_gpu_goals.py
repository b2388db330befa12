"""evals.gpu_goals: what parts wrote, against the goals; what they did not write was not measured."""

import json
import sys
from typing import Any

import pytest

from evals import gpu_goals
from evals.bench.gpu_goals import GOALS


def training(step_s: float, tokens_per_s: float, mfu: float | None) -> dict[str, Any]:
    """Of steps of two micro-batches."""
    config = {"row_tokens": 2048, "micro_batch_rows": 4, "tokens_per_step": 16384}
    return {"ours": {"step_s": step_s, "tokens_per_s": tokens_per_s}, "mfu": mfu, "config": config}


def decoding(batch: int, context: int, plain: float, chain: float, drafting: float, **more: Any) -> dict[str, Any]:
    """Of these milliseconds."""
    cell = {"batch_size": batch, "context_length": context}
    rows = [{**cell, "decoding": "plain", "ttit_p50_s": plain / 1e3}, {**cell, "decoding": "chain3", "ttit_p50_s": 9.0}]
    stages = {**cell, "decoding": "chain3", "round_ms": chain, "stages_ms": {"drafting": drafting}}
    return {"rows": rows, "breakdown": [stages], **more}


def profiled(undisturbed: float, busy: float | None) -> list[dict[str, Any]]:
    cell = {"batch_size": 1, "context_length": 1024, "decoding": "chain3"}
    return [{**cell, "undisturbed_ms": undisturbed, "busy_undisturbed": busy}]


@pytest.fixture
def judged(tmp_path, monkeypatch, capsys):
    """Each goal's figures by its name, of what parts wrote, and what was said."""

    def run(**parts: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
        for name, found in parts.items():
            path = tmp_path / (f"{name}.json" if name in ("step", "fp8") else f"{name}/results.json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(found))
        out = tmp_path / "goals.json"
        monkeypatch.setattr(sys, "argv", ["gpu_goals", f"results={tmp_path}", f"out={out}"])
        assert gpu_goals.main() == 0
        rows = json.loads(out.read_text())["goals"]
        return {row["goal"]: row for row in rows}, capsys.readouterr().out.splitlines()[1:-1]

    return run


def test_nothing_was_measured_where_no_part_wrote(judged):
    rows, said = judged()
    assert [row["reached"] for row in rows.values()] == [None] * len(GOALS)
    assert said[0] == "not measured  training, a micro-batch of 8,192 tokens: at most 320 ms"
    assert all(line.startswith("not measured  ") for line in said)


def test_goals_are_reached_or_missed_by_a_share(judged):
    """The best part counts, a profile's round before one with waits, and contexts of 2k at most."""
    rows, said = judged(
        step=training(0.652, 25_018.0, 0.5355),
        fp8=training(0.517, 34_100.0, None),
        plain=decoding(1, 1024, 6.6, 12.0, 2.8, profiles=profiled(9.9, 0.95)),
        compiled=decoding(1, 1024, 6.0, 9.5, 2.9),
        batches=decoding(64, 2048, 21.0, 30.0, 9.0),
    )
    found = {name: (row["found"], row["part"], row["reached"]) for name, row in rows.items()}
    assert found == {
        "training, a micro-batch of 8,192 tokens": (pytest.approx(326), "step", False),
        "training, share of the FLOP/s": (pytest.approx(53.55), "step", False),
        "training": (25_018, "step", True),
        "training, target in FP8": (34_100, "fp8", True),
        "batch 1, a step of plain decoding": (pytest.approx(6.0), "compiled", True),
        "batch 1, a round of chain 3": (9.5, "compiled", False),
        "batch 1, the drafts of chain 3": (2.8, "plain", False),
        "batch 64, a step of plain decoding": (pytest.approx(21), "batches", False),
        "batch 1, chain 3: the GPU idle": (pytest.approx(5), "plain", True),
    }
    assert rows["batch 64, a step of plain decoding"]["off"] == pytest.approx(0.5)
    end = "21 ms (part batches), at most 14 ms, missed by 50%"
    assert f"missed        batch 64, a step of plain decoding: {end}" in said
    assert "reached       training: 25,018 tokens/s (part step), at least 25,000 tokens/s" in said


def test_rounds_of_a_profile_count_before_those_with_waits_and_long_contexts_do_not(judged):
    plain = decoding(1, 1024, 6.0, 9.5, 2.0, profiles=profiled(8.5, None))
    rows, _ = judged(plain=plain, compiled=decoding(1, 8192, 1.0, 1.0, 1.0))
    assert rows["batch 1, a round of chain 3"]["found"] == 8.5
    assert rows["batch 1, a step of plain decoding"]["found"] == pytest.approx(6.0)
    assert rows["batch 1, chain 3: the GPU idle"]["reached"] is None


def test_help_is_the_files_docstring(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_goals", "--help"])
    with pytest.raises(SystemExit):
        gpu_goals.main()
    assert capsys.readouterr().out == gpu_goals.__doc__.strip() + "\n"
