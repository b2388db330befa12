"""What each optimisation is worth: both sides differ in what the switch says alone, and the whole command runs."""

import json
import multiprocessing
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from eagle_train.errors import UserError, check
from eagle_train.inference import Engine, Output, Stats
from eagle_train.inference.cache import paged_kv
from eagle_train.inference.cache.paged_kv import Masks, Prefix
from eagle_train.inference.decode.sampling import verify_sampled
from eagle_train.inference.decode.tree import chain, full
from eagle_train.inference.parallel.disaggregated import DecodeEngine
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.loading import TargetConfig
from eagle_train.ops import attention, linear
from eagle_train.ops.attention import Rule
from evals import figures, loads, sides, switches
from evals.figures import Answer
from evals.loads import GROUPS
from evals.mt_bench import Artifact
from evals.questions import Question
from evals.sides import PLACEBO, SWITCHES, SamplingAll, over_one, plain_attention, plain_linear, whole_mask
from evals.switches import Bench, Config, compared, comparison, line
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home, write_rows

TABLE = "1: {parents: [-1, 0]}\n2: {parents: [-1, 0, 0]}\n3: {parents: [-1]}\n"
SAMPLED = ("greedy_drafting", "compiled_sampling")
# tests/inference/test_compiled.py, tests/inference/test_graphs.py, below
ELSEWHERE = ("compiled_forwards", "compiled_sampling", "cuda_graphs", "disaggregated_prefill", "divided_sampling")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    directory = make_home(tmp_path_factory.mktemp("switches"), width=128)
    (directory / "table.yaml").write_text(TABLE)
    return directory


def config_for(home: Path, **changes) -> Config:
    values = {
        "target": TargetConfig(str(home / "target")),
        "draft": Artifact(str(home / "draft"), "accepted"),
        "tree": "chain3",
        "table": str(home / "table.yaml"),
        "prefill_tokens": 16,
        "switches": None,
        "batch_sizes": [2],
        "questions": str(home / "questions.jsonl"),
        "shared_tokens": 40,
        "long_tokens": 70,
        "requests": 3,
        "rate": 100.0,
        "repeats": 2,
        "out": "",
        "max_tokens": 4,
        "seed": 0,
        "device": "cpu",
        "threads": None,
    }
    return Config(**values | changes)


@pytest.fixture(scope="module")
def bench(home) -> Bench:
    return Bench(config_for(home), "cpu")


def engines(bench: Bench, name: str, size: int = 2) -> list:
    """With the switch off, and on."""
    switch = SWITCHES[name]
    return [bench.engine(side, switch, size) for side in (switch.off, switch.on)]


def test_sides_differ_in_what_they_say(bench):
    for name, switch in SWITCHES.items():
        assert (switch.off == switch.on) == (name == PLACEBO)
        assert switch.figure in switches.FIGURES
        assert not switch.off.apart
    off, on = engines(bench, "persistent_kv")
    assert (off.scheduler.prefixes is None, on.scheduler.prefixes is None) == (True, False)
    for name in ("speculation", "guided_speculation"):
        off, on = engines(bench, name)
        assert (off.drafter is None, on.drafter is None) == (True, False)
    assert [engine.drafter.alignment for engine in engines(bench, "last_alignment")] == ["accepted", "last"]
    assert [engine.drafting for engine in engines(bench, "greedy_drafting")] == ["multinomial", "greedy"]
    assert [engine.verify_sampled is verify_sampled for engine in engines(bench, "compiled_sampling")] == [True, False]
    assert not engines(bench, "compiled_sampling")[1].compiled


def test_the_table_takes_the_trees_place(bench):
    off, on = engines(bench, "tree_dispatcher", size=5)
    assert [off.dispatcher.dispatch(size).tree for size in (1, 2, 5)] == [chain(3)] * 3
    assert [on.dispatcher.dispatch(size).tree for size in (1, 2, 5)] == [chain(1), full(1, 2), chain(0)]


def test_plain_twins_are_used_within_alone():
    kernel, product, both = attention.flash_partial, linear.linear_on_cpu, paged_kv.over_both
    with plain_attention(), plain_linear(), whole_mask():
        assert attention.flash_partial is attention.plain_partial
        assert linear.linear_on_cpu is F.linear
        assert paged_kv.over_both is over_one
    assert (attention.flash_partial, linear.linear_on_cpu, paged_kv.over_both) == (kernel, product, both)


class NotingPatch:
    """In the place of `unittest.mock.patch`: counts the calls of what is patched in."""

    def __init__(self):
        self.calls: Counter[str] = Counter()

    def object(self, owner: Any, name: str, twin: Any) -> Any:
        self.calls[name] += 0

        def noting(*args, **kwargs):
            self.calls[name] += 1
            return twin(*args, **kwargs)

        return patch.object(owner, name, noting)


