"""evals/latency.py: figures by hand on a clock that only models move, arrivals, told acceptance, prompts, the command.

Targets are tiny and random; that `transformers.generate` is the baseline and the same tokens come out is part of it.
"""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn

from eagle_train.errors import UserError, check
from eagle_train.inference import Engine, Output, SamplingParams, Stats
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.models.draft import Draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import LMHead, Target
from eagle_train.ops.linear import Linear
from eagle_train.ops.norm import FastNorm
from evals import contenders, figures, latency
from evals.contenders import Transformers, as_it_comes, serve
from evals.figures import Answer
from evals.latency import PLAIN, TRANSFORMERS, Cell, rows_of, take_turns
from evals.prompts import Prompts, arrival_times
from evals.shapes import ToldEngine
from evals.stopwatch import breakdown
from tests.support.clock import taking
from tests.support.command_line import call
from tests.support.eval_inputs import NOBODY, arguments, asked, make_home
from tests.support.tiny import random_tokens, shared_target, tiny_draft

SHARES = [0.8, 0.6, 0.3]
KEYS = ("accepted_per_depth", "drafted_per_depth")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("latency"))


def told_engine(tree: str, rows: int = 3, shares: list[float] = SHARES) -> ToldEngine:
    target = shared_target()
    return ToldEngine(shares, target, Eagle(tiny_draft(target), target), tree, max_batch_size=rows)


# Arrivals


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = torch.tensor(arrival_times(4000, 5.0, seed=1), dtype=torch.float64)
    gaps = torch.diff(times, prepend=times.new_zeros(1))
    assert times[-1].item() == pytest.approx(4000 / 5, rel=0.05)
    assert stats.kstest(gaps.numpy(), "expon", args=(0, 1 / 5)).pvalue > 0.01
    assert arrival_times(9, 5.0, seed=1) == times[:9].tolist() != arrival_times(9, 5.0, seed=2)


