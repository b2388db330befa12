"""The scripts in examples/ run as they are, on the bundled target and with few steps and tokens.

Each is started once as a program; what else is asked of it runs in this process, which has torch already.
"""

import gzip
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_train import generate
from tests.support.command_line import call, chats, save_target, write_jsonl

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command: str, **environment: str) -> str:
    """The output of a program of examples/, started in the repository's root."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment = os.environ | paths | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def small_model(*arguments: str) -> None:
    """examples/small_model.py in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["small_model.py", *arguments])
        runpy.run_path("examples/small_model.py", run_name="__main__")


@pytest.fixture
def answered(capsys, monkeypatch) -> Callable[..., str]:
    """What eagle-generate, called in the repository's root, answers, without the marks of what was drafted."""
    monkeypatch.chdir(ROOT)

    def answer(*overrides: str) -> str:
        capsys.readouterr()
        assert call(generate.main, "prompt=What is `len`?", "device=cpu", "color=never", *overrides) == 0
        return re.sub(r"[\[\]]", "", capsys.readouterr().out)

    return answer


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


def test_own_drafter(answered):
    """examples/own_drafter.py by examples/own_drafter.yaml: its answer is plain decoding's."""
    own = ("drafter=examples/own_drafter.yaml", "drafter.least=2", "tree=chain4")
    assert answered("max_tokens=24", *own) == answered("max_tokens=24")


def test_small_model(answered, tmp_path):
    """What examples/small_model.py makes drafts for its target."""
    out, answers = tmp_path / "small", tmp_path / "chats.jsonl"
    with gzip.open(ROOT / "data/tiny_target/answers.jsonl.gz", "rt", encoding="utf-8") as rows:
        answers.write_text("".join(islice(rows, 20)), "utf-8")
    given = ("data/tiny_target", str(out), "--chats", str(answers), "--layers", "0", "11", "--minutes", "0.01")
    said = run(sys.executable, "examples/small_model.py", *given)
    assert "2.6 M parameters" in said.splitlines()[-1]
    drafted = answered("max_tokens=8", "drafter=draft_model", f"drafter.path={out}", "tree=chain2")
    assert drafted == answered("max_tokens=8")


@pytest.mark.parametrize("layers", [("0", "12"), ("-1", "3"), ("5", "0"), ("3", "3")])
def test_small_model_of_layers_that_the_target_has_not(layers, tmp_path, capsys):
    given = ("data/tiny_target", str(tmp_path / "small"), "--chats", "none.jsonl", "--layers", *layers)
    with pytest.raises(SystemExit) as end:
        small_model(*given)
    asked = "in rising order, each once, from 0 to 11, the last layer of data/tiny_target"
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: --layers {' '.join(layers)}: must be {asked}\n")


def test_small_model_takes_its_layers_from_the_target(tmp_path):
    """Without --layers: the first, the middle and the last. In no time nothing is learnt: they are the target's."""
    target, out = save_target(tmp_path / "target", num_hidden_layers=5), tmp_path / "small"
    texts = str(write_jsonl(tmp_path / "chats.jsonl", chats(4)))
    small_model(str(target), str(out), "--chats", texts, "--minutes", "1e-9")
    small, whole = (load_file(path / "model.safetensors") for path in (out, target))
    name = "model.layers.{}.mlp.up_proj.weight"
    assert {key for key in small if key.endswith("mlp.up_proj.weight")} == {name.format(layer) for layer in range(3)}
    assert all(torch.equal(small[name.format(i)], whole[name.format(layer)]) for i, layer in enumerate((0, 2, 4)))


def test_every_script_is_run_here():
    text = Path(__file__).read_text("utf-8")
    assert all(f"examples/{path.name}" in text for path in (ROOT / "examples").iterdir() if path.is_file())
