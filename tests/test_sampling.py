"""Sampling: that verification gives exactly the target's distribution, and that broken variants of it are caught.

The exact proof treats `verify` as a black box: a decision depends on a coin through a threshold, so halving finds each
threshold to the last bit of float64, and the product of thresholds along every course of a round is its probability.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle_train.config import UserError
from eagle_train.inference import sampling
from eagle_train.inference.sampling import SamplingTensors, probabilities, propose, sample, uniform, verify, verify_greedy
from eagle_train.inference.tree import Tree, chain, full

RAGGED = Tree((-1, 0, 0, 0, 1, 1, 2, 5))
TREES = {"chain2": chain(2), "chain3": chain(3), "d2_bf2": full(2, 2), "d3_bf2": full(3, 2), "ragged": RAGGED}
WITH, WITHOUT = "multinomial", "multinomial_without_replacement"
GRID = 2**53
REJECT = (GRID - 1) / GRID


def one_row(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingTensors:
    return SamplingTensors.from_lists([temperature], [top_k], [top_p], "cpu")


# --- the toy: a target and a draft that give every history its own distribution. History (a, b, ...) has the number
# child(child(0, a), b) and so on, so shorter ones come first.


def child(history, token, vocabulary):
    return history * vocabulary + token + 1


@dataclass(frozen=True)
class Toy:
    target: torch.Tensor  # float64 [histories, V], what is to be sampled
    draft: torch.Tensor  # float64 [histories, V]

    @property
    def vocabulary(self) -> int:
        return self.target.shape[1]

    def joint(self) -> torch.Tensor:
        """The probability of each history, all lengths."""
        return self.continued(torch.eye(1, self.target.shape[0] * self.vocabulary + 1, dtype=torch.float64)[0])

    def continued(self, stopped: torch.Tensor) -> torch.Tensor:
        """The mass that rests on each history, handed on to the longer ones by plain draws from the target."""
        mass = stopped.clone()
        for history, distribution in enumerate(self.target):
            first = child(history, 0, self.vocabulary)
            mass[first : first + self.vocabulary] += mass[history] * distribution
        return mass

    def histories(self, tree: Tree, tokens: torch.Tensor) -> torch.Tensor:
        histories = torch.zeros_like(tokens)
        for node, parent in enumerate(tree.parents[1:], start=1):
            histories[:, node] = child(histories[:, parent], tokens[:, node], self.vocabulary)
        return histories


def make_toy(vocabulary: int, max_depth: int, top_p: float = 1.0, seed: int = 0, draft_support: int | None = None) -> Toy:
    """The target's top-p is worked out here, token by token, independently of the code under test."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(vocabulary**length for length in range(max_depth + 1))
    target, draft = (torch.randn(2, count, vocabulary, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)
    for row in target:
        order = row.argsort(descending=True).tolist()
        kept = next(n for n in range(1, vocabulary + 1) if n == vocabulary or row[order[:n]].sum() >= top_p)
        row[order[kept:]] = 0.0
    draft[:, draft_support:] = 0.0
    return Toy(target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True))


def proposals(q: torch.Tensor, num_children: int, mode: str) -> list[tuple[tuple[int, ...], float]]:
    """Every way to draw a node's children, with its probability."""
    if mode == "greedy":
        return [(tuple(q.argsort(descending=True)[:num_children].tolist()), 1.0)]
    ways: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(num_children):
        ways = [
            ((*drawn, token), weight * share)
            for drawn, weight in ways
            for token, share in enumerate(shares(q.tolist(), drawn if mode == WITHOUT else ()))
            if share > 0
        ]
    return ways


def shares(q: list[float], without: tuple[int, ...]) -> list[float]:
    left = [0.0 if token in without else share for token, share in enumerate(q)]
    return [share / sum(left) for share in left] if sum(left) else [1.0] + [0.0] * (len(q) - 1)


# --- the exact distribution of a round


@dataclass(frozen=True)
class Course:
    """A round up to `node`: the tokens seen, and coins that lead there."""

    node: int
    weight: float
    tokens: tuple[int, ...]
    coins: tuple[float, ...]

    def put(self, **changes) -> "Course":
        return replace(self, **changes)


def put(values: tuple, at: int, value) -> tuple:
    return (*values[:at], value, *values[at + 1 :])


def threshold(holds, rows: int) -> torch.Tensor:
    """The share of [0, 1) below which `holds(coin [rows])` is true, by halving."""
    low, high = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), GRID)
    for _ in range(54):
        middle = (low + high) // 2
        true = holds(middle.double() / GRID) & (low < high)
        low, high = torch.where(true, middle + 1, low), torch.where(true, high, middle)
    return low.double() / GRID


