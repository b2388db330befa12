"""evals.switches: rows and verdicts, which switches a device has, and the whole command."""

import json
import re
from pathlib import Path

import pytest

from eagle_train.artifacts.format import save_draft
from eagle_train.errors import UserError, check
from eagle_train.inference.options import DraftOptions
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.settings import CONF_DIR
from eagle_train.usage import usage
from evals import switches
from evals.bench import session as session_module
from evals.bench.switching import compared
from evals.bench.variants import PLACEBO, SWITCHES
from evals.switches import columns, comparison
from tests.support.command_line import call
from tests.support.eval_inputs import arguments
from tests.support.switches import make_switches_home, switches_config, timed_answers
from tests.support.tiny import tiny_medusa


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_switches_home(tmp_path_factory.mktemp("switches"))


@pytest.mark.parametrize(
    ("interval", "noise", "ratio", "verdict"),
    [
        ((1.1, 1.4), (0.9, 1.05), "**1.20×** (1.10 to 1.40)", "shorter"),
        ((1.1, 1.4), (1.02, 1.15), "**1.20×** (1.10 to 1.40)", "not told from noise"),
        ((0.7, 0.9), (0.95, 1.1), "**1.20×** (0.70 to 0.90)", "longer"),
        ((0.7, 0.9), (0.88, 0.99), "**1.20×** (0.70 to 0.90)", "not told from noise"),
        ((0.9, 1.3), (0.7, 0.8), "**1.20×** (0.90 to 1.30)", "not told from noise"),
        ((1.0, 1.3), (0.7, 0.8), "**1.20×** (1.00 to 1.30)", "not told from noise"),
        (None, None, "**1.20×**", "not told from noise"),
    ],
)
def test_rows_say_whether_noise_may_explain_them(interval, noise, ratio, verdict):
    """By the placebo's interval at the same batch size and figure, and by 1."""
    found = compared({"off": [timed_answers(0.3, 0.02)], "on": [timed_answers(0.1, 0.01)]}, max_tokens=9)
    placebo = {"switch": PLACEBO, "load": "some", "batch_size": 1, "figure": "ttit", **found}
    placebo |= {"ttft_speedup_interval": noise, "ttit_speedup_interval": (0.1, 0.2)}
    found |= {"ttft_speedup": 1.2, "ttft_speedup_interval": interval}
    row = {"switch": "first_token", "load": "some", "batch_size": 1, "figure": "ttft", **found}
    assert columns(row, placebo)[5:] == ["TTFT", "100.00", "2.00×", ratio, "2.00×", verdict]
    assert columns(placebo, placebo)[-1] == ""
    other = {**placebo, "batch_size": 8, "ttft_speedup_interval": (1, 9)}
    assert comparison([placebo, row, other]).splitlines()[3].endswith(f"| {verdict} |")


def test_the_placebo_comes_with_any(home):
    config = switches_config(home, switches=["continuous_batching", PLACEBO], batch_sizes=[1, 2])
    assert config.cells == [(1, PLACEBO), (2, PLACEBO), (2, "continuous_batching")]
    config = switches_config(home, switches=["continuous_batching"], batch_sizes=[1, 2])
    assert config.cells == [(2, PLACEBO), (2, "continuous_batching")]
    assert [size for size, name in switches_config(home, batch_sizes=[1, 2]).cells if name == PLACEBO] == [1, 2]


def test_the_whole_command(home, tmp_path, capsys):
    out = tmp_path / "out"
    names = ["speculation", "greedy_drafting", "int4_lm_head", "attention_kernel", "chunked_prefill"]
    names += ["continuous_batching"]
    lengths = ["shared_tokens=40", "long_tokens=70", "chunk_tokens=16", "requests=3", "rate=100", "max_tokens=6"]
    overrides = [f"switches=[{','.join(names)}]", "batch_sizes=[1,2]", "repeats=1", f"table={home}/table.yaml"]
    assert call(switches.main, *arguments(home, f"out={out}", *overrides, *lengths)) == 0
    found = json.loads((out / "results.json").read_text())
    at_1 = [name for name in names if SWITCHES[name].workload.least_size == 1]
    wanted = [(size, name) for size, there in ((1, at_1), (2, names)) for name in (PLACEBO, *there)]
    assert [(row["batch_size"], row["switch"]) for row in found["rows"]] == wanted
    by_name = {row["switch"]: row for row in found["rows"]}
    assert by_name["speculation"]["off_tpc"] == 1 < by_name["speculation"]["on_tpc"]
    assert by_name["attention_kernel"]["off_tpc"] == by_name["attention_kernel"]["on_tpc"]
    assert by_name["speculation"]["ttit_speedup_interval"] is None  # of one batch
    assert found["provenance"]["torch"]
    report = (out / "report.md").read_text()
    assert all(SWITCHES[name].what in report for name in names)
    assert "TPC off" in capsys.readouterr().out


def test_rows_that_were_measured_are_kept_where_a_later_one_fails(home, tmp_path, capsys, monkeypatch):
    def answered(session, name, size):
        check(name != "overlap", "it cannot be")
        return {side: [timed_answers(0.1, 0.1)] for side in ("off", "on")}

    monkeypatch.setattr(switches, "answer_both", answered)
    given = [f"out={tmp_path}", "switches=[speculation,overlap]", "batch_sizes=[1]", "long_tokens=70"]
    assert call(switches.main, *arguments(home, *given)) == 2
    assert "error: it cannot be" in capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())
    assert ([row["switch"] for row in found["rows"]], found["left"]) == ([PLACEBO, "speculation"], 1)
    assert "Rows still to come: 1." in (tmp_path / "report.md").read_text()


