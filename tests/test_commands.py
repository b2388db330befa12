"""The commands end to end on a tiny target: train, export, generate; killed runs; and what a user gets wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from eagle_train import export, generate, train
from eagle_train.artifacts.format import read_artifact
from eagle_train.inference import Engine
from eagle_train.models import loading
from eagle_train.terminal import GREEN, RESET
from eagle_train.training import assembly
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.checkpoint.verify import open_checkpoint
from tests.support.command_line import (
    TEMPLATE,
    call,
    chats,
    disk_for,
    metrics_without_times,
    read_jsonl,
    save_target,
    train_arguments,
    write_jsonl,
)
from tests.support.processes import run
from tests.support.tiny import CHARACTERS

ROOT = Path(__file__).parents[1]

STEPS = 6  # of the runs that are killed; a checkpoint every 2
EVENTS = 21  # of such a run: two micro-batches and a record a step, and the checkpoints

# Forks of one process, to which torch need be imported only once: whole runs, then runs that are killed at their n-th
# event (a micro-batch, a record of the metrics, a checkpoint: 7 in two steps) and resumed. Told is how many events a
# run had to its end.
RUNS = f"""
import os, random, signal, sys
from tests.support.command_line import call
from eagle_train import train
from eagle_train.training.metrics import MetricsLog
from eagle_train.training.trainer import Trainer

root, *arguments = sys.argv[1:]
arguments += ["train.steps={STEPS}", "train.save_every=2"]

def run(name, *more, last=None):
    child = os.fork()
    if child == 0:
        events = []
        def noted(method):
            def wrapped(*arguments, **options):
                events.append(method)
                if len(events) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return method(*arguments, **options)
            return wrapped
        for owner, method in ((Trainer, "forward_backward_step"), (MetricsLog, "log"), (Trainer, "save")):
            setattr(owner, method, noted(getattr(owner, method)))
        status = call(train.main, *arguments, f"out={{root}}/{{name}}", *more)
        print("EVENTS", name, len(events), flush=True)
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert run("whole") == 0
assert run("again") == 0
assert run("seed", "seed=1") == 0
for event in (random.randint(1, 14), random.randint(15, {EVENTS})):  # the second has a checkpoint behind it
    name = f"killed-{{event}}"
    assert run(name, last=event) == -signal.SIGKILL
    assert run(name) == 0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory with `target`, `train.jsonl` and `heldout.jsonl`."""
    root = tmp_path_factory.mktemp("commands")
    save_target(root / "target")
    write_jsonl(root / "train.jsonl", chats(40))
    write_jsonl(root / "heldout.jsonl", chats(8, seed=1))
    return root


@pytest.fixture(scope="module")
def made(root) -> Path:
    """`root`, with the run of two steps in `run` and its artifact in `draft`."""
    assert call(train.main, *train_arguments(root, f"out={root}/run")) == 0
    assert call(export.main, f"checkpoint={root}/run", f"out={root}/draft") == 0
    return root


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / f"step-{STEPS:08d}" / "draft.safetensors")


def test_a_run_leaves_its_config_its_metrics_and_a_checkpoint(made):
    run = made / "run"
    assert sorted(os.listdir(run)) == ["config.yaml", "metrics.jsonl", "step-00000002"]
    config = OmegaConf.load(run / "config.yaml")
    assert (config.train.steps, config.data.row_tokens, config.target.path) == (2, 32, f"{made}/target")
    assert (config.optim.weight_decay, config.draft.norms) == (0.1, "eagle1")
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        for name in ("loss", "l1", "ce", "grad_norm", "tokens_per_s", "top1_agreement"):
            assert isinstance(record[name], float), name
    assert len(records[-1]["heldout_acceptance_per_depth"]) == 3
    assert records[-1]["heldout_simulated_tpc"] >= 1
    guide = (ROOT / "docs/training.md").read_text()
    untold = {name for record in records for name in record if f"`{name.removeprefix('heldout_')}`" not in guide}
    assert {name for name in untold if f"`{name}`" not in guide} == set(), "the guide says what each figure is"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_process_alone_may_have_any_backend(made, tmp_path, parallel):
    assert call(train.main, *train_arguments(made, f"out={tmp_path}/run", f"parallel={parallel}")) == 0
    for one, other in zip(metrics_without_times(tmp_path / "run"), metrics_without_times(made / "run"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_a_run_against_a_target_in_fp8(made, tmp_path, capsys):
    """Its losses are near those of the run without; it says what the target's states lose, and resumes as it is."""
    given = train_arguments(made, f"out={tmp_path}/run", "train.target_quant=fp8")
    with pytest.warns(UserWarning, match=r"^train\.target_quant=fp8: this cpu has no FP8 products") as told:
        assert call(train.main, *given) == 0
    assert len([warning for warning in told if "target_quant" in str(warning.message)]) == 1
    said = capsys.readouterr().err
    assert re.search(r"train\.target_quant=fp8: 21 modules of the target; hidden states differ by \d+\.\d %", said)
    for low, whole in zip(metrics_without_times(tmp_path / "run"), metrics_without_times(made / "run"), strict=True):
        assert low["loss"] == pytest.approx(whole["loss"], rel=0.1)
        assert low["loss"] != whole["loss"]
    with pytest.warns(UserWarning, match="target_quant"):
        assert call(train.main, *given, "train.steps=3") == 0
    capsys.readouterr()
    assert call(train.main, *given, "train.steps=4", "train.target_quant=none") == 2
    wrong = "train.target_quant=none: .*step-00000003 was trained with fp8; resume with the same"
    assert re.search(wrong, capsys.readouterr().err)


