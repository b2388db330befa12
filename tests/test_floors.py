"""The house's floors, checked from the code's own imports: they run downwards only. DESIGN section 2."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.sources import sources

FLOORS = {
    "eagle_train": 0,  # the package's __init__, which is empty
    "eagle_train.ops": 1,
    "eagle_train.errors": 1,
    "eagle_train.settings": 1,
    "eagle_train.results": 1,
    "eagle_train.hardware": 1,
    "eagle_train.progress": 1,
    "eagle_train.profiling": 1,
    "eagle_train.trace": 1,
    "eagle_train.terminal": 1,
    "eagle_train.tree_names": 1,
    "eagle_train.transformers_private": 1,
    "eagle_train.distributed": 1,
    "eagle_train.one_writer": 1,
    "eagle_train.models": 2,
    "eagle_train.corpus": 2,
    "eagle_train.drafts": 3,
    "eagle_train.artifacts": 3,
    "eagle_train.training": 4,
    "eagle_train.inference": 4,
    "eagle_train.fields": 5,
    "eagle_train.regeneration": 5,
    "eagle_train.retrieval": 5,
    "eagle_train.caching": 5,
    "eagle_train.diagnosis": 5,
    "eagle_train.usage": 5,
    "eagle_train.misread": 5,
    "eagle_train.cli": 5,
    "eagle_train.hydra_private": 5,
    "eagle_train.commands": 6,
    "eagle_train.train": 6,
    "eagle_train.export": 6,
    "eagle_train.generate": 6,
    "eagle_train.regenerate": 6,
    "eagle_train.datastore": 6,
    "eagle_train.cache": 6,
    "eagle_train.doctor": 6,
    "evals": 7,
    "data": 7,
}
STRANGERS = [
    ("eagle_train.training", "eagle_train.inference"),
    ("eagle_train.models", "eagle_train.corpus"),
]
BELOW = [("eagle_train.drafts", "eagle_train.artifacts")]  # on one floor, the first knows nothing of the second
# Not needed by who does not use it, so never at a module's top level.
ONLY_WHERE_USED = ("compressed_tensors", "deepspeed", "xgrammar")
# Of these the floors of commands alone know.
COMMANDS_ONLY = ("hydra",)


def room(module: str) -> str | None:
    """The part of the house that a module belongs to, None outside."""
    parts = module.split(".")
    if parts[0] != "eagle_train":
        return parts[0] if parts[0] in FLOORS else None
    return ".".join(parts[:2])


def imports(module: str, text: str) -> Iterator[tuple[str, bool]]:
    """What a module imports, wherever in its text, and whether that happens when it is imported."""
    tree = ast.parse(text)
    inner = {id(node) for function in ast.walk(tree) if is_function(function) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            # `from eagle_train import errors` names a module; `from eagle_train.errors import check` does not
            yield from ((f"{node.module}.{alias.name}", id(node) not in inner) for alias in node.names)


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def violations(texts: dict[str, str]) -> list[str]:
    """One line for each import that the house does not allow, and for each module that is on no floor."""
    found = [f"{module} is on no floor" for module in texts if room(module) not in FLOORS]
    for module, text in texts.items():
        here = room(module)
        for name, at_top in imports(module, text):
            there = room(name)
            if name.split(".")[0] in ONLY_WHERE_USED and at_top:
                found.append(f"{module} imports {name} at its top level")
            if name.split(".")[0] in COMMANDS_ONLY and FLOORS.get(here or "", 9) < 5:
                found.append(f"{module} imports {name}")
            if here not in FLOORS or there is None or there == here:
                continue
            upwards = FLOORS.get(there, 0) > FLOORS[here] or there in ("evals", "data") or (here, there) in BELOW
            strangers = (here, there) in STRANGERS or (there, here) in STRANGERS
            if upwards or strangers or (FLOORS[here] == 6 and FLOORS.get(there) == 6):
                found.append(f"{module} imports {name}")
    return found


def test_imports_run_downwards():
    assert violations(sources()) == []


def test_every_room_is_looked_into():
    rooms = {room(module) for module in sources()}
    assert rooms >= {"eagle_train.ops", "eagle_train.models", "eagle_train.corpus", "eagle_train.inference"}
    assert rooms >= {"eagle_train.training", "eagle_train.errors", "eagle_train.train", "data"}


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("eagle_train.ops.x", "from eagle_train.models.head import LMHead", "imports eagle_train.models.head.LMHead"),
        (
            "eagle_train.drafts.x",
            "from eagle_train.artifacts import format",
            "imports eagle_train.artifacts.format",
        ),
        (
            "eagle_train.models.x",
            "import eagle_train.inference.decode.tree",
            "imports eagle_train.inference.decode.tree",
        ),
        ("eagle_train.models.x", "from eagle_train import inference", "imports eagle_train.inference"),
        (
            "eagle_train.models.x",
            "from eagle_train.corpus import conversations",
            "imports eagle_train.corpus.conversations",
        ),
        ("eagle_train.corpus.x", "import eagle_train.models", "imports eagle_train.models"),
        ("eagle_train.training.x", "def f():\n    import eagle_train.inference", "imports eagle_train.inference"),
        ("eagle_train.inference.x", "if True:\n    import eagle_train.training", "imports eagle_train.training"),
        ("eagle_train.train", "import evals.mt_bench", "imports evals.mt_bench"),
        ("eagle_train.generate", "from eagle_train.train import main", "imports eagle_train.train.main"),
        ("evals.x", "import data.train_target", "imports data.train_target"),
        ("eagle_train.training.x", "import deepspeed.ops", "imports deepspeed.ops at its top level"),
        ("eagle_train.training.x", "class C:\n    from deepspeed import x", "imports deepspeed.x at its top level"),
        ("eagle_train.inference.x", "from hydra.utils import instantiate", "imports hydra.utils.instantiate"),
        ("eagle_train.extras", "", "is on no floor"),
    ],
)
def test_the_test_can_tell(module, text, said):
    assert violations({module: text}) == [f"{module} {said}"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("eagle_train.training.x", "def f():\n    import deepspeed"),
        (
            "eagle_train.training.x",
            "from eagle_train.corpus import feed\nfrom eagle_train.models import head",
        ),
        ("eagle_train.inference.x", "from eagle_train.inference.decode.tree import chain\nimport torch"),
        ("evals.x", "from eagle_train.train import main\nfrom evals.y import z"),
        ("eagle_train.errors", "import eagle_train.distributed"),
    ],
)
def test_what_is_allowed(module, text):
    assert violations({module: text}) == []
