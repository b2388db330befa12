"""evals.latency: the whole command, with and without a checkpoint."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_train.distributed import ALONE, World
from eagle_train.errors import check
from eagle_train.training.cost.estimate import ClusterConfig
from evals import latency, report
from evals.bench import session, statistics, sweep
from evals.bench.profiled_rounds import profiled_rounds
from evals.bench.random_models import RandomDraftOptions, ShapesConfig
from evals.bench.requests import PromptSource
from evals.bench.sweep import LOOKUP, TRANSFORMERS, rows_of
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home
from tests.support.latency import latency_config, session_of
from tests.support.measuring import timed_requests
from tests.support.random_models_job import LLAMA
from tests.support.tiny import random_tokens, shared_target


def test_engines_draft_as_configured():
    target = shared_target()
    config = latency_config(questions=None, context_lengths=[9], engine={"drafting": "multinomial"})
    engines = latency.variants(session_of(target, config), longest=20).engines(1)
    assert [engine.config.drafting for engine in engines.values()] == ["multinomial"] * 2
    # Blocks of 16: for 20 tokens and the 1 or 4 that a round may write besides, and one more that is kept free.
    assert [engine.config.kv_tokens for engine in engines.values()] == [3 * 16] * 2


def test_a_profile_has_room_for_a_drafters_own_trees():
    """They are deeper than the engine's."""
    ngram = {"_target_": "eagle_train.inference.drafters.ngram.make_ngram", "max_draft_len": 32}
    none = RandomDraftOptions(None, window=None, sink=False)
    config = latency_config(questions=None, context_lengths=[9], profile=True, drafter=ngram, draft=none)
    engines = latency.variants(session_of(shared_target(), config), longest=20).engines(1)
    for engine in engines.values():
        assert profiled_rounds(engine, timed_requests(*random_tokens(9)), None) == {}


SIMULATED = {"acceptance": [0.8, 0.6, 0.3], "draft": RandomDraftOptions(None, window=None, sink=False)}
SHAPES = ["shapes=tiny", "acceptance=[0.8,0.6,0.3]", "context_lengths=[12,20]", "max_tokens=8", "repeats=2"]


@pytest.mark.usefixtures("noisy")
def test_the_whole_command_without_a_checkpoint(tmp_path, capsys):
    out = tmp_path / "out"
    sweep = ["batch_sizes=[1,2]", "trees=[chain3,d3_bf2]", "quants=[none,fp8]"]
    sweep += ["temperature=1", "engine.drafting=multinomial_without_replacement"]
    status = call(latency.main, *SHAPES, *sweep, f"out={out}", "device=cpu")
    assert status == 0
    found = json.loads((out / "results.json").read_text())
    assert {"tpc", "speedup", "ttft_s", "ttit_s", "acceptance_per_depth", "plain_ttit_s"} <= found.keys()
    assert found["speedup"] == pytest.approx(found["plain_ttit_s"] / found["ttit_s"])
    engines = ["plain", "chain3", "chain3 fp8", "d3_bf2", "d3_bf2 fp8"]
    names = {1: [*engines, TRANSFORMERS, LOOKUP], 2: [*engines, TRANSFORMERS]}
    rows = [(row["batch_size"], row["context_length"], row["decoding"]) for row in found["rows"]]
    assert rows == [(size, length, name) for size in (1, 2) for length in (12, 20) for name in names[size]]
    assert len(found["breakdown"]) == 4 * len(engines)
    assert all(0 < each["outside"] < 1 for each in found["breakdown"])
    assert (found["evaluation"], found["date"][:2]) == ("latency", "20")
    assert found["provenance"]["load_average"]
    assert found["config"]["engine"]["drafting"] == "multinomial_without_replacement"
    assert {(row["decoding"], row["threads"] is None) for row in found["rows"] if row["batch_size"] == 2} == {
        *((name, True) for name in engines),
        (TRANSFORMERS, False),
    }
    assert found["cells"] == {"measured": 4, "of": 4}
    assert {"profiles", "copy_bound"}.isdisjoint(found)  # the latter is a GPU's
    (printed, progress), report = capsys.readouterr(), (out / "report.md").read_text()
    assert f"written to {out}" in printed
    assert "\nbatch 8/8, " in progress  # two for each of the four
    assert "acceptance is simulated: [0.8, 0.6, 0.3]" in report
    lines = {(each["over"], each["at"]) for each in found["growth"] if each["decoding"] == "chain3"}
    assert lines == {("batch_size", 12), ("batch_size", 20), ("context_length", 1), ("context_length", 2)}
    assert "context 12 |" in report.partition("## How TTIT grows")[2]
    assert report.count("| chain3 |") == 12  # latencies, growth, stages
    assert "so far" not in report
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| transformers | ")]
    assert [row[2] for row in rows if len(row) > 3] == ["1", "1", "2", "2"]


