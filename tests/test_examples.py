"""The scripts in examples/ run as they are, on the bundled target and with few steps and tokens."""

import gzip
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command: str, **environment: str) -> str:
    """The output of a program of examples/, started in the repository's root."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    """What examples/train.sh exports."""
    out = tmp_path_factory.mktemp("examples")
    overrides = ["train.steps=2", "optim.tokens_per_step=128", "train.micro_batch_rows=1", "data.row_tokens=64"]
    assert "steps: 2" in run("bash", "examples/train.sh", *overrides, OUT=str(out))
    return str(out / "draft")


def test_generate(draft):
    prompts = ("What is `len`?", "And `str`?")
    said = run(sys.executable, "examples/generate.py", *prompts, "--draft", draft, "--max-tokens", "5")
    assert all(f"> {prompt}\n" in said for prompt in prompts)
    assert said.count("(5 tokens in ") == 2


def test_own_prompts(draft, tmp_path):
    (tmp_path / "prompts.txt").write_text("What is `len`?\n\nAnd `str`?\n")
    given = ("--draft", draft, "--trees", "chain1", "d2_bf2", "--max-tokens", "5")
    said = run(sys.executable, "examples/own_prompts.py", str(tmp_path / "prompts.txt"), *given)
    assert [line.split(":")[0] for line in said.splitlines()] == ["chain1", "d2_bf2"]
    assert said.count("(2 answers, 8 tokens, ") == 2


def test_own_drafter():
    """examples/own_drafter.py by examples/own_drafter.yaml: its answer is plain decoding's."""
    given = ("-m", "eagle_train.generate", "prompt=What is `len`?", "max_tokens=24", "device=cpu", "color=never")
    drafted = run(sys.executable, *given, "drafter=examples/own_drafter.yaml", "drafter.least=2", "tree=chain4")
    plain = run(sys.executable, *given)
    assert re.sub(r"[\[\]]", "", drafted) == re.sub(r"[\[\]]", "", plain)


def test_small_model(tmp_path):
    """What examples/small_model.py makes drafts for its target."""
    out, chats = tmp_path / "small", tmp_path / "chats.jsonl"
    with gzip.open(ROOT / "data/tiny_target/answers.jsonl.gz", "rt", encoding="utf-8") as rows:
        chats.write_text("".join(islice(rows, 20)), "utf-8")
    given = ("data/tiny_target", str(out), "--chats", str(chats), "--layers", "0", "11", "--minutes", "0.01")
    said = run(sys.executable, "examples/small_model.py", *given)
    assert "2.6 M parameters" in said.splitlines()[-1]
    prompt = ("-m", "eagle_train.generate", "prompt=What is `len`?", "max_tokens=8", "device=cpu", "color=never")
    drafted = run(sys.executable, *prompt, "drafter=draft_model", f"drafter.path={out}", "tree=chain2")
    assert re.sub(r"[\[\]]", "", drafted) == re.sub(r"[\[\]]", "", run(sys.executable, *prompt))


def test_every_script_is_run_here():
    text = Path(__file__).read_text("utf-8")
    assert all(f"examples/{path.name}" in text for path in (ROOT / "examples").iterdir() if path.is_file())
