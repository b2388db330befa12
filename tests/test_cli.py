"""config.py and conf/: what a user types arrives, a mistake is one line, and the YAMLs fit their dataclasses."""

import dataclasses
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import hydra
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from eagle_train import generate, train
from eagle_train.cli import as_typed, command, named_path, offer_trees
from eagle_train.corpus.source import DataConfig
from eagle_train.drafts import EagleConfig
from eagle_train.errors import OptionError, UserError, check, report, typed, within
from eagle_train.hardware import resolve_device
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.named_trees import load_tree
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.loading import TargetConfig
from eagle_train.results import prepared, prepared_file, write_json, write_text
from eagle_train.settings import CONF_DIR, build
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.train_config import TrainConfig
from eagle_train.tree_names import ANY_TREE
from tests.support.command_line import call

TEXTS = [
    "Red, green, blue",
    "f(x) and sort(3, 1, 2)",
    'it\'s "so"',
    "a {brace and [a bracket",
    "line one\nline two, and three",
    "x = 1; y == x",
    'print("a\\n"), b',
    "C:\\new, it's \\' and \\",
    "costs $5 or ${HOME}",
    "${seed}",
    "{a: b}",
    "[1, 2]",
    "42",
    "null",
    "'quoted'",
    "100% é 😀",
]


@pytest.fixture
def given(monkeypatch) -> SimpleNamespace:
    """What eagle-generate loads and gives its engine, which is not run: `target`, `draft`, `tree`, `prompt`."""
    seen = SimpleNamespace(prompt=None)

    def target(config, *_, reads):
        seen.target = config
        return SimpleNamespace(identity=None)

    class StandIn:
        def __init__(self, target, draft, tree, config):
            vars(seen).update(draft=draft, tree=tree, config=config)

        def add(self, prompt, params):
            seen.prompt = prompt
            raise UserError("enough")

    monkeypatch.setattr(generate, "load_target", target)
    monkeypatch.setattr(generate, "check_early", lambda *_: None)
    monkeypatch.setattr(generate, "load_draft", lambda path, identity: path)
    monkeypatch.setattr(generate, "make_drafter", lambda spec, target, draft: draft)
    monkeypatch.setattr(generate, "Engine", StandIn)
    return seen


def error_line(capsys) -> str:
    """The line that is all a command wrote, without its `error: `."""
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_arrives_as_it_was_written(given, text):
    assert call(generate.main, f"prompt={text}") == 2
    assert given.prompt == [{"role": "user", "content": text}]


def test_a_target_and_a_draft_are_named_by_their_directories(given):
    assert (
        call(generate.main, "target=/models/mine", "draft=/drafts/mine", "tree=chain2", "prompt=x", "chat=false") == 2
    )
    assert (given.target, given.draft, given.prompt) == (TargetConfig("/models/mine"), "/drafts/mine", "x")
    assert given.tree["length"] == 2


@pytest.mark.parametrize("name", ["chain7", "d2_bf3", "chain0"])
def test_a_tree_is_named_by_its_shape(given, name):
    """Whether or not somebody has listed it, and beside what else there is to say of a tree."""
    assert call(generate.main, f"tree={name}", "prompt=x") == 2
    assert load_tree(given.tree) == load_tree(name)
    assert call(generate.main, "tree.length=4", "prompt=x") == 2
    assert load_tree(given.tree) == load_tree("chain4")
    offer_trees([f"tree={name}"])
    for config in ("mt_bench", "quantisation", "serving", "switches"):
        assert load_tree(compose(config, f"tree={name}").tree) == load_tree(name)