def test_waiting_counts_from_the_arrival(clock, monkeypatch):
    """One row, a second a target call: the second request waits for the first, and nobody for the third."""
    taking(monkeypatch, clock, Target, "hidden_states", 1.0)
    engine = Engine(shared_target(), max_batch_size=1)
    requests = asked(*random_tokens(5, 6, 7), arrivals=[0.0, 0.5, 100.0], max_tokens=3, ignore_eos=True)
    outputs = serve(engine, requests)
    assert [output.stats.ttft_s for output in outputs] == [1.0, 3.5, 1.0]
    assert [output.stats.intervals_s for output in outputs] == [[1.0, 1.0]] * 3
    answers = [Answer(NOBODY, 1, each.prompt, output) for each, output in zip(requests, outputs, strict=True)]
    assert figures.tokens_per_s(answers, [each.arrival for each in requests]) == 9 / 103
    alone = engine.generate([each.prompt for each in requests], requests[0].params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


# Told acceptance


@pytest.mark.parametrize("tree", ["chain2", "chain3", "d3_bf2", "n8"])
def test_rounds_accept_as_told(tree):
    engine = told_engine(tree, rows=40, shares=[0.8, 0.6, 0.3, 0.2, 0.1])
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    outputs = engine.generate(random_tokens(*[4] * 40), params)
    hits, rounds = (torch.tensor([getattr(o.stats, key) for o in outputs]).sum(0) for key in KEYS)
    assert len(hits) == engine.dispatcher.deepest
    for hit, tried, share in zip(hits.tolist(), rounds.tolist(), engine.acceptance.tolist(), strict=False):
        assert stats.binomtest(hit, tried, share).pvalue > 1e-3


@pytest.mark.parametrize(("shares", "depth"), [([0, 0, 0], 0), ([1, 0, 0], 1), ([1, 1, 0], 2), ([1, 1, 1], 3)])
@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
def test_certain_acceptance_is_exact(tree, shares, depth):
    engine, params = told_engine(tree, shares=shares), SamplingParams(max_tokens=13, ignore_eos=True)
    commit = engine.commit

    def checked(plan, tokens, hidden, suffix, verified):
        assert verified.node.tolist() == [plan.tree.levels[depth][0]]
        return commit(plan, tokens, hidden, suffix, verified)

    engine.commit = checked
    output = engine.generate(random_tokens(4), params)[0]
    assert output.rounds == [depth + 1] * (12 // (depth + 1))


def test_what_is_told_depends_on_seed_and_position_alone():
    prompts, params = random_tokens(4, 9, 6), SamplingParams(max_tokens=40, ignore_eos=True)
    together = told_engine("chain3", rows=3).generate(prompts, params)
    alone = told_engine("chain3", rows=1).generate(prompts, params)
    assert [output.rounds for output in together] == [output.rounds for output in alone]
    assert len({tuple(output.rounds) for output in together}) == 3


# transformers


@pytest.mark.parametrize("family", ["llama", "llama4"])
def test_transformers_runs_as_it_comes_on_the_same_weights(family):
    target = shared_target(family)
    model = as_it_comes(target)
    assert model.config._attn_implementation == "sdpa"
    assert target.model.config._attn_implementation == "eagle_train"
    for ours, module in ((True, target.model), (False, model)):
        kinds = {type(each) for each in module.modules()}
        assert (Linear in kinds, nn.Linear in kinds) == (ours, not ours)
        of_family = {
            "llama": lambda each: isinstance(each, FastNorm),
            "llama4": lambda each: getattr(each, "routed", False),
        }
        assert any(map(of_family[family], module.modules())) == ours
    for own, theirs in zip(target.model.parameters(), model.parameters(), strict=True):
        assert own is theirs


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("lookup", [None, 5])
def test_transformers_gives_the_engines_tokens(lookup, ignore_eos):
    target = shared_target()
    engine = Engine(target, max_batch_size=2)
    prompts = random_tokens(7) if lookup else random_tokens(7, 12)
    first = engine.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
    stop = frozenset() if ignore_eos else frozenset(first[4:5])  # one that does come up
    engine.requests.__dict__["stop_ids"] = stop
    batch = asked(*prompts, max_tokens=30, ignore_eos=ignore_eos)
    ours, theirs = serve(engine, batch), Transformers(as_it_comes(target), stop, lookup)(batch)
    for own, other in zip(ours, theirs, strict=True):
        assert other.token_ids == own.token_ids
        assert other.finish_reason == own.finish_reason
        assert len(other.stats.intervals_s) == len(own.stats.intervals_s)
        assert other.stats.ttft_s > 0
        if lookup and ignore_eos:
            assert other.stats.calls < other.stats.tokens  # a random Llama repeats itself
    assert (ours[0].finish_reason == "length") == ignore_eos


def test_times_of_a_stream_by_hand(clock):
    """A step's tokens share the time since the step before; those behind a stop token do not count."""
    stream = contenders.Clock()
    stream.put(torch.tensor([[7, 7]]))  # the prompt
    for second, tokens in ((1.0, [[3, 4]]), (3.0, [5]), (5.0, [[6, 2, 8]])):
        clock[0] = second
        stream.put(torch.tensor(tokens))
    output = stream.output([3, 4, 5, 6, 2, 8], frozenset([2]))
    assert output.token_ids == [3, 4, 5, 6, 2]
    assert output.finish_reason == "stop"
    assert (output.stats.ttft_s, output.stats.intervals_s) == (1.0, [0.0, 2.0, 1.0, 1.0])
    assert (output.stats.calls, output.stats.tokens, output.rounds) == (2, 3, [1, 2])
    assert stream.output([3, 4, 5], frozenset()).finish_reason == "length"


# Where the time goes


def test_the_breakdown_by_hand(clock, monkeypatch):
    """Seconds: target 3, draft 2, LM head 1, verification 1. A round of chain3: 3 * (2 + 1), 3 + 1, and 1."""
    for owner, name, seconds in ((Target, "hidden_states", 3), (Draft, "forward", 2), (LMHead, "__call__", 1)):
        taking(monkeypatch, clock, owner, name, seconds)
    taking(monkeypatch, clock, Engine, "dispatch", 0.5)
    sample = ToldEngine.sample

    def slow(engine, *arguments):
        with engine.stage("sampling"):
            clock[0] += 1
        return sample(engine, *arguments)

    monkeypatch.setattr(ToldEngine, "sample", slow)
    before = [Target.hidden_states, Draft.forward, LMHead.__call__, Engine.stage]
    found = breakdown(
        told_engine("chain3", shares=[1, 1, 1]), [asked(*random_tokens(5, 7), max_tokens=9, ignore_eos=True)]
    )
    assert found["rounds"] == 2
    assert found["round_ms"] == 14_500
    assert found["stages_ms"] == {"drafting": 9000, "validation": 4000, "sampling": 1000, "bookkeeping": 0, "rest": 500}
    assert found["forwards_ms"] == {"drafting": 9000, "validation": 4000}
    assert found["outside"] == pytest.approx(1.5 / 14.5)
    assert (found["prefill_ms"], found["draft_latency_ms"]) == (6000, 9000)
    assert [Target.hidden_states, Draft.forward, LMHead.__call__, Engine.stage] == before


def test_the_breakdown_counts_the_rounds_that_were_launched(clock, monkeypatch):
    """With overlap a last step only waits for the last round. Seconds: target 3, LM head 0."""
    taking(monkeypatch, clock, Target, "hidden_states", 3)
    batch = asked(*random_tokens(9), max_tokens=9, ignore_eos=True)
    for overlap in (False, True):
        found = breakdown(Engine(shared_target(), overlap=overlap), [batch])
        assert (found["rounds"], found["round_ms"], found["stages_ms"]["validation"]) == (8, 3000, 3000)


def test_the_breakdown_of_several_batches(clock, monkeypatch):
    """Rounds of all together; a table's rounds without drafts do not count where the draft's time is told. Seconds:
    target 3, draft 2; two rows until the first is done, then one, for which alone chain2 drafts."""
    for owner, name, seconds in ((Target, "hidden_states", 3), (Draft, "forward", 2)):
        taking(monkeypatch, clock, owner, name, seconds)
    engine = told_engine("chain2", rows=2, shares=[1, 1])
    engine.dispatcher = Dispatcher({1: chain(2), 2: chain(0)}, engine.target.device)
    pair = asked(*random_tokens(5, 7), max_tokens=12, ignore_eos=True)
    pair[0] = replace(pair[0], params=replace(pair[0].params, max_tokens=3))
    alone = asked(*random_tokens(6), max_tokens=7, ignore_eos=True)
    found = breakdown(engine, [pair, alone])
    # The pair: 2 plain rounds, then 9 tokens in 3 drafted ones; the one alone: 6 in 2.
    assert found["rounds"] == 2 + 3 + 2
    assert found["draft_latency_ms"] == 2 * 2000
    assert found["stages_ms"]["drafting"] == pytest.approx(5 * 4000 / 7)
    assert found["prefill_ms"] == pytest.approx((3 + 2) * 1000)


def test_a_batch_without_a_round_has_no_breakdown():
    with pytest.raises(UserError, match="no answer has a second token, so there is no round to watch"):
        breakdown(Engine(shared_target()), [asked(*random_tokens(9), max_tokens=1)])


def test_the_batch_that_is_watched_has_rounds(monkeypatch):
    """Another one, where the first batch's answers end with their first tokens."""
    target, prompts = shared_target(), random_tokens(9, 12)
    first = Engine(target).generate(prompts[:1], SamplingParams(max_tokens=1))[0].token_ids
    batches = [asked(prompt, max_tokens=6, stop_token_ids=tuple(first)) for prompt in prompts]
    bench = latency.Bench(small_config(questions=None, context_lengths=[9]), target, tiny_draft(target))
    monkeypatch.setattr(bench.prompts, "batches", lambda *_: batches)
    monkeypatch.setattr(figures, "check_timing", lambda found: None)
    *_, found = latency.swept(bench)
    assert [each["decoding"] for each in found["breakdown"]] == ["plain", "chain3"]
    assert all(each["rounds"] > 0 for each in found["breakdown"])


# transformers' threads


@pytest.mark.parametrize(("all_of_them", "tried", "fastest"), [(1, [1], 1), (6, [1, 2, 4, 6], 4), (4, [1, 2, 4], 1)])
def test_transformers_takes_the_threads_that_suit_it(clock, monkeypatch, all_of_them, tried, fastest):
    """Medians of three trials in turn: the first calls warm up, and one disturbance says nothing."""
    target, now, calls = shared_target(), [], count()
    monkeypatch.setattr(torch, "get_num_threads", lambda: all_of_them)
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    other = Transformers(target.model, frozenset())

    def slow(asked):
        turn, number = next(calls) // len(tried), now[-1]
        disturbed = number == fastest if turn == 0 else turn == 3
        clock[0] += 100.0 if disturbed else 1.0 + abs(number - fastest)
        return []

    monkeypatch.setattr(other, "answers", slow)
    other.tune(asked([7]))
    assert now == [number for each in tried * 4 for number in (each, all_of_them)]
    assert other.threads == fastest


# Rows


def answer(token_ids: list[int], ttft: float, intervals: list[float], calls: int = 1) -> Answer:
    counts = {"calls": calls, "tokens": len(intervals), "ttft_s": ttft, "intervals_s": intervals}
    counts |= {"accepted_per_depth": [calls] * bool(calls), "drafted_per_depth": [calls] * bool(calls)}
    return Answer(NOBODY, 1, [7], Output(token_ids, None, "length", Stats(**counts), []))


def small_config(**changes) -> latency.Config:
    values = {
        **{
            "draft": latency.Artifact("somewhere", "accepted"),
            "target": TargetConfig("t"),
            "acceptance": None,
            "trees": ["chain3"],
            "quants": ["none"],
        },
        **{"batch_sizes": [1], "context_lengths": None, "questions": "q.jsonl", "repeats": 2, "rate": None},
        **{
            "requests": 4,
            "out": "",
            "max_tokens": 9,
            "ignore_eos": False,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
        },
        **{
            "seed": 0,
            "prompt_lookup": 10,
            "drafting": "greedy",
            "compile": False,
            "graphs": False,
            "device": "cpu",
            "threads": None,
        },
    }
    return latency.Config(**values | changes)


def test_rows_by_hand():
    """Two batches of three tokens; the second one's times are of another scale, which medians of ratios pass over."""
    answered = {
        PLAIN: [[answer([1, 2, 3], 2.0, [2.0, 2.0], 2)], [answer([1, 2, 3], 8.0, [6.0, 6.0], 2)]],
        "chain3": [[answer([1, 2, 3], 2.0, [1.0, 1.0])], [answer([1, 9, 3], 2.0, [4.0, 4.0])]],
        TRANSFORMERS: [[answer([1, 2, 3], 3.0, [3.0, 3.0], 2)], [answer([1, 2, 3], 10.0, [10.0, 10.0], 2)]],
    }
    batches = [asked([7]), asked([7])]
    plain, chain3, theirs = rows_of(small_config(), Cell(1, 64), answered, batches)
    assert (chain3["batch_size"], chain3["context_length"], chain3["arrivals"]) == (1, 64, "together")
    assert plain["tokens_per_s"] == pytest.approx((3 / 6 + 3 / 20) / 2)
    assert chain3["tokens_per_s"] == pytest.approx((3 / 4 + 3 / 10) / 2)
    assert chain3["over"] == {PLAIN: pytest.approx(1.75), TRANSFORMERS: pytest.approx((9 / 4 + 3) / 2)}
    assert plain["over"][TRANSFORMERS] == pytest.approx((9 / 6 + 30 / 20) / 2)
    assert chain3["speedup"] == pytest.approx(4.0 / 2.5)
    assert chain3["differing_answers"] == 1
    assert (chain3["tpc"], chain3["ttft_s"], theirs["ttit_s"]) == (2.0, 2.0, 6.5)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"temperature": 1.0}, [0, 1, None]),
        ({"temperature": 1.0, "drafting": "multinomial"}, [0, None, None]),
        ({"drafting": "multinomial"}, [0, 1, 0]),
    ],
)
def test_samples_of_greedy_drafts_are_held_to_plain_decodings(changes, wanted):
    answered = {
        PLAIN: [[answer([1, 2, 3], 2.0, [2.0, 2.0], 2)]],
        "chain3": [[answer([1, 9, 3], 2.0, [2.0, 2.0])]],
        TRANSFORMERS: [[answer([1, 2, 3], 3.0, [3.0, 3.0], 2)]],
    }
    rows = rows_of(small_config(**changes), Cell(1, 64), answered, [asked([7])])
    assert [row["differing_answers"] for row in rows] == wanted


