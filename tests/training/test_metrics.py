"""Records reach metrics.jsonl and the trackers, a resumed run's file equals the uninterrupted one's, secrets stay
out.
"""

import errno
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eagle_train import train
from eagle_train.distributed import CommonError
from eagle_train.errors import UserError
from eagle_train.results import count_in_words, in_words, redact, time_in_words
from eagle_train.settings import CONF_DIR, instantiate
from eagle_train.terminal import log_to_stderr
from eagle_train.train import INTERRUPTED
from eagle_train.training import metrics
from eagle_train.training.metrics import Meter, MetricsLog, NoTracker, WandbTracker
from eagle_train.training.trainer import Interrupted, Trainer
from tests.support.command_line import call, chats, save_target, train_arguments, write_jsonl
from tests.support.processes import run

HF_KEY = "hf_" + "aB3" * 10
WANDB_KEY = "0123456789abcdef" * 2 + "01234567"


class Recorder(NoTracker):
    def __init__(self) -> None:
        self.calls = []

    def start(self, resumed):
        self.calls.append(("start", resumed))

    def log(self, step, record):
        self.calls.append((step, record))

    def close(self, failed=False):
        self.calls.append("failed" if failed else "close")


def lines(directory: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (directory / "metrics.jsonl").open()]


def write_steps(directory: Path, steps, resumed_step=None) -> None:
    log = MetricsLog(directory, NoTracker(directory, {}), resumed_step)
    for step in steps:
        log.log(step, {"loss": 1 / step})
        if step % 2 == 0:
            log.log(step, {"heldout_loss": 2 / step})
    log.close()


def test_meter_sums_before_it_divides():
    meter = Meter()
    meter.add(1, loss=torch.tensor(4.0), accepted=torch.tensor([1.0, 0.0]))
    meter.add(torch.tensor(3), loss=torch.tensor(2.0), accepted=torch.tensor([3.0, 1.0]))
    assert meter.means() == {"loss": 1.5, "accepted": [1.0, 0.25]}
    meter._sums["count"] = meter._sums["count"] * 2  # another rank
    assert meter.means() == {"loss": 0.75, "accepted": [0.5, 0.125]}


def test_meter_without_items_is_nan():
    meter = Meter()
    meter.add(0, loss=0.0)
    assert math.isnan(meter.means()["loss"])


def test_a_record_is_in_the_file_at_once_and_goes_to_the_tracker(tmp_path):
    tracker = Recorder()
    log = MetricsLog(tmp_path / "run", tracker)
    log.log(1, {"loss": 2.5, "acceptance": [0.5, 0.25]})
    assert lines(tmp_path / "run") == [{"step": 1, "loss": 2.5, "acceptance": [0.5, 0.25]}]
    log.close()
    assert tracker.calls == [("start", False), (1, {"loss": 2.5, "acceptance": [0.5, 0.25]}), "close"]


def test_numbers_that_json_lacks_are_null(tmp_path):
    log = MetricsLog(tmp_path, NoTracker(tmp_path, {}))
    log.log(1, {"loss": math.nan, "norm": math.inf, "depths": [1.0, -math.inf]})
    log.close()
    assert lines(tmp_path) == [{"step": 1, "loss": None, "norm": None, "depths": [1.0, None]}]


@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo'], ids=["whole", "torn"])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path, torn):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_steps(whole, range(1, 10))
    write_steps(cut, range(1, 7))
    with (cut / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write_steps(cut, range(5, 10), resumed_step=4)
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_fresh_run_starts_a_fresh_file(tmp_path):
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, [1])
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_foreign_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"loss": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a record"):
        MetricsLog(tmp_path, NoTracker(tmp_path, {}), resumed_step=3)


class Refusing:
    """A file that takes so many bytes at each write, and refuses the write where that is 0."""

    def __init__(self, file, takes: list[int]):
        self.file, self.takes = file, takes

    def write(self, data: bytes) -> int:
        most = self.takes.pop(0) if self.takes else len(data)
        if not most:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return self.file.write(data[:most])

    def close(self) -> None:
        self.file.close()


