"""P-EAGLE drafts in the engine: answers stay the target's, and drafts are those that training's passes have."""

import re
from functools import cache

import pytest
import torch

from eagle_train.drafts import PeagleDraft
from eagle_train.errors import OptionError, UserError
from eagle_train.inference import Eagle, Engine, Pending, SamplingParams, TreePlan, chain, dynamic, full
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH, ContiguousPrefix, PagedPrefix, Prefix
from eagle_train.inference.decode.named_trees import AutoTree, load_tree
from eagle_train.inference.drafters.all_at_once import _Levels
from eagle_train.inference.drafters.drafter import Choice, DraftRound
from eagle_train.inference.drafters.one_pass import OnePass
from eagle_train.inference.drafters.trained import drafter_of, make_eagle
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.target import Target
from eagle_train.ops.rule import Attend
from evals.bench.tree_search import ranks_of, tpc_of
from tests.support.graph_recorder import recorded
from tests.support.inside import runner_of
from tests.support.tiny import (
    random_tokens,
    repeating_target,
    shared_target,
    tiny_draft,
    tiny_peagle,
    tiny_target,
    tiny_tokenizer,
    trained_peagle,
)

PROMPTS = random_tokens(5, 21, 33, 9)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
COMB = {"parents": [-1, 0, 0, 1, 1, 3, 3]}


def a_target() -> Target:
    """One whose second next token follows from its state: mask slots can learn it."""
    return repeating_target(0.01)


