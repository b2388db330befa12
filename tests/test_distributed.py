"""What a job's environment may say of its processes, and what one of them may meet."""

import re
import socket
import sys

import pytest

from eagle_train import distributed
from eagle_train.errors import UserError
from tests.support.command_line import chats, save_target, train_arguments, write_jsonl
from tests.support.processes import run, start_ranks


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, WORLD_SIZE=2: must be whole numbers, RANK below WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: must be whole numbers, RANK below WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set, and WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "MASTER_PORT is not set, and WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "x"}, "MASTER_PORT=x: must be a port"),
    ],
)
def test_an_environment_that_cannot_be(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.place() == (0, 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{message}"):
        distributed.place()


def test_several_processes_without_ranks_are_no_job(monkeypatch):
    """Those of srun and mpirun; one of them alone, or a shell within an allocation, goes on."""
    counts = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *counts):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")  # of the allocation
    for name in counts:
        monkeypatch.setenv(name, "1")
        assert distributed.place() == (0, 1)
        monkeypatch.setenv(name, "8")
        with pytest.raises(UserError, match=f"^{name}=8, and RANK is not set: .* launch/slurm/train.sbatch"):
            distributed.place()
        monkeypatch.setenv("RANK", "0")
        assert distributed.place() == (0, 1)
        monkeypatch.delenv("RANK")
        monkeypatch.delenv(name)


TASK = {"RANK": "7", "LOCAL_RANK": "3", "SLURM_PROCID": "7", "SLURM_LOCALID": "3"}


@pytest.mark.parametrize(
    ("environment", "visible", "gpu"),
    [
        ({}, 1, 0),
        ({"LOCAL_RANK": "3"}, 4, 3),
        (TASK, 8, 3),
        (TASK | {"SLURM_GPUS_PER_TASK": "1"}, 1, 0),
        (TASK | {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu:h100=1"}, 1, 0),
        (TASK | {"SLURM_GPUS_PER_TASK": "1"}, 8, 3),  # bound, and all of them are seen
        ({"LOCAL_RANK": "3"}, 1, None),
        (TASK, 1, None),  # --gpus-per-node=1: the tasks of a node see the same one
        (TASK | {"SLURM_TRES_PER_TASK": "cpu=8"}, 1, None),
        (TASK | {"SLURM_GPUS_PER_TASK": "1", "SLURM_LOCALID": "0"}, 1, None),  # torchrun in a task
        (TASK | {"SLURM_GPUS_PER_TASK": "2"}, 2, None),
    ],
)
def test_the_gpu_of_a_rank(monkeypatch, environment, visible, gpu):
    for name in (*TASK, "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if gpu is None:
        told = f"^LOCAL_RANK=3: this process sees {visible} GPUs: .* as Slurm's --gpus-per-node has it$"
        with pytest.raises(UserError, match=told):
            distributed._own_gpu(visible)
        return
    assert distributed._own_gpu(visible) == gpu
    assert distributed.os.environ.get("LOCAL_RANK", "0") == str(gpu)


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        ("a", 1),
        ("aa", 2),
        ("aabb", 2),
        ("aaaabbbbcccc", 4),
        ("ab", 1),
        ("aab", 3),  # not all alike
        ("abab", 4),  # not neighbours
        ("aabbaa", 6),
    ],
)
def test_the_ranks_of_a_node_are_those_of_one_host(hosts, size):
    assert distributed._node_size(list(hosts)) == size


def test_what_one_rank_meets_all_raise():
    """Work of the first rank alone, and of each."""
    start_ranks(2, "errors_job", "agree")


def test_a_common_error_that_one_rank_alone_meets_ends_the_job():
    """The other one waits for it elsewhere, and no launcher ends it."""
    with pytest.raises(AssertionError, match="error: row 9 is no chat"):
        start_ranks(2, "errors_job", "alone")


def test_a_directory_that_ranks_do_not_share_is_told_before_the_first_step(tmp_path):
    save_target(tmp_path / "target")
    for name in ("train", "heldout"):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(40))
    given = train_arguments(tmp_path, "parallel=ddp", "train.steps=6000", f"out={tmp_path}/run-${{oc.env:RANK}}")
    with pytest.raises(AssertionError) as ended:
        start_ranks(2, "cache_job", "train", given)
    told = r"^error: out=\S+/run-[01]: rank 0 does not see there what others write"
    assert len(re.findall(told, str(ended.value), re.MULTILINE)) == 2
    assert not any((tmp_path / f"run-{rank}").exists() for rank in range(2))


def test_a_process_alone_raises_its_own_error():
    def fails() -> None:
        raise UserError("no room")

    for work in (distributed.ALONE.by_main, distributed.ALONE.by_each):
        assert work(lambda: 7) == 7
        with pytest.raises(UserError, match="no room") as raised:
            work(fails)
        assert raised.type is UserError


def test_a_port_that_another_job_has_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "eagle_train.train", "experiment=quickstart", "parallel=ddp", "device=cpu"]
        done = run(command, env=environment)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: the ranks cannot meet there")
    assert "Traceback" not in done.stderr
