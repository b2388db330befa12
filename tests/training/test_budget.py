"""Runs with a budget of minutes: the share that is used, the last step, and what a resumed run has left."""

import itertools
import re
import shutil
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from eagle_train import train
from eagle_train.cli import compose, with_others_off
from eagle_train.distributed import World
from eagle_train.drafts import EagleConfig
from eagle_train.errors import UserError
from eagle_train.training import budget
from eagle_train.training.budget import Budget
from eagle_train.training.cost import this_machine
from eagle_train.training.metrics import MetricsLog, NoTracker
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.train_config import TrainConfig
from eagle_train.training.trainer import Interrupted, Trainer
from tests.support.command_line import call, chats, read_jsonl, save_target, write_jsonl
from tests.support.trainers import make_trainer, run_training

STEP_S = 3.0


@pytest.fixture
def data(tmp_path) -> Path:
    for seed, (name, count) in enumerate({"train": 60, "heldout": 12}.items()):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(count, seed))
    return tmp_path


@pytest.fixture
def ticking(monkeypatch) -> list[float]:
    """The budget's clock: each step of a trainer takes STEP_S seconds, and nothing else takes any."""
    now, train_step = [1000.0], Trainer.train_step

    def timed(trainer: Trainer) -> dict | None:
        record = train_step(trainer)
        now[0] += STEP_S
        return record

    monkeypatch.setattr(budget.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Trainer, "train_step", timed)
    return now


def minutes_for(steps: float) -> float:
    return steps * STEP_S / 60


def trainer_for(directory: Path, data: Path, steps: float, **train) -> Trainer:
    return make_trainer(directory, data, steps=None, minutes=minutes_for(steps), **train)


def test_steps_use_their_shares():
    budget = Budget(steps=4)
    shares = []
    for step in range(4):
        budget.begin(step, seconds=99.0)
        shares.append((budget.used, budget.is_last))
    assert shares == [(0.0, False), (0.25, False), (0.5, False), (0.75, True)]


def test_the_last_step_is_the_one_that_ends_nearest_to_the_budgets_end():
    for minutes, last in ((1.0, 5), (0.95, 5), (0.9, 4), (0.7, 3), (1.2, 6)):  # steps of 12 s each
        budget = Budget(minutes=minutes)
        ends = []
        for step in itertools.count():
            budget.begin(step, seconds=12.0 * step)
            ends.append(budget.used)
            if budget.is_last:
                break
        assert step + 1 == last, minutes
        assert ends == pytest.approx([12.0 * step / (60 * minutes) for step in range(last)])


def test_a_pause_is_not_taken_for_the_length_of_a_step():
    """An evaluation that takes half of the budget is between two steps of a second each."""
    budget = Budget(minutes=2)
    for step, seconds in enumerate([0, 1, 2, 3, 63, 64]):
        budget.begin(step, seconds)
        assert not budget.is_last


def test_measuring_and_saving_use_no_time(ticking, tmp_path, data, monkeypatch):
    """Each takes a whole run's time here, after every step."""
    for name in ("evaluate", "save"):
        own = getattr(Trainer, name)

        def slow(trainer: Trainer, *given, own=own):
            ticking[0] += 8 * STEP_S
            return own(trainer, *given)

        monkeypatch.setattr(Trainer, name, slow)
    trainer = trainer_for(tmp_path / "run", data, 8, eval_every=1, save_every=1, keep=0, optim={"decay_share": 0.5})
    assert len({record["lr"] for record in run_training(trainer)}) == 4
    assert trainer.state.step == 8
    resumed = trainer_for(tmp_path / "run", data, 8)
    shutil.rmtree(tmp_path / "run" / "step-00000008")
    assert resumed.resume()
    assert resumed.budget.before == 7 * STEP_S


def test_a_run_of_minutes_follows_its_schedule_by_the_share_that_is_used(ticking, tmp_path, data):
    trainer = trainer_for(tmp_path / "run", data, 8, optim={"decay_share": 0.5, "lr": 1e-3}, l1_weight_end=0.0)
    rates = [record["lr"] for record in run_training(trainer)]
    assert rates == pytest.approx([1e-3] * 5 + [0.75e-3, 0.5e-3, 0.25e-3])
    assert trainer.config.l1_weight_at(trainer.budget.progress_at(8)) == pytest.approx(1 / 8)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000008"]


