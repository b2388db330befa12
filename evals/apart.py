"""A process of its own that reads prompts for this one: disaggregated prefill within a machine. Paper section 3.3.

Knows nothing of what is asked, nor of figures.
"""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from eagle_train import distributed
from eagle_train.inference import Engine
from eagle_train.inference.disaggregated import Line, connect, serve_prefill
from eagle_train.models.artifact import load_draft
from eagle_train.models.loading import TargetConfig, load_target

A_MOMENT = timedelta(seconds=10)  # for it to end


@contextmanager
def prefill_process(target: TargetConfig, draft: str) -> Iterator[list[Line]]:
    """The line to a process that has the same target and draft, on the CPU, and as many threads as this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    arguments = (job | {"RANK": "1"}, target, draft, torch.get_num_threads())
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        with patch.dict(os.environ, job | {"RANK": "0"}):
            world = distributed.start("cpu")
        (line,) = connect(world)
        yield [line]
        with suppress(RuntimeError):  # it was given up, or died
            line.tell(None, A_MOMENT)
        process.join(A_MOMENT.total_seconds())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        process.kill()
        process.join()


def work(job: dict[str, str], target: TargetConfig, draft: str, threads: int) -> None:
    """What the process does, until there is no more to read."""
    os.environ.update(job)
    torch.set_num_threads(threads)
    whole = load_target(target, "cpu")
    engine = Engine(whole, load_draft(draft, whole.identity))
    serve_prefill(engine, connect(distributed.start("cpu")))
    distributed.leave()
