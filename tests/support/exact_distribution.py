"""The exact distribution of what drafting and verification commit, for a toy target and draft on a small vocabulary.

Verification is a black box here: each of its decisions depends on one number through thresholds, halving finds them
to the last bit of float64, and the product of the decisions along a course of a round is its probability.
What the target's distribution should be is worked out without the code under test. DESIGN section 3.7.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from eagle_train.inference.decode.sampling import (
    SamplingTensors,
    Verified,
    probabilities,
    sample,
    verify,
    verify_chosen,
)
from eagle_train.inference.decode.tree import Tree

WITH, WITHOUT = "multinomial", "multinomial_without_replacement"
GRID = 2**53
REJECT = (GRID - 1) / GRID  # the greatest coin


def one_row(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingTensors:
    return SamplingTensors.from_lists([temperature], [top_k], [top_p], "cpu")


def child(history, token, vocabulary: int):
    """The number of a history, ints or tensors, with a token more; the empty one is 0, and shorter ones come first."""
    return history * vocabulary + token + 1


@dataclass(frozen=True)
class Toy:
    """A target and a draft that give every history a distribution of its own."""

    target: torch.Tensor  # float64 [histories, V]: what is to be sampled, worked out without the code under test
    p: torch.Tensor  # float64 [histories, V]: the same as `probabilities` has it
    draft: torch.Tensor  # float64 [histories, V]

    @property
    def vocabulary(self) -> int:
        return self.target.shape[1]

    def nothing(self) -> torch.Tensor:
        """A mass of 0 for every history, those one longer than the table included."""
        return torch.zeros(self.target.shape[0] * self.vocabulary + 1, dtype=torch.float64)

    def continued(self, mass: torch.Tensor) -> torch.Tensor:
        """The longest histories' mass, once plain draws from the target have handed on what rests on shorter ones."""
        mass = mass.clone()
        for history, distribution in enumerate(self.target):
            first = child(history, 0, self.vocabulary)
            mass[first : first + self.vocabulary] += mass[history] * distribution
        return mass[len(self.target) :]

    def joint(self) -> torch.Tensor:
        """The target's probability of each of the longest histories."""
        mass = self.nothing()
        mass[0] = 1.0
        return self.continued(mass)

    def distributions(self, tree: Tree, tokens: torch.Tensor) -> torch.Tensor:
        """float64 [B, N, V]: `p` at each node."""
        return self.p[self.histories(tree, tokens)]

    def histories(self, tree: Tree, tokens: torch.Tensor) -> torch.Tensor:
        """[B, N]: the history at each node."""
        histories = torch.zeros_like(tokens)
        for node, parent in enumerate(tree.parents[1:], start=1):
            histories[:, node] = child(histories[:, parent], tokens[:, node], self.vocabulary)
        return histories


def make_toy(vocabulary: int, max_depth: int, top_p: float = 1.0, draft_support: int | None = None) -> Toy:
    """Random logits; the draft's leave out all tokens from `draft_support` on."""
    generator = torch.Generator().manual_seed(0)
    count = sum(vocabulary**length for length in range(max_depth + 1))
    target_logits, draft_logits = torch.randn(2, count, vocabulary, generator=generator, dtype=torch.float64) * 1.5
    target = target_logits.softmax(-1)
    for row in target:
        order = row.argsort(descending=True).tolist()
        enough = [n for n in range(1, vocabulary) if row[order[:n]].sum() >= top_p]
        row[order[min(enough, default=vocabulary) :]] = 0.0
    draft_logits[:, draft_support or vocabulary :] = -torch.inf
    p = probabilities(target_logits[None], one_row(top_p=top_p))[0]
    return Toy(target / target.sum(-1, keepdim=True), p, draft_logits.softmax(-1))


def draws(q: list[float], num_children: int, mode: str) -> list[tuple[tuple[int, ...], float]]:
    """Every way to draw a node's children, with its probability."""
    ways: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(num_children):
        ways = [
            ((*drawn, token), weight * share)
            for drawn, weight in ways
            for token, share in enumerate(shares(q, drawn if mode == WITHOUT else ()))
            if share > 0
        ]
    return ways


def shares(q: list[float], taken: tuple[int, ...]) -> list[float]:
    """q without the tokens taken, renormalised; with nothing left, token 0."""
    left = [0.0 if token in taken else share for token, share in enumerate(q)]
    return [share / sum(left) for share in left] if any(left) else [1.0] + [0.0] * (len(q) - 1)


