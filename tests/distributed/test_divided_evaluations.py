"""Evaluations, calibration and regeneration on a target that two ranks hold together: what one process finds."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle_train.errors import UserError
from evals import ceilings, experiments, load_memory, loss_memory, stream_memory, train_throughput
from tests.support.command_line import call, read_jsonl, write_jsonl
from tests.support.divided_job import call_all
from tests.support.doctor_models import PLACE
from tests.support.eval_inputs import TEMPLATE, arguments, make_home
from tests.support.fake_vllm import GOOD, counts, interpreter
from tests.support.planted import exported
from tests.support.processes import run, start_ranks
from tests.support.switches import make_switches_home, switches_config

PAIR = ("one", "two")  # directories for the results of one process, and of two ranks
CHATS = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}
         for text in ("Write a line.", "Name a colour.", "1 + 1?", "And twice that?", "Why that one?")]  # fmt: skip
# A stand-in for vLLM that was given none of the launcher's variables.
ANSWERING = f"""import os
assert "RANK" not in os.environ
answer = {GOOD!r} | {{"token_ids": [[5] * 6] * len(job["prompts"])}}
json.dump(answer, open(job["answer"], "w"))"""


def commands(home: Path, out: Path) -> list[tuple[str, list[str]]]:
    """All of them, with results below `out`."""

    def asked(name: str, *overrides: str) -> tuple[str, list[str]]:
        return f"evals.{name}", arguments(home, f"out={out}/{name}", "device=cpu", *overrides)

    few = ["max_tokens=8", "repeats=1"]
    names = "continuous_batching,divided_sampling"
    lengths = ["shared_tokens=40", "long_tokens=70", "chunk_tokens=16", "requests=3", "rate=40"]
    data = ["device=cpu", "data=messages", f"data.path={home}/chats.jsonl"]
    calibrated = ["layout=vllm", "quant=int4", "quant.scope=all_linear", "rounding=gptq", "calibration_tokens=40"]
    once = ["rate=60", "requests=3"]
    doctor = [f"target={PLACE}/target", f"data.path={PLACE}/questions.jsonl", "limit=6", "max_tokens=24", "device=cpu"]
    doctor += [f"draft={home}/doctor/draft", f"vllm.python={home}/doctor/python"]
    shapes = ["shapes=tiny", "acceptance=[0.8,0.6]", "context_lengths=[12]", "trees=[chain2]", "draft.window=8"]
    return [
        asked("mt_bench", "tree=d2_bf2", "batch_size=2"),
        asked("latency", *few, *once, "batch_sizes=[1,2]", "context_lengths=[20]", "trees=[chain2]", "profile=true"),
        ("evals.latency", [*shapes, *few, "transformers=false", f"out={out}/shapes", "device=cpu"]),
        asked("tune_trees", "batch_sizes=[1,2]", "depth=2", "children=2", "nodes=[3]", "full=[]", "rounds=1"),
        asked("quantisation", "tree=chain2", "batch_size=2", "scope=all_linear", "limit=2"),
        asked("switches", *few, *lengths, f"switches=[{names}]", "batch_sizes=[2]"),
        ("eagle_train.regenerate", [f"target={home}/target", *data, f"out={out}/answers.jsonl", "max_tokens=3"]),
        (
            "eagle_train.export",
            [
                f"checkpoint={home}/draft",
                f"target={home}/target",
                *data,
                "data.row_tokens=64",
                f"out={out}/draft",
                *calibrated,
            ],
        ),
        asked("serving", f"draft.path={home}/one/draft", f"vllm.python={home}/python", "batch_size=2"),
        asked("gating", *few, "batch_sizes=[2]", "settle=0", "others=[]"),
        (
            "evals.layer_skip",
            [
                f"target={home}/target",
                f"questions={home}/questions.jsonl",
                f"out={out}/layer_skip",
                "max_tokens=8",
                "device=cpu",
            ],
        ),
        ("eagle_train.doctor", [*doctor, f"out={out}/doctor"]),
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = make_home(tmp_path_factory.mktemp("divided"), width=128)
    (home / "target" / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE)
    write_jsonl(home / "chats.jsonl", CHATS)
    interpreter(home, ANSWERING)
    exported(home / "doctor" / "draft", "eagle3", "vllm")
    interpreter(home / "doctor", counts(10, 10, 10))
    call_all(commands(home, home / "one"))
    start_ranks(2, "divided_job", commands(home, home / "two"))
    return home


@pytest.fixture
def home_of_switches(tmp_path) -> Path:
    return make_switches_home(tmp_path)


def found(home: Path, read: Callable[[Path], Any], *place: str) -> tuple[Any, Any]:
    """What one process and two ranks wrote at a place."""
    one, two = (read(home.joinpath(side, *place)) for side in PAIR)
    return one, two


def untimed(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file without the seconds that they took."""
    return [{key: value for key, value in row.items() if not key.endswith("decode_s")} for row in read_jsonl(file)]


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@pytest.mark.ranks
def test_mt_bench(home):
    one, two = found(home, untimed, "mt_bench", "answers.jsonl")
    assert one == two
    assert len(one) == 6
    alone, divided = found(home, read_json, "mt_bench", "results.json")
    assert (alone["ranks"], divided["ranks"]) == (1, 2)
    for key in ("tpc", "acceptance_per_depth", "differing_answers", "train_serve_check"):
        assert alone[key] == divided[key], key
    assert alone["tpc"] > 1
    assert re.search(r"ranks that hold the target together +\| +2", (home / "two/mt_bench/report.md").read_text())


