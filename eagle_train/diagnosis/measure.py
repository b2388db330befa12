"""What a draft is worth on texts, in the training graph: chains from every slot, and bootstrap intervals over prompts.

Knows nothing of causes. DESIGN section 3.8.

Shapes: T tokens of a part, N slots of all parts that are counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from eagle_train.diagnosis.texts import Part
from eagle_train.drafts import Draft, Head
from eagle_train.drafts.kind import Rows
from eagle_train.inference import Output
from eagle_train.models.target import Target

_RESAMPLED = 1000
_CHOICE_ROWS = 1024  # slots whose logits exist at once
_BINS = 4  # of the target's certainty
_FEW = 24  # slots below which nothing is said
FEWEST = 6
"""Prompts below which nothing is said, as in evaluations: an interval over fewer has far less than its 99 %."""
Change = Callable[[Rows], Rows]


@dataclass(frozen=True, eq=False)
class Measured:
    """Of each counted slot: `taken`, how many tokens of a chain from it the target takes, fp64 [N]; `first`, whether
    the first is right, fp64 [N]; the number of its prompt and its position, int64 [N]; and the probability of the
    target's choice there, `sure` fp32 [N]."""

    taken: torch.Tensor
    first: torch.Tensor
    owner: torch.Tensor
    position: torch.Tensor
    sure: torch.Tensor

    @property
    def tokens(self) -> float:
        """Accepted tokens of a chain, on average."""
        return self.taken.mean().item()

    @property
    def agreement(self) -> float:
        """The share of slots with the right first token: acceptance at depth 1."""
        return self.first.mean().item()

    @property
    def prompts(self) -> int:
        return len(self.owner.unique())

    def per_depth(self, depth: int) -> list[float]:
        """The shares of slots from which a chain is accepted down to depth 1, 2, ..."""
        return [(self.taken >= each).double().mean().item() for each in range(1, depth + 1)]

    def where(self, slots: torch.Tensor) -> "Measured":
        """Of these slots alone, bool [N]."""
        return Measured(*(getattr(self, each.name)[slots] for each in fields(self)))


@dataclass(frozen=True, eq=False)
class Variant:
    """A draft, and a change of what it is fed, that differ from the examined draft in one convention. `said`: what was
    changed, in words that follow "with". `least`: the acceptance at depth 1 below which it is not told."""

    cause: str
    said: str
    draft: Draft
    change: Change = lambda rows: rows
    least: float = 0.0


@dataclass(frozen=True)
class Interval:
    """A mean and its 99 % interval over so many prompts."""

    mean: float
    low: float
    high: float
    prompts: int

    @property
    def bounds(self) -> list[float] | None:
        """None where the prompts are too few for an interval."""
        return None if self.prompts < FEWEST else [self.low, self.high]


def too_few(prompts: int) -> str | None:
    """Why an interval over so many prompts says nothing; None where it does."""
    return None if prompts >= FEWEST else f"{prompts} prompts are too few, and {FEWEST} the least; raise limit"


@torch.no_grad()
def measured(
    target: Target, draft: Draft, parts: Sequence[Part], depth: int, change: Change = lambda rows: rows
) -> Measured:
    """Chains of `depth` tokens, or as many as the draft can, from every counted slot. `change`: of what it is fed."""
    head, found = Head(draft, target.lm_head), []
    depth = min(depth, draft.config.levels or depth)
    for part in parts:
        right = hits(draft, head, part, part.best, depth, change)
        alive = right[0] & part.counted
        first, taken = alive, alive.double()
        for ahead in range(1, depth):
            same = part.owner.roll(-ahead, 1) == part.owner
            same[:, part.owner.shape[1] - ahead :] = False
            alive = alive & same & (right[ahead] & part.counted).roll(-ahead, 1)
            taken = taken + alive
        counted = part.counted & (part.positions >= draft.config.first_slot)
        sides = (taken, first.double(), part.owner, part.positions, part.sure)
        found.append([each[counted].cpu() for each in sides])
    return Measured(*(torch.cat(each) for each in zip(*found, strict=True)))


