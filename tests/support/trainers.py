"""Trainers of a tiny draft on packed rows of letters, whole runs of them, and a comparison of what they wrote."""

from functools import cache
from pathlib import Path

import torch

from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Batch, Stream, heldout_batches
from eagle_train.distributed import ALONE, World
from eagle_train.drafts import Draft, planned_config
from eagle_train.models.target import Target
from eagle_train.training.assembly import look_ahead
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.metrics import MetricsLog, NoTracker
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.parallelize import prepare
from eagle_train.training.train_config import TrainConfig, accumulation
from eagle_train.training.trainer import Trainer
from tests.support.command_line import metrics_without_times
from tests.support.tiny import tiny_target, tiny_tokenizer

ROW = 32


@cache
def a_target(**changes) -> Target:
    return tiny_target(tokenizer=tiny_tokenizer(), num_hidden_layers=2, **changes)


def make_trainer(
    directory: Path,
    data: Path,
    *,
    steps: int = 6,
    rows: int = 2,
    rows_per_step: int = 4,
    target: Target | None = None,
    file: str = "train",
    optim: dict | None = None,
    num_layers: int = 1,
    draft: Draft | None = None,
    shape: dict | None = None,
    parallel: ParallelConfig | None = None,
    world: World = ALONE,
    **train,
) -> Trainer:
    """A run of a fresh draft, as eagle-train makes it: `rows` packed rows a micro-batch, `rows_per_step` a step.

    `shape`: the settings of another draft, `kind` among them.
    """
    torch.manual_seed(0)  # for noise; weights and the order of data have their own
    target = target or a_target()
    config = DataConfig(str(data / f"{file}.jsonl"), heldout=str(data / "heldout.jsonl"), row_tokens=ROW)
    renderer = ChatRenderer(target.tokenizer)
    settings = TrainConfig(steps=steps, micro_batch_rows=rows, **train)
    optim = OptimConfig(**{"lr": 1e-3, "tokens_per_step": rows_per_step * ROW} | (optim or {}))
    plain = {"kind": "eagle", "num_layers": num_layers, "fc_bias": True}  # parameters of every sort
    draft = draft or planned_config(target.config, shape or plain).module().init_weights(0, target.lm_head)
    stream = Stream(config, renderer, rows, world)
    heldout = heldout_batches(config, renderer, rows, settings.eval_batches)
    return trainer_of(settings, optim, target, draft, stream, heldout, directory, parallel, world)


def trainer_of(
    train: TrainConfig,
    optim: OptimConfig,
    target: Target,
    draft: Draft,
    stream: Stream,
    heldout: list[Batch],
    directory: Path,
    parallel: ParallelConfig | None = None,
    world: World = ALONE,
) -> Trainer:
    """A trainer of these parts, put together as `assemble` does."""
    backend = prepare(draft, optim, parallel or ParallelConfig(), world, target.dtype)
    micro_batches = accumulation(optim, train, stream.config.row_tokens, world.size)
    ahead = look_ahead(stream, target, draft.config, train, micro_batches, world)
    return Trainer(train, optim, target, draft, backend, ahead, heldout, CheckpointStore(directory, world))


def started(trainer: Trainer) -> Trainer:
    """A trainer whose steps are made one by one."""
    trainer.lookahead.start(steps=None)
    return trainer


def assert_same(actual: dict, expected: dict, tolerance: float) -> None:
    """The same names; of each number or tensor, the difference's norm is at most `tolerance` of the expected norm."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        one, other = torch.as_tensor(actual[name]).double(), torch.as_tensor(value).double()
        assert (one - other).norm() <= tolerance * other.norm(), (name, one, other)


def run_training(trainer: Trainer, resumed: bool = False) -> list[dict]:
    """All its steps; returns its metrics, times left out."""
    log = MetricsLog(trainer.directory, NoTracker(trainer.directory, {}), trainer.state.step if resumed else None)
    trainer.train(log)
    log.close()
    return metrics_without_times(trainer.directory)
