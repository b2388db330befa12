"""Drafts all levels in one forward of the draft, by mask slots behind the pending token (P-EAGLE). DESIGN section 3.5.

The forward is the one that processes the pending tokens. Mask slots lie where a chain's tokens would, and so do their
keys and values; they are nobody's tokens, and the next round writes over them. Knows nothing of validation or requests.

Shapes: A active rows, P pending tokens of a row at most, D levels of the tree, H hidden, W the draft's states.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F

from eagle_train.drafts import Draft, PeagleDraft
from eagle_train.inference.drafters.all_at_once import ByLevels
from eagle_train.inference.drafters.drafter import MAX_PENDING, Drafted, DraftRound, Outcome, Pending, TreePlan
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Compiled


class OnePass(ByLevels):
    """Proposes with a draft whose kind has mask slots: the level below the pending token is that token's own slot, and
    each further one a mask slot.

    Raises UserError for another `alignment` than accepted: what it drafts has no keys and values to keep.
    """

    def __init__(self, draft: Draft, target: Target, alignment: str = "accepted"):
        super().__init__(draft, target, alignment)
        assert isinstance(self.draft, PeagleDraft)
        self._mask_token = self.draft.config.mask_id
        with torch.no_grad():
            self._masked = self.draft.masked()  # [1, 1, H], of the whole draft

    def levels(self, round: DraftRound) -> torch.Tensor:
        return self.read(round, round.plan.tree.max_depth)

    def follow(self, round: DraftRound) -> Drafted:
        self.read(round, 1)
        return super().follow(round)

    def read(self, round: DraftRound, depth: int) -> torch.Tensor:
        """Process the pending tokens, with `depth` - 1 mask slots behind each row's last. Returns the states there,
        [A, depth, W].

        A row with fewer pending tokens than P has mask slots where the others' are, and more behind them that nobody
        reads.
        """
        pending, masks = round.pending, depth - 1
        tokens, fed = pending.tokens, self.draft.fuse(pending.hidden)
        prefix, steps = round.draft_prefix, torch.arange(depth, device=tokens.device)
        if masks > 0:
            prefix = prefix.with_scratch(masks)
            places = torch.arange(tokens.shape[1] + masks, device=tokens.device)
            known = places < pending.counts.unsqueeze(1)  # [A, P + masks]
            tokens = torch.where(known, F.pad(tokens, (0, masks)), self._mask_token)
            fed = torch.where(known.unsqueeze(2), F.pad(fed, (0, 0, 0, masks)), self._masked)
        positions = prefix.positions(tokens.shape[1])
        attend = self.cache.extend(prefix, positions)
        return self.run_forward_at(tokens, fed, positions, pending.end + steps, attend)

    def compile(self, sizes: Iterable[tuple[int, TreePlan]]) -> list[Callable[[], None]]:
        forward = self.compiled_at = Compiled(self.forward_at, self.target.device)
        shapes, sizes = set[tuple[int, int, int]](), list(sizes)
        catches_up = any(plan.tree.num_nodes == 1 for _, plan in sizes)
        for rows, plan in sizes:
            depth = max(1, plan.tree.max_depth)
            counts = {*range(1, depth + 2), *([2, MAX_PENDING] if catches_up else [])}  # accepted ones, and one
            shapes |= {(rows, count + depth - 1, depth) for count in counts}
        return [partial(self._prepare, forward, *shape) for shape in sorted(shapes)]

    def _prepare(self, forward: Compiled, rows: int, length: int, depth: int) -> None:
        """Compile for tokens [rows, length] of which `depth` are read."""
        hidden = self.target.embedding.new_zeros(rows, length, self.draft.config.hidden_size)
        tokens = torch.zeros(rows, length, dtype=torch.long, device=hidden.device)
        forward.prepare(tokens, hidden, tokens, tokens.new_zeros(rows, depth))

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        return outcome.pending
