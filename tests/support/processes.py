"""Processes that tests start. They may take as long as they work: no clock decides a test.

A watchdog ends those that hang, which is that they use no processor for minutes, and shows where each thread was.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

LOOK_S = 5
IDLE_S, IDLE_CPU_S = 180, 5.0  # a launcher that only waits uses less; whoever works uses more, on any busy machine
SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONFAULTHANDLER": "1"}
HERE = Path(__file__).parent
# By DeepSpeed when it begins, and with it torch's compiler, and when it asks what it can compile.
IMPORTED = ("deepspeed.runtime.zero.muon.muon_optimizer", "setuptools")
FROZEN = f"{__package__}.frozen"


def free_port(first: int = 10_000) -> int:
    """A port of 127.0.0.1 that no other test takes, of the 10,000 from `first` on: none is asked for by number twice,
    and none lies where the system takes those that it gives out itself."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        free_port.last = getattr(free_port, "last", os.getpid() % 900) % 900 + 1
        port = first + 1000 * (worker % 10) + free_port.last
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                return port


class Watchdog:
    """Over processes and all that they start; `look` raises AssertionError, and kills them, where they hang."""

    def __init__(self, pids: Iterable[int]):
        self.roots = [psutil.Process(pid) for pid in pids]
        self.spent: dict[int, float] = {}
        self.since = self.looked = time.monotonic()
        self.then = 0.0

    def family(self) -> list[psutil.Process]:
        found = []
        for root in self.roots:
            try:
                found += [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:  # it has ended meanwhile
                continue
        return found

    def look(self) -> None:
        if time.monotonic() - self.looked < LOOK_S:
            return
        self.looked = time.monotonic()
        for process in self.family():
            try:
                self.spent[process.pid] = sum(process.cpu_times()[:2])
            except psutil.Error:
                continue
        total, now = sum(self.spent.values()), time.monotonic()
        if total - self.then >= IDLE_CPU_S:
            self.since, self.then = now, total
        elif now - self.since > IDLE_S:
            self.end()
            raise AssertionError(f"no process of {[root.pid for root in self.roots]} works; stacks are on stderr")

    def end(self) -> None:
        """The innermost first, so that nobody sees to it that they end in silence."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            for process in reversed(self.family()):
                try:
                    process.send_signal(number)
                except psutil.Error:
                    continue
            time.sleep(2)


def ended(process: Any) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def wait(*processes: subprocess.Popen | Any) -> list[int]:
    """The exit statuses, when all have ended."""
    watchdog = Watchdog(process.pid for process in processes)
    while any(ended(process) is None for process in processes):
        time.sleep(0.02)
        watchdog.look()
    return [ended(process) for process in processes]


def run(command: list, **options: Any) -> subprocess.CompletedProcess:
    """`subprocess.run` with its output as text, which nothing but a hang ends."""
    options["env"] = {**os.environ, **options.get("env", {}), "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, **options)
        try:
            (status,) = wait(process)
        except AssertionError as hang:
            raise AssertionError(f"{hang}\n{read(err)[-6000:]}") from None
        return subprocess.CompletedProcess(command, status, read(out), read(err))


def read(file: Any) -> str:
    file.seek(0)
    return file.read()


def start_ranks(number: int, job: str, *arguments: Any, threads: int = 1, awaited: int | None = None) -> None:
    """Run `main(*arguments)` of the module `job`, beside this one, on so many ranks; their output is shown where one
    fails. They are forks of a process that has imported torch, and meet at a store of this process's. With `awaited`
    the first so many must end well, and the others are ended then."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.processes", f"{__package__}.ranks_job", *IMPORTED, FROZEN])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(number)]
        given = [(job, arguments, rank, number, store.port, threads, str(log)) for rank, log in enumerate(logs)]
        with watched_environment():
            ranks = [context.Process(target=one_rank, args=each, daemon=False) for each in given]
            for rank in ranks:
                rank.start()
        try:
            statuses = wait(*ranks[:awaited])
        finally:
            told = "\n".join(log.read_text()[-6000:] for log in logs if log.exists())
            for rank in ranks:
                rank.kill()
        assert not any(statuses), f"{statuses}\n{told}"


class watched_environment:
    """What the process that ranks are forked from is started with, the first time."""

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in (*SETTINGS, "PYTHONPATH")}
        os.environ.update(SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), *sys.path]))})

    def __exit__(self, *_: Any) -> None:
        for name, value in self.before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def one_rank(job: str, arguments: tuple, rank: int, size: int, port: int, threads: int, log: str) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    assert FROZEN in sys.modules, "the process that ranks are forked from passes over what it cannot import"
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(threads)
    importlib.import_module(f"{__package__}.{job}").main(*arguments)
