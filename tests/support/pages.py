"""README and the guides as text: their code, their commands, and what each command says that it needs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *GUIDES, "data/tiny_target/README.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRAGMENT = re.compile(r"^ +```.*?^ +```", re.MULTILINE | re.DOTALL)  # of a file, below an item of a list
# A command that no test runs says why, on its line or on a line of comment above it.
MARK = re.compile(r"#.*\b(needs (a GPU|a cluster|a server|the hub|vLLM|an MTP module)|takes( \d+)? minutes)\b")


@dataclass(frozen=True)
class Command:
    """A command of a block of shell code. `line`: without its comment; `mark`: why no test runs it, if none does."""

    page: str
    line: str
    mark: str | None


def text_of(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in that language (bash, python), block by block."""
    return [code for found, code in BLOCK.findall(text_of(page)) if found == language]


def codes(page: str) -> list[str]:
    """Code of a page that is not Python: the lines of its blocks, continued ones joined, and spans in the text."""
    text = FRAGMENT.sub("", text_of(page))
    shown = [code for language, code in BLOCK.findall(text) if language != "python"]
    lines = [line for block in shown for line in block.replace("\\\n", " ").splitlines()]
    return lines + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]


def shell_commands(page: str) -> Iterator[Command]:
    """Those of its bash blocks. A comment on a line of its own holds for the commands below it, to the next one."""
    for block in blocks(page, "bash"):
        above = None
        for line in block.replace("\\\n", " ").splitlines():
            code, _, _ = line.partition(" #") if not line.startswith("#") else ("", "", "")
            mark = MARK.search(line)
            if line.startswith("#"):
                above = mark
            elif code.strip():
                found = mark or above
                yield Command(page, " ".join(code.split()), found[1] if found else None)