@dataclass(frozen=True)
class Course:
    """One course of a round as far as `node`: its probability, the tokens drafted, and coins that lead there."""

    node: int
    weight: float
    tokens: tuple[int, ...]
    coins: tuple[float, ...]

    def drafting(self, kids: list[int], drawn: tuple[int, ...], share: float) -> "Course":
        given = dict(zip(kids, drawn, strict=True))
        tokens = tuple(given.get(node, token) for node, token in enumerate(self.tokens))
        return replace(self, tokens=tokens, weight=self.weight * share)

    def accepting(self, kid: int, share: float) -> "Course":
        return replace(self, node=kid, weight=self.weight * share)

    def rejecting(self, kid: int, share: float) -> "Course":
        coins = (*self.coins[:kid], REJECT, *self.coins[kid + 1 :])
        return replace(self, coins=coins, weight=self.weight * (1 - share))


def threshold(holds: Callable[[torch.Tensor], torch.Tensor], rows: int) -> torch.Tensor:
    """Per row the share of [0, 1) in which `holds(number [rows])` is true; it must be the lower end."""
    low, high = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), GRID)
    for _ in range(54):
        middle = (low + high) // 2
        true = holds(middle.double() / GRID) & (low < high)
        low, high = torch.where(true, middle + 1, low), torch.where(true, high, middle)
    return low.double() / GRID


@dataclass(frozen=True)
class Prover:
    """Follows all courses of a round of drawing drafts (enumerated) and verifying them (a black box)."""

    toy: Toy
    tree: Tree
    mode: str
    verifier: Callable[..., Verified]

    def kids(self, node: int) -> list[int]:
        return [kid for kid, parent in enumerate(self.tree.parents) if parent == node]

    def run(self, courses: list[Course], coins: torch.Tensor, final: torch.Tensor) -> Verified:
        tokens = torch.tensor([course.tokens for course in courses])
        p, q = self.toy.distributions(self.tree, tokens), self.toy.draft[self.toy.histories(self.tree, tokens)]
        return self.verifier(self.tree, tokens, p, coins, final, q, self.mode == WITH)

    def acceptance(self, courses: list[Course], kids: list[int]) -> list[float]:
        """Per course the probability that its kid is accepted, given the other coins."""
        coins = torch.tensor([course.coins for course in courses], dtype=torch.float64)
        rows, nodes = torch.arange(len(kids)), torch.tensor(kids, dtype=torch.int64)

        def holds(coin: torch.Tensor) -> torch.Tensor:
            coins[rows, nodes] = coin
            last = self.run(courses, coins, torch.zeros(len(rows), dtype=torch.float64)).node
            return self.tree.ancestors[last, nodes]

        return threshold(holds, len(kids)).tolist() if kids else []

    def next_token(self, courses: list[Course]) -> torch.Tensor:
        """[courses, V]: the distribution of the token that ends the round."""
        courses = [course for course in courses for _ in range(self.toy.vocabulary)]
        coins = torch.tensor([course.coins for course in courses], dtype=torch.float64)
        token = torch.arange(len(courses)) % self.toy.vocabulary
        up_to = threshold(lambda final: self.run(courses, coins, final).next_token <= token, len(courses))
        up_to = up_to.view(-1, self.toy.vocabulary)
        return up_to.diff(prepend=torch.zeros_like(up_to[:, :1]))

    def step(self, courses: list[Course]) -> tuple[list[Course], list[Course]]:
        """One level down: the courses that go on to a child, and those that end where they are."""
        drafted = []
        for course in courses:
            kids, history = self.kids(course.node), self.toy.histories(self.tree, torch.tensor([course.tokens]))
            for drawn, share in draws(self.toy.draft[history[0, course.node]].tolist(), len(kids), self.mode):
                drafted.append((course.drafting(kids, drawn, share), kids))
        asked = []
        for course, kids in drafted:
            for kid in kids:
                asked.append((course, kid))
                course = course.rejecting(kid, 0.0)
        probability = iter(self.acceptance([course for course, _ in asked], [kid for _, kid in asked]))
        going_on, ending = [], []
        for course, kids in drafted:
            for kid in kids:
                share = next(probability)
                going_on.append(course.accepting(kid, share))
                course = course.rejecting(kid, share)
            ending.append(course)
        return [c for c in going_on if c.weight > 0], [c for c in ending if c.weight > 0]

    def joint(self) -> torch.Tensor:
        """What `Toy.joint` is without speculation: a round, and plain draws after it."""
        mass = self.toy.nothing()
        unseen = tuple(node % self.toy.vocabulary for node in range(self.tree.num_nodes))
        courses = [Course(0, 1.0, unseen, (0.0,) * self.tree.num_nodes)]
        all_ending = []
        while courses:
            courses, ending = self.step(courses)
            all_ending += ending
        histories = self.toy.histories(self.tree, torch.tensor([course.tokens for course in all_ending]))
        for course, history, distribution in zip(all_ending, histories, self.next_token(all_ending), strict=True):
            first = child(int(history[course.node]), 0, self.toy.vocabulary)
            mass[first : first + self.toy.vocabulary] += course.weight * distribution
        return self.toy.continued(mass)


