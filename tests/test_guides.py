"""Every command and every Python block of README and the guides runs as it is written, or says why no test runs it.

Each page's commands run in its order, in a directory that has what the pages speak of: a target called USER/MODEL (the
bundled one), chats, questions, a run in outputs/mine and a draft. What would take minutes is made small by overrides
behind the documented ones.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_train import cache, datastore, doctor, export, generate, regenerate, train
from eagle_train.inference.grammar import expressions, json_schema
from evals import compare, experiments, gating, latency, layer_skip, mt_bench, report, switches, tune_trees
from tests.support.command_line import call, chats, write_jsonl
from tests.support.pages import PAGES, ROOT, Command, blocks, shell_commands

SMALL_RUN = ["train.steps=1", "optim.tokens_per_step=128", "data.row_tokens=64", "train.micro_batch_rows=1"]
SMALL_RUN += ["train.eval_batches=1", "device=cpu"]
SMALL_EVAL = ["limit=2", "max_tokens=3", "device=cpu"]
SMALL_BATCHES = ["batch_sizes=[1]", "repeats=1", "max_tokens=3", "device=cpu"]
# How a command starts, the function that it is, and overrides that make it small.
PROGRAMS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "eagle-train": (train.main, SMALL_RUN),
    "eagle-export": (export.main, ["device=cpu"]),
    "eagle-generate": (generate.main, ["max_tokens=3", "device=cpu"]),
    "eagle-regenerate": (regenerate.main, SMALL_EVAL),
    "eagle-datastore": (datastore.main, ["limit=20"]),
    "eagle-cache": (cache.main, SMALL_RUN),
    "eagle-doctor": (doctor.main, ["limit=2", "max_tokens=4", "device=cpu"]),
    "python -m evals.mt_bench": (mt_bench.main, SMALL_EVAL),
    "python -m evals.latency": (latency.main, [*SMALL_BATCHES, "context_lengths=[8]"]),
    "python -m evals.compare": (compare.main, SMALL_BATCHES),
    "python -m evals.gating": (gating.main, [*SMALL_BATCHES, "settle=0", "per_row=1", "others=[]"]),
    "python -m evals.layer_skip": (layer_skip.main, SMALL_EVAL),
    "python -m evals.tune_trees": (tune_trees.main, [*SMALL_EVAL, "batch_sizes=[1]", "nodes=[2]", "rounds=2"]),
    "python -m evals.report": (report.main, []),
    "python -m evals.experiments": (experiments.main, []),  # plans alone: what trains says how long it takes
    "python -m evals.switches": (switches.main, [*SMALL_BATCHES, "switches=[chunked_prefill]", "long_tokens=32"]),
}
LOOKS = ("plan=true", "preview=")  # runs of eagle-train that train nothing, so there is nothing to make small
FURTHER = {"rounding=gptq": ["calibration_tokens=128"], "tracking=wandb": ["tracking.mode=disabled"]}
FURTHER["draft=eagle3"] = ["draft.layers=[1]", "draft.vocab_size=20"]  # of a target as small as there
FURTHER["draft=peagle"] = FURTHER["draft=eagle3"]
FOUND = (0, 1)  # of a draft that was trained for a step the doctor has something to say
# What commands of the shell begin with, and what makes them small; they run in the repository's root.
SHELL = {"ruff": [], "pytest tests/inference/decode/test_tree.py": ["-k", "test_names_that_describe_no_tree"]}
ENVIRONMENT = "source .venv/bin/activate"  # which launch/setup.sh makes, and no process can do for another
COMMANDS = [each for page in PAGES for each in shell_commands(page)]


def program_of(line: str) -> str | None:
    return next((name for name in PROGRAMS if line.startswith(f"{name} ")), None)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line[:60])
def test_each_command_is_run_or_says_why_not(command):
    run = program_of(command.line) or command.line.startswith((*SHELL, ENVIRONMENT))
    assert command.mark or run, f"{command.page}: {command.line}: mark it (# needs a GPU, ...), or add its program here"


def test_commands_and_marks_are_found():
    lines = {command.line: command.mark for command in COMMANDS}
    assert lines["bash launch/quickstart.sh"] == "takes 10 minutes"
    assert lines["eagle-export checkpoint=outputs/mine layout=native out=outputs/mine/draft"] is None
    assert sum(mark is None for mark in lines.values()) >= 12


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """The directory that all pages begin with."""
    home = tmp_path_factory.mktemp("guides")
    for link, place in (("data", "data"), ("docs", "docs"), ("USER/MODEL", "data/tiny_target")):
        (home / link).parent.mkdir(exist_ok=True)
        (home / link).symlink_to(ROOT / place)
    rows = chats(40)
    for name in ("chats", "joined", "heldout", "a", "b", "outputs/stdlib_chat/train", "outputs/stdlib_chat/heldout"):
        (home / name).parent.mkdir(exist_ok=True, parents=True)
        write_jsonl(home / f"{name}.jsonl", rows)
    write_jsonl(
        home / "question.jsonl", [{"question_id": 1, "category": "math", "turns": ["What is `len`?", "And `str`?"]}]
    )
    write_jsonl(home / "languages.jsonl", [{"prompt": "Was ist `len`?", "language": "de"}] * 2)
    write_jsonl(home / "rows.jsonl", [{"question": "What is `len`?", "answer": "A function."}] * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        given = ["data=messages", "data.path=chats.jsonl", "draft.first_token=skip", "out=outputs/mine"]
        assert call(train.main, *given, *SMALL_RUN) == 0
        for draft in ("outputs/quickstart/draft", "outputs/mine/draft"):
            assert call(export.main, "checkpoint=outputs/mine", f"out={draft}", "device=cpu") == 0
    (home / "DIR").symlink_to("outputs/quickstart/draft")
    return home


@pytest.fixture
def home(prepared, tmp_path, monkeypatch) -> Path:
    """A copy of it, as the working directory."""
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "home", symlinks=True))
    return Path.cwd()


def small(words: list[str], overrides: list[str]) -> list[str]:
    """A command's words, and what makes it small behind them."""
    looks = any(word.startswith(LOOKS) for word in words)
    further = [each for word in words for each in FURTHER.get(word, [])]
    return [*words, *([] if looks else overrides), *further]


