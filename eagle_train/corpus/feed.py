"""Documents in their drawn order: data sets mixed by weight, shuffled by window, tokenised, shared among the ranks.

The order is one for the whole job, whatever its ranks: each parses and tokenises every n-th row, and gets the others
from those who did. So a position in it is the same for 1, 2 or 100 ranks, and nothing is read twice or lost when their
number changes.
Knows nothing of packing.
"""

import multiprocessing
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from eagle_train.corpus.json_files import JsonFiles, Mark
from eagle_train.corpus.render import ChatRenderer, render_row
from eagle_train.corpus.rows import CAN_SKIP, PlacedRow, behind_place, parse
from eagle_train.corpus.source import DataConfig, Source, SourceConfig, open_source
from eagle_train.corpus.template import TemplateFault
from eagle_train.corpus.tokens import Document
from eagle_train.distributed import STOP, CommonError, World
from eagle_train.errors import UserError, one_line

BLOCK = 1024  # draws whose data sets are chosen together
LOOK_S = 2  # between two looks at the processes that tokenise, while one waits for them
CHUNK = 32  # rows that a rank tokenises before it shares them


class MalformedRow(CommonError):
    """What is wrong with a row, by its place."""


class BrokenTemplate(CommonError):
    """What is wrong with the chat template, whatever the row."""


Rendered = list[tuple[np.ndarray, np.ndarray]] | MalformedRow | BrokenTemplate
"""A row's documents as they travel: of each, tokens int32 [n], produced bool [n]."""


@dataclass
class Position:
    """How many rows were drawn, and where each data set stands: [epoch, rows drawn of it]."""

    drawn: int = 0
    sources: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawn:
    """A row on its way: the data set it is from, which epoch of it, how many rows of that epoch are then drawn."""

    source: str
    epoch: int
    number: int
    placed: PlacedRow


def shuffled(source: Source, config: DataConfig, name: str, epoch: int, start: int) -> Iterator[PlacedRow]:
    """Rows of an epoch from number `start` of its order on: the data's order, shuffled window by window.

    A window's order follows from the seed, the data set's name, the epoch and its number alone, so that resuming reads
    no earlier window.
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


def epochs(source: Source, config: DataConfig, name: str, epoch: int, start: int) -> Iterator[Drawn]:
    """Rows of a data set from (epoch, start) on, epoch after epoch without end."""
    while True:
        for number, placed in enumerate(shuffled(source, config, name, epoch, start), start + 1):
            yield Drawn(name, epoch, number, placed)
        epoch, start = epoch + 1, 0


def choices(config: DataConfig, drawn: int) -> Iterator[str]:
    """Which data set each draw is from, from draw number `drawn` on: by weight, the same for every job of a seed."""
    names = list(config.sources)
    weights = [source.weight for source in config.sources.values()]
    for block in count(drawn // BLOCK):
        chosen = random.Random(f"{config.seed} mix {block}").choices(names, weights, k=BLOCK)
        yield from chosen[drawn % BLOCK :]
        drawn = 0


def render(placed: PlacedRow, config: SourceConfig, renderer: ChatRenderer) -> Rendered:
    """A row's documents, or what is wrong with the row or the template, for when its turn comes."""
    place = placed[0]
    try:
        documents = render_row(parse(*placed), config, renderer)
    except TemplateFault as fault:
        return BrokenTemplate(str(fault))
    except UserError as error:
        return MalformedRow(behind_place(place, error))
    except Exception as error:  # a template or a tokenizer raises what it likes, and on the one rank that has the row
        return MalformedRow(f"{place}: cannot be rendered: {type(error).__name__}: {one_line(error)}")
    return [(document.tokens.numpy().astype(np.int32), document.produced.numpy()) for document in documents]


def received(rendered: Rendered, config: DataConfig) -> list[Document] | MalformedRow:
    """The documents that travelled. Raises the MalformedRow in their place, unless the config wants such rows skipped,
    and a BrokenTemplate in any case."""
    if isinstance(rendered, BrokenTemplate):
        raise rendered
    if isinstance(rendered, MalformedRow):
        if config.malformed == "refuse":
            raise MalformedRow(f"{rendered}; {CAN_SKIP}")
        return rendered
    pairs = (map(torch.from_numpy, pair) for pair in rendered)
    return [Document(tokens.long(), produced) for tokens, produced in pairs]


