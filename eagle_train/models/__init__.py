"""The frozen target, and what drafts are built of. Knows nothing of training, inference or data.

The names below are what users may call; the rest is internal.
"""

from eagle_train.models.draft_quantisation import Quant, quant_of, quantise_draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Identity, Target

__all__ = [
    "Identity",
    "Quant",
    "Target",
    "TargetConfig",
    "load_target",
    "quant_of",
    "quantise_draft",
]
