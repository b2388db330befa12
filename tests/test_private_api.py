"""Private API of other libraries is used in the modules that are made for it, and nowhere else. Read from the code."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.sources import ROOT, sources

# Where a library's private symbols may be: each has its versions and its reasons there.
PRIVATE_ROOMS = {
    "eagle_train.ops.torch_private",
    "eagle_train.transformers_private",
    "eagle_train.hydra_private",
    "eagle_train.training.deepspeed",  # all that knows DeepSpeed
}
# Of Python's own, whose versions `requires-python` bounds.
OF_PYTHON = {
    "eagle_train.distributed": {"_exit", "_shutdown", "_run_exitfuncs"},
    "eagle_train.corpus.feed": {"_exit", "_processes", "_result_queue", "_writer", "_call_queue", "_reader"},
}
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make"}  # of namedtuples
OWN = ("self", "cls")
SURGERY = "eagle_train.models.patches"  # where objects may be given another class


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def private_uses(text: str) -> Iterator[tuple[int, str]]:
    """The line and name of each private symbol that a module uses and does not define itself."""
    tree = ast.parse(text)
    own = set(defined_in(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used = [(part, alias.name) for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            used = [(name, f"{node.module}.{name}") for name in names]
        elif isinstance(node, ast.Attribute) and not is_own(node.value):
            used = [(node.attr, ast.unparse(node))]
        elif isinstance(node, ast.Call) and named_attribute(node) is not None:
            used = [(named_attribute(node), ast.unparse(node))]
        else:
            continue
        for name, shown in used:
            is_torchs = name == "_C" or ".".join(shown.split(".")[:2]) == "torch._C"
            if (is_private(name) and name not in DOCUMENTED and name not in own) or is_torchs:
                yield node.lineno, shown


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, and attributes of `self` that a module makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(node: ast.AST) -> bool:
    """`self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in OWN


def named_attribute(call: ast.Call) -> str | None:
    """The attribute that a call of getattr, setattr or hasattr names."""
    if not isinstance(call.func, ast.Name) or call.func.id not in ("getattr", "setattr", "hasattr"):
        return None
    name = call.args[1] if len(call.args) > 1 else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def violations(texts: dict[str, str]) -> list[str]:
    return [
        f"{module}:{line}: {shown}"
        for module, text in texts.items()
        if module not in PRIVATE_ROOMS
        for line, shown in private_uses(text)
        if shown.rsplit(".", 1)[-1] not in OF_PYTHON.get(module, ())
    ]


def operations(texts: dict[str, str]) -> list[str]:
    """Where a module changes the class or the code of an object."""
    return [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in ("__class__", "__code__")
    ]


def test_classes_are_changed_in_one_module_only():
    found = operations(sources())
    assert found
    assert all(each.startswith(f"{SURGERY}:") for each in found)
    assert operations({"x": "module.__class__ = Other"}) == ["x:1: module.__class__"]
    assert operations({"x": "module.__class__.__name__"}) == []


def test_private_api_is_used_where_it_is_documented_only():
    assert violations(sources()) == []


def test_every_room_is_there_and_every_exception_is_needed():
    texts = sources()
    assert set(texts) >= PRIVATE_ROOMS
    for module, names in OF_PYTHON.items():
        assert {shown.rsplit(".", 1)[-1] for _, shown in private_uses(texts[module])} == names


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._dynamo import config",
        "from torch.distributed.tensor import _utils",
        "from transformers.utils import _names",
        "torch._scaled_mm(x)",
        "torch.ops.aten._weight_int4pack_mm(x)",
        "torch._C.anything()",
        "model._supports_sdpa",
        "self.pool._processes",
        "getattr(model, '_is_stateful', False)",
        "from eagle_train.ops.linear import _helper",
    ],
)
def test_the_test_can_tell(text):
    assert len(violations({"eagle_train.x": text})) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "self._x = 1\nother._x",
        "def _f():\n    pass\n_f()",
        "super()._decode()",
        "x._replace(a=1)",
        "x.__class__",
        "for _ in y: pass",
        "getattr(model, 'is_stateful', False)",
    ],
)
def test_what_is_allowed(text):
    assert violations({"eagle_train.x": text}) == []


def test_each_private_function_says_what_it_is_for_and_what_is_missing():
    for module in PRIVATE_ROOMS - {"eagle_train.training.deepspeed"}:
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                assert "Missing: " in (ast.get_docstring(node) or ""), node.name