def test_a_profile_of_each_decoding(tmp_path, capsys):
    """When all is measured: what is measured is as without it."""
    given = ["shapes=tiny", "acceptance=[0.8,0.6,0.3]", "batch_sizes=[1,2]", "context_lengths=[12]", "max_tokens=6"]
    out = tmp_path / "out"
    given += ["repeats=1", "device=cpu", "profile=true", "transformers=false"]
    assert call(latency.main, *given, f"out={out}") == 0
    found, (printed, _), report = (
        json.loads((out / "results.json").read_text()),
        capsys.readouterr(),
        (out / "report.md"),
    )
    assert [row["decoding"] for row in found["rows"]] == ["plain", "chain3"] * 2  # and not transformers
    profiles = {(each["decoding"], each["batch_size"]): each for each in found["profiles"]}
    assert [*profiles] == [("plain", 1), ("chain3", 1), ("plain", 2), ("chain3", 2)]
    names = [f"trace_{number}_{name}.json.gz" for number, (name, _) in enumerate(profiles, 1)]
    assert [each["trace"] for each in found["profiles"]] == names
    for name in names:
        assert json.loads(gzip.decompress((out / name).read_bytes()))["traceEvents"]
    for (name, _), each in profiles.items():
        assert 0 < each["busy"] < 1
        assert each["context_length"] == 12
        assert each["operations_per_round"] == pytest.approx(sum(row["operations"] for row in each["stages"].values()))
        assert (each["stages"]["drafting"]["operations"] > 0) == (name == "chain3")
    assert profiles["chain3", 1]["operations_per_round"] > 2 * profiles["plain", 1]["operations_per_round"]
    for text in (printed, report.read_text()):
        assert "plain, batch 1, context 12 (trace_1_plain.json.gz): 4 rounds, each " in text
        assert "chain3, batch 2, context 12 (trace_4_chain3.json.gz): 4 rounds, each " in text
    assert f"written to {out}: report.md, results.json, traces" in printed


def test_cells_that_were_measured_are_kept_where_a_later_one_fails(tmp_path, capsys, monkeypatch):
    def failing(config, cell, *arguments):
        check(cell.context_length != 20, "it cannot be")
        return rows_of(config, cell, *arguments)

    monkeypatch.setattr(sweep, "rows_of", failing)
    monkeypatch.setattr(statistics, "check_timing", lambda found: None)
    assert call(latency.main, *SHAPES, f"out={tmp_path}", "device=cpu") == 2
    assert "error: it cannot be" in capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())
    assert {row["context_length"] for row in found["rows"]} == {12}
    assert (found["tree"], found["cells"]) == ("chain3", {"measured": 1, "of": 2})
    assert "Of 2 batch sizes and contexts 1 so far." in (tmp_path / "report.md").read_text()


def test_a_timing_that_cannot_be_right_costs_its_row_alone(tmp_path, capsys, monkeypatch):
    """Also where it is the first tree's in the first cell, of which the title is. By the first rank's times."""
    monkeypatch.setattr(World, "agreed", lambda world, rows: [row | {"speedup": 9.0} for row in rows])
    assert call(latency.main, *SHAPES, f"out={tmp_path}", "device=cpu") == 2
    err = capsys.readouterr().err
    assert "error: chain3, batch size 1, context 12: speed-up 9.000 exceeds" in err
    assert "; so for 1 more, which report.md names" in err
    found = json.loads((tmp_path / "results.json").read_text())
    assert {(row["context_length"], row["decoding"]) for row in found["rows"]} >= {(12, "plain"), (20, "plain")}
    assert found["speedup"] is None
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# chain3 could not be measured\n")
    assert "- chain3, batch size 1, context 20: " in report.partition("## Left out")[2]


def test_arrivals_that_do_not_fit_are_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    """There is room for each single prompt, but one of three is too long."""
    monkeypatch.setattr(sweep, "take_turns", None)
    given = ["rate=9", "requests=3", "repeats=1", f"out={tmp_path}/out", "device=cpu"]
    prompt = PromptSource.prompt
    monkeypatch.setattr(
        PromptSource,
        "prompt",
        lambda self, number, count, length: prompt(self, number, count, 505 if number == 2 else length),
    )
    assert call(latency.main, *SHAPES, *given) == 2
    assert "max_tokens=8: a prompt has 505 tokens" in capsys.readouterr().err


