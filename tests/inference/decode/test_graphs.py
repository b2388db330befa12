"""Rounds as graphs: the same tokens and rounds as without, and all recordings before the first request."""

import copy
import random
import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_train.drafts import Draft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, Output, SamplingParams, SimulatedAcceptance, parts
from eagle_train.inference.cache.prefix import BLOCK, ZEROS
from eagle_train.inference.decode import graphs, recording
from eagle_train.inference.decode.recording import block_steps, empty_round, row_steps
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.decode.sampling import DRAFT_MODES
from eagle_train.inference.decode.tree import chain, full
from eagle_train.inference.drafters.drafter import Drafter, Needs
from eagle_train.inference.drafters.drafters import Drafters
from eagle_train.inference.drafters.eagle import ALIGNMENTS, Eagle
from eagle_train.inference.drafters.ngram import make_ngram
from eagle_train.inference.drafters.suffix import make_suffix
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.inference.runner import Runner
from eagle_train.models.target import Target
from eagle_train.ops import paged
from eagle_train.ops.graphs import Padded, Recordings
from tests.support.cache_checks import slots_of
from tests.support.graph_recorder import Recorder, recorded
from tests.support.inside import active_in, add_as, inside, pool_of, runner_of
from tests.support.random_settings import FAMILIES, check_tokens, draw_settings, engine_for, greedy
from tests.support.reference_answers import (
    GREEDY,
    PROMPTS,
    TREES,
    answers,
    cut,
    finish_without_waiting,
    guide_from_outside,
    token_ids,
)
from tests.support.tiny import FAMILIES as ALL_FAMILIES
from tests.support.tiny import random_tokens, shared_target, tiny_draft, tiny_target, tiny_tokenizer, trained_draft

PARAMS = [
    SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, ignore_eos=True)
    for seed, (temperature, top_p, max_tokens) in enumerate(
        [(0.0, 1.0, 14), (1.0, 0.9, 14), (0.7, 1.0, 1), (1.3, 1.0, 2), (0.0, 1.0, 18)]
    )
]
LATE_GREEDY = [SamplingParams(temperature=seed % 2, seed=seed, max_tokens=4 + 3 * seed) for seed in (0, 1, 3, 5, 6)]


@cache
def a_draft() -> Draft:
    return trained_draft(shared_target("llama"), steps=60)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """The least number of slots is small, so that sequences outgrow their size."""
    monkeypatch.setattr(recording, "_LEAST_SLOTS", 4 * BLOCK)


def all_of(outputs: list[Output]) -> list[tuple]:
    return [(one.token_ids, one.finish_reason, one.rounds, one.stats.calls) for one in outputs]


# --- a function of tensors


def test_what_is_recorded_is_replayed_on_what_is_given():
    calls = []

    def function(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return (x * 2)[rows].cumsum(0)

    run, rng = Recordings(Recorder()), torch.Generator().manual_seed(0)
    for _ in range(2):  # once
        run.add("one", function, [Padded(torch.zeros(1, 1), (4, 5)), Padded(torch.zeros(1, dtype=torch.long), (6,))])
    for size in (3, 1, 4, 2):
        x, rows = torch.randn(size, 5, generator=rng), torch.randint(size, (6,), generator=rng)
        found = run("one", [Padded(x, (4, 5)), Padded(rows, (6,))])
        assert torch.equal(found, (x * 2)[rows].cumsum(0))
    assert calls == [(4, 5)] * 2
    run.add("another", function, [Padded(x, (2, 5)), Padded(rows, (6,))])
    assert calls == [(4, 5)] * 2 + [(2, 5)] * 2


ASKED = {
    "item": lambda x: x.max().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0]),
    "int": lambda x: int(x[0]),
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 1],
    "number": lambda x: x + torch.tensor([1]),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_asks_for_values_cannot_be_recorded(name):
    run = Recordings(Recorder())
    with torch.inference_mode(), pytest.raises(AssertionError):
        run.add("", ASKED[name], [Padded(torch.arange(4), (4,))])


