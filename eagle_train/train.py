"""eagle-train: chat text in, checkpoints of a draft out. Knows nothing of export or inference. DESIGN section 3.10."""

import random
import signal
import sys
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train import distributed
from eagle_train.config import build, check, command, resolve_device, write_text
from eagle_train.corpus.chat import ChatRenderer
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Stream, heldout_batches
from eagle_train.distributed import World
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.target import TargetConfig, load_target, training_dtype
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.checkpoint import checkpoints
from eagle_train.training.metrics import MetricsLog, NoTracker, Record, redact
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.parallelize import prepare
from eagle_train.training.plan import planned
from eagle_train.training.trainer import Interrupted, TrainConfig, Trainer, accumulation

INTERRUPTED = 75  # exit status: stopped by a signal after a checkpoint, run the same command again


@command("train")
def main(config: DictConfig) -> None:
    if config.plan:
        rank, size = distributed.place()
        if rank == 0:
            print(planned(config, size))
        return
    parallel = build(ParallelConfig, config.parallel, "parallel")
    share = 1 if parallel.target == "replicated" else parallel.share
    world = distributed.start(
        resolve_device(config.device), share, parallel.timeout_minutes, group=parallel.needs_group
    )
    status = 0
    try:
        run(config, parallel, world)
    except Interrupted as interrupted:
        if world.is_main:
            print(interrupted, file=sys.stderr)
        status = INTERRUPTED
    distributed.leave(status)


def run(config: DictConfig, parallel: ParallelConfig, world: World) -> None:
    """The whole job on one of its ranks."""
    train = build(TrainConfig, config.train, "train")
    optim = build(OptimConfig, config.optim, "optim")
    data = build(DataConfig, config.data, "data")
    parallel.check_job(optim, world.size)
    accumulation(optim, train, data.row_tokens, world.size)  # refused before any weight is loaded
    out, device = Path(str(config.out)), resolve_device(config.device)
    check(
        train.resume or not checkpoints(out),
        f"out={out} holds checkpoints: name another directory, remove them, or give train.resume=true",
    )
    check(isinstance(config.seed, int), f"seed={config.seed}: must be a whole number")
    random.seed(config.seed)
    torch.manual_seed(config.seed)

    target_config = build(TargetConfig, config.target, "target")
    target = load_target(training_dtype(target_config, device), device, parallel.target, world)
    check(target.tokenizer is not None, f"target.path={target.name}: no tokenizer there, and training reads text")
    longest = target.max_positions
    check(data.row_tokens <= longest, f"data.row_tokens={data.row_tokens}: must be at most the context, {longest}")
    shape = OmegaConf.to_container(config.draft)
    if shape["embedding_scale"] is None:
        shape["embedding_scale"] = target.embedding_scale()
    draft_config = DraftConfig.from_target(target.config, **shape)  # refused before any data are read

    renderer = ChatRenderer(target.tokenizer, data.supervise)
    stream = Stream(data, renderer, train.micro_batch_rows, world)
    if draft_config.vocab_size:
        draft_config.vocabulary = stream.frequent_tokens(draft_config.vocab_size)
    draft = Draft(draft_config).init_weights(config.seed).to(device)
    size = draft.num_parameters()
    heldout = heldout_batches(data, renderer, train.micro_batch_rows)
    backend = prepare(draft, optim, parallel, world, target.dtype)
    trainer = Trainer(train, optim, target, draft, backend, stream, heldout, out, world)
    resumed = train.resume and trainer.resume()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # what clusters send before they take the nodes away
        signal.signal(number, lambda *_: setattr(trainer, "stop_asked", True))
    if world.is_main:
        print(f"{size / 1e6:.1f} M draft parameters for {target.name}, steps {trainer.step}-{train.steps}", flush=True)
    log = open_log(config, out, trainer.step if resumed else None) if world.is_main else NoTracker(out, {})
    record = trainer.train(log)
    log.close()
    if world.is_main:
        report(out, stream, record)


def open_log(config: DictConfig, out: Path, resumed_step: int | None) -> MetricsLog:
    """The run's composed config and its metrics, in its directory and at the tracker."""
    composed = redact(OmegaConf.to_container(config, resolve=True))
    write_text(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(composed)))
    tracker = hydra.utils.instantiate(config.tracking)(directory=out, config=composed)
    return MetricsLog(out, tracker, resumed_step)


def report(out: Path, stream: Stream, heldout: Record) -> None:
    """What the run came to, in a few lines."""
    print(f"data: {', '.join(f'{count:,} {name}' for name, count in stream.counts.items())}")
    if heldout:
        depths = ", ".join(f"{share:.2f}" for share in heldout["acceptance_per_depth"])
        print(f"held out: simulated TPC {heldout['simulated_tpc']:.2f}, acceptance by depth {depths}")
    print(f"checkpoints: {out}")


if __name__ == "__main__":
    main()
