"""Evaluations are short, import nothing of evals but evals/bench, and use an engine's public names alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_train import inference

ROOT = Path(__file__).parents[2]
EVALS = ROOT / "evals"
EVALUATIONS = sorted(path for path in EVALS.glob("*.py") if path.stem != "__init__")
FILES = [*EVALUATIONS, *sorted((EVALS / "bench").rglob("*.py"))]
MOST_LINES = 150
ENGINE = {name for name in dir(inference.Engine) if not name.startswith("_")} | {"config", "target", "dispatcher"}


def imports(text: str) -> Iterator[str]:
    """The modules that a file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def engine_attributes(text: str) -> Iterator[str]:
    """The attributes of variables and attributes named `engine`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if owner == "engine":
                yield node.attr


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_an_evaluation_is_short(path):
    assert len(path.read_text("utf-8").splitlines()) < MOST_LINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_evaluation_is_imported(path):
    own = [name for name in imports(path.read_text("utf-8")) if name.split(".")[0] == "evals"]
    assert [name for name in own if not name.startswith("evals.bench.")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_engines_are_used_by_their_public_names(path):
    used = set(engine_attributes(path.read_text("utf-8")))
    assert used - ENGINE == set()


def test_the_test_can_tell():
    text = "from evals.mt_bench import main\nrun.engine._scheduler\nengine.step()"
    assert list(imports(text)) == ["evals.mt_bench.main"]
    assert sorted(engine_attributes(text)) == ["_scheduler", "step"]
    assert "scheduler" not in ENGINE
