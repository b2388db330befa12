"""A run on each device that is there, the CPU and a GPU, with each backend that a process alone can use: its losses."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import chats, metrics_without_times, write_jsonl
from tests.support.eval_inputs import make_home
from tests.support.trainers import assert_same

TRAIN = "from eagle_train.commands import train; train()"
FIGURES = ("loss", "l1", "ce", "grad_norm")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = make_home(tmp_path_factory.mktemp("devices"))
    write_jsonl(home / "chats.jsonl", chats(40))
    return home


def losses(home: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    """Of a run of four steps in a process of its own, in fp32."""
    given = [f"target={home}/target", "target.dtype=float32", "data=messages", f"data.path={home}/chats.jsonl"]
    given += ["data.row_tokens=64", "train.micro_batch_rows=1", "optim.tokens_per_step=128", "train.steps=4"]
    given += ["draft.num_layers=1", "optim.lr=1e-3", f"out={home}/{name}"]
    ran = subprocess.run([sys.executable, "-c", TRAIN, *given, *overrides], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [{key: row[key] for key in FIGURES} for row in metrics_without_times(home / name)]


@pytest.fixture(scope="module")
def on_a_cpu(home) -> list[dict[str, float]]:
    return losses(home, "cpu", "device=cpu")


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        ("cpu", ["parallel=fsdp2"]),
        pytest.param("cuda", [], marks=pytest.mark.gpu),
        pytest.param("cuda", ["parallel.compile=false"], marks=pytest.mark.gpu),
        pytest.param("cuda", ["parallel=fsdp2"], marks=pytest.mark.gpu),
    ],
    ids=lambda each: " ".join(each) or "as by default" if isinstance(each, list) else each,
)
def test_losses_are_those_of_a_cpu_alone(home, on_a_cpu, tmp_path, device, overrides):
    """On a GPU by its own kernels of loss and attention, compiled unless told, and over NCCL where there is a group."""
    found = losses(home, tmp_path.name, f"device={device}", *overrides)
    assert len(found) == len(on_a_cpu) == 4
    for one, other in zip(found, on_a_cpu, strict=True):
        assert_same(one, other, 1e-3 if device == "cuda" else 1e-5)
