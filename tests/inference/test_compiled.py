"""Compiled forwards: the same tokens, from graphs that were all compiled at the start, while requests come and go."""

import random
import shutil
from functools import cache

import pytest
import torch
from torch._inductor import config as inductor

from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.drafters.ngram import make_ngram
from eagle_train.models.target import Target
from eagle_train.ops.attention import causal_attention
from eagle_train.ops.compiled import Compiled
from eagle_train.ops.rule import Attend, Rule
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, answers, cut, guide, token_ids
from tests.support.tiny import (
    FAMILIES,
    continued,
    shared_target,
    tiny_draft,
    tiny_target,
    trained_draft,
    trained_medusa,
    trained_peagle,
)

MOST = 4  # graphs of a forward
SEEDED = SamplingParams(temperature=0.2, seed=5, max_tokens=24, ignore_eos=True)


def fresh(target: Target) -> Target:
    """The same, of which nothing is compiled any more."""
    target.compiled_forwards.clear()
    return target


@cache
def shallow(layers: int = 1) -> Target:
    """How many graphs there are does not depend on its layers, and how long they take does."""
    return tiny_target(num_hidden_layers=layers)


@cache
def its_answers(layers: int = 1) -> list[list[int]]:
    """As `answers`, of `shallow`."""
    return [continued(shallow(layers), prompt, LENGTH + 10) for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_one_graph(family, graphs):
    engine = Engine(fresh(shared_target(family)), max_batch_size=1, compile=True)
    assert len(graphs) == 1
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers(family))
    assert len(graphs) == 1


