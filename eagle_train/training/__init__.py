"""Training: the loop, its loss, optimisers, checkpoints and metrics. Knows nothing of inference.

From the command line: `eagle-train`. From Python, with a config composed as the command composes it:

    from eagle_train.cli import compose
    from eagle_train.training import NoTracker, ParallelConfig, assemble
    config = compose("train", ["experiment=quickstart", "out=outputs/run"])
    trainer = assemble(config, ParallelConfig())
    heldout = trainer.train(NoTracker(trainer.directory, {}))

`Trainer` can be built from parts of one's own too. What is not exported here is internal.
"""

from eagle_train.drafts.losses import LossSums, distillation_loss
from eagle_train.training.assembly import assemble, look_ahead
from eagle_train.training.backend import Backend, ParallelConfig
from eagle_train.training.checkpoint.format import Checkpoint
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.checkpoint.verify import open_checkpoint
from eagle_train.training.cost.estimate import ClusterConfig, CostEstimate, estimate_cost
from eagle_train.training.cost.report import cost_report
from eagle_train.training.evaluate import measure_heldout
from eagle_train.training.metrics import MetricsLog, NoTracker, Tracker, WandbTracker
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.parallelize import prepare
from eagle_train.training.state import TrainState
from eagle_train.training.train_config import TrainConfig
from eagle_train.training.trainer import Interrupted, Trainer

__all__ = [
    "Backend",
    "Checkpoint",
    "CheckpointStore",
    "ClusterConfig",
    "CostEstimate",
    "Interrupted",
    "LossSums",
    "MetricsLog",
    "NoTracker",
    "OptimConfig",
    "ParallelConfig",
    "Tracker",
    "TrainConfig",
    "TrainState",
    "Trainer",
    "WandbTracker",
    "assemble",
    "cost_report",
    "distillation_loss",
    "estimate_cost",
    "look_ahead",
    "measure_heldout",
    "open_checkpoint",
    "prepare",
]