@pytest.mark.parametrize("fill", [0, 7])
def test_beyond_what_is_given_all_is_as_told(fill):
    run = Recordings(Recorder())
    run.add("", torch.clone, [Padded(torch.ones(1, 1, dtype=torch.long), (4, 4), fill)])
    for rows, columns in ((2, 3), (4, 1), (1, 4), (1, 1), (3, 4), (1, 1)):
        x = torch.full((rows, columns), 5)
        wanted = torch.full((4, 4), fill)
        wanted[:rows, :columns] = 5
        assert torch.equal(run("", [Padded(x, (4, 4), fill)]), wanted)


# --- the engine


# Each pair of a tree, a way of drafting and an alignment.
EACH = [
    (tree, drafting, (row + place) % 2) for row, tree in enumerate(TREES) for place, drafting in enumerate(DRAFT_MODES)
]


@pytest.mark.parametrize(("tree", "drafting", "is_last"), EACH)
def test_outputs_and_rounds_are_the_same(tree, drafting, is_last):
    target, options = shared_target("llama"), {"max_batch_size": 3, "drafting": drafting, "overlap": not is_last}
    eager, replayed = (Engine(target, Eagle(a_draft(), target, ALIGNMENTS[is_last]), tree, **options) for _ in range(2))
    wanted = eager.generate(PROMPTS, PARAMS)
    assert all_of(recorded(replayed).generate(PROMPTS, PARAMS)) == all_of(wanted)
    assert max(n for output in wanted for n in output.rounds) > 1  # it accepts what it drafts, now and then


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_other_switches(family):
    rng = random.Random(f"recorded {family} 0")
    at = draw_settings(rng)
    engine = recorded(engine_for(family, at, rng, guide_from_outside))
    check_tokens(engine, rng, at, *greedy(family))
    assert runner_of(engine).graphs.validation.made


@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_that_catches_up(overlap):
    """A round in which the drafter processes more tokens than a recording has room for is not recorded; later ones
    are."""
    target, params = shared_target("llama"), [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 40)]
    options = {"tree": {1: "chain3", 2: chain(0)}, "overlap": overlap, "max_batch_size": 2}
    eager, replayed = (Engine(target, Eagle(a_draft(), target), **options) for _ in range(2))
    wanted = eager.generate(PROMPTS[:2], params)
    assert all_of(recorded(replayed).generate(PROMPTS[:2], params)) == all_of(wanted)
    assert runner_of(replayed).graphs.drafting.made


@pytest.mark.parametrize("overlap", [False, True])
def test_sequences_that_give_up_their_blocks(overlap, monkeypatch):
    """Preempted sequences find some of their blocks again; the draft is aligned with the last token alone."""
    target, preempted, preempt = shared_target("llama"), [], Scheduler.preempt
    monkeypatch.setattr(Scheduler, "preempt", lambda self, one: (preempted.append(one.index), preempt(self, one)))
    options = {"max_batch_size": 3, "kv_tokens": 4 * BLOCK, "prefix_cache": True, "overlap": overlap}
    engine = recorded(Engine(target, Eagle(tiny_draft(target), target, "last"), "n8", **options))
    guide_from_outside(engine, answers("llama"), lambda sequence: sequence.index % 4)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
    assert preempted


@pytest.mark.parametrize("family", sorted(set(ALL_FAMILIES) - set(FAMILIES)))
def test_every_family_can_be_recorded(family):
    target = shared_target(family)
    engine = recorded(Engine(target, tiny_draft(target), "n8", max_batch_size=3))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers(family))


def test_without_a_draft():
    engine = recorded(Engine(shared_target("llama"), max_batch_size=3, overlap=True))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
    assert not runner_of(engine).graphs.drafting.made


# --- how often


def test_steps_of_rows():
    assert row_steps(1, [1 << 62]) == [1]
    assert row_steps(5, [1 << 62]) == [1, 2, 4, 5]
    assert row_steps(8, [8]) == [1, 2, 4, 8]
    assert row_steps(30, [3, 12, 64]) == [1, 2, 3, 4, 8, 12, 16, 24, 30]