PATCHED = [
    (name, key)
    for name, switch in SWITCHES.items()
    for key in ("off", "on")
    if getattr(switch, key).within is not nullcontext
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("name", "key"), PATCHED)
def test_what_is_patched_in_is_called(bench, monkeypatch, name, key, size):
    """Else both sides run the same code. The tree is a chain, as in what is published."""
    switch, noting = SWITCHES[name], NotingPatch()
    side = getattr(switch, key)
    engine = bench.engine(side, switch, size)
    monkeypatch.setattr(sides, "patch", noting)
    switches.answer(side, switch, engine, switch.load.batches(bench.config, bench.target, size)[0])
    assert noting.calls
    assert all(noting.calls.values()), noting.calls


@pytest.mark.parametrize("lengths", [[9, 9], [9, 4]])
@pytest.mark.parametrize(
    "limits", [{}, {"window": 4}, {"softcap": 5.0}, {"sinks": torch.tensor([0.5, 1.0, -1.0, 2.0])}]
)
def test_one_attention_under_a_whole_mask_is_both_merged(lengths, limits):
    torch.manual_seed(0)
    tree, rule = full(2, 2), Rule(scale=0.5, **limits)
    prefix = Prefix.of(lengths, [[2], [3]], torch.device("cpu"))
    positions = prefix.lengths.unsqueeze(1) + tree.depth
    q, (keys, values), (k, v) = (
        torch.randn(2, 4, 7, 8),
        torch.randn(2, 2, 2, 9, 8),
        torch.randn(2, 2, 2, 7, 8),
    )
    masks = Masks(prefix, positions, positions, tree.ancestors)
    wanted = paged_kv.over_both(q, keys, values, k, v, rule, masks)
    for _ in range(2):  # the mask is made once
        torch.testing.assert_close(over_one(q, keys, values, k, v, rule, masks), wanted)


@pytest.mark.parametrize("name", [name for name in SWITCHES if name not in (*SAMPLED, *ELSEWHERE)])
def test_no_switch_changes_an_answer(bench, name):
    off, on = bench.answered(name, 2).values()
    tokens = [[answer.output.token_ids for batch in side for answer in batch] for side in (off, on)]
    assert tokens[0] == tokens[1]
    assert any(len(answer) > 1 for answer in tokens[0])


def test_shared_beginnings_are_asked_again(bench):
    first, second = loads.SHARED.batches(bench.config, bench.target, 2)
    assert [each.prompt for each in first] == [each.prompt for each in second]
    assert first[0].prompt[:40] == first[1].prompt[:40]
    assert first[0].prompt[40:] == loads.GREEDY.batches(bench.config, bench.target, 2)[0][0].prompt


def test_what_the_store_lost_is_found_in_host_memory(home, tmp_path):
    """By the time a group of prompts comes again, the others have its blocks: it is read anew, or copied."""
    rows = [{"question_id": n, "turns": [f"{n}: what is {n} times {n}, and what is it called?"]} for n in range(10, 16)]
    questions = write_rows(tmp_path / "questions.jsonl", rows)
    bench = Bench(config_for(home, questions=str(questions), repeats=GROUPS), "cpu")
    cached = {
        side: [answer.output.stats.cached_tokens for batch in batches for answer in batch]
        for side, batches in bench.answered("host_kv", 2).items()
    }
    assert cached["on"] == [32] * 2 * GROUPS  # of 40 tokens, in blocks of 16
    assert sum(cached["off"]) == 0


def test_the_latecomer_is_read_in_chunks(bench):
    batches = loads.LATECOMER.batches(bench.config, bench.target, 2)
    assert [[len(batch), len(batch[2].prompt)] for batch in batches] == [[3, 70]] * 2
    assert all(each.params.ignore_eos for batch in batches for each in batch)
    chunks = []
    for engine in engines(bench, "chunked_prefill"):
        assert engine.max_batch_size == 3
        engine.add(batches[0][2].prompt)
        engine.scheduler.admit()
        chunks.append([count for _, count in engine.scheduler.chunks(engine.prefill_tokens)])
    assert chunks == [[70], [16]]


def test_arrivals(home):
    config = config_for(home, requests=400, repeats=1, batch_sizes=[1, 2])
    (batch,) = loads.ARRIVALS.batches(config, Bench(config, "cpu").target, 2)
    at = [each.arrival for each in batch]
    assert len(batch) == 400
    assert at == sorted(at)
    assert at[-1] == pytest.approx(400 / config.rate, rel=0.2)
    assert [size for size, name in config.cells if name == "continuous_batching"] == [2]


def answers(ttft: float, ttit: float, rounds: tuple[int, ...] = (2, 1)) -> list[Answer]:
    tokens = sum(rounds)
    stats = Stats(calls=len(rounds), tokens=tokens, ttft_s=ttft, intervals_s=[ttit] * tokens)
    return [
        Answer(Question(1, 1, None, [], ["?"]), 1, [7], Output([5] * (tokens + 1), "", "stop", stats, list(rounds)))
    ]


