"""A process beside this one, and the job that both are ranks of: what needs two, within a machine.

Knows nothing of what is asked, nor of figures.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from eagle_train import distributed
from eagle_train.artifacts.format import load_draft
from eagle_train.distributed import World
from eagle_train.inference import Engine
from eagle_train.inference.parallel.disaggregated import Line, connect, serve_prefill
from eagle_train.models.loading import TargetConfig, load_target

A_MOMENT = timedelta(seconds=10)  # for it to end


@contextmanager
def beside(work: Callable[..., None], *arguments: Any) -> Iterator[World]:
    """`work(world, *arguments)` as rank 1, in a process that ends with it, for what this one does as rank 0.

    On the CPU, with as many threads as this process has. It is killed where it goes on, or where this one fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    given = (work, job | {"RANK": "1"}, torch.get_num_threads(), *arguments)
    process = multiprocessing.get_context("spawn").Process(target=rank, args=given, daemon=True)
    process.start()
    try:
        with patch.dict(os.environ, job | {"RANK": "0"}):
            world = distributed.start("cpu", share=None)
        yield world
        process.join(A_MOMENT.total_seconds())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        process.kill()
        process.join()


def rank(work: Callable[..., None], job: dict[str, str], threads: int, *arguments: Any) -> None:
    """The process."""
    os.environ.update(job)
    torch.set_num_threads(threads)
    work(distributed.start("cpu", share=None), *arguments)
    distributed.leave()


@contextmanager
def prefill_process(target: TargetConfig, draft: str) -> Iterator[list[Line]]:
    """The line to a process that has the same target and draft, and reads prompts for this one. Paper section 3.3."""
    with beside(read_prompts, target, draft) as world:
        (line,) = connect(world)
        yield [line]
        with suppress(RuntimeError):  # it was given up, or died
            line.tell(None, A_MOMENT)


def read_prompts(world: World, target: TargetConfig, draft: str) -> None:
    """Until there are no more."""
    whole = load_target(target, "cpu")
    engine = Engine(whole, load_draft(draft, whole.identity))
    serve_prefill(engine, connect(world))
