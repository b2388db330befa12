"""Verification commits exactly the target's distribution, broken variants are detected, and the parts are right."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle_train.inference.decode import sampling
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.row_trees import RowTrees
from eagle_train.inference.decode.sampling import (
    SamplingTensors,
    child_round,
    probabilities,
    propose,
    restrict,
    sample,
    uniform,
    verify,
    verify_chosen,
    verify_drawn,
    verify_sampled,
)
from eagle_train.inference.decode.tree import Tree, chain, full
from eagle_train.inference.decode.verification import Verification
from eagle_train.ops import truncation
from eagle_train.ops.torch_private import with_own_sizes
from tests.support.exact_distribution import GRID, REJECT, WITH, WITHOUT, Toy, by_depth, child, error, make_toy, one_row

RAGGED = Tree((-1, 0, 0, 0, 1, 1, 2, 5))
TREES = {"chain2": chain(2), "chain3": chain(3), "d2_bf2": full(2, 2), "d3_bf2": full(3, 2), "ragged": RAGGED}


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("mode", ["greedy", WITH, WITHOUT])
@pytest.mark.parametrize("name", TREES)
def test_committed_tokens_have_exactly_the_targets_distribution(name, mode, top_p):
    assert error(make_toy(3, TREES[name].max_depth, top_p), TREES[name], mode) < 1e-12


def test_larger_vocabulary_and_root_alone_are_exact():
    assert error(make_toy(5, 2, 0.8), chain(2), WITHOUT) < 1e-12
    assert error(make_toy(5, 0, 0.8), chain(0), "greedy") < 1e-12


@pytest.mark.parametrize("mode", [WITH, WITHOUT])
def test_draft_that_runs_out_of_tokens_is_exact(mode):
    """Three children from a q with two tokens: the third is not drawn from q, and must not be accepted."""
    assert error(make_toy(4, 2, draft_support=2), full(2, 3) if mode == WITHOUT else full(2, 2), mode) < 1e-12


# --- broken variants, each caught by the same check


def p_not_renormalised(p, q, token, replacement):
    accept, _, q_next = child_round(p, q, token, replacement)
    return accept, (p - q).clamp(min=0), q_next


def no_residual_update(p, q, token, replacement):
    accept, _, q_next = child_round(p, q, token, replacement)
    return accept, p, q_next


def q_not_renormalised(p, q, token, replacement):
    accept, p_next, _ = child_round(p, q, token, replacement)
    return accept, p_next, q.scatter(1, token[:, None], 0.0)


def top_p_on_the_residual(p, q, token, replacement):
    accept, p_next, q_next = child_round(p, q, token, replacement)
    return accept, probabilities(p_next.log()[:, None], one_row(top_p=0.7))[:, 0], q_next


def one_coin_for_all_children(tree, tokens, p, coins, final, q, replacement):
    return verify(tree, tokens, p, coins[:, 1:2].expand_as(coins), final, q, replacement)


def drawn_with_replacement_taken_for_without(tree, tokens, p, coins, final, q, replacement):
    return verify(tree, tokens, p, coins, final, q, not replacement)


def one_number_for_all_depths(tree, tokens, p, numbers):
    return by_depth(tree, tokens, p, numbers[:, :1].expand_as(numbers))


def a_leaf_that_is_always_accepted(tree, tokens, p, numbers):
    """Broken: the last child of the node where a round ends is accepted, whatever the target chose."""
    found = by_depth(tree, tokens, p, numbers)
    kids = tree.children[found.node, 0]
    return found._replace(node=torch.where(kids >= 0, kids, found.node))


BROKEN_ROUNDS = [
    (p_not_renormalised, WITH),
    (no_residual_update, WITHOUT),
    (q_not_renormalised, WITHOUT),
]


@pytest.mark.parametrize(("broken", "mode"), BROKEN_ROUNDS)
def test_broken_round_is_caught(broken, mode, monkeypatch):
    monkeypatch.setattr(sampling, "child_round", broken)
    assert error(make_toy(3, 2), full(2, 2), mode) > 1e-3


@pytest.mark.parametrize("mode", [WITH, WITHOUT])
def test_top_p_on_the_residual_alone_is_caught(mode, monkeypatch):
    monkeypatch.setattr(sampling, "child_round", top_p_on_the_residual)
    toy = make_toy(3, 2, top_p=0.7)
    assert error(replace(toy, p=make_toy(3, 2).p), full(2, 2), mode) > 1e-3


@pytest.mark.parametrize("mode", [WITH, WITHOUT])
def test_reused_coin_is_caught(mode):
    assert error(make_toy(3, 2), full(2, 2), mode, one_coin_for_all_children) > 1e-3


@pytest.mark.parametrize("broken", [one_number_for_all_depths, a_leaf_that_is_always_accepted])
@pytest.mark.parametrize("tree", [chain(2), full(2, 2)], ids=["chain", "tree"])
def test_broken_choice_is_caught(broken, tree):
    assert error(make_toy(3, 2), tree, "greedy", broken) > 1e-3


def test_no_top_p_is_caught():
    toy = make_toy(3, 2, top_p=0.7)
    assert error(replace(toy, p=make_toy(3, 2).p), full(2, 2), "greedy") > 1e-3


@pytest.mark.parametrize("mode", [WITH, WITHOUT])
def test_wrong_kind_of_replacement_is_caught(mode):
    assert error(make_toy(3, 2), full(2, 2), mode, drawn_with_replacement_taken_for_without) > 1e-3


# --- the same from random numbers: drafting, verification and continuation together, as float32 and as one batch


def chi_square_p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The probability of a deviation at least as large; a count where nothing is expected is an infinite deviation."""
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0].double(), expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


