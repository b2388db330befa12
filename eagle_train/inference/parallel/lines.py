"""Lines between the processes of disaggregated prefill (disaggregated.py): what is sent, and how long one waits.

Messages go over Gloo and host memory on any device, because a timeout in NCCL ends the waiting process. The decode
process sends values as JSON. The prefill process sends parts of answers (`Outbox`): a header int64 [3] (the number of
the request, what it is, the length of what follows), and a 1-D tensor unless the length is 0. Knows nothing of requests
or caches.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from eagle_train.distributed import World
from eagle_train.errors import check
from eagle_train.ops.transfer import HostCopy, SideStream

FOREVER = timedelta(days=365)
_LEAST = timedelta(milliseconds=1)  # Gloo takes less for no timeout
_NEVER_SENT = 1  # a tag
_MOST_WAITING = 16  # parts of an answer that are computed and not sent; each takes memory


class Header(NamedTuple):
    """Says what follows on a line."""

    number: int  # of the request
    what: int
    length: int  # elements


@dataclass(frozen=True, eq=False)
class Line:
    """The connection between the decode process and one prefill process. It has its own process group, because Gloo
    closes all connections of a group after a timeout. Methods raise RuntimeError on a timeout, or if the other process
    has ended."""

    other: int  # rank
    group: Any

    def send_tensor(self, tensor: torch.Tensor, timeout: timedelta = FOREVER) -> None:
        self._wait(dist.isend(tensor, self.other, self.group), timeout)

    def recv_tensor(self, tensor: torch.Tensor, timeout: timedelta = FOREVER) -> torch.Tensor:
        """Receive into `tensor` and return it."""
        self._wait(dist.irecv(tensor, self.other, self.group), timeout)
        return tensor

    def close(self) -> None:
        """Have the other process's calls, which wait or come, raise RuntimeError: Gloo closes by a timeout."""
        with suppress(RuntimeError):
            self._wait(dist.irecv(torch.empty(1), self.other, self.group, _NEVER_SENT), _LEAST)

    @staticmethod
    def _wait(work: dist.Work | None, timeout: timedelta) -> None:
        assert work is not None  # it is None only for a process outside the group
        work.wait(timeout)

    def send(self, message: Any, timeout: timedelta = FOREVER) -> None:
        """Send a value that JSON can represent."""
        text = as_bytes(message)
        self.send_tensor(torch.tensor([len(text)]), timeout)
        self.send_tensor(text, timeout)

    def recv(self, timeout: timedelta = FOREVER) -> Any:
        """Receive a value that the other process sent with `send`."""
        length = self.recv_tensor(torch.empty(1, dtype=torch.int64), timeout)
        return from_bytes(self.recv_tensor(torch.empty(int(length), dtype=torch.uint8), timeout))

    def recv_header(self, timeout: timedelta) -> Header:
        """What the other process sends next, from its `Outbox`."""
        return Header(*self.recv_tensor(torch.empty(3, dtype=torch.int64), timeout).tolist())


def as_bytes(message: Any) -> torch.Tensor:
    """A value as JSON, uint8 [length]: mappings of any kind as objects, other iterables as arrays."""
    text = json.dumps(message, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def from_bytes(text: torch.Tensor) -> Any:
    """What JSON has made of a value of `as_bytes`."""
    return json.loads(text.numpy().tobytes())


class Deadline:
    """When an answer must be complete."""

    def __init__(self, timeout: timedelta):
        self._timeout, self._end = timeout, time.monotonic() + timeout.total_seconds()

    @property
    def left(self) -> timedelta:
        """The time until then. Raises RuntimeError if there is none."""
        left = timedelta(seconds=self._end - time.monotonic())
        if left <= timedelta(0):
            raise RuntimeError(f"timed out: it took more than {self._timeout.total_seconds():g} s")
        return max(left, _LEAST)


class Outbox:
    """Sends parts of answers over a line, in order, while this process computes. `put` and `flush` raise RuntimeError
    if the other process has ended, or has given up waiting."""

    def __init__(self, line: Line, device: torch.device):
        self._line, self._side, self._thread = line, SideStream(device), ThreadPoolExecutor(1)
        self._waiting: deque[Future] = deque()

    def put(self, number: int, what: int, body: torch.Tensor | None = None) -> None:
        """Send a header, and `body`, a 1-D tensor that nobody writes to. Waits where many parts wait."""
        copy = None if body is None else self._side.to_host(body)
        self._waiting.append(self._thread.submit(self._send, number, what, copy))
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft().result()

    def flush(self) -> None:
        """Wait until all is sent."""
        while self._waiting:
            self._waiting.popleft().result()

    def _send(self, number: int, what: int, copy: HostCopy | None) -> None:
        body = None if copy is None else copy.wait()
        self._line.send_tensor(torch.tensor([number, what, 0 if body is None else len(body)]))
        if body is not None:
            self._line.send_tensor(body)


def connect(world: World) -> list[Line]:
    """A decode rank's lines, one to each prefill group, or a prefill rank's one line to its decode rank. The first
    `world.shard_size` ranks decode. Collective: all ranks must call it, once. Raises UserError if none is left for
    prefill."""
    each = world.shard_size
    started = "1 process was" if world.size == 1 else f"{world.size} processes were"
    parts = "one for decoding and one for prefill" if each == 1 else f"{each} for decoding and {each} for prefill"
    check(world.size > each, f"{started} started: start at least {2 * each}, {parts}")
    groups = {rank: dist.new_group([rank % each, rank], backend="gloo") for rank in range(each, world.size)}
    if world.rank < each:
        return [Line(rank, group) for rank, group in groups.items() if rank % each == world.rank]
    return [Line(world.rank % each, groups[world.rank])]
