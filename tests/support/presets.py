"""The shapes of conf/shapes, as commands read them."""

from eagle_train.cli import compose
from eagle_train.settings import build
from evals.bench.random_models import ShapesConfig


def shapes_of(name: str) -> ShapesConfig:
    return build(ShapesConfig, compose("latency", [f"shapes={name}"]).shapes, "shapes")