def test_a_table_of_trees(tmp_path, capsys, monkeypatch):
    """At batch size 2 it drafts nothing, so its speed-up is not checked."""
    table = tmp_path / "table.yaml"
    table.write_text("1: {parents: [-1, 0, 1]}\n2: {parents: [-1]}\n")
    given = ["batch_sizes=[1,2]", f"trees=[{table},chain1]", "context_lengths=[12]", "max_tokens=6", "ignore_eos=true"]
    checked = []
    monkeypatch.setattr(statistics, "check_timing", lambda row: checked.append((row["batch_size"], row["decoding"])))
    assert call(latency.main, *SHAPES, *given, f"out={tmp_path}/out", "device=cpu") == 0
    assert checked == [(1, str(table)), (1, "chain1")]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    own = [row for row in found["rows"] if row["decoding"] == str(table)]
    assert [(row["batch_size"], len(row["acceptance_per_depth"])) for row in own] == [(1, 2), (2, 0)]
    trees = "chain2 (batch size 1), no draft (batch size 2)"
    assert (found["tree"], found["tables"]) == (str(table), {str(table): trees})
    assert f"`{table}` is {trees}." in (tmp_path / "out" / "report.md").read_text()
    header, *rows = capsys.readouterr().out.splitlines()[:6]
    end = header.index("TPC") + 3
    assert all(1 <= float(row[end - 4 : end]) <= 3 for row in rows)


@pytest.mark.usefixtures("noisy")
def test_the_whole_command_on_questions_and_arrivals(home, tmp_path, capsys):
    given = arguments(home, f"out={tmp_path}/out", "repeats=2", "rate=200", "requests=3", "batch_sizes=[2]")
    assert call(latency.main, *given) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    kinds = [(row["arrivals"], row["decoding"], row["answers"]) for row in found["rows"]]
    together = [("together", name, 4) for name in ("plain", "chain3", TRANSFORMERS)]
    assert kinds == [*together, *(("poisson", name, 6) for name in ("plain", "chain3"))]
    assert all(row["differing_answers"] == 0 for row in found["rows"])
    said = (tmp_path / "out" / "report.md").read_text()
    assert "## Arrivals at random, 200 a second" in said
    assert "| TTIT by time, batch size 2, context as is; up to |" in said
    arriving = [row for row in found["rows"] if row["arrivals"] == "poisson"]
    assert len({row["window_s"] for row in arriving}) == 1
    assert max(len(row["ttit_over_time_s"]) for row in arriving) in (24, 25), "the last token ends the last window"
    assert call(report.main, f"results=[{tmp_path}/out]", f"out={tmp_path}/page") == 0
    assert "TTIT over time, batch size 2, random arrivals" in (tmp_path / "page/report.md").read_text()


@pytest.mark.usefixtures("noisy")
def test_a_drafter_without_a_draft(home, tmp_path):
    own = ["draft.path=null", "drafter=ngram", "trees=[chain3,chain2]", "max_tokens=40"]
    assert call(latency.main, *arguments(home, f"out={tmp_path}", "repeats=2", *own)) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    names = ["plain", "ngram chain3", "ngram chain2", TRANSFORMERS, LOOKUP]
    assert [row["decoding"] for row in found["rows"]] == names
    assert (found["drafter"], found["tree"], found["draft_source"]) == ("ngram", "ngram chain3", None)
    assert found["acceptance_per_depth"]
    assert "Drafter: `eagle_train.inference.drafters.ngram.make_ngram` (" in (tmp_path / "report.md").read_text()


def test_a_gpus_rounds_are_told_beside_the_copy_bound(monkeypatch):
    """By the speed that `cluster` says."""
    monkeypatch.setattr(latency, "markdown", lambda found: "")
    written, said, speed = [], [], ClusterConfig(memory_tb_s=2e-6)
    shapes = ShapesConfig(LLAMA, None, "float32")
    given = latency_config(questions=None, context_lengths=[9], target=None, shapes=shapes, cluster=speed, **SIMULATED)
    own = SimpleNamespace(config=given, world=ALONE, report=lambda found, _: written.append(found), say=said.append)
    cell = {"batch_size": 1, "context_length": 9, "round_ms": 1.0}
    latency.tell_copy_bound(own, {"breakdown": [{**cell, "decoding": name} for name in ("plain", "chain3")]})
    plain, drafting = written[0]["copy_bound"]
    assert 0 < plain["bound_ms"] < drafting["bound_ms"]
    assert plain["bound_ms"] == pytest.approx(1e3 * plain["gb"] / 2e-3)
    assert "at 2e-06 TB/s" in said[0]