@pytest.mark.ranks
def test_latency(home):
    one, two = found(home, read_json, "latency", "results.json")
    assert len(one["rows"]) == len(two["rows"])
    assert {row["decoding"] for row in two["rows"]} == {
        "plain",
        "chain2",
        "transformers",
        "transformers, prompt lookup",
    }
    for alone, divided in zip(one["rows"], two["rows"], strict=True):
        for key in ("decoding", "arrivals", "batch_size", "tpc", "acceptance_per_depth", "differing_answers"):
            assert alone[key] == divided[key], (alone["decoding"], key)
        assert divided["differing_answers"] == 0
    assert {row["arrivals"] for row in two["rows"]} == {"together", "poisson"}
    traces = [f"trace_{number}_{name}.json.gz" for number, name in enumerate(["plain", "chain2"] * 2, 1)]
    assert sorted(path.name for path in (home / "two/latency").glob("trace*")) == traces
    assert all(each["operations_per_round"] > 0 for each in two["profiles"])


@pytest.mark.ranks
def test_latency_without_a_checkpoint(home):
    """Acceptance is simulated by seed and position, and models are those of one process (test_random_models.py)."""
    one, two = found(home, read_json, "shapes", "results.json")
    assert (two["ranks"], two["target"]) == (2, one["target"])
    assert [row["decoding"] for row in two["rows"]] == ["plain", "chain2"]
    for alone, divided in zip(one["rows"], two["rows"], strict=True):
        assert (alone["tpc"], alone["acceptance_per_depth"]) == (divided["tpc"], divided["acceptance_per_depth"])


@pytest.mark.ranks
def test_tune_trees(home):
    one, two = found(home, read_json, "tune_trees", "tune_trees.json")
    assert (one["acceptance"], one["trees"]) == (two["acceptance"], two["trees"])
    assert (home / "two/tune_trees/table.yaml").exists()


@pytest.mark.ranks
def test_quantisation(home):
    one, two = (result["schemes"] for result in found(home, read_json, "quantisation", "results.json"))
    for scheme in ("none", "fp8", "int4"):
        for key in ("tpc", "tokens", "calls", "acceptance_per_depth", "differing_answers", "feed_forward_bytes"):
            assert one[scheme][key] == two[scheme][key], (scheme, key)


@pytest.mark.ranks
def test_switches(home):
    one, two = (result["rows"] for result in found(home, read_json, "switches", "results.json"))
    assert [row["switch"] for row in one] == [row["switch"] for row in two]
    for alone, divided in zip(one, two, strict=True):
        for key in ("off_tpc", "on_tpc", "off_prompts"):
            assert alone[key] == divided[key], (alone["switch"], key)


