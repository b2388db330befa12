"""one_writer.py: of two that write to one place the second is refused, before anything is touched."""

import errno
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from eagle_train import cache, datastore, distributed, regenerate, train
from eagle_train import one_writer as one_writer_module
from eagle_train.errors import UserError
from eagle_train.one_writer import beside, one_writer
from eagle_train.settings import CONF_DIR
from eagle_train.training.checkpoint.store import CheckpointStore
from evals import ceilings, experiments, mt_bench, report
from evals.bench import evaluation
from tests.support.command_line import call

HOLDS = "import sys; from pathlib import Path; from eagle_train.one_writer import one_writer\n"
HOLDS += "out = Path(sys.argv[1])\nwith one_writer(out, out / '.lock'): print('held', flush=True); sys.stdin.read()"


def test_the_second_is_told_who_writes(tmp_path):
    out = tmp_path / "runs" / "one"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "held\n"
        told = f"^out={out}: process {first.pid} on {socket.gethostname()} writes there; wait for its end"
        for _ in range(2):
            with pytest.raises(UserError, match=told), one_writer(out, out / ".lock"):
                pass
        first.kill()  # what holds nothing any more, and has removed nothing
        first.wait()
        assert (out / ".lock").exists()
        with one_writer(out, out / ".lock"):
            (out / "kept").touch()
    assert [each.name for each in out.iterdir()] == ["kept"]


def test_a_directory_for_the_lock_alone_is_gone_with_it(tmp_path):
    out = tmp_path / "one"
    for _ in range(2):
        with one_writer(out, out / ".lock"):
            assert out.is_dir()
        assert not out.exists()
    with pytest.raises(KeyError), one_writer(out, out / ".lock"):
        raise KeyError
    assert not out.exists()


def test_a_file_system_without_locks_is_told_and_the_holder_sees_who_came(tmp_path, monkeypatch):
    """As where each node has locks of its own: nobody is refused, and who came first finds another's name."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    out = tmp_path / "one"
    with one_writer(out, out / ".lock") as hold:
        assert hold.other() is None
    monkeypatch.setattr(one_writer_module.fcntl, "flock", refuse)
    first = ExitStack()
    with pytest.warns(UserWarning, match=f"^out={out}: its file system has no locks") as warned:
        hold = first.enter_context(one_writer(out, out / ".lock"))
    assert len(warned) == 1
    assert hold.other() is None
    (out / ".lock").write_text("process 7 on another\n12 abc")
    assert hold.other() == "process 7 on another"
    first.close()
    assert (out / ".lock").exists()  # another's
    (out / ".lock").unlink()
    assert hold.other() == "another process"


def test_a_run_asks_before_its_checkpoints_whether_another_has_come(tmp_path, monkeypatch):
    config = OmegaConf.load(CONF_DIR / "tracking" / "none.yaml")
    config = OmegaConf.create({"out": str(tmp_path), "parallel": {}, "device": "cpu", "tracking": config})
    store = CheckpointStore(tmp_path)

    def run(_: object, trainer: SimpleNamespace, *__: object) -> None:
        assert trainer.store.taken_by() is None
        (tmp_path / ".lock").write_text("process 7 on another\n12 abc")
        assert trainer.store.taken_by() == "process 7 on another"

    monkeypatch.setattr(train, "_StopSignal", lambda: None)
    monkeypatch.setattr(train, "assemble", lambda *_: SimpleNamespace(store=store))
    monkeypatch.setattr(train, "_run", run)
    assert train.job(config) == 0


def test_where_nothing_can_be_written_the_command_says_so(tmp_path):
    (tmp_path / "file").write_text("{}")
    with one_writer(tmp_path / "file" / "out", tmp_path / "file" / "out" / ".lock"):
        pass
    assert json.loads((tmp_path / "file").read_text()) == {}


@pytest.mark.parametrize(
    ("main", "out", "lock", "more"),
    [
        (train.main, "one", "one/.lock", ["train.steps=1", "device=cpu"]),
        (cache.main, "one", ".one.lock", ["train.steps=1", "device=cpu"]),
        (datastore.main, "one", ".one.lock", []),
        (regenerate.main, "one.jsonl", ".one.jsonl.lock", ["device=cpu"]),
    ],
)
def test_a_second_run_in_one_place_is_refused_and_touches_nothing(tmp_path, capsys, main, out, lock, more):
    out = tmp_path / out
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
    with one_writer(out, tmp_path / lock):
        before = sorted(tmp_path.rglob("*"))
        assert call(main, "data=messages", f"data.path={rows}", f"out={out}", *more) == 2
        assert sorted(tmp_path.rglob("*")) == before
    assert f"error: out={out}: process " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "out"),
    [(mt_bench.main, "one"), (experiments.main, "one"), (ceilings.main, "one.json"), (report.main, "one")],
)
def test_so_is_a_second_evaluation(tmp_path, capsys, main, out):
    """Of all ranks the first one's process writes."""
    out = tmp_path / out
    with one_writer(out, tmp_path / f".{out.name}.lock"):
        before = sorted(tmp_path.rglob("*"))
        assert call(main, f"out={out}") == 2
        assert sorted(tmp_path.rglob("*")) == before
    assert f"error: out={out}: process " in capsys.readouterr().err


def test_what_writes_nothing_or_to_a_stream_needs_no_lock(tmp_path, monkeypatch):
    config, pipe = OmegaConf.create({"out": str(tmp_path / "one"), "plan": False}), tmp_path / "pipe"
    os.mkfifo(pipe)
    with one_writer(tmp_path / "one", beside(tmp_path / "one")), one_writer(pipe, beside(pipe)):
        with pytest.raises(UserError), evaluation._writing(config):
            pass
        for changes in ({"plan": True}, {"out": ""}, {"out": str(pipe)}):
            with evaluation._writing(OmegaConf.merge(config, changes)):
                pass
        monkeypatch.setattr(distributed, "place", lambda: (1, 2))
        with evaluation._writing(config):
            pass


def test_a_lock_beside_any_name(tmp_path, monkeypatch):
    """One for all names of a place."""
    monkeypatch.chdir(tmp_path)
    assert beside(Path()) == tmp_path.parent / f".{tmp_path.name}.lock"
    assert beside(Path("/")).parent == Path("/")
    (tmp_path / "link").symlink_to("one")
    assert beside(tmp_path / "link") == beside(tmp_path / "two" / ".." / "one") == beside(tmp_path / "one")
