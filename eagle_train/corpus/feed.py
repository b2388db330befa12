"""Documents in the order in which a job draws them: data sets mixed by weight, shuffled by window, tokenised.

The whole job has one order: each of n ranks parses and tokenises every n-th row, and the ranks exchange the results. So
a position is the same for any number of ranks, and no row is read twice or lost when their number changes. Knows
nothing of packing.
"""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar

import numpy as np
import torch

from eagle_train.corpus.render import ChatRenderer, render_row
from eagle_train.corpus.rows import CAN_SKIP, PlacedRow, behind_place, parse
from eagle_train.corpus.source import DataConfig, Marked, Source, SourceConfig, open_source
from eagle_train.corpus.template import TemplateFault
from eagle_train.corpus.tokens import Document
from eagle_train.distributed import CommonError, World, shielded
from eagle_train.errors import UserError, one_line

T = TypeVar("T")
_BLOCK = 1024  # draws whose data sets are chosen together
_LOOK_S = 2  # seconds between two checks of the worker processes
CHUNK = 32  # rows that a rank tokenises before an exchange


class MalformedRow(CommonError):
    """A malformed row, with its place."""


class BrokenTemplate(CommonError):
    """A chat template that cannot render any row."""


_Rendered = list[tuple[np.ndarray, np.ndarray]] | MalformedRow | BrokenTemplate
"""A row's documents as ranks and processes exchange them: for each, tokens int32 [n] and produced bool [n]."""


@dataclass
class Position:
    """How many rows were drawn, and by data set: [epoch, rows drawn of it]."""

    drawn: int = 0
    sources: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawn:
    """A drawn row: its data set, the epoch, and how many rows of that epoch are drawn with it."""

    source: str
    epoch: int
    number: int
    placed: PlacedRow


def shuffled(source: Source, config: DataConfig, name: str, epoch: int, start: int) -> Iterator[PlacedRow]:
    """Rows of an epoch from number `start` on, in the data's order shuffled window by window.

    A window's order depends on the seed, the data set's name, the epoch and the window's number alone, so a resumed run
    reads no earlier window.
    """
    size = max(1, config.shuffle_window)
    first, skip = divmod(start, size)
    rows = source.rows(first * size)
    for number in count(first):
        window = list(islice(rows, size))
        if not window:
            return
        random.Random(f"{config.seed} {name} {epoch} {number}").shuffle(window)
        yield from window[skip:]
        skip = 0


def _epochs(source: Source, config: DataConfig, name: str, epoch: int, start: int) -> Iterator[Drawn]:
    """Rows of a data set from (epoch, start) on, without end."""
    while True:
        for number, placed in enumerate(shuffled(source, config, name, epoch, start), start + 1):
            yield Drawn(name, epoch, number, placed)
        epoch, start = epoch + 1, 0


