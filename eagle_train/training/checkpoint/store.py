"""The checkpoints of one run: written whole or not at all, the newest found again, old ones removed.

A checkpoint is written under a hidden name and renamed when it is complete, so that a kill at any moment leaves the
ones before. Knows nothing of what a checkpoint holds; see format.py. DESIGN section 3.11.
"""

import functools
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.errors import check, one_line
from eagle_train.training.checkpoint.format import (
    Checkpoint,
    RankTensors,
    checkpoints,
    directory_name,
    flush,
    score_of,
    step_of,
    write_manifest,
    write_rank_files,
)
from eagle_train.training.checkpoint.verify import find_flaw, open_checkpoint

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_Exchange = Callable[[Any], list[Any]]


class CheckpointStore:
    """The checkpoints in a run's `directory`, read and written by all ranks of `world` together.

    Every method that returns something about checkpoints is a collective call: all ranks make it, in the same order.
    """

    def __init__(self, directory: Path | str, world: World = ALONE):
        self.directory, self.world = Path(directory), world
        # Files are written in a thread, which must not talk in the group of the data.
        self._exchange: _Exchange = functools.partial(world.exchange, side="files")
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._running: Future[Path] | None = None
        self.taken_by: Callable[[], str | None] = lambda: None
        """Who else writes to the directory, where no lock keeps others out; asked before each save by the main rank."""

    def save_in_background(self, *arguments: Any, **options: Any) -> None:
        """`save` in a thread, after waiting for the one before.

        Where the disk refused that one, this one is waited for too; raises CommonError if it is refused as well.
        """
        failed = self.has_failed()
        if not failed:
            self.wait()
        self._running = self._thread.submit(self._save_or_tell, *arguments, **options)
        if failed:
            self.wait()

    def _save_or_tell(self, *arguments: Any, **options: Any) -> Path:
        """`save`, which tells in the log what it raises: who waits for it may come much later."""
        try:
            return self.save(*arguments, **options)
        except CommonError as error:
            if self.world.is_main:
                _LOG.warning("%s", error)
            raise

    def has_failed(self) -> bool:
        """Whether the disk refused the last save in the background; waits for it. The same on all ranks."""
        return self._running is not None and isinstance(self._running.exception(), CommonError)

    def wait(self) -> Path | None:
        """Wait for the save in the background, if there is one; returns its directory. Raises what the save raised."""
        running, self._running = self._running, None
        return running.result() if running else None

    def save(
        self,
        step: int,
        tensors: RankTensors,
        config: dict[str, Any],
        state: dict[str, Any],
        keep: int,
        score: float | None = None,
    ) -> Path:
        """Write the checkpoint of `step` and remove old ones; returns its directory.

        config: JSON values. state: nested dicts, lists, tuples, numbers, strings and tensors, because it is read back
        with `weights_only=True`. The main rank's config and state are written. `keep`: how many checkpoints are kept
        up to and including this step, beside the one with the highest `score`; 0 keeps all. Checkpoints of later
        steps, which another run left, are not touched. A checkpoint of the same step is replaced. Raises CommonError
        on every rank where the disk refuses one of them, or another process has taken the directory; earlier
        checkpoints are then as they were.
        """
        assert score is None or math.isfinite(score), score
        final = self.directory / directory_name(step)
        partial = self.directory / f".{final.name}.partial"
        try:
            _on_all_ranks(self._exchange, lambda: self._begin(partial))
            written = _on_all_ranks(
                self._exchange, lambda: write_rank_files(partial, step, tensors, config, state, self.world.rank)
            )
            files = {name: seal for own in written for name, seal in own.items()}
            _on_all_ranks(
                self._exchange, lambda: self._finish(partial, final, {"step": step, "score": score, "files": files})
            )
        except BaseException as error:
            if self.world.is_main and self.taken_by() is None:  # else it may be another's
                shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, _DiskError):
                raise
            message = f"checkpoint directory {self.directory}: step {step} could not be written: {error}"
            raise CommonError(f"{message}; earlier checkpoints are untouched") from error
        if keep and self.world.is_main:
            _prune(self.directory, step, keep)
        return final

    def _begin(self, partial: Path) -> None:
        if self.world.is_main:
            if other := self.taken_by():
                raise OSError(f"{other} writes there too")
            self.directory.mkdir(parents=True, exist_ok=True)
            _clean_up(self.directory)
            _move_aside(partial)
            partial.mkdir()

    def _finish(self, partial: Path, final: Path, manifest: dict[str, Any]) -> None:
        if self.world.is_main:
            write_manifest(partial, manifest)
            _publish(partial, final)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, None if there is none. Each rank reads some of the files to verify them.

        A damaged one is passed over, with a warning in the log that gives the reason. Raises UserError where there are
        checkpoints and none is complete: a run that started anew would overwrite what may still be rescued.
        """
        if self.world.is_main:
            _restore_replaced(self.directory)
        paths = self.world.exchange(checkpoints(self.directory) if self.world.is_main else [])[0]
        flaws = []
        for path in reversed(paths):
            flaw = find_flaw(path, self.world)
            if flaw is None:
                return path
            flaws.append(f"{path.name}: {flaw}")
            if self.world.is_main:
                _LOG.warning("checkpoint %s is passed over: %s", path, flaw)
        found = f"{self.directory} holds {len(paths)} checkpoints and none is whole"
        check(not paths, f"{found} ({'; '.join(flaws)}); remove them to start anew")
        return None

    def open(self, path: Path | str) -> Checkpoint:
        """Verify and open one checkpoint. Raises UserError if it is missing or damaged."""
        return open_checkpoint(path, self.world)

    def check_shared(self) -> None:
        """Raise CommonError unless every rank can write into the directory and sees what the others write.

        A directory that did not exist does not exist afterwards: the run may yet be refused.
        """
        directory, is_new = self.directory, not self.directory.exists()
        number = self.world.exchange(time.time_ns())[0]  # a new one each time: file systems cache missing names
        mine = directory / f".seen-{number}-{self.world.rank}"

        def write() -> str:
            directory.mkdir(parents=True, exist_ok=True)
            mine.touch()
            return mine.name

        try:
            names = _on_all_ranks(self.world.exchange, write)
            seen = self.world.exchange(all((directory / name).exists() for name in names))
        except _DiskError as error:
            raise CommonError(f"out={directory}: cannot be written: {error}") from error
        finally:
            with suppress(OSError):  # the file does not exist where it could not be written
                mine.unlink()
            if is_new:
                with suppress(OSError):  # another rank's file may still be in it; that rank removes the directory
                    directory.rmdir()
        if not all(seen):
            raise CommonError(
                f"out={directory}: rank {seen.index(False)} does not see there what others write: checkpoints "
                "are written by all, so give a directory that all nodes share"
            )


class _DiskError(Exception):
    """The disk refused what a rank wanted to write."""


def _on_all_ranks(exchange: _Exchange, task: Callable[[], T]) -> list[T]:
    """Run `task` on each rank; returns all results by rank. Raises _DiskError on all where the disk refuses one."""
    own: tuple[T | None, str | None]
    try:
        own = task(), None
    except BaseException as error:
        reason = _disk_error(error)
        if reason is None:
            raise
        own = None, one_line(reason)
    everyone = exchange(own)
    for _, reason in everyone:
        if reason is not None:
            raise _DiskError(reason)
    return [value for value, _ in everyone]


def _disk_error(error: BaseException | None) -> BaseException | None:
    """The disk's error behind `error`. None if the cause is something else, such as a mistake in the code.

    safetensors has an error class of its own for it, and torch.save raises another error while it closes its file.
    """
    while error is not None and not isinstance(error, OSError | SafetensorError):
        error = error.__context__
    return error


def _publish(partial: Path, final: Path) -> None:
    """Give the finished directory its name, in place of an older one of the same step."""
    replaced = _replaced_name(final)
    if final.exists():
        _move_aside(replaced)
        final.rename(replaced)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _restore_replaced(directory: Path) -> None:
    """Undo what a kill between the two renames of `_publish` leaves: an older checkpoint under its hidden name."""
    for replaced in directory.glob(".step-*.replaced"):
        final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not final.exists():
            replaced.rename(final)


def _clean_up(directory: Path) -> None:
    """Remove what killed saves have left."""
    _restore_replaced(directory)
    for pattern in (".step-*.partial", ".step-*.replaced"):
        for leftover in directory.glob(pattern):
            with _warned(leftover):
                shutil.rmtree(leftover)


@contextmanager
def _warned(path: Path) -> Iterator[None]:
    """Warn where the disk refuses to remove what is not needed any more: a network file system keeps files that are
    still open somewhere (.nfs*), and others' files may be in it. It is tried again at the next save."""
    try:
        yield
    except OSError as error:
        _LOG.warning("%s cannot be removed: %s", path, one_line(error))


def _move_aside(leftover: Path) -> None:
    """Give what could not be removed another name, under which `_clean_up` finds it again."""
    if leftover.exists():
        leftover.rename(leftover.with_name(f"{leftover.stem}.{time.time_ns()}.partial"))


def _prune(directory: Path, step: int, keep: int) -> None:
    """Remove the checkpoints up to `step` except the last `keep` and the best."""
    paths = [path for path in checkpoints(directory) if step_of(path) <= step]
    scores = {path: score for path in paths if (score := score_of(path)) is not None}
    best = max(scores, key=lambda path: (scores[path], step_of(path)), default=None)
    for path in paths[:-keep]:
        if path != best:
            with _warned(path):
                _discard(path)


def _discard(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill cannot leave half of it under its name."""
    doomed = path.with_name(f".{path.name}.partial")
    _move_aside(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