@pytest.mark.parametrize("takes", [[0], [5, 0], [0, 0, 7, 9, 0]], ids=["refused", "torn", "again and again"])
def test_a_record_that_the_disk_refuses_is_written_with_a_later_one(tmp_path, capsys, takes):
    log_to_stderr()  # as commands do
    tracker = Recorder()
    log = MetricsLog(tmp_path, tracker)
    log.log(1, {"loss": 1.0})
    log._file = Refusing(log._file, list(takes))
    for step in (2, 3, 4):
        log.log(step, {"loss": 1 / step})
    log.log(4, {"heldout_loss": 0.5})
    log.close()
    expected = [{"step": step, "loss": 1 / step} for step in (1, 2, 3, 4)] + [{"step": 4, "heldout_loss": 0.5}]
    assert lines(tmp_path) == expected
    assert len(tracker.calls) == 7  # it has all, when they come
    told = capsys.readouterr().err.splitlines()
    assert len(told) == takes.count(0)
    assert "metrics.jsonl cannot be written: [Errno 122] Disk quota exceeded; 1 records are written with" in told[0]


def test_records_that_are_lost_at_the_end_are_counted(tmp_path, capsys):
    log_to_stderr()  # as commands do
    log = MetricsLog(tmp_path, NoTracker(tmp_path, {}))
    log._file = Refusing(log._file, [0] * 9)
    for step in (1, 2):
        log.log(step, {"loss": 1.0})
    log.close()
    assert "2 records are lost" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("dies_at", [2, "close"])
def test_a_tracker_that_dies_is_told_of_once_and_left(tmp_path, capsys, dies_at):
    log_to_stderr()  # as commands do

    class Dies(Recorder):
        def log(self, step, record):
            super().log(step, record)
            if step == dies_at:
                raise ConnectionResetError("Connection lost")

        def close(self, failed=False):
            super().close(failed)
            raise ConnectionResetError("Connection lost")

    tracker = Dies()
    log = MetricsLog(tmp_path, tracker)
    for step in (1, 2, 3):
        log.log(step, {"loss": 1.0})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert tracker.calls[-1] == ((2, {"loss": 1.0}) if dies_at == 2 else "close")
    [told] = capsys.readouterr().err.splitlines()
    assert "ConnectionResetError: Connection lost" in told


def test_secrets_are_redacted():
    config = {
        "hf_token": "short",
        "apiKey": "short",
        "db": {"PASSWORD": 1234, "client_secret": "x", "hosts": ["https://me:pass@host/x", "https://host/x"]},
        "secrets": {"first": "a", "rest": ["b", "c"]},
        "note": f"run with {HF_KEY}",
        "login": WANDB_KEY,
        "url": "https://host/?token=abcdefgh123",
    }
    assert redact(config) == {
        "hf_token": "<redacted>",
        "apiKey": "<redacted>",
        "db": {
            "PASSWORD": "<redacted>",
            "client_secret": "<redacted>",
            "hosts": ["<redacted>", "https://host/x"],
        },
        "secrets": {"first": "<redacted>", "rest": ["<redacted>", "<redacted>"]},
        "note": "<redacted>",
        "login": "<redacted>",
        "url": "<redacted>",
    }


def test_what_is_no_secret_stays():
    config = {
        "optim": {"tokens_per_step": 2_000_000, "lr": 2e-4, "betas": (0.9, 0.95)},
        "draft": {"first_token": "self_fusion", "num_key_value_heads": 8, "moe": False, "kind": None},
        "target": {"tokenizer": "models/llama", "revision": WANDB_KEY, "pad_token": "<|pad|>"},
        "api_key": None,
    }
    expected = config | {"optim": config["optim"] | {"betas": [0.9, 0.95]}}
    assert redact(config) == expected
    assert redact(OmegaConf.create(config)) == expected
    assert type(redact(OmegaConf.create(config))["optim"]["betas"]) is list


