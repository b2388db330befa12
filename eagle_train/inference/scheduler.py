"""Who runs and who waits: admission by rows and blocks, preemption when blocks run out. Paper section 3.4.

Knows nothing of tensors or models.
"""

from collections import deque

from eagle_train.inference.block_pool import BlockPool, blocks_for
from eagle_train.inference.sequence import Sequence


class Scheduler:
    """First come, first served. A sequence that has to give up its blocks waits in front and is recomputed.

    `ahead`: slots that a round may need beyond the committed ones.
    """

    def __init__(self, pool: BlockPool, rows: int, ahead: int):
        self.pool, self.rows, self.ahead = pool, rows, ahead
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []

    def admit(self) -> list[Sequence]:
        """Those whose turn it is: they have blocks for what is known of them and for a round, and are active.

        Beside others a block for each of these stays free, or the newcomer would soon have to go again.
        """
        new: list[Sequence] = []
        while self.waiting and len(self.active) < self.rows:
            slots = self.waiting[0].num_known + self.ahead
            if not self.pool.has(blocks_for(slots) + len(self.active)):
                break
            new.append(self.waiting.popleft())
            self.pool.extend(new[-1].blocks, slots)
            self.active.append(new[-1])
        return new

    def make_room(self) -> None:
        """Let every active sequence have blocks for the next round; the last to come gives up its own if need be."""
        row = 0
        while row < len(self.active):
            sequence = self.active[row]
            if self.pool.extend(sequence.blocks, sequence.committed + self.ahead):
                row += 1
            else:
                self.preempt(self.active.pop())

    def preempt(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.unread = 1
        self.waiting.appendleft(sequence)

    def leave(self) -> None:
        """The finished free their blocks."""
        for sequence in self.active:
            if sequence.finish_reason:
                self.pool.release(sequence.blocks)
        self.active = [sequence for sequence in self.active if not sequence.finish_reason]
