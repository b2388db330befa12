"""Biases, penalties and least lengths at the nodes of a tree, by references that know nothing of trees. DESIGN 3.7."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from eagle_train.inference.decode import adjustments
from eagle_train.inference.decode.adjustments import AdjustedText, Adjustment, Adjustments
from eagle_train.inference.decode.row_trees import AnyTree, RowTrees
from eagle_train.inference.decode.sampling import SamplingTensors, probabilities
from eagle_train.inference.decode.tree import Tree, chain, full
from eagle_train.inference.parallel.tensor_parallel import Ranks
from tests.support.exact_distribution import WITH, WITHOUT, Toy, error, make_toy

VOCABULARY = 12
PARENTS = [[0, 0, 0, 1], [0], [0, 0, 1, 1, 2, 4, 4], [0, 0, 1, 2, 3, 4, 5, 6], [0, 0], [0, 0, 0, 1, 2, 3, 5]]
OFF = Adjustment({}, 1.0, 0.0, 0.0, 0, frozenset())
ALL = Adjustment({3: 2.5, 7: -100.0}, 1.4, 0.6, -0.3, 5, frozenset({2, 9}))
TREES = {
    "root": chain(0),
    "chain3": chain(3),
    "d2_bf2": full(2, 2),
    "ragged": Tree((-1, 0, 0, 0, 1, 1, 2, 5)),
    "by row": RowTrees.of(PARENTS, 7, "cpu"),
}
KINDS = {
    "bias": replace(OFF, bias=ALL.bias),
    "repetition": replace(OFF, repetition=1.4),
    "less than 1": replace(OFF, repetition=0.7),
    "presence": replace(OFF, presence=0.6),
    "frequency": replace(OFF, frequency=-0.3),
    "min_tokens": replace(OFF, min_tokens=5, stop_token_ids=frozenset({2, 9})),
    "all": ALL,
}


def by_transformers(each: Adjustment, prompt: list[int], answer: list[int], scores: torch.Tensor) -> torch.Tensor:
    """The logits [V] after a text: transformers' processors where it has them, OpenAI's formula elsewhere."""
    ids, scores = torch.tensor([prompt + answer]), scores[None].clone()
    if each.bias:
        scores = SequenceBiasLogitsProcessor({(token,): value for token, value in each.bias.items()})(ids, scores)
    if each.repetition != 1:
        scores = RepetitionPenaltyLogitsProcessor(each.repetition)(ids, scores)
    for token in set(answer):
        scores[0, token] -= each.presence + each.frequency * answer.count(token)
    if each.min_tokens:
        stops = sorted(each.stop_token_ids)
        scores = MinNewTokensLengthLogitsProcessor(len(prompt), each.min_tokens, stops, device="cpu")(ids, scores)
    return scores[0]


def path_tokens(parents: Sequence[int], tokens: Sequence[int], node: int) -> list[int]:
    """The drafted tokens on the path to a node."""
    path = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def wanted(tree: AnyTree, tokens: torch.Tensor, texts: list[AdjustedText | None], logits: torch.Tensor) -> torch.Tensor:
    found = logits.clone()
    for row, text in enumerate(texts):
        parents = tree.parents if isinstance(tree, Tree) else tree.parents[row].tolist()
        for node in range(tree.num_nodes if text else 0):
            answer = text.answer + path_tokens(parents, tokens[row].tolist(), node)
            found[row, node] = by_transformers(text.adjustment, text.prompt, answer, logits[row, node])
    return found


def a_case(kind: str, tree: AnyTree, seed: int = 0) -> tuple[list[AdjustedText | None], torch.Tensor, torch.Tensor]:
    """Rows of which some are adjusted, with tokens that come more than once; tokens [A, N] and logits [A, N, V]."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(8, (5, 40), generator=generator).tolist()
    texts = [AdjustedText(KINDS[kind], row[:9], row[9 : 9 + length]) for row, length in zip(few, range(5), strict=True)]
    texts[3] = AdjustedText(KINDS["bias"], [1, 2], [3])
    tokens = torch.randint(6, (6, tree.num_nodes), generator=generator)
    logits = torch.randn(6, tree.num_nodes, VOCABULARY, generator=generator) * 3
    return [texts[0], None, *texts[1:]], tokens, logits


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_node_has_what_plain_decoding_has_there(kind, tree):
    texts, tokens, logits = a_case(kind, TREES[tree])
    given = Adjustments(texts, VOCABULARY, "cpu").now()
    found = given.apply(logits, tokens, TREES[tree], Ranks())
    torch.testing.assert_close(found, wanted(TREES[tree], tokens, texts, logits), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1], logits[1])
    assert not torch.equal(found[5], logits[5])


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_grow_are_counted_on(kind):
    """Token by token, as in an answer that is counted as a whole."""
    tree = TREES["d2_bf2"]
    texts, tokens, logits = a_case(kind, tree)
    given = Adjustments(texts, VOCABULARY, "cpu")
    for new in ([4], [], [4, 5, 4], [7]):
        for text in filter(None, texts):
            text.answer.extend(new)
        if (current := given.now()) is not None:
            found = current.apply(logits, tokens, tree, Ranks())
            torch.testing.assert_close(found, wanted(tree, tokens, texts, logits), rtol=1e-6, atol=1e-6)


