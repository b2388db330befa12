"""A draft for a target of other sizes is told in one line, before a weight of the target is loaded."""

import re
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from eagle_train import export, generate, regenerate, train
from eagle_train.errors import UserError
from eagle_train.inference import Engine
from evals import compare, experiments, latency, mt_bench, quantisation, switches, tune_trees
from tests.support.command_line import call, chats, write_jsonl
from tests.support.eval_inputs import make_home


@pytest.fixture(scope="module")
def homes(tmp_path_factory) -> tuple[Path, Path]:
    """Two, whose targets have 2 and 3 layers."""
    root = tmp_path_factory.mktemp("homes")
    homes = make_home(root / "own"), make_home(root / "other", num_layers=3)
    write_jsonl(homes[0] / "chats.jsonl", chats(9))
    return homes


@pytest.fixture(autouse=True)
def nothing_is_loaded(homes, monkeypatch):
    def loading(*_, **__):
        raise AssertionError("a target is loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", loading)


ASKED, CHATS = ["target=TARGET", "questions=HOME/questions.jsonl"], ["data=messages", "data.path=HOME/chats.jsonl"]


@pytest.mark.parametrize(
    ("command", "field", "given"),
    [
        (mt_bench.main, "draft", ASKED),
        (latency.main, "draft", ASKED),
        (quantisation.main, "draft", ASKED),
        (switches.main, "draft", [*ASKED, "switches=[greedy_drafting]"]),
        (tune_trees.main, "draft", ASKED),
        (
            compare.main,
            "drafters.one.draft",
            ["target=TARGET", "tasks=[HOME/questions.jsonl]", "drafters={one: {drafter: eagle}}"],
        ),
        (experiments.main, "draft", ["study=alignment", "study.base=['target=TARGET']", ASKED[1]]),
        (generate.main, "draft", ["target=TARGET", "prompt=hello"]),
        (regenerate.main, "draft", ["target=TARGET", *CHATS]),
        (train.main, "train.init_from", ["target=TARGET", *CHATS, "data.row_tokens=64"]),
        (export.main, "checkpoint", ["target=TARGET", "layout=vllm"]),
    ],
    ids=lambda each: getattr(each, "__module__", None),
)
def test_a_draft_for_another_target_is_told_before_loading(homes, tmp_path, capsys, command, field, given):
    home, other = homes
    places = {"HOME": str(home), "TARGET": f"{other}/target"}
    asked = [re.sub("|".join(places), lambda found: places[found[0]], each) for each in given]
    out = [] if command is generate.main else [f"out={tmp_path}/out{'.jsonl' if command is regenerate.main else ''}"]
    added = "++" if command is compare.main else ""
    assert call(command, *asked, *out, f"{added}{field}={home}/draft") == 2
    said = f"made for target {home}/target (num_layers 2), not for {other}/target (3)"
    assert capsys.readouterr().err.endswith(f"error: {field}={home}/draft: {said}\n")


def test_an_engine_tells_it_before_loading(homes):
    home, other = homes
    with pytest.raises(UserError, match=r"made for target .* \(num_layers 2\), not for .* \(3\)"):
        Engine(f"{other}/target", {"one": f"{home}/draft"})
