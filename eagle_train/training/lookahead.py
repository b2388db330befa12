"""Batches drawn in a thread, and the frozen target run in another, ahead of the draft.

On a CPU the target's thread gets half of the cores: two streams of small operations fill the cores better than one
stream that is split over all of them (measured on two: the target's forward takes as long on two threads as on one).
Work that the draft's side can split is shared with the target's thread, so that both have as much to do. On a GPU the
one queue is kept full anyway, and the target runs in turn; states that are read from disk are read in that thread
there too. Knows nothing of losses, drafts or optimisers.
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
from types import TracebackType
from typing import Any

import torch

from eagle_train.corpus.stream import TENSORS, Batch, Stream
from eagle_train.drafts import TargetStates
from eagle_train.errors import UserError
from eagle_train.training.target_pass import Placed

_Step = tuple[list[Placed], dict[str, Any]]  # micro-batches on the device, and the stream's state after them
_Drawn = tuple[list[Batch], dict[str, Any]]

DRAWN_AHEAD = 2  # steps drawn beyond the current one: the target's next run but one needs its batch


class Lookahead:
    """Hands out each optimiser step's micro-batches with the target's states. A context manager:

        with lookahead.start(steps):
            for batch, states in lookahead.with_states(lookahead.step()): ...

    `state`: the stream's state after the last step that was handed out, where a checkpoint continues. `waited`:
    seconds in which the trainer waited for a batch.
    """

    def __init__(
        self,
        stream: Stream,
        accumulation: int,
        to_device: Callable[[Batch], Placed],
        target_states: Callable[[Placed], TargetStates],
        device: torch.device,
        beside: bool = True,
        reads: bool = False,
    ):
        """`accumulation`: micro-batches of a step. `target_states`: those of a batch on the device. `beside`:
        whether the target may run in a thread of its own. It may not where its ranks communicate, because two threads
        must not use one process group. `reads`: its states are read from disk, for which a thread waits.
        """
        self.stream, self.accumulation = stream, accumulation
        self.to_device, self.target_states, self.device = to_device, target_states, device
        self.state: dict[str, Any] = {}
        self.waited = 0.0
        self._beside, self._reads = beside, reads
        self._pool: ThreadPoolExecutor | None = None
        self._threads = 0  # of torch, before `start` halved them
        self._upcoming: deque[_Step | Exception] = deque()  # an error is raised when its step is asked for
        self._known: list[Placed] = []  # micro-batches whose states are still to be handed out
        self._running: deque[Future[TargetStates]] = deque()  # the target's runs for the first of `_known`
        self._offered: Callable[[], None] | None = None
        self._helping = threading.Lock()
        self._failure: Exception | None = None

    @property
    def runs_beside(self) -> bool:
        """Whether the target runs in a thread of its own, with half of the cores, once this is started."""
        halves = self.device.type == "cpu" and torch.get_num_threads() > 1
        return self._pool is not None or (self._beside and (halves or self._reads))

    def start(self, steps: int | None, wait: bool = True) -> "Lookahead":
        """Draw from where the stream stands now: `steps` steps, or as many as are taken if None.

        Waits for the first step, and raises what its drawing raised, unless `wait` is false.
        """
        self._threads = torch.get_num_threads()
        if self.runs_beside:
            half = max(1, self._threads // 2)
            torch.set_num_threads(half)
            # The number of threads is each thread's own. It decides how a product is divided, and so how it is rounded.
            self._pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(half,))
        self.state = self.stream.state_dict()
        self._drawer = _Drawer(
            lambda: [_pinned(next(self.stream), self.device) for _ in range(self.accumulation)],
            self.stream.state_dict,
            None if steps is None else steps + DRAWN_AHEAD,  # the last step looks ahead too
            self.stream.config.prefetch,
        )
        try:
            if wait:
                self._draw_ahead(DRAWN_AHEAD)
                _sound(self._upcoming[0])
        except BaseException:  # data that cannot be read, say: nobody will leave what was not entered
            self._release(wait=False)
            raise
        return self

    def __enter__(self) -> "Lookahead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close it. After an error the other ranks are not waited for: they may wait for this one elsewhere."""
        if kind is None:
            self._drawer.finish(lambda own: max(self.stream.world.exchange(own, side="files")))
            self.stream.close()
        self._release(wait=kind is None)

    def _release(self, wait: bool) -> None:
        """End the target's thread and give torch its cores back."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)
            torch.set_num_threads(self._threads)

    def upcoming(self, number: int = 0) -> list[Placed]:
        """The micro-batches of a step that is drawn and not handed out yet; 0 is the next one."""
        return _sound(self._upcoming[number])[0]

    def has_step(self, seconds: float) -> bool:
        """Whether `step` need not wait for data, within so many seconds."""
        return self._draw_ahead(DRAWN_AHEAD + 1, seconds)

    def step(self) -> list[Placed]:
        """The next optimiser step's micro-batches. Raises what its drawing raised; `state` is then as before."""
        self._draw_ahead(DRAWN_AHEAD + 1)
        batches, self.state = _sound(self._upcoming.popleft())
        return batches

    def _draw_ahead(self, steps: int, seconds: float | None = None) -> bool:
        """Have so many steps on the device that are not handed out; False if one is not drawn within `seconds`."""
        while len(self._upcoming) < steps:
            taken = self._take(seconds)
            if taken is None:
                return False
            self._upcoming.append(taken)
        return True

    def _take(self, seconds: float | None) -> _Step | Exception | None:
        """The next step that was drawn, on the device, and the stream's state after it; or what its drawing raised;
        None if it is not drawn within `seconds`.

        The run may end before it comes to that step.
        """
        if self._upcoming and isinstance(self._upcoming[-1], Exception):
            return self._upcoming[-1]  # nothing was drawn after it
        started = time.perf_counter()
        drawn = self._drawer.take(seconds)
        self.waited += time.perf_counter() - started
        if drawn is None or isinstance(drawn, Exception):
            return drawn
        batches, state = drawn
        return [self.to_device(batch) for batch in batches], state

    def with_states(self, batches: list[Placed]) -> Iterator[tuple[Placed, TargetStates]]:
        """Each of the step's micro-batches with the target's states. The target's thread computes those of the two
        micro-batches after it meanwhile.
        """
        if self._pool is None:
            yield from ((batch, self.target_states(batch)) for batch in batches)
            return
        for number, batch in enumerate(batches):
            drawn = (each[0] for each in self._upcoming if not isinstance(each, Exception))
            self._known = [*batches[number:], *chain.from_iterable(drawn)]
            self._run_ahead()
            self._known = self._known[1:]
            yield batch, self._running.popleft().result()

    def _run_ahead(self) -> None:
        """Fill the target's thread up to two runs whose results are not used yet, finished or not."""
        assert self._pool is not None
        for batch in self._known[len(self._running) : 2]:
            self._running.append(self._pool.submit(self.target_states, batch))

    def run_parallel(self, work: Callable[[], None]) -> None:
        """Run `work` in this thread, and on a CPU in the target's too if it becomes free before this one is done.

        `work` must allow two threads at once, and divide among them what there is to do. When this returns, both have
        returned. Raises what either raised.
        """
        if self._pool is None or self.device.type != "cpu":
            work()
            return
        self._offered = work
        self._pool.submit(self._help)
        work()
        self._offered = None
        with self._helping:
            if self._failure is not None:
                raise self._failure
        if self.accumulation > 1:  # with one micro-batch it would run beside the optimiser, which needs all cores
            self._run_ahead()  # not earlier: the target's thread would not have been free to help

    def _help(self) -> None:
        with self._helping:
            work, self._offered = self._offered, None  # taken once: a late task may find the next call's work
            if work is not None:
                try:
                    work()
                except Exception as failure:  # raised by `run_parallel`
                    self._failure = failure


