"""What all tests run under: no network, few threads that sleep while they wait, and `gpu` tests only where one is.

And a clock that only models move, and a list of what was compiled, for those that ask for them.
"""

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # read when torch is loaded; spinning threads starve each other (DESIGN 5)
os.environ["HF_HUB_OFFLINE"] = "1"
if narrower := os.environ.get("ATEN_CPU_CAPABILITY"):  # torch would take what it compiled before for wider instructions
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}_{narrower}")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU; asked when torch's compiler imports it

from torch._dynamo.backends.debugging import aot_eager, eager
from torch.fx import GraphModule

from eagle_train.terminal import log_to_stderr
from evals.bench import statistics
from tests.support import kept
from tests.support.command_line import save_target
from tests.support.slow import TESTS, slow_tests

log_to_stderr()  # as commands do
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


# Files that take minutes, which come first: the last ones that processes are given should be short.
LONG = ("test_launch", "test_every_drafter", "test_ranks", "test_lossless", "test_tensor_parallel")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        kept.begin()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    if not hasattr(config, "workerinput"):
        kept.end()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector never looks through what modules and tests hold: each time it takes half a second."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    names = slow_tests()
    for item in items:
        if f"{item.path.relative_to(TESTS).as_posix()}::{item.originalname}" in names:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and none is visible"))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes have no name of their own: what packs them may write the time into them, and each of pytest's processes
    must find tests of the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def copy(tiny_checkpoint, tmp_path) -> Path:
    """Of a tiny target on disk, to be damaged."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, which passes while one sleeps and in whatever is given to `taking`."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of two questions, where a test has no more, or works them out by hand."""
    monkeypatch.setattr(statistics, "FEWEST", 2)


@pytest.fixture
def noisy(monkeypatch):
    """No evaluation is refused because of its times: on a machine that does something else as well they are any."""
    monkeypatch.setattr(statistics, "check_timing", lambda results: None)


@pytest.fixture
def graphs(monkeypatch) -> list[GraphModule]:
    """Those that torch.compile has made so far: as ever, but for the C++."""
    return noted(aot_eager, monkeypatch)


@pytest.fixture
def traced(monkeypatch) -> list[GraphModule]:
    """The same, run as they were traced, in two thirds of the time: where it matters how many there are, and when."""
    return noted(eager, monkeypatch)


def noted(backend: Callable, monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """The graphs that torch.compile makes by a backend from now on."""
    made, compiled = [], torch.compile

    def noting(graph: GraphModule, inputs: list[torch.Tensor]) -> Callable:
        made.append(graph)
        return backend(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda *given, **options: compiled(*given, **options, backend=noting))
    return made
