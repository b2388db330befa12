"""From a composed config to a trainer: its target, data, draft and backend, refused as early as can be where they
cannot go together. Knows nothing of logs, signals or how a run ends. DESIGN section 3.10.
"""

import random
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.config import build, check, resolve_device
from eagle_train.corpus.chat import ChatRenderer
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Stream, heldout_batches
from eagle_train.distributed import World
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.target import Target, TargetConfig, load_target, training_dtype
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.checkpoint import checkpoints
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.parallelize import prepare
from eagle_train.training.trainer import TrainConfig, Trainer, accumulation


def assemble(config: DictConfig, parallel: ParallelConfig, world: World) -> Trainer:
    """A rank's trainer, at step 0. Raises UserError for a config that cannot be trained."""
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
    sound = isinstance(config.seed, int) and 0 <= config.seed < 2**63
    check(sound, f"seed={config.seed}: must be a whole number, 0 or more and below 2**63")
    random.seed(config.seed)
    torch.manual_seed(config.seed)

    target_config = build(TargetConfig, config.target, "target")
    target = load_target(training_dtype(target_config, device), device, parallel.target, world)
    check(target.tokenizer is not None, f"target.path={target.name}: no tokenizer there, and training reads text")
    longest = target.max_positions
    check(data.row_tokens <= longest, f"data.row_tokens={data.row_tokens}: must be at most the context, {longest}")
    shape = draft_shape(config.draft, target)  # refused before any data are read

    renderer = ChatRenderer(target.tokenizer, data.supervise)
    stream = Stream(data, renderer, train.micro_batch_rows, world)
    if shape.vocab_size:
        shape.vocabulary = stream.frequent_tokens(shape.vocab_size)
    draft = Draft(shape).init_weights(config.seed).to(device)
    heldout = heldout_batches(data, renderer, train.micro_batch_rows)
    backend = prepare(draft, optim, parallel, world, target.dtype)
    return Trainer(train, optim, target, draft, backend, stream, heldout, out, world)


def draft_shape(values: DictConfig, target: Target) -> DraftConfig:
    """The draft that the group `draft` asks for."""
    shape = OmegaConf.to_container(values)
    if shape["embedding_scale"] is None:
        shape["embedding_scale"] = target.embedding_scale()
    return DraftConfig.from_target(target.config, **shape)