def test_rows_without_decoding_are_one_clear_line():
    with pytest.raises(UserError, match="no decoding was measured; raise max_tokens"):
        rows_of(small_config(), Cell(1, None), {PLAIN: [[answer([1], 1.0, [], 0)]]}, [asked([7])])


@pytest.mark.parametrize(("size", "arrival"), [(1, 0.0), (1, 0.1), (2, 0.0)])
def test_a_speed_up_beyond_tpc_is_an_error_of_single_prompts(size, arrival):
    answered = {
        PLAIN: [[answer([1, 2, 3], 1.0, [9.0, 9.0], 2)]],
        "chain3": [[answer([1, 2, 3], 1.0, [1.0, 1.0])]],
    }
    batches = [asked([7], arrivals=[arrival])]
    if arrival or size > 1:
        assert rows_of(small_config(), Cell(size, None), answered, batches)[1]["speedup"] == 9.0
    else:
        with pytest.raises(UserError, match=r"speed-up 9\.000 exceeds 2\.000"):
            rows_of(small_config(), Cell(size, None), answered, batches)


def test_everyone_takes_every_batch_in_turn_after_a_warm_up():
    said = []
    output = Output([1], None, "length", Stats(), [])
    contenders = {
        name: lambda batch, name=name: (said.append((name, batch[0].prompt[0])), [output])[1] for name in "abc"
    }
    told = []
    answered = take_turns(contenders, [asked([1]), asked([2]), asked([3])], told=told.append)
    assert told == [1, 2, 3]
    turns = ["a1", "b1", "c1", "b2", "c2", "a2", "c3", "a3", "b3"]
    assert ["".join(map(str, each)) for each in said] == ["a1", "b1", "c1", *turns]
    assert [answers[0].prompt for answers in answered["b"]] == [[1], [2], [3]]


