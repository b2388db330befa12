"""Which of a cache's slots each query sees, in the form that each kernel is told it. Knows no models or caches.

Shapes: A rows, T queries of a row.
"""

from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F

from eagle_train.ops import flash
from eagle_train.ops.rule import Rule, additive_mask

FEW_QUERIES = 32  # up to so many, their mask is kept for those who come


class VisibleSlots:
    """Which of its row's slots a query sees, a slot for each position: those before its end that the rule lets it see.

    `positions` int64 [A, T] of the queries; `ends` int64 [A, 1] for all queries of a row, None for causality: each
    query's own slot is its last. Of `count` slots; `whole`: every row's last end is `count`. What the kernels are told
    is made once for all layers of the same reach.
    """

    def __init__(self, positions: torch.Tensor, ends: torch.Tensor | None, count: int, whole: bool):
        self.positions, self.given, self.count, self.whole = positions, ends, count, whole
        self.causal = ends is None and positions.shape[1] > 1
        self.masks: dict[tuple, torch.Tensor | None] = {}
        self.made: dict[tuple, flash.Sequences] = {}
        self._by_rows: dict[tuple[int, int], VisibleSlots] = {}
        self._runs: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def ends(self) -> torch.Tensor:
        """int64 [A, 1 or T]."""
        return self.positions + 1 if self.given is None else self.given

    def rows(self, rows: slice) -> "VisibleSlots":
        """The same of these rows alone, made once."""
        if rows == slice(None):
            return self
        key = (rows.start, rows.stop)
        if key not in self._by_rows:
            given = None if self.given is None else self.given[rows]
            self._by_rows[key] = VisibleSlots(self.positions[rows], given, self.count, self.whole)
        return self._by_rows[key]

    def behind(self, slots: int) -> "VisibleSlots":
        """What is seen behind the first `slots` slots, which every row has; of rules that have no chunks and skip no
        positions, but for 0 slots."""
        if slots == 0:
            return self
        given = None if self.given is None else self.given - slots
        return VisibleSlots(self.positions - slots, given, self.count - slots, self.whole)

    def mask(self, rule: Rule) -> torch.Tensor | None:
        """`additive_mask` [A or 1, 1, 1 or T, count]; None where every slot is seen."""
        if rule.reach not in self.masks:
            self.masks[rule.reach] = self.new_mask(rule)
        return self.masks[rule.reach]

    def new_mask(self, rule: Rule) -> torch.Tensor | None:
        length = self.positions.shape[1]
        if self.whole and rule.sees_all and (not self.causal or length <= FEW_QUERIES):
            return _causal_end(length, self.count, self.positions.device) if self.causal else None
        slots = torch.arange(self.count, device=self.ends.device)
        seen = slots < self.ends.unsqueeze(2)
        if not rule.sees_all:
            seen = seen & rule.sees(self.positions.unsqueeze(2), slots)
        return additive_mask(seen.unsqueeze(1))

    def runs(self, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
        """For paged.py: the first slot that each query sees, and the one behind the last, int32 [A, T] each."""
        if rule.reach not in self._runs:
            ends = self.ends.expand_as(self.positions)
            self._runs[rule.reach] = rule.first(self.positions).int(), ends.int().contiguous()
        return self._runs[rule.reach]

    def sequences(self, rule: Rule, together: bool) -> flash.Sequences:
        """For flash: all queries of a row as one sequence, or each alone with the run of slots that it sees."""
        key = (together, *rule.reach)
        if key not in self.made:
            self.made[key] = self.new_sequences(rule, together)
        return self.made[key]

    def new_sequences(self, rule: Rule, together: bool) -> flash.Sequences:
        """The kernel's flat layout: queries [A * T], keys [A * count]; S sequences: A together, else A * T."""
        (rows, length), device = self.positions.shape, self.positions.device
        # A sequence's keys are the slots [first, ends) of its row, int64 [A, 1] together, [A, T] alone.
        first, ends = (0, self.ends[:, -1:]) if together else (rule.first(self.positions), self.ends)
        queries = length if together else 1  # of a sequence
        starts_q = torch.arange(rows * length // queries + 1, device=device) * queries  # [S + 1]
        starts_k = first + torch.arange(rows, device=device).unsqueeze(1) * self.count  # in the flat keys, [A, 1 or T]
        starts_k = F.pad(starts_k.flatten(), (0, 1))  # [S + 1]; the kernel does not use the last, as `used` ends each
        used = (ends - first).clamp(min=0).flatten()  # [S]: keys of each sequence
        most = min(x for x in (self.count, rule.window, rule.chunk) if x is not None)
        seen = (self.count, used.int(), self.causal, rule.window) if together else (most, used.int())
        return flash.Sequences(starts_q.int(), starts_k.int(), queries, *seen)


def _causal_end(length: int, count: int, device: torch.device) -> torch.Tensor:
    """`additive_mask` [1, 1, length, count] for queries in the last `length` of `count` slots."""
    room = 1 << (count - 1).bit_length()
    return _causal_ends(room, device)[..., FEW_QUERIES - length :, room - count :]


@lru_cache(maxsize=16)
def _causal_ends(count: int, device: torch.device) -> torch.Tensor:
    """`_causal_end` of FEW_QUERIES: its last rows and columns are those of fewer queries and slots."""
    with torch.inference_mode(False):
        seen = torch.ones(FEW_QUERIES, count, dtype=torch.bool, device=device).tril(count - FEW_QUERIES)
        return additive_mask(seen[None, None])
