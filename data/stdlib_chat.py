"""Chat data from Python's standard library: a question names a function, and the answer is its code.

Writes `train.jsonl` and `heldout.jsonl` (OpenAI-style messages; no function, and no function body, is in both) and
`tests.jsonl` (functions of the standard library's test suite, which only the bundled target's training reads).
Needs nothing but Python; knows nothing of tokens or models. DESIGN section 4.

    python data/stdlib_chat.py outputs/stdlib_chat
"""

import argparse
import ast
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

HELDOUT_SHARE = 0.02  # of the library's functions, chosen by a hash of their names, so the split never moves
MIN_CHARS, MAX_CHARS = 60, 3000
PHRASINGS = (
    "Write the Python {kind} `{name}` of the module `{module}`.",
    "Show me how `{module}` implements the {kind} `{name}`.",
    "In the module `{module}`, implement the {kind} `{name}`.",
    "Please write `{name}`, a {kind} in `{module}`.",
)


def fraction(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Top-level functions and methods with their qualified names; functions inside functions stay inside."""

    def visit(node: ast.AST, prefix: str):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try):
                yield from visit(child, prefix)

    return visit(tree, "")


class WithoutProse(ast.NodeTransformer):
    """Strings of several words become '...', and annotations go."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_prose = isinstance(node.value, str | bytes) and len(node.value.split()) > 1
        return ast.Constant("...") if is_prose else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        words = " ".join(part.value for part in node.values if isinstance(part, ast.Constant)).split()
        return ast.Constant("...") if len(words) > 1 else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)


def conversation(module: str, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str, str]:
    """A question for a function (its module, parameters and purpose), its code in one style, and that code without the
    docstring, empty if there is nothing else.

    Of the docstring the first line is kept, which the question states. Comments, annotations and prose in strings are
    dropped: a model of this size repeats itself in prose, and a draft for it would be measured on that.
    """
    kind = "method" if "." in name else "function"
    purpose = (ast.get_docstring(function) or "").strip().partition("\n")[0].strip()
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:]
    function.returns = None
    plain = WithoutProse().visit(function)
    signature = f"{name}({ast.unparse(plain.args)})"
    phrasing = PHRASINGS[int(fraction(module + name + "phrasing") * len(PHRASINGS))]
    asked = f"{phrasing.format(kind=kind, name=signature, module=module)} {purpose}".strip()
    if not plain.body:
        return asked, "", ""
    bare = ast.unparse(plain)
    if purpose:
        plain.body = [ast.Expr(ast.Constant(purpose)), *plain.body]
    return asked, ast.unparse(plain), bare


def repeats_itself(code: str) -> bool:
    """True for tables and unrolled calls: more than a fifth of the function's lines equal another line."""
    lines = [line.strip() for line in code.splitlines() if len(line.strip()) > 12]
    return len(lines) > 4 and len(set(lines)) < 0.8 * len(lines)


def paths_of(library: Path) -> list[Path]:
    """The library's own files, in a fixed order."""
    others = {"site-packages", "dist-packages", "lib2to3", "__pycache__"}
    return [path for path in sorted(library.rglob("*.py")) if not others & set(path.relative_to(library).parts)]


def asked_of(library: Path, path: Path) -> list[tuple[str, str, str, str]]:
    """(name, question, code, code without docstring) of each suitable function of a file."""
    module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
    try:
        tree = ast.parse(path.read_text("utf-8", errors="ignore"))
    except (SyntaxError, ValueError):  # the test suite holds files that are wrong on purpose
        return []
    found = ((name, *conversation(module, name, function)) for name, function in functions(tree))
    return [
        (f"{module}:{name}", asked, code, bare)
        for name, asked, code, bare in found
        if MIN_CHARS <= len(bare) <= MAX_CHARS and not repeats_itself(bare)
    ]


def is_of_tests(library: Path, path: Path) -> bool:
    parts = path.relative_to(library).with_suffix("").parts
    return any("test" in part.split("_") or part in {"tests", "idle_test"} for part in parts)


def rows(library: Path) -> Iterator[tuple[str, dict]]:
    """(split, row) for every suitable function, duplicates dropped. Files are read by a process for each core; the
    result does not depend on their number."""
    seen, paths = set(), paths_of(library)
    with ProcessPoolExecutor() as pool:
        for path, found in zip(paths, pool.map(partial(asked_of, library), paths, chunksize=8), strict=True):
            for name, asked, code, bare in found:
                if bare in seen:
                    continue
                seen.add(bare)
                held_out = fraction(name) < HELDOUT_SHARE
                split = "tests" if is_of_tests(library, path) else "heldout" if held_out else "train"
                messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": code}]
                yield split, {"id": name, "messages": messages}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list[dict]] = {"train": [], "heldout": [], "tests": []}
    for split, row in rows(Path(sysconfig.get_paths()["stdlib"])):
        splits[split].append(row)
    for split, kept in splits.items():
        kept.sort(key=lambda row: fraction(row["id"]))  # functions of one module should not be neighbours in training
        unfinished = out / f"{split}.jsonl.partial"
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
        os.replace(unfinished, out / f"{split}.jsonl")
        chars = sum(len(message["content"]) for row in kept for message in row["messages"])
        print(f"{out / split}.jsonl: {len(kept)} functions, {chars / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the directory to write to")
    given = parser.parse_args()
    try:
        main(given.out)
    except OSError as error:
        parser.error(f"{error.filename or given.out}: {error.strerror}")