@pytest.mark.parametrize(
    "override",
    [
        "temperature=0.5",
        "optim.betas=[0.9,0.99]",
        "data.columns={prompt:question,response:answer}",
        "train.resume=false",
        "draft.hidden_size=null",
        "out=outputs/${seed}",
        "target.path='a,b'",
        "+tree.parents=[-1,0,0]",
        "~tree",
        "--cfg",
        "job",
    ],
)
def test_what_hydra_understands_is_left_to_it(override):
    assert as_typed(override, OverridesParser.create()) == override


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prompt is needed: give prompt=VALUE"),
        (["prompt="], "prompt is empty: give prompt=TEXT"),
        (["prompt=x", "nosuch=1"], "nosuch=1: no such key (--help tells the keys)"),
        (["prompt=x", "target.nosuch=1"], "target.nosuch=1: no such key (--help tells the keys)"),
        (["prompt=x", "target.pth=1"], "target.pth=1: no such key; did you mean target.path? (--help tells the keys)"),
        (["prompt=x", "engin.graphs=true"], "no such key; did you mean engine.graphs?"),
        (["prompt=x", "graphs=a, b"], "graphs=a, b: no such key; did you mean engine.graphs?"),
        (["prompt=x", "engine={grahps: true}"], "no such key as engine.grahps; did you mean engine.graphs?"),
        (["prompt=x", "max_token=3"], "max_token=3: no such key; did you mean max_tokens?"),
        (["prompt=x", "quantt=fp8"], "quantt=fp8: no such key; did you mean quant?"),
        (["prompt=x", "top_p.x=1"], "top_p.x=1: no such key (--help"),
        (["prompt=x", "tree=nosuch"], "tree=nosuch: must be one of auto, chain1, chain2, chain3, chain5, d3_bf2"),
        (["prompt=x", "tree=chainN"], f"n8, table, or {ANY_TREE}, or FILE.yaml; did you mean chain5?"),
        (["prompt=x", "tree=my.yml"], f"n8, table, or {ANY_TREE}, or FILE.yaml"),
        (["prompt=x", "drafter=my.yml"], "retrieval, suffix, or FILE.yaml"),
        (["prompt=x", "quant=itn4"], "quant=itn4: must be one of fp8, int4, none; did you mean int4?"),
        (["prompt=x", "+quant=fp8"], "+quant=fp8: quant is a choice that is there already; give quant=fp8"),
        (["prompt=x", "suite=mt_bench"], "suite=mt_bench: no such key (--help"),
        (["prompt=x", "+suite=mt_bench"], "+suite=mt_bench: no such key (--help"),
        (["prompt=x", "+top_p=0.5"], "+top_p=0.5: the key is there already; give top_p=0.5"),
        (["prompt=x", "+topp=0.5"], "+topp=0.5: no such key; did you mean top_p? (--help"),
        (["prompt=x", "++nosuch.x=1"], "++nosuch.x=1: no such key (--help"),
        (["prompt=x", "nosuch"], "nosuch: must be KEY=VALUE, where the parts of KEY are words with dots between (--h"),
        (["prompt=x", "top p=1, 2"], "top p=1, 2: must be KEY=VALUE, where"),
        (["prompt=x", "quant@x=fp8"], "quant@x=fp8: must be KEY=VALUE, where"),
        (["prompt=x", "~top_p=7"], "~top_p=7: must be ~top_p, without a value"),
        (
            ["prompt=x", "--steps", "5"],
            "unrecognized arguments: --steps 5 (keys are given as KEY=VALUE; --",
        ),
        (["prompt=x", "quant=null"], "quant=null: must be one of fp8, int4, none, or left out"),
        (["prompt=x", "~nosuch"], "~nosuch: no such key (--help"),
        (["prompt=x", "=1"], "=1: must be KEY=VALUE"),
        (["prompt=x", "target.dtype=${nosuch}"], "nosuch"),
        (["prompt=x", "target.trust_remote_code=maybe"], "target.trust_remote_code=maybe: must be true or false"),
        (["prompt=x", "max_tokens=many"], "max_tokens"),
        (["prompt=x", "top_p=2.5"], "top_p=2.5: must be above 0 and at most 1"),
        (["prompt=x", "device=tpu"], "device=tpu: must be auto, cpu or cuda"),
        (["prompt=x", "tree=nowhere.yaml"], "tree.table=nowhere.yaml: no such file"),
        (["prompt=x", "tree=table"], "tree.table is needed: give tree=VALUE"),
        (["prompt=x", "color=red"], "color=red: must be one of auto, always, never"),
        (["prompt=x", "--config-name", "commands/nosuch"], "--config-name commands/nosuch: there is no "),
    ],
)
def test_a_mistake_is_one_line(given, capsys, arguments, message):
    assert call(generate.main, *arguments) == 2
    assert message in error_line(capsys)
    assert given.prompt is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], "Configuration groups"),
        (["--cfg", "job"], "prompt: ???"),
        (["--cfg", "job", "prompt=a, b"], "a, b"),
        (["seed=7", "--cfg", "job", "prompt=a, b"], "prompt: a, b"),
        (["seed=7", "--cfg", "job", "prompt=x", "-p", "grammar", "top_k=2"], "json_schema: null"),
        (["--cfg", "job", "prompt=--cfg"], "prompt: --cfg"),
        (["--cfg", "job", "--config-name", "commands/export", "out=x"], "layout: native"),
    ],
)
def test_hydras_own_options_work(capsys, arguments, expected):
    assert call(generate.main, *arguments) == 0
    out, err = capsys.readouterr()
    assert (expected in out, err) == (True, "")