def test_tracking_none_tracks_nothing(tmp_path):
    with initialize_config_dir(str(CONF_DIR.resolve() / "tracking"), version_base="1.3"):
        config = {"tree": {"_target_": "no.such.thing"}}
        tracker = instantiate(compose("none"), "tracking", directory=tmp_path, config=config)
    assert isinstance(tracker, NoTracker)
    write_steps(tmp_path, [1])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def without_wandb_settings(directory: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    return ours | {"HOME": str(directory), "WANDB_ERROR_REPORTING": "false"}


RUN = """
import sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from eagle_train.settings import instantiate
from eagle_train.terminal import log_to_stderr
from eagle_train.training.metrics import MetricsLog

log_to_stderr()  # as commands do
assert "wandb" not in sys.modules
conf, directory, secret = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
for resumed_step in (None, 1):
    with initialize_config_dir(conf, version_base="1.3"):
        config = {"hub": secret, "lr": 0.5}
        tracker = instantiate(compose("wandb"), "tracking", directory=directory, config=config)
    log = MetricsLog(directory, tracker, resumed_step)
    for step in (1, 2):
        log.log(step, {"loss": float("nan"), "acceptance": [0.5, 0.25]})
        log.log(step, {"heldout_loss": 1.0})
    tracker.show("report", "<p>all figures</p>")
    log.close()
"""


def test_wandb_without_a_key_records_offline_and_asks_nothing(tmp_path):
    pytest.importorskip("wandb")
    home, directory = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    arguments = [sys.executable, "-c", RUN, str(CONF_DIR.resolve() / "tracking"), directory, HF_KEY]
    # Standard input is closed, not empty: a prompt would fail at once or hang.
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *arguments]
    done = run(command, env=without_wandb_settings(home))
    assert done.returncode == 0, done.stderr
    assert "no API key, so the run is recorded offline" in done.stderr

    run_id = (directory / "wandb_run_id").read_text()
    assert len(list(directory.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))) == 2
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"heldout_loss" in kept
    assert b"acceptance/2" in kept
    assert b"<p>all figures</p>" in kept
    assert HF_KEY.encode() not in kept
    assert [line["step"] for line in lines(directory)] == [1, 1, 1, 1, 2, 2]


@pytest.fixture
def no_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in os.environ:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_online_needs_a_key(tmp_path, no_key, monkeypatch):
    with pytest.raises(UserError, match=r"tracking\.mode=online.*WANDB_API_KEY"):
        WandbTracker(tmp_path, {}, mode="online")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(UserError, match=r"^WANDB_MODE=sometimes: .*offline"):
        WandbTracker(tmp_path, {})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("machine api.wandb.ai\n  login user\n  password x\n", True),
        ("machine wandb.mine\n  login user\n  password x\n", True),
        ("machine other.host\n  login user\n  password x\n", False),
        ("no netrc at all", False),
        (None, False),
    ],
)
def test_a_key_in_netrc_counts(tmp_path, monkeypatch, content, expected):
    path = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(path))
    if content is not None:
        path.write_text(content)
    assert metrics._in_netrc("https://wandb.mine") is expected


def test_help_names_the_modes_of_wandb():
    [said] = re.findall(r"^mode: null # (.*)$", (CONF_DIR / "tracking/wandb.yaml").read_text(), re.MULTILINE)
    assert [mode for mode in metrics._WANDB_MODES if mode not in said] == []


