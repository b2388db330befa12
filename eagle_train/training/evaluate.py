"""Held-out measurement: losses, and how deep simulated chains of draft tokens would be accepted.

Without an engine: the draft is unrolled on its own features, from every supervised slot at once. Knows nothing of
optimisers, checkpoints or the course of a run. DESIGN sections 3.2, 3.8.

Shapes: B rows, T tokens of a packed row, H hidden.
"""

from collections.abc import Callable
from functools import partial

import torch

from eagle_train.corpus.stream import Batch
from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.drafts import Draft, Head, Lesson
from eagle_train.drafts.kind import Rows
from eagle_train.errors import check
from eagle_train.models.target import TargetEnds
from eagle_train.training.metrics import Meter, Record
from eagle_train.training.target_pass import autocast, target_states, to_device, unread

_CHOICE_ROWS = 1024  # rows whose logits exist at once while a token is chosen for each


@torch.no_grad()
def measure_heldout(
    target: TargetEnds,
    draft: Draft,
    batches: list[Batch],
    depth: int,
    world: World = ALONE,
    *,
    forward: Callable[..., torch.Tensor] | None = None,
    head: Head | None = None,
) -> Record:
    """Losses, acceptance by depth and simulated TPC on held-out batches; {} without any. All ranks call it.

    `forward`: the draft's, as a backend wraps it; `head`: of the draft, if there is one. Rank r measures every size-th
    batch.
    `acceptance_per_depth` has up to `depth` numbers: depths for which no held-out document is long enough, and those
    that the draft cannot reach, are left out. Raises CommonError where states of a cached target cannot be read.
    """
    meter, forward, head = Meter(), forward or draft, head or Head(draft, target.lm_head)
    depth = min(depth, draft.config.levels or depth)
    fault = None
    accepted = chains = torch.zeros(depth, dtype=torch.float64, device=target.device)
    for start in range(0, len(batches), world.size):
        number = start + world.rank
        counts = number < len(batches)  # a rank without a batch runs the first one uncounted: forwards are collective
        batch = to_device(batches[number] if counts else batches[0], target.device)
        of_target = target_states(target, batch, draft.config.target_layers)
        fault = fault or of_target.fault
        hidden, positions = of_target.hidden, batch.positions
        with autocast(target):
            rows = Rows(target.embed(batch.tokens), of_target, positions, batch.lengths, target.embed)
            states = draft.unrolled(forward, rows, depth)
        counted, slots = batch.supervised & counts, batch.slots[0][: None if counts else 0]
        sums = draft.losses(states[:1], [slots], hidden, head, Lesson(), scale=1.0)
        meter.add(sums.rows, **sums.figures)
        choose = partial(_choice, draft, head)
        held, possible = chain_acceptance(states, most_likely(hidden, target.lm_head), choose, counted, positions)
        accepted, chains = accepted + held, chains + possible
    if not batches:
        return {}
    told = unread(target, fault, world)
    check(told is None, str(told), CommonError)
    accepted, chains = world.sum(accepted), world.sum(chains)
    by_depth = (accepted / chains)[chains > 0].tolist()
    return {**meter.means(world), "acceptance_per_depth": by_depth, "simulated_tpc": 1 + sum(by_depth)}


def _choice(draft: Draft, head: Head, states: torch.Tensor, depth: int) -> torch.Tensor:
    """The draft's choice, a token of the target's int64 [B, T], for its states [B, T, W] at a depth."""
    return head.tokens(most_likely(states, partial(draft.logits, head=head, level=depth)))


def most_likely(hidden: torch.Tensor, lm_head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The most likely token, int64 [B, T], by what makes logits of states [B, T, ...]."""
    rows = hidden.flatten(0, 1).split(_CHOICE_ROWS)
    return torch.cat([lm_head(chunk).argmax(-1) for chunk in rows]).view(hidden.shape[:2])


def chain_acceptance(
    states: list[torch.Tensor],
    best: torch.Tensor,
    choose: Callable[[torch.Tensor, int], torch.Tensor],
    supervised: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many simulated chains were accepted down to each depth, and how many there were: two float64 tensors [depth].

    `states`: the draft's states [B, T, W] of each pass. `best` [B, T]: the target's choice at each slot.
    `choose`: the draft's choice for states at a depth, 0 the first. A chain counts if all its slots are supervised, so
    all depths count the same chains, except those that a document's end cuts short.
    """
    held = possible = torch.ones_like(supervised)
    accepted, chains = [], []
    for depth, state in enumerate(states):
        if depth > 0:  # a chain at slot j continues the one at slot j-1
            held, possible = held.roll(1, dims=1), possible.roll(1, dims=1)
        possible = possible & supervised & (positions >= depth)
        held = held & possible & (choose(state, depth) == best)
        accepted.append(held.sum())
        chains.append(possible.sum())
    return torch.stack(accepted).double(), torch.stack(chains).double()
