"""Several drafters in one engine, trees that differ by row, and states of the target's layers."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from eagle_train.errors import OptionError, UserError
from eagle_train.inference import Engine, LayerSkip, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.row_trees import OpenTree, RowChains, RowTrees, mended
from eagle_train.inference.decode.tree import Tree, full
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Needs, Outcome, Pending
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.drafters.lookahead import Lookahead, LookaheadOptions
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from tests.support.graph_recorder import recorded
from tests.support.inside import inside, runner_of, scheduler_of
from tests.support.oracle import Oracle
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, answers, cut, token_ids
from tests.support.tiny import random_tokens, shared_target, tiny_draft, tiny_model

FAMILIES = ["llama", "gemma2", "qwen3_moe"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"overlap": True, "kv_tokens": 6 * BLOCK, "prefill_tokens": 7}])
def test_trees_that_differ_by_row(family, options):
    drafter = Oracle(answers(family))
    engine = Engine(shared_target(family), drafter, "d2_bf2", **{"max_batch_size": 3} | options)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == cut(answers(family))
        assert max(max(output.rounds) for output in outputs) >= 4
        for output in outputs:
            stats = output.stats
            pairs = zip(stats.accepted_per_depth, stats.drafted_per_depth, strict=True)
            assert all(accepted <= drafted for accepted, drafted in pairs)
    assert len(set(drafter.seen)) == len(drafter.seen) or options.get("overlap")  # asked once for each text


@pytest.mark.parametrize("replays", [False, True])
def test_a_static_tree_of_a_drafter_whose_trees_differ_by_row_says_how_many_nodes_they_have(replays):
    drafter = Oracle(answers("llama"))
    drafter.needs = replace(Oracle.needs, tree=full(2, 2))
    engine = Engine(shared_target(), drafter, "chain1", max_batch_size=2)
    if replays:
        recorded(engine)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))
    assert max(max(output.rounds) for output in outputs) > full(2, 2).max_depth + 1


def brute_force(parents: list[int], real: list[bool], match: list[bool]) -> tuple[int, list[int]]:
    """The deepest node that matches with all its ancestors, and the path to it."""

    def path(node: int) -> list[int]:
        return [0] if node == 0 else [*path(parents[node]), node]

    good = [n for n in range(len(parents)) if all(match[x] and real[x] for x in path(n)[1:])]
    best = max(good, key=lambda node: (len(path(node)), -node))
    return best, path(best)


def test_row_trees_are_the_trees_of_plain_lists():
    torch.manual_seed(0)
    for _ in range(200):
        nodes, rows = int(torch.randint(1, 12, ())), 3
        lists = [[0, *(int(torch.randint(0, n, ())) for n in range(1, nodes))] for _ in range(rows)]
        real = torch.arange(nodes) < torch.randint(1, nodes + 1, (rows, 1))
        trees, match = RowTrees(torch.tensor(lists), real, nodes), torch.rand(rows, nodes) < 0.6
        node, paths = trees.accepted(match), trees.paths_to(trees.accepted(match))
        for row in range(rows):
            best, path = brute_force(lists[row], real[row].tolist(), match[row].tolist())
            assert int(node[row]) == best
            assert paths[row].tolist() == path + [best] * (nodes + 1 - len(path))
            assert int(trees.depths_of(node)[row]) == len(path) - 1
        again, bad = mended(trees.parents, trees.real, nodes)
        assert not bad.any()
        assert again.parents.tolist() == trees.parents.masked_fill(~real, 0).tolist()


def test_chains_by_row_are_trees_without_siblings():
    torch.manual_seed(2)
    for width in (1, 2, 5):
        lengths = torch.randint(0, width, (20,))
        chains, match = RowChains(lengths, width), torch.rand(20, width) < 0.7
        trees = RowTrees(chains.parents, chains.real, width - 1)
        node = trees.accepted(match)
        assert chains.is_chain
        assert torch.equal(chains.accepted(match), node)
        assert torch.equal(chains.depths_of(node), trees.depths_of(node))
        assert torch.equal(chains.paths_to(node), trees.paths_to(node))
        assert torch.equal(chains.row_depth, trees.row_depth)
        assert torch.equal(chains.rows(lambda x: x[3:9]).real, trees.rows(lambda x: x[3:9]).real)


def test_a_static_tree_by_row_accepts_what_it_accepts_for_all():
    torch.manual_seed(1)
    tree = full(2, 3)
    trees = RowTrees(tree.parent.repeat(50, 1), torch.ones(50, tree.num_nodes, dtype=torch.bool), 2)
    match = torch.rand(50, tree.num_nodes) < 0.3
    match &= tree.child_rank == 0  # of siblings one alone
    assert trees.accepted(match).tolist() == tree.accepted(match).tolist()
    assert torch.equal(trees.ancestors[0], tree.ancestors)
    match = torch.rand(50, tree.num_nodes) < 0.4
    repeating = Tree(tree.parents, siblings_repeat=True).to("cpu")
    assert trees.accepted(match).tolist() == repeating.accepted(match).tolist()


def mixed(family: str) -> dict[str, Drafter]:
    target = shared_target(family)
    eagle, last = (Eagle(tiny_draft(target), target, alignment) for alignment in ("accepted", "last"))
    return {"eagle": eagle, "oracle": Oracle(answers(family)), "last": last}


TIGHT = {"prefix_cache": True, "host_kv_tokens": 30 * BLOCK, "kv_tokens": 9 * BLOCK, "prefill_tokens": 7}


@pytest.mark.parametrize(
    ("family", "options"),
    [*product(FAMILIES, ({"overlap": True}, TIGHT)), ("llama", {"compile": True})],
)
def test_requests_of_one_batch_with_drafters_of_their_own(family, options, graphs):
    """Each has the rounds that it has alone with its drafter."""
    names = ["eagle", "oracle", None, "last", "none"]
    params = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, drafter=name) for name in names]
    engine = Engine(shared_target(family), mixed(family), "d2_bf2", **{"max_batch_size": 4} | options)
    outputs = engine.generate(PROMPTS, params)
    assert token_ids(outputs) == cut(answers(family))
    for prompt, name, output in zip(PROMPTS, names, outputs, strict=True):
        drafter = None if name == "none" else mixed(family)[name or "eagle"]
        alone = Engine(shared_target(family), drafter, "d2_bf2").generate([prompt], GREEDY)[0]
        assert output.rounds == alone.rounds


@pytest.mark.parametrize("tree", ["chain3", "d2_bf2"])
def test_a_drafter_is_the_same_among_others_that_take_no_part(tree):
    """Layer skipping goes on from what it computed, by its own plan."""
    target = shared_target("llama")
    among = Engine(target, {"skip": LayerSkip(target, 2), "oracle": Oracle(answers("llama"))}, tree)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, drafter="skip")
    found, alone = among.generate(PROMPTS, params), Engine(target, LayerSkip(target, 2), tree).generate(PROMPTS, GREEDY)
    assert [(o.token_ids, o.rounds) for o in found] == [(o.token_ids, o.rounds) for o in alone]


def repeats_itself() -> Target:
    """What it writes is a token again and again, as a draft that repeats the pending token says."""
    return Target(tiny_model("gemma2", tie_word_embeddings=True), name="tied")


@pytest.mark.parametrize("tree", ["chain3", "d2_bf2"])
@pytest.mark.parametrize(("drafting", "replays"), [("greedy", False), ("greedy", True), ("multinomial", False)])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.7, seed=5, max_tokens=LENGTH)])
def test_a_row_without_a_drafter_has_one_token_a_round(tree, drafting, params, replays):
    """As alone without drafts, though its nodes, which hold its pending token, would be right."""
    target, params = repeats_itself(), replace(params, ignore_eos=True)
    engine = Engine(target, tiny_draft(target), tree, max_batch_size=3, drafting=drafting)
    if replays:
        recorded(engine)
    outputs = engine.generate(PROMPTS[:3], [params, replace(params, drafter="none"), params])
    plain = Engine(target).generate(PROMPTS[1:2], params)[0]
    assert any(one == two for one, two in pairwise(plain.token_ids))
    assert (outputs[1].token_ids, outputs[1].rounds) == (plain.token_ids, plain.rounds)
    assert outputs[1].rounds == [1] * (LENGTH - 1)
    assert outputs[1].stats.drafted_per_depth == []
    assert outputs[0].stats.drafted_per_depth[0] == len(outputs[0].rounds)


def test_in_plain_rounds_drafters_without_caches_are_not_asked():
    """After 32 of them the caches of the others are brought up to date, by a plan of the root alone."""
    target = shared_target("llama")
    drafters = {"eagle": Eagle(tiny_draft(target), target), "lookahead": Lookahead(LookaheadOptions(3, 3, 2))}
    engine = Engine(target, drafters, {2: {"parents": [-1]}, 16: "chain3"})
    params = [SamplingParams(max_tokens=40, ignore_eos=True, drafter=name) for name in drafters]
    plain = Engine(target).generate(PROMPTS[:2], SamplingParams(max_tokens=40, ignore_eos=True))
    assert token_ids(engine.generate(PROMPTS[:2], params)) == token_ids(plain)


@pytest.mark.parametrize("tree", ["chain3", "d2_bf2"])
@pytest.mark.parametrize("names", [("eagle", "eagle"), ("eagle", "oracle"), ("oracle", "oracle"), ("none", "none")])
def test_each_batch_of_several_drafters_has_its_graph(tree, names):
    target = shared_target("llama")
    drafters = {"eagle": Eagle(tiny_draft(target), target), "oracle": Oracle(answers("llama"))}
    engine = recorded(Engine(target, drafters, tree, max_batch_size=2, kv_tokens=20 * BLOCK))
    keys, graphs = [], runner_of(engine).graphs
    graphs.validation_key = lambda *given, ask=graphs.validation_key: keys.append(ask(*given)) or keys[-1]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, drafter=name) for name in names]
    assert token_ids(engine.generate(PROMPTS[:2], params)) == [answer[:12] for answer in answers("llama")[:2]]
    assert keys
    assert None not in keys


def test_a_drafters_blocks_are_found_by_its_requests_and_by_those_without_a_drafter():
    """The others' keys and values of a draft would not lie in them; the target's lie in all."""
    drafters = {"eagle": mixed("llama")["eagle"], "oracle": Oracle(answers("llama"))}
    engine = Engine(shared_target("llama"), drafters, "chain2", prefix_cache=True, kv_tokens=40 * BLOCK)
    before, behind = random_tokens(3 * BLOCK + 2, 3 * BLOCK + 2)
    asked = [(before, "none", 0), (before, "eagle", 0), (before, "eagle", 3), (before, "none", 3)]
    for prompt, name, blocks in [*asked, (behind, "eagle", 0), (behind, "none", 3)]:
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True, drafter=name))
        assert output.stats.cached_tokens == blocks * BLOCK


def test_who_cannot_be_a_drafter_is_told():
    target, eagle = shared_target("llama"), mixed("llama")["eagle"]
    with pytest.raises(UserError, match=r"^drafter=medusa: this engine has eagle, none$"):
        Engine(target, eagle).generate([[1]], SamplingParams(drafter="medusa"))
    with pytest.raises(UserError, match=r"^drafter=3: must be None, or a drafter's name$"):
        SamplingParams(drafter=3)
    for wrong in ({}, {"none": eagle}, {"": eagle}, {3: eagle}):
        with pytest.raises(UserError, match=r"must be drafters by name"):
            Engine(target, wrong)
    with pytest.raises(OptionError, match=r"^drafting=multinomial: several drafters draw nothing; use greedy$"):
        Engine(target, {"a": eagle, "b": Oracle(answers("llama"))}, drafting="multinomial")
    with pytest.raises(OptionError, match=r"^drafting=multinomial: trees that differ by row are not drawn; use "):
        Engine(target, Oracle(answers("llama")), drafting="multinomial")


def test_some_rows_of_a_draft_are_its_rows():
    """Also of the keys and values of its nodes, behind which padding rows may follow."""
    torch.manual_seed(0)
    tokens, q, places, suffix = torch.arange(12).view(3, 4), torch.rand(3, 4, 5), torch.arange(12).view(3, 4), Suffix()
    k, v = torch.rand(4, 2, 3, 8), torch.rand(4, 2, 3, 8)
    suffix.append(1, k, v)
    suffix.positions = torch.arange(12).view(4, 3)
    trees = RowTrees.of([[0], [0, 0], [0, 0, 1, 1]], 2, "cpu")
    drafted = Drafted(tokens, q, suffix, trees, places, {2: "late", 1: "wrong"}, object())
    some, order = drafted.rows([2, 0]), [2, 0]
    for own, whole in (
        (some.tokens, tokens),
        (some.q, q),
        (some.places, places),
        (some.trees.parents, trees.parents),
        (some.trees.real, trees.real),
        (some.suffix.layers[1][0], k),
        (some.suffix.layers[1][1], v),
        (some.suffix.positions, suffix.positions),
    ):
        assert torch.equal(own, whole[order])
    assert some.faults == {0: "late"}
    assert some.computed is None
    assert Drafted(tokens).rows([1])[1:5] == (None, None, None, None)


# --- states of layers


class Watching(Drafter):
    """Notes the states that it is given, and drafts the pending token."""

    def __init__(self, layers: tuple[int, ...]):
        self.needs, self.caches = Needs(layers=layers, logits=True), ()
        self.prompts: list[torch.Tensor] = []
        self.given: list[DraftRound] = []
        self.told: list[Outcome] = []

    def prefill(self, prefix, tokens, positions, hidden, before, counts):
        self.prompts.append(hidden)

    def propose(self, round: DraftRound) -> Drafted:
        self.given.append(round)
        return Drafted(round.pending.last.repeat(1, round.plan.tree.num_nodes))

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        self.told.append(outcome)
        return super().rewind(round, drafted, outcome)


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"prefix_cache": True}])
@pytest.mark.parametrize("each", [[(1, 0), (1,)], [(1, 0)], [(2, 0, 2)]], ids=str)
def test_a_drafter_is_given_the_states_of_the_layers_that_it_names(each, options, graphs):
    """As transformers has them, in its order, and beside the last ones; in a batch with another that names others, and
    alone."""
    target: Target = shared_target("llama")
    drafters = {f"of {layers}": Watching(layers) for layers in each}
    engine = Engine(target, drafters, "chain2", **options)
    params = [SamplingParams(max_tokens=4, ignore_eos=True, drafter=name) for name in drafters]
    outputs = engine.generate(PROMPTS[: len(each)], params)
    assert token_ids(outputs) == [answer[:4] for answer in answers("llama")[: len(each)]]
    for row, (drafter, layers) in enumerate(zip(drafters.values(), each, strict=True)):
        text = PROMPTS[row] + outputs[row].token_ids
        places, attend = torch.arange(len(text))[None], packed_attention([[len(text)]])
        states = target.states(layers)(torch.tensor([text]), places, attend)
        assert drafter.prompts[0].shape[-1] == 32 * (1 + len(layers))
        torch.testing.assert_close(drafter.prompts[0][0, : len(PROMPTS[row])], states[0, : len(PROMPTS[row])])
        read, first_round = drafter.given[0].pending.hidden, drafter.told[0]
        torch.testing.assert_close(read[0, 0], states[0, len(PROMPTS[row]) - 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first_round.hidden[0, 0], states[0, len(PROMPTS[row])], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            first_round.logits[0, 0], target.lm_head(states[0, len(PROMPTS[row]), :32]), rtol=1e-4, atol=1e-4
        )


def test_states_are_what_the_layers_put_out():
    target = shared_target("llama")
    tokens = torch.tensor(PROMPTS[:1])
    places = torch.arange(tokens.shape[1])[None]
    seen = []
    layers = target.model.model.layers
    hooks = [layer.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in layers]
    states = target.states((0, 1))(tokens, places, packed_attention([[tokens.shape[1]]]))
    for hook in hooks:
        hook.remove()
    assert torch.equal(states[..., 32:], torch.cat(seen[:2], -1))
    assert torch.equal(states[..., :32], target.hidden_states(tokens, places, packed_attention([[tokens.shape[1]]])))
    with pytest.raises(UserError, match=r"^layers=\[9\]: target tiny-llama has the layers 0 to \d$"):
        target.states((9,))


def test_a_tree_that_cannot_be_is_one_line():
    for wrong, said in (((1, 1), "num_nodes is 1"), ((4, 0), "max_depth is 0"), ((4, 4), "max_depth is 4")):
        with pytest.raises(UserError, match=said):
            OpenTree(*wrong)
    assert isinstance(OpenTree(4, 3).to("cpu"), OpenTree)
    assert not isinstance(OpenTree(4, 3), Tree)
    engine = Engine(shared_target("llama"), Oracle(answers("llama")), "chain3")
    assert scheduler_of(engine).ahead == 4
    assert inside(engine).in_flight is None