@pytest.mark.parametrize(
    ("name", "arguments", "status", "told"),
    [
        ("train", ["--help"], 0, "eagle-train: "),
        ("train", ["train.setps=3"], 2, "error: train.setps=3: no such key; did you mean train.steps? ("),
        ("train", ["drafter=x.yaml"], 2, "error: drafter=file: no such key"),
        ("train", ["draft=DIR"], 2, "error: draft=DIR: must be one of eagle, eagle3, medusa, mtp, peagle; what gives"),
        ("export", [], 2, "error: checkpoint, out are needed: give checkpoint=VALUE out=VALUE"),
        ("generate", ["prompt=x", "tree=nosuch"], 2, "error: tree=nosuch: must be one of auto, chain1, "),
    ],
)
def test_an_installed_command_answers_before_torch_is_imported(name, arguments, status, told):
    code = (
        "import atexit, sys\n"
        f"from eagle_train.commands import {name}\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"{name}()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == status
    assert (done.stderr or done.stdout).startswith(told)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(("before", "status"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)])
def test_an_interrupt_while_torch_is_imported_says_nothing(before, status):
    code = (
        "import os, signal, types\n"
        "from eagle_train import commands\n"
        f"before = signal.{before}\n"
        "signal.signal(signal.SIGINT, before)\n"
        "def main():\n"
        "    assert signal.getsignal(signal.SIGINT) == before\n"
        "def imported(name):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return types.SimpleNamespace(main=main)\n"
        "commands.import_module = imported\n"
        "commands.generate()"
    )
    done = subprocess.run([sys.executable, "-c", code, "prompt=x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_an_interrupt_while_an_evaluation_is_imported_says_nothing(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CONF_DIR.parent)])}
    given = [sys.executable, "-m", "evals.mt_bench", "draft=d"]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # who started the tests in the background does not
    done = subprocess.run(given, capture_output=True, text=True, env=paths, preexec_fn=heeds)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupt_behind_the_imports_is_one_line_again(capsys):
    @command("export")
    def task(config: DictConfig) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    assert call(task, "checkpoint=c", "out=d") == 130
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_mistake_found_later_is_one_line_too(capsys):
    @command("export")
    def task(config: DictConfig) -> None:
        check(config.out != "there", f"out={config.out}:\n  is   taken")

    assert call(task, "checkpoint=c", "out=there") == 2
    assert error_line(capsys) == "out=there: is taken"
    assert call(task, "checkpoint=c", "out=here") == 0


def test_a_file_that_may_not_be_opened_is_one_line(capsys):
    @command("export")
    def task(config: DictConfig) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", config.checkpoint)

    assert call(task, "checkpoint=some/where", "out=d") == 2
    assert error_line(capsys) == "some/where: Permission denied"


def test_a_tree_that_may_not_be_read_is_told(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    file = tmp_path / "tree.yaml"
    file.write_text("parents: [-1, 0]")
    monkeypatch.setattr(OmegaConf, "load", refused)
    with pytest.raises(UserError, match=f"tree.table={file}: cannot be read: Permission denied"):
        Dispatcher({"table": str(file)})


def test_an_interrupt_is_one_line(capsys):
    @command("export")
    def task(config: DictConfig) -> None:
        raise KeyboardInterrupt

    assert call(task, "checkpoint=c", "out=d") == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(("lines", "reader", "seen"), [(10_000, "head -1", "x" * 100 + "\n"), (2, "true", "")])
def test_a_reader_that_leaves_is_no_mistake(lines, reader, seen):
    """`eagle-generate ... | head -1`; the rest is written to nobody, at the end if it is little."""
    code = (
        "from eagle_train.cli import command\n"
        "@command('export')\n"
        "def task(config):\n"
        f"    for _ in range({lines}): print('x' * 100)\n"
        "task()"
    )
    run = f'{sys.executable} -c "{code}" checkpoint=c out=d | {reader}; exit ${{PIPESTATUS[0]}}'
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, env=buffered)
    assert (done.returncode, done.stdout, done.stderr) == (141, seen, "")


@pytest.mark.parametrize("start", ["import sys; sys.argv += ['--help']; task()", "from eagle_train import commands"])
def test_help_may_be_read_in_part(start):
    """`eagle-export --help | true`, of a module that is run and of an installed command."""
    code = "from eagle_train.cli import command; task = command('export')(print); " + start
    code += "; import sys; sys.argv += ['-h']; commands.export()" if "commands" in start else ""
    run = f'{sys.executable} -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_keeps_its_traceback():
    @command("export")
    def task(config: DictConfig) -> None:
        there, here = os.pipe()
        os.close(there)
        with os.fdopen(here, "wb", buffering=0) as pipe:
            pipe.write(b"x")

    with pytest.raises(BrokenPipeError):
        call(task, "checkpoint=c", "out=d")


def test_what_is_no_mistake_of_the_user_keeps_its_traceback():
    @command("export")
    def task(config: DictConfig) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(task, "checkpoint=c", "out=d")


@dataclass
class Inner:
    size: int = 1


@dataclass
class Outer:
    path: str
    rate: float = 0.5
    flag: bool = False
    pair: tuple[float, float] = (0.0, 1.0)
    names: dict[str, str] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        check(self.rate < 1, f"rate={self.rate}: must be below 1")
        check(self.rate >= 0, f"rate={self.rate}: must be 0 or more", OptionError)


def test_build_fills_a_dataclass():
    values = {"path": "p", "rate": 0, "flag": "true", "pair": [1, 2], "names": {"a": "b"}, "inner": {"size": 3}}
    for given in (values, OmegaConf.create(values)):
        built = build(Outer, given, "outer")
        assert (built.path, built.rate, built.flag, built.names, built.inner) == ("p", 0.0, True, {"a": "b"}, Inner(3))
        assert list(built.pair) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nosuch": 1}, r"^outer\.nosuch: no such key$"),
        ({"inner": {"nosuch": 1}}, r"^outer\.inner\.nosuch: no such key$"),
        ({"iner": {}}, r"^outer\.iner: no such key; did you mean inner\?$"),
        ({"rate": "fast"}, r"^outer\.rate=fast: must be a number$"),
        ({"rate": None}, r"^outer\.rate: .*None"),
        ({"inner": {"size": 1.5}}, r"^outer\.inner\.size=1\.5: must be a whole number$"),
        ({"pair": [1, "x"]}, r"^outer\.pair\[1\]=x: must be a number$"),
        ({"names": "a"}, r"^outer\.names: "),
        ({"path": "???"}, r"^outer\.path: .*missing"),
        ({"flag": "maybe"}, r"^outer\.flag=maybe: must be true or false$"),
        ({"rate": 2.0}, r"^rate=2\.0: must be below 1$"),
        ({"rate": -2.0}, r"^outer\.rate=-2\.0: must be 0 or more$"),
    ],
)
def test_build_names_what_is_wrong(change, message):
    with pytest.raises(UserError, match=message) as error:
        build(Outer, {"path": "p"} | change, "outer")
    assert "\n" not in str(error.value)