class Feed:
    """Every row's documents of the data in their drawn order, without end, from any position."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, world: World):
        self.config, self.renderer, self.world = config, renderer, world
        self.sources = {name: open_source(source, name=name) for name, source in config.sources.items()}
        self.pool: ProcessPoolExecutor | None = None

    def identity(self) -> list[str]:
        return [source.identity() for source in self.sources.values()]

    def start(self) -> Position:
        return Position(0, {name: [0, 0] for name in self.sources})

    def marks(self, position: Position) -> dict[str, Mark]:
        """Where the windows of `position` begin in JSON files, so that `remember` lets another feed go there."""
        size = max(1, self.config.shuffle_window)
        files = {name: source for name, source in self.sources.items() if isinstance(source, JsonFiles)}
        return {name: source.mark(position.sources[name][1] // size * size) for name, source in files.items()}

    def remember(self, marks: dict[str, Mark]) -> None:
        for name, mark in marks.items():
            self.sources[name].remember(mark)

    def draws(self, position: Position) -> Iterator[Drawn]:
        """Rows from `position` on, for ever; not tokenised, and but for a hub's CSV not even parsed."""
        rows = {name: epochs(self.sources[name], self.config, name, *at) for name, at in position.sources.items()}
        return (next(rows[name]) for name in choices(self.config, position.drawn))

    def documents(self, position: Position) -> Iterator[tuple[Drawn, list[Document] | MalformedRow]]:
        """Rows with their documents from `position` on, for ever; the same on every rank. Raises as `received` does,
        when the row's turn comes."""
        draws, size = self.draws(position), self.world.size
        ahead: deque[tuple[list[Drawn], list[Rendered] | Future]] = deque()
        while True:
            while len(ahead) <= 2 * self.config.workers:
                chunk = list(islice(draws, CHUNK * size))
                ahead.append((chunk, self.submit(chunk[self.world.rank :: size])))
            chunk, own = ahead.popleft()
            everyone = self.world.exchange(self.result(own) if isinstance(own, Future) else own)
            for place, drawn in enumerate(chunk):
                yield drawn, received(everyone[place % size][place // size], self.config)

    def submit(self, rows: list[Drawn]) -> list[Rendered] | Future:
        """The rows' documents, or their future where a worker makes them."""
        if not self.config.workers:
            return [render(row.placed, self.config.sources[row.source], self.renderer) for row in rows]
        if self.pool is None:
            with shielded():
                self.pool = ProcessPoolExecutor(
                    self.config.workers,
                    multiprocessing.get_context("spawn"),  # a fork would copy the GPU's and the tokenizer's threads
                    initializer=set_up_worker,
                    initargs=(self.config, self.renderer),
                )
        # Shielded anew: multiprocessing lifts it when it has started its resource tracker.
        with shielded(), self.unread_when_broken():
            return self.pool.submit(work, [(row.source, row.placed) for row in rows])

    def result(self, future: Future) -> list[Rendered]:
        """What a worker made. Raises BrokenProcessPool where one was killed (by the system that is out of memory, say).

        The pool does not notice one that was killed while it wrote its result: it waits for the rest of it, and the
        other workers for their turn to write. So the workers are looked at here, and the pool is told.
        """
        while True:
            try:
                with self.unread_when_broken():
                    return future.result(timeout=LOOK_S)
            except TimeoutError:
                workers = list((self.pool._processes or {}).values())
                if any(worker.exitcode is not None for worker in workers):
                    for worker in workers:
                        worker.kill()
                    self.pool._result_queue._writer.close()  # nobody writes any more: what is read ends here

    @contextmanager
    def unread_when_broken(self) -> Iterator[None]:
        """A pool that broke meanwhile gives up the work that it is writing for workers that are gone. Python before
        3.11.5 waits for ever to be rid of it (cpython's issue 94777)."""
        try:
            yield
        except BrokenProcessPool:
            self.pool._call_queue._reader.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None


@contextmanager
def shielded() -> Iterator[None]:
    """Processes that this thread starts meanwhile have STOP blocked from their first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


worker: dict[str, Any] = {}  # what a worker process was set up with


def set_up_worker(config: DataConfig, renderer: ChatRenderer) -> None:
    torch.set_num_threads(1)
    worker.update(config=config, renderer=renderer)
    threading.Thread(target=end_with_pool, args=(multiprocessing.parent_process().pid,), daemon=True).start()


def end_with_pool(owner: int) -> None:
    """End this process when the one that has the pool is gone, or sends SIGTERM: so it ends a pool that is broken."""
    while os.getppid() == owner:
        told = signal.sigtimedwait([signal.SIGTERM], 1)
        if told is not None and told.si_pid == owner:
            break
    os._exit(1)


def work(rows: list[tuple[str, PlacedRow]]) -> list[Rendered]:
    return [render(placed, worker["config"].sources[name], worker["renderer"]) for name, placed in rows]
