"""A separate process that runs orders, so that what is timed in it shares nothing with what it is compared to.

Knows nothing of what is timed.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from eagle_train.distributed import shielded
from eagle_train.errors import UserError

# As in launch/quickstart.sh: without these, a step spends most of its time on allocating memory from the kernel.
ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296"


class Worker:
    """Runs `work(*arguments, line)`, which receives orders from `line` and sends results, until it receives None."""

    def __init__(self, work: Callable[..., None], *arguments: Any):
        os.environ.setdefault("GLIBC_TUNABLES", ALLOCATOR)  # read when a process starts
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_worker, args=(work, *arguments, theirs), daemon=True)
        with shielded([signal.SIGINT]):  # a terminal sends it to all; who gives the orders ends this process
            self.process.start()
        theirs.close()

    def ask(self, order: Any) -> Any:
        """The result of an order. Raises the UserError that was sent instead, and one where the process has ended."""
        try:
            self.line.send(order)
            answer = self.line.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            status = self.process.exitcode
            told = f"a process that measures ended with status {status}; its output is above"
            raise UserError(told + "; -9 says that it was killed, for want of memory, say" * (status == -9)) from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self.line.send(None)
        self.process.join()


def _worker(work: Callable[..., None], *arguments: Any) -> None:
    """`work`, whose UserError answers the order that it is at, or the first one."""
    line = arguments[-1]
    try:
        work(*arguments)
    except UserError as error:
        line.send(error)
        line.recv()  # an answer is lost with its process
