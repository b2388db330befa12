"""Batches drawn by a thread of their own, and the frozen target run a micro-batch ahead of the draft.

On a CPU the target gets a thread and half of the cores: two streams of small operations fill the cores better than one
stream split over all of them (measured on two: the target's forward takes as long on two threads as on one). What the
draft's side can split, the target's thread helps with, so that both have as much to do. On a GPU the one queue is kept
full as it is. Knows nothing of losses, drafts or optimisers.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from eagle_train.corpus.stream import TENSORS, Batch, Stream


class Drawer:
    """A thread that draws `steps` steps (None: as many as are taken), `ahead` of them at most, each with the state of
    the stream after it.

    All ranks draw the same number, so that none waits for another in a last exchange.
    """

    def __init__(
        self, draw: Callable[[], list[Batch]], state: Callable[[], dict[str, Any]], steps: int | None, ahead: int
    ):
        self.draw, self.state, self.limit = draw, state, steps
        self.begun, self.counting = 0, threading.Lock()
        self.ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def may_draw(self) -> bool:
        """Whether one more step is to be drawn; it is then counted."""
        with self.counting:
            wanted = self.limit is None or self.begun < self.limit
            self.begun += wanted
            return wanted

    def run(self) -> None:
        while self.may_draw():
            try:
                step: Any = self.draw(), self.state()
            except Exception as error:  # told to who waits for the step
                step = error
            self.ready.put(step)
            if isinstance(step, Exception):
                return

    def take(self) -> tuple[list[Batch], dict[str, Any]]:
        """The next step and the state after it. Raises what the drawing raised."""
        step = self.ready.get()
        if isinstance(step, Exception):
            raise step
        return step

    def finish(self, most: Callable[[int], int]) -> None:
        """Draw no more than some rank has begun to: `most` gives the largest of all ranks' numbers."""
        if self.limit is None:
            with self.counting:
                self.limit = self.begun
            wanted = most(self.limit)
            while self.thread.is_alive():  # it may be waiting for room, or for a rank that has drawn less
                with suppress(queue.Empty):
                    self.ready.get(timeout=0.01)
            for _ in range(wanted - self.limit):
                self.draw()


def ready(batch: Batch, device: torch.device) -> Batch:
    """In memory that a GPU can copy from while it computes."""
    if device.type != "cuda":
        return batch
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in TENSORS})


class Lookahead:
    """Hands out each optimiser step's micro-batches with the target's hidden states.

    `state` is the stream's after the last step that was handed out: where a checkpoint goes on. `waited`: seconds in
    which nothing was done because no batch was ready.
    """

    STEPS = 2  # drawn beyond the one at work, so that the target's next run but one has its batch

    def __init__(
        self,
        stream: Stream,
        accumulation: int,
        steps: int | None,
        place: Callable[[Batch], Batch],
        hidden_states: Callable[[Batch], torch.Tensor],
        device: torch.device,
        beside: bool = True,
    ):
        """`beside`: whether the target may run in a thread of its own; not where its ranks talk with each other, for
        two threads must not talk in one group."""
        self.accumulation, self.place, self.hidden_states = accumulation, place, hidden_states
        self.pool, self.threads = None, torch.get_num_threads()
        if beside and device.type == "cpu" and self.threads > 1:
            half = self.threads // 2
            torch.set_num_threads(half)
            # A thread has a number of its own, and what a product is divided over decides how it is rounded.
            self.pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(half,))
        self.state: dict[str, Any] = stream.state_dict()
        self.waited = 0.0
        self.stream = stream
        self.drawer = Drawer(
            lambda: [ready(next(stream), device) for _ in range(accumulation)],
            stream.state_dict,
            None if steps is None else steps + self.STEPS,  # the last step looks ahead too
            stream.config.prefetch,
        )
        self.upcoming = deque(self.take() for _ in range(self.STEPS))
        self.known: list[Batch] = []  # micro-batches whose hidden states are yet to be handed out
        self.running: deque[Future[torch.Tensor]] = deque()  # the target's runs, for the first of them
        self.shared: Callable[[], None] | None = None
        self.helping = threading.Lock()
        self.failure: Exception | None = None

    def take(self) -> tuple[list[Batch], dict[str, Any]]:
        started = time.perf_counter()
        batches, state = self.drawer.take()
        self.waited += time.perf_counter() - started
        return [self.place(batch) for batch in batches], state

    def step(self) -> list[Batch]:
        """The next optimiser step's micro-batches."""
        batches, self.state = self.upcoming.popleft()
        self.upcoming.append(self.take())
        return batches

    def with_hidden_states(self, batches: list[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Each of the step's micro-batches with its [B, T, H]; the two after it are computed meanwhile."""
        if self.pool is None:
            yield from ((batch, self.hidden_states(batch)) for batch in batches)
            return
        for number, batch in enumerate(batches):
            self.known = [*batches[number:], *chain.from_iterable(step for step, _ in self.upcoming)]
            self.run_ahead()
            self.known = self.known[1:]
            yield batch, self.running.popleft().result()

    def run_ahead(self) -> None:
        """Let the target's thread have two runs that are not used yet, done or to do."""
        for batch in self.known[len(self.running) : 2]:
            self.running.append(self.pool.submit(self.hidden_states, batch))

    def share(self, work: Callable[[], None]) -> None:
        """Run `work`, and let the target's thread run it too if it has time before this one is done.

        Two threads at once must share what there is to do among them; when this returns, both have returned.
        """
        if self.pool is None:
            work()
            return
        self.shared = work
        self.pool.submit(self.help)
        work()
        self.shared = None
        with self.helping:
            if self.failure is not None:
                raise self.failure
        if self.accumulation > 1:  # else it would run beside the optimiser each time, which wants all cores
            self.run_ahead()  # not before: it would not have had time to help

    def help(self) -> None:
        with self.helping:
            work, self.shared = self.shared, None  # once: a task that was late may find the next work
            if work is not None:
                try:
                    work()
                except Exception as failure:  # told to who shares
                    self.failure = failure

    def close(self) -> None:
        """Give the cores back, when the last step was handed out."""
        self.drawer.finish(lambda own: max(self.stream.world.exchange(own, side="files")))
        self.stream.close()
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.threads)
