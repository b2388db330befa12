"""Both variants of a switch differ in what the switch says alone; their times are compared batch by batch."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_train.inference import Eagle, chain, full
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.runner import Runner
from eagle_train.models.target import Target
from eagle_train.ops import kernels
from evals.bench import statistics, workloads
from evals.bench.session import Session
from evals.bench.switching import FIGURES, answer, answer_both, compared, engine_of
from evals.bench.variants import PLACEBO, SWITCHES
from evals.bench.workloads import GROUPS
from tests.support.eval_inputs import write_rows
from tests.support.switches import make_switches_home, switches_config, timed_answers

SAMPLED = ("greedy_drafting", "compiled_sampling")
ELSEWHERE = ("compiled_forwards", "compiled_sampling", "cuda_graphs", "disaggregated_prefill", "divided_sampling")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_switches_home(tmp_path_factory.mktemp("switches"))


LONGEST = 400  # tokens of a prompt and its answer


@pytest.fixture(scope="module")
def session(home) -> Session:
    session = Session(switches_config(home))
    assert session.target  # loaded here, as loading runs it too
    return session


def engines(session: Session, name: str, size: int = 2) -> list:
    """With the switch off, and on."""
    switch = SWITCHES[name]
    return [engine_of(session, variant, switch, size, LONGEST) for variant in (switch.off, switch.on)]


@pytest.mark.usefixtures("graphs")  # without the C++: what is compiled is not run here
def test_variants_differ_in_their_switch_alone(session, monkeypatch):
    for name, switch in SWITCHES.items():
        assert (switch.off == switch.on) == (name == PLACEBO)
        assert switch.figure in FIGURES
        assert not switch.off.remote_prefill
    off, on = engines(session, "persistent_kv")
    assert (off.config.prefix_cache, on.config.prefix_cache) == (False, True)
    for name in ("speculation", "guided_speculation"):
        off, on = engines(session, name)
        assert (off.dispatcher.deepest, on.dispatcher.deepest) == (0, 3)
    alignments, make = [], Eagle.__init__
    monkeypatch.setattr(Eagle, "__init__", lambda *given: (alignments.append(given[3]), make(*given))[1])
    engines(session, "last_alignment")
    assert alignments == ["accepted", "last"]
    assert [engine.config.drafting for engine in engines(session, "greedy_drafting")] == ["multinomial", "greedy"]
    assert [engine.config.compile_sampling for engine in engines(session, "compiled_sampling")] == [False, True]


def test_the_table_takes_the_trees_place(session):
    off, on = engines(session, "tree_dispatcher", size=5)
    assert [off.dispatcher.dispatch(size).tree for size in (1, 2, 5)] == [chain(3)] * 3
    assert [on.dispatcher.dispatch(size).tree for size in (1, 2, 5)] == [chain(1), full(1, 2), chain(0)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "kernel"), [("attention_kernel", "attention"), ("fast_linear", "linear"), ("argmax_kernel", "linear")]
)
def test_plain_kernels_run_in_one_variant_alone(session, monkeypatch, name, kernel, size):
    seen, forward = [], Target.hidden_states

    def noting(*given):
        seen.append(kernels.is_plain(kernel))
        return forward(*given)

    monkeypatch.setattr(Target, "hidden_states", noting)
    switch = SWITCHES[name]
    for side, is_plain in ((switch.off, True), (switch.on, False)):
        seen.clear()
        engine = engine_of(session, side, switch, size, LONGEST)
        answer(side, switch, engine, switch.workload.batches(session, size)[0])
        assert set(seen) == {is_plain}


@pytest.mark.parametrize("name", [name for name in SWITCHES if name not in (*SAMPLED, *ELSEWHERE)])
def test_no_switch_changes_an_answer(session, name):
    off, on = answer_both(session, name, 2).values()
    tokens = [[answer.output.token_ids for batch in side for answer in batch] for side in (off, on)]
    assert tokens[0] == tokens[1]
    assert any(len(answer) > 1 for answer in tokens[0])


def test_shared_beginnings_are_asked_again(session):
    first, second = workloads.SHARED.batches(session, 2)
    assert [each.prompt for each in first] == [each.prompt for each in second]
    assert first[0].prompt[:40] == first[1].prompt[:40]
    assert first[0].prompt[40:] == workloads.GREEDY.batches(session, 2)[0][0].prompt


def test_evicted_blocks_are_found_in_host_memory(home, tmp_path):
    """When a group of prompts comes again, its blocks were evicted: it is read again, or copied."""
    rows = [{"question_id": n, "turns": [f"{n}: what is {n} times {n}, and what is it called?"]} for n in range(10, 16)]
    questions = write_rows(tmp_path / "questions.jsonl", rows)
    session = Session(switches_config(home, questions=str(questions), repeats=GROUPS))
    cached = {
        side: [answer.output.stats.cached_tokens for batch in batches for answer in batch]
        for side, batches in answer_both(session, "host_kv", 2).items()
    }
    assert cached["on"] == [32] * 2 * GROUPS  # of 40 tokens, in blocks of 16
    assert sum(cached["off"]) == 0


def test_the_latecomer_is_prefilled_in_chunks(session):
    batches = workloads.LATECOMER.batches(session, 2)
    assert [[len(batch), len(batch[2].prompt)] for batch in batches] == [[3, 70]] * 2
    assert all(each.params.ignore_eos for batch in batches for each in batch)
    chunks = []
    for engine in engines(session, "chunked_prefill"):
        assert engine.config.max_batch_size == 3
        chunks.append(engine.config.prefill_tokens)
    assert chunks == [None, 16]


def test_arrivals(home):
    config = switches_config(home, requests=400, repeats=1, batch_sizes=[1, 2])
    (batch,) = workloads.ARRIVALS.batches(Session(config), 2)
    at = [each.arrival for each in batch]
    assert len(batch) == 400
    assert at == sorted(at)
    assert at[-1] == pytest.approx(400 / config.rate, rel=0.2)
    assert [size for size, name in config.cells if name == "continuous_batching"] == [2]


def test_ratios_are_those_of_the_same_batch():
    """A disturbed batch changes no median."""
    off = [timed_answers(0.3, 0.02), timed_answers(0.6, 0.04), timed_answers(9.0, 9.0)]
    on = [timed_answers(0.1, 0.01), timed_answers(0.2, 0.02, (1, 1, 1)), timed_answers(9.0, 9.0)]
    found = compared({"off": off, "on": on}, 9)
    assert (found["ttft_speedup"], found["ttit_speedup"]) == (pytest.approx(3), pytest.approx(2))
    assert (found["off_ttft_s"], found["on_ttit_s"]) == (pytest.approx(0.6), pytest.approx(0.02))
    assert (found["off_wait_s"], found["on_wait_s"]) == (pytest.approx(0.08), pytest.approx(0.02))
    assert found["wait_speedup"] == pytest.approx(2)  # of 0.04 / 0.02, 0.08 / 0.02 and 1
    assert found["off_tpc"] == 1.5


def test_intervals_are_those_of_the_batches_ratios():
    """Of 12 ratios, from the third to the third last, without the disturbed one; few ratios have no interval."""
    off = [timed_answers(0.1 * number, 0.01 * number) for number in [*range(12, 1, -1), 900]]
    found = compared({"off": off, "on": [timed_answers(0.1, 0.01)] * 12}, 9)
    assert found["ttft_speedup"] == pytest.approx(7.5)
    for key in FIGURES:
        assert found[f"{key}_speedup_interval"] == pytest.approx((4, 11))
    assert compared({"off": off[:5], "on": off[:5]}, 9)["ttit_speedup_interval"] is None


def test_the_ttft_is_the_newcomers():
    off, on = ([timed_answers(9.0, 0.1) + timed_answers(ttft, 0.1)] for ttft in (0.4, 0.1))
    assert compared({"off": off, "on": on}, 9, newcomers=1)["ttft_speedup"] == pytest.approx(4)
    assert compared({"off": off, "on": on}, 9)["ttft_speedup"] == pytest.approx(9.4 / 9.1)


def test_waits_are_between_rounds():
    ((answer,),) = [timed_answers(0.1, 0.1, (2, 3))]
    stats = replace(answer.output.stats, intervals_s=[1.0, 1.0, 0.5, 0.5, 0.5])
    assert statistics.round_waits([replace(answer, output=replace(answer.output, stats=stats))]) == [2.0, 1.5]


def test_prompts_are_prefilled_by_another_process(session, monkeypatch):
    """All prompts, and the process has ended afterwards."""
    here, prefill = [], Runner.prefill

    def noting(self, prefix, texts, *others):
        here.append(len(texts))
        return prefill(self, prefix, texts, *others)

    monkeypatch.setattr(Runner, "prefill", noting)
    off, on = answer_both(session, "disaggregated_prefill", 2).values()
    assert [[each.output.token_ids for each in batch] for batch in off] == [
        [each.output.token_ids for each in batch] for batch in on
    ]
    assert sum(here) == 3 * len(off) + 3  # and those that warm up; none of the other side's
    assert not torch.distributed.is_initialized()
    assert multiprocessing.active_children() == []


def test_sampling_is_divided(session, monkeypatch):
    """Each of two ranks samples one of two rows; undivided, each samples both."""
    rows, gather = {"off": [], "on": []}, Ranks.all

    def noting(self, batch, *own):
        rows["on" if self.divided else "off"].append((batch, len(own[0])))
        return gather(self, batch, *own)

    monkeypatch.setattr(Ranks, "all", noting)
    off, on = answer_both(session, "divided_sampling", 2).values()
    assert set(rows["off"]) <= {(2, 2), (1, 1)}
    assert set(rows["on"]) <= {(2, 1), (1, 1)}
    assert (2, 2) in rows["off"]
    assert (2, 1) in rows["on"]
    assert [[each.output.token_ids for each in batch] for batch in off] == [
        [each.output.token_ids for each in batch] for batch in on
    ]
    assert not torch.distributed.is_initialized()
    assert multiprocessing.active_children() == []