# Prompts


@pytest.fixture(scope="module")
def prompts(home) -> Prompts:
    target = load_target(TargetConfig(str(home / "target")))
    return Prompts(Engine(target), str(home / "questions.jsonl"), SamplingParams(max_tokens=9))


@pytest.mark.parametrize("length", [1, 5, 20, 100, 200])
def test_contexts_are_exact(prompts, length):
    batches = prompts.batches(2, 2, length)
    assert [[len(each.prompt) for each in batch] for batch in batches] == [[length] * 2] * 2
    texts = [tokens for _, tokens in prompts.texts]
    first, joined = batches[0][0].prompt, texts[1] + texts[2] + texts[0]
    assert first[-min(length, len(joined)) :] == joined[-length:]
    assert [each.params.seed for batch in batches for each in batch] == [0, 1, 2, 3]


def test_questions_as_they_are_are_spread_over_the_file(prompts):
    of = {tuple(tokens): question.id for question, tokens in prompts.texts}
    ids = [[of[tuple(each.prompt)] for each in batch] for batch in prompts.batches(2, 1, None)]
    assert ids == [[81], [82]]
    assert [of[tuple(batch[0].prompt)] for batch in prompts.batches(4, 1, None)] == [81, 82, 101, 81]


def test_a_prompt_that_leaves_no_room_is_refused(prompts):
    with pytest.raises(UserError, match=r"max_tokens=9: a prompt has 250 tokens, and the context of \S+ 256$"):
        prompts.batches(1, 1, 250)


