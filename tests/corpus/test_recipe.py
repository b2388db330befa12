"""A row format that is added as CONTRIBUTING.md says, in a copy of the package, is read by eagle-train."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

from tests.support.command_line import write_jsonl
from tests.support.pages import ROOT, text_of


def test_the_recipe_of_a_row_format_works(tmp_path, tiny_checkpoint):
    for folder in ("eagle_train", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    section = text_of("CONTRIBUTING.md").partition("## Add a row format")[2].partition("\n## ")[0]
    found = re.findall(r"```(?:python|yaml)\n(.*?) +```", section, re.DOTALL)
    columns, branch, function, yaml, comment = (textwrap.dedent(block) for block in found)
    named, beside = columns.splitlines()
    last = '    else:\n        assert data_format == "prompt_response"'
    edits = (
        ("columns.py", "\nFORMATS = {\n", f"\nFORMATS = {{\n{named}\n"),
        ("columns.py", "\nBESIDE = {\n", f"\nBESIDE = {{\n{beside}\n"),
        ("conversations.py", last, textwrap.indent(branch, "    ") + last),
        ("conversations.py", "\ndef _as_turns", f"\n{function}\n\ndef _as_turns"),
        ("source.py", comment.strip().removesuffix(" | dialog"), comment.strip()),
    )
    for name, old, new in edits:
        file = tmp_path / "eagle_train" / "corpus" / name
        assert file.read_text("utf-8").count(old) == 1, old
        file.write_text(file.read_text("utf-8").replace(old, new))
    (tmp_path / "conf" / "data" / "dialog.yaml").write_text(yaml)
    write_jsonl(tmp_path / "FILE.jsonl", [{"dialog": ["Hi", "Hello", "How are you?", "Well."]}])
    command = re.search(r"^    eagle-train (preview=.*)$", section, re.MULTILINE)[1].split()
    done = subprocess.run(
        [sys.executable, "-m", "eagle_train.train", *command, f"target={tiny_checkpoint}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "[Hello" in done.stdout
    assert "1 rows shown" in done.stdout
