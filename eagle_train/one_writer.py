"""One command at a time writes to a place: a lock on a file there. Knows nothing of what is written."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from eagle_train.distributed import ALONE, World
from eagle_train.errors import UserError


def beside(out: Path) -> Path:
    """The lock of what appears at `out` whole, or is a file."""
    return out.with_name(f".{out.name}.lock")


@contextmanager
def one_writer(out: Path, lock: Path, world: World = ALONE) -> Iterator[None]:
    """The block alone writes to `out`, among all that give the same file `lock`. All ranks enter it, the first locks.

    The system gives a lock back when its process ends, however it ends. A directory that is made for the lock, and in
    which nothing else lies, is removed with it. Raises UserError on every rank where another process holds the lock. A
    file system that has no locks, or on which nothing can be written, is not locked.
    """
    held = ExitStack()
    world.by_main(lambda: held.enter_context(_locked(out, lock)))
    with held:
        yield


@contextmanager
def _locked(out: Path, lock: Path) -> Iterator[None]:
    is_new = not lock.parent.exists()
    descriptor = _taken(out, lock)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                lock.unlink()  # while it is held, so that nobody else's is removed
                if is_new:
                    lock.parent.rmdir()
            os.close(descriptor)


def _taken(out: Path, lock: Path) -> int | None:
    """The descriptor of the lock's file, locked, with its holder's name in it. None where there can be no lock."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(out, lock)
    except OSError:  # what writes there says so
        return None
    with suppress(OSError):  # on a full disk it has no name
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def _opened(out: Path, lock: Path) -> int:
    """The descriptor of the lock's file, locked. Raises UserError where another process has it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise UserError(
                f"out={out}: {holder} writes there; wait for its end, stop it, or give another place"
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        os.close(descriptor)  # its holder removed the file meanwhile
