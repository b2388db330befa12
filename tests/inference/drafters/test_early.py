"""Mistakes in a drafter's options cost no loading of the target, with every command."""

import pytest

from eagle_train import generate, regenerate
from eagle_train.models import loading
from evals import compare, latency, mt_bench
from tests.support.command_line import call, save_target
from tests.support.datastores import write_datastore

MISTAKES = [
    (["drafter=ngram", "drafter.max_draft_len=0"], "drafter.max_draft_len=0: must be "),
    (["drafter=suffix", "drafter.max_nodes=0"], "drafter.max_nodes=0: must be "),
    (["drafter=lookahead", "drafter.window=0"], "drafter.window=0: must be "),
    (["drafter=layer_skip", "drafter.layers=9"], "drafter.layers=9: must be how many of the first layers, 1 to 3"),
    (["drafter=layer_skip", "drafter.layers=nowhere"], "drafter.layers=nowhere: no such file"),
    (["drafter=retrieval", "drafter.datastore=nowhere"], "drafter.datastore=nowhere: no such directory"),
    (["drafter=retrieval", "drafter.datastore=STORE"], "STORE: was made for another tokenizer"),
    (["drafter=draft_model", "drafter.path=nowhere"], "drafter.path=nowhere: no such directory"),
    (
        ["drafter=draft_model", "drafter.path=OTHER"],
        "drafter.path=OTHER: another tokenizer than the target's: token 3 is",
    ),
    (["drafter=draft_model", "drafter.path=TARGET", "drafter.dtype=int3"], "drafter.dtype=int3: must be one of "),
]
COMMANDS = [
    (regenerate, ["data=messages", "data.path=HOME/asked.jsonl", "out=HOME/answers.jsonl"]),
    (mt_bench, ["questions=HOME/asked.jsonl", "out=HOME/bench"]),
    (latency, ["questions=HOME/asked.jsonl", "out=HOME/latency"]),
    (compare, ["tasks=[HOME/asked.jsonl]", "out=HOME/compare"]),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("places")
    target, other = save_target(home / "target"), save_target(home / "other")
    tokens = other / "tokenizer.json"
    tokens.write_text(tokens.read_text("utf-8").replace('"!":', '"exclaim":'), "utf-8")
    (home / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    store = write_datastore(home / "store", [[1, 2]], vocabulary=9)
    return {"TARGET": str(target), "OTHER": str(other), "STORE": str(store), "HOME": str(home)}


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch):
    monkeypatch.setattr(loading, "placed", lambda *_: pytest.fail("its weights are read"))


def filled(text: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
    return text


def error_of(capsys) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(("given", "said"), MISTAKES, ids=[" ".join(given) for given, _ in MISTAKES])
def test_each_drafter_tells_them(places, capsys, given, said):
    given = [filled(each, places) for each in given]
    assert call(generate.main, f"target={places['TARGET']}", "prompt=abc", "device=cpu", *given) == 2
    assert filled(said, places) in error_of(capsys)


@pytest.mark.parametrize(("command", "more"), COMMANDS, ids=[command.__name__ for command, _ in COMMANDS])
def test_each_command_tells_them(places, capsys, command, more):
    of_compare = ["drafters={skip: {drafter: layer_skip, layers: 9}}"]
    drafter = of_compare if command is compare else ["drafter=layer_skip", "drafter.layers=9"]
    given = [filled(each, places) for each in more]
    assert call(command.main, f"target={places['TARGET']}", "device=cpu", *drafter, *given) == 2
    assert "drafter.layers=9: must be how many of the first layers, 1 to 3" in error_of(capsys)


def test_what_a_maker_of_ones_own_is_marked_with_is_called(places, tmp_path, capsys, monkeypatch):
    (tmp_path / "early_drafter.py").write_text(
        "from eagle_train.errors import check\n"
        "from eagle_train.inference.drafters.early import checked_early\n"
        "def sound(target, draft, most):\n"
        "    check(most < 5, f'drafter.most={most}: must be below 5, with {target.path} and draft {draft}')\n"
        "    assert most != 3, 'a fault of its own'\n"
        "@checked_early(sound)\n"
        "def make(target, draft, most):\n"
        "    assert False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = [f"target={places['TARGET']}", "prompt=abc", "device=cpu", "drafter=mine"]
    for most, said in (
        (5, f"error: drafter.most=5: must be below 5, with {places['TARGET']} and draft None"),
        (3, "error: drafter early_drafter.make: AssertionError: a fault of its own"),
    ):
        assert call(generate.main, *given, "drafter._target_=early_drafter.make", f"drafter.most={most}") == 2
        assert error_of(capsys) == said