def hits(
    draft: Draft, head: Head, part: Part, wanted: torch.Tensor, depth: int, change: Change = lambda rows: rows
) -> list[torch.Tensor]:
    """For each pass, bool [1, T]: whether the draft's choice at a slot is the `wanted` token, int64 [1, T]."""
    states = draft.unrolled(draft, change(part.rows()), depth)
    return [chosen(draft, head, each, level) == wanted for level, each in enumerate(states)]


def chosen(draft: Draft, head: Head, states: torch.Tensor, level: int = 0) -> torch.Tensor:
    """The draft's most likely token, int64 [1, T], for its states [1, T, W] in a pass."""
    pieces = states[0].split(_CHOICE_ROWS)
    best = [draft.logits(piece, head, level).argmax(-1) for piece in pieces]
    return head.tokens(torch.cat(best))[None]


def interval(values: torch.Tensor, owner: torch.Tensor, seed: int = 0) -> Interval:
    """The mean of `values` fp64 [N], with a bootstrap interval: prompts are drawn, each with all of its slots."""
    _, place = owner.unique(return_inverse=True)
    count = int(place.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, place, values.double())
    slots = torch.zeros(count, dtype=torch.float64).index_add_(0, place, torch.ones_like(values, dtype=torch.float64))
    drawn = torch.randint(count, (_RESAMPLED, count), generator=torch.Generator().manual_seed(seed))
    means = (sums[drawn].sum(1) / slots[drawn].sum(1)).sort().values
    edge = _RESAMPLED // 200
    return Interval(values.double().mean().item(), means[edge].item(), means[-1 - edge].item(), count)


def served_tpc(outputs: Mapping[int, Output], seed: int = 0) -> Interval | None:
    """TPC of answers by their prompts' numbers: tokens committed in decoding, per target call of it. None without a
    call."""
    calls = torch.tensor([each.stats.calls for each in outputs.values()])
    if not calls.any():
        return None
    tokens = torch.tensor([each.stats.tokens for each in outputs.values()], dtype=torch.float64)
    share = (tokens / calls.clamp(min=1)).repeat_interleave(calls)  # of each call, as `interval` weighs values
    return interval(share, torch.tensor(list(outputs)).repeat_interleave(calls), seed)


def difference(one: Measured, other: Measured, seed: int = 0) -> Interval:
    """How many more tokens `one` has accepted than `other`, a slot, with an interval over the prompts of both. Slots
    are compared one by one where both have the same, else prompt by prompt."""
    if torch.equal(one.owner, other.owner) and torch.equal(one.position, other.position):
        return interval(one.taken - other.taken, one.owner, seed)
    return between(one.taken, one.owner, other.taken, other.owner, seed)


def between(
    one: torch.Tensor, owner: torch.Tensor, other: torch.Tensor, others: torch.Tensor, seed: int = 0
) -> Interval:
    """The mean of `one` fp64 [N] minus that of `other`, each with the prompts of its values, int64. The interval is
    over the prompts that both have."""
    shared = sorted(set(owner.tolist()) & set(others.tolist()))
    means = torch.tensor(
        [[one[owner == each].mean().item(), other[others == each].mean().item()] for each in shared],
        dtype=torch.float64,
    )
    return interval(means[:, 0] - means[:, 1], torch.arange(len(means)), seed)


def unexplained(found: Measured, reference: Measured, seed: int = 0) -> Interval | None:
    """How much more often the first token is right in `found` than in `reference` where the target is as sure of its
    choice, with an interval over the prompts of `found`: an easier text is no merit of the draft. None where too few
    slots, or slots of too few prompts, can be compared."""
    edges = (
        torch.cat((found.sure, reference.sure))
        .double()
        .quantile(torch.linspace(0, 1, _BINS + 1, dtype=torch.float64)[1:-1])
    )
    groups = [torch.bucketize(each.sure.double(), edges) for each in (found, reference)]
    expected = torch.full((_BINS,), float("nan"), dtype=torch.float64)
    for number in range(_BINS):
        same = groups[1] == number
        if int(same.sum()) >= _FEW // 2:
            expected[number] = reference.first[same].mean()
    known = ~expected[groups[0]].isnan()
    if int(known.sum()) < _FEW or len(reference.first) < _FEW:
        return None
    gain = interval(found.first[known] - expected[groups[0][known]], found.owner[known], seed)
    return gain if min(gain.prompts, reference.prompts) >= FEWEST else None