def trained_weights(made: Path) -> dict[str, torch.Tensor]:
    """What the run of two steps learned, the embedding scale folded."""
    found = open_checkpoint(made / "run" / "step-00000002")
    assert found.config["embedding_scale"] != 1
    tensors = found.draft()
    tensors["fc.weight"][:, : found.config["hidden_size"]] *= found.config["embedding_scale"]
    return tensors


def test_an_artifact_says_what_it_is(made):
    assert sorted(os.listdir(made / "draft")) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((made / "draft" / "config.json").read_text())["eagle_train"]
    assert config["target"]["name"] == f"{made}/target"
    assert (config["draft"]["num_layers"], config["training"]["steps"], config["dtype"]) == (1, 2, "bfloat16")
    written = load_file(made / "draft" / "model.safetensors")
    assert {name: tensor.bfloat16().tolist() for name, tensor in trained_weights(made).items()} == {
        name: tensor.tolist() for name, tensor in written.items()
    }


def test_one_checkpoint_of_a_run_can_be_exported(made, tmp_path):
    assert call(export.main, f"checkpoint={made}/run/step-00000002", f"out={tmp_path}/d", "dtype=float32") == 0
    written = load_file(tmp_path / "d" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in trained_weights(made).items())
    assert call(export.main, f"checkpoint={made}/run", f"out={tmp_path}/d") == 0  # an artifact may be replaced
    assert sorted(os.listdir(tmp_path)) == ["d"]


