"""What each optimisation is worth: both sides differ in what the switch says alone, and the whole command runs."""

import json
from pathlib import Path

import pytest
from command_line import call
from talking import arguments, make_home

from eagle_train.inference import Output, Stats
from eagle_train.models.target import TargetConfig
from eagle_train.ops import attention, linear
from evals import switches
from evals.figures import Answer
from evals.mt_bench import Artifact
from evals.questions import Question
from evals.switches import GREEDY, SHARED, SWITCHES, Bench, Config, compared, plain_attention, plain_linear


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("switches"), width=128)


def config_for(home: Path, **changes) -> Config:
    values = {
        "target": TargetConfig(str(home / "target")),
        "draft": Artifact(str(home / "draft")),
        "tree": "chain3",
        "switches": None,
        "batch_sizes": [2],
        "questions": str(home / "questions.jsonl"),
        "shared_tokens": 40,
        "repeats": 2,
        "out": "",
        "max_tokens": 4,
        "seed": 0,
        "device": "cpu",
        "threads": None,
    }
    return Config(**values | changes)


def test_sides_differ_in_what_they_say(home):
    bench = Bench(config_for(home), "cpu")
    for switch in SWITCHES.values():
        assert switch.off != switch.on
    on, off = (bench.engine(side, 2) for side in (SWITCHES["persistent_kv"].on, SWITCHES["persistent_kv"].off))
    assert (on.scheduler.prefixes is None, off.scheduler.prefixes is None) == (False, True)
    assert bench.engine(SWITCHES["speculation"].off, 2).drafter is None
    assert bench.engine(SWITCHES["last_alignment"].on, 2).drafter.alignment == "last"
    assert bench.engine(SWITCHES["greedy_drafting"].off, 2).drafting == "multinomial"


def test_plain_twins_are_used_within_alone():
    kernel, rows = attention.flash_partial, linear.FEW_ROWS
    with plain_attention(), plain_linear():
        assert attention.flash_partial is attention.plain_partial
        assert 4 not in linear.FEW_ROWS
    assert (attention.flash_partial, linear.FEW_ROWS) == (kernel, rows)


def test_shared_beginnings_are_asked_again(home):
    bench = Bench(config_for(home), "cpu")
    first, second = bench.batches(SHARED, 2)
    assert [each.prompt for each in first] == [each.prompt for each in second]
    assert first[0].prompt[:40] == first[1].prompt[:40]
    assert first[0].prompt[40:] == bench.batches(GREEDY, 2)[0][0].prompt


def test_ratios_are_those_of_the_same_batch():
    """A batch that was disturbed throughout changes no median."""

    def batch(ttft: float, ttit: float) -> list[Answer]:
        stats = Stats(calls=2, tokens=3, ttft_s=ttft, intervals_s=[ttit] * 3)
        return [Answer(Question(1, 1, None, [], ["?"]), 1, [7], Output([5] * 4, "", "stop", stats, [2, 1]))]

    off = [batch(0.3, 0.02), batch(0.6, 0.04), batch(9.0, 9.0)]
    on = [batch(0.1, 0.01), batch(0.2, 0.02), batch(9.0, 9.0)]
    found = compared({"off": off, "on": on})
    assert (found["ttft_speedup"], found["ttit_speedup"]) == (pytest.approx(3), pytest.approx(2))
    assert (found["off_ttft_s"], found["on_ttit_s"]) == (pytest.approx(0.6), pytest.approx(0.02))
    assert found["on_tpc"] == found["off_tpc"] == 1.5


def test_the_whole_command(home, tmp_path, capsys):
    out, names = tmp_path / "out", [name for name in SWITCHES if not name.startswith("compiled")]
    overrides = [f"switches=[{','.join(names)}]", "batch_sizes=[1,2]", "shared_tokens=40", "repeats=1", "max_tokens=6"]
    assert call(switches.main, *arguments(home, f"out={out}", *overrides)) == 0
    found = json.loads((out / "results.json").read_text())
    assert [(row["batch_size"], row["switch"]) for row in found["rows"]] == [
        (n, name) for n in (1, 2) for name in names
    ]
    by_name = {row["switch"]: row for row in found["rows"]}
    assert by_name["speculation"]["off_tpc"] == 1 < by_name["speculation"]["on_tpc"]
    assert by_name["attention_kernel"]["off_tpc"] == by_name["attention_kernel"]["on_tpc"]
    assert found["provenance"]["torch"]
    report = (out / "report.md").read_text()
    assert all(SWITCHES[name].what in report for name in names)
    assert "TPC off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("switches=[magic]", "switches: magic is none of speculation, greedy_drafting"),
        ("batch_sizes=[]", "batch_sizes=[]: must be numbers from 1 on"),
        ("repeats=0", "repeats=0: must be at least 1"),
        ("max_tokens=1", "max_tokens=1: must be at least 2, for there to be decoding"),
    ],
)
def test_mistakes(home, override, message, capsys):
    assert call(switches.main, *arguments(home, override)) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