def test_a_least_length_that_is_reached_costs_nothing():
    text = AdjustedText(KINDS["min_tokens"], [1], [3] * 4)
    given = Adjustments([None, text], VOCABULARY, "cpu")
    assert given.now() is given
    text.answer.append(3)
    assert given.now() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_they_are_computed_in_float32_at_least(dtype):
    texts, tokens, logits = a_case("all", TREES["chain3"])
    logits = logits.to(dtype)
    found = Adjustments(texts, VOCABULARY, "cpu").now().apply(logits, tokens, TREES["chain3"], Ranks())
    exact = logits if dtype == torch.float64 else logits.float()
    assert found.dtype == exact.dtype
    torch.testing.assert_close(found, wanted(TREES["chain3"], tokens, texts, exact), rtol=1e-6, atol=1e-6)


class OneOf(Ranks):
    """One of several ranks, without the others."""

    def __init__(self, rank: int, size: int):
        self.group, self.rank, self.size, self.divided = "others", rank, size, True


@pytest.mark.parametrize("kind", ["ragged", "by row"])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_rank_adjusts_its_own_rows(size, kind):
    """Also where it has none but padding, which repeats the last row, and where none of its rows is adjusted."""
    tree = TREES[kind]
    texts, tokens, logits = a_case("all", tree)
    whole = wanted(tree, tokens, texts, logits)
    for rank in range(size):
        ranks = OneOf(rank, size)
        found = Adjustments(texts, VOCABULARY, "cpu").now().apply(ranks.own(logits), tokens, tree, ranks)
        torch.testing.assert_close(found, ranks.own(whole), rtol=1e-6, atol=1e-6)


# --- the distribution that is committed


MIN_P = 0.15
PROMPT, ANSWER = [1, 1, 2], [2, 0]  # the root is the answer's last token


@dataclass(frozen=True)
class AdjustedToy(Toy):
    """`target` is worked out history by history; p comes from the trees, as in a round."""

    raw: torch.Tensor  # float64 [histories, V]: logits
    adjustment: Adjustment

    def distributions(self, tree: Tree, tokens: torch.Tensor) -> torch.Tensor:
        texts = [AdjustedText(self.adjustment, PROMPT, ANSWER)] * len(tokens)
        given = Adjustments(texts, self.vocabulary, "cpu").now()
        logits = given.apply(self.raw[self.histories(tree, tokens)], tokens, tree, Ranks())
        count = len(tokens)
        settings = SamplingTensors.from_lists([1.0] * count, [0] * count, [1.0] * count, "cpu", [MIN_P] * count)
        return probabilities(logits, settings)


def texts_of(count: int, vocabulary: int) -> list[list[int]]:
    """The histories by their numbers, see `child`."""
    found: list[list[int]] = [[]]
    for text in found:
        if len(found) >= count:
            return found[:count]
        found += [[*text, token] for token in range(vocabulary)]
    return found


def adjusted_toy(vocabulary: int, max_depth: int) -> AdjustedToy:
    """Penalties that compute in float64 what float32 holds exactly."""
    toy = make_toy(vocabulary, max_depth)
    adjustment = Adjustment({0: 0.5, 1: -0.75}, 1.5, 0.375, 0.25, 4, frozenset({vocabulary - 1}))
    raw = toy.target.log()
    after = [
        by_transformers(adjustment, PROMPT, ANSWER + text, row)
        for text, row in zip(texts_of(len(raw), vocabulary), raw, strict=True)
    ]
    p = torch.stack(after).softmax(-1)
    p *= p >= MIN_P * p.amax(-1, keepdim=True)
    return AdjustedToy(p / p.sum(-1, keepdim=True), toy.p, toy.draft, raw, adjustment)


@pytest.mark.parametrize("mode", ["greedy", WITH, WITHOUT])
@pytest.mark.parametrize("tree", [chain(2), chain(3), full(2, 2), TREES["ragged"]], ids=["2", "3", "d2_bf2", "ragged"])
def test_committed_tokens_have_exactly_the_adjusted_distribution(tree, mode):
    assert error(adjusted_toy(3, tree.max_depth), tree, mode) < 1e-12


def nothing_drafted(tokens, tree, vocab_size):
    """Broken: drafted tokens are not part of the answer."""
    return torch.zeros(*tokens.shape, vocab_size)


def all_drafted(tokens, tree, vocab_size):
    """Broken: drafted tokens count wherever they are in the tree."""
    counts = torch.zeros(len(tokens), vocab_size).scatter_add_(1, tokens[:, 1:], torch.ones_like(tokens[:, 1:]).float())
    return counts[:, None].expand(-1, tree.num_nodes, -1)


@pytest.mark.parametrize("mode", ["greedy", WITH])
@pytest.mark.parametrize("broken", [nothing_drafted, all_drafted])
def test_the_check_can_tell(broken, mode):
    with patch.object(adjustments, "_on_paths", broken):
        assert error(adjusted_toy(3, 2), full(2, 2), mode) > 1e-3
