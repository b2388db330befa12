"""One command at a time writes to a place: a lock on a file there. Knows nothing of what is written."""

import errno
import fcntl
import os
import socket
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from eagle_train.distributed import ALONE, World
from eagle_train.errors import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # what file systems without them answer


@dataclass(frozen=True)
class Hold:
    """That this process writes to a place. `token`: what it wrote into the lock's file, its own; None where there can
    be no such file, and on ranks but the first."""

    lock: Path
    token: str | None = None

    def other(self) -> str | None:
        """Who has taken the place since, None while nobody has. Reads the file anew: a file system may have no locks,
        or each node its own (Lustre's `localflock`), and then nobody is refused."""
        if self.token is None:
            return None
        found = self.lock.read_text("utf-8", errors="replace") if self.lock.is_file() else ""
        return None if found == self.token else found.partition("\n")[0] or "another process"


def beside(out: Path) -> Path:
    """The lock of what appears at `out` whole, or is a file; one for all names of a place."""
    out = Path(os.path.realpath(out))
    return out.parent / f".{out.name}.lock"


@contextmanager
def one_writer(out: Path, lock: Path, world: World = ALONE) -> Iterator[Hold]:
    """The block alone writes to `out`, among all that give the same file `lock`. All ranks enter it, the first locks,
    and may ask what it gives whether the place is still its own.

    The system gives a lock back when its process ends, however it ends. A directory that is made for the lock, and in
    which nothing else lies, is removed with it. Raises UserError on every rank where another process holds the lock. A
    file system that has no locks is not locked, with a warning, nor is one on which nothing can be written.
    """
    held = ExitStack()
    token = world.by_main(lambda: held.enter_context(_locked(out, lock)))
    with held:
        yield Hold(lock, token if world.is_main else None)


@contextmanager
def _locked(out: Path, lock: Path) -> Iterator[str | None]:
    is_new = not lock.parent.exists()
    descriptor, token = _taken(out, lock)
    try:
        yield token
    finally:
        if descriptor is not None:
            with suppress(OSError):
                if Hold(lock, token).other() is None:
                    lock.unlink()  # while it is held, so that nobody else's is removed
                if is_new:
                    lock.parent.rmdir()
            os.close(descriptor)


def _taken(out: Path, lock: Path) -> tuple[int | None, str | None]:
    """The descriptor of the lock's file, locked, and its holder's name and token, which are in it. None where there can
    be no file, and no token on a full disk."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(out, lock)
    except OSError:  # what writes there says so
        return None, None
    token = f"process {os.getpid()} on {socket.gethostname()}\n{os.environ.get('SLURM_JOB_ID', '')} {uuid.uuid4().hex}"
    with suppress(OSError):
        os.truncate(descriptor, 0)
        os.write(descriptor, token.encode())
        return descriptor, token
    return descriptor, None


def _opened(out: Path, lock: Path) -> int:
    """The descriptor of the lock's file, locked, or with a warning where the file system has no locks. Raises UserError
    where another process has it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").partition("\n")[0] or "another process"
            os.close(descriptor)
            raise UserError(
                f"out={out}: {holder} writes there; wait for its end, stop it, or give another place"
            ) from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"out={out}: its file system has no locks ({error.strerror}): a second command that writes there "
                    "is not refused",
                    stacklevel=2,
                )
                return descriptor
            os.close(descriptor)
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        os.close(descriptor)  # its holder removed the file meanwhile