class SecondRank(World):
    """Of two ranks; the first says that so many milliseconds are used, three seconds more each time it is asked."""

    first: ClassVar[list[int]] = []

    @property
    def is_main(self) -> bool:
        return False

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.int64:  # what begins a step: supervised slots, the time, and who waits or is to stop
            values += torch.tensor([0, self.first.pop(0), 0, 0])
        return values


def test_ranks_follow_the_first_ones_clock_and_not_their_own(tmp_path, data, monkeypatch):
    """This one's says something else each time it is asked, a year or nothing."""
    times = itertools.cycle([1e3, 4e7])
    monkeypatch.setattr(budget.time, "monotonic", lambda: next(times))
    trainer = trainer_for(tmp_path / "run", data, 8, optim={"decay_share": 0.5, "lr": 1e-3})
    trainer.world, SecondRank.first = SecondRank(), [round(1000 * STEP_S * step) for step in range(8)]
    trainer.budget.start()
    trainer.lookahead.start(steps=None)
    rates, last = [], []
    for _ in range(8):
        rates.append(trainer.train_step()["lr"])
        last.append(trainer.budget.is_last)
        with trainer.budget.paused():
            pass
    assert rates == pytest.approx([1e-3] * 5 + [0.75e-3, 0.5e-3, 0.25e-3])
    assert last == [False] * 7 + [True]


def interrupted(trainer: Trainer, after: int) -> None:
    """A run that is told to stop after so many steps."""
    trainer.stop_asked = lambda: trainer.state.step >= after
    log = MetricsLog(trainer.directory, NoTracker(trainer.directory, {}), 0)
    with pytest.raises(Interrupted, match=rf"{after} steps and 0\.\d of {trainer.config.minutes:g} minutes done"):
        trainer.train(log)
    log.close()


def test_a_resumed_run_has_what_is_left_of_its_minutes(ticking, tmp_path, data):
    options = {"optim": {"decay_share": 0.5}}
    whole = run_training(trainer_for(tmp_path / "whole", data, 10, **options))
    interrupted(trainer_for(tmp_path / "run", data, 10, **options), after=4)
    ticking[0] += 10_000  # nothing runs meanwhile
    trainer = trainer_for(tmp_path / "run", data, 10, **options)
    assert trainer.resume()
    assert run_training(trainer, resumed=True) == whole
    finished = trainer_for(tmp_path / "run", data, 10, **options)
    assert finished.resume()
    assert run_training(finished, resumed=True) == whole  # nothing more was done
    with pytest.raises(UserError, match=r"^train\.minutes=0\.25: .*step-00000010 has used 0\.5 already; give as many"):
        trainer_for(tmp_path / "run", data, 5, **options).resume()
    longer = trainer_for(tmp_path / "run", data, 12, **options)
    assert longer.resume()
    assert len(run_training(longer, resumed=True)) == 12


def test_a_run_that_is_stopped_within_its_last_step_still_has_it(ticking, tmp_path, data):
    """Although its time is used up then."""
    trainer = trainer_for(tmp_path / "run", data, 5, rows=1)
    trainer.stop_asked = lambda: trainer.budget.is_last and trainer.state.step == 4
    log = MetricsLog(trainer.directory, NoTracker(trainer.directory, {}), 0)
    with pytest.raises(Interrupted, match=r"4 steps and 0\.\d+ of 0\.25 minutes done"):
        trainer.train(log)
    log.close()
    resumed = trainer_for(tmp_path / "run", data, 5, rows=1)
    assert resumed.resume()
    assert [record["step"] for record in run_training(resumed, resumed=True)] == [1, 2, 3, 4, 5]
    over = trainer_for(tmp_path / "run", data, 5, rows=1)
    assert over.resume()
    assert over.budget.is_over(over.state.step)


def test_one_of_steps_and_minutes():
    both = "train.steps=2 and train.minutes=1.5: give one of them, and the other as null"
    with pytest.raises(UserError, match=both):
        TrainConfig(steps=2, minutes=1.5)
    with pytest.raises(UserError, match=r"^train\.steps=None and train\.minutes=None: give one"):
        TrainConfig()
    for minutes in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match=rf"^train\.minutes={minutes}: must be above 0"):
            TrainConfig(minutes=minutes)