class Prover:
    """Finds the exact distribution of what drafting, `verifier` and plain continuation commit."""

    def __init__(self, toy: Toy, tree: Tree, mode: str, verifier=verify, p: torch.Tensor | None = None):
        self.toy, self.tree, self.mode, self.verifier = toy, tree, mode, verifier
        self.p = toy.target if p is None else p

    def run(self, courses: list[Course], coins: torch.Tensor, final: torch.Tensor) -> sampling.Verified:
        tokens = torch.tensor([course.tokens for course in courses])
        histories = self.toy.histories(self.tree, tokens)
        q = None if self.mode == "greedy" else self.toy.draft[histories]
        return self.verifier(self.tree, tokens, self.p[histories], coins, final, q, self.mode == WITH)

    def accepted(self, courses: list[Course], nodes: list[int], depth: int) -> list[float]:
        """Per course the probability that its node of `nodes` is accepted, the other coins being as scripted."""
        coins, rows = torch.tensor([course.coins for course in courses], dtype=torch.float64), torch.arange(len(nodes))
        final, nodes = torch.zeros(len(rows), dtype=torch.float64), torch.tensor(nodes)

        def holds(coin):
            coins[rows, nodes] = coin
            return self.run(courses, coins, final).path[:, depth] == nodes

        return threshold(holds, len(rows)).tolist()

    def next_token(self, courses: list[Course]) -> torch.Tensor:
        """[courses, V]: the distribution of the token that ends the round."""
        vocabulary = self.toy.vocabulary
        repeated = [course for course in courses for _ in range(vocabulary)]
        coins = torch.tensor([course.coins for course in repeated], dtype=torch.float64)
        token = torch.arange(vocabulary).repeat(len(courses))
        below = threshold(lambda final: self.run(repeated, coins, final).next_token <= token, len(repeated))
        return below.view(-1, vocabulary).diff(prepend=torch.zeros(len(courses), 1, dtype=torch.float64))

    def joint(self) -> torch.Tensor:
        """What `Toy.joint` is for the target, for the whole of drafting and verification."""
        stopped = torch.zeros(self.toy.target.shape[0] * self.toy.vocabulary + 1, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        unseen = torch.randint(self.toy.vocabulary, (self.tree.num_nodes,), generator=generator)
        courses = [Course(0, 1.0, tuple(unseen.tolist()), (0.0,) * self.tree.num_nodes)]
        while courses:
            courses, ended = self.step(courses)
            histories = self.toy.histories(self.tree, torch.tensor([course.tokens for course in ended]))
            for course, history, distribution in zip(ended, histories, self.next_token(ended), strict=True):
                first = child(history[course.node], 0, self.toy.vocabulary)
                stopped[first : first + self.toy.vocabulary] += course.weight * distribution
        return self.toy.continued(stopped)

    def step(self, courses: list[Course]) -> tuple[list[Course], list[Course]]:
        """One level down: the courses that go on to a child, and those that end at their node."""
        trials, nodes, ended = [], [], []
        for course in courses:
            kids = [node for node, parent in enumerate(self.tree.parents) if parent == course.node]
            q = self.toy.draft[self.toy.histories(self.tree, torch.tensor([course.tokens]))[0, course.node]]
            for drawn, weight in proposals(q, len(kids), self.mode):
                trial = course.put(weight=course.weight * weight)
                for kid, token in zip(kids, drawn, strict=True):
                    trial = trial.put(tokens=put(trial.tokens, kid, token))
                for kid in kids:
                    trials.append(trial)
                    nodes.append(kid)
                    trial = trial.put(coins=put(trial.coins, kid, REJECT))
                if not kids:
                    ended.append(trial)
        going_on, reach = [], 1.0
        probability = self.accepted(trials, nodes, int(self.tree.depth[nodes[0]])) if trials else []
        for trial, node, accept in zip(trials, nodes, probability, strict=True):
            reach = 1.0 if self.tree.child_rank[node] == 0 else reach
            going_on.append(Course(node, trial.weight * reach * accept, trial.tokens, put(trial.coins, node, 0.0)))
            reach *= 1 - accept
            if node == max(n for n, p in enumerate(self.tree.parents) if p == self.tree.parents[node]):
                rejected = put(trial.coins, node, REJECT)
                ended.append(Course(self.tree.parents[node], trial.weight * reach, trial.tokens, rejected))
        return [c for c in going_on if c.weight > 0], [c for c in ended if c.weight > 0]


def error(toy: Toy, tree: Tree, mode: str, verifier=verify, p: torch.Tensor | None = None) -> float:
    """How far the committed tokens are from the target's distribution."""
    return float((Prover(toy, tree, mode, verifier, p).joint() - toy.joint()).abs().max())


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("mode", ["greedy", WITH, WITHOUT])
@pytest.mark.parametrize("name", TREES)
def test_committed_tokens_have_exactly_the_targets_distribution(name, mode, top_p):
    toy = make_toy(3, TREES[name].max_depth, top_p)
    assert error(toy, TREES[name], mode) < 1e-12