def in_a_process(*arguments: object) -> subprocess.CompletedProcess:
    """Python with these arguments, and with the modules that this process sees."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *map(str, arguments)]
    return run(command, env=environment)


def test_an_answer_with_a_draft_is_the_targets_own(made, capsys):
    arguments = [f"target={made}/target", "max_tokens=24", "color=always", "prompt=abc, (def)\n= {g}"]
    drafted = in_a_process("-m", "eagle_train.generate", *arguments, f"draft={made}/draft", "tree=chain2")
    assert drafted.returncode == 0, drafted.stderr
    told = r"\d+ tokens \((length|stop)\), TTFT [\d.]+ ms, TPC {tpc}, TTIT [\d.]+ ms\n"
    assert re.fullmatch(told.format(tpc=r"[123]\.\d\d"), drafted.stderr.splitlines(keepends=True)[-1])
    assert call(generate.main, *arguments) == 0
    plain = capsys.readouterr()
    assert re.fullmatch(told.format(tpc=r"1\.00"), plain.err.splitlines(keepends=True)[-1])
    assert drafted.stdout.replace(GREEN, "").replace(RESET, "") == plain.out
    assert len(plain.out.strip()) > 0


def test_drafts_are_chosen_as_told(made, monkeypatch):
    seen, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: seen.append(engine.config.drafting) or step(engine))
    arguments = [f"target={made}/target", f"draft={made}/draft", "max_tokens=4", "temperature=1", "prompt=abc"]
    for override in ([], ["engine.drafting=multinomial"]):
        assert call(generate.main, *arguments, *override) == 0
    assert list(dict.fromkeys(seen)) == ["greedy", "multinomial"]


def test_an_answer_is_told_as_it_comes(made, capsys, monkeypatch):
    """A round's text is there before the next round; TPC is told at the end."""
    pieces, step = [], Engine.step

    def noting(engine):
        pieces.append(capsys.readouterr())
        return step(engine)

    arguments = [f"target={made}/target", f"draft={made}/draft", "max_tokens=24", "prompt=abc, (def)\n= {g}"]
    assert call(generate.main, *arguments) == 0
    whole = capsys.readouterr()
    monkeypatch.setattr(Engine, "step", noting)
    assert call(generate.main, *arguments) == 0
    pieces = [*pieces[1:], capsys.readouterr()]
    assert "".join(piece.out for piece in pieces) == whole.out
    assert len(pieces) > 5
    assert all(piece.out for piece in pieces)
    assert [("TPC" in piece.err) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_draft_with_few_tokens_keeps_them_from_training_to_answers(made, tmp_path, capsys):
    arguments = train_arguments(made, f"out={tmp_path}/run", "draft.vocab_size=9")
    assert call(train.main, *arguments) == 0
    assert call(train.main, *arguments, "train.steps=3") == 0  # resumed with the same tokens
    assert call(export.main, f"checkpoint={tmp_path}/run", f"out={tmp_path}/draft") == 0
    vocabulary = read_artifact(tmp_path / "draft").draft.vocabulary
    turns = [turn for row in read_jsonl(made / "train.jsonl") for turn in row["messages"]]
    answers = "".join(turn["content"] + ";" for turn in turns if turn["role"] == "assistant")
    counts = Counter(3 + CHARACTERS.index(character) for character in answers)
    assert len(vocabulary) == 9
    assert min(counts[token] for token in vocabulary) >= max(
        count for token, count in counts.items() if token not in vocabulary
    )
    capsys.readouterr()
    request = [f"target={made}/target", "max_tokens=24", "prompt=abc, (def)\n= {g}", "color=always"]
    told = []
    for draft in ([], [f"draft={tmp_path}/draft"]):
        assert call(generate.main, *request, *draft) == 0
        told.append(capsys.readouterr().out.replace(GREEN, "").replace(RESET, ""))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [("regex=[0-9]{3}", r"\d{3}"), ("choice=[yes, no]", "yes|no"), ('json_schema={"enum": ["a", 5]}', '"a"|5')],
)
def test_generate_with_a_grammar(made, capsys, grammar, answer):
    capsys.readouterr()
    request = [f"target={made}/target", f"draft={made}/draft", "prompt=abc", "color=always", f"grammar.{grammar}"]
    assert call(generate.main, *request) == 0
    told = capsys.readouterr().out.replace(GREEN, "").replace(RESET, "")
    assert re.fullmatch(f"({answer})\n", told)


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        (["logit_bias={%d: 100}"], "x{9}"),
        (["logit_bias={%d: 100}", "stop=xx"], ""),
        (["logit_bias={%d: 100}", "stop=xx", "include_stop=true"], "xx"),
        (["logit_bias={%d: 100}", "stop=xx", "include_stop=true", "min_tokens=5"], "x{6}"),
        (["logit_bias={%d: 100}", "repetition_penalty=100"], "(?!xx).*x.*"),
        (["logit_bias={%d: 12}", "presence_penalty=2", "frequency_penalty=2"], "x*[^x].*"),
        (["temperature=2", "min_p=1", "seed=null", "logit_bias={%d: 100}"], "x{9}"),
    ],
)
def test_generate_with_more_parameters(made, capsys, keys, answer):
    capsys.readouterr()
    token = 3 + CHARACTERS.index("x")
    request = [f"target={made}/target", f"draft={made}/draft", "prompt=abc", "max_tokens=9", "color=always"]
    assert call(generate.main, *request, *(key % token if "%d" in key else key for key in keys)) == 0
    told = capsys.readouterr().out.replace(GREEN, "").replace(RESET, "")
    assert re.fullmatch(f"({answer})\n", told), told