def _choices(config: DataConfig, drawn: int) -> Iterator[str]:
    """The data set of each draw from number `drawn` on: by weight, a function of the seed."""
    names = list(config.sources)
    weights = [source.weight for source in config.sources.values()]
    for block in count(drawn // _BLOCK):
        chosen = random.Random(f"{config.seed} mix {block}").choices(names, weights, k=_BLOCK)
        yield from chosen[drawn % _BLOCK :]
        drawn = 0


def refusal(place: str, error: Exception) -> MalformedRow | BrokenTemplate:
    """What is told of a row, with its place, that cannot be rendered: templates and tokenizers may raise anything."""
    if isinstance(error, TemplateFault):
        return BrokenTemplate(str(error))
    if isinstance(error, UserError):
        return MalformedRow(behind_place(place, error))
    return MalformedRow(f"{place}: cannot be rendered: {type(error).__name__}: {one_line(error)}")


def render(placed: PlacedRow, config: SourceConfig, renderer: ChatRenderer) -> _Rendered:
    """A row's documents, or the error, which is raised when the row's turn comes."""
    try:
        documents = render_row(parse(*placed), config, renderer)
    except Exception as error:  # on one rank alone
        return refusal(placed[0], error)
    return [(document.tokens.numpy().astype(np.int32), document.produced.numpy()) for document in documents]


def received(rendered: _Rendered, config: DataConfig) -> list[Document] | MalformedRow:
    """The documents of a rendered row. Raises a BrokenTemplate, and a MalformedRow unless the config skips these."""
    if isinstance(rendered, BrokenTemplate):
        raise rendered
    if isinstance(rendered, MalformedRow):
        if config.malformed == "refuse":
            raise MalformedRow(f"{rendered}; {CAN_SKIP}")
        return rendered
    pairs = (map(torch.from_numpy, pair) for pair in rendered)
    return [Document(tokens.long(), produced) for tokens, produced in pairs]


class Feed:
    """The documents of all rows in the order of their draws, without end, from any position."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, world: World):
        self.config, self.renderer, self.world = config, renderer, world
        self.sources = {name: open_source(source, name=name) for name, source in config.sources.items()}
        self.pool: _Pool | None = None  # its processes start when rows are drawn

    def identity(self) -> list[str]:
        return [source.identity() for source in self.sources.values()]

    def start(self) -> Position:
        return Position(0, {name: [0, 0] for name in self.sources})

    def marks(self, position: Position) -> dict[str, Any]:
        """Where the windows of `position` begin in `Marked` sources; a feed that remembers it goes there directly."""
        size = max(1, self.config.shuffle_window)
        marked = self._marked()
        return {name: source.mark(position.sources[name][1] // size * size) for name, source in marked.items()}

    def remember(self, marks: dict[str, Any]) -> None:
        marked = self._marked()
        for name, mark in marks.items():
            marked[name].remember(mark)

    def _marked(self) -> dict[str, Marked]:
        return {name: source for name, source in self.sources.items() if isinstance(source, Marked)}

    def draws(self, position: Position) -> Iterator[Drawn]:
        """Rows from `position` on, without end; not tokenised, and not parsed (but for CSV of the hub)."""
        rows = {name: _epochs(self.sources[name], self.config, name, *at) for name, at in position.sources.items()}
        return (next(rows[name]) for name in _choices(self.config, position.drawn))

    def documents(self, position: Position) -> Iterator[tuple[Drawn, list[Document] | MalformedRow]]:
        """Rows with their documents from `position` on, without end, the same on every rank.

        Raises as `received` does, when the row's turn comes; CommonError on every rank where one cannot read its data,
        or lost a worker process.
        """
        draws, size = self.draws(position), self.world.size
        ahead: deque[tuple[list[Drawn], Callable[[], list[_Rendered]]] | CommonError] = deque()
        while True:
            while len(ahead) <= 2 * self.config.workers:
                ahead.append(self._tried(partial(self._begun, draws)))
            own = ahead.popleft()
            chunk, result = ([], own) if isinstance(own, CommonError) else (own[0], self._tried(own[1]))
            everyone = self.world.exchange(result)
            rendered = [each for each in everyone if not isinstance(each, CommonError)]
            for fault in everyone:
                if isinstance(fault, CommonError):
                    raise fault
            for place, drawn in enumerate(chunk):
                yield drawn, received(rendered[place % size][place // size], self.config)

    def _begun(self, draws: Iterator[Drawn]) -> tuple[list[Drawn], Callable[[], list[_Rendered]]]:
        """The next rows of all ranks, and what returns the documents of this rank's."""
        chunk = list(islice(draws, CHUNK * self.world.size))
        return chunk, self.submit(chunk[self.world.rank :: self.world.size])

    def _tried(self, work: Callable[[], T]) -> T | CommonError:
        """What `work` returns, or what the ranks are told where this one's files or processes fail it."""
        try:
            return work()
        except CommonError as error:
            return error
        except (UserError, OSError) as error:
            return CommonError(str(error))
        except BrokenProcessPool as error:
            workers = f"data.workers={self.config.workers}: a worker process was killed, perhaps for lack of memory"
            return CommonError(f"{workers}; give fewer (BrokenProcessPool: {one_line(error)})")

    def submit(self, rows: list[Drawn]) -> Callable[[], list[_Rendered]]:
        """Begin to render rows, in worker processes if there are any; what returns their documents."""
        if not self.config.workers:
            rendered = [render(row.placed, self.config.sources[row.source], self.renderer) for row in rows]
            return lambda: rendered
        if self.pool is None:
            self.pool = _Pool(self.config, self.renderer)
        return self.pool.submit(rows)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


class _Pool:
    """Worker processes that render rows, and end when one of them is killed."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer):
        with shielded():
            self._executor = ProcessPoolExecutor(
                config.workers,
                multiprocessing.get_context("spawn"),  # a fork would copy the GPU's and the tokenizer's threads
                initializer=_set_up_worker,
                initargs=(config, renderer),
            )
        self._inside: Any = self._executor  # its queues, which are private

    def submit(self, rows: list[Drawn]) -> Callable[[], list[_Rendered]]:
        with shielded(), self._unread_when_broken():
            return partial(self._result, self._executor.submit(work, [(row.source, row.placed) for row in rows]))

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    def _result(self, future: Future) -> list[_Rendered]:
        """A worker's result. Raises BrokenProcessPool if a worker was killed (by the system, out of memory).

        The pool does not notice a worker that was killed while it wrote its result: it waits for the rest of it, and
        the other workers for their turn to write. So the workers are checked here.
        """
        while True:
            try:
                with self._unread_when_broken():
                    return future.result(timeout=_LOOK_S)
            except TimeoutError:
                workers = list((self._inside._processes or {}).values())
                if any(worker.exitcode is not None for worker in workers):
                    for worker in workers:
                        worker.kill()
                    self._inside._result_queue._writer.close()  # no writer is left, so the pool's read ends

    @contextmanager
    def _unread_when_broken(self) -> Iterator[None]:
        """Let a pool that broke meanwhile drop the work that it is writing for workers that are gone: Python before
        3.11.5 waits for it for ever (cpython's issue 94777)."""
        try:
            yield
        except BrokenProcessPool:
            self._inside._call_queue._reader.close()
            raise


worker: dict[str, Any] = {}  # of a worker process: its config and renderer


def _set_up_worker(config: DataConfig, renderer: ChatRenderer) -> None:
    torch.set_num_threads(1)
    worker.update(config=config, renderer=renderer)
    owner = multiprocessing.parent_process()
    assert owner is not None  # this is a process that multiprocessing started
    threading.Thread(target=_end_with_pool, args=(owner.pid,), daemon=True).start()


def _end_with_pool(owner: int) -> None:
    """End this process when the pool's owner is gone, or sends SIGTERM, as it does for a broken pool."""
    while os.getppid() == owner and not _is_ended_by(owner):
        pass
    os._exit(1)


def _is_ended_by(owner: int) -> bool:
    """Wait a second for SIGTERM, which is blocked here; whether it came from the process `owner`."""
    if not hasattr(signal, "sigtimedwait"):  # macOS, which does not tell who sent it either
        time.sleep(1)
        return signal.SIGTERM in signal.sigpending()
    received = signal.sigtimedwait([signal.SIGTERM], 1)
    return received is not None and received.si_pid == owner


def work(rows: list[tuple[str, PlacedRow]]) -> list[_Rendered]:
    return [render(placed, worker["config"].sources[name], worker["renderer"]) for name, placed in rows]
