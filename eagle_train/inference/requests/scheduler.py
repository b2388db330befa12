"""The scheduler: admits requests while rows and blocks are free, and preempts when blocks run out. Paper section 3.4.

Knows nothing of tensors or models.
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable

from eagle_train.inference.cache.block_pool import BlockPool, blocks_for
from eagle_train.inference.cache.prefix_cache import PrefixCache
from eagle_train.inference.requests.sequence import Sequence


class Scheduler:
    """First come, first served. The newest sequence is preempted first: it waits again, and is recomputed.

    A sequence is in one of three lists: `waiting`; `prefilling`, in one or more chunks; `active`: it decodes, and its
    place in the list is its row of the batch.
    """

    def __init__(self, pool: BlockPool, rows: int, ahead: int, prefixes: PrefixCache | None = None):
        """`rows`: sequences that prefill or decode at once; `ahead`: slots that a round may need beyond the committed
        ones; `prefixes`: None: no prefix caching."""
        self.pool, self.rows, self.ahead, self.prefixes = pool, rows, ahead, prefixes
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.active: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a sequence."""
        return bool(self.active or self.prefilling or self.waiting)

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences."""
        return [*self.active, *self.prefilling, *self.waiting]

    def admit(self, on_turn: Callable[[Sequence], None] = lambda sequence: None) -> None:
        """Let sequences begin to prefill, while there are rows, and blocks for their known tokens and a round.

        A block for each sequence admitted before is left free; otherwise the new one would soon be preempted again.
        `on_turn`: called with each for which there is a row, before its blocks are looked for.
        """
        while self.waiting and (admitted := len(self.active) + len(self.prefilling)) < self.rows:
            sequence = self.waiting[0]
            on_turn(sequence)
            slots = sequence.num_known + self.ahead
            in_use = 0 if self.prefixes is None else sum(map(self.pool.is_used, self.prefixes.cached_blocks(sequence)))
            if blocks_for(slots) - in_use + admitted > self.pool.available:
                break
            self.give_blocks(sequence, slots)
            self.prefilling.append(self.waiting.popleft())

    def give_blocks(self, sequence: Sequence, slots: int) -> None:
        """Give a sequence blocks for so many slots; those that hold the beginning of its text are reused. Where a copy
        runs out of memory it gets none."""
        try:
            if self.prefixes is not None:
                self.prefixes.attach(sequence)
            given = self.pool.extend(sequence.blocks, slots, begins=True)
            assert given
            if self.prefixes is not None:
                self.prefixes.load(sequence)
        except BaseException:
            self.pool.release(sequence.blocks)
            sequence.num_computed = 0
            raise
        if not sequence.had_blocks:
            sequence.had_blocks, sequence.stats.cached_tokens = True, sequence.num_computed

    def chunks(self, budget: int | None) -> list[tuple[Sequence, int]]:
        """The sequences that this process prefills next, with numbers of tokens, `budget` in all; None: no limit."""
        found = []
        left = sum(len(each.to_prefill) for each in self.prefilling) if budget is None else budget
        for sequence in [each for each in self.prefilling if each.remote_task is None]:
            count = min(len(sequence.to_prefill) - sequence.num_computed, left)
            left -= count
            if count > 0:
                found.append((sequence, count))
        return found

    @property
    def ready(self) -> list[Sequence]:
        """The sequences that are prefilled and do not decode yet, in this step or since one that failed."""
        return [
            each for each in self.prefilling if each.remote_task is None and each.num_computed == len(each.to_prefill)
        ]

    def activate(self, sequences: list[Sequence]) -> None:
        """These are prefilled: they decode from now on."""
        self.prefilling = [sequence for sequence in self.prefilling if sequence not in sequences]
        self.active += sequences

    def make_room(self, in_flight: int = 0) -> bool:
        """Give every active sequence blocks for the next round, and preempt the newest where blocks are missing.

        `in_flight`: the most slots that a launched round with unknown results commits of a sequence. Nothing is
        preempted during one: False is returned where blocks are missing.
        """
        for sequence in list(self.active):
            slots = sequence.committed + in_flight + self.ahead
            while sequence in self.active and not self.pool.extend(sequence.blocks, slots):
                if in_flight > 0:
                    return False
                self.preempt(max([*self.active, *self.prefilling], key=_arrival_order))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits behind those that arrived earlier."""
        self.release(sequence)
        sequence.drop_cache()
        self.active = [each for each in self.active if each is not sequence]
        self.prefilling = [each for each in self.prefilling if each is not sequence]
        self.waiting.insert(bisect(self.waiting, _arrival_order(sequence), key=_arrival_order), sequence)

    def leave(self) -> list[Sequence]:
        """Remove finished sequences, and release their blocks. Returns them."""
        finished = [sequence for sequence in self.unfinished if sequence.finish_reason]
        for sequence in finished:
            self.release(sequence)
        self.waiting = deque(each for each in self.waiting if not each.finish_reason)
        self.prefilling = [each for each in self.prefilling if not each.finish_reason]
        self.active = [each for each in self.active if not each.finish_reason]
        return finished

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's blocks. With prefix caching their content can be found until they are evicted."""
        self.register(sequence)
        self.pool.release(sequence.blocks)

    def register(self, sequence: Sequence) -> None:
        """Let other sequences find the blocks that this one has filled, with prefix caching."""
        if self.prefixes is not None:
            self.prefixes.register(sequence)


def _arrival_order(sequence: Sequence) -> int:
    return sequence.index