def test_generate_where_the_target_computes_nan(made, capsys, monkeypatch):
    def broken(*arguments, **options):
        target = loading.load_target(*arguments, **options)
        with torch.no_grad():
            target.model.get_input_embeddings().weight[:] = torch.inf
        return target

    monkeypatch.setattr(generate, "load_target", broken)
    line = mistake(capsys, made / "out", generate.main, f"target={made}/target", "prompt=abc")
    assert re.search(r"target .*: computes NaN or infinity .* try target.dtype=float32$", line)


@pytest.fixture(scope="module")
def runs(root) -> dict[str, int]:
    """Runs of STEPS steps and how many events they had: `whole`, `again`, `seed` (another one), and two `killed-N`,
    killed at event N and resumed."""
    done = in_a_process("-c", RUNS, root, *train_arguments(root))
    assert done.returncode == 0, done.stderr
    return {name: int(events) for name, events in re.findall(r"^EVENTS (\S+) (\d+)$", done.stdout, re.MULTILINE)}


def test_two_runs_with_one_seed_are_the_same(root, runs):
    assert runs["whole"] == EVENTS
    assert metrics_without_times(root / "whole") == metrics_without_times(root / "again")
    assert [record["step"] for record in metrics_without_times(root / "whole")] == list(range(1, STEPS + 1))
    assert metrics_without_times(root / "whole") != metrics_without_times(root / "seed")


def test_a_run_that_was_killed_is_resumed_as_if_it_had_not_been(root, runs):
    whole, killed = weights(root / "whole"), sorted(root.glob("killed-*"))
    assert len(killed) == 2
    for each in killed:
        two_steps = EVENTS * 2 // STEPS
        saved = (int(each.name.removeprefix("killed-")) - 1) // two_steps
        # Nothing was done twice but since the last checkpoint, which may have been on its way to the disk.
        done = {saved * two_steps, max(0, saved - 1) * two_steps}
        assert EVENTS - runs[each.name] in done, each.name
        assert metrics_without_times(each) == metrics_without_times(root / "whole"), each.name
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(each).items()), each.name
        assert sorted(os.listdir(each)) == sorted(os.listdir(root / "whole")), each.name


STOP = """
import os, signal
from eagle_train.train import _StopSignal

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
stop = _StopSignal()
os.kill(os.getpid(), signal.SIGHUP)
print(stop.asked)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    stop.asked = False
    os.kill(os.getpid(), number)
    print(stop.asked)
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("at once")
signal.signal(signal.SIGHUP, signal.SIG_DFL)
stop = _StopSignal()
os.kill(os.getpid(), signal.SIGHUP)
print(stop.asked)
"""


def test_what_tells_a_run_to_stop():
    done = in_a_process("-c", STOP)
    assert done.stdout.splitlines() == ["False", *["True"] * 4, "at once", "True"], done.stderr