def planned(capsys, *given: str) -> tuple[str, dict[str, list[float]]]:
    """What is said, and the figures of the first batch size, context and tree."""
    assert call(latency.main, "plan=true", "context_lengths=[1024]", *given) == 0
    said = capsys.readouterr().out
    lines = [line.rsplit(maxsplit=6) for line in said.split("chain3\n")[1].splitlines()[:4]]
    return said, {name.strip(): [float(each) for each in figures] for name, *figures in lines}


def test_a_plan_of_decoding(tmp_path, capsys, monkeypatch):
    """Of Llama 3.1 8B and 3.3 70B, by hand: billions of weights in bf16, 3 TB/s; no model is made."""
    monkeypatch.setattr(latency, "open_session", None)
    out = f"out={tmp_path / 'out'}"
    said, rows = planned(capsys, "shapes=llama3_1_8b", out)
    head, layers, draft = 2 * 0.12826 * 4.096, 2 * 6.979, 2 * 0.6879  # GB
    assert rows["plain step"] == pytest.approx([layers, head, 0.134, layers + head + 0.134, 0, 5.05], abs=6e-3)
    assert rows["drafting"] == pytest.approx([3 * draft, 3 * head, 0.038, 7.32, 0, 2.44], abs=6e-3)
    assert rows["round"][-1] == pytest.approx(5.05 + 2.44, abs=0.01)
    assert "tokens a round" not in said
    assert not (tmp_path / "out").exists()
    given = ["shapes=llama3_3_70b", out, "cluster.gpus=8", "acceptance=[0.8,0.65,0.55]"]
    _, whole = planned(capsys, *given, "engine.divide_draft=false", "engine.divide_lm_head=false")
    assert (whole["drafting"][3], whole["validation"][3]) == pytest.approx((22.55, 19.26), abs=6e-3)
    assert (whole["drafting"][4], whole["validation"][4]) == (1, 162)
    said, divided = planned(capsys, *given)
    assert divided["drafting"][:2] == pytest.approx([each / 8 for each in whole["drafting"][:2]], abs=6e-3)
    assert (divided["drafting"][4], divided["validation"][4]) == (25, 163)
    assert "2.50 ms whole, 0.47 ms divided, with 8 sums; divided\n" in said
    assert "3.00 tokens a round: 3.50 ms a token, 2.59 times plain\n" in said
    assert "does not fit" not in said
    assert "of 20 GiB: does not fit below 92%" in planned(capsys, *given, "cluster.memory_gib=20")[0]
    small, rows = planned(capsys, "shapes=tiny", "acceptance=[0.8,0.6,0.5]", out)
    assert re.search(r"^target: [\d.]+ k parameters, draft: [\d.]+ k, bfloat16$", small, re.M)
    assert re.search(r"^  target's weights +[\d.]+ KiB$", small, re.M)
    assert min(rows["plain step"][:3]) > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["shapes=huge"], "shapes=huge: must be one of "),
        ([*SHAPES, "batch_sizes=2"], "batch_sizes: must be a list, as batch_sizes=[...]"),
        ([*SHAPES, "batch_sizes=[[2]]"], "batch_sizes=[[2]]: must be numbers from 1 on"),
        ([*SHAPES, "shapes.config.model_type=lama"], "shapes.config: Unrecognized model identifier: lama"),
        ([*SHAPES, "shapes.config.hidden_size=x"], "shapes.config: Field 'hidden_size' expected int, got str"),
        (["shapes=tiny"], "acceptance=null: must be 3 shares"),
        (["shapes=tiny", "acceptance=[0.8,0.6]"], "acceptance=[0.8, 0.6]: must be 3 shares"),
        (["shapes=tiny", "acceptance=[0.8,0.6,0.7]"], "acceptance=[0.8, 0.6, 0.7]: must be 3 shares"),
        (["shapes=tiny", "acceptance=[1.8,0.6,0.3]"], "acceptance=[1.8, 0.6, 0.3]: must be 3 shares"),
        ([*SHAPES, "target=tiny"], "target=data/tiny_target: leave it out with shapes"),
        ([*SHAPES, "drafter=ngram"], "drafter=ngram: leave it out with shapes"),
        (["drafter=ngram", "quants=[fp8]"], "quant.scheme=fp8: no draft to quantise"),
        (
            ["drafter=ngram", "frequency_penalty=0.5"],
            "transformers.generate, which is compared, does not do the same; leave it out, or give transformers=false",
        ),
        ([*SHAPES, "draft=d"], "draft=d: leave it out with shapes"),
        ([*SHAPES, "questions=q.jsonl"], "questions=q.jsonl: leave it out with shapes"),
        ([*SHAPES, "context_lengths=null"], "context_lengths is needed"),
        ([*SHAPES, "context_lengths=[505]"], "max_tokens=8: a prompt has 505 tokens"),
        ([*SHAPES, "context_lengths=[]"], "context_lengths=[]: must be numbers from 1 on"),
        ([*SHAPES, "batch_sizes=[0]"], "batch_sizes=[0]: must be numbers from 1 on"),
        ([*SHAPES, "trees=[]"], "trees=[]: must be trees that draft"),
        ([*SHAPES, "quants=[]"], "quants=[]: must name none, int4 or fp8"),
        ([*SHAPES, "quants=[int2]"], "quant.scheme=int2: must be one of none, int4, fp8"),
        ([*SHAPES, "trees=[chain_9]"], "tree is 'chain_9'; known trees are"),
        ([*SHAPES, "engine.drafting=best"], "drafting='best': must be one of greedy, multinomial, "),
        ([*SHAPES, "trees=[nowhere.yaml]"], "tree.table=nowhere.yaml: no such file"),
        ([*SHAPES, "profile=maybe"], "profile=maybe: must be true or false"),
        ([*SHAPES, "rate=0"], "rate=0.0: must be above 0, or null"),
        ([*SHAPES, "repeats=0"], "repeats=0: must be at least 1"),
        ([*SHAPES, "max_tokens=1"], "max_tokens=1: must be at least 2"),
        ([], "draft is needed: give draft=DIR, or shapes"),
        (["draft=d", "plan=true"], "plan=true: needs shapes"),
        ([*SHAPES, "plan=true", "quants=[fp8]"], "quants=['fp8']: leave it out with plan=true"),
        (
            [*SHAPES, "plan=true", "trees=[chain2,auto]"],
            "trees=['chain2', 'auto']: plan=true needs trees of a size that",
        ),
        (
            [*SHAPES, "plan=true", "engine.draft_lm_head=int4"],
            "draft_lm_head=int4: the LM head has 64 inputs, no multi",
        ),
        ([*SHAPES, "plan=true", "cluster.gpus=3"], "2 key/value heads cannot be divided between 3 processes"),
        ([*SHAPES, "plan=true", "cluster.sum_us=0"], "cluster.sum_us=0.0: must be above 0"),
        ([*SHAPES, "draft.window=0"], "draft.window=0: must be null or at least 1"),
        (["draft=d", "draft.window=9"], "draft.window=9: needs shapes; a real draft has its own"),
        (["draft=d", "draft.sink=true"], "draft.sink=true: needs shapes; a real draft has its own"),
        (["draft=d", "acceptance=[0.5,0.5,0.5]"], "acceptance=[0.5, 0.5, 0.5]: needs shapes"),
        (["draft=nowhere"], "draft=nowhere: no config.json"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, overrides, message):
    """Before a target is loaded."""
    monkeypatch.setattr(session, "load_target", None)
    assert call(latency.main, f"out={tmp_path}/out", *overrides) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out" / "results.json").exists()