class _Drawer:
    """A thread that draws steps ahead, `ahead` of them at most, each with the stream's state after it.

    `steps`: how many; None for as many as are taken. All ranks draw the same number, so that none waits for another in
    a last exchange.
    """

    def __init__(
        self, draw: Callable[[], list[Batch]], state: Callable[[], dict[str, Any]], steps: int | None, ahead: int
    ):
        self._draw, self._state, self._limit = draw, state, steps
        self._begun, self._counting = 0, threading.Lock()
        self._ready: queue.Queue[_Drawn | Exception] = queue.Queue(maxsize=ahead)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _may_draw(self) -> bool:
        """Whether one more step is to be drawn; it is then counted."""
        with self._counting:
            wanted = self._limit is None or self._begun < self._limit
            self._begun += wanted
            return wanted

    def _run(self) -> None:
        while self._may_draw():
            try:
                step: _Drawn | Exception = self._draw(), self._state()
            except Exception as error:  # told to the thread that takes the step
                step = error
            self._ready.put(step)
            if isinstance(step, Exception):
                return

    def take(self, seconds: float | None) -> _Drawn | Exception | None:
        """The next step and the state after it, or what its drawing raised: nothing comes after that. None if it does
        not come within `seconds`."""
        with suppress(queue.Empty):
            return self._ready.get(timeout=seconds)
        return None

    def finish(self, largest: Callable[[int], int]) -> None:
        """Stop drawing, after as many steps as the rank that has begun most; `largest` gives their maximum."""
        if self._limit is None:
            with self._counting:
                self._limit = self._begun
            wanted = largest(self._limit)
            while self._thread.is_alive():  # it may wait for room in the queue, or for a rank that has drawn less
                with suppress(queue.Empty):
                    self._ready.get(timeout=0.01)
            with suppress(UserError):  # in data of steps that nobody asks for
                for _ in range(wanted - self._limit):
                    self._draw()


def _sound(step: _Step | Exception) -> _Step:
    """A step that was drawn. Raises the error that came in its place."""
    if isinstance(step, Exception):
        raise step
    return step


def _pinned(batch: Batch, device: torch.device) -> Batch:
    """For a GPU, the batch in memory from which it can be copied while the GPU computes."""
    if device.type != "cuda":
        return batch
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in TENSORS})