@dataclass
class Bounded:
    share: float = 1.0
    most: float = 1.0

    unbounded = ("most",)


@dataclass
class Holding:
    one: Bounded = field(default_factory=Bounded)
    several: dict[str, Bounded] = field(default_factory=dict)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_are_finite(value):
    for change, key in (
        ({"one": {"share": value}}, "one.share"),
        ({"several": {"a": {"share": 2}, "b": {"share": value}}}, "several.b.share"),
        *([] if value == float("inf") else [({"one": {"most": value}}, "one.most")]),
    ):
        with pytest.raises(UserError, match=rf"^outer\.{key}={value}: must be a finite number$"):
            build(Holding, change, "outer")
    assert build(Holding, {"one": {"most": float("inf")}}, "outer").one.most == float("inf")


@pytest.mark.parametrize(
    "key", ["train.minutes", "optim.lr", "parallel.timeout_minutes", "cluster.tflops", "train.feature_noise"]
)
def test_a_run_has_no_infinite_number(capsys, key):
    path = "data.path=data/tiny_target/answers.jsonl.gz"
    assert call(train.main, "plan=true", "data=messages", path, f"{key}=inf") == 2
    assert error_line(capsys) == f"{key}=inf: must be a finite number"


def test_an_option_error_names_each_field_as_it_is_typed():
    """Also those behind the first colon, and none that merely contain a field's name."""
    error = OptionError("tokens=8: needs cache=True or more tokens than host_tokens", "cache", "tokens")
    assert str(error).startswith("tokens=8: needs cache=True")
    for group, told in (
        ("engine", "engine.tokens=8: needs engine.cache=True or more engine.tokens than host_tokens"),
        ("", str(error)),
    ):
        with pytest.raises(UserError) as caught, within(group):
            raise error
        assert str(caught.value) == told


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("overlap=None: must be True or False, or None", "overlap=null: must be true or false, or null"),
        ("give train.steps=None and x=True; is None=3 given?", "give train.steps=null and x=true; is None=3 given?"),
        ("path=None.jsonl: None is there, x=NoneType", "path=None.jsonl: None is there, x=NoneType"),
    ],
)
def test_a_mistake_is_told_with_values_as_they_are_typed(capsys, message, told):
    assert report(UserError(message)) == 2
    assert error_line(capsys) == told


