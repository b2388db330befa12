"""The project's own code, as tests of its structure read it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def sources() -> dict[str, str]:
    """The text of every module, by its dotted name; a package's `__init__` has the package's name."""
    found = {}
    for folder in ("eagle_train", "evals", "data"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found