# The command


def test_drafts_are_chosen_as_told():
    target = shared_target()
    bench = latency.Bench(
        small_config(questions=None, context_lengths=[9], drafting="multinomial"), target, tiny_draft(target)
    )
    assert [engine.drafting for engine in bench.engines(1).values()] == ["multinomial"] * 2


SHAPES = ["shapes=tiny", "acceptance=[0.8,0.6,0.3]", "context_lengths=[12,20]", "max_tokens=8", "repeats=2"]


@pytest.mark.usefixtures("noisy")
def test_the_whole_command_without_a_checkpoint(tmp_path, capsys):
    out = tmp_path / "out"
    sweep = ["batch_sizes=[1,2]", "trees=[chain3,d3_bf2]", "quants=[none,fp8]"]
    sweep += ["temperature=1", "drafting=multinomial_without_replacement"]
    status = call(latency.main, *SHAPES, *sweep, f"out={out}", "device=cpu")
    assert status == 0
    found = json.loads((out / "results.json").read_text())
    assert {"tpc", "speedup", "ttft_s", "ttit_s", "acceptance_per_depth", "plain_ttit_s"} <= found.keys()
    assert found["speedup"] == pytest.approx(found["plain_ttit_s"] / found["ttit_s"])
    engines = ["plain", "chain3", "chain3 fp8", "d3_bf2", "d3_bf2 fp8"]
    names = {1: [*engines, TRANSFORMERS, latency.LOOKUP], 2: [*engines, TRANSFORMERS]}
    rows = [(row["batch_size"], row["context_length"], row["decoding"]) for row in found["rows"]]
    assert rows == [(size, length, name) for size in (1, 2) for length in (12, 20) for name in names[size]]
    assert len(found["breakdown"]) == 4 * len(engines)
    assert all(0 < each["outside"] < 1 for each in found["breakdown"])
    assert found["provenance"]["load_average"]
    assert found["config"]["drafting"] == "multinomial_without_replacement"
    assert {(row["decoding"], row["threads"] is None) for row in found["rows"] if row["batch_size"] == 2} == {
        *((name, True) for name in engines),
        (TRANSFORMERS, False),
    }
    assert found["cells"] == {"measured": 4, "of": 4}
    (printed, progress), report = capsys.readouterr(), (out / "report.md").read_text()
    assert f"written to {out}" in printed
    assert "\nbatch 8/8, " in progress  # two for each of the four
    assert "rounds accept as told: [0.8, 0.6, 0.3]" in report
    assert report.count("| chain3 |") == 8
    assert "so far" not in report
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| transformers | ")]
    assert [row[2] for row in rows if len(row) > 2] == ["1", "1", "2", "2"]


