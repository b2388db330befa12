"""What rounds took beside a copy of what they read."""

from types import SimpleNamespace

import pytest
import torch

from eagle_train.inference import EngineConfig
from eagle_train.models.draft_quantisation import Quant
from eagle_train.training.cost.estimate import ClusterConfig
from evals.bench.copy_bound import beside_the_copy_bound, text
from evals.bench.decoding_plan import DecodingPlan
from evals.bench.random_models import ShapesConfig
from tests.support.random_models_job import LLAMA

CELL = {"batch_size": 2, "context_length": 10}


def test_rounds_stand_beside_what_they_read():
    """A profile's round, which has no waits, comes before the breakdown's; quantised drafts and auto have none."""
    shapes = ShapesConfig(LLAMA, None, "float32")
    cluster = ClusterConfig(memory_tb_s=1e-6)
    plan = DecodingPlan(shapes.target, shapes.draft, torch.float32, 1, cluster, EngineConfig())
    drafters = {"chain2": ("chain2", Quant()), "chain2 fp8": ("chain2", Quant("fp8")), "auto": ("auto", Quant())}
    names = ["plain", *drafters]
    found = {
        "breakdown": [{**CELL, "decoding": name, "round_ms": 4e3} for name in names],
        "profiles": [{**CELL, "decoding": "chain2", "undisturbed_ms": 3e3}],
    }
    rows = beside_the_copy_bound(plan, SimpleNamespace(drafters=drafters), found)
    step, drafts = plan.validation(2, 10).bytes, plan.drafting(2, 10, 2).bytes
    assert [(row["decoding"], row["measured_ms"]) for row in rows] == [("plain", 4e3), ("chain2", 3e3)]
    assert [row["gb"] for row in rows] == pytest.approx([step / 1e9, (step + drafts) / 1e9])
    assert [row["bound_ms"] for row in rows] == pytest.approx([step / 1e3, (step + drafts) / 1e3])
    assert rows[0]["ratio"] == pytest.approx(4e6 / step)
    lines = text(rows, plan).splitlines()
    assert lines[0] == "a round, beside a copy of what each GPU reads at 1e-06 TB/s"
    assert lines[2].split()[:3] == ["2", "10", "plain"]
    assert len(lines) == 4
