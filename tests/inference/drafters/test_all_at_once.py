"""Medusa heads in the engine: answers stay the target's, and drafts are those that training's passes have."""

import re
from functools import cache
from typing import Any

import pytest
import torch

from eagle_train.drafts import MedusaDraft
from eagle_train.errors import OptionError, UserError
from eagle_train.inference import DraftRound, Eagle, Engine, Pending, SamplingParams, TreePlan, dynamic, full
from eagle_train.inference.decode.named_trees import AutoTree, load_tree
from eagle_train.inference.drafters.all_at_once import AllAtOnce, _Levels
from eagle_train.inference.drafters.drafter import Choice
from eagle_train.inference.drafters.trained import drafter_of, make_eagle
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.head import LMHead, QuantisedLMHead
from eagle_train.models.target import Target
from evals.bench.tree_search import ranks_of, tpc_of
from tests.support.graph_recorder import recorded
from tests.support.inside import drafter_of as drafter_inside
from tests.support.inside import runner_of
from tests.support.tiny import (
    random_tokens,
    repeating_target,
    shared_target,
    tiny_draft,
    tiny_medusa,
    tiny_target,
    tiny_tokenizer,
    trained_medusa,
)

PROMPTS = random_tokens(5, 21, 33, 9)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
FEW = {"vocab_size": 80, "vocabulary": list(range(3, 83))}
KINDS = {"plain": {}, "two blocks, few tokens": {"num_layers": 2, **FEW}, "own heads": {"own_head": True}}
COMB = {"parents": [-1, 0, 0, 1, 1, 3, 3]}


def a_target() -> Target:
    """One whose second next token follows from its state: heads can learn it."""
    return repeating_target(0.01)