def test_steps_that_wandb_has_are_not_sent_again(tmp_path, no_key):
    class Run:
        def __init__(self):
            self.step = 5
            self.sent = []

        def log(self, record, step):
            self.sent.append((step, record))

    tracker = WandbTracker(tmp_path, {}, mode="disabled")
    tracker.run = Run()
    for step in (4, 5, 6):
        tracker.log(step, {"loss": step})
    assert tracker.run.sent == [(5, {"loss": 5}), (6, {"loss": 6})]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tracking.mode=sometimes", "tracking.mode=sometimes: give one of"),
        ("tracking.project=a/b", "tracking.project=a/b: Invalid project name"),
        ("tracking._target_=no.such.Tracker", "tracking no.such.Tracker: No module named"),
        ("+tracking.key=1", "tracking eagle_train.training.metrics.WandbTracker: WandbTracker.__init__() got an unexp"),
    ],
)
def test_a_trackers_mistakes_are_told_before_the_target_is_loaded(tmp_path, no_key, capsys, wrong, right):
    (tmp_path / "train.jsonl").touch()
    given = train_arguments(tmp_path, f"out={tmp_path}/run", "tracking=wandb", wrong)
    assert call(train.main, *given, f"target={tmp_path}/nowhere") == 2
    assert f"error: {right}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_names_may_be_numbers(tmp_path, no_key):
    tracker = WandbTracker(tmp_path, {}, project=3, name=7, mode="offline")
    tracker.start(resumed=False)
    assert (tracker.run.project, tracker.run.name) == ("3", "7")
    tracker.close()


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_is_told_whether_a_run_failed(tmp_path, no_key, failed):
    tracker, told = WandbTracker(tmp_path, {}, mode="disabled"), []
    tracker.run = SimpleNamespace(finish=lambda exit_code: told.append(exit_code))
    tracker.close(failed)
    assert told == [int(failed)]


@pytest.mark.parametrize(
    ("error", "status", "failed"),
    [(CommonError("the data ended"), 2, True), (Interrupted("told to stop"), INTERRUPTED, False)],
)
def test_the_log_of_a_run_that_ends_early_is_closed(tmp_path, monkeypatch, error, status, failed):
    def ends(self, log):
        raise error

    save_target(tmp_path / "target")
    for name in ("train", "heldout"):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(8))
    closed = []
    monkeypatch.setattr(NoTracker, "close", lambda self, failed=False: closed.append(failed))
    monkeypatch.setattr(Trainer, "train", ends)
    assert call(train.main, *train_arguments(tmp_path, f"out={tmp_path}/run")) == status
    assert closed == [failed]


def test_the_log_of_a_run_that_no_user_could_help_is_closed_too(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(NoTracker, "close", lambda self, failed=False: closed.append(failed))
    monkeypatch.setattr(train, "_open_log", lambda *_: NoTracker(tmp_path, {}))
    trainer = SimpleNamespace(
        config=SimpleNamespace(resume=False),
        budget=SimpleNamespace(is_over=lambda _: False),
        state=SimpleNamespace(step=0),
        train=lambda _: 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        train._run(OmegaConf.create({"profile": False}), trainer, lambda: False, NoTracker(tmp_path, {}))
    assert closed == [True]


@pytest.mark.parametrize(("named", "expected"), [(None, metrics._FINISH_TIMEOUT), ("7", 7)])
def test_the_end_of_a_run_waits_for_no_network_without_end(tmp_path, no_key, monkeypatch, named, expected):
    wandb = pytest.importorskip("wandb")
    if "finish_timeout" not in wandb.Settings.model_fields:
        pytest.skip("this version of wandb has no finish_timeout")
    if named is not None:
        monkeypatch.setenv("WANDB_FINISH_TIMEOUT", named)
    given = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: given.append(arguments["settings"]))
    WandbTracker(tmp_path, {}, mode="disabled").start(resumed=False)
    settings = wandb.Settings()
    settings.update_from_env_vars(os.environ)
    settings.update_from_settings(given[0])
    assert settings.finish_timeout == expected


def test_sizes_and_times_are_told_in_units_that_fit():
    sizes = [0, 300, 2**16, 2**20, 5 * 2**29, 3000 * 2**30]
    assert list(map(in_words, sizes)) == ["0.0 KiB", "0.3 KiB", "64.0 KiB", "1.0 MiB", "2.5 GiB", "3,000.0 GiB"]
    told = ["0 s", "0.042 s", "9.5 s", "42 s", "1.0 min", "59.5 min", "1.0 hours", "1,000.0 hours"]
    assert list(map(count_in_words, [983, 65_300, 1.5e6, 8.03e9])) == ["0.983 k", "65.3 k", "1.5 M", "8.03 B"]
    assert list(map(time_in_words, [0, 0.042, 9.5, 42, 60, 3570, 3600, 3.6e6])) == told
