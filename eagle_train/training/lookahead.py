"""Batches drawn a step early, and the frozen target run a micro-batch ahead of the draft.

On a CPU the target gets a thread and half of the cores: two streams of small operations fill the cores better than one
stream split over all of them (measured on two: the target's forward takes as long on two threads as on one). On a GPU
the one queue is kept full as it is. Knows nothing of losses, drafts or optimisers.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from eagle_train.corpus.stream import Batch, Stream


class Lookahead:
    """Hands out each optimiser step's micro-batches with the target's hidden states.

    `state` is the stream's after the last step that was handed out: where a checkpoint goes on.
    """

    def __init__(
        self,
        stream: Stream,
        accumulation: int,
        place: Callable[[Batch], Batch],
        hidden_states: Callable[[Batch], torch.Tensor],
        device: torch.device,
    ):
        self.stream, self.accumulation, self.place, self.hidden_states = stream, accumulation, place, hidden_states
        self.pool, self.threads = None, torch.get_num_threads()
        if device.type == "cpu" and self.threads > 1:
            torch.set_num_threads(self.threads // 2)
            self.pool = ThreadPoolExecutor(max_workers=1)
        self.state: dict[str, Any] = stream.state_dict()
        self.upcoming = self.draw()
        self.running: Future[torch.Tensor] | None = None

    def draw(self) -> list[Batch]:
        return [self.place(next(self.stream)) for _ in range(self.accumulation)]

    def step(self) -> list[Batch]:
        """The next optimiser step's micro-batches."""
        batches, self.state = self.upcoming, self.stream.state_dict()
        self.upcoming = self.draw()
        return batches

    def with_hidden_states(self, batches: list[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Each of the step's micro-batches with its [B, T, H]; the one after it is being computed meanwhile."""
        for batch, following in zip(batches, [*batches[1:], self.upcoming[0]], strict=True):
            if self.pool is None:
                yield batch, self.hidden_states(batch)
                continue
            hidden = (self.running or self.pool.submit(self.hidden_states, batch)).result()
            self.running = self.pool.submit(self.hidden_states, following)
            yield batch, hidden

    def close(self) -> None:
        """Give the cores back. What was drawn ahead is lost; `state` is not."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.threads)