@cache
def trained(kind: str = "plain") -> MedusaDraft:
    """Heads of one block; or of two, that propose some of the tokens; or with LM heads of their own."""
    return trained_medusa(a_target(), 60, **KINDS[kind])


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@cache
def plain_answers() -> list[list[int]]:
    return tokens_of(Engine(a_target()).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("tree", ["chain3", "d2_bf3", "n8", COMB, dynamic(6, 3, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_the_targets(kind, tree):
    outputs = Engine(a_target(), trained(kind), tree, max_batch_size=3).generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == plain_answers()
    assert sum(output.stats.accepted_per_depth[0] for output in outputs) > 0


@pytest.mark.parametrize("kind", ["plain", "own heads"])
@pytest.mark.parametrize("tree", ["chain3", "d2_bf3", "n8", COMB], ids=str)
def test_a_rounds_drafts_are_those_of_trainings_passes(tree, kind):
    """Tokens per call follow from the unrolled draft's proposals, in each pass, with no engine."""
    target = a_target()
    engine = Engine(target, trained(kind), tree)
    outputs = engine.generate(PROMPTS, GREEDY)
    ranks = [
        ranks_of(target, trained(kind), prompt, output.token_ids, 5, 4)
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    found = sum(output.stats.tokens for output in outputs) / sum(output.stats.calls for output in outputs)
    assert found == pytest.approx(tpc_of(engine.dispatcher.dispatch(1).tree, ranks))
    assert sum(output.stats.accepted_per_depth[1] for output in outputs) > 0, "heads beyond the first are right"


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tree", [full(3, 2), load_tree("n8"), load_tree(COMB)], ids=["full", "pruned", "comb"])
def test_one_product_drafts_what_level_by_level_does(tree, own):
    draft = tiny_medusa(shared_target(), own_head=own)
    drafter, hidden = AllAtOnce(draft, shared_target()), torch.randn(3, 1, 32)
    states, root = drafter.run_levels(hidden, None), torch.tensor([[7], [8], [9]])
    at_once = drafter._by_rank(tree, root, states)
    by_level = drafter.grow(TreePlan(tree), states[:, :1], root, _Levels(states), Choice())
    assert torch.equal(at_once.tokens, by_level.tokens)
    assert at_once.q is None
    if own:
        head = (draft.layers[1](hidden) @ draft.lm_head[1].weight.T).topk(max(tree.fanout)).indices[:, 0]
        second = (tree.depth == 2).nonzero().flatten()
        assert torch.equal(at_once.tokens[:, second], head[:, tree.child_rank[second]])
    for rank, depth in {(int(r), int(d)) for r, d in zip(tree.child_rank[1:], tree.depth[1:], strict=True)}:
        alike = at_once.tokens[:, (tree.child_rank == rank) & (tree.depth == depth)]
        assert (alike == alike[:, :1]).all(), "the same below every parent"


def test_it_reads_the_state_behind_the_pending_token():
    """A row's other pending tokens, of rounds without drafts, change nothing."""
    drafter, generator = AllAtOnce(tiny_medusa(shared_target()), shared_target()), torch.Generator().manual_seed(0)
    hidden, counts = torch.randn(2, 3, 32, generator=generator), torch.tensor([1, 3])
    pending = Pending(torch.tensor([[7, 0, 0], [4, 5, 6]]), hidden, counts, torch.tensor([9, 9]))

    def drafted(pending: Pending) -> torch.Tensor:
        plan: Any = TreePlan(full(2, 3))
        nothing: Any = None  # it has no cache
        return drafter.propose(DraftRound(plan, nothing, nothing, pending, Choice(), 96)).tokens

    found = drafted(pending)
    assert found[:, 0].tolist() == [7, 6]
    assert torch.equal(found, drafted(pending.newest(torch.ones_like(counts), 1)))
    other = Pending(pending.tokens, hidden.roll(1, dims=1), counts, pending.lengths)
    assert not torch.equal(found, drafted(other))


def test_beside_another_drafter():
    target = a_target()
    drafters = {"heads": drafter_of(trained(), target), "eagle": Eagle(tiny_draft(target), target)}
    engine = Engine(target, drafters, "chain3", max_batch_size=4)
    names = ("heads", "eagle", "none", "heads")
    params = [SamplingParams(max_tokens=24, ignore_eos=True, drafter=name) for name in names]
    outputs = engine.generate(PROMPTS, params)
    assert tokens_of(outputs) == plain_answers()
    alone = Engine(target, trained(), "chain3").generate([PROMPTS[0]], GREEDY)
    assert outputs[0].stats.accepted_per_depth == alone[0].stats.accepted_per_depth


@pytest.mark.parametrize("drafting", ["greedy", "multinomial"])
def test_they_keep_to_a_grammar(drafting):
    target = tiny_target(tokenizer=tiny_tokenizer())
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=12, grammar={"regex": "(ab|cd){4}z"})
        for seed in range(len(PROMPTS))
    ]
    outputs = Engine(target, tiny_medusa(target), "d3_bf2", drafting=drafting).generate(PROMPTS, params)
    assert all(re.fullmatch("(ab|cd){4}z", output.text) for output in outputs)
    plain = Engine(target).generate(PROMPTS, params)
    assert sum(len(output.rounds) for output in outputs) < sum(len(output.rounds) for output in plain)
    if drafting == "greedy":
        assert tokens_of(outputs) == tokens_of(plain)


def test_prompts_in_chunks_and_prefixes_that_are_known():
    engine = Engine(a_target(), trained(), "chain3", prefill_tokens=16, prefix_cache=True)
    first, again = (engine.generate(PROMPTS, GREEDY) for _ in range(2))
    assert tokens_of(first) == tokens_of(again) == plain_answers()
    whole = Engine(a_target(), trained(), "chain3").generate(PROMPTS, GREEDY)
    for outputs in (first, again):
        assert [o.stats.accepted_per_depth for o in outputs] == [o.stats.accepted_per_depth for o in whole]


def test_rounds_without_drafts_in_between():
    """Two rows do not speculate; the remaining one does, from the newest of its tokens."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 30)]
    table = {1: "chain3", 2: {"parents": [-1]}}
    outputs = Engine(a_target(), trained(), table, max_batch_size=2).generate(PROMPTS[:2], params)
    assert outputs[1].token_ids[:24] == plain_answers()[1]
    assert sum(outputs[1].stats.accepted_per_depth) > 0


@pytest.mark.parametrize("kind", ["plain", "own heads"])
@pytest.mark.parametrize("tree", ["chain3", "d2_bf3"])
def test_rounds_can_be_recorded(tree, kind):
    eager, replayed = (Engine(a_target(), trained(kind), tree, max_batch_size=3) for _ in range(2))
    wanted = eager.generate(PROMPTS, GREEDY)
    found = recorded(replayed).generate(PROMPTS, GREEDY)
    assert [(o.token_ids, o.rounds) for o in found] == [(o.token_ids, o.rounds) for o in wanted]
    assert runner_of(replayed).graphs.drafting.made


@pytest.mark.filterwarnings("ignore:draft_lm_head=fp8")
@pytest.mark.parametrize("way", ["heads", "lm head", "own heads"])
def test_few_bits_change_no_answer(way):
    target, draft, options = a_target(), trained("own heads" if way == "own heads" else "plain"), {}
    if way == "heads":
        draft = quantise_draft(draft, Quant("fp8"))
        assert not torch.equal(draft(None, torch.ones(1, 1, 32)), trained()(None, torch.ones(1, 1, 32)))
    else:
        options = {"draft_lm_head": "fp8"}
    engine = Engine(target, draft, "chain3", **options)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == plain_answers()
    assert sum(output.stats.accepted_per_depth[0] for output in outputs) > 0
    heads = [type(head.lm_head) for head in drafter_inside(engine).heads]
    assert heads == [LMHead if way == "heads" else QuantisedLMHead] * (5 if way == "own heads" else 1)


@pytest.mark.parametrize("tree", ["chain6", AutoTree((6, 7)), {1: "chain2", 4: "d6_bf1"}, dynamic(20, 6, 2)], ids=str)
def test_trees_beyond_the_heads_are_refused(tree):
    message = r"^tree: it has [67] levels, and the draft proposes 5 tokens ahead; use chain5, say$"
    with pytest.raises(OptionError, match=message):
        Engine(a_target(), trained(), tree)


def test_auto_drafts_no_deeper_than_the_heads():
    engine = Engine(a_target(), trained(), "auto")
    assert [plan.tree.max_depth for plan in engine.dispatcher.choices(1)] == [1, 2, 3, 5]
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain_answers()


def test_no_token_is_processed_again():
    with pytest.raises(UserError, match=r"^draft\.alignment=last: draft=medusa processes no token again; must be acce"):
        make_eagle(a_target(), trained(), "last")


def test_the_kind_says_which_drafter():
    target = tiny_target()
    assert type(make_eagle(target, tiny_medusa(target))) is AllAtOnce
    assert type(make_eagle(target, tiny_draft(target), "last")) is Eagle
    assert make_eagle(target, None) is None
    assert list(drafter_of(tiny_medusa(target), target).caches) == []
