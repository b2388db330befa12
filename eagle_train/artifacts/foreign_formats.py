"""Formats of drafts that we do not read, told apart by their config.json. Knows nothing of files."""

from collections.abc import Mapping
from typing import Any

from eagle_train.errors import UserError

_READ_OF_SPECULATORS = ("eagle", "eagle3", "peagle")
# What a class or a model type is named after, in small letters, and what it is.
_NAMED = {
    "dflash": "a DFlash draft",
    "dspark": "a DSpark draft",
    "mlpspeculator": "an MLP speculator",
    "mlp_speculator": "an MLP speculator",
    "medusa": "a Medusa draft in vLLM's layout and not in that of Medusa's repository (medusa_lm_head.safetensors)",
    "mtp": "an MTP module",
}
_DFLASH_LAYERS = "target_layer_ids"  # `dflash_config` alone may belong to P-EAGLE, which names its mask token there


class NotRead(UserError):
    """A draft of a format, a size or a convention that we do not run; nothing in its file is wrong."""


def other_format(values: Mapping[str, Any]) -> str | None:
    """What a draft with this config.json is, where it is of no format that we read; None: it may be of one."""
    kind = values.get("speculators_model_type")
    if kind is not None and kind not in _READ_OF_SPECULATORS:
        return _NAMED.get(str(kind), f"a draft of speculators' kind {kind}")
    classes = values.get("architectures")
    names = [*(classes if isinstance(classes, list) else []), values.get("model_type")]
    for name in names:
        found = next((what for word, what in _NAMED.items() if word in str(name).lower()), None)
        if found is not None:
            return found
    dflash = values.get("dflash_config")
    return _NAMED["dflash"] if isinstance(dflash, dict) and _DFLASH_LAYERS in dflash else None
