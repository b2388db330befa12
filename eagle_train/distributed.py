"""The processes of a job: who they are, and what they tell each other. Knows nothing of models, data or training.

torchrun, `accelerate launch` and launch/slurm set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without
them a job is one process, and everything here costs nothing.
"""

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

from eagle_train.errors import UserError, check, one_line, report
from eagle_train.ops.torch_private import default_store

T = TypeVar("T")
SIDES = ("data", "files", "votes")
# What launchers, clusters and terminals stop a job with. All its processes may be sent it; its ranks alone see to it.
STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

# How many processes srun and the launchers of MPI say that they started.
_STARTED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LONGEST_WAIT = timedelta(days=7)  # at a job's end, for a first rank that still works alone; launchers end what hangs
_ERROR_WAIT = timedelta(minutes=1)  # for ranks that are to meet the same error, and may not


@contextmanager
def shielded(signals: Collection[signal.Signals] = STOP) -> Iterator[None]:
    """Processes that this thread starts in the block have the signals blocked from the start."""
    resource_tracker.ensure_running()  # when it starts, multiprocessing unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class CommonError(UserError):
    """One that every rank meets at the same point: what was learnt before it can be kept, and all end together."""


@dataclass(frozen=True)
class World:
    """The job's ranks. Each trains the draft on rows of its own; `shard_size` neighbours hold one target together.

    `mesh` has the one dimension of all ranks; `shard_mesh` divides it into (replicate, shard), or is None where each
    rank has a target of its own. `draft_shard_mesh`, over which FSDP2 divides the draft, is `mesh`, or divides it into
    (replicate, shard). All are None for a job of one process. `node`: the ranks of each node; all, where nodes have
    different numbers of them. `sides` are gloo groups of all ranks for what goes on in the background, one for each of
    SIDES, because two threads must not talk in one group.
    """

    rank: int = 0
    size: int = 1
    shard_size: int = 1
    mesh: DeviceMesh | None = None
    shard_mesh: DeviceMesh | None = None
    draft_shard_mesh: DeviceMesh | None = None
    node: int = 1
    sides: dict[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def divided(self, shard_size: int, draft_shard_size: int | None = None) -> "World":
        """The same ranks, of whom `shard_size` neighbours hold one target together, and `draft_shard_size` one draft,
        None for all.

        Both divide the ranks. All ranks call it.
        """
        if self.mesh is None:
            return self

        def mesh_of(size: int) -> DeviceMesh:
            assert self.mesh is not None
            shape = self.size // size, size
            return init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))

        together = mesh_of(shard_size) if shard_size > 1 else None
        of_draft = mesh_of(draft_shard_size) if draft_shard_size and draft_shard_size < self.size else self.mesh
        return replace(self, shard_size=shard_size, shard_mesh=together, draft_shard_mesh=of_draft)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def vote(self, own: bool) -> Callable[[], bool]:
        """Whether any rank says so: the answer waits until all have voted, the vote for nobody."""
        if self.size == 1:
            return lambda: own
        votes = torch.tensor(int(own))
        count = dist.all_reduce(votes, group=self.sides["votes"], async_op=True)
        return lambda: count.wait() and votes.item() > 0

    def agreed(self, own: T) -> T:
        """What the first rank gave, on every rank; a picklable value."""
        if self.size == 1:
            return own
        given = [own]
        dist.broadcast_object_list(given, src=0, group=self.sides["data"])
        return given[0]

    def by_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone does it, on every rank; a picklable value.

        All ranks call it. A UserError that `work` raises is raised on every rank, as CommonError.
        """
        if self.size == 1:
            return work()
        value, told = self.agreed(_tried(work) if self.is_main else (None, None))
        check(told is None, str(told), CommonError)
        return value  # type: ignore[return-value]  # it is the work's where nothing was raised

    def by_each(self, work: Callable[[], T]) -> T:
        """What `work` returns on this rank; every rank does it. All ranks call it.

        A UserError that a rank raises is raised on every rank, as CommonError; of several that of the lowest rank. For
        what may fail on one node and not on another, such as reading its files.
        """
        if self.size == 1:
            return work()
        value, own = _tried(work)
        told = next((each for each in self.exchange(own) if each is not None), None)
        check(told is None, str(told), CommonError)
        return value  # type: ignore[return-value]

    def exchange(self, own: T, side: str = "data") -> list[T]:
        """What every rank gave, by rank; picklable values, through the group of a side."""
        if self.size == 1:
            return [own]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.sides[side])
        return everyone


ALONE = World()


def _tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What `work` returns, or the message of the UserError that it raises."""
    try:
        return work(), None
    except UserError as error:
        return None, str(error)