@pytest.mark.ranks
def test_regenerate(home):
    numbers = []
    for name in ("answers.jsonl", "answers.jsonl.left_out"):
        one, two = found(home, read_jsonl, name)
        assert one == two
        numbers += [row["row"] for row in one]
    assert sorted(numbers) == [1, 2, 3, 4, 5]


@pytest.mark.ranks
def test_calibration(home):
    """Rounded by the same moments, but for the order of sums."""
    one, two = found(home, load_file, "draft", "model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        same = (one[name].view(torch.uint8) == two[name].view(torch.uint8)).double().mean()
        assert same > 0.99, name


@pytest.mark.ranks
def test_serving(home):
    """Our answers, and vLLM on as many processes."""
    one, two = found(home, read_json, "serving", "results.json")
    assert one["eagle_train"] == two["eagle_train"]
    sizes = [job["llm"]["tensor_parallel_size"] for job in found(home, read_json, "serving", "vllm_job.json")]
    assert sizes == [1, 2]


@pytest.mark.ranks
def test_gating(home):
    """All loads are played to their end with engines that choose, on each rank alike."""
    one, two = (result["rows"] for result in found(home, read_json, "gating", "results.json"))
    assert [row["load"] for row in one] == [row["load"] for row in two] == ["noise", "half", "good", "own"]
    assert all(row["gate"]["share"] > 0 < row["auto"]["share"] for row in two)


@pytest.mark.ranks
def test_layer_skip(home):
    one, two = (result["tried"] for result in found(home, read_json, "layer_skip", "layer_skip.json"))
    alone, divided = ({tuple(each["layers"]): each["agreement"] for each in tried} for tried in (one, two))
    both = alone.keys() & divided.keys()  # the search goes by costs, of which the whole LM head is a larger part here
    assert len(both) > 1
    assert [alone[each] for each in both] == [divided[each] for each in both]
    assert (home / "two/layer_skip/layers.yaml").exists()


@pytest.mark.ranks
def test_the_doctor(home):
    """Both find the same draft healthy, by the same figures; the first rank asks vLLM on as many processes."""
    one, two = found(home, read_json, "doctor", "results.json")
    assert one["healthy"]
    for key in ("healthy", "tpc", "rounds", "rounds_that_differ", "acceptance_per_depth", "engine", "vllm"):
        assert one[key] == two[key], key
    sizes = [job["llm"]["tensor_parallel_size"] for job in found(home, read_json, "doctor", "vllm_job.json")]
    assert sizes == [1, 2]


@pytest.mark.ranks
def test_a_launcher_starts_one(home, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    template = tmp_path / "template.jinja"
    template.write_text("2026-07-31" + TEMPLATE)  # the day on which all others were asked
    given = arguments(home, f"out={tmp_path}/out", "device=cpu", "tree=d2_bf2", "batch_size=2")
    given += [f"target.chat_template={template}"]
    done = run([*launcher, "evals.mt_bench", *given], env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to ") == 1
    assert untimed(tmp_path / "out" / "answers.jsonl") == untimed(home / "one" / "mt_bench" / "answers.jsonl")


@pytest.mark.parametrize("module", [experiments, ceilings, stream_memory, train_throughput])
def test_those_for_one_process_refuse_several(module, monkeypatch, tmp_path, capsys):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert call(module.main, f"out={tmp_path}") == 2
    name = module.__name__
    said = f"error: WORLD_SIZE=2: {name} runs in one process; start it without a launcher"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("module", [load_memory, loss_memory])
def test_and_so_do_those_without_a_config(module, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(UserError, match=rf"^WORLD_SIZE=2: {module.__name__} runs in one process; start it without a l"):
        module.main()


def test_switches_for_one_process_are_left_out_of_a_job(home_of_switches, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    names = {name for _, name in switches_config(home_of_switches).cells}
    assert "divided_sampling" in names
    assert "disaggregated_prefill" not in names
    with pytest.raises(UserError, match=r"^switches: disaggregated_prefill needs one process; name others$"):
        switches_config(home_of_switches, switches=["disaggregated_prefill"])