def test_a_value_as_it_is_typed():
    values = (None, True, False, 3, "None", 0.5, [2, 4])
    assert [*map(typed, values)] == ["null", "true", "false", "3", "None", "0.5", "[2, 4]"]


def test_a_device_that_is_there():
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_file_is_written_whole(tmp_path):
    path = tmp_path / "new" / "config.yaml"
    write_text(path, "é\n")
    with path.open(encoding="utf-8") as before:
        write_text(path, "second\n" * 1000)
        assert before.read() == "é\n"  # the old file was replaced and not written into
    assert path.read_text() == "second\n" * 1000
    assert os.listdir(path.parent) == ["config.yaml"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "^out is empty: give out=PATH$"),
        ("{tmp}/file", "file: nothing can be written there: File exists$"),
        ("{tmp}/file/below", "below: nothing can be written there: Not a directory$"),
        ("/proc/nothing", "^out=/proc/nothing: nothing can be written there: "),
        ("/sys", "^out=/sys: nothing can be written there: "),  # it is there
    ],
)
def test_results_have_a_place_before_they_are_measured(tmp_path, out, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=message):
        prepared(out.format(tmp=tmp_path))
    assert prepared(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert os.listdir(tmp_path / "a" / "b") == []


def test_one_file_has_a_place_before_it_is_measured(tmp_path):
    for out, message in ((str(tmp_path), "a directory$"), ("", "empty$")):
        with pytest.raises(UserError, match=f"^out={out}: must be a file's name, and is {message}"):
            prepared_file(out)
    with pytest.raises(UserError, match=r"^out=/sys/x\.json: nothing can be written there: "):
        prepared_file("/sys/x.json")
    assert prepared_file(str(tmp_path / "a" / "b.json")) == tmp_path / "a" / "b.json"
    assert os.listdir(tmp_path / "a") == []


def test_a_link_stays_and_a_device_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to("there")
    write_text(tmp_path / "link", "text\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "text\n"
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/dev/null")
    write_text(tmp_path / "link", "text\n")
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]
    assert prepared_file("/dev/null").is_char_device()
    with pytest.raises(UserError, match=r"cannot be written: .*Is a directory"):
        write_text(tmp_path, "text")


def test_a_file_that_could_not_be_written_is_as_it_was(tmp_path):
    path = tmp_path / "config.yaml"
    write_text(path, "first\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"config\.yaml: .*File too large"):
            write_text(path, "second\n" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "first\n"
    assert os.listdir(tmp_path) == ["config.yaml"]


def compose(config_name: str, *overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF_DIR.resolve()), version_base="1.3"):
        return hydra.compose(f"commands/{config_name}", list(overrides))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


GROUPS = {"target": TargetConfig, "data": DataConfig, "optim": OptimConfig}


@pytest.mark.parametrize("option", [f"{group}={name}" for group in GROUPS for name in options(group)])
def test_every_option_fits_its_dataclass(option):
    config, group = compose("train", option), option.partition("=")[0]
    for key in OmegaConf.missing_keys(config):
        OmegaConf.update(config, key, "given")
    built = build(GROUPS[group], config[group], group)
    assert set(config[group]) == set(vars(built))  # all fields are told, so that `--cfg job` shows what there is


@pytest.mark.parametrize("name", options("quant"))
def test_every_quant_fits_its_dataclass(name):
    config = compose("generate", f"quant={name}")
    built = build(Quant, config.quant, "quant")
    assert set(config.quant) == set(vars(built))
    assert (built.scheme, built.scope) == (name, "ffn")


def test_the_defaults_are_the_papers():
    config = compose("train")
    train, optim = build(TrainConfig, config.train, "train"), build(OptimConfig, config.optim, "optim")
    assert set(config.train) == set(vars(train))
    assert (optim.name, optim.lr, optim.weight_decay, optim.tokens_per_step) == ("adamw", 2e-4, 0.1, 2_097_152)
    assert (optim.warmup_steps, optim.decay_share) == (0, 0)
    assert (train.steps, train.l1_weight, train.ce_weight) == (48_000, 1.0, 0.1)
    assert {
        "num_layers": 3,
        "ffn": "dense",
        "first_token": "self_fusion",
        "norms": "eagle1",
    }.items() <= config.draft.items()
    assert set(config.draft) <= {"kind", *(one.name for one in dataclasses.fields(EagleConfig))}
    assert config.draft.kind == "eagle"


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_builds(name):
    config = compose("train", f"experiment={name}")
    for key in OmegaConf.missing_keys(config):
        OmegaConf.update(config, key, "given")
    for group, cls in (*GROUPS.items(), ("train", TrainConfig)):
        assert isinstance(build(cls, config[group], group), cls)


def test_what_json_cannot_hold_is_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": float("nan"), "b": [1.5, (float("inf"), {"c": -float("inf")})]})
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, [None, {"c": None}]]}