def place() -> tuple[int, int]:
    """This process's rank and the number of them, as the environment says. Raises UserError where that cannot be, and
    where srun or mpirun started several processes that know no rank: each would be a run of its own."""
    for name in _STARTED if "RANK" not in os.environ else ():
        number = os.environ.get(name, "")
        check(
            not number.isdigit() or int(number) < 2,
            f"{name}={number}, and RANK is not set: these would be {number} runs that know nothing of one another; "
            "start one job with launch/slurm/train.sbatch or torchrun, or give each RANK=0 WORLD_SIZE=1 for runs apart",
        )
    rank, size = (os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    sound = rank.isdigit() and size.isdigit() and int(rank) < int(size)
    check(sound, f"RANK={rank}, WORLD_SIZE={size}: must be whole numbers, RANK below WORLD_SIZE; a launcher sets them")
    for name in ("MASTER_ADDR", "MASTER_PORT") if int(size) > 1 else ():
        check(name in os.environ, f"{name} is not set, and WORLD_SIZE={size}: start the job with a launcher")
    port = os.environ.get("MASTER_PORT", "1")
    check(port.isdigit(), f"MASTER_PORT={port}: must be a port's number")
    return int(rank), int(size)


def check_alone(what: str) -> None:
    """Raise UserError where a launcher started several processes of a command that has work for one."""
    size = place()[1]
    check(size == 1, f"WORLD_SIZE={size}: {what} runs in one process; start it without a launcher")


def start(device: str, shard_size: int | None = 1, timeout_minutes: float = 30.0, group: bool = False) -> World:
    """Join the job that the environment names. `device`: cpu or cuda; `shard_size`: ranks that hold one target
    together, None for all.

    `group`: make a process group even for a process alone, as FSDP2 and DeepSpeed need. Raises UserError where
    `shard_size` does not divide the ranks, or where there are more ranks than GPUs.
    """
    rank, size = place()
    shard_size = size if shard_size is None else shard_size
    check(
        shard_size >= 1 and size % shard_size == 0,
        f"parallel.target_shard_size={shard_size}: must divide the number of processes, {size}",
    )
    if device == "cuda":
        torch.cuda.set_device(_own_gpu(torch.cuda.device_count()))
    if size == 1 and not group:
        return ALONE
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        _meet(backend, timeout)
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("rank",))
    sides = {side: dist.new_group(backend="gloo", timeout=timeout) for side in SIDES}
    world = World(rank, size, mesh=mesh, sides=sides)
    return replace(world, node=_node_size(world.exchange(socket.gethostname()))).divided(shard_size)


def _own_gpu(visible: int) -> int:
    """Which of the GPUs that this process sees is its own. Raises UserError where none is.

    Of a task of Slurm's to which its one GPU is bound, that one; LOCAL_RANK, by which libraries choose theirs too, says
    so from then on.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank > 0 and visible == 1 and _has_bound_gpu():
        os.environ["LOCAL_RANK"] = "0"
        return 0
    check(
        local_rank < visible,
        f"LOCAL_RANK={local_rank}: this process sees {visible} GPUs: start a process for each GPU of a node, each of "
        "which sees them all, as Slurm's --gpus-per-node has it",
    )
    return local_rank


def _has_bound_gpu() -> bool:
    """Whether Slurm started this very process, a rank of the job, with GPUs that no other of its tasks sees."""
    names = (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"))
    is_task = all(os.environ.get(own) == os.environ.get(of_task) for own, of_task in names)
    by_task = "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    return is_task and by_task


def _node_size(hosts: list[str]) -> int:
    """The ranks of each node, from the host of each rank; all, where they are no neighbours or differ in number."""
    size = hosts.count(hosts[0])
    nodes = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    alike = all(len(node) == size and len(set(node)) == 1 for node in nodes)
    return size if alike and len({node[0] for node in nodes}) == len(nodes) else len(hosts)


def _meet(backend: str, timeout: timedelta) -> None:
    """Find the job's other ranks. Raises UserError where that fails: most often the port is another job's."""
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        place = ", ".join(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(f"{place}: the ranks cannot meet there; give a free port: {one_line(error)}") from error


def run(job: Callable[[], int]) -> None:
    """This process's part of a job from start to end; `job` returns the exit status. See `leave`."""
    try:
        status = record(job)() or 0  # a launcher tells the first error of all ranks by what this notes
    except UserError as error:
        if place()[1] == 1:
            raise
        leave(report(error), None if not isinstance(error, CommonError) else _ERROR_WAIT)
    leave(status)


def leave(status: int = 0, wait: timedelta | None = _LONGEST_WAIT) -> None:
    """Leave the job. A process alone goes on, unless it has a `status` to end with; a rank of several ends here.

    It waits until all are leaving, for Gloo fails what another rank is still ending when this one's connections close,
    though all of it had come. But no longer than `wait`: after an error the others may be waiting for this one. None
    for not at all.

    It ends as the interpreter would end it, but without tearing the interpreter down: Gloo's threads still let go of
    the last tensors then, need the interpreter for it, and abort the process (pytorch issue 190489).
    """
    together = wait is not None and (not dist.is_initialized() or _left_together(wait))
    if place()[1] > 1:
        if together:
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its children
        else:
            for child in multiprocessing.active_children():
                child.terminate()  # nobody told them to end, and what follows waits for them
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


def _left_together(wait: timedelta) -> bool:
    """End the process group once every rank leaves; False where one does not within `wait`, or rank 0 is gone."""
    store, rank, ranks = default_store(), dist.get_rank(), range(dist.get_world_size())
    try:
        store.set(f"leaving/{rank}", "")
        store.wait([f"leaving/{each}" for each in ranks], wait)
        dist.destroy_process_group()
        store.set(f"left/{rank}", "")
        if rank == 0:  # without a launcher that keeps it, the store ends with rank 0
            store.wait([f"left/{each}" for each in ranks], wait)
    except (dist.DistNetworkError, dist.DistStoreError):
        return False
    return True