@cache
def trained(is_other: bool = False) -> PeagleDraft:
    """Of one layer; or of two, with a slot for the first token too, and some of the tokens."""
    some = {"vocab_size": 80, "vocabulary": list(range(3, 83))}
    other = {"num_layers": 2, "first_token": "self_fusion", "fc_norm": True, "mask_token": 5, **some}
    return trained_peagle(a_target(), 60, **(other if is_other else {}))


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@cache
def plain_answers() -> list[list[int]]:
    return tokens_of(Engine(a_target()).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("tree", ["chain4", "d2_bf3", "n8", COMB, dynamic(6, 3, 2)], ids=str)
@pytest.mark.parametrize("is_other", [False, True])
def test_greedy_answers_are_the_targets(is_other, tree):
    outputs = Engine(a_target(), trained(is_other), tree, max_batch_size=3).generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == plain_answers()
    assert sum(output.stats.accepted_per_depth[0] for output in outputs) > 0


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tree", ["chain4", "d1_bf3", "d2_bf3", "n8", COMB], ids=str)
@pytest.mark.parametrize("is_other", [False, True])
def test_a_rounds_drafts_are_those_of_trainings_passes(is_other, tree, rows):
    """Tokens per call follow from the unrolled draft's proposals, in each pass, with no engine. Rows of a batch accept
    different numbers, so that mask slots stand where others have pending tokens."""
    target, draft = a_target(), trained(is_other)
    engine = Engine(target, draft, tree, max_batch_size=rows)
    outputs = engine.generate(PROMPTS, GREEDY)
    ranks = [
        ranks_of(target, draft, prompt, output.token_ids, 5, 4) for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    found = sum(output.stats.tokens for output in outputs) / sum(output.stats.calls for output in outputs)
    plan = engine.dispatcher.dispatch(1).tree
    assert found == pytest.approx(tpc_of(plan, ranks))
    if plan.max_depth > 1:
        assert sum(output.stats.accepted_per_depth[1] for output in outputs) > 0, "mask slots are right"


@pytest.mark.parametrize("tree", [full(3, 2), load_tree("n8"), load_tree(COMB)], ids=["full", "pruned", "comb"])
def test_one_product_drafts_what_level_by_level_does(tree):
    drafter = OnePass(tiny_peagle(shared_target()), shared_target())
    states, root = torch.randn(3, 8, 32), torch.tensor([[7], [8], [9]])
    at_once = drafter._by_rank(tree, root, states)
    by_level = drafter.grow(TreePlan(tree), states[:, :1], root, _Levels(states), Choice())
    assert torch.equal(at_once.tokens, by_level.tokens)
    assert at_once.q is None


def round_of(drafter: OnePass, pending: Pending, depth: int = 3) -> DraftRound:
    """In a cache with a block of its own for each row, whose keys before the pending tokens are random, but alike."""
    rows, generator = len(pending.counts), torch.Generator().manual_seed(3)
    drafter.use_cache(drafter.draft.config.num_kv_heads)
    cache = drafter.cache
    cache.hold([torch.randn(len(x), 2 * BLOCK, *x.shape[2:], generator=generator) for x in cache.memory])
    own = [x[:, BLOCK:].repeat(1, rows, 1, 1) for x in cache.memory]
    cache.hold([torch.cat((x, one), 1) for x, one in zip(cache.memory, own, strict=True)])
    blocks = torch.arange(2, 2 + rows).unsqueeze(1)
    before = pending.draft_lengths
    prefix = PagedPrefix(before, blocks, int(before.max()), len(set(before.tolist())) > 1, int(before.min()))
    return DraftRound(TreePlan(chain(depth)), prefix.advanced(1), prefix, pending, Choice(), 96)


def within_blocks(drafter: OnePass) -> list[int]:
    """The positions that were attended at, each found to have a column in its block table, which a GPU's kernel reads
    unseen."""
    extend, seen = drafter.cache.extend, list[int]()

    def checked(prefix: Prefix, positions: torch.Tensor) -> Attend:
        assert int(positions.max()) < prefix.blocks.shape[1] * BLOCK
        seen.append(int(positions.max()))
        return extend(prefix, positions)

    drafter.cache.extend = checked
    return seen


def test_padding_of_a_row_changes_nothing():
    """A row with fewer pending tokens than another has mask slots in their places, also where its blocks end."""
    target = shared_target()
    drafter, generator = OnePass(tiny_peagle(target), target), torch.Generator().manual_seed(0)
    width = 32 * 3
    hidden, counts = torch.randn(2, 4, width, generator=generator), torch.tensor([1, 4])
    pending = Pending(torch.tensor([[7, 0, 0, 0], [4, 5, 6, 8]]), hidden, counts, torch.tensor([13, 12]))
    round = round_of(drafter, pending)
    seen = within_blocks(drafter)
    found = drafter.levels(round)
    assert seen == [18]  # of a row that has a block, and needs 16 slots of it
    alone = Pending(pending.tokens[:1, :1], hidden[:1, :1], counts[:1], pending.lengths[:1])
    torch.testing.assert_close(found[:1], drafter.levels(round_of(drafter, alone)), rtol=1e-5, atol=1e-5)
    other = Pending(pending.tokens, hidden.roll(1, dims=0), counts, pending.lengths)
    assert not torch.allclose(found, drafter.levels(round_of(drafter, other)))


def test_a_round_without_a_tree_is_read():
    """As where a draft catches up: its keys and values of the pending tokens are there, and no others change."""
    target = shared_target()
    drafter = OnePass(tiny_peagle(target), target)
    pending = Pending(torch.tensor([[7, 9, 4]]), torch.randn(1, 3, 96), torch.tensor([3]), torch.tensor([12]))
    round = round_of(drafter, pending, depth=0)
    before = [x.clone() for x in drafter.cache.memory]
    assert drafter.propose(round).tokens.tolist() == [[4]]
    for old, new in zip(before, drafter.cache.memory, strict=True):
        changed = (old != new).flatten(2).any(-1).any(0)
        assert changed.nonzero().flatten().tolist() == [2 * BLOCK + slot for slot in (10, 11, 12)]


def test_padding_behind_a_rows_blocks_is_scratch():
    prefix = PagedPrefix(torch.tensor([15, 31]), torch.tensor([[4, SCRATCH], [7, 8]]), 31, True)
    longer = prefix.with_scratch(3)
    assert longer.blocks.tolist() == [[4, SCRATCH, SCRATCH], [7, 8, SCRATCH]]
    assert longer.slots(longer.positions(3)).tolist() == [[79, 16, 17], [143, 16, 17]]
    assert torch.equal(longer.lengths, prefix.lengths)
    contiguous = ContiguousPrefix(15, [4, 5], torch.device("cpu"))
    assert contiguous.with_scratch(3) is contiguous


def test_beside_another_drafter():
    target = a_target()
    drafters = {"slots": drafter_of(trained(), target), "eagle": Eagle(tiny_draft(target), target)}
    engine = Engine(target, drafters, "chain3", max_batch_size=4)
    names = ("slots", "eagle", "none", "slots")
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
    outputs = Engine(target, tiny_peagle(target), "d3_bf2", drafting=drafting).generate(PROMPTS, params)
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
    """Two rows do not speculate; the remaining one does, after its draft has read the newest tokens."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 30)]
    table = {1: "chain3", 2: {"parents": [-1]}}
    outputs = Engine(a_target(), trained(), table, max_batch_size=2).generate(PROMPTS[:2], params)
    assert outputs[1].token_ids[:24] == plain_answers()[1]
    assert sum(outputs[1].stats.accepted_per_depth) > 0


@pytest.mark.parametrize("tree", ["chain3", "d2_bf3"])
def test_rounds_can_be_recorded(tree):
    eager, replayed = (Engine(a_target(), trained(), tree, max_batch_size=3) for _ in range(2))
    wanted = eager.generate(PROMPTS, GREEDY)
    found = recorded(replayed).generate(PROMPTS, GREEDY)
    assert [(o.token_ids, o.rounds) for o in found] == [(o.token_ids, o.rounds) for o in wanted]
    assert runner_of(replayed).graphs.drafting.made


@pytest.mark.filterwarnings("ignore:draft_lm_head=fp8")
@pytest.mark.parametrize("way", ["draft", "all of it", "lm head"])
def test_few_bits_change_no_answer(way):
    target, draft, options = a_target(), trained(), {}
    if way == "lm head":
        options = {"draft_lm_head": "fp8"}
    else:
        draft = quantise_draft(draft, Quant("fp8", "all_linear" if way == "all of it" else "ffn"))
        assert torch.equal(draft.masked(), trained().masked()) == (way == "draft")
    outputs = Engine(target, draft, "chain3", **options).generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == plain_answers()
    assert sum(output.stats.accepted_per_depth[0] for output in outputs) > 0


@pytest.mark.parametrize("tree", ["chain6", AutoTree((6, 7)), {1: "chain2", 4: "d6_bf1"}, dynamic(20, 6, 2)], ids=str)
def test_trees_beyond_the_slots_that_were_trained_are_refused(tree):
    message = r"^tree: it has [67] levels, and the draft proposes 5 tokens ahead; use chain5, say$"
    with pytest.raises(OptionError, match=message):
        Engine(a_target(), trained(), tree)


def test_nothing_that_was_drafted_is_kept():
    message = r"^draft\.alignment=last: draft=peagle keeps nothing that it drafted; must be accepted$"
    with pytest.raises(UserError, match=message):
        make_eagle(a_target(), trained(), "last")


def test_the_kind_says_which_drafter():
    target = tiny_target()
    assert type(make_eagle(target, tiny_peagle(target))) is OnePass
    assert len(list(drafter_of(tiny_peagle(target), target).caches)) == 1
