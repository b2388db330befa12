"""Checkpoints survive kills, full disks and damage, and give back exactly what was saved."""

import errno
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from eagle_train.distributed import CommonError
from eagle_train.errors import UserError
from eagle_train.terminal import log_to_stderr
from eagle_train.training.checkpoint.format import Checkpoint, RankTensors
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.checkpoint.verify import open_checkpoint
from eagle_train.training.state import random_state, set_random_state
from tests.support.command_line import disk_for
from tests.support.processes import run

# For each scenario and each k: a fork saves and is killed at the k-th thing it does to the file system, until a fork
# reaches the end. Two more are killed in the middle of a file.
KILLED_SAVES = """
import os, signal, sys
from pathlib import Path
import torch
from eagle_train.training.checkpoint import format
from eagle_train.training.checkpoint.format import RankTensors
from eagle_train.training.checkpoint.store import CheckpointStore

def save(directory, step, value, keep):
    tensors = {"w": torch.full((64,), float(value))}
    parts = RankTensors.copied(tensors, {"state.w": tensors["w"]})
    CheckpointStore(directory).save(step, parts, {"value": value}, {"value": value}, keep)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at(point):
    seen = 0
    def hook(event, _):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            seen += 1
            if seen > point:
                die()
    sys.addaudithook(hook)

def kill_in(writer):
    if writer == "draft":
        format.write_tensors = lambda tensors, path, metadata: (path.write_bytes(b"half"), die())
    else:
        torch.save = lambda state, file: (file.write(b"half"), file.flush(), die())

def killed(directory, before, step, keep, prepare, *arguments):
    for number in before:
        save(directory, number, 1, 0)
    child = os.fork()
    if child == 0:
        prepare(*arguments)
        save(directory, step, 2, keep)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL

root = Path(sys.argv[1])
for name, before, step, keep in (("next", [1], 2, 0), ("prune", [1, 2], 3, 1), ("replace", [1], 1, 0)):
    for writer in ("draft", "trainer"):
        assert killed(root / name / writer, before, step, keep, kill_in, writer)
    point = 0
    while killed(root / name / f"{point:03d}", before, step, keep, kill_at, point):
        point += 1
    assert point > 10, point
"""


@pytest.fixture(scope="module")
def killed_saves(tmp_path_factory) -> Path:
    """Directories scenario/point, as each killed save left them."""
    root = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run([sys.executable, "-c", KILLED_SAVES, root], env=environment)
    assert done.returncode == 0, done.stderr
    return root


def some_save(directory: Path, step: int, keep: int = 0, size: int = 64) -> Path:
    weights = {"w": torch.full((size,), float(step))}
    tensors = RankTensors.copied(weights, {"state.w": weights["w"]})
    return CheckpointStore(directory).save(step, tensors, {"layers": step}, {"position": step}, keep)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(("scenario", "old_step", "new_step"), [("next", 1, 2), ("prune", 2, 3), ("replace", 1, 1)])
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(killed_saves, capsys, scenario, old_step, new_step):
    log_to_stderr()
    outcomes = []
    for directory in sorted((killed_saves / scenario).iterdir()):
        found = open_checkpoint(CheckpointStore(directory).latest())
        value = found.config["value"]
        assert found.step == (old_step if value == 1 else new_step)
        assert found.state == {"value": value}
        assert torch.equal(found.draft()["w"], torch.full((64,), float(value)))
        outcomes.append(value)
        for path in directory.glob("step-*"):
            open_checkpoint(path)
        CheckpointStore(directory).save(9, RankTensors.copied({}, {}), {}, {}, keep=1)
        assert names(directory) == ["step-00000009"]
    assert set(outcomes) == {1, 2}
    *_, in_draft, in_trainer = outcomes
    assert (in_draft, in_trainer) == (1, 1)
    assert capsys.readouterr().err == ""