def test_without_transformers_a_latency_may_be_of_any_sampling():
    config = latency_config(transformers=False, frequency_penalty=0.5, min_tokens=3)
    assert (config.params.frequency_penalty, config.params.min_tokens) == (0.5, 3)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("latency"))


def test_prompts_that_are_asked_again_are_told(home, tmp_path, capsys):
    """Of three questions; where each is asked once, nothing is said."""
    given = [f"target={home}/target", f"draft={home}/draft", f"questions={home}/questions.jsonl", "transformers=false"]
    given += ["max_tokens=4", "device=cpu", f"out={tmp_path}/out"]
    assert call(latency.main, *given, "repeats=3") == 0
    assert "asked more than once" not in capsys.readouterr().out
    assert call(latency.main, *given, "repeats=4", "batch_sizes=[1,2]") == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Caution: prompts")]
    assert told.startswith("Caution: prompts were asked more than once, most often where 8 answers are to 3 different ")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {(row["answers"], row["distinct_prompts"]) for row in rows} == {(4, 3), (8, 3)}
    assert told in (tmp_path / "out" / "report.md").read_text()
    assert call(report.main, f"results=[{tmp_path}/out]", f"out={tmp_path}/page") == 0
    page = (tmp_path / "page" / "report.md").read_text()
    assert told in page
    assert "3 prompts a figure, at the fewest" in page
