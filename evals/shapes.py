"""Targets of a given shape with random weights, and rounds that accept as told: latency without a checkpoint.

A random draft never guesses a random target's tokens, so what is accepted is drawn instead; all else is the engine's
own work. DESIGN section 3.8. Knows nothing of measuring.
"""

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_train.errors import UserError, check, one_line
from eagle_train.hardware import warn_of_emulation
from eagle_train.inference import Engine
from eagle_train.inference.decode.sampling import Verified, uniform
from eagle_train.inference.drafters.drafter import Plan
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.loading import DTYPES, default_dtype
from eagle_train.models.target import Target
from eagle_train.settings import CONF_DIR


@dataclass
class ShapesConfig:
    """conf/shapes: a Hugging Face config, and the preset (conf/experiment) whose draft is made for it."""

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
        given = {}
        if self.experiment is not None:
            preset = OmegaConf.load(CONF_DIR / "experiment" / f"{self.experiment}.yaml")
            given = OmegaConf.to_container(preset).get("draft", {})
        return DraftConfig.from_target(self.target, **given)


def random_target(config: Any, dtype: torch.dtype, device: str, tokenizer: Any = None) -> Target:
    """A target with this Hugging Face config and weights as its class draws them."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, tokenizer, "random")


def models_of(shapes: ShapesConfig, device: str, seed: int) -> tuple[Target, Draft]:
    """Target and draft; `dtype` auto is what a target is loaded in on that device."""
    dtype = DTYPES[shapes.dtype] or default_dtype(device)
    warn_of_emulation("shapes.dtype", dtype, device)
    torch.manual_seed(seed)
    return random_target(shapes.target, dtype, device), Draft(shapes.draft).init_weights(seed)


class ToldEngine(Engine):
    """An engine whose rounds accept down to depth d with the probability acceptance[d - 1], whatever was drafted.

    The draw depends on a request's seed and position alone. Of a depth's nodes the first is taken.
    """

    def __init__(self, acceptance: list[float], *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.acceptance = torch.tensor(acceptance, dtype=torch.float64, device=self.target.device)

    def sample(self, plan: Plan, tokens: torch.Tensor, logits: torch.Tensor, q: torch.Tensor | None) -> Verified:
        """Verifies as ever, which takes its time, and then accepts as told. The next token is the verified one."""
        verified = super().sample(plan, tokens, logits, q)
        drawn = uniform(self.settings.seeds, self.prefix.lengths, 1)
        accepted = (drawn < self.acceptance[: plan.tree.max_depth]).sum(1)
        return Verified(torch.searchsorted(plan.tree.depth, accepted), verified.next_token)