def test_steps_of_slots(monkeypatch):
    """At most half of a table is padding, and a copy of the slots is at most twice what the cache has."""
    monkeypatch.setattr(recording, "_LEAST_SLOTS", 64)
    assert block_steps(35, 100, 1) == [35, 18, 9, 5, 3]
    assert block_steps(35, 100, 8) == [18, 9, 5, 3]
    assert block_steps(4, 4, 1) == [4]


def test_all_is_recorded_at_the_start():
    """For each number of rows the dispatcher's tree, and of each drafting mode. No round adds any; each is replayed."""
    target, sizes = shared_target("llama"), []
    table = {1: "n8", 3: "chain3", 5: full(1, 2)}
    engine = recorded(Engine(target, a_draft(), table, max_batch_size=5, drafting="multinomial", kv_tokens=30 * BLOCK))
    drafting, validation = runner_of(engine).graphs.drafting, runner_of(engine).graphs.validation
    wanted = {(rows, engine.dispatcher.dispatch(rows).tree) for rows in (1, 2, 3, 4, 5)}
    assert {(rows, form.plan) for (rows, _), form in validation.made} == wanted
    assert {(rows, plan.tree) for (rows, _), plan, *_ in drafting.made} == wanted
    assert len(drafting.made) == 2 * len(validation.made)
    assert len({slots for (_, slots), _ in validation.made}) > 1
    made, draft = list(drafting.made), runner_of(engine).draft

    def noted(inputs):
        sizes.append((len(active_in(engine)), inputs.sampling.all_greedy))
        return draft(inputs)

    runner_of(engine).draft = noted
    engine.generate(random_tokens(40, 30, 17, 9, 1), LATE_GREEDY)
    assert list(drafting.made) == made
    assert drafting.record.replays == validation.record.replays == len(sizes)
    assert {size for size, _ in sizes} == {1, 2, 3, 4, 5}
    assert {greedy for _, greedy in sizes} == {False, True}


