"""Who runs and who waits: admission by rows and blocks, preemption when blocks run out. Paper section 3.4.

Knows nothing of tensors or models.
"""

from bisect import bisect
from collections import deque

from eagle_train.inference.cache.block_pool import BlockPool, blocks_for
from eagle_train.inference.cache.prefix_cache import PrefixCache
from eagle_train.inference.requests.sequence import Sequence


class Scheduler:
    """First come, first served: who came last gives up its blocks if need be, waits in its turn and is recomputed.

    A sequence waits, then its text is read in one or more chunks, then it is active: it decodes, in its row of the
    batch. `ahead`: slots that a round may need beyond the committed ones. `prefixes`: finds what was read before.
    """

    def __init__(self, pool: BlockPool, rows: int, ahead: int, prefixes: PrefixCache | None = None):
        self.pool, self.rows, self.ahead, self.prefixes = pool, rows, ahead, prefixes
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.active: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.active or self.reading or self.waiting)

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.active, *self.reading, *self.waiting]

    def admit(self) -> None:
        """Those whose turn it is begin to read: they have blocks for what is known of them and for a round.

        Beside others a block for each of these stays free, or the newcomer would soon have to go again.
        """
        while self.waiting and (admitted := len(self.active) + len(self.reading)) < self.rows:
            sequence = self.waiting[0]
            slots = sequence.num_known + self.ahead
            in_use = 0 if self.prefixes is None else sum(map(self.pool.is_used, self.prefixes.cached_blocks(sequence)))
            if blocks_for(slots) - in_use + admitted > self.pool.available:
                break
            self.reading.append(self.waiting.popleft())
            self.give_blocks(sequence, slots)

    def give_blocks(self, sequence: Sequence, slots: int) -> None:
        """Blocks for so many slots, those first that hold the beginning of its text."""
        if self.prefixes is not None:
            self.prefixes.attach(sequence)
        given = self.pool.extend(sequence.blocks, slots)
        assert given
        if self.prefixes is not None:
            self.prefixes.load(sequence)
        if not sequence.had_blocks:
            sequence.had_blocks, sequence.stats.cached_tokens = True, sequence.num_computed

    def chunks(self, budget: int | None) -> list[tuple[Sequence, int]]:
        """Who reads here next, and how many tokens, `budget` in all."""
        found = []
        left = sum(len(each.to_prefill) for each in self.reading) if budget is None else budget
        for sequence in [each for each in self.reading if each.reader is None]:
            count = min(len(sequence.to_prefill) - sequence.num_computed, left)
            left -= count
            if count > 0:
                found.append((sequence, count))
        return found

    @property
    def ready(self) -> list[Sequence]:
        """Who has read all of its text, and does not decode yet: now, or before a step that failed."""
        return [each for each in self.reading if each.reader is None and each.num_computed == len(each.to_prefill)]

    def activate(self, sequences: list[Sequence]) -> None:
        """These have read all there is to read."""
        self.reading = [sequence for sequence in self.reading if sequence not in sequences]
        self.active += sequences

    def make_room(self, in_flight: int = 0) -> bool:
        """Let every active sequence have blocks for the next round; the last to come gives up its own if need be.

        `in_flight`: slots that a round may take whose results are unknown. Then nothing is preempted: False is returned
        where blocks are missing.
        """
        for sequence in list(self.active):
            slots = sequence.committed + in_flight + self.ahead
            while sequence in self.active and not self.pool.extend(sequence.blocks, slots):
                if in_flight > 0:
                    return False
                self.preempt(max([*self.active, *self.reading], key=turn))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """It waits, behind those that came before it."""
        self.release(sequence)
        sequence.forget()
        self.active = [each for each in self.active if each is not sequence]
        self.reading = [each for each in self.reading if each is not sequence]
        self.waiting.insert(bisect(self.waiting, turn(sequence), key=turn), sequence)

    def leave(self) -> None:
        """The finished free their blocks."""
        for sequence in self.unfinished:
            if sequence.finish_reason:
                self.release(sequence)
        self.waiting = deque(each for each in self.waiting if not each.finish_reason)
        self.reading = [each for each in self.reading if not each.finish_reason]
        self.active = [each for each in self.active if not each.finish_reason]

    def release(self, sequence: Sequence) -> None:
        """It gives up its blocks; what both models have read of it may be found again."""
        self.note(sequence)
        self.pool.release(sequence.blocks)

    def note(self, sequence: Sequence) -> None:
        """More of it was read."""
        if self.prefixes is not None:
            self.prefixes.register(sequence)


def turn(sequence: Sequence) -> int:
    """Its place among the unfinished ones, by when they came."""
    return sequence.index
