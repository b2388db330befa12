"""What test_kills.py starts: a job of 1 to 3 ranks that is killed again and again at any moment, then left to end.

The ranks are forks of this process, so that torch is imported once. Each time one rank is killed, or all, while they
train, exchange, or write a checkpoint; each time another number of ranks goes on.

    python -m tests.support.kill_job DATA OUT KILLS STEPS SEED
"""

import ctypes
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore

from eagle_train import distributed
from eagle_train.training.checkpoint.store import CheckpointStore
from tests.support.processes import Watchdog
from tests.support.ranks_job import one_run

stores: list[TCPStore] = []  # where ranks meet; those of ranks that are gone stay
FURTHER = 4  # steps at most that a run gets on before it is killed


def fork_ranks(number: int, data: Path, out: Path, steps: int) -> list[int]:
    """Start the ranks of a run with a checkpoint after every step; returns their process ids."""
    store, ranks = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    stores.append(store)
    for rank in range(number):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives a test that failed
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            status = 1
            try:
                world = distributed.start("cpu", shard_size=None, group=True)
                train = {"steps": steps, "rows": 1, "rows_per_step": 6, "save_every": 1}
                one_run(data, {"out": str(out), "parallel": {"backend": "fsdp2"}, "train": train}, world)
                status = 0
            finally:
                os._exit(status)
        ranks.append(child)
    return ranks


def kill(ranks: list[int]) -> None:
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


def ended(ranks: list[int], seconds: float = math.inf) -> list[int]:
    """Wait so long at most for all of them, and for none that hangs; returns those that still run."""
    watchdog, until = Watchdog(ranks), time.monotonic() + seconds
    while ranks and time.monotonic() < until:
        ranks = [rank for rank in ranks if os.waitpid(rank, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
        watchdog.look()
    return ranks


def newest(out: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name.partition("-")[2]) for path in out.glob("step-*")), default=0)


def main(data: Path, out: Path, kills: int, steps: int, seed: int) -> None:
    assert steps > 2 * FURTHER * kills, f"{steps} steps may be done before {kills} kills"
    rng = random.Random(seed)
    for done in range(1, kills + 1):
        ranks = fork_ranks(rng.choice((1, 2, 3)), data, out, steps)
        before = newest(out)
        wanted, watchdog = before + rng.randint(0, FURTHER), Watchdog(ranks)
        while newest(out) < wanted:
            time.sleep(0.005)
            watchdog.look()  # raises where they do not get on
        time.sleep(rng.uniform(0, 0.1))  # on the way to the next checkpoint, or in the midst of it
        victims = ranks if rng.random() < 0.5 else [rng.choice(ranks)]
        together = newest(out) > before  # else they may still wait for each other to start, as long as it takes
        kill(victims)
        left = ended(ranks, math.inf if together else 1)  # the others must notice that a rank is gone
        kill(left)  # which is the launcher's part
        ended(left)
        path = CheckpointStore(out).latest()
        print(f"kill {done}: {len(victims)} of {len(ranks)} ranks; goes on from {path and path.name}", flush=True)
    ranks = fork_ranks(2, data, out, steps)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    assert statuses == [0, 0], statuses
    print(f"KILLS {kills}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *(int(argument) for argument in sys.argv[3:6]))
