"""A user's drafter: a class in one file and a YAML that names it, with eagle-generate. CONTRIBUTING.md."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.utils import get_method
from omegaconf import OmegaConf

from eagle_train import generate
from eagle_train.settings import CONF_DIR
from tests.support.command_line import call, save_target

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
EXAMPLES = PAGE.parent / "examples"
BROKEN = """
def misspelt(target, draft):
    return target.tokeniser

def refusing(target, draft):
    raise ValueError("two words\\nand a second line")
"""
TYPED = """
from bigram_drafter import Bigram
from eagle_train.inference.drafters.drafter import Drafter
from own_drafter import LastPlace

def both(bigram: Bigram, own: LastPlace) -> list[Drafter]:
    return [bigram, own]
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """The drafter's module and YAML, as CONTRIBUTING.md has them, in a directory of their own."""
    folder = tmp_path_factory.mktemp("drafter")
    section = PAGE.read_text("utf-8").partition("## Add a drafter")[2].partition("\n## ")[0]
    own, own_yaml, code, yaml = re.findall(r"```(?:python|yaml)\n(.*?)```", section, re.DOTALL)
    assert (EXAMPLES / "own_drafter.py").read_text("utf-8") == own
    assert (EXAMPLES / "own_drafter.yaml").read_text("utf-8") == own_yaml
    code, yaml = (re.sub("^    ", "", block, flags=re.MULTILINE) for block in (code, yaml))
    (folder / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 3)
    (folder / "bigram_drafter.py").write_text(code + "\nBLOCK = 16\n")
    (folder / "own_drafter.py").write_text(own)
    (folder / "own_drafter.yaml").write_text(own_yaml)
    (folder / "broken_drafter.py").write_text(BROKEN)
    (folder / "broken_module.py").write_text("make = nothing\n")
    moved = yaml.replace("eagle_train.inference.drafters.bigram.", "bigram_drafter.")
    (folder / "bigram.yaml").write_text(moved.replace("text: ???", f"text: {folder / 'text.txt'}"))
    return folder


@pytest.mark.parametrize("drafter", ["bigram", "own_drafter"])
def test_the_recipes_drafters_answer_as_plain_decoding_does(target, recipe, capsys, drafter):
    given = [f"target={target}", "prompt=abc", "max_tokens=12", "device=cpu", "color=never"]
    assert call(generate.main, *given) == 0
    plain = capsys.readouterr().out
    for tree in ("chain2", "d2_bf6"):  # the latter is wider than the candidates
        assert call(generate.main, *given, f"drafter={recipe / f'{drafter}.yaml'}", f"tree={tree}") == 0
        out, err = capsys.readouterr()
        assert re.sub(r"[\[\]]", "", out) == re.sub(r"[\[\]]", "", plain)
        assert "TPC" in err


