"""Who runs and who waits: admission by rows and blocks, preemption when blocks run out. Paper section 3.4.

Knows nothing of tensors or models.
"""

from collections import deque

from eagle_train.inference.block_pool import BlockPool, blocks_for
from eagle_train.inference.sequence import Sequence


class Scheduler:
    """First come, first served. A sequence that has to give up its blocks waits in front and is recomputed.

    A sequence waits, then its text is read in one or more chunks, then it is active: it decodes, in its row of the
    batch. `ahead`: slots that a round may need beyond the committed ones.
    """

    def __init__(self, pool: BlockPool, rows: int, ahead: int):
        self.pool, self.rows, self.ahead = pool, rows, ahead
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.active: list[Sequence] = []

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.active, *self.reading, *self.waiting]

    def admit(self) -> None:
        """Those whose turn it is begin to read: they have blocks for what is known of them and for a round.

        Beside others a block for each of these stays free, or the newcomer would soon have to go again.
        """
        while self.waiting and (admitted := len(self.active) + len(self.reading)) < self.rows:
            slots = self.waiting[0].num_known + self.ahead
            if not self.pool.has(blocks_for(slots) + admitted):
                break
            self.reading.append(self.waiting.popleft())
            self.pool.extend(self.reading[-1].blocks, slots)

    def chunks(self, budget: int | None) -> list[tuple[Sequence, int]]:
        """Who reads next, and how many tokens, `budget` in all."""
        found = []
        left = sum(len(each.to_prefill) for each in self.reading) if budget is None else budget
        for sequence in self.reading:
            count = min(len(sequence.to_prefill) - sequence.read, left)
            left -= count
            if count > 0:
                found.append((sequence, count))
        return found

    def activate(self, sequences: list[Sequence]) -> None:
        """These have read all there is to read."""
        self.reading = [sequence for sequence in self.reading if sequence not in sequences]
        self.active += sequences

    def make_room(self) -> None:
        """Let every active sequence have blocks for the next round; the last to come gives up its own if need be."""
        row = 0
        while row < len(self.active):
            sequence = self.active[row]
            if self.pool.extend(sequence.blocks, sequence.committed + self.ahead):
                row += 1
            else:
                self.preempt((self.reading or self.active).pop())

    def preempt(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.forget()
        self.waiting.appendleft(sequence)

    def leave(self) -> None:
        """The finished free their blocks."""
        for sequence in self.unfinished:
            if sequence.finish_reason:
                self.pool.release(sequence.blocks)
        self.waiting = deque(each for each in self.waiting if not each.finish_reason)
        self.reading = [each for each in self.reading if not each.finish_reason]
        self.active = [each for each in self.active if not each.finish_reason]