def sampled_p_value(toy: Toy, tree: Tree, mode: str, verifier: Callable[..., sampling.Verified], rows: int) -> float:
    """The p-value of the tokens that `rows` requests commit, under the target's distribution."""
    seeds, vocabulary, num_nodes = torch.arange(rows), toy.vocabulary, tree.num_nodes
    noise = uniform(seeds, torch.zeros_like(seeds), 1 + num_nodes + num_nodes * max(tree.fanout))
    final, coins = noise[:, 0], noise[:, 1 : 1 + num_nodes]
    draft_noise = noise[:, 1 + num_nodes :].view(rows, num_nodes, -1)
    tokens = torch.zeros(rows, num_nodes, dtype=torch.int64)
    q = torch.zeros(rows, num_nodes, vocabulary)
    for node in range(num_nodes):
        logits = toy.draft[toy.histories(tree, tokens)[:, node]].log().float()[:, None]
        drawn, share = propose(logits, max(tree.fanout), mode, torch.ones(rows), draft_noise[:, node : node + 1])
        kids = [kid for kid in tree.children[node].tolist() if kid >= 0]
        tokens[:, kids] = drawn[:, 0, : len(kids)]
        q[:, node] = 0 if share is None else share[:, 0]
    histories = toy.histories(tree, tokens)
    p = toy.p[histories].float()
    given = (coins,) if mode == "greedy" else (coins, final, q, mode == WITH)
    node, token = verifier(tree, tokens, p, *given)
    history, accepted = child(histories[seeds, node], token, vocabulary), tree.depth[node]
    for extra in range(tree.max_depth):  # rows that accepted less go on alone
        further = sample(
            toy.p[history.clamp(max=len(toy.p) - 1)], uniform(seeds, torch.full_like(seeds, extra + 1), 1)[:, 0]
        )
        history = torch.where(accepted + extra < tree.max_depth, child(history, further, vocabulary), history)
    counts = (history - len(toy.p)).bincount(minlength=vocabulary ** (tree.max_depth + 1))
    return chi_square_p_value(counts, toy.joint() * rows)


@pytest.mark.parametrize("mode", ["greedy", WITH, WITHOUT])
@pytest.mark.parametrize("name", ["chain3", "d2_bf2"])
def test_sampled_tokens_have_the_targets_distribution(name, mode):
    toy = make_toy(4, TREES[name].max_depth, top_p=0.9)
    verifier = by_depth if mode == "greedy" else verify
    assert sampled_p_value(toy, TREES[name], mode, verifier, 100_000) > 1e-3