@pytest.mark.parametrize(
    ("given", "steps", "minutes"),
    [
        ([], 48_000, None),
        (["train.minutes=5"], None, 5),
        (["train.steps=5"], 5, None),
        (["experiment=quickstart", "train.steps=100"], 100, None),
        (["experiment=quickstart", "train.minutes=0.5"], None, 0.5),
        (["train.minutes=2", "train.steps=3"], 3, 2),  # refused when it is built
    ],
)
def test_what_is_given_takes_the_place_of_the_other(given, steps, minutes):
    config = compose("train", given)
    assert (config.train.steps, config.train.minutes) == (steps, minutes)
    assert with_others_off(["train.steps=null", "train.minutes=1"]) == ["train.steps=null", "train.minutes=1"]
    beside = with_others_off(["train.minutes=1", "--cfg", "job"])
    assert beside == ["train.minutes=1", "train.steps=null", "--cfg", "job"]


def test_the_command_ends_when_its_time_is_up(tmp_path, data, capsys):
    target = save_target(tmp_path / "target")
    given = [f"target={target}", "data=messages", f"data.path={data}/train.jsonl", "data.row_tokens=64", "device=cpu"]
    given += ["train.micro_batch_rows=2", "optim.tokens_per_step=256", f"out={tmp_path}/out", "train.minutes=0.05"]
    started = time.monotonic()
    assert call(train.main, *given) == 0
    assert time.monotonic() - started > 3
    records = read_jsonl(tmp_path / "out/metrics.jsonl")
    told = capsys.readouterr()
    assert f"steps: {len(records):,}, of them 0 skipped" in told.out
    assert "second 3/3, 00:0" in told.err
    assert "note: layout=vllm,sglang,trtllm: each has no slot for the first token, and accepts" in told.err
    tokens, padding = re.search(r"; ([\d,]+) tokens, ([\d,]+) padding", told.out).groups()
    read = sum(int(number.replace(",", "")) for number in (tokens, padding))
    assert 0 <= read - 256 * len(records) < 2 * 64  # of the steps that were made, not of those drawn ahead
    assert call(train.main, *given) == 0  # resumed: over
    assert len(read_jsonl(tmp_path / "out/metrics.jsonl")) == len(records)


def test_a_plan_says_how_many_steps_there_are_on_this_machine(monkeypatch):
    """By a measured speed: at twice the speed, twice as many."""
    draft = EagleConfig(64, 128, num_heads=2, num_kv_heads=1, head_dim=32, max_position_embeddings=64)
    told = []
    for speed in (1e9, 2e9):
        monkeypatch.setattr(this_machine, "measured_speed", lambda device, dtype, speed=speed: speed)
        optim = OptimConfig(tokens_per_step=1000)
        line = this_machine.steps_here(TrainConfig(steps=None, minutes=2.0), 1e6, draft, optim, "cpu")
        assert line.endswith(" steps in train.minutes=2")
        told.append(int(re.search(r"([\d,]+) steps", line)[1].replace(",", "")))
    assert told == pytest.approx([120 * this_machine._REACH, 2 * 120 * this_machine._REACH], abs=1)
    line = this_machine.steps_here(TrainConfig(steps=round(7.2e3 * this_machine._REACH)), 1e9, draft, optim, "cpu")
    assert line.endswith(f"): about {500 / this_machine._REACH:.0f} s a step, 1,000.0 hours for train.steps=5760")
    dense = this_machine.step_flops(1e6, draft, OptimConfig(name="adamw", tokens_per_step=1000), torch.float32)
    muon = this_machine.step_flops(1e6, draft, OptimConfig(name="muon", tokens_per_step=1000), torch.float32)
    assert dense == 1e9 < muon


def test_the_plan_of_minutes(capsys, tmp_path):
    data = ("data.mix=null", f"data.path={write_jsonl(tmp_path / 'chats.jsonl', chats(20))}", "data.heldout=null")
    assert call(train.main, "experiment=quickstart", *data, "train.minutes=2", "plan=true", "device=cpu") == 0
    told = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.fullmatch(r"on this machine \(.*\): about \S+ s a step, [\d,]+ steps in train\.minutes=2", told)