def test_prompts_that_do_not_fit_are_refused_before_anything_is_measured(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(switches, "answer_both", None)
    given = [f"out={tmp_path}", "switches=[chunked_prefill]", "batch_sizes=[1]", "long_tokens=250", "max_tokens=9"]
    assert call(switches.main, *arguments(home, *given)) == 2
    assert "\nerror: max_tokens=9: a prompt has 250 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("switches=[magic]", "switches: magic is none of placebo, speculation"),
        ("batch_sizes=[]", "batch_sizes=[]: must be numbers from 1 on"),
        ("repeats=0", "repeats=0: must be at least 1"),
        ("rate=0", "rate=0.0: must be above 0"),
        ("max_tokens=1", "max_tokens=1: must be at least 2, for there to be decoding"),
        ("table=nowhere.yaml", "table=nowhere.yaml: no such file; python -m evals.tune_trees writes one"),
        ("table={home}/target/config.json", "tree.table={home}/target/config.json: must map batch sizes to trees, or"),
        ("tree=nowhere.yaml", "tree.table=nowhere.yaml: no such file"),
        ("tree=chain0", "tree (no draft): it drafts nothing at batch sizes up to batch_size="),
        ("draft=nowhere", "draft=nowhere: no config.json"),
        ("questions=nowhere.jsonl", "questions=nowhere.jsonl: no such file"),
    ],
)
def test_mistakes(home, override, message, capsys, monkeypatch):
    """Before a target is loaded."""
    monkeypatch.setattr(session_module, "load_target", None)
    assert call(switches.main, *arguments(home, f"table={home}/table.yaml", override.format(home=home))) == 2
    assert capsys.readouterr().err.startswith(f"error: {message.format(home=home)}")


def test_switches_of_a_gpu_are_left_out_on_a_cpu(home):
    assert "cuda_graphs" in SWITCHES
    assert "cuda_graphs" not in {name for _, name in switches_config(home).cells}
    with pytest.raises(UserError, match=r"^switches: cuda_graphs needs a GPU; name others$"):
        switches_config(home, switches=["cuda_graphs"])


def test_switches_that_a_kind_of_draft_lacks_are_left_out(home, tmp_path):
    target = load_target(TargetConfig(str(home / "target")), "cpu")
    save_draft(tiny_medusa(target, heads=2), tmp_path, target.identity)
    of_heads = {"draft": DraftOptions(str(tmp_path))}
    assert "last_alignment" in {name for _, name in switches_config(home).cells}
    assert "last_alignment" not in {name for _, name in switches_config(home, **of_heads).cells}
    with pytest.raises(
        UserError, match=r"^switches: last_alignment needs a draft that reads tokens again; name others$"
    ):
        switches_config(home, switches=["last_alignment"], **of_heads)


@pytest.mark.parametrize("name", ["disaggregated_prefill", "divided_sampling", "fast_linear"])
def test_switches_of_a_cpu_are_left_out_on_a_gpu(home, monkeypatch, name):
    monkeypatch.setattr(switches, "resolve_device", lambda _: "cuda")
    assert name not in {name for _, name in switches_config(home).cells}
    with pytest.raises(UserError, match=rf"^switches: {name} needs device=cpu; name others$"):
        switches_config(home, switches=[name])


def test_a_target_that_cannot_be_divided(home, tmp_path):
    """An error before anything is measured, but not with other switches."""
    config = json.loads((home / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "num_key_value_heads": 1}))
    target = TargetConfig(str(tmp_path))
    assert switches_config(home, target=target, switches=["speculation"]).cells
    wanted = r"^switches: divided_sampling: 1 key/value heads cannot be divided between 2 processes; name others$"
    with pytest.raises(UserError, match=wanted):
        switches_config(home, target=target)


@pytest.mark.parametrize("names", ["[]", "['continuous_batching']"])
def test_switches_that_show_at_no_batch_size(home, names, capsys):
    assert call(switches.main, *arguments(home, f"switches={names}", "batch_sizes=[1]")) == 2
    wanted = f"error: switches={names}: must name some that show at batch_sizes=[1], or be null"
    assert capsys.readouterr().err.startswith(wanted)


def test_a_row_tells_how_many_prompts_were_asked():
    """But for a load that is about prompts that come again."""
    answered = {side: [timed_answers(1.0, 0.5), timed_answers(1.0, 0.5)] for side in ("off", "on")}
    row = compared(answered, max_tokens=9)
    assert (row["on_prompts"], row["distinct_prompts"]) == (2, 1)
    assert "distinct_prompts" not in compared(answered, max_tokens=9, asks_again=True)
    assert {name for name, each in SWITCHES.items() if each.workload.asks_again} == {"persistent_kv", "host_kv"}


def test_help_names_each_switch():
    said = usage(CONF_DIR, "switches", {}).partition("  switches=null")[2].partition("the report says")[0]
    assert [name for name in SWITCHES if not re.search(rf"\b{name}\b", said)] == []