def test_the_recipes_pass_the_type_checks(recipe):
    """With the project's settings; their classes are Drafters."""
    (recipe / "typed.py").write_text(TYPED)
    files = [recipe / f"{name}.py" for name in ("bigram_drafter", "own_drafter", "typed")]
    done = subprocess.run([sys.executable, "-m", "mypy", *files], cwd=PAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


OWN = ("file", "mine")  # which name nothing
DRAFTERS = {path.stem: OmegaConf.load(path) for path in CONF_DIR.glob("drafter/*.yaml") if path.stem not in OWN}


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_each_drafters_yaml_names_can_be_called(name):
    """With target, draft and the YAML's other keys."""
    spec = dict(DRAFTERS[name].items_ex(resolve=False))
    given = {"target": None, "draft": None} | {key: None for key in spec if key != "_target_"}
    inspect.signature(get_method(spec["_target_"])).bind(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [([], False), (["tree=chain2"], True), (["tree=FILE.yaml"], True), (["tree=chain2", "drafter=RECIPE"], False)],
)
def test_a_tree_that_is_not_used_is_told(target, recipe, capsys, given, told):
    (recipe / "tree.yaml").write_text("parents: [-1, 0]")
    places = {"FILE": recipe / "tree", "RECIPE": recipe / "own_drafter.yaml"}
    given = [re.sub("FILE|RECIPE", lambda found: str(places[found[0]]), each) for each in given]
    assert call(generate.main, f"target={target}", "prompt=abc", "max_tokens=2", "device=cpu", *given) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("warning: no draft=, so decoding is plain and tree= is unused") == told


CLASSES = """
from eagle_train.inference import TextDrafter

class Again(TextDrafter):
    def __init__(self, target, draft, times=1):
        self.times = times

    def draft(self, text, most):
        return text.prompt[-1:] * self.times

class Closed(Again):
    def __init__(self, times):
        super().__init__(None, None, times)
"""


def test_a_class_of_ones_own_is_named_on_the_command_line(target, tmp_path, capsys, monkeypatch):
    (tmp_path / "drafting_classes.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    given = [f"target={target}", "prompt=abc", "max_tokens=4", "device=cpu", "drafter=mine"]
    made, make = [], generate.make_drafter
    monkeypatch.setattr(generate, "make_drafter", lambda *given: made.append(make(*given)) or made[-1])
    assert call(generate.main, *given, "drafter._target_=drafting_classes.Again", "drafter.times=3") == 0
    assert (type(made[0]).__name__, made[0].times) == ("Again", 3)
    for more, said in (
        (["drafter._target_=drafting_classes.Closed", "drafter.times=3"], "with target=, draft= and .* it takes times"),
        (["drafter._target_=drafting_classes.Again", "drafter.time=3"], "unexpected keyword argument 'time'"),
        ([], "drafter._target_ is needed: give drafter._target_=VALUE"),
    ):
        assert call(generate.main, *given, *more) == 2
        assert re.search(f"^error: .*{said}", capsys.readouterr().err, re.MULTILINE)


def test_keys_of_a_file_are_overridden(target, recipe, capsys):
    given = [f"target={target}", "prompt=abc", "max_tokens=4", "device=cpu", f"drafter={recipe / 'own_drafter.yaml'}"]
    assert call(generate.main, *given, "drafter.least=0") == 2
    assert "error: drafter.least=0: must be above 0" in capsys.readouterr().err
    assert call(generate.main, *given, "drafter.least=1") == 0


def test_an_alignment_that_the_drafter_does_not_read_is_one_line(target, recipe, capsys):
    given = [f"target={target}", "prompt=abc", "max_tokens=2", "device=cpu"]
    own, eagle = f"drafter={recipe / 'bigram.yaml'}", "drafter=eagle"
    assert [call(generate.main, *given, which, "draft.alignment=last") for which in (own, eagle)] == [2, 0]
    said = "error: draft.alignment=last: this drafter does not read it; leave it out, or use drafter=eagle"
    assert said in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("x: 1", "drafter: must have `_target_`"),
        ("- x", "drafter="),
        ("_target_: [", "drafter="),
        ("_target_: builtins.dict", "drafter builtins.dict: no signature found"),
        ("_target_: nothing", "drafter nothing: must be a dotted name"),
        ("_target_: no_drafter.nothing", "drafter no_drafter.nothing: No module named 'no_drafter'"),
        (
            "_target_: bigram_drafter.nothing",
            "drafter bigram_drafter.nothing: module bigram_drafter has nothing to call",
        ),
        ("_target_: bigram_drafter.BLOCK", "drafter bigram_drafter.BLOCK: module bigram_drafter has nothing to call"),
        (
            "_target_: bigram_drafter.make_bigram\nshift: 2",
            "drafter bigram_drafter.make_bigram: make_bigram() got an unexpected keyword argument 'shift'",
        ),
        ("_target_: bigram_drafter.make_bigram\ntext: ???", "drafter.text is needed in "),
        (
            "_target_: bigram_drafter.make_bigram\ntext: nowhere\ncandidates: 0",
            "drafter.candidates=0: must be above 0",
        ),
        ("_target_: pathlib.PurePosixPath", "drafter pathlib.PurePosixPath: "),
        ("_target_: broken_drafter.misspelt", "drafter broken_drafter.misspelt: AttributeError: "),
        ("_target_: broken_drafter.refusing", "drafter broken_drafter.refusing: ValueError: two words"),
        ("_target_: broken_module.make", "drafter broken_module.make: NameError: name 'nothing' is not defined"),
    ],
)
def test_what_makes_no_drafter_is_one_line(target, recipe, capsys, yaml, said):
    (recipe / "wrong.yaml").write_text(yaml)
    assert call(generate.main, f"target={target}", "prompt=abc", f"drafter={recipe / 'wrong.yaml'}") == 2
    assert f"error: {said}" in capsys.readouterr().err