def test_a_finished_run_stays_as_it_is(made, tmp_path, capsys):
    run = shutil.copytree(made / "run", tmp_path / "run")
    assert call(train.main, *train_arguments(made, f"out={run}")) == 0
    assert (run / "metrics.jsonl").read_text() == (made / "run" / "metrics.jsonl").read_text()
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_that_is_begun_again_before_its_first_checkpoint_is_the_same_at_the_tracker(root, tmp_path):
    pytest.importorskip("wandb")
    arguments, found = train_arguments(root, f"out={tmp_path}/run", "tracking=wandb", "tracking.mode=disabled"), []
    for resume in ("true", "true", "false"):
        assert call(train.main, *arguments, "train.steps=1", f"train.resume={resume}") == 0
        found.append((tmp_path / "run" / "wandb_run_id").read_text())
        shutil.rmtree(tmp_path / "run" / "step-00000001")
        assert len(metrics_without_times(tmp_path / "run")) == 1
    assert found[0] == found[1] != found[2]


def mistake(capsys, out: Path, main, *arguments: str) -> str:
    """Calls a command that must refuse; returns its one line of error. In `out` and beside it nothing is half done."""
    there = {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}
    assert call(main, *arguments) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, captured.err
    assert captured.err.endswith(errors[0] + "\n")
    assert "Traceback" not in captured.out + captured.err
    for path in out.parent.rglob("*"):
        if path.is_file() and there.get(path) != path.read_bytes():
            assert path.parent == out
            assert path.name in ("config.yaml", "metrics.jsonl"), path
            assert path.read_text() == "" or path.read_text().endswith("\n")
        assert not path.name.startswith("."), path
    assert all(path.exists() for path in there)
    return errors[0]


def without_weights(root: Path, target: Path) -> list[str]:
    (target / "model.safetensors").unlink()
    return [f"target={target}"]


def without_weights_and_data(root: Path, target: Path) -> list[str]:
    """What takes no time to see is told first."""
    return [*without_weights(root, target), "data.path=nowhere.jsonl"]


def without_one_tensor(root: Path, target: Path) -> list[str]:
    tensors = load_file(target / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return [f"target={target}"]


def without_tokenizer(root: Path, target: Path) -> list[str]:
    for path in (*target.glob("tokenizer*"), target / "chat_template.jinja"):
        path.unlink()
    return [f"target={target}"]


def that_masks_everything(root: Path, target: Path) -> list[str]:
    template = TEMPLATE.replace("{{ m['content'] + ';' }}{% endgeneration %}", "{% endgeneration %}{{ m['content'] }}")
    assert template != TEMPLATE
    (target / "chat_template.jinja").write_text(template)
    return [f"target={target}", "data.heldout=null"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (without_weights, "/target: no model.safetensors there, nor its index; enough for a plan, not for more"),
        (without_weights_and_data, "data.path is nowhere.jsonl; there is no such file"),
        (
            without_one_tensor,
            "1 weights are missing, ['model.layers.1.mlp.up_proj.weight'] first",
        ),
        (without_tokenizer, "/target: no tokenizer there"),
        (that_masks_everything, "train.jsonl:1: the chat template masks everything"),
    ],
)
def test_a_target_that_cannot_be_trained_for(root, tmp_path, capsys, broken, message):
    target = shutil.copytree(root / "target", tmp_path / "target")
    arguments = train_arguments(root, *broken(root, target), "data.shuffle_window=0", f"out={tmp_path}/out")
    assert message in mistake(capsys, tmp_path / "out", train.main, *arguments)