def test_ratios_are_those_of_the_same_batch():
    """A batch that was disturbed throughout changes no median."""
    off = [answers(0.3, 0.02), answers(0.6, 0.04), answers(9.0, 9.0)]
    on = [answers(0.1, 0.01), answers(0.2, 0.02, (1, 1, 1)), answers(9.0, 9.0)]
    found = compared({"off": off, "on": on})
    assert (found["ttft_speedup"], found["ttit_speedup"]) == (pytest.approx(3), pytest.approx(2))
    assert (found["off_ttft_s"], found["on_ttit_s"]) == (pytest.approx(0.6), pytest.approx(0.02))
    assert (found["off_wait_s"], found["on_wait_s"]) == (pytest.approx(0.08), pytest.approx(0.02))
    assert found["wait_speedup"] == pytest.approx(2)  # of 0.04 / 0.02, 0.08 / 0.02 and 1
    assert found["off_tpc"] == 1.5


def test_intervals_are_those_of_the_batches_ratios():
    """Of 12, from the third to the third last; one batch that was disturbed is not in them, and few have none."""
    off = [answers(0.1 * number, 0.01 * number) for number in [*range(12, 1, -1), 900]]
    found = compared({"off": off, "on": [answers(0.1, 0.01)] * 12})
    assert found["ttft_speedup"] == pytest.approx(7.5)
    for key in switches.FIGURES:
        assert found[f"{key}_speedup_interval"] == pytest.approx((4, 11))
    assert compared({"off": off[:5], "on": off[:5]})["ttit_speedup_interval"] is None


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
def test_rows_say_whether_they_are_told_from_noise(interval, noise, ratio, verdict):
    """From what the placebo of the same batch size shows in the same figure, and from 1."""
    found = compared({"off": [answers(0.3, 0.02)], "on": [answers(0.1, 0.01)]})
    placebo = {"switch": PLACEBO, "load": "some", "batch_size": 1, "figure": "ttit", **found}
    placebo |= {"ttft_speedup_interval": noise, "ttit_speedup_interval": (0.1, 0.2)}
    found |= {"ttft_speedup": 1.2, "ttft_speedup_interval": interval}
    row = {"switch": "first_token", "load": "some", "batch_size": 1, "figure": "ttft", **found}
    assert line(row, placebo)[5:] == ["TTFT", "100.00", "2.00×", ratio, "2.00×", verdict]
    assert line(placebo, placebo)[-1] == ""
    other = {**placebo, "batch_size": 8, "ttft_speedup_interval": (1, 9)}
    assert comparison([placebo, row, other]).splitlines()[3].endswith(f"| {verdict} |")


def test_the_placebo_comes_with_any(home):
    config = config_for(home, switches=["continuous_batching", PLACEBO], batch_sizes=[1, 2])
    assert config.cells == [(1, PLACEBO), (2, PLACEBO), (2, "continuous_batching")]
    config = config_for(home, switches=["continuous_batching"], batch_sizes=[1, 2])
    assert config.cells == [(2, PLACEBO), (2, "continuous_batching")]
    assert [size for size, name in config_for(home, batch_sizes=[1, 2]).cells if name == PLACEBO] == [1, 2]


def test_the_first_token_of_the_newcomer_counts():
    off, on = ([answers(9.0, 0.1) + answers(ttft, 0.1)] for ttft in (0.4, 0.1))
    assert compared({"off": off, "on": on}, newcomers=1)["ttft_speedup"] == pytest.approx(4)
    assert compared({"off": off, "on": on})["ttft_speedup"] == pytest.approx(9.4 / 9.1)


def test_waits_are_those_of_rounds():
    ((answer,),) = [answers(0.1, 0.1, (2, 3))]
    stats = replace(answer.output.stats, intervals_s=[1.0, 1.0, 0.5, 0.5, 0.5])
    assert figures.waits([replace(answer, output=replace(answer.output, stats=stats))]) == [2.0, 1.5]


def test_the_whole_command(home, tmp_path, capsys):
    out = tmp_path / "out"
    names = ["speculation", "greedy_drafting", "attention_kernel", "chunked_prefill", "continuous_batching"]
    lengths = ["shared_tokens=40", "long_tokens=70", "prefill_tokens=16", "requests=3", "rate=100", "max_tokens=6"]
    overrides = [f"switches=[{','.join(names)}]", "batch_sizes=[1,2]", "repeats=1", f"table={home}/table.yaml"]
    assert call(switches.main, *arguments(home, f"out={out}", *overrides, *lengths)) == 0
    found = json.loads((out / "results.json").read_text())
    at_1 = [name for name in names if SWITCHES[name].load.least == 1]
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
    def told(bench, name, size):
        check(name != "overlap", "it cannot be")
        return {side: [answers(0.1, 0.1)] for side in ("off", "on")}

    monkeypatch.setattr(Bench, "answered", told)
    given = [f"out={tmp_path}", "switches=[speculation,overlap]", "batch_sizes=[1]", "long_tokens=70"]
    assert call(switches.main, *arguments(home, *given)) == 2
    assert "error: it cannot be" in capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())
    assert ([row["switch"] for row in found["rows"]], found["left"]) == ([PLACEBO, "speculation"], 1)
    assert "Rows still to come: 1." in (tmp_path / "report.md").read_text()


