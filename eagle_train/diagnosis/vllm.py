"""vLLM as a program: it is given a job, and its counts of drafts and accepted tokens are read.

It runs in its own interpreter (vllm_job.py). Nothing is timed. Knows nothing of targets or reports.
"""

import gc
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_train.errors import UserError, check
from eagle_train.inference import Output
from eagle_train.results import write_json

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""A launcher's variables: vLLM starts processes of its own."""
SHARE = 0.9
"""Of a GPU's memory, or of what is free of it, for vLLM: its own default."""
JOB = Path(__file__).with_name("vllm_job.py")
IMPORT_TIMEOUT_S = 300  # the first import of vLLM compiles its modules


@dataclass
class VLLM:
    """`vllm` in conf/commands/serving.yaml and doctor.yaml: which vLLM, how long it may take, and more arguments of its
    `LLM`."""

    python: str
    timeout_s: float
    cpu_kv_gib: int
    arguments: dict[str, Any] | None

    def __post_init__(self) -> None:
        check(self.timeout_s > 0, f"vllm.timeout_s={self.timeout_s}: must be above 0")
        check(self.cpu_kv_gib >= 1, f"vllm.cpu_kv_gib={self.cpu_kv_gib}: must be at least 1")
        for name in ("model", "speculative_config"):
            check(name not in (self.arguments or {}), f"vllm.arguments.{name}: follows from target, draft and tree")


@dataclass(frozen=True)
class Counts:
    """An engine's counts over all prompts. `accepted`: rounds that accepted the token at depth 1, 2, ..."""

    drafts: int
    accepted: list[int]
    token_ids: list[list[int]]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round, the target's own included, whether or not the answer had room for them."""
        return 1 + sum(self.accepted) / self.drafts

    @property
    def tpc(self) -> float:
        """As in DESIGN section 3.8: tokens that the answers kept, without the prefill's, per round."""
        return sum(len(tokens) - 1 for tokens in self.token_ids) / self.drafts

    @property
    def acceptance(self) -> list[float]:
        """Shares of the rounds that accepted down to depth 1, 2, ..."""
        return [rounds / self.drafts for rounds in self.accepted]

    @property
    def figures(self) -> dict[str, Any]:
        """What results.json says of an engine."""
        return {
            "acceptance_length": self.acceptance_length,
            "tpc": self.tpc,
            "acceptance_per_depth": self.acceptance,
            "drafts": self.drafts,
            "accepted_tokens": sum(self.accepted),
            "tokens": sum(map(len, self.token_ids)),
        }


def counts_of(outputs: Sequence[Output], max_tokens: int) -> Counts:
    """Our engine's counts. Raises UserError where nothing was decoded; `max_tokens`: of the answers."""
    stats = [output.stats for output in outputs]
    accepted = [sum(rounds) for rounds in zip(*(each.accepted_per_depth for each in stats if each.calls), strict=True)]
    drafts = sum(each.calls for each in stats)
    told = "no answer has a second token, so nothing was drafted"
    check(drafts > 0, f"max_tokens={max_tokens}: {told}; raise it, or ask other questions")
    return Counts(drafts, accepted, [output.token_ids for output in outputs])


def dtype_for(target: torch.dtype, scheme: str, device: torch.device) -> torch.dtype:
    """What vLLM is to compute in, with a draft of this quantisation: as we do, but on a CPU with INT4 in bf16, as its
    product there takes nothing else."""
    return torch.bfloat16 if scheme == "int4" and device.type == "cpu" else target


def share_of_free(device: torch.device) -> dict[str, float]:
    """The argument of vLLM's `LLM` with which it fits beside what this process keeps on a GPU, a target, say: vLLM
    counts it in shares of the whole. Nothing for a CPU."""
    if device.type != "cuda":
        return {}
    gc.collect()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": math.floor(1000 * SHARE * free / whole) / 1000}