def test_a_block_table_that_is_read_where_it_lies_has_one_size(monkeypatch):
    """Where attention copies no slots, their number makes no difference."""

    def in_place(q, keys, values, table, block, first, ends, scale, softcap=None):
        slots = (table[:, :, None] * block + torch.arange(block)).flatten(1)
        k, v = (
            store[slots].transpose(1, 2).repeat_interleave(q.shape[1] // store.shape[1], 1) for store in (keys, values)
        )
        place = torch.arange(slots.shape[1])
        seen = (place >= first[..., None]) & (place < ends[..., None])
        scores = (q @ k.mT * scale).masked_fill(~seen[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        return (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v.masked_fill(v.isnan(), 0), lse

    monkeypatch.setattr(paged, "supports", lambda *_: True)
    monkeypatch.setattr(paged, "paged_attention", in_place)
    engine = recorded(Engine(shared_target("llama"), tiny_draft(shared_target("llama")), "n8", max_batch_size=3))
    guide_from_outside(engine, answers("llama"), lambda _: 2)
    sizes = {size for size, _ in runner_of(engine).graphs.validation.made}
    assert sizes == {(rows, 144) for rows in (1, 2, 3)}  # the context, 128, and two rounds
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))


RECORDED = ("drafting", "validation", "sampling")  # stages


class Launches(TorchDispatchMode):
    """The names of the operations that the host launches."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("acceptance", [None, SimulatedAcceptance([0.7, 0.3])])
def test_what_is_pending_outlives_the_next_replay(acceptance):
    """A drafter may use it rounds later, where nothing is drafted in between."""
    engine, kept = Engine(shared_target("llama"), a_draft(), "chain3", max_batch_size=3, acceptance=acceptance), []
    run = runner_of(recorded(engine)).run

    def keeping(inputs):
        pending, result = run(inputs)
        tensors = (pending.tokens, pending.hidden, pending.counts, pending.lengths)
        kept.extend((x, x.clone()) for x in tensors)
        return pending, result

    runner_of(engine).run = keeping
    engine.generate(PROMPTS, PARAMS)
    assert len(kept) > 8
    assert all(torch.equal(now, then) for now, then in kept)


@pytest.mark.parametrize("drafting", DRAFT_MODES)
def test_each_kind_of_sampling_is_recorded(drafting):
    """A round is three replays, whatever its rows ask for."""
    options = {"drafting": drafting, "max_batch_size": 2}
    eager, replayed = (Engine(shared_target("llama"), a_draft(), "n8", **options) for _ in range(2))
    graphs = runner_of(recorded(replayed)).graphs
    each_kind = [(0.0, 5, 0.5, 0.5), (1.0, 0, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 5, 1.0, 0.0), (0.8, 9, 0.9, 0.0)]
    each_kind += [(1.5, 0, 1.0, 0.1), (1.5, 9, 0.9, 0.1)]
    for temperature, top_k, top_p, min_p in each_kind:
        params = SamplingParams(temperature, top_p, top_k, min_p=min_p, max_tokens=9, seed=3, ignore_eos=True)
        wanted = eager.generate(PROMPTS[:2], params)
        before = [each.record.replays for each in (graphs.drafting, graphs.validation, graphs.ends)]
        assert all_of(replayed.generate(PROMPTS[:2], params)) == all_of(wanted)
        after = [each.record.replays for each in (graphs.drafting, graphs.validation, graphs.ends)]
        rounds = max(len(one.rounds) for one in wanted)
        assert [now - then for now, then in zip(after, before, strict=True)] == [rounds] * 3
    kinds = {kind for _, _, kind in graphs.ends.made}
    assert len(kinds) == 5
    assert {kind.is_drawn for kind in kinds if not kind.all_greedy} == {drafting != "greedy"}


def test_what_others_decide_is_not_recorded():
    """Of a drafter that may have the host wait, validation is recorded alone."""
    params, prompts = SamplingParams(max_tokens=8, ignore_eos=True), PROMPTS[:2]
    eager, replayed = (Engine(shared_target("llama"), Own(a_draft()), "chain3", max_batch_size=2) for _ in range(2))
    wanted, graphs = eager.generate(prompts, params), runner_of(recorded(replayed)).graphs
    assert all_of(replayed.generate(prompts, params)) == all_of(wanted)
    assert graphs.validation.record.replays > 0
    assert graphs.drafting.record.replays == 0
    assert not graphs.ends.made


class Faulty(Eagle):
    """A user's drafter that never proposes anything."""

    needs = Needs()

    def propose(self, round):
        raise ValueError("a bug")


def test_among_several_drafters_a_round_without_drafts_is_one():
    """The only request's drafter raises; or there is nothing to read any more."""
    target, params = shared_target("llama"), SamplingParams(max_tokens=6, ignore_eos=True)
    plain = Engine(target).generate(PROMPTS[:1], params)
    drafters = {"eagle": a_draft(), "own": Faulty(a_draft(), target)}
    engine = recorded(Engine(target, drafters, "chain3", max_batch_size=2))
    with pytest.warns(UserWarning, match="a bug"):
        outputs = engine.generate(PROMPTS[:1], replace(params, drafter="own"))
    assert outputs[0].token_ids == plain[0].token_ids
    both = {"eagle": a_draft(), "ngram": make_ngram(target, None)}
    engine = recorded(Engine(target, both, {2: "chain0", 4: "chain3"}, max_batch_size=4))
    asked = [replace(params, max_tokens=32), replace(params, max_tokens=40, drafter="ngram")]
    assert [len(each.token_ids) for each in engine.generate(PROMPTS[:2], asked)] == [32, 40]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_simulated_acceptance_is_recorded(drafts):
    """By each request's seed and position, as they are when it is replayed; and of plain decoding, where it is none."""
    params = [SamplingParams(max_tokens=12, ignore_eos=True, seed=seed) for seed in range(3)]
    simulated, draft = SimulatedAcceptance([1.0, 0.6, 0.0]), a_draft() if drafts else None
    options = {"acceptance": simulated, "max_batch_size": 3}
    eager, replayed = (Engine(shared_target("llama"), draft, "chain3", **options) for _ in range(2))
    wanted, graphs = eager.generate(PROMPTS[:3], params), runner_of(recorded(replayed)).graphs
    found = replayed.generate(PROMPTS[:3], params)
    assert all_of(found) == all_of(wanted)
    assert {tokens for one in found for tokens in one.rounds[:-1]} == ({2, 3} if drafts else {1})
    assert graphs.ends.record.replays == graphs.validation.record.replays > 0


class Own(Eagle):
    """A user's drafter, which may wait."""

    needs = Needs()

    def __init__(self, draft: Draft):
        super().__init__(copy.deepcopy(draft), shared_target("llama"))


def test_a_round_that_was_recorded_is_copies_and_replays():
    options = {"overlap": True, "max_batch_size": 5}
    engine, launches = recorded(Engine(shared_target("llama"), a_draft(), "n8", **options)), Launches()
    stage = engine.stage_times.stage

    @contextmanager
    def watched(name: str):
        with stage(name), launches if name in RECORDED else nullcontext():
            yield

    wanted = engine.generate(PROMPTS, PARAMS)
    engine.stage_times.stage = watched
    with (
        patch.object(Eagle, "propose"),
        patch.object(Runner, "forward"),
        patch.object(Runner, "verify"),
    ):  # nobody calls them any more
        assert all_of(engine.generate(PROMPTS, PARAMS)) == all_of(wanted)
    sent = {"lift_fresh", "detach_", "to"}  # where nothing is under way, the host tells how much the draft has read
    assert launches.names <= {"slice", "alias", "copy_", "clone", "fill_", "add", "sub"} | sent, launches.names


def test_the_cache_stays_where_it_is():
    """What a request alone has no room for is refused; others wait."""
    engine = recorded(Engine(shared_target("llama"), max_batch_size=2))
    memory = [x.data_ptr() for x in inside(engine).memory.by_block]
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
    assert [x.data_ptr() for x in inside(engine).memory.by_block] == memory
    assert pool_of(engine).total == 2 * 10  # of a context of 128, two rounds of one token, and one that is kept free
    small = Engine(shared_target("llama"), max_batch_size=2)
    inside(small).memory.affordable = lambda: 3
    recorded(small)
    assert token_ids(small.generate(PROMPTS[:2], GREEDY)) == cut(answers("llama")[:2])
    with pytest.raises(UserError, match=r"^kv_tokens=None: prompt 0 and its answer need 64, and the device had .* 48$"):
        small.generate([[1] * 40], SamplingParams(max_tokens=20))


def test_how_many_there_are_is_told(caplog):
    with caplog.at_level("INFO"):
        engine = recorded(Engine(shared_target("llama"), a_draft(), max_batch_size=2))
    graphs = runner_of(engine).graphs
    count = sum(len(each.made) for each in (graphs.drafting, graphs.validation, graphs.ends))
    assert re.search(rf"\b{count} CUDA graphs recorded in \d+\.\d s$", caplog.text, re.MULTILINE)
    assert f"CUDA graph {count}/{count}" in caplog.text


# --- where the host has a part in it


def guided(*temperatures: float) -> list[SamplingParams]:
    """A row without a grammar, which goes on alone at the end, and rows with one; one of them to its longest answer."""
    grammar = {"regex": "[a-z]{3,9}"}
    own = [SamplingParams(max_tokens=9, temperature=t, seed=3, grammar=grammar) for t in temperatures]
    return [SamplingParams(max_tokens=20, temperature=1.0, seed=7), *own, replace(own[-1], ignore_eos=True)]


@pytest.mark.parametrize("tree", [None, *TREES, DynamicTree(6, 3, 2)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_with_a_grammar_are_recorded(tree, overlap):
    """The host computes masks in pauses."""
    target, params = tiny_target("llama", tiny_tokenizer()), guided(0.0, 1.0)
    draft = None if tree is None else tiny_draft(target)
    eager, replayed = (Engine(target, draft, tree or "chain3", max_batch_size=4, overlap=overlap) for _ in range(2))
    wanted, graphs = eager.generate(PROMPTS[:4], params), runner_of(recorded(replayed)).graphs
    with patch.object(Runner, "forward"), patch.object(Runner, "propose"), patch.object(Runner, "sample"):
        assert all_of(replayed.generate(PROMPTS[:4], params)) == all_of(wanted)  # nobody calls them any more
    rounds = graphs.validation.record.replays
    assert rounds == graphs.ends.record.replays > 0
    assert graphs.drafting.record.replays == (0 if tree is None else rounds)


@pytest.mark.parametrize("drafting", DRAFT_MODES)
def test_drafts_under_a_grammar_are_drawn_as_without_graphs(drafting):
    target, params = tiny_target("llama", tiny_tokenizer()), guided(1.0, 0.7)
    eager, replayed = (Engine(target, tiny_draft(target), "n8", max_batch_size=4, drafting=drafting) for _ in range(2))
    wanted = eager.generate(PROMPTS[:4], params)
    assert all_of(recorded(replayed).generate(PROMPTS[:4], params)) == all_of(wanted)


def row_drafters(target: Target) -> dict[str, Any]:
    """By name, drafters whose trees differ by row: chains, trees, several in one batch, and trees that grow."""
    ngram = {"max_draft_len": 4, "max_matching_ngram_size": 2}
    return {
        "ngram": (make_ngram(target, None, **ngram), "chain3"),
        "suffix": (make_suffix(target, None, max_nodes=6), "chain3"),
        "both": ({"eagle": Eagle(a_draft(), target), "ngram": make_ngram(target, None, **ngram)}, "n8"),
        "dynamic": (Eagle(a_draft(), target), DynamicTree(7, 3, 2)),
    }


@pytest.mark.parametrize("name", ["chain", "ngram", "suffix"])
def test_trees_may_be_longer_than_a_block(name):
    target, most = shared_target("llama"), 2 * BLOCK + 3
    drafters = {
        "chain": lambda: Eagle(a_draft(), target),
        "ngram": lambda: make_ngram(target, None, max_draft_len=most),
        "suffix": lambda: make_suffix(target, None, max_nodes=most),
    }
    eager, replayed = (Engine(target, drafters[name](), f"chain{most}", max_batch_size=2) for _ in range(2))
    wanted = eager.generate(PROMPTS[:2], GREEDY)
    assert all_of(recorded(replayed).generate(PROMPTS[:2], GREEDY)) == all_of(wanted)
    plan = replayed.dispatcher.dispatch(1)
    for pending in (1, BLOCK):  # a GPU's attention reads the table as far as the tree's nodes see
        prefix = empty_round(runner_of(replayed), plan, pending=pending).prefix
        assert prefix.blocks.shape[1] * BLOCK >= pending + plan.tree.num_nodes


@pytest.mark.parametrize("name", ["ngram", "suffix", "both", "dynamic"])
@pytest.mark.parametrize("overlap", [False, True])
def test_trees_that_differ_by_row_are_inputs_of_a_recording(name, overlap):
    """The target's forward is recorded with every drafter, and the whole round where drafting is on the device."""
    target, prompts = shared_target("llama"), [prompt * 3 for prompt in PROMPTS]
    params = [replace(each, max_tokens=14) for each in PARAMS]
    if name == "both":
        params = [replace(each, drafter=(None, "ngram", "none")[row % 3]) for row, each in enumerate(params)]
    engines = []
    for _ in range(2):
        drafter, tree = row_drafters(target)[name]
        engines.append(Engine(target, drafter, tree, max_batch_size=3, overlap=overlap))
    eager, replayed = engines
    wanted, graphs = eager.generate(prompts, params), runner_of(recorded(replayed)).graphs
    with patch.object(Runner, "forward"):  # nobody calls it any more
        assert all_of(replayed.generate(prompts, params)) == all_of(wanted)
    assert any(gain > 1 for output in wanted for gain in output.rounds)
    rounds = graphs.validation.record.replays if name == "dynamic" else 0
    assert graphs.drafting.record.replays == graphs.ends.record.replays == rounds


def test_graphs_need_a_gpu():
    with pytest.raises(UserError, match=r"^graphs=True: needs a GPU; the device is cpu$"):
        Engine(shared_target("llama"), graphs=True)


def test_targets_that_have_the_host_wait_are_refused():
    """Before anything is compiled."""
    target = tiny_target("llama")
    with patch.object(Target, "device", torch.device("cuda")):
        with (
            patch.object(target, "together", object()),
            patch.object(graphs.dist, "get_backend_config", lambda _: "cpu:gloo,cuda:gloo"),
            pytest.raises(UserError, match=r"^graphs=True: the target's ranks do not talk by NCCL, .*; must be False$"),
        ):
            Engine(target, graphs=True, compile=True)
        with (
            patch.object(Target, "is_offloaded", True),
            pytest.raises(UserError, match=r"^graphs=True: the target is offloaded, .*; must be False$"),
        ):
            Engine(target, graphs=True, compile=True)
    with patch.object(graphs.dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl"):
        graphs.check_graphs(True, "cuda", object())


class Uses(NamedTuple):
    """What an engine does by default."""

    graphs: bool = True
    device: str = "cuda"
    family: str = "llama"
    draft: dict[str, Any] | None = None
    together: Any = None
    is_offloaded: bool = False
    quantization_config: dict[str, Any] | None = None


@pytest.mark.parametrize(
    "case",
    [
        Uses(),
        Uses(draft={}),
        Uses(False, device="cpu"),
        Uses(False, family="qwen3_moe"),
        Uses(False, draft={"ffn": "moe", "num_experts": 2}),
        Uses(False, together=object()),
        Uses(False, is_offloaded=True),
        Uses(False, quantization_config={"quant_method": "fp8"}),
    ],
)
def test_they_are_recorded_on_a_gpu_unless_something_prevents_it(case):
    target = tiny_target(case.family)
    drafter = None if case.draft is None else Eagle(tiny_draft(target, **case.draft), target)
    ours = Drafters({} if drafter is None else {"eagle": drafter}, Ranks(), 32)
    target.together = case.together
    target.config.quantization_config = case.quantization_config
    with (
        patch.object(Target, "device", torch.device(case.device)),
        patch.object(Target, "is_offloaded", case.is_offloaded),
    ):
        assert parts._uses_graphs(None, target, ours) is case.graphs
        assert parts._uses_graphs(not case.graphs, target, ours) is not case.graphs
        alone, waiting = Drafters({}, Ranks(), 32), Drafters({"own": Drafter()}, Ranks(), 32)
        of_target = parts._uses_graphs(None, target, alone)
        assert parts._uses_graphs(None, target, waiting) is of_target, "the target's forward is recorded alone"


# --- what is beside the rows


@pytest.mark.parametrize("tree", TREES)
def test_rows_that_are_not_there_write_nowhere(tree):
    """Three rows in a graph of four, then one in one of two, ...: padding rows change no slot that is in use or
    cached."""
    target, rng = shared_target("llama"), random.Random(0)
    engine = recorded(Engine(target, tiny_draft(target), tree, max_batch_size=4, kv_tokens=24 * BLOCK))
    guide_from_outside(engine, answers("llama"), lambda _: rng.randint(0, 3))
    for index, length in enumerate((20, 3, 12, 5, 9)):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        add_as(engine, index, PROMPTS[index], params)
    alone = []
    while engine.has_unfinished:
        free = set(pool_of(engine).free) | {ZEROS}
        read = [slot for each in active_in(engine) for slot in slots_of(each)[: each.num_computed]]
        before = [tensor.flatten(1, 2).clone() for tensor in inside(engine).memory.by_block]
        engine.step()
        free &= set(pool_of(engine).free) | {ZEROS}
        kept = [block * BLOCK + i for block in free for i in range(BLOCK)] + read
        for was, now in zip(before, inside(engine).memory.by_block, strict=True):
            assert torch.equal(was[:, kept], now.flatten(1, 2)[:, kept])
        alone.append(len(active_in(engine)) == 3)
    assert any(alone)


# --- CUDA's own


EXPERTS = ["llama4", "qwen3_moe", "gpt_oss", "mixtral"]  # on whose numbers the host waits, but in bf16


@cache
def on_gpu(family: str, dtype: torch.dtype = torch.float32) -> Target:
    model = shared_target(family).model
    target = type(model)(model.config).cuda()
    target.load_state_dict(model.state_dict())
    return Target(target.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("family", EXPERTS)
def test_gpu_gives_experts_the_same_tokens(family):
    target, options = on_gpu(family, torch.bfloat16), {"max_batch_size": 3}
    eager, replayed = (
        Engine(target, tiny_draft(target).bfloat16(), "n8", graphs=graphs, **options) for graphs in (False, True)
    )
    wanted = all_of(eager.generate(PROMPTS, GREEDY))
    for _ in range(2):
        assert all_of(replayed.generate(PROMPTS, GREEDY)) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("family", [family for family in ALL_FAMILIES if family not in EXPERTS])
@pytest.mark.parametrize("tree", TREES)
def test_gpu_gives_the_same_tokens(family, tree):
    engine = Engine(on_gpu(family), tiny_draft(shared_target(family)), tree, max_batch_size=3, graphs=True)
    for _ in range(2):
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers(family))
    assert runner_of(engine).graphs.drafting.made
    assert runner_of(engine).graphs.validation.made


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafting", DRAFT_MODES)
@pytest.mark.parametrize("overlap", [False, True])
def test_gpu_gives_what_it_gives_without_graphs(tree, drafting, overlap):
    target, options = on_gpu("llama"), {"max_batch_size": 3, "drafting": drafting, "overlap": overlap}
    for alignment in ALIGNMENTS:
        eager, replayed = (
            Engine(target, Eagle(copy.deepcopy(a_draft()), target, alignment), tree, graphs=graphs, **options)
            for graphs in (False, True)
        )
        wanted = all_of(eager.generate(PROMPTS, PARAMS))
        for _ in range(2):
            assert all_of(replayed.generate(PROMPTS, PARAMS)) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ngram", "suffix", "both", "dynamic"])
@pytest.mark.parametrize("overlap", [False, True])
def test_gpu_records_trees_that_differ_by_row(name, overlap):
    target, prompts = on_gpu("llama"), [prompt * 3 for prompt in PROMPTS]
    wanted = None
    for is_recorded in (False, True, True):
        drafter, tree = row_drafters(target)[name]
        engine = Engine(target, drafter, tree, max_batch_size=3, overlap=overlap, graphs=is_recorded)
        found = [(one.token_ids, one.rounds) for one in engine.generate(prompts, GREEDY)]
        wanted = wanted or found
        assert found == wanted
    assert runner_of(engine).graphs.validation.made


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [*TREES, DynamicTree(6, 3, 2)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_gpu_records_rounds_with_a_grammar(tree, overlap):
    whole = tiny_target("llama", tiny_tokenizer())
    target = Target(copy.deepcopy(whole.model).cuda(), tokenizer=whole.tokenizer)
    params, draft = guided(0.0, 1.0), tiny_draft(whole)
    eager, replayed = (
        Engine(target, copy.deepcopy(draft).cuda(), tree, max_batch_size=4, overlap=overlap, graphs=graphs)
        for graphs in (False, True)
    )
    wanted = all_of(eager.generate(PROMPTS[:4], params))
    for _ in range(2):
        with patch.object(Runner, "forward"), patch.object(Runner, "sample"):  # nobody calls them any more
            assert all_of(replayed.generate(PROMPTS[:4], params)) == wanted


@pytest.mark.gpu
def test_gpu_forgets_an_engine_while_another_one_is_recorded():
    """Graphs that are garbage must not be destroyed in a recording."""
    target = on_gpu("llama")
    for _ in range(6):
        engine = Engine(target, copy.deepcopy(a_draft()), "n8", max_batch_size=3, graphs=True)
        engine.itself = engine  # so that it waits for the collector
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
def test_gpu_records_compiled_forwards(tree):
    engine = Engine(on_gpu("llama"), a_draft(), tree, max_batch_size=3, graphs=True, compile=True)
    for _ in range(2):
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
def test_gpu_is_not_waited_for_in_a_round_that_is_replayed(tree):
    engine = Engine(on_gpu("llama"), tiny_draft(shared_target("llama")), tree, graphs=True)
    wanted = token_ids(engine.generate(PROMPTS, GREEDY))
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    finish_without_waiting(engine)
    assert [request.generated for request in requests] == wanted
