"""The kinds of drafts, a file each, and what they have in common. Knows nothing of training, engines or files.

- `kind`: the config and the module of any kind, and what is asked of them
- `eagle`, `eagle3`: EAGLE and EAGLE-3 drafts, with `eagle_layouts` and `eagle3_layouts`
- `peagle`: P-EAGLE, EAGLE-3 drafts of all tokens in one forward, with `peagle_layouts`
- `mtp`, `medusa`: DeepSeek-V3's MTP module, and Medusa heads
- `steps`: what kinds have in common that learn logits alone
- `unroll`, `losses`, `own_head`: what kinds are trained with
- `layouts`: what the layouts of serving engines share

The names below are what users may call; the rest is internal.
"""

from collections.abc import Mapping
from typing import Any

from eagle_train.drafts.eagle import EagleConfig, EagleDraft
from eagle_train.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_train.drafts.head import Head
from eagle_train.drafts.kind import Draft, DraftConfig, TargetStates, shift_hidden
from eagle_train.drafts.losses import Lesson, LossSums, distillation_loss
from eagle_train.drafts.medusa import MedusaConfig, MedusaDraft
from eagle_train.drafts.mtp import MtpConfig, MtpDraft
from eagle_train.drafts.peagle import PeagleConfig, PeagleDraft
from eagle_train.errors import check, shown
from eagle_train.settings import build

__all__ = [
    "Draft",
    "DraftConfig",
    "Eagle3Config",
    "Eagle3Draft",
    "EagleConfig",
    "EagleDraft",
    "Head",
    "Lesson",
    "LossSums",
    "MedusaConfig",
    "MedusaDraft",
    "MtpConfig",
    "MtpDraft",
    "PeagleConfig",
    "PeagleDraft",
    "TargetStates",
    "distillation_loss",
    "kind_named",
    "planned_config",
    "saved_config",
    "shift_hidden",
]

KINDS: Mapping[str, type[DraftConfig]] = {
    each.kind: each for each in (EagleConfig, Eagle3Config, MedusaConfig, MtpConfig, PeagleConfig)
}
"""The config of each kind. A file names a kind, never a class: what is loaded from elsewhere chooses among these."""


def kind_named(name: Any, place: str) -> type[DraftConfig]:
    """The config's class of a kind. Raises UserError for a name that is none."""
    check(isinstance(name, str) and name in KINDS, f"{place}={shown(name)}: must be one of {', '.join(KINDS)}")
    return KINDS[name]


def planned_config(hf_config: Any, settings: Mapping[str, Any]) -> DraftConfig:
    """The config that the group `draft` describes, for a target with this Hugging Face config. Raises UserError."""
    given = dict(settings)
    return kind_named(given.pop("kind", None), "draft.kind").from_target(hf_config, **given)


def saved_config(values: Any, place: str) -> DraftConfig:
    """The config that `DraftConfig.saved` gave. Raises UserError, with `place`, where it is none."""
    check(isinstance(values, Mapping), f"{place}={values!r}: must be a mapping")
    given = dict(values)
    return build(kind_named(given.pop("kind", None), f"{place}.kind"), given, place)
