"""The shapes of conf/shapes, as commands read them."""

import hydra

from eagle_train.settings import CONF_DIR, build
from evals.shapes import ShapesConfig


def shapes_of(name: str) -> ShapesConfig:
    with hydra.initialize_config_dir(str(CONF_DIR.resolve()), version_base="1.3"):
        return build(ShapesConfig, hydra.compose("commands/latency", [f"shapes={name}"]).shapes, "shapes")