def test_prompts_that_do_not_fit_are_refused_before_anything_is_measured(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Bench, "answered", None)
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
        ("tree=chain0", "tree: it drafts nothing at batch sizes up to batch_size="),
        ("draft=nowhere", "draft=nowhere: no config.json"),
        ("questions=nowhere.jsonl", "questions=nowhere.jsonl: no such file"),
    ],
)
def test_mistakes(home, override, message, capsys, monkeypatch):
    """Before a target is loaded."""
    monkeypatch.setattr(switches, "load_target", None)
    assert call(switches.main, *arguments(home, f"table={home}/table.yaml", override.format(home=home))) == 2
    assert capsys.readouterr().err.startswith(f"error: {message.format(home=home)}")


def test_what_needs_a_gpu_is_left_out_without_one(home):
    assert "cuda_graphs" in SWITCHES
    assert "cuda_graphs" not in {name for _, name in config_for(home).cells}
    with pytest.raises(UserError, match=r"^switches: cuda_graphs needs a GPU; name others$"):
        config_for(home, switches=["cuda_graphs"])


@pytest.mark.parametrize("name", ["disaggregated_prefill", "divided_sampling", "fast_linear"])
def test_what_is_there_on_a_cpu_alone_is_left_out_on_a_gpu(home, monkeypatch, name):
    monkeypatch.setattr(switches, "resolve_device", lambda _: "cuda")
    assert name not in {name for _, name in config_for(home).cells}
    with pytest.raises(UserError, match=rf"^switches: {name} needs device=cpu; name others$"):
        config_for(home, switches=[name])


def test_a_target_that_cannot_be_divided(home, tmp_path):
    """Is told before anything is measured; other switches do not mind."""
    config = json.loads((home / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "num_key_value_heads": 1}))
    target = TargetConfig(str(tmp_path))
    assert config_for(home, target=target, switches=["speculation"]).cells
    wanted = r"^switches: divided_sampling: 1 key/value heads cannot be divided between 2 processes; name others$"
    with pytest.raises(UserError, match=wanted):
        config_for(home, target=target)


def test_prompts_are_read_apart(bench, monkeypatch):
    """All of them, by a process that is gone afterwards."""
    here, read = [], Engine.read

    def noting(self, chunks):
        here.append((type(self), len(chunks)))
        return read(self, chunks)

    monkeypatch.setattr(Engine, "read", noting)
    off, on = bench.answered("disaggregated_prefill", 2).values()
    assert [[each.output.token_ids for each in batch] for batch in off] == [
        [each.output.token_ids for each in batch] for batch in on
    ]
    assert sum(count for kind, count in here if kind is Engine) == 3 * len(off) + 3  # and those that warm up
    assert sum(count for kind, count in here if kind is DecodeEngine) == 0
    assert not torch.distributed.is_initialized()
    assert multiprocessing.active_children() == []


def test_sampling_is_divided(bench, monkeypatch):
    """Each of two ranks samples one of two rows; where it is not divided, both."""
    rows = {"off": [], "on": []}
    for side, kind in (("off", SamplingAll), ("on", Ranks)):

        def noting(self, batch, *own, told=kind.all, seen=rows[side]):
            seen.append((batch, len(own[0])))
            return told(self, batch, *own)

        monkeypatch.setattr(kind, "all", noting)
    off, on = bench.answered("divided_sampling", 2).values()
    assert set(rows["off"]) <= {(2, 2), (1, 1)}
    assert set(rows["on"]) <= {(2, 1), (1, 1)}
    assert (2, 2) in rows["off"]
    assert (2, 1) in rows["on"]
    assert [[each.output.token_ids for each in batch] for batch in off] == [
        [each.output.token_ids for each in batch] for batch in on
    ]
    assert not torch.distributed.is_initialized()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("names", ["[]", "['continuous_batching']"])
def test_switches_that_show_nowhere(home, names, capsys):
    assert call(switches.main, *arguments(home, f"switches={names}", "batch_sizes=[1]")) == 2
    wanted = f"error: switches={names}: must name some that show at batch_sizes=[1], or be null"
    assert capsys.readouterr().err.startswith(wanted)
