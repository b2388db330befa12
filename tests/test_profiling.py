"""What is recorded: ranges, threads and operators of a real trace; memory by range; and the figures as text."""

import gzip
import json
import threading
from pathlib import Path

import pytest
import torch

from eagle_train import profiling
from eagle_train.errors import UserError
from eagle_train.profiling import MemoryPeaks, Profile, is_view, stage, text


def recorded(path: Path, work) -> Profile:
    profile = Profile("cpu")
    profile.start()
    work()
    profile.stop()
    profile.write(path)
    return profile


def events(path: Path) -> list[dict]:
    return [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]


def test_stages_are_ranges_of_the_profile_alone(tmp_path):
    """Also of a thread that began before it."""
    ready, go = threading.Event(), threading.Event()

    def beside() -> None:
        ready.set()
        go.wait()
        with stage("beside"):
            torch.ones(3).exp()

    thread = threading.Thread(target=beside)
    thread.start()
    ready.wait()
    with stage("before"):
        torch.ones(3)

    def work() -> None:
        with stage("draft"), stage("loss"):
            (torch.ones(20, 20) @ torch.ones(20, 20)).view(-1)
        go.set()
        thread.join()

    profile = recorded(tmp_path / "trace.json.gz", work)
    with stage("after"):
        torch.ones(3)
    found = events(tmp_path / "trace.json.gz")
    ranges = {event["name"]: event["tid"] for event in found if event["cat"] == "user_annotation"}
    assert ranges.keys() == {"profiled", "draft", "loss", "beside"}
    assert ranges["draft"] == ranges["loss"] != ranges["beside"]
    assert "aten::exp" in {event["name"] for event in found if event["tid"] == ranges["beside"]}
    figures = profile.figures(["draft", "loss", "beside"], "step", 1, undisturbed=0.25)
    assert {name: row["operations"] for name, row in figures["stages"].items()} == {
        "draft": 0,
        "loss": 3,
        "beside": 2,
        "rest": 0,
    }
    assert figures["operations_with_views_per_step"] == 6
    assert figures["steps"] == 1
    assert figures["step_ms"] > figures["stages"]["loss"]["host_ms"] > 0
    assert (figures["undisturbed_ms"], figures["busy_undisturbed"]) == (250, None)


def test_a_stage_costs_nothing_where_nothing_is_recorded():
    """No object is made: `with` enters the same one each time."""
    assert stage("draft") is stage("loss")
    with stage("draft"):
        pass


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/trace.json.gz: cannot be written"):
        recorded(tmp_path / "file" / "trace.json.gz", lambda: None)


def test_memory_is_of_the_innermost_range():
    """A GPU's counter, by hand: the most since the last reset, at which one byte is left."""
    most, found = [0], {}

    def allocate(number: int) -> None:
        most[0] = max(most[0], number)

    peaks = MemoryPeaks(lambda: most[0], lambda: most.__setitem__(0, 1), found)
    with peaks.stage("draft"):
        allocate(8)
        with peaks.stage("loss"):
            allocate(3)
        allocate(7)
    allocate(50)  # in no range
    with peaks.stage("loss"):
        allocate(4)
    assert found == {"draft": 8, "loss": 4}


@pytest.mark.gpu
def test_a_gpus_kernels_belong_to_the_stages_that_launched_them(tmp_path):
    """Those that autograd's thread launches, and a graph of two."""
    x, still = torch.randn(512, 512, device="cuda", requires_grad=True), torch.zeros(512, 512, device="cuda")
    (x @ x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        still @ still @ still
    profile = Profile("cuda")
    profile.start()
    with stage("draft"):
        (x @ x).sum().backward()
    with stage("target"):
        graph.replay()
    profile.stop()
    profile.write(tmp_path / "trace.json.gz")
    found = profile.figures(["draft", "target"], "step", 1, undisturbed=1.0)
    stages = found["stages"]
    assert found["device"] == "cuda"
    assert 0 < found["busy"] < 1
    assert found["busy_undisturbed"] == pytest.approx(found["device_ms"] / 1e3)
    assert stages["draft"]["launches"] >= 4  # a product and a sum, and two products of the backward pass
    assert (stages["target"]["launches"], stages["target"]["kernels"] >= 2) == (1, True)
    assert stages["rest"]["kernels"] == 0
    assert profile.memory["draft"] > x.nbytes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aten::view", True),
        ("aten::transpose", True),
        ("aten::mm", False),
        ("aten::copy_", False),
        ("aten::nothing", None),
        ("autograd::engine::evaluate_function: MmBackward0", None),
        ("MmBackward0", None),
        ("nowhere::view", None),
    ],
)
def test_views_are_told_from_operators_that_compute(name, said):
    assert is_view(name) is said


ROW = {"host_ms": 1.0, "device_ms": 2.0, "kernels": 3.0, "launches": 4.0, "operations": 5.0, "operations_with_views": 6}
GAPS = {"count": 1234, "total_ms": 1.5, "longest_ms": 0.7, "below_10_us": 1000, "below_100_us": 200, "below_1_ms": 34}
FOUND = {
    **{"device": "cuda", "rounds": 4, "round_ms": 12.5, "device_ms": 8.5, "busy": 0.68, "copying": 0.01},
    **{f"{name}_per_round": 70.0 + number for number, name in enumerate(profiling.COUNTS)},
    **{"gaps": {**GAPS, "longer": 0}, "stages": {"drafting": ROW}, "undisturbed_ms": 9.0, "busy_undisturbed": 0.944},
    "operators": [{"name": "k" * 90, "calls": 32.0, "self_ms": 0.125}],
}


def test_figures_of_a_gpu_as_text():
    lines = text(FOUND, "chain3", "round").splitlines()
    assert lines[0] == "chain3: 4 rounds, each 12.50 ms profiled and 9.00 without"
    assert lines[1] == "  GPU busy 68.0% of the time, and copying 1.0%; without a profiler busy 94.4%"
    lengths = "1,000 below 10 us, 200 below 100 us, 34 below 1 ms, 0 longer; the longest 0.700 ms"
    assert lines[2] == f"  1,234 gaps between them, 1.50 ms: {lengths}"
    assert lines[3].split("  ")[1] == "of a round"
    assert lines[4].split() == ["drafting", "1.00", "2.00", "3.0", "4.0", "5.0", "6.0"]
    assert lines[5].split() == ["all", "12.50", "8.50", "70.0", "71.0", "72.0", "73.0"]
    assert lines[7].split() == ["k" * 60, "32.0", "0.125"]
    assert len({len(line) for line in lines[3:6]}) == 1


def test_figures_of_a_cpu_as_text():
    lines = text({**FOUND, "device": "cpu", "busy_undisturbed": None}, "chain3", "round").splitlines()
    assert lines[1] == "  operators ran 68.0% of the time"
    assert lines[4].split() == ["drafting", "1.00", "5.0", "6.0"]
    assert lines[5].split() == ["all", "12.50", "72.0", "73.0"]