def test_alone(graphs):
    """The target's tree; the draft's forwards of one token, of several nodes and of several accepted tokens."""
    target, rng = fresh(shallow()), random.Random(0)
    engine = Engine(target, tiny_draft(target, num_layers=1), "d3_bf2", max_batch_size=1, compile=True)
    assert len(graphs) == 4
    guide(engine, its_answers(), lambda _: rng.randint(0, 3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(its_answers())
    assert {n for output in outputs for n in output.rounds} == {1, 2, 3, 4}
    assert len(graphs) == 4


def test_heads_that_draft_all_levels_at_once(traced):
    target = fresh(shallow())
    engine = Engine(target, trained_medusa(target, 10), "d3_bf2", max_batch_size=3, compile=True)
    made = len(traced)
    assert made == 4  # one row and several, of the target's tree and of the heads
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(its_answers())
    assert len(traced) == made


@pytest.mark.parametrize("table", ["d3_bf2", {1: "d1_bf2", 2: {"parents": [-1]}, 3: "chain4"}], ids=str)
def test_slots_that_draft_all_levels_in_one_pass(traced, table):
    target, rng = fresh(shallow(2)), random.Random(0)
    engine = Engine(target, trained_peagle(target, 10), table, max_batch_size=3, compile=True)
    made = len(traced)
    guide(engine, its_answers(2), lambda _: rng.randint(0, 3))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(its_answers(2))
    assert len(traced) == made


def test_rows_that_come_and_go(traced):
    """Batches of one to three rows."""
    target, rng, table = fresh(shallow()), random.Random(0), {1: "n8", 3: "chain1"}
    engine = Engine(target, tiny_draft(target, num_layers=1), table, max_batch_size=3, compile=True)
    made = len(traced)
    assert made <= 2 * MOST
    guide(engine, its_answers(), lambda _: rng.randint(0, 3))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(its_answers())
    assert len(traced) == made


def test_a_draft_that_catches_up(traced):
    """Two rows do not speculate; the remaining one does, after its draft has caught up."""
    target, params = fresh(shallow()), [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 30)]
    table = {1: "chain3", 2: {"parents": [-1]}}
    engine = Engine(target, tiny_draft(target, num_layers=1), table, max_batch_size=2, compile=True)
    made = len(traced)
    eager = Engine(target, tiny_draft(target, num_layers=1), table, max_batch_size=2)
    assert token_ids(engine.generate(PROMPTS[:2], params)) == token_ids(eager.generate(PROMPTS[:2], params))
    assert len(traced) == made


def test_drafts_of_any_length_and_none(traced):
    """What looks texts up drafts as many tokens as it finds, and often none."""
    target, lengths = fresh(shallow()), set()
    drafter = make_ngram(target, None, max_draft_len=3, max_matching_ngram_size=1)
    engine = Engine(target, drafter, "chain3", max_batch_size=2, compile=True)
    made, propose = len(traced), drafter.propose

    def noted(round):
        drafted = propose(round)
        lengths.add(drafted.tokens.shape[1])
        return drafted

    drafter.propose = noted
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(its_answers())
    assert {1, 4} <= lengths
    assert len(traced) == made


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_a_part_of_a_tensor_is_what_was_prepared_for(traced, rows):
    """One row's, or one token's, counts as contiguous, with the strides of the whole: half of a draft's states, say."""

    def attended(tokens: torch.Tensor, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        return attend(0, *3 * [x.unsqueeze(1)], Rule(1.0)).squeeze(1)

    forward = Compiled(attended, "cpu")
    forward.prepare(torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, 1, 16))
    made, states = len(traced), torch.randn(rows, 5, 32)
    for place in range(5):
        x = states[:, place : place + 1, 16:]
        found = forward(torch.zeros(rows, 7, dtype=torch.long)[:, :1], x, lambda _, q, k, v, rule: v.clone())
        assert torch.equal(found, x)
    assert len(traced) == made > 0


def test_engines_share_a_targets_graphs_and_nothing_else(traced):
    one, other = (tiny_target(num_hidden_layers=1, seed=seed) for seed in (0, 1))
    good, poor = trained_draft(one, first_token="skip"), tiny_draft(one, num_layers=1)
    for target, draft, forwards in ((one, good, 1 + 2), (one, poor, 2), (other, None, 1)):
        before = len(traced)
        ours, plain = (Engine(target, draft, "chain3", max_batch_size=1, compile=c) for c in (True, False))
        assert len(traced) == before + forwards
        outputs = plain.generate(PROMPTS, SEEDED)
        found = ours.generate(PROMPTS, SEEDED)
        assert token_ids(found) == token_ids(outputs)
        assert [output.rounds for output in found] == [output.rounds for output in outputs]
        assert draft is not good or any(max(output.rounds) > 1 for output in outputs), "some drafts must be accepted"


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_by_torchs_own_compiler():
    """Two layers; the second attends over what the first has cached."""
    kept = []

    def forward(x: torch.Tensor, attend: Attend) -> torch.Tensor:
        for layer in range(2):
            x = x + attend(layer, *[x.unflatten(-1, (2, 8)).transpose(1, 2) * n for n in (1, 2, 3)], Rule(0.5)).mean()
        return x

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        assert layer == len(kept)
        kept.append(k.clone())
        return causal_attention(q, torch.stack(kept).sum(0), v, rule)

    x = torch.randn(1, 3, 16)
    plain = forward(x, attend)
    kept.clear()
    torch.testing.assert_close(Compiled(forward, "cpu")(x, attend), plain)


def test_without_a_compiler_nothing_is_asked_of_it():
    broken = inductor.patch({"cpp.cxx": ("/nowhere/c++",), "fx_graph_cache": False})
    with broken, pytest.raises(UserError, match=r"^compile=True: torch.compile fails: .+") as failed:
        Engine(tiny_target(num_hidden_layers=1), max_batch_size=1, compile=True)
    assert "\n" not in str(failed.value)


def test_where_nothing_compiled_can_be_written_it_is_one_line(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(UserError, match=r"^compile=True: torch\.compile fails: "):
        Engine(tiny_target(num_hidden_layers=1), max_batch_size=1, compile=True)