def as_jsonl(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


GOOD = json.dumps(chats(1)[0])


@pytest.mark.parametrize(
    ("key", "lines", "message"),
    [
        ("path", None, "/bad.jsonl; there is no such file"),
        ("path", [], "/bad.jsonl; it has no rows"),
        ("path", [GOOD, "", GOOD[:-3]], "/bad.jsonl:3: not JSON: "),
        ("path", [GOOD, '{"messages": []}'], "/bad.jsonl:2: the row has no turns"),
        ("path", ['{"turns": []}'], "/bad.jsonl:1: no column 'messages'; the row has turns"),
        ("path", ['{"messages": [{"role": "user", "content": "a"}]}'], "so there is no supervised token"),
        ("heldout", None, "/bad.jsonl; there is no such file"),
        ("heldout", [GOOD, GOOD[:-3]], "/bad.jsonl:2: not JSON: "),
    ],
)
def test_bad_data(root, tmp_path, capsys, key, lines, message):
    if lines is not None:
        as_jsonl(tmp_path / "bad.jsonl", *lines)
    arguments = train_arguments(root, f"data.{key}={tmp_path}/bad.jsonl", f"out={tmp_path}/out")
    assert message in mistake(capsys, tmp_path / "out", train.main, *arguments)


def test_a_bad_held_out_row_is_told_before_the_target_is_loaded(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(assembly, "load_target", lambda *_: pytest.fail("loaded"))
    as_jsonl(tmp_path / "bad.jsonl", *[GOOD] * 10, GOOD[:-3])  # behind the rows that every run checks
    arguments = train_arguments(root, f"data.heldout={tmp_path}/bad.jsonl", f"out={tmp_path}/out")
    assert "/bad.jsonl:11: not JSON: " in mistake(capsys, tmp_path / "out", train.main, *arguments)


def test_a_bad_row_costs_no_step(root, tmp_path, capsys):
    """The steps before it are kept, and the run can go on without it; metrics and draft are then those of a run that
    left it out from the beginning."""
    rows = [json.dumps(row) for row in chats(40)]
    path = as_jsonl(tmp_path / "some.jsonl", *rows[:30], rows[0][:-3], *rows[30:])
    given = train_arguments(root, f"data.path={path}", "data.shuffle_window=0", f"train.steps={STEPS}")
    assert call(train.main, *given, f"out={tmp_path}/run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    found = re.fullmatch(
        r"error: \S+/some\.jsonl:31: not JSON: .*=skip leaves such rows out; (\d) of 6 steps are done and kept", error
    )
    done = int(found[1])
    assert 0 < done < STEPS
    assert CheckpointStore(tmp_path / "run").latest().name == f"step-{done:08d}"
    for name in ("run", "whole"):
        assert call(train.main, *given, f"out={tmp_path}/{name}", "data.malformed=skip") == 0
    assert ", 1 malformed and left out; " in capsys.readouterr().out
    assert metrics_without_times(tmp_path / "run") == metrics_without_times(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "run")[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch=1"], "nosuch=1: no such key"),
        (["draft.nosuch=1"], "draft.nosuch=1: no such key"),
        (["draft.num_layer=2"], "draft.num_layer=2: no such key; did you mean draft.num_layers?"),
        (["draft=eagel3"], "peagle; did you mean eagle3?; what gives weights"),
        (["lr=1e-3"], "lr=1e-3: no such key; did you mean optim.lr?"),
        (["data=nosuch"], "data=nosuch: must be one of gsm8k, "),
        (["data.path=???"], "data.path is needed: give data.path=VALUE"),
        (["optim.lr=fast"], "optim.lr=fast: must be a number"),
        (["optim.lr=-1"], "optim.lr=-1.0: must be above 0"),
        (["optim.tokens_per_step=100"], "optim.tokens_per_step=100: must be a multiple of "),
        (["draft.num_layers=0"], "draft.num_layers=0: must be at least 1"),
        (["target=/nowhere"], "target.path=/nowhere: no such directory"),
        (["seed=abc"], "seed"),
        (["seed=123456789012345678901234"], "seed=123456789012345678901234: must be a whole number, 0 or more"),
        (["device=tpu"], "device=tpu: must be auto, cpu or cuda"),
        (["train.target_quant=int4"], "train.target_quant=int4: must be none or fp8"),
        (
            ["train.target_quant=fp8", "target.offload=true"],
            "train.target_quant=fp8: not with target.offload=true; use one of them",
        ),
        (
            ["train.target_quant=fp8", "parallel=fsdp2", "parallel.target=fsdp2"],
            "train.target_quant=fp8: not with parallel.target=fsdp2; use train.target_quant=none, or "
            "parallel.target=replicated",
        ),
    ],
)
def test_bad_settings_of_a_run(root, tmp_path, capsys, arguments, message):
    arguments = train_arguments(root, f"out={tmp_path}/out", *arguments)
    assert message in mistake(capsys, tmp_path / "out", train.main, *arguments)
    assert not (tmp_path / "out").exists()


def test_a_run_needs_a_directory_it_can_write(root, tmp_path, capsys, monkeypatch):
    """Which is told before the target is loaded."""
    monkeypatch.setattr(assembly, "load_target", None)
    (tmp_path / "file").touch()
    for out, message in (
        (f"{tmp_path}/file/run", f"out={tmp_path}/file/run: cannot be written: "),
        ("/sys", "out=/sys: cannot be written: "),
        ("", "out is empty: give out=DIR"),
    ):
        assert message in mistake(capsys, tmp_path / "file", train.main, *train_arguments(root, f"out={out}"))


def test_a_run_is_not_mixed_with_another(made, tmp_path, capsys):
    other = as_jsonl(tmp_path / "other.jsonl", GOOD)
    save_target(tmp_path / "target", seed=1)
    shutil.copytree(made / "run", tmp_path / "run")
    for change, message in (
        ("train.resume=false", "/run holds checkpoints"),
        ("draft.num_layers=2", "draft.num_layers=2: "),
        (f"data.path={other}", f"data.path is {other}, but was "),
        (f"target={tmp_path}/target", f"target.path={tmp_path}/target: "),
    ):
        arguments = train_arguments(made, f"out={tmp_path}/run", "train.steps=3", change)
        assert message in mistake(capsys, tmp_path / "run", train.main, *arguments)
        assert metrics_without_times(tmp_path / "run") == metrics_without_times(made / "run")


def test_what_a_run_cannot_go_on_with_is_told_before_the_target_is_loaded(made, tmp_path, capsys, monkeypatch):
    other = as_jsonl(tmp_path / "other.jsonl", GOOD)
    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.setattr(assembly, "load_target", lambda *_: pytest.fail("loaded"))
    for change, message in (
        ("draft.num_layers=2", "draft.num_layers=2: "),
        ("train.steps=1", "step-00000002 has made 2 already; give as many or more"),
        ("train.target_quant=fp8", "step-00000002 was trained with none; resume with the same"),
        (f"data.path={other}", f"data.path is {other}, but was "),
    ):
        arguments = train_arguments(made, f"out={tmp_path}/run", change)
        assert message in mistake(capsys, tmp_path / "run", train.main, *arguments)


def test_a_disk_that_is_full_when_a_checkpoint_is_written(made, tmp_path, capsys):
    run = shutil.copytree(made / "run", tmp_path / "run")
    with disk_for(60_000):  # the draft fits, the optimiser's state does not
        line = mistake(capsys, run, train.main, *train_arguments(made, f"out={run}", "train.steps=3"))
    assert "step 3 could not be written" in line
    assert sorted(os.listdir(run)) == ["config.yaml", "metrics.jsonl", "step-00000002"]
    assert call(train.main, *train_arguments(made, f"out={run}", "train.steps=3")) == 0  # once there is room
    assert [record["step"] for record in metrics_without_times(run)] == [1, 2, 3]


def test_a_disk_that_is_full_from_the_start(made, tmp_path, capsys):
    with disk_for(100):
        line = mistake(capsys, tmp_path / "run", train.main, *train_arguments(made, f"out={tmp_path}/run"))
        assert "config.yaml" in line
        line = mistake(capsys, tmp_path / "draft", export.main, f"checkpoint={made}/run", f"out={tmp_path}/draft")
        assert f"out={tmp_path}/draft: cannot be written: " in line
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint={tmp}/nowhere", "out={tmp}/out"], "/nowhere: no such directory; give one"),
        (["checkpoint={tmp}/damaged", "out={tmp}/out"], "trainer.pt is not what was written"),
        (["checkpoint={made}/run", "out={made}/run"], "/run: exists and holds no draft"),
        (
            ["checkpoint={made}/run", "out={tmp}/out", "layout=nosuch"],
            "layout=nosuch: must be one of native, vllm, sglang, trtllm",
        ),
        (["checkpoint={made}/run", "out={tmp}/out", "dtype=int3"], "dtype=int3: must be bfloat16 or float32"),
        (["checkpoint={made}/run"], "out is needed: give out=VALUE"),
    ],
)
def test_bad_exports(made, tmp_path, capsys, arguments, message):
    damaged = shutil.copytree(made / "run" / "step-00000002", tmp_path / "damaged")
    (damaged / "trainer.pt").write_bytes(b"half")
    arguments = [argument.format(made=made, tmp=tmp_path) for argument in arguments]
    assert message in mistake(capsys, tmp_path / "out", export.main, *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt=" + 200 * "x"], "the context of "),
        (["prompt="], "prompt is empty"),
        (["draft={made}/nowhere"], "/nowhere: no config.json there"),
        (["draft={made}/run"], "/run: a training run; make a draft of it: eagle-export checkpoint="),
        (["tree=nosuch"], "tree=nosuch: must be one of "),
        (["~tree", "+tree.parents=[-1,3]"], "node 1 has parent 3"),
        (["~tree", "+tree={{parents:[0,0]}}"], "node 0 is the root"),
        (["tree.length=-1"], "tree.length is -1"),
        (["tree={{parents:[-1,3]}}"], "tree"),
        (["temperature=-1"], "temperature=-1.0: must be 0 or more"),
        (["min_p=2"], "min_p=2.0: must be from 0 (off) to 1"),
        (["min_tokens=200"], "min_tokens=200: must be at most max_tokens, which is 128"),
        (["logit_bias={{5: 101}}"], "logit_bias={5: 101}: must be null, or a mapping of token ids to numbers"),
        (["logit_bias=5"], "logit_bias=5: must be null, or a mapping of token ids to numbers"),
        (["frequency_penalty=x"], "frequency_penalty=x: must be a number"),
        (["include_stop=maybe"], "include_stop=maybe: must be true or false"),
        (["min_tokns=3"], "min_tokns"),
        (["engine.compile=maybe"], "engine.compile=maybe: must be true or false"),
        (["engine.drafting=best"], "engine.drafting='best': must be one of greedy, multinomial, "),
        (["engine.graphs=maybe"], "engine.graphs=maybe: must be true or false"),
        (["engine.kv_tokens=x"], "engine.kv_tokens=x: must be a whole number"),
        (["engine.kv_tokens=16"], "engine.kv_tokens=16: prompt 0 and its answer need"),
        (["engine.host_kv_tokens=64"], "engine.host_kv_tokens=64: needs engine.prefix_cache=true"),
        (["engine.graphs=true", "device=cpu"], "engine.graphs=true: needs a GPU; the device is cpu"),
        (["grammar.regex=(a"], "grammar.regex='(a': a group is not closed"),
        (["grammar.regex=a", "grammar.ebnf=b"], "must be a mapping with one of the keys"),
        (["grammar.xml=a"], "xml"),
        (["target={made}/nowhere"], "/nowhere: no such directory"),
    ],
)
def test_bad_requests(made, capsys, arguments, message):
    arguments = [argument.format(made=made) for argument in arguments]
    given = [f"target={made}/target", f"draft={made}/draft", "prompt=abc", *arguments]
    assert message in mistake(capsys, made / "out", generate.main, *given)


def test_a_draft_for_another_target(made, tmp_path, capsys):
    for number, changes in enumerate(({"seed": 1}, {"num_hidden_layers": 2})):
        target = save_target(tmp_path / str(number), **changes)
        line = mistake(capsys, made / "out", generate.main, f"target={target}", f"draft={made}/draft", "prompt=abc")
        assert f"made for target {made}/target" in line
        assert f"not for {target}" in line
