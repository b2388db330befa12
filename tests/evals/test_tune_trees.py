"""evals.tune_trees: the table has the fastest trees, and what is timed is a round of the tree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eagle_train.errors import UserError
from eagle_train.inference import Dispatcher, Engine, EngineConfig, Sequence, Tree, chain, full
from eagle_train.inference.decode.named_trees import load_tree
from eagle_train.settings import CONF_DIR
from evals import mt_bench, tune_trees
from evals.bench import session
from evals.bench.page import others
from evals.bench.page.blocks import Notes
from evals.bench.page.gather import Source
from evals.bench.round_times import best_of, round_seconds
from evals.bench.tree_search import Candidate
from evals.bench.trees import unpaid
from evals.tune_trees import table, table_yaml, text
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home
from tests.support.graph_recorder import recorded
from tests.support.inside import runner_of


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("tune_trees"))


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


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ({1: 1.5, 8: 1.0}, "No tree pays at batch size 8: none is faster than plain decoding, "),
        ({1: 1.0, 8: 1.0}, "No tree pays at batch sizes 1, 8: "),
        ({1: 1.5, 8: 1.001}, None),
    ],
)
def test_where_no_tree_pays_it_is_said(speedups, said):
    rows = [{"batch_size": size, "tree": "chain1", "tpc": 2.0, "speedup": value} for size, value in speedups.items()]
    published = json.loads((Path(tune_trees.__file__).parent / "results" / "tune_trees.json").read_text())
    blocks = others.tune_trees(Source("mine", "tune_trees", published | {"table": rows}))
    notes = [block for block in blocks if isinstance(block, Notes)]
    assert [note.items for note in notes] == ([] if said is None else [unpaid(rows)])
    assert "".join(unpaid(rows)).startswith(said or "")
    assert len(unpaid(rows)) == (said is not None)


def test_of_trees_that_are_as_fast_the_smallest_is_taken():
    assert best_of(TRIED, [0.5, 1.0, 0.75]) == 0


def test_the_dispatcher_reads_the_table(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text(table_yaml(TRIED, SECONDS, EngineConfig(compile=True)))
    assert "by python -m evals.tune_trees engine.compile=true engine.graphs=null. " in path.read_text()
    dispatcher = Dispatcher({"table": str(path)})
    assert [dispatcher.dispatch(size).tree for size in (1, 2, 99)] == [full(1, 3), chain(0), chain(0)]


def test_the_bundled_tree_is_the_one_that_was_measured():
    published = json.loads((Path(tune_trees.__file__).parent / "results" / "tune_trees.json").read_text())
    parents = {tree["name"]: tree["parents"] for tree in published["trees"]}
    assert list(load_tree("n8").parents) == parents["n8"]
    bundled = OmegaConf.load(CONF_DIR / "tree" / "n8.yaml").acceptance
    assert bundled == [[round(share, 3) for share in row] for row in published["acceptance"]]


@pytest.mark.parametrize("name", ["own", "n8"])
def test_the_dispatcher_reads_a_users_tree(tmp_path, name):
    """As its parents, and as a YAML of conf/tree."""
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
def test_files_that_are_no_table(tmp_path, content, message):
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
    rounds = [sum(each["rounds"] for each in tree["by_context"]) for tree in found["trees"]]
    assert [rounds[0] / each for each in rounds] == pytest.approx([tree["tpc"] for tree in found["trees"]])
    printed = capsys.readouterr().out
    assert f"(tree={out}/table.yaml)" in printed
    again = arguments(home, f"out={tmp_path}/again", f"tree={out}/table.yaml", "batch_size=2")
    status = call(mt_bench.main, *again)
    largest = Dispatcher({"table": str(out / "table.yaml")}).deepest
    assert status == (0 if largest else 2)  # nothing is measured where speculation never pays


@pytest.mark.usefixtures("noisy")
def test_timed_rounds_are_of_their_tree(home, tmp_path, monkeypatch):
    """After another round of the same tree, whose tokens the draft reads. Also where options ask for prompts in chunks
    and for rounds that are reported one step later."""
    done: list[tuple[Tree, set[int]]] = []
    drafted: dict[Sequence, int] = {}  # of each request, before the step

    class Watched(Engine):
        def step(self):
            tree = self.dispatcher.dispatch(1).tree
            updates = super().step()
            depths = {sum(one.request.stats.drafted_per_depth) - drafted.get(one.request, 0) for one in updates}
            drafted.update({one.request: sum(one.request.stats.drafted_per_depth) for one in updates})
            if all(one.request.rounds for one in updates):
                done.append((tree, depths))
            return updates

    def timed(*arguments):
        done.clear()
        return round_seconds(*arguments)

    monkeypatch.setattr(session, "Engine", Watched)
    monkeypatch.setattr(tune_trees, "round_seconds", timed)
    small = ["batch_sizes=[1,3]", "depth=2", "children=2", "nodes=[3]", "full=[]", "rounds=2"]
    small += ["engine.overlap=true", "engine.prefill_tokens=8"]
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", *small)) == 0
    trees = [tree["parents"] for tree in json.loads((tmp_path / "out" / "tune_trees.json").read_text())["trees"]]
    assert [list(tree.parents) for tree, _ in done] == [tree for tree in trees * 2 * 3 for _ in range(2)]
    assert all(depths == {tree.max_depth} for tree, depths in done)


@pytest.mark.usefixtures("noisy")
def test_timed_rounds_are_compiled_before(home, tmp_path, monkeypatch, graphs):
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
        "engine.compile=true",
        "device=cpu",
    ]
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", *small)) == 0
    assert made[0] == made[1] > 0
    assert json.loads((tmp_path / "out" / "tune_trees.json").read_text())["config"]["engine"]["compile"] is True


def test_timed_rounds_are_recorded_as_graphs(home, tmp_path, monkeypatch):
    """Drafting and validation of each tree."""
    engines = []

    def recording(target, draft, tree, config, **parts):
        engine = Engine(target, draft, tree, replace(config, graphs=False), **parts)
        engines.append(recorded(engine) if config.graphs else engine)
        return engine

    monkeypatch.setattr(session, "Engine", recording)
    monkeypatch.setattr(session, "check_graphs", lambda *_, **__: None)
    small = [
        "batch_sizes=[1,3]",
        "depth=3",
        "children=2",
        "nodes=[5]",
        "full=[[2,2]]",
        "rounds=2",
        "engine.graphs=true",
        "device=cpu",
    ]
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", *small)) == 0
    found = json.loads((tmp_path / "out" / "tune_trees.json").read_text())
    assert found["config"]["engine"]["graphs"] is True
    plain, drafting = (runner_of(engine).graphs for engine in engines)
    trees = {tuple(tree["parents"]) for tree in found["trees"][1:]}
    assert {plan.tree.parents for _, plan, *_ in drafting.drafting.made} == trees
    assert {size[0] for size, form in drafting.validation.made if form.plan.parents in trees} == {1, 2, 3}
    rounds = drafting.validation.record.replays
    assert rounds == drafting.drafting.record.replays == 2 * len(trees) * 2 * 3  # of each tree, size and turn
    assert plain.validation.record.replays > 0


def test_graphs_without_a_gpu_are_refused_before_a_target_is_loaded(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(session, "load_target", None)
    assert call(tune_trees.main, *arguments(home, f"out={tmp_path}/out", "device=cpu", "engine.graphs=true")) == 2
    assert capsys.readouterr().err == "error: engine.graphs=true: needs a GPU; the device is cpu\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("depth=0", "error: depth=0: must be at least 1"),
        ("batch_sizes=[]", "error: batch_sizes=[]: must be numbers from 1 on"),
        ("nodes=[0]", "error: nodes=[0]: must be numbers from 1 on"),
        ("nodes=[2,1400]", "error: nodes=[2, 1400]: depth=5 and children=4 make trees of at most 1023"),
        ("max_tokens=1", "error: max_tokens=1: must be at least 2, for there to be decoding"),
        ("engine.compile=maybe", "error: engine.compile=maybe: must be true or false"),
        ("engine.graphs=true", "error: engine.graphs=true: needs a GPU; the device is cpu"),
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
    printed = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("batch ") for line in printed)  # nothing was asked
    lines = [line for line in printed if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert not (tmp_path / "out" / "tune_trees.json").exists()