def run(command: Command) -> None:
    if command.line == ENVIRONMENT:
        return
    for begins, few in SHELL.items():
        if command.line.startswith(begins):
            subprocess.run([sys.executable, "-m", *shlex.split(command.line), *few], cwd=ROOT, check=True)
            return
    name = program_of(command.line)
    main, overrides = PROGRAMS[name]
    words = shlex.split(command.line.removeprefix(name))
    if main is train.main:  # it begins anew
        shutil.rmtree(dict(word.split("=", 1) for word in words).get("out", "outputs/train"), ignore_errors=True)
    ends = FOUND if main is doctor.main else (0,)
    assert call(main, *small(words, overrides)) in ends, command.line


@pytest.mark.slow
@pytest.mark.usefixtures("noisy", "home")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(each.page == page and not each.mark for each in COMMANDS)]
)
def test_the_commands_of_a_page_run(page):
    for command in COMMANDS:
        if command.page == page and command.mark is None:
            run(command)


@pytest.mark.slow
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page):
    """One block after another, as somebody would who reads the page; `# needs` at a block's start leaves it out."""
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        if not block.startswith("# needs "):
            exec(compile(block, page, "exec"), names)


def test_the_engines_page_tells_the_limits_of_grammars():
    page = " ".join((ROOT / "docs/engine.md").read_text("utf-8").split())
    assert f"more than {json_schema._MOST_STRINGS} strings with different bounds or patterns" in page
    assert f"more than {expressions._MOST_IN_A_ROW} optional or repeated parts in a row" in page
