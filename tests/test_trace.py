"""What is told of a trace: by hand, on made-up traces of a GPU with two streams, a graph, threads, and of a CPU."""

import pytest

from eagle_train import trace

VIEWS = {"aten::view": True, "aten::t": True, "aten::mm": False, "aten::to": True, "aten::copy_": False}


def event(category: str, name: str, start: float, end: float, thread: object = 1, **given: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread, "args": given}


def launch(number: int, start: float, thread: int = 1) -> dict:
    return event("cuda_runtime", "cudaLaunchKernel", start, start + 2, thread, correlation=number)


def kernel(number: int, start: float, end: float, stream: int = 7, name: str = "k") -> dict:
    return event("kernel", name, start, end, stream, correlation=number, stream=stream)


def told(events: list[dict], units: int = 1, stages: tuple[str, ...] = ("draft", "loss")) -> dict:
    window = event("user_annotation", trace.WINDOW, 0, 10_000)
    return trace.figures([{"ph": "M", "name": "process_name"}, window, *events], stages, units, VIEWS.get)


GPU = [
    event("user_annotation", "draft", 100, 1000),
    event("user_annotation", "loss", 400, 600),
    event("user_annotation", "other", 450, 460),  # of nobody's asking
    event("cpu_op", "aten::mm", 110, 130),
    launch(1, 120),
    event("cpu_op", "aten::to", 410, 440),
    event("cpu_op", "aten::copy_", 415, 435),
    launch(2, 420),
    launch(3, 700, thread=2),  # autograd's thread, while `draft` is open
    launch(4, 2000),  # a graph of two kernels, in no stage
    kernel(1, 1000, 3000),
    kernel(2, 2000, 4000, stream=8),  # overlaps the one before
    kernel(3, 4005, 5000),  # after a gap of 5
    kernel(4, 5050, 5060, name="in the graph"),  # of 50
    kernel(4, 5560, 6000, name="in the graph"),  # of 500
    kernel(9, 9900, 20_000, name="late"),  # of 3,900; its launch was not recorded, and it runs on after the window
    event("gpu_memcpy", "Memcpy", 9000, 9500, 7),
]


def test_a_gpu_is_busy_while_a_kernel_runs_on_any_stream():
    found = told(GPU)
    busy = 3000 + 995 + 10 + 440 + 100
    assert found["device"] == "cuda"
    assert found["busy"] == pytest.approx(busy / 10_000)
    assert found["device_ms"] == pytest.approx(busy / 1e3)
    assert found["copying"] == pytest.approx(0.05)
    assert found["unit_ms"] == pytest.approx(10)


def test_gaps_are_between_kernels_and_counted_by_length():
    lengths = {"below_10_us": 1, "below_100_us": 1, "below_1_ms": 1, "longer": 1}
    assert told(GPU)["gaps"] == {"count": 4, "total_ms": 4.455, "longest_ms": 3.9, **lengths}
    edges = trace.gaps([(0, 1), (11, 12), (112, 113), (1113, 1114)])
    assert edges == {"count": 3, "total_ms": 1.11, "longest_ms": 1.0} | dict(zip(lengths, (0, 1, 1, 1), strict=True))
    assert trace.gaps([(0, 1)])["count"] == trace.gaps([])["longest_ms"] == 0


def test_kernels_belong_to_the_innermost_stage_that_launched_them():
    stages = told(GPU)["stages"]
    assert [*stages] == ["draft", "loss", "rest"]
    assert {name: row["kernels"] for name, row in stages.items()} == {"draft": 2, "loss": 1, "rest": 3}
    assert {name: row["launches"] for name, row in stages.items()} == {"draft": 2, "loss": 1, "rest": 2}
    assert stages["draft"]["device_ms"] == pytest.approx((2000 + 995) / 1e3)
    assert stages["loss"]["device_ms"] == pytest.approx(2)
    assert stages["rest"]["device_ms"] == pytest.approx((10 + 440 + 100) / 1e3)


