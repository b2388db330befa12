"""terminal.py, usage.py and how commands speak: what a terminal may be sent, and `--help`."""

import io
import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from eagle_train import export, generate, settings, train
from eagle_train.cli import compose, warning_text
from eagle_train.errors import UserError, report
from eagle_train.settings import CONF_DIR
from eagle_train.terminal import printable, wants_color
from eagle_train.tree_names import ANY_TREE
from eagle_train.usage import usage
from tests.support.command_line import call
from tests.support.sources import sources

COMMANDS = sorted(path.stem for path in CONF_DIR.glob("commands/*.yaml") if path.stem != "command")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc", "a\nb\tc"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\x00\x7f\x85\x9b1m", r"a\rb\x00\x7f\x85\x9b1m"),
        ("\u202eevil\u2066\u2029\ufeff\ud800", r"\u202eevil\u2066\u2029\ufeff\ud800"),
        ("日本語 العربية\u200f é 👩\u200d🔬", "日本語 العربية\u200f é 👩\u200d🔬"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text, shown):
    assert printable(text) == shown


PRINTED = re.compile(r"print\(.*file=sys\.stderr|stderr\.write\(")


def test_what_is_no_result_goes_through_the_log():
    """But for a user's mistake, which ends a command."""
    found = {name for name, text in sources().items() if PRINTED.search(text)}
    assert found == {"eagle_train.terminal", "eagle_train.errors"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "stream", "variables", "wanted"),
    [
        ("auto", Terminal, {}, True),
        ("auto", Terminal, {"NO_COLOR": ""}, True),  # as the convention has it
        ("auto", Terminal, {"NO_COLOR": "1"}, False),
        ("auto", Terminal, {"TERM": "dumb"}, False),
        ("auto", io.StringIO, {}, False),
        ("always", io.StringIO, {"NO_COLOR": "1"}, True),
        ("never", Terminal, {}, False),
    ],
)
def test_colour(choice, stream, variables, wanted, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_color(choice, stream()) == wanted


def test_errors_and_warnings_are_a_printable_line(capsys):
    assert report(UserError("a=\x1b[31m:\nnot so")) == 2
    assert capsys.readouterr().err == "error: a=\\x1b[31m: not so\n"
    assert warning_text("data\n\x1b[1m", UserWarning, train.__file__, 7) == "warning: data \\x1b[1m\n"
    assert warning_text("old", DeprecationWarning, train.__file__, 7).startswith(f"{train.__file__}:7: Deprecation")
    assert warning_text("theirs", UserWarning, re.__file__, 7, "x").startswith(f"{re.__file__}:7: UserWarning: theirs")


def test_no_text_fails_for_want_of_an_encoding():
    program = "from eagle_train.cli import tell_plainly; tell_plainly(); print('日')"
    variables = {
        "PYTHONIOENCODING": "latin-1",
        "PYTHONPATH": str(settings.PACKAGE.parent),
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, check=True)
    assert done.stdout == b"\\u65e5\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_every_key_that_there_is(name):
    """Each as it is given, `key=value`; a group's come with what its YAMLs say."""
    text = usage(CONF_DIR, name, {})
    told = set(re.findall(r"^  ([\w.]+)=", text, re.MULTILINE))

    def keys(values: dict, above: str = ""):
        for key, value in values.items():
            yield from keys(value, f"{above}{key}.") if isinstance(value, dict) and value else [f"{above}{key}"]

    wanted = set(keys(OmegaConf.to_container(compose(name, []))))
    missing = {key for key in wanted if not any(f"{key}.".startswith(f"{known}.") for known in told)}
    assert {key for key in missing if not key.startswith("tree.")} == set()  # a tree's name says all of it
    assert text.startswith((CONF_DIR / "commands" / f"{name}.yaml").read_text().splitlines()[1].removeprefix("# "))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (train, ["Usage: eagle-train [KEY=VALUE ...]", "target=tiny", "or a directory or hub id", "train.steps=48000"]),
        (train, ["data.row_tokens=512                # length of a packed row"]),  # stdlib's value, base's words
        (generate, ["Usage: eagle-generate", "tree=chain3", ANY_TREE.split(" (")[0], "grammar.regex=null"]),
        (export, ["Usage: eagle-export", "checkpoint=???", "layout=native"]),
    ],
)
def test_help(command, words, capsys):
    assert call(command.main, "--help") == 0
    text = capsys.readouterr().out
    assert "Configuration groups" in text
    assert all(word in text for word in words)
    assert "Hydra" not in text


@pytest.mark.parametrize(
    ("arguments", "told", "untold"),
    [
        (["draft=eagle3", "optim.lr=7"], ["draft=eagle3 ", "draft.decay=0.8"], ["draft.norms=", "optim.lr=7"]),
        (["experiment=qwen3_8b"], ["target=hf ", "target.path=Qwen/Qwen3-8B", "data.row_tokens=4096"], ["target=tiny"]),
        (["experiment=quickstart", "data=messages"], ["data=messages ", "optim.name=muon"], ["data=stdlib"]),
        (
            ["target=some/where"],
            ["target=hf ", "target.path=???", "target.template_kwargs=<data.template_kwargs>"],
            ["${"],
        ),
    ],
)
def test_help_tells_the_keys_of_the_options_that_are_given(arguments, told, untold, capsys):
    assert call(train.main, *arguments, "--help") == 0
    text = capsys.readouterr().out
    assert [word for word in told if f"  {word}" not in text] == []
    assert [word for word in untold if f"  {word}" in text] == []
    assert text.endswith("GROUP=OPTION --help shows the keys of another option.\n")


def test_help_tells_an_option_that_there_is_not(capsys):
    assert call(train.main, "draft=eagle9", "--help") == 2
    assert "draft=eagle9: must be one of eagle, eagle3" in capsys.readouterr().err


def test_help_has_no_reference_to_a_key_that_the_command_has_not(capsys):
    assert call(generate.main, "--help") == 0
    text = capsys.readouterr().out
    assert "  target.template_kwargs=null" in text
    assert "  drafter.alignment=<draft.alignment>" in text
    assert "${" not in text