def test_round_trip_is_exact(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b.t": torch.randn(4, 6).t(), "half": torch.randn(7).bfloat16()}
    moments = {"state.a": torch.randn(3, 5), "state.steps": torch.tensor(7.0)}
    state = {"step": 7, "betas": (0.9, 0.95), "ids": torch.arange(5), "name": "x", "nothing": None, "rows": [[1, 2.5]]}
    path = CheckpointStore(tmp_path / "new" / "run").save(
        1234, RankTensors.copied(tensors, moments), {"num_layers": 3, "norms": "eagle1"}, state, keep=0
    )
    assert path == tmp_path / "new" / "run" / "step-00001234"
    found = open_checkpoint(path)
    assert (found.step, found.config) == (1234, {"num_layers": 3, "norms": "eagle1"})
    assert list(found.draft()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert found.draft()[name].dtype == tensor.dtype
        assert torch.equal(found.draft()[name], tensor)
    read = {name: torch.zeros_like(tensor) for name, tensor in (tensors | moments).items()}
    found.read_into(read)
    assert all(torch.equal(read[name], tensor) for name, tensor in (tensors | moments).items())
    assert torch.equal(found.state.pop("ids"), state.pop("ids"))
    assert found.state == state


def training(seed: int) -> tuple:
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(model, optimizer, scheduler, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(torch.randn(4, 6)) * random.random(), torch.randn(4, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_adamw_scheduler_and_random_numbers_continue_exactly(tmp_path):
    model, optimizer, scheduler = training(seed=0)
    train(model, optimizer, scheduler, 3)
    random.gauss(0, 1)  # leaves the second number of a pair in the generator's state
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "random": random_state()}
    path = CheckpointStore(tmp_path).save(3, RankTensors.copied(model.state_dict(), {}), {}, state, keep=0)
    expected = train(model, optimizer, scheduler, 3), random.gauss(0, 1), random.random()

    other_model, other_optimizer, other_scheduler = training(seed=1)
    found = open_checkpoint(path)
    other_model.load_state_dict(found.draft())
    other_optimizer.load_state_dict(found.state["optimizer"])
    other_scheduler.load_state_dict(found.state["scheduler"])
    set_random_state(found.state["random"])
    actual = train(other_model, other_optimizer, other_scheduler, 3), random.gauss(0, 1), random.random()
    assert actual == expected
    assert all(torch.equal(a, b) for a, b in zip(other_model.parameters(), model.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_numbers_and_tensors_of_a_cuda_device(tmp_path):
    weights = torch.randn(5, device="cuda")
    path = CheckpointStore(tmp_path).save(
        1, RankTensors.copied({"w": weights}, {}), {}, {"moment": weights, "random": random_state()}, keep=0
    )
    expected = torch.rand(4, device="cuda")
    found = open_checkpoint(path)
    set_random_state(found.state["random"])
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    assert found.state["moment"].device.type == "cpu"
    assert torch.equal(found.draft()["w"], weights.cpu())


def test_the_last_ones_are_kept(tmp_path):
    for step in (5, 10, 99_999_999, 100_000_000):
        some_save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-100000000", "step-99999999"]
    assert CheckpointStore(tmp_path).latest().name == "step-100000000"
    some_save(tmp_path, 7, keep=1)  # what later steps hold is not this run's to delete
    assert names(tmp_path) == ["step-00000007", "step-100000000", "step-99999999"]
    some_save(tmp_path, 200_000_000, keep=0)
    assert len(names(tmp_path)) == 4


def test_the_best_is_kept_beside_the_last(tmp_path):
    for step, score in enumerate((None, 2.5, 2.0, None, 2.25), 1):
        CheckpointStore(tmp_path).save(step, RankTensors.copied({}, {}), {}, {}, keep=1, score=score)
        assert names(tmp_path) == [f"step-{kept:08d}" for kept in sorted({step, 2} if step >= 2 else {1})]


def test_saving_in_the_background(tmp_path):
    store = CheckpointStore(tmp_path)
    weights = torch.zeros(5)
    for step in (1, 2):
        weights += 1
        store.save_in_background(step, RankTensors.copied({"w": weights}, {}), {}, {}, keep=0)
        weights += 10  # the copy was made before
    assert store.wait() == tmp_path / "step-00000002"
    assert [open_checkpoint(path).draft()["w"][0].item() for path in sorted(tmp_path.iterdir())] == [1, 12]
    with disk_for(100):
        store.save_in_background(3, RankTensors.copied({"w": weights}, {}), {}, {}, keep=0)
        with pytest.raises(UserError, match="step 3 could not be written"):
            store.wait()


def test_a_background_save_that_the_disk_refuses_is_told_of_at_once_and_the_next_one_tried(tmp_path, capsys):
    log_to_stderr()  # as commands do
    store = CheckpointStore(tmp_path)

    def save(step: int) -> None:
        store.save_in_background(step, RankTensors.copied({"w": torch.zeros(5)}, {}), {}, {}, keep=0)

    with disk_for(100):
        save(1)
        assert store.has_failed()
    [told] = capsys.readouterr().err.splitlines()
    assert "step 1 could not be written" in told
    save(2)
    assert not store.has_failed()
    assert store.wait() is None  # it was waited for
    save(3)
    assert store.wait() == tmp_path / "step-00000003"
    with disk_for(100):
        save(4)
        with pytest.raises(UserError, match="step 5 could not be written"):
            save(5)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_what_cannot_be_removed_ends_no_save(tmp_path, monkeypatch, capsys):
    """As of a network file system, which keeps files that are open (.nfs*), and of other users."""
    log_to_stderr()  # as commands do
    for step in (1, 2):
        some_save(tmp_path, step)
    leftover = tmp_path / ".step-00000003.partial"
    leftover.mkdir()
    (leftover / ".nfs01").touch()
    removed = shutil.rmtree

    def refuse(path, ignore_errors=False):
        if any(Path(path).glob(".nfs*")):
            if not ignore_errors:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            return
        removed(path, ignore_errors)

    renamed = Path.rename

    def refuse_the_first(path, target):
        if path.name == "step-00000001":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return renamed(path, target)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    monkeypatch.setattr(Path, "rename", refuse_the_first)
    some_save(tmp_path, 3, keep=1)
    told = capsys.readouterr().err.splitlines()
    assert [".step-00000003.partial cannot be removed" in told[0], "step-00000001 cannot be removed" in told[1]] == [
        True,
        True,
    ]
    kept = [name for name in names(tmp_path) if not name.startswith(".")]
    assert kept == ["step-00000001", "step-00000003"]
    assert open_checkpoint(tmp_path / "step-00000003").step == 3
    monkeypatch.undo()
    some_save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-00000004"]


def test_the_same_step_is_replaced(tmp_path):
    some_save(tmp_path, 3)
    CheckpointStore(tmp_path).save(3, RankTensors.copied({"w": torch.ones(2)}, {}), {"layers": 9}, {}, keep=1)
    assert names(tmp_path) == ["step-00000003"]
    assert open_checkpoint(CheckpointStore(tmp_path).latest()).config == {"layers": 9}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize(
    "file", ["draft.safetensors", "draft.json", "optimizer-00001.safetensors", "trainer.pt", "manifest.json"]
)
def test_damage_is_noticed(tmp_path, capsys, file, damage):
    log_to_stderr()  # as commands do
    good, bad = some_save(tmp_path, 1), some_save(tmp_path, 2)
    damage(bad / file)
    assert CheckpointStore(tmp_path).latest() == good
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(bad) in warning
    with pytest.raises(UserError, match=r"step-00000002.*(missing|No such file|damaged|differs)"):
        open_checkpoint(bad)


def test_nothing_is_started_anew_where_no_checkpoint_is_whole(tmp_path):
    flip(some_save(tmp_path, 1) / "draft.safetensors")
    (some_save(tmp_path, 2) / "trainer.pt").unlink()
    reasons = r"step-00000002: .*No such file.*; step-00000001: draft\.safetensors is not what was written"
    with pytest.raises(
        UserError, match=rf"holds 2 checkpoints and none is whole \({reasons}.*\); remove them to start"
    ):
        CheckpointStore(tmp_path).latest()


def test_another_format_is_not_read(tmp_path):
    path = some_save(tmp_path, 1)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 4'))
    with pytest.raises(UserError, match="format 4"):
        open_checkpoint(path)


def test_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path / "absent").latest() is None
    (tmp_path / "step-of-mine").mkdir()
    assert CheckpointStore(tmp_path).latest() is None
    with pytest.raises(UserError, match=r"manifest\.json.*step-XXXXXXXX"):
        open_checkpoint(tmp_path)


def test_another_process_in_the_directory_ends_a_save_and_keeps_its_files(tmp_path):
    """Where no lock keeps it out."""
    store, its = CheckpointStore(tmp_path), tmp_path / ".step-00000002.partial" / "draft"
    store.save(1, RankTensors.copied({}, {}), {}, {}, keep=1)
    its.parent.mkdir()
    its.write_text("half")
    store.taken_by = lambda: "process 7 on another"
    told = "step 2 could not be written: process 7 on another writes there too; earlier checkpoints are untouched"
    with pytest.raises(CommonError, match=told):
        store.save(2, RankTensors.copied({}, {}), {}, {}, keep=1)
    assert its.read_text() == "half"
    assert store.latest() == tmp_path / "step-00000001"


@pytest.mark.parametrize(("size", "state_size"), [(100_000, 1), (1, 100_000)], ids=["draft", "trainer"])
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path, size, state_size):
    some_save(tmp_path, 1)
    state = {"moments": torch.zeros(state_size)}
    with disk_for(50_000), pytest.raises(UserError) as error:
        CheckpointStore(tmp_path).save(2, RankTensors.copied({"w": torch.zeros(size)}, {}), {}, state, keep=1)
    assert str(tmp_path) in str(error.value)
    assert "step 2" in str(error.value)
    assert "File too large" in str(error.value)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["step-00000001"]
    assert open_checkpoint(CheckpointStore(tmp_path).latest()).step == 1


def test_a_disk_that_fills_while_it_is_flushed(tmp_path, monkeypatch):
    some_save(tmp_path, 1)

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match="No space left on device"):
        some_save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/run"):
        some_save(tmp_path / "file" / "run", 1)


def test_a_state_that_could_not_be_read_back_is_refused_when_saved(tmp_path):
    with pytest.raises(Exception, match="Weights only"):
        CheckpointStore(tmp_path).save(
            1, RankTensors.copied({}, {}), {}, {"path": Checkpoint(tmp_path, 1, {}, {})}, keep=0
        )
    assert names(tmp_path) == []


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(path, target):
        events.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    final = some_save(tmp_path, 1)
    place = events.index("rename to step-00000001")
    assert {path.name for path in final.iterdir()} < set(events[:place])
    assert any("partial" in event for event in events[:place])
    assert events[place + 1 :] == [tmp_path.name]


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CommonError, match=rf"^out={tmp_path}/file/run: cannot be written: "):
        CheckpointStore(tmp_path / "file" / "run").check_shared()