def test_cells_that_were_measured_are_kept_where_a_later_one_fails(tmp_path, capsys, monkeypatch):
    def told(config, cell, *arguments):
        check(cell.context_length != 20, "it cannot be")
        return rows_of(config, cell, *arguments)

    monkeypatch.setattr(latency, "rows_of", told)
    monkeypatch.setattr(figures, "check_timing", lambda found: None)
    assert call(latency.main, *SHAPES, f"out={tmp_path}", "device=cpu") == 2
    assert "error: it cannot be" in capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())
    assert {row["context_length"] for row in found["rows"]} == {12}
    assert (found["tree"], found["cells"]) == ("chain3", {"measured": 1, "of": 2})
    assert "Of 2 batch sizes and contexts 1 so far." in (tmp_path / "report.md").read_text()


def test_arrivals_that_do_not_fit_are_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    """With one request there is room for each, and of three one is too long."""
    monkeypatch.setattr(latency, "take_turns", None)
    given = ["rate=9", "requests=3", "repeats=1", f"out={tmp_path}/out", "device=cpu"]
    prompt = Prompts.prompt
    monkeypatch.setattr(
        Prompts,
        "prompt",
        lambda self, number, count, length: prompt(self, number, count, 505 if number == 2 else length),
    )
    assert call(latency.main, *SHAPES, *given) == 2
    assert "max_tokens=8: a prompt has 505 tokens" in capsys.readouterr().err


