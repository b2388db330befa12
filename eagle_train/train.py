"""eagle-train: chat text in, checkpoints of a draft out. Knows nothing of export or inference. DESIGN section 3.10."""

import random
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.config import build, check, command, resolve_device, write_text
from eagle_train.corpus.chat import ChatRenderer
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Stream, heldout_batches
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.target import TargetConfig, load_target, training_dtype
from eagle_train.training.checkpoint import checkpoints
from eagle_train.training.metrics import MetricsLog, redact
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.trainer import TrainConfig, Trainer, accumulation


@command("train")
def main(config: DictConfig) -> None:
    train = build(TrainConfig, config.train, "train")
    optim = build(OptimConfig, config.optim, "optim")
    data = build(DataConfig, config.data, "data")
    accumulation(optim, train, data.row_tokens)  # refused before any weight is loaded
    out, device = Path(str(config.out)), resolve_device(config.device)
    check(
        train.resume or not checkpoints(out),
        f"out={out} holds checkpoints: name another directory, remove them, or give train.resume=true",
    )
    check(isinstance(config.seed, int), f"seed={config.seed}: must be a whole number")
    random.seed(config.seed)
    torch.manual_seed(config.seed)

    target_config = build(TargetConfig, config.target, "target")
    target = load_target(training_dtype(target_config, device), device)
    check(target.tokenizer is not None, f"target.path={target.name}: no tokenizer there, and training reads text")
    longest = target.max_positions
    check(data.row_tokens <= longest, f"data.row_tokens={data.row_tokens}: must be at most the context, {longest}")
    shape = OmegaConf.to_container(config.draft)
    if shape["embedding_scale"] is None:
        shape["embedding_scale"] = target.embedding_scale()
    draft_config = DraftConfig.from_target(target.config, **shape)
    draft = Draft(draft_config).init_weights(config.seed).to(device)

    renderer = ChatRenderer(target.tokenizer, data.supervise)
    stream = Stream(data, renderer, train.micro_batch_rows)
    heldout = heldout_batches(data, renderer, train.micro_batch_rows)
    trainer = Trainer(train, optim, target, draft, stream, heldout, out)
    resumed = train.resume and trainer.resume()

    composed = redact(OmegaConf.to_container(config, resolve=True))
    write_text(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(composed)))
    tracker = hydra.utils.instantiate(config.tracking)(directory=out, config=composed)
    log = MetricsLog(out, tracker, resumed_step=trainer.step if resumed else None)
    print(
        f"{draft.num_parameters() / 1e6:.1f} M draft parameters for {target.name}, steps {trainer.step}-{train.steps}"
    )
    heldout_record = trainer.train(log)
    log.close()
    print(f"data: {', '.join(f'{count:,} {name}' for name, count in stream.counts.items())}")
    if heldout_record:
        depths = ", ".join(f"{share:.2f}" for share in heldout_record["acceptance_per_depth"])
        print(f"held out: simulated TPC {heldout_record['simulated_tpc']:.2f}, acceptance by depth {depths}")
    print(f"checkpoints: {out}")


if __name__ == "__main__":
    main()