@pytest.mark.parametrize(
    ("mode", "broken"), [(WITHOUT, one_coin_for_all_children), ("greedy", one_number_for_all_depths)]
)
def test_sampled_tokens_show_a_reused_coin(mode, broken):
    assert sampled_p_value(make_toy(4, 2), full(2, 2), mode, broken, 100_000) < 1e-9


# --- temperature 0


def one_hot(best: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(best, vocabulary).double()


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("tree", [chain(0), *TREES.values()], ids=lambda tree: str(tree.num_nodes))
def test_verify_chosen_is_verify_at_temperature_0(tree, replacement):
    """With a vocabulary of 2, so that long paths are accepted and siblings often have the same token."""
    torch.manual_seed(0)
    tokens, best = torch.randint(2, (2, 400, tree.num_nodes))
    p, coins = one_hot(best, 2), torch.rand(400, tree.num_nodes, dtype=torch.float64)
    q = torch.full_like(p, 0.5)
    if not replacement:  # then siblings differ
        tokens = torch.where(tree.child_rank == 1, 1 - tokens[:, tree.children[tree.parent, 0]], tokens)
    expected = verify(tree, tokens, p, coins, torch.rand(400, dtype=torch.float64), q, replacement)
    for ours, theirs in zip(verify_chosen(tree, tokens, best), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_accepted_path_is_the_first_that_matches():
    tokens = torch.tensor([[9, 5, 7, 5, 1, 6, 8, 3]])  # RAGGED: children of the root 5, 7, 5; of node 1 1, 6; ...
    best = torch.tensor([[5, 6, 8, 0, 0, 3, 0, 4]])
    assert [x.tolist() for x in verify_chosen(RAGGED, tokens, best)] == [[7], [4]]  # 0, 1, 5, 7
    best = best + torch.tensor([0, 9, 0, 0, 0, 0, 0, 0])
    assert [x.tolist() for x in verify_chosen(RAGGED, tokens, best)] == [[1], [15]]


@pytest.fixture(params=["sorted", "searched"])
def truncated(request, monkeypatch):
    """Top-k and top-p as a CPU has them for a small vocabulary, and as it has them for a large one."""
    if request.param == "searched":
        monkeypatch.setattr(truncation, "_SORTED_ON_CPU", 0)


# --- compiled


def compile_arguments(verifier: Callable[..., sampling.Verified], rows: int) -> tuple:
    """For a tree of 7 nodes with 2 children each."""
    tokens, logits, seeds = torch.randint(50, (rows, 7)), torch.randn(rows, 7, 50), torch.arange(rows)
    temperature = [[0.5, 1.0, 0.0][row % 3] for row in range(rows)]
    settings = SamplingTensors.from_lists(temperature, [0] * rows, [0.9] * rows, "cpu")
    if verifier is verify_sampled:
        return full(2, 2), tokens, logits, settings, seeds, seeds + 3
    return full(2, 2), tokens, logits, settings, uniform(seeds, seeds, 20), logits.softmax(-1), False


@pytest.mark.parametrize("verifier", [verify_sampled, verify_drawn])
def test_compiles_for_one_and_for_many_rows_only(verifier, truncated):
    """Paper section 3.2: a dynamic batch dimension leaves two compilations."""
    torch.manual_seed(0)
    counter = CompileCounter()
    compiled = with_own_sizes(torch.compile(verifier, backend=counter, dynamic=True, fullgraph=True))
    for rows in (7, 2, 3, 5, 8, 1):
        arguments = compile_arguments(verifier, rows)
        for ours, theirs in zip(compiled(*arguments), verifier(*arguments), strict=True):
            assert torch.equal(ours, theirs)
    assert counter.frame_count == 2


def test_what_is_prepared_is_all_that_is_compiled(truncated, monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    verification, plan = Verification("greedy"), Dispatcher(full(2, 2), "cpu").dispatch(3)
    for job in verification.compile([(1, plan), (3, plan)], torch.zeros(50, 8)):
        job()
    prepared = counter.frame_count
    for rows in (1, 3, 4):
        tokens, logits, seeds = torch.randint(50, (rows, 7)), torch.randn(rows, 7, 50), torch.arange(rows)
        for top_k, top_p, min_p in product((0, 5), (1.0, 0.9), (0.0, 0.1)):
            each = [0.8] * rows, [top_k] * rows, [top_p] * rows, "cpu", [min_p] * rows
            settings = SamplingTensors.from_lists(*each)
            verification(plan.tree, tokens, logits, settings, seeds, seeds + 3, None, None)
        adjusted = logits.double()  # logits that requests change may have another dtype
        verification(plan.tree, tokens, adjusted, settings, seeds, seeds + 3, None, None)
        by_row = RowTrees(plan.tree.parent.repeat(rows, 1), torch.ones(rows, 7, dtype=torch.bool), 2)
        verification(by_row, tokens, logits, settings, seeds, seeds + 3, None, None)
    assert counter.frame_count == prepared


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [chain(0), full(2, 2)], ids=["chain0", "d2_bf2"])
def test_a_gpus_compiler_takes_a_vocabulary_of_today(tree, rows, top_p):
    """It divides work on so long a row, and torch 2.11's knows no fusion of what is divided."""
    torch.manual_seed(0)
    plan = Dispatcher(tree, "cuda").dispatch(rows)
    logits = torch.randn(rows, tree.num_nodes, 128_256, device="cuda") * 3
    tokens, seeds = torch.randint(50, (rows, tree.num_nodes), device="cuda"), torch.arange(rows, device="cuda")
    settings = SamplingTensors.from_lists([0.8] * rows, [0] * rows, [top_p] * rows, "cuda")
    compiled, plain = Verification("greedy"), Verification("greedy")
    for job in compiled.compile([(rows, plan)], logits[0]):
        job()
    given = plan.tree, tokens, logits, settings, seeds, seeds + 3, None, None
    for ours, theirs in zip(compiled(*given), plain(*given), strict=True):
        assert torch.equal(ours, theirs)


# --- probabilities and draws


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """transformers' own warpers, for rows [N, V]."""
    logits = TemperatureLogitsWarper(temperature)(None, logits)
    logits = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    logits = TopPLogitsWarper(top_p)(None, logits) if top_p < 1 else logits
    return (MinPLogitsWarper(min_p)(None, logits) if min_p else logits).softmax(-1)


def test_probabilities_are_those_of_transformers_row_by_row(truncated):
    temperature, top_k, top_p = [1.0, 0.7, 1.3, 0.5, 2.0, 1.0], [0, 5, 0, 7, 500, 1], [1.0, 1.0, 0.6, 0.9, 0.01, 0.5]
    torch.manual_seed(0)
    logits = torch.randn(6, 3, 100) * 3
    ours = probabilities(logits, SamplingTensors.from_lists(temperature, top_k, top_p, "cpu"))
    for row, setting in zip(range(6), zip(temperature, top_k, top_p, strict=True), strict=True):
        assert torch.equal(ours[row] > 0, warped(logits[row], *setting) > 0)
        torch.testing.assert_close(ours[row], warped(logits[row], *setting))


def test_min_p_is_that_of_transformers_row_by_row(truncated):
    """Alone and behind the others; rows without it have the same bits as in a batch without it."""
    temperature, top_k, top_p = [1.0, 0.7, 1.3, 0.5, 2.0, 1.0], [0, 5, 0, 7, 0, 0], [1.0, 1.0, 0.6, 0.9, 1.0, 1.0]
    min_p = [0.02, 0.1, 0.3, 0.0, 1.0, 0.0]
    torch.manual_seed(0)
    logits = torch.randn(6, 20, 1000) * 3
    given = temperature, top_k, top_p, "cpu"
    ours, without = (probabilities(logits, SamplingTensors.from_lists(*given, each)) for each in (min_p, None))
    for row, setting in enumerate(zip(temperature, top_k, top_p, min_p, strict=True)):
        expected = warped(logits[row], *setting)
        assert torch.equal(ours[row] > 0, expected > 0)
        torch.testing.assert_close(ours[row], expected)
        assert torch.equal(ours[row], without[row]) == (setting[-1] == 0)


def test_min_p_alone_sorts_nothing(monkeypatch):
    monkeypatch.setattr(sampling, "truncated_softmax", None)
    settings = SamplingTensors.from_lists([1.0, 1.0, 0.0], [0, 0, 0], [1.0, 1.0, 1.0], "cpu", [0.2, 0.0, 0.9])
    assert settings.any_min_p
    logits = torch.tensor([[[0.0, -1.0, -2.0]]] * 3)
    assert (probabilities(logits, settings)[:, 0] > 0).tolist() == [
        [True, True, False],
        [True] * 3,
        [True, False, False],
    ]
    cold = SamplingTensors.from_lists([0.0], [0], [1.0], "cpu", [0.9])
    assert not cold.any_min_p


@pytest.mark.parametrize("vocabulary", [5000, 50_000])
def test_with_min_p_a_row_has_the_same_bits_alone_and_prepared(vocabulary):
    """Several threads add up parts of a long row that is alone; what is recorded does the work of all settings."""
    logits = torch.randn(3, 2, vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    settings = SamplingTensors.from_lists([0.9] * 3, [0] * 3, [1.0] * 3, "cpu", [0.003, 0.0, 0.02])
    batch = probabilities(logits, settings)
    assert torch.equal(batch, probabilities(logits, settings.prepared))
    for row in range(3):
        for node in range(2):
            alone = settings.rows(lambda x, row=row: x[row : row + 1])
            assert torch.equal(probabilities(logits[row : row + 1, node : node + 1], alone)[0, 0], batch[row, node])


def test_settings_nobody_uses_change_nothing(truncated):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5000) * 8
    settings = SamplingTensors.from_lists([0.0, 1.0], [0, 0], [0.5, 1.0], "cpu")
    assert not settings.any_top
    assert not settings.all_greedy
    plain, slow = probabilities(logits, settings), probabilities(logits, replace(settings, any_top=True))
    assert torch.equal(plain > 0, slow > 0)
    torch.testing.assert_close(plain, slow)
    assert torch.equal(plain[0], one_hot(logits[0].argmax(-1), 5000).float())


def test_equal_logits_and_extreme_settings(truncated):
    logits = torch.tensor([[[1.0, 2.0, 2.0, -torch.inf]]], dtype=torch.bfloat16)
    rows = {
        (0.0, 0, 1.0): [0, 1, 0, 0],  # the first of the greatest
        (1e-40, 0, 1.0): [0, 0.5, 0.5, 0],
        (1.0, 1, 1.0): [0, 0.5, 0.5, 0],  # top-k keeps equals
        (1.0, 0, 0.1): [0, 1, 0, 0],  # top-p does not
    }
    for setting, expected in rows.items():
        ours = probabilities(logits, one_row(*setting))
        assert ours.dtype == torch.float32
        assert ours[0, 0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_overflowed_counts_as_the_greatest(dtype, truncated):
    logits = torch.tensor([[[0.0, torch.inf, 1.0, torch.inf, -torch.inf]]], dtype=dtype)
    for setting, share in (((1.0, 0, 1.0), 0.5), ((1e-40, 0, 1.0), 0.5), ((0.0, 0, 1.0), 1.0), ((1.0, 3, 0.4), 1.0)):
        assert probabilities(logits, one_row(*setting))[0, 0].tolist() == [0, share, 0, 1 - share, 0]


def test_what_is_allowed_is_chosen_from_even_if_nothing_of_it_has_a_chance():
    """Token 0 is what a row without any mass gives."""
    logits = torch.tensor([[[5.0, -torch.inf, -torch.inf, 1.0]], [[torch.nan] * 4], [[0.0, -torch.inf, 1.0, 2.0]]])
    allowed = torch.tensor([[[False, True, True, False]]] * 3)
    shares = [[0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0]]
    assert probabilities(restrict(logits, allowed), one_row(1.0))[:, 0].tolist() == shares
    assert restrict(logits, allowed).argmax(-1)[:, 0].tolist() == [1, 1, 2]
    nothing = torch.zeros_like(allowed)
    assert torch.equal(restrict(logits[2], nothing[2]), logits[2])


def test_sample_follows_the_cumulative_distribution_and_never_picks_the_impossible():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, REJECT], dtype=torch.float64)
    assert sample(probs, u).tolist() == [1, 1, 3, 3, 4, 4]
    torch.manual_seed(0)
    rough = torch.rand(300, 5000) * (torch.rand(300, 5000) < 0.3)
    rough[:, 4000:] = 0.0
    for scale in (1.0, 1e-30):
        tokens = sample(rough * scale, torch.full((300,), REJECT, dtype=torch.float64))
        assert (rough.gather(1, tokens[:, None]) > 0).all()


def test_rounding_ends_in_a_possible_token():
    """What rounding can cause in rare rounds: a number above every cumulative sum, and an empty residual."""
    one = torch.tensor(1.0, dtype=torch.float64)
    assert sample(torch.tensor([0.2, 0.3, 0.0]), one) == 1
    assert sample(torch.zeros(3), one) == 0
    p, q = torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([[0.0, 0.5, 0.5000001]])
    accept, p_next, _ = child_round(p, q, torch.tensor([2]), True)
    assert accept < 1
    assert torch.equal(p_next, p)


def test_propose_takes_the_best_or_draws_in_order():
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]]])
    tokens, q = propose(logits, 3)
    assert tokens.tolist() == [[[1, 3, 2]]]
    assert q is None
    u = torch.tensor([[[0.5, 0.5, 0.5, 0.5]]], dtype=torch.float64)
    tokens, q = propose(logits, 4, WITHOUT, torch.tensor([0.0]), u)
    assert tokens.tolist() == [[[1, 3, 2, 0]]]
    torch.testing.assert_close(q, logits.softmax(-1))
    assert propose(logits, 4, WITH, torch.tensor([1.0]), u)[0].tolist() == [[[1, 1, 1, 1]]]


