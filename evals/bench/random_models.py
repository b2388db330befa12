"""Targets of a given shape with random weights, and drafts for them: measurements without a checkpoint.

Ranks that hold a target together each make their own part of it. Its weights follow from the seed alone, whatever the
number of ranks. Knows nothing of what is measured. DESIGN section 3.8.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from eagle_train.distributed import ALONE, World
from eagle_train.drafts import Draft, DraftConfig, EagleConfig, planned_config
from eagle_train.drafts.kind import INIT_STD
from eagle_train.errors import UserError, check, one_line
from eagle_train.hardware import warn_of_emulation
from eagle_train.inference.options import DraftOptions
from eagle_train.models.family import AUTO_CLASSES, auto_class
from eagle_train.models.loading import (
    DTYPES,
    TargetConfig,
    check_placement,
    default_dtype,
    placement_options,
    together_of,
)
from eagle_train.models.target import Target
from eagle_train.models.weights import full_tensor, indices_held
from eagle_train.settings import CONF_DIR

_BLOCK = 2**24  # numbers that are drawn at once, or a row of the weight where that has more
AS_TARGET = TargetConfig("random")


@dataclass(kw_only=True)
class RandomDraftOptions(DraftOptions):
    """The same, or of a random draft: the `window` and the `sink` of a `DraftConfig`."""

    window: int | None
    sink: bool

    def check_read(self) -> None:
        """Raise UserError for what only a random draft takes from here."""
        for key, value, default in (("window", self.window, None), ("sink", self.sink, False)):
            own = str(value).lower()
            check(value == default, f"draft.{key}={own}: needs shapes; a real draft has its own")


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


def random_target(
    config: Any, dtype: torch.dtype, device: str, tokenizer: Any = None, seed: int = 0, world: World = ALONE
) -> Target:
    """A target with this Hugging Face config, which the ranks of `world` hold together where there are several.

    Weights are normal, as wide as the config says its class begins them; what that begins as a constant stays. Raises
    UserError for a config that is no target's, or that so many ranks cannot divide."""
    placement = "tensor" if world.size > 1 else "replicated"
    check_placement(AS_TARGET, config, placement, world.shard_size)
    model_class = AUTO_CLASSES[auto_class(config, "shapes.config")][type(config)]
    options = placement_options(AS_TARGET, torch.device(device), placement, world)
    with _told_nothing():  # that all weights are missing
        model = model_class.from_pretrained(None, config=config, state_dict={}, dtype=dtype, **options)
    _draw(model, seed)
    return Target(model, tokenizer, AS_TARGET.path, together_of(model, placement, world))


@contextmanager
def _told_nothing() -> Iterator[None]:
    """transformers warns of nothing and shows no progress."""
    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()


@torch.no_grad()
def _draw(model: PreTrainedModel, seed: int) -> None:
    """Give every weight its numbers by `seed` and its name; of a divided one, this rank's of them."""
    std = getattr(model.config.get_text_config(), "initializer_range", INIT_STD)
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            whole = full_tensor(weight)
            if whole.min() == whole.max():  # a norm or a bias
                continue
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
        generator = torch.Generator(own.device).manual_seed(number)
        _draw_one(weight, own, std, generator)


def _draw_one(weight: torch.Tensor, own: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """`own`: this rank's part of `weight`. What is drawn at once follows from the whole shape, so that all draw the
    same."""
    held: list[torch.Tensor] = []
    if isinstance(weight, DTensor):
        held = [indices_held(weight, dim) for dim in range(weight.ndim)]
    rows = max(1, _BLOCK // math.prod(weight.shape[1:]))
    for start in range(0, len(weight), rows):
        shape = (min(rows, len(weight) - start), *weight.shape[1:])
        block = torch.randn(shape, generator=generator, device=own.device) * std
        place = torch.arange(start, start + len(block), device=own.device)
        if held:
            for dim, indices in enumerate(held[1:], 1):
                block = block.index_select(dim, indices)
            place = ((held[0] >= start) & (held[0] < start + shape[0])).nonzero()[:, 0]
            block = block[held[0][place] - start]
        own.index_copy_(0, place, block.to(own.dtype))


def random_models(
    shapes: ShapesConfig, draft: RandomDraftOptions, device: str, seed: int, world: World = ALONE
) -> tuple[Target, Draft]:
    """Target and draft; `dtype` auto: the dtype in which targets are loaded on that device. The draft is whole on each
    rank, as one that is loaded."""
    dtype = DTYPES[shapes.dtype] or default_dtype(device)
    warn_of_emulation("shapes.dtype", dtype, device)
    shape = replace(shapes.draft, window=draft.window, sink=draft.sink)
    return random_target(shapes.target, dtype, device, None, seed, world), shape.module().init_weights(seed)


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
