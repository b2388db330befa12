"""A second process on this machine, and a process group of the two: for what needs two ranks.

Knows nothing of what they compute.
"""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from eagle_train import distributed
from eagle_train.artifacts.format import load_draft
from eagle_train.distributed import World
from eagle_train.inference import PrefillServer, RemotePrefill, connect
from eagle_train.models.loading import TargetConfig, load_target

EXIT_TIMEOUT = timedelta(seconds=10)


@contextmanager
def second_rank(work: Callable[..., None], *arguments: Any) -> Iterator[World]:
    """Runs `work(world, *arguments)` as rank 1 in a second process; yields the world of this process, rank 0.

    On the CPU, with as many threads as this process has. The process is killed at the end, or where this one fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    given = (work, job | {"RANK": "1"}, torch.get_num_threads(), *arguments)
    process = multiprocessing.get_context("spawn").Process(target=_run_rank, args=given, daemon=True)
    with distributed.shielded([signal.SIGINT]):  # a terminal sends it to all; this process ends the other
        process.start()
    try:
        with patch.dict(os.environ, job | {"RANK": "0"}):
            world = distributed.start("cpu", shard_size=None)
        yield world
        process.join(EXIT_TIMEOUT.total_seconds())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        process.kill()
        process.join()


def _run_rank(work: Callable[..., None], job: dict[str, str], threads: int, *arguments: Any) -> None:
    """What the second process runs."""
    os.environ.update(job)
    torch.set_num_threads(threads)
    work(distributed.start("cpu", shard_size=None), *arguments)
    distributed.leave()


@contextmanager
def prefill_process(target: TargetConfig, draft: str) -> Iterator[RemotePrefill]:
    """A process with the same target and draft that prefills for this one. Paper section 3.3."""
    with second_rank(_serve_prefill, target, draft) as world:
        prefill = RemotePrefill(connect(world.divided(1)))  # each has the whole target
        yield prefill
        prefill.close()


def _serve_prefill(world: World, target: TargetConfig, draft: str) -> None:
    """What the prefill process runs."""
    whole = load_target(target, "cpu")
    PrefillServer(whole, load_draft(draft, whole.identity)).serve(connect(world.divided(1)))