# --- random numbers


def splitmix(state: int) -> int:
    """The finaliser in Python's own unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_uniform_is_the_documented_function_of_seed_position_and_draw():
    golden, seeds, positions = 0x9E3779B97F4A7C15, [0, 1, -1, 2**63 - 1], [0, 5, 131071, 3]
    ours = uniform(torch.tensor(seeds), torch.tensor(positions), 3)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = splitmix((splitmix(seed * golden % 2**64) + position * golden) % 2**64)
        expected = [(splitmix((key + draw * golden) % 2**64) >> 11) / 2**53 for draw in (1, 2, 3)]
        assert ours[row].tolist() == expected


def test_uniform_is_uniform_and_independent_along_every_axis():
    """Over seeds, positions and draws; every bound is five standard deviations."""
    seeds, positions = torch.arange(128), torch.arange(128)
    cube = uniform(seeds.repeat_interleave(128), positions.repeat(128), 32).view(128, 128, 32)
    count = cube.numel()
    assert abs(cube.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(cube.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    centred = (cube - 0.5) * 12**0.5
    for axis in range(3):
        for lag in (1, 2, 3, 8):
            length = cube.shape[axis] - lag
            products = centred.narrow(axis, 0, length) * centred.narrow(axis, lag, length)
            assert abs(products.mean()) < 5 / products.numel() ** 0.5
    bits = (cube.flatten() * GRID).long()
    for bit in range(53):
        assert abs((bits >> bit & 1).double().mean() - 0.5) < 2.5 / count**0.5
    pairs = (cube[..., 0::2] * 16).long() * 16 + (cube[..., 1::2] * 16).long()
    counts = pairs.flatten().bincount(minlength=256)
    assert chi_square_p_value(counts, torch.full((256,), pairs.numel() / 256, dtype=torch.float64)) > 1e-4