def by_depth(tree: Tree, tokens: torch.Tensor, p: torch.Tensor, numbers: torch.Tensor) -> Verified:
    """Greedy drafts' verification, `verify_sampled` without what comes before: numbers [B, D + 1], one for a depth."""
    return verify_chosen(tree, tokens, sample(p, numbers[:, tree.depth]))


@dataclass(frozen=True)
class GreedyCourse:
    """One course of a round as far as `node`: its probability, the tokens drafted, and numbers that lead there."""

    node: int
    weight: float
    tokens: tuple[int, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class GreedyProver:
    """Follows all courses of a round whose drafts are the most likely tokens: a depth's token depends on a number."""

    toy: Toy
    tree: Tree
    verifier: Callable[..., Verified]

    def drafted(self, course: GreedyCourse) -> GreedyCourse:
        """With the children of the node where it stands."""
        tokens = torch.tensor([course.tokens])
        best = self.toy.draft[self.toy.histories(self.tree, tokens)[0, course.node]].argsort(descending=True).tolist()
        kids = [kid for kid in self.tree.children[course.node].tolist() if kid >= 0]
        for token, kid in zip(best[: len(kids)], kids, strict=True):
            tokens[0, kid] = token
        return replace(course, tokens=tuple(tokens[0].tolist()))

    def committed(
        self, courses: list[GreedyCourse], depth: int, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, Verified]:
        """The token [courses] that a round commits below a depth for these numbers of it, and the round's result."""
        tokens = torch.tensor([course.tokens for course in courses])
        all_numbers = torch.tensor([course.numbers for course in courses], dtype=torch.float64)
        all_numbers[:, depth] = numbers
        p = self.toy.distributions(self.tree, tokens)
        found = self.verifier(self.tree, tokens, p, all_numbers)
        rows, below = torch.arange(len(courses)), min(depth + 1, self.tree.max_depth)
        accepted = tokens[rows, self.tree.path_to[found.node, below]]
        return torch.where(self.tree.depth[found.node] > depth, accepted, found.next_token), found

    def step(self, courses: list[GreedyCourse], depth: int, mass: torch.Tensor) -> list[GreedyCourse]:
        """One level down: the courses that go on to a child. Those that end add what they come to to `mass`."""
        size = self.toy.vocabulary
        courses = [course for course in map(self.drafted, courses) for _ in range(size)]
        token = torch.arange(len(courses)) % size
        up_to = threshold(lambda u: self.committed(courses, depth, u)[0] <= token, len(courses)).view(-1, size)
        before = torch.cat((torch.zeros_like(up_to[:, :1]), up_to[:, :-1]), 1)
        share, middle = (up_to - before).flatten(), ((up_to + before) / 2).flatten()
        _, found = self.committed(courses, depth, middle)
        going_on = []
        histories = self.toy.histories(self.tree, torch.tensor([course.tokens for course in courses]))
        for row, course in enumerate(courses):
            weight, node = course.weight * float(share[row]), int(found.node[row])
            numbers = (*course.numbers[:depth], float(middle[row]), *course.numbers[depth + 1 :])
            if self.tree.depth[node] > depth:
                kid = int(self.tree.path_to[node, depth + 1])
                going_on.append(GreedyCourse(kid, weight, course.tokens, numbers))
            else:
                mass[child(int(histories[row, course.node]), int(token[row]), size)] += weight
        return [course for course in going_on if course.weight > 0]

    def joint(self) -> torch.Tensor:
        mass = self.toy.nothing()
        unseen = tuple(node % self.toy.vocabulary for node in range(self.tree.num_nodes))
        # All but certain to go on nowhere: what is below the node in question must not matter yet.
        courses = [GreedyCourse(0, 1.0, unseen, (REJECT,) * (self.tree.max_depth + 1))]
        for depth in range(self.tree.max_depth + 1):
            courses = self.step(courses, depth, mass) if courses else []
        return self.toy.continued(mass)


def error(toy: Toy, tree: Tree, mode: str, verifier: Callable[..., Verified] | None = None) -> float:
    """How far what is committed is from the target's distribution."""
    if mode == "greedy":
        prover: Prover | GreedyProver = GreedyProver(toy, tree, verifier or by_depth)
    else:
        prover = Prover(toy, tree, mode, verifier or verify)
    return float((prover.joint() - toy.joint()).abs().max())
