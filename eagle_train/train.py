"""eagle-train: chat text in, checkpoints of a draft out. Knows nothing of export or inference. DESIGN section 3.10."""

import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eagle_train import distributed
from eagle_train.cli import command
from eagle_train.corpus.preview import preview
from eagle_train.corpus.source import DataConfig, check_found
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.models.loading import TargetConfig, load_config
from eagle_train.one_writer import one_writer
from eagle_train.results import redact, write_text
from eagle_train.settings import build, instantiate
from eagle_train.terminal import COLORS, wants_color
from eagle_train.training.assembly import assemble, renderer_of
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost.measured import step_plan
from eagle_train.training.cost.report import cost_report
from eagle_train.training.metrics import MetricsLog, NoTracker, Record, Tracker
from eagle_train.training.step_profile import StepProfile, check_long_enough
from eagle_train.training.trainer import Interrupted, Trainer

_LOG = logging.getLogger("eagle_train.train")  # `__name__` is another one where the module is run
INTERRUPTED = 75  # exit status: stopped by a signal after a checkpoint; the same command continues


class _StopSignal:
    """Whether this process was signalled to stop: by a cluster that preempts its nodes, its terminal or its user.

    A second SIGINT ends it at once.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in distributed.STOP:
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup, or by a shell for its background jobs
                signal.signal(number, self)

    def __call__(self, number: int, _: Any) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


@command("train")
def main(config: DictConfig) -> None:
    shown = config.preview
    check(type(shown) is int and shown >= 0, f"preview={shown}: must be a number of rows, 0 for none")
    check(shown or config.preview_out is None, f"preview_out={config.preview_out}: give preview=ROWS with it")
    check(isinstance(config.profile, bool), f"profile={config.profile}: must be true or false")
    check_long_enough(config.profile, config.train.steps)
    check(config.color in COLORS, f"color={config.color}: must be one of {', '.join(COLORS)}")
    if not config.plan and not shown:
        return distributed.run(lambda: job(config))
    rank, size = distributed.place()
    if rank == 0 and shown:
        _show_rows(config)
    if rank == 0 and config.plan:
        print(cost_report(config, size))


def _show_rows(config: DictConfig) -> None:
    """Print the first rows as they are trained on. Raises UserError where there are none."""
    data, target = build(DataConfig, config.data, "data"), build(TargetConfig, config.target, "target")
    check_found(data)
    renderer = renderer_of(target, data, load_config(target))
    in_color = wants_color(config.color, sys.stdout)
    for text in preview(data, renderer, config.preview, config.preview_out, in_color):
        print(text)


def job(config: DictConfig) -> int:
    """One rank's part; returns its exit status."""
    stop = _StopSignal()  # before loading, which takes minutes too
    parallel = build(ParallelConfig, config.parallel, "parallel")
    minutes, group = parallel.timeout_minutes, parallel.needs_group
    world = distributed.start(resolve_device(config.device), timeout_minutes=minutes, group=group)
    out, trackers = Path(str(config.out)), list[Tracker]()
    try:
        with one_writer(out, out / ".lock", world) as hold:
            world.by_main(lambda: trackers.append(_tracker(config)))  # mistakes are told before the target is loaded
            trainer = assemble(config, parallel, world)
            trainer.store.taken_by = hold.other
            _run(config, trainer, stop, *trackers)
    except Interrupted as interrupted:
        if world.is_main:
            _LOG.info("%s", interrupted)
        # Ranks end together, because a launcher may kill the others when one ends with a status. Not through the group
        # of the data, in which batches may still be drawn.
        world.exchange(None, side="files")
        return INTERRUPTED
    return 0


def _run(config: DictConfig, trainer: Trainer, stop: _StopSignal, tracker: Tracker | None = None) -> None:
    """Train on one rank, with the log, the progress and the summary on the main one, which alone has a `tracker`."""
    if trainer.config.resume:
        trainer.resume()
    trainer.stop_asked = lambda: stop.asked
    if tracker is None:
        trainer.train(NoTracker(trainer.directory, {}))
        return
    print(trainer, flush=True)
    is_complete = trainer.budget.is_over(trainer.state.step)  # then nothing is logged, and no W&B run begun
    log = NoTracker(trainer.directory, {}) if is_complete else _open_log(config, trainer, tracker)
    try:
        profile = _profiling(config, trainer) if config.profile else None
        heldout = trainer.train(log)
    except Exception as error:  # memory that ran out, say, too
        log.close(failed=not isinstance(error, Interrupted))
        raise
    log.close()
    if profile is not None:
        profile.close()
    _summarise(trainer, heldout)


def _profiling(config: DictConfig, trainer: Trainer) -> StepProfile:
    """The profile of some of the run's first steps."""
    target, parallel = build(TargetConfig, config.target, "target"), build(ParallelConfig, config.parallel, "parallel")
    profile = StepProfile(trainer, step_plan(trainer, target, parallel))
    trainer.around_step = profile
    return profile


def _tracker(config: DictConfig) -> Tracker:
    """As configured, not yet started. Raises UserError for options that cannot be."""
    tracker: Tracker = instantiate(
        config.tracking, "tracking", directory=Path(str(config.out)), config=_composed(config)
    )
    return tracker


def _composed(config: DictConfig) -> Any:
    """The whole config as values, without its secrets."""
    return redact(OmegaConf.to_container(config, resolve=True))


def _open_log(config: DictConfig, trainer: Trainer, tracker: Tracker) -> MetricsLog:
    """Write the run's composed config, and open its metrics in its directory and at the tracker.

    With train.resume=true a run that was stopped before its first checkpoint counts as the same run.
    """
    write_text(trainer.directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(_composed(config))))
    return MetricsLog(trainer.directory, tracker, trainer.state.step if trainer.config.resume else None)


def _counted(counts: Mapping[str, int]) -> str:
    """What became of the data, in two lines; see `Packer` in corpus/stream.py."""
    numbers = {name: f"{count:,}" for name, count in counts.items()}
    return (
        "data: {rows} rows, {divided} divided into a document for each turn, {malformed} malformed and left out; "
        "{tokens} tokens, {padding} padding\n"
        "documents: {documents}, {split} split and {dropped} dropped for their length, {mute} in which the assistant "
        "says nothing; documents and pieces without a supervised token, skipped: {skipped}"
    ).format(**numbers)


def _summarise(trainer: Trainer, heldout: Record) -> None:
    """Print the result of the run in a few lines."""
    print(f"steps: {trainer.state.step:,}, of them {trainer.state.skipped:,} skipped because of their gradients")
    # Counts at the last step made, not those of steps drawn ahead; before a step is made, the stream's.
    print(_counted(trainer.state.stream.get("counts", trainer.lookahead.stream.counts)))
    if heldout:
        depths = ", ".join(f"{share:.2f}" for share in heldout["acceptance_per_depth"])
        print(f"held out: simulated TPC {heldout['simulated_tpc']:.2f}, acceptance by depth {depths}")
    print(f"checkpoints: {trainer.directory}")


if __name__ == "__main__":
    main()
