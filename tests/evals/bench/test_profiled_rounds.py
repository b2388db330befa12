"""Profiles of rounds: which rounds, their stages, and that they count what a dispatcher sees."""

import gzip
import json

import pytest

from eagle_train.inference import Engine
from eagle_train.inference.decode.stage_times import StageTimes
from eagle_train.ops.torch_private import DispatchMode
from evals.bench import profiled_rounds as rounds
from tests.support.measuring import simulated_engine, timed_requests
from tests.support.tiny import random_tokens, shared_target


class Calls(DispatchMode):
    """Counts what a dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def drafting() -> Engine:
    return simulated_engine("chain3", shares=[1, 1, 1])


@pytest.mark.parametrize("make", [lambda: Engine(shared_target()), drafting], ids=["plain", "chain3"])
def test_operations_are_those_that_a_dispatcher_sees(tmp_path, make):
    """Within 3 %: some calls do nothing, and a mode sees other ones of them than a profiler."""
    engine, batch = make(), timed_requests(*random_tokens(5, 7), max_tokens=99, ignore_eos=True)
    found = rounds.profiled_rounds(engine, batch, tmp_path / "trace.json.gz")
    assert not engine.has_unfinished
    for each in batch:
        engine.add(each.prompt, each.params)
    for _ in range(1 + rounds.WARM_UP + rounds.ROUNDS):
        engine.step()
    with Calls() as calls:
        for _ in range(rounds.ROUNDS):
            engine.step()
    assert found["operations_with_views_per_round"] == pytest.approx(calls.number / rounds.ROUNDS, rel=0.03)
    assert 0 < found["operations_per_round"] < found["operations_with_views_per_round"]


def test_a_profile_is_of_so_many_rounds_and_of_the_stages_in_them(tmp_path):
    engine = drafting()
    before = StageTimes.stage
    found = rounds.profiled_rounds(engine, timed_requests(*random_tokens(5, 7, 9)), tmp_path / "trace.json.gz")
    assert engine.stage_times.runs["validation"] == rounds.WARM_UP + 2 * rounds.ROUNDS
    ranges = [event for event in trace_of(tmp_path) if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in ranges]
    assert {name: names.count(name) for name in rounds.STAGES} == {
        "drafting": rounds.ROUNDS,
        "validation": rounds.ROUNDS,
        "sampling": rounds.ROUNDS,
        "bookkeeping": 2 * rounds.ROUNDS,
    }
    assert (found["trace"], found["rounds"], found["device"]) == ("trace.json.gz", rounds.ROUNDS, "cpu")
    assert all(found["stages"][name]["operations"] > 0 for name in rounds.STAGES)
    assert "stage" not in vars(engine.stage_times)
    assert StageTimes.stage is before


def test_no_round_is_left_in_flight_where_rounds_overlap(tmp_path):
    engine = Engine(shared_target(), overlap=True)
    found = rounds.profiled_rounds(engine, timed_requests(*random_tokens(5)), tmp_path / "a.gz")
    assert engine.stage_times.runs["validation"] == rounds.WARM_UP + 2 * rounds.ROUNDS
    assert found["stages"]["validation"]["operations"] > 0
    before = engine.stage_times.runs["bookkeeping"]
    assert engine.step() == []
    assert engine.stage_times.runs["bookkeeping"] == before


def test_all_rows_take_part_in_all_rounds_where_prompts_are_read_in_chunks(tmp_path):
    """The first prompts' answers go on while the others are read."""
    engine = Engine(shared_target(), max_batch_size=3, prefill_tokens=4)
    seen, step = [], engine.step
    engine.step = lambda: seen.append(step()) or seen[-1]
    rounds.profiled_rounds(engine, timed_requests(*random_tokens(30, 30, 30), max_tokens=2), tmp_path / "a.gz")
    assert [len(updates) for updates in seen[-1 - 2 * rounds.ROUNDS :]] == [3] * 2 * rounds.ROUNDS + [0]


def test_a_prompt_that_fills_the_context_loses_its_beginning(tmp_path):
    engine = Engine(shared_target())
    long = random_tokens(engine.target.max_positions - 1)
    assert rounds.profiled_rounds(engine, timed_requests(*long), tmp_path / "a.gz")["operations_per_round"] > 0


def test_a_rank_that_only_takes_part_runs_the_same_rounds():
    engine = drafting()
    assert rounds.profiled_rounds(engine, timed_requests(*random_tokens(5)), None) == {}
    assert engine.stage_times.runs["validation"] == rounds.WARM_UP + 2 * rounds.ROUNDS


def test_names_of_traces():
    assert rounds.trace_name(3, "outputs/my table.yaml fp8") == "trace_3_outputs_my_table_yaml_fp8.json.gz"


def trace_of(folder) -> list[dict]:
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