def test_the_hosts_time_is_the_innermost_stages():
    stages = told(GPU)["stages"]
    assert {name: row["host_ms"] for name, row in stages.items()} == pytest.approx(
        {"draft": 0.7, "loss": 0.2, "rest": 9.1}
    )


def test_figures_are_of_one_round():
    one, two = told(GPU), told(GPU, units=2)
    for name in ("unit_ms", "device_ms", *trace.COUNTS):
        assert two[name] == pytest.approx(one[name] / 2)
    assert two["stages"]["draft"]["host_ms"] == pytest.approx(0.35)
    assert two["operators"][0]["self_ms"] == pytest.approx(one["operators"][0]["self_ms"] / 2)
    assert (two["busy"], two["gaps"], two["units"]) == (one["busy"], one["gaps"], 2)


def test_kernels_are_their_operators_or_their_own():
    rows = [(row["name"], row["calls"], row["self_ms"]) for row in told(GPU)["operators"]]
    kernels = [("aten::copy_", 1, 2.0), ("aten::mm", 1, 2.0), ("k", 1, 0.995), ("in the graph", 2, 0.45)]
    assert rows == [*kernels, ("late", 1, 0.1)]


def test_ten_operators_are_named_at_most():
    many = [kernel(100 + number, 100 * number, 100 * number + 10 + number, name=f"k{number}") for number in range(12)]
    assert [row["name"] for row in told(many)["operators"]] == [f"k{number}" for number in range(11, 1, -1)]


CPU = [
    event("user_annotation", "draft", 0, 4000),
    event("user_annotation", "target", 0, 5000, thread=2),
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0, 2000),  # no operator
    event("cpu_op", "aten::to", 100, 1100),  # it copies, so it computes
    event("cpu_op", "aten::copy_", 200, 1000),
    event("cpu_op", "aten::t", 1100, 1200),
    event("cpu_op", "aten::view", 1100, 1150),
    event("cpu_op", "aten::mm", 1500, 2500, thread=2),
    event("cpu_op", "aten::mm", 2000, 4000),
    event("cpu_op", "aten::mm", 2100, 2200),  # within the other
    event("cpu_op", "aten::mm", 3000, 4500, thread=3),  # a helper of `draft`
    event("cpu_op", "aten::mm", 6000, 7000),
    event("cpu_op", "aten::mm", 11_000, 12_000),  # after the window
]


def test_a_cpus_operators_on_all_threads():
    found = told(CPU, stages=("draft", "target", "optimiser"))
    assert found["device"] == "cpu"
    assert found["busy"] == pytest.approx((1100 + 3000 + 1000) / 10_000)
    assert found["gaps"]["total_ms"] == pytest.approx(0.3 + 1.5)
    assert (found["operations"], found["operations_with_views"]) == (5, 6)
    assert (found["kernels"], found["launches"], found["copying"]) == (0, 0, 0)
    stages = found["stages"]
    assert {name: row["operations"] for name, row in stages.items()} == {
        "draft": 3,
        "target": 1,
        "optimiser": 0,
        "rest": 1,
    }
    assert {name: row["operations_with_views"] for name, row in stages.items()}["draft"] == 4
    assert {name: row["host_ms"] for name, row in stages.items()} == {
        "draft": 4,
        "target": 5,
        "optimiser": 0,
        "rest": 6,
    }
    assert stages["draft"]["device_ms"] == pytest.approx(1.1 + 2.5)


def test_a_cpus_operators_by_their_own_time():
    rows = [(row["name"], row["calls"], row["self_ms"]) for row in told(CPU)["operators"]]
    assert rows == [
        ("aten::mm", 5, pytest.approx(1 + 2 + 1.5 + 1)),
        ("aten::copy_", 1, pytest.approx(0.8)),
        ("aten::to", 1, pytest.approx(0.2)),
        ("aten::t", 1, pytest.approx(0.05)),
        ("aten::view", 1, pytest.approx(0.05)),
    ]