def job_for(
    model: str,
    draft: Mapping[str, Any],
    prompts: Sequence[list[int]],
    answer: Path,
    *,
    dtype: torch.dtype,
    max_positions: int,
    max_num_seqs: int,
    max_tokens: int,
    stop_ids: Iterable[int],
    more: Mapping[str, Any] | None = None,
    ranks: int = 1,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """The input of vllm_job.py. `draft`: vLLM's `speculative_config`; `max_positions`: the most that the target has;
    `stop_ids`: the tokens that end an answer, and no others do; `more`: arguments of its `LLM` that take the place of
    ours; `answer`: the file for its counts."""
    # Drafts end where vLLM's positions do, and P-EAGLE's slots lie behind drafts that have not been verified yet.
    depth = draft["num_speculative_tokens"]
    llm = {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": min(max(map(len, prompts)) + max_tokens + 2 * depth + 1, max_positions),
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": ranks,
        "enforce_eager": True,  # nothing is timed, so nothing is compiled
        "disable_log_stats": False,  # the counters are among them
        "skip_tokenizer_init": True,
        "speculative_config": dict(draft),
    }
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "detokenize": False}
    return {
        "llm": llm | dict(more or {}),
        "sampling": sampling | {"ignore_eos": True, "stop_token_ids": sorted(stop_ids)},
        "prompts": list(prompts),
        "answer": str(answer),
    }


def run_job(job: Mapping[str, Any], vllm: VLLM, out: Path) -> Counts:
    """vLLM's counts for a job. Raises UserError, in one line, where it fails; its output is in `out`/vllm.log."""
    answer, log = Path(job["answer"]), out / "vllm.log"
    write_json(out / "vllm_job.json", job)
    answer.unlink(missing_ok=True)
    variables = environment(vllm.cpu_kv_gib)
    with log.open("wb") as file:
        status = _run([vllm.python, str(JOB), str(out / "vllm_job.json")], file, variables, vllm.timeout_s)
    check(status is not None, f"vLLM took longer than vllm.timeout_s={vllm.timeout_s:g} and was ended; see {log}")
    lines = log.read_text("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    check(status == 0, f"vLLM failed with status {status}: {last} (all of it in {log})")
    return _counts_of(answer, len(job["prompts"]), job["llm"]["speculative_config"]["num_speculative_tokens"])


def environment(cpu_kv_gib: int) -> dict[str, str]:
    """vLLM's environment variables. What the user has set is kept."""
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise it binds threads to cores
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a failure then ends the process that is waited for
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # our engine has loaded the target, so it is there
    }
    not_vllms = ("PYTHONPATH", "PYTHONHOME", *LAUNCHED)
    users = {name: value for name, value in os.environ.items() if name not in not_vllms}
    return ours | users | {"PYTHONSAFEPATH": "1"}  # the modules beside vllm_job.py are not vLLM's


def _run(program: list[str], log: Any, variables: dict[str, str], timeout_s: float) -> int | None:
    """The exit status of a program, None after the timeout. All processes that it started end with it."""
    process = subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _counts_of(path: Path, prompts: int, depth: int) -> Counts:
    """The answer of vllm_job.py. Raises UserError for one that is missing, or does not fit the job."""
    check(path.is_file(), f"vLLM ended without an answer: there is no {path}")
    try:
        answer = json.loads(path.read_text("utf-8"))
        counts = Counts(answer["drafts"], answer["accepted_tokens_per_pos"], answer["token_ids"])
        right = len(counts.token_ids) == prompts and len(counts.accepted) == depth
        right = right and sum(counts.accepted) == answer["accepted_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no answer to the job: {type(error).__name__} {error}") from error
    check(right, f"{path}: no answer to the job: {prompts} prompts, {depth} tokens a draft")
    check(counts.drafts > 0, f"{path}: vLLM drafted nothing")
    return counts


def version_of(python: str) -> str:
    """The version of an interpreter's vLLM. Raises UserError where it has none that can be imported."""
    help = "`bash launch/vllm.sh` makes .venv-vllm; or name the Python that has your vLLM"
    check(shutil.which(python) is not None, f"vllm.python={python}: no such program; {help}")
    program = [python, "-c", "import vllm; print(vllm.__version__)"]
    try:
        done = subprocess.run(program, capture_output=True, text=True, env=environment(1), timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"vllm.python={python}: importing vllm took longer than {IMPORT_TIMEOUT_S} s") from error
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().split("\n")[-1]
    check(done.returncode == 0, f"vllm.python={python}: cannot import vllm: {said}; {help}")
    return said
