"""The target's thread: hidden states in order, work shared with the draft's thread, errors passed on."""

import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.ops.threads import num_threads
from eagle_train.training.lookahead import Lookahead

ACCUMULATION = 2


class Numbers:
    """A stream of numbers for batches."""

    config = SimpleNamespace(prefetch=4)

    def __init__(self):
        self.drawn = 0

    def __next__(self) -> int:
        self.drawn += 1
        return self.drawn

    def state_dict(self) -> dict:
        return {"drawn": self.drawn}

    def close(self) -> None:
        pass


@pytest.fixture
def make():
    made, threads = [], torch.get_num_threads()

    def make(cores: int = 2, hidden_states=lambda batch: -batch, accumulation: int = ACCUMULATION, **more) -> Lookahead:
        torch.set_num_threads(cores)
        place = lambda batch: batch  # noqa: E731
        made.append(Lookahead(Numbers(), accumulation, place, hidden_states, torch.device("cpu"), **more))
        return made[-1].start(steps=100)

    yield make
    for each in made:
        each.__exit__(None, None, None)
    torch.set_num_threads(threads)


def test_data_that_cannot_be_read_cost_no_threads():
    """Of the process, which may try again."""

    class Broken(Numbers):
        def __next__(self) -> int:
            raise UserError("row 1: is no chat")

    with num_threads(2):
        ahead = Lookahead(Broken(), 1, lambda batch: batch, lambda batch: batch, torch.device("cpu"))
        with pytest.raises(UserError, match="is no chat"):
            ahead.start(steps=1)
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("steps", [3, None])
def test_data_that_no_step_needs_may_be_broken(cores, steps):
    """Those that are drawn ahead of the last step; a step that needs them raises the error."""

    class EndsBroken(Numbers):
        world = SimpleNamespace(exchange=lambda own, side: [own, own + 1])  # another rank has begun a step more

        def __next__(self) -> int:
            if self.drawn == 3:
                raise UserError("row 4: is no chat")
            return super().__next__()

    with num_threads(cores):
        ahead = Lookahead(EndsBroken(), 1, lambda batch: batch, lambda batch: -batch, torch.device("cpu"))
        with ahead.start(steps):
            assert [pair for _ in range(3) for pair in ahead.with_states(ahead.step())] == [(1, -1), (2, -2), (3, -3)]
            assert ahead.state == {"drawn": 3}
        assert torch.get_num_threads() == cores
        again = Lookahead(EndsBroken(), 1, lambda batch: batch, lambda batch: -batch, torch.device("cpu")).start(None)
        for _ in range(3):
            again.step()
        with pytest.raises(UserError, match="row 4: is no chat"):
            again.step()
        assert again.state == {"drawn": 3}
        again._release(wait=False)


@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("cores", [1, 2])
def test_each_micro_batch_comes_with_its_own_hidden_states(make, cores, accumulation):
    ahead, found = make(cores, accumulation=accumulation), []
    for step in range(1, 6):
        for pair in ahead.with_states(ahead.step()):
            ahead.run_parallel(lambda: None)
            found.append(pair)
        assert ahead.state == {"drawn": step * accumulation}
    assert found == [(number, -number) for number in range(1, 5 * accumulation + 1)]


def test_the_targets_thread_helps_before_its_next_run(make):
    """Both threads work at once; the next run, which is not needed yet, starts when the work is done."""
    begun, workers, runs = threading.Barrier(2), set(), []

    def work() -> None:
        begun.wait(10)
        workers.add(threading.current_thread())
        runs_then.append(len(runs))

    ahead = make(hidden_states=lambda batch: runs.append(batch) or -batch)
    for _ in range(3):
        for number, _ in ahead.with_states(ahead.step()):
            while len(runs) < number + 1:
                time.sleep(0.001)
            workers.clear()
            runs_then: list[int] = []
            ahead.run_parallel(work)
            assert len(workers) == 2
            assert runs_then == [number + 1] * 2
            assert len(ahead._running) == 2  # the next may begin


def test_parallel_work_waits_for_the_helper_and_raises_its_error(make):
    ahead, main = make(), threading.current_thread()
    begun, finished = threading.Barrier(2), []

    def slow_to_help() -> None:
        begun.wait(10)
        if threading.current_thread() is not main:
            time.sleep(0.1)
            finished.append(True)

    def fails_to_help() -> None:
        begun.wait(10)
        if threading.current_thread() is not main:
            raise MemoryError("no room")

    for _ in ahead.with_states(ahead.step()[:1]):
        ahead.run_parallel(slow_to_help)
        assert finished
        with pytest.raises(MemoryError, match="no room"):
            ahead.run_parallel(fails_to_help)


def test_one_core_does_the_work_once(make):
    ahead, calls = make(cores=1), []
    ahead.run_parallel(lambda: calls.append(threading.current_thread()))
    assert calls == [threading.current_thread()]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_its_block_gives_torch_its_threads_back(error):
    """Also after an error, without communication between ranks; the stream stays open."""
    before, stream = torch.get_num_threads(), Numbers()
    closed = []
    stream.close = lambda: closed.append(True)
    torch.set_num_threads(2)
    ahead = Lookahead(stream, ACCUMULATION, lambda batch: batch, lambda batch: -batch, torch.device("cpu"))
    try:
        with suppress(KeyboardInterrupt), ahead.start(steps=3):
            assert torch.get_num_threads() == 1
            if error is not None:
                raise error
        assert torch.get_num_threads() == 2
        assert closed == ([] if error else [True])
    finally:
        torch.set_num_threads(before)


def test_states_are_read_in_a_thread_of_their_own_on_one_core_too(make):
    """And on a GPU, where the loss is not shared with it."""
    readers: set[threading.Thread] = set()
    ahead = make(1, lambda batch: readers.add(threading.current_thread()) or -batch, reads=True)
    for _ in range(2):
        assert [pair[1] for pair in ahead.with_states(ahead.step())] != []
    assert len(readers) == 1
    assert threading.current_thread() not in readers
    ahead.device = torch.device("cuda")
    workers: list[threading.Thread] = []

    def work() -> None:
        workers.append(threading.current_thread())
        time.sleep(0.2)  # in which the other thread would join

    ahead.run_parallel(work)
    assert workers == [threading.current_thread()]