def test_the_bundled_target_is_found_from_any_directory(tmp_path, monkeypatch):
    """Beside conf/, as in a wheel; a directory of the same name in the working directory goes first."""
    bundled = CONF_DIR.parent / "data" / "tiny_target"
    monkeypatch.chdir(tmp_path)
    assert TargetConfig("data/tiny_target").path == str(bundled)
    assert TargetConfig("data/other").path == "data/other"
    (tmp_path / "data" / "tiny_target").mkdir(parents=True)
    assert TargetConfig("data/tiny_target").path == "data/tiny_target"


def test_a_wheel_has_the_package_its_configs_and_the_bundled_target():
    wheel = tomllib.loads((CONF_DIR.parent / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert wheel["packages"] == ["eagle_train"]
    inside = {source: place.removeprefix("eagle_train/") for source, place in wheel["force-include"].items()}
    assert inside == {"conf": "conf", "data/tiny_target": "data/tiny_target"}


def test_a_kind_of_draft_is_one_for_training_alone():
    """Elsewhere `draft=` is a directory, whatever it is called."""
    assert named_path("draft=eagle3", "train") == ["draft=eagle3"]
    assert named_path("draft=eagle3", "generate") == ["draft.path=eagle3"]
    assert named_path("draft=outputs/eagle3", "train") == ["draft.path=outputs/eagle3"]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("optim.lrr=1e-3,2e-3", "no such key; did you mean optim.lr?"),
        ("data=stdlib,nosuch", "data=nosuch: must be one of gsm8k, "),
        ("optim.lr=[1", "optim.lr=[1: its value cannot be read"),
    ],
)
def test_a_mistake_in_many_runs_is_told_before_the_first(tmp_path, monkeypatch, capsys, sweep, message):
    monkeypatch.chdir(tmp_path)
    assert call(train.main, "-m", sweep, "seed=0,1") == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