def test_a_table_of_trees(tmp_path, capsys, monkeypatch):
    """At batch size 2 it drafts nothing, which is no speed-up that could be too great."""
    table = tmp_path / "table.yaml"
    table.write_text("1: {parents: [-1, 0, 1]}\n2: {parents: [-1]}\n")
    given = ["batch_sizes=[1,2]", f"trees=[{table},chain1]", "context_lengths=[12]", "max_tokens=6", "ignore_eos=true"]
    checked = []
    monkeypatch.setattr(figures, "check_timing", lambda row: checked.append((row["batch_size"], row["decoding"])))
    assert call(latency.main, *SHAPES, *given, f"out={tmp_path}/out", "device=cpu") == 0
    assert checked == [(1, str(table)), (1, "chain1")]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    own = [row for row in found["rows"] if row["decoding"] == str(table)]
    assert [(row["batch_size"], len(row["acceptance_per_depth"])) for row in own] == [(1, 2), (2, 0)]
    told = "chain2 (batch size 1), no draft (batch size 2)"
    assert (found["tree"], found["tables"]) == (str(table), {str(table): told})
    assert f"`{table}` is {told}." in (tmp_path / "out" / "report.md").read_text()
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
    assert "## Arrivals at random, 200 a second" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["shapes=huge"], "Could not find 'shapes/huge'"),
        ([*SHAPES, "batch_sizes=2"], "batch_sizes: must be a list, as batch_sizes=[...]"),
        ([*SHAPES, "batch_sizes=[[2]]"], "batch_sizes=[[2]]: must be numbers from 1 on"),
        ([*SHAPES, "shapes.config.model_type=lama"], "shapes.config: Unrecognized model identifier: lama"),
        ([*SHAPES, "shapes.config.hidden_size=x"], "shapes.config: Field 'hidden_size' expected int, got str"),
        (["shapes=tiny"], "acceptance=None: must be 3 shares"),
        (["shapes=tiny", "acceptance=[0.8,0.6]"], "acceptance=[0.8, 0.6]: must be 3 shares"),
        (["shapes=tiny", "acceptance=[0.8,0.6,0.7]"], "acceptance=[0.8, 0.6, 0.7]: must be 3 shares"),
        (["shapes=tiny", "acceptance=[1.8,0.6,0.3]"], "acceptance=[1.8, 0.6, 0.3]: must be 3 shares"),
        ([*SHAPES, "target=tiny"], "target: leave it out with shapes"),
        ([*SHAPES, "draft=d"], "draft.path: leave it out with shapes"),
        ([*SHAPES, "questions=q.jsonl"], "questions: leave it out with shapes"),
        ([*SHAPES, "context_lengths=null"], "context_lengths is needed"),
        ([*SHAPES, "context_lengths=[505]"], "max_tokens=8: a prompt has 505 tokens"),
        ([*SHAPES, "context_lengths=[]"], "context_lengths=[]: must be numbers from 1 on"),
        ([*SHAPES, "batch_sizes=[0]"], "batch_sizes=[0]: must be numbers from 1 on"),
        ([*SHAPES, "trees=[]"], "trees=[]: must be trees that draft"),
        ([*SHAPES, "quants=[]"], "quants=[]: must name none, int4 or fp8"),
        ([*SHAPES, "quants=[int2]"], "quant.scheme=int2: must be one of none, int4, fp8"),
        ([*SHAPES, "trees=[chain_9]"], "tree is 'chain_9'; known trees are"),
        ([*SHAPES, "drafting=best"], "drafting='best': must be one of greedy, multinomial, "),
        ([*SHAPES, "trees=[nowhere.yaml]"], "tree.table=nowhere.yaml: no such file"),
        ([*SHAPES, "rate=0"], "rate=0.0: must be above 0, or null"),
        ([*SHAPES, "repeats=0"], "repeats=0: must be at least 1"),
        ([*SHAPES, "max_tokens=1"], "max_tokens=1: must be at least 2"),
        ([], "draft is needed: give draft=DIR, or shapes"),
        (["draft=d", "acceptance=[0.5,0.5,0.5]"], "acceptance=[0.5, 0.5, 0.5]: needs shapes"),
        (["draft=nowhere"], "draft=nowhere: no config.json"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, overrides, message):
    """Before a target is loaded."""
    monkeypatch.setattr(latency, "load_target", None)
    assert call(latency.main, f"out={tmp_path}/out", *overrides) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out" / "results.json").exists()
