"""Formats of rows and files that are added as CONTRIBUTING.md says, in a copy of the package, are read by
eagle-train."""

import gzip
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.command_line import write_jsonl
from tests.support.pages import ROOT, text_of

Edit = tuple[str, str, str]
"""A file of the corpus, the text there, and what is put in its place."""


@pytest.fixture
def copy(tmp_path) -> Path:
    for folder in ("eagle_train", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def recipe(title: str) -> tuple[str, list[str]]:
    """A section of CONTRIBUTING.md, and its blocks of code."""
    section = text_of("CONTRIBUTING.md").partition(f"## {title}")[2].partition("\n## ")[0]
    found = re.findall(r"```(?:python|yaml)\n(.*?) +```", section, re.DOTALL)
    return section, [textwrap.dedent(block) for block in found]


def edit(copy: Path, edits: tuple[Edit, ...]) -> None:
    for name, old, new in edits:
        file = copy / "eagle_train" / "corpus" / name
        assert file.read_text("utf-8").count(old) == 1, old
        file.write_text(file.read_text("utf-8").replace(old, new))


def previewed(copy: Path, section: str, *overrides: str) -> str:
    """What the section's last command prints."""
    command = re.search(r"^    eagle-train (preview=.*)$", section, re.MULTILINE)[1].split()
    done = subprocess.run(
        [sys.executable, "-m", "eagle_train.train", *command, *overrides],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_recipe_of_a_row_format_works(copy, tiny_checkpoint):
    section, (columns, branch, function, yaml, comment) = recipe("Add a row format")
    named, beside = columns.splitlines()
    last = '    else:\n        assert data_format == "prompt_response"'
    edit(
        copy,
        (
            ("columns.py", "\nFORMATS = {\n", f"\nFORMATS = {{\n{named}\n"),
            ("columns.py", "\nBESIDE = {\n", f"\nBESIDE = {{\n{beside}\n"),
            ("conversations.py", last, textwrap.indent(branch, "    ") + last),
            ("conversations.py", "\ndef _as_turns", f"\n{function}\n\ndef _as_turns"),
            ("source.py", comment.strip().removesuffix(" | dialog"), comment.strip()),
        ),
    )
    (copy / "conf" / "data" / "dialog.yaml").write_text(yaml)
    write_jsonl(copy / "FILE.jsonl", [{"dialog": ["Hi", "Hello", "How are you?", "Well."]}])
    out = previewed(copy, section, f"target={tiny_checkpoint}")
    assert "[Hello" in out
    assert "1 rows shown" in out


def test_the_recipe_of_a_file_format_works(copy, tiny_checkpoint):
    section, (names, module, reader) = recipe("Add a file format")
    suffixes, refused = (line.partition("  #")[0] for line in names.splitlines())
    edit(
        copy,
        (
            ("file_formats.py", "\nKINDS = {\n", f"\nKINDS = {{\n{suffixes}\n"),
            ("file_formats.py", f"    {refused}\n", ""),
            ("source.py", "Source]] = {\n", f"Source]] = {{\n{reader}"),
            ("source.py", "\nfrom typing", "\nfrom eagle_train.corpus.tsv_files import TsvFiles\nfrom typing"),
        ),
    )
    (copy / "eagle_train" / "corpus" / "tsv_files.py").write_text(module)
    text = "prompt\tresponse\nHi\tHello\nmalformed\nLatin: \xe9\tno\nBye\tTill then\n".encode()
    (copy / "FILE.tsv").write_bytes(text.replace(b"\xc3", b""))
    (copy / "FILE.tsv.gz").write_bytes(gzip.compress(text))
    out = previewed(copy, section, f"target={tiny_checkpoint}", "data.malformed=skip")
    assert "[Hello" in out
    assert "[Till" in out
    assert "FILE.tsv:3: 1 columns, where the first line has 2" in out
    assert "FILE.tsv:4: not UTF-8" in out
    packed = previewed(copy, section, f"target={tiny_checkpoint}", "data.malformed=skip", "data.path=FILE.tsv.gz")
    assert "[no" in packed
