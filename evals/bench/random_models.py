"""Targets of a given shape with random weights, and drafts for them: measurements without a checkpoint.

Knows nothing of what is measured. DESIGN section 3.8.
"""

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_train.drafts import Draft, DraftConfig, EagleConfig, planned_config
from eagle_train.errors import UserError, check, one_line
from eagle_train.hardware import warn_of_emulation
from eagle_train.models.loading import DTYPES, default_dtype
from eagle_train.models.target import Target
from eagle_train.settings import CONF_DIR


@dataclass
class ShapesConfig:
    """conf/shapes: a Hugging Face config, and the preset (conf/experiment) that has its draft's shape."""

    config: dict[str, Any]
    experiment: str | None
    dtype: str

    def __post_init__(self) -> None:
        check(self.dtype in DTYPES, f"shapes.dtype={self.dtype}: must be one of {', '.join(DTYPES)}")

    @property
    def target(self) -> Any:
        """The target's Hugging Face config. Raises UserError for one that transformers refuses."""
        check("model_type" in self.config, "shapes.config: must have a model_type")
        try:
            return AutoConfig.for_model(**self.config)
        except (ValueError, StrictDataclassError) as error:
            raise UserError(f"shapes.config: {one_line(error.__cause__ or error)}") from error

    @property
    def draft(self) -> DraftConfig:
        """The draft's config."""
        given, kind = dict[str, Any](), EagleConfig.kind
        if self.experiment is not None:
            preset = OmegaConf.load(CONF_DIR / "experiment" / f"{self.experiment}.yaml")
            chosen: Any = OmegaConf.to_container(preset)
            given = chosen.get("draft", {})
            choices = {key: value for each in chosen.get("defaults", []) for key, value in each.items()}
            kind = choices.get("override /draft", kind)
        return planned_config(self.target, {"kind": kind, **given})


def random_target(config: Any, dtype: torch.dtype, device: str, tokenizer: Any = None) -> Target:
    """A target with this Hugging Face config and its class's initial weights."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, tokenizer, "random")


def random_models(shapes: ShapesConfig, device: str, seed: int) -> tuple[Target, Draft]:
    """Target and draft; `dtype` auto: the dtype in which targets are loaded on that device."""
    dtype = DTYPES[shapes.dtype] or default_dtype(device)
    warn_of_emulation("shapes.dtype", dtype, device)
    torch.manual_seed(seed)
    return random_target(shapes.target, dtype, device), shapes.draft.module().init_weights(seed)


def described(target: Target) -> str:
    """A random target, for a report."""
    size = sum(parameter.numel() for parameter in target.model.parameters())
    number = f"{size / 1e9:.3g} billion" if size >= 1e9 else f"{size / 1e6:.3g} million"
    return f"a random {target.config.model_type} of {number} parameters"


def check_random(shares: list[float], depth: int, given: str, trees: str) -> None:
    """Raise UserError for simulated acceptance that is no falling shares down to a depth. `given`, `trees`: the key of
    the shares and that of the trees, with their values."""
    falling = len(shares) >= depth and sorted(shares, reverse=True) == shares
    check(
        falling and all(0 <= share <= 1 for share in shares),
        f"{given}: must be {depth} shares, by depth, none above the one before; one of {trees} is so deep",
    )
