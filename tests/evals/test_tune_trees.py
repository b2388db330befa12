"""The dispatcher's table: what a tree makes of ranks is what the engine makes of it; the best tree is the fastest."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from eagle_train.artifacts.format import load_draft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.tree import Tree, chain, full, load_tree, pruned
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.settings import CONF_DIR
from evals import mt_bench, tune_trees
from evals.tune_trees import Candidate, acceptance, ranks_of, round_seconds, table, table_yaml, text, tpc_of
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home
from tests.support.graph_recorder import recorded

PROMPTS = [[5, 9, 60], [7], [100, 3, 200, 41, 8], [66, 120]]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("tune_trees"))


@pytest.mark.parametrize("tree", [chain(1), chain(3), full(2, 3), pruned(6, [[0.5, 0.3, 0.1]] * 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_trees_calls_are_the_engines(home, tree, temperature):
    """At temperature 0 to the last call; sampled, a token is committed from the draft exactly when it was drafted."""
    target = load_target(TargetConfig(str(home / "target")))
    draft = load_draft(home / "draft")
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=4)
    outputs = Engine(target, draft, tree).generate(PROMPTS, params)
    ranks = [
        ranks_of(target, draft, prompt, output.token_ids, 3, 3) for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    tokens, calls = (sum(getattr(o.stats, name) for o in outputs) for name in ("tokens", "calls"))
    assert 1.2 < tokens / calls < tree.max_depth + 0.9
    assert tpc_of(tree, ranks) == tokens / calls


def test_shares_by_depth_and_rank():
    ranks = [torch.tensor([[0, 1], [2, 0], [0, 0]]), torch.tensor([[1, 2]])]
    # Depth 0: ranks 0, 2, 0, 1, of which 2 is a miss; depth 1, of the three that held: 1, 0, 2.
    assert acceptance(ranks, 2, 2) == [[0.5, 0.25], [pytest.approx(1 / 3), pytest.approx(1 / 3)]]


def test_a_trees_tpc_by_hand():
    answer = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 2]])
    # chain2: root 0 takes one and stops (2 tokens), root 2 takes one and the answer ends after its own (2).
    assert tpc_of(chain(2), [answer]) == 2.0
    assert tpc_of(chain(0), [answer]) == 1.0
    # Two children a node: root 0 takes ranks 0 and 1 (3 tokens), root 3 misses (1).
    assert tpc_of(full(2, 2), [answer]) == 2.0
    assert tpc_of(chain(2), [torch.zeros(0, 2, dtype=torch.int64)]) == 1.0


TRIED = [Candidate("plain", chain(0), 1.0), Candidate("chain2", chain(2), 2.0), Candidate("n3", full(1, 3), 1.5)]
SECONDS = {1: [0.010, 0.016, 0.010], 8: [0.010, 0.030, 0.020]}


def test_the_fastest_tree_of_each_batch_size():
    assert table(TRIED, SECONDS) == [
        {"batch_size": 1, "tree": "n3", "tpc": 1.5, "speedup": pytest.approx(1.5)},
        {"batch_size": 8, "tree": "plain", "tpc": 1.0, "speedup": 1.0},
    ]
    assert text(TRIED, SECONDS).splitlines() == [
        "tree       nodes    TPC     batch 1     batch 8",
        "plain          0   1.00       1.00        1.00*",
        "chain2         2   2.00       1.25        0.67 ",
        "n3             3   1.50       1.50*       0.75 ",
    ]


def test_the_dispatcher_reads_the_table(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text(table_yaml(TRIED, SECONDS, SimpleNamespace(compile=True, graphs=False)))
    assert "by python -m evals.tune_trees compile=true graphs=false. " in path.read_text()
    dispatcher = Dispatcher({"table": str(path)})
    assert [dispatcher.dispatch(size).tree for size in (1, 2, 99)] == [full(1, 3), chain(0), chain(0)]


def test_the_bundled_tree_is_the_one_that_was_measured():
    published = json.loads((Path(tune_trees.__file__).parent / "results" / "tune_trees.json").read_text())
    parents = {tree["name"]: tree["parents"] for tree in published["trees"]}
    assert list(load_tree("n8").parents) == parents["n8"]
    bundled = OmegaConf.load(CONF_DIR / "tree" / "n8.yaml").acceptance
    assert bundled == [[round(share, 3) for share in row] for row in published["acceptance"]]


@pytest.mark.parametrize("name", ["own", "n8"])
def test_the_dispatcher_reads_a_tree_of_ones_own(tmp_path, name):
    """As its parents, and as those in conf/tree."""
    path = tmp_path / "mine.yaml"
    path.write_text("parents: [-1, 0, 0, 1]" if name == "own" else (CONF_DIR / "tree" / "n8.yaml").read_text())
    expected = Tree((-1, 0, 0, 1)) if name == "own" else load_tree(name)
    for spec in (str(path), {"table": str(path)}):
        assert {Dispatcher(spec).dispatch(size).tree for size in (1, 99)} == {expected}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no such file$"),
        ("1: {parents: [-1", r"no YAML: "),
        ("[1, 2]", r"must map batch sizes to trees, or be one: `parents: \[-1, 0\]`, say$"),
        ("few: {parents: [-1]}", r"must map batch sizes to trees, or be one"),
        ("4: {parents: [-1, 1]}", r"node 1 has parent 1"),
        ("parents: [-1, 1]", r"node 1 has parent 1"),
    ],
)
def test_a_table_that_is_none(tmp_path, content, message):
    path = tmp_path / "table.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        Dispatcher({"table": str(path)})


@pytest.mark.usefixtures("noisy")
def test_the_whole_command(home, tmp_path, capsys):
    out = tmp_path / "out"
    small = ["batch_sizes=[1,2]", "depth=3", "children=3", "nodes=[2,4,5]", "full=[[2,2]]", "rounds=2"]
    assert call(tune_trees.main, *arguments(home, f"out={out}", *small)) == 0
    found = json.loads((out / "tune_trees.json").read_text())
    names = [tree["name"] for tree in found["trees"]]
    assert names[:5] == ["plain", "chain1", "chain2", "chain3", "d2_bf2"]
    assert found["trees"][0]["tpc"] == 1.0
    assert all(set(row) == set(names) for row in found["round_s"].values())
    assert [row["batch_size"] for row in found["table"]] == [1, 2]
    for shares in found["acceptance"]:
        assert len(shares) == 3
        assert 0 < sum(shares) <= 1
    for row, tree in zip(found["table"], found["trees"], strict=False):
        assert load_tree({"parents": tree["parents"]}).num_nodes == len(tree["parents"])
        assert row["tpc"] == next(each["tpc"] for each in found["trees"] if each["name"] == row["tree"])
    printed = capsys.readouterr().out
    assert f"(tree={out}/table.yaml)" in printed
    again = arguments(home, f"out={tmp_path}/again", f"tree={out}/table.yaml", "batch_size=2")
    status = call(mt_bench.main, *again)
    largest = Dispatcher({"table": str(out / "table.yaml")}).deepest
    assert status == (0 if largest else 2)  # nothing is measured where speculation never pays


@pytest.mark.usefixtures("noisy")
def test_what_is_timed_is_a_round_of_the_tree(home, tmp_path, monkeypatch):
    """And stands behind another of the same tree, whose tokens the draft reads. Also where an engine would read prompts
    by chunks, and tell of a round one step later, as it does on a GPU."""
    done: list[tuple[Tree, list[Tree]]] = []

    class Watched(Engine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **{"overlap": True, "prefill_tokens": 8} | options)
            self.finished: list[Tree] = []

        def finish(self, round_):
            self.finished += [] if round_ is None else [round_.plan.tree]
            super().finish(round_)

        def step(self):
            self.finished.clear()
            told = super().step()
            done.append((self.dispatcher.dispatch(len(told)).tree, list(self.finished)))
            return told

    def timed(*arguments):
        done.clear()
        return round_seconds(*arguments)

    monkeypatch.setattr(tune_trees, "Engine", Watched)
    monkeypatch.setattr(tune_trees, "round_seconds", timed)
    small = ["batch_sizes=[1,3]", "depth=2", "children=2", "nodes=[3]", "full=[]", "rounds=2"]
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", *small)) == 0
    trees = [tree["parents"] for tree in json.loads((tmp_path / "out" / "tune_trees.json").read_text())["trees"]]
    assert [list(tree.parents) for tree, _ in done] == [tree for tree in trees * 2 * 3 for _ in range(2)]
    assert all(finished == [tree] for tree, finished in done)


@pytest.mark.usefixtures("noisy")
def test_what_is_timed_is_compiled_before(home, tmp_path, monkeypatch, graphs):
    made = []

    def timed(*arguments):
        made.append(len(graphs))
        seconds = round_seconds(*arguments)
        made.append(len(graphs))
        return seconds

    monkeypatch.setattr(tune_trees, "round_seconds", timed)
    small = [
        "batch_sizes=[1,3]",
        "depth=3",
        "children=2",
        "nodes=[5,7]",
        "full=[[2,2]]",
        "rounds=2",
        "compile=true",
        "device=cpu",
    ]
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", *small)) == 0
    assert made[0] == made[1] > 0
    assert json.loads((tmp_path / "out" / "tune_trees.json").read_text())["config"]["compile"] is True


def test_what_is_timed_is_recorded(home, tmp_path, monkeypatch):
    """Drafting and validation of each tree, where an engine would."""
    engines = []

    def recording(*arguments, graphs, **options):
        engine = Engine(*arguments, **options)
        engines.append(recorded(engine) if graphs else engine)
        return engine

    monkeypatch.setattr(tune_trees, "Engine", recording)
    monkeypatch.setattr(tune_trees, "check_graphs", lambda *_: None)
    small = [
        "batch_sizes=[1,3]",
        "depth=3",
        "children=2",
        "nodes=[5]",
        "full=[[2,2]]",
        "rounds=2",
        "graphs=true",
        "device=cpu",
    ]
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", *small)) == 0
    found = json.loads((tmp_path / "out" / "tune_trees.json").read_text())
    assert found["config"]["graphs"] is True
    plain, drafting = (engine.launcher for engine in engines)
    assert {plan.tree.parents for _, _, plan, _ in drafting.drafting.made} == {
        tuple(tree["parents"]) for tree in found["trees"][1:]
    }
    assert plain.validation.made


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("depth=0", "error: depth=0: must be at least 1"),
        ("batch_sizes=[]", "error: batch_sizes=[]: must be numbers from 1 on"),
        ("nodes=[0]", "error: nodes=[0]: must be numbers from 1 on"),
        ("nodes=[2,1400]", "error: nodes=[2, 1400]: depth=5 and children=4 make trees of at most 1023"),
        ("max_tokens=1", "error: max_tokens=1: must be at least 2, for there to be decoding"),
        ("compile=maybe", "error: compile: Value 'maybe'"),
        ("graphs=true", "error: graphs=True: needs a GPU; the device is cpu"),
        ("full=[3]", "error: full: must be a list of lists, as full=[[...], [...]]"),
        ("full=[[9,2]]", "error: full=[[9, 2]]: [9, 2] goes beyond depth=5 and children=4"),
        ("full=[[0,2]]", "error: tree.depth is 0; it must be a whole number, at least 1"),
        ("depth=600", "error: tree: 1201 nodes; at most 1024 are possible"),
        ("full=[[2]]", "error: full=[[2]]: must be pairs of depth and branching"),
        ("rounds=500", "error: rounds=500: "),
        ("draft.path=nowhere", "error: draft=nowhere: no config.json"),
    ],
)
def test_mistakes_are_one_line(home, tmp_path, capsys, override, message):
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", "device=cpu", override)) == 2
    told = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("batch ") for line in told)  # nothing was asked
    lines = [line for line in told if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert not (tmp_path / "out").exists()
