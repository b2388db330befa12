"""A draft in vLLM, beside the same draft in our engine: acceptance, and whether the answers are the same.

Greedy, on the same prompts and token for token, so that whatever differs is the export, the serving engine's reading of
it, or rounding. vLLM runs in an interpreter of its own (vllm_job.py) and tells what it counted; nothing is timed. Knows
nothing of what vLLM does inside. DESIGN sections 3.8, 3.10.

    python -m evals.serving draft=DIR questions=FILE.jsonl out=DIR     # DIR: of eagle-export engine=vllm
"""

import gc
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts.card import caveat
from eagle_train.artifacts.format import read_artifact
from eagle_train.artifacts.markdown import aligned, code
from eagle_train.cli import command
from eagle_train.errors import UserError, check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.requests.readable import chats
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.quantised import Quant
from eagle_train.results import prepared, provenance, redact, write_json, write_text
from eagle_train.settings import build
from evals.figures import Answer
from evals.mt_bench import Artifact, ask, check_fit, drafter_of, label
from evals.questions import Question, read_questions
from evals.report import change, made_on, number, percent, several, subject, table

JOB = Path(__file__).with_name("vllm_job.py")
IMPORT_TIMEOUT_S = 300  # the first import of vLLM compiles its modules


@dataclass
class VLLM:
    """conf/commands/serving.yaml, `vllm`: whose vLLM, how long it may take, and what else its `LLM` is given."""

    python: str
    timeout_s: float
    cpu_kv_gib: int
    arguments: dict[str, Any] | None

    def __post_init__(self) -> None:
        check(self.timeout_s > 0, f"vllm.timeout_s={self.timeout_s}: must be above 0")
        check(self.cpu_kv_gib >= 1, f"vllm.cpu_kv_gib={self.cpu_kv_gib}: must be at least 1")
        for name in ("model", "speculative_config"):
            check(name not in (self.arguments or {}), f"vllm.arguments.{name}: follows from target, draft and tree")


@dataclass
class Config:
    """conf/commands/serving.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    tree: Any
    draft: Artifact
    vllm: VLLM
    questions: str
    out: str
    limit: int | None
    batch_size: int
    max_tokens: int
    ignore_eos: bool
    device: str
    threads: int | None

    def __post_init__(self) -> None:
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")
        check(self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1")
        trees = [plan.tree for _, plan in Dispatcher(self.tree).table]
        self.chain = trees[0]
        is_chain = len(trees) == 1 and self.chain.is_chain and self.chain.max_depth > 0
        check(is_chain, "tree: vLLM drafts one chain, whatever the batch; try chain3")
        self.params = SamplingParams(0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)


@dataclass(frozen=True)
class Counts:
    """What an engine counted over all prompts. `accepted`: rounds that accepted the token at depth 1, 2, ..."""

    drafts: int
    accepted: list[int]
    token_ids: list[list[int]]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a round yields, the target's own included, whether or not the answer had room for them."""
        return 1 + sum(self.accepted) / self.drafts

    @property
    def tpc(self) -> float:
        """As in DESIGN section 3.8: tokens that the answers kept, without the prefill's, per round."""
        return sum(len(tokens) - 1 for tokens in self.token_ids) / self.drafts

    @property
    def acceptance(self) -> list[float]:
        return [rounds / self.drafts for rounds in self.accepted]

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "tpc": self.tpc,
            "acceptance_per_depth": self.acceptance,
            "drafts": self.drafts,
            "accepted_tokens": sum(self.accepted),
            "tokens": sum(map(len, self.token_ids)),
        }


@command("serving")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device = resolve_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    about = read_artifact(config.draft.path)
    check(about.engine == "vllm", f"draft={config.draft.path}: of engine={about.engine}; export it with engine=vllm")
    questions = read_questions(config.questions, config.limit)
    version = version_of(config.vllm.python)
    out = prepared(config.out)
    answers, stop_ids, found = answered(config, questions, device)
    own = counted(answers)
    gc.collect()
    torch.cuda.empty_cache()  # vLLM wants a GPU for itself
    served = serve(job_of(config, out, [answer.prompt for answer in answers], stop_ids, found), config.vllm, out)
    found |= {
        **compared(own, served),
        "prompts": len(answers),
        "tree": label(config.chain),
        "quant": str(about.quant),
        "caveat": caveat(about),
        "draft_source": about.source,
        "config": redact(OmegaConf.to_container(values, resolve=True)),
        "provenance": provenance() | {"vllm": version},
    }
    write_text(out / "report.md", markdown(found))
    write_json(out / "results.json", found)
    print(summary(found))
    print(f"written to {out}: report.md, results.json, vllm_job.json, vllm_answer.json, vllm.log")


def answered(config: Config, questions: list[Question], device: str) -> tuple[list[Answer], list[int], dict[str, Any]]:
    """Our engine's answers, the target's stop tokens, and what there is to say of the target, which is let go of."""
    target = load_target(config.target, device, reads=chats)
    drafter = drafter_of(target, config.draft, Quant())
    engine = Engine(target, drafter, config.tree, max_batch_size=config.batch_size)
    check_fit(engine, questions, config.max_tokens)
    answers = [answer for together in ask(engine, questions, config.params) for answer in together]
    found = {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device,
        "max_positions": target.max_positions,
    }
    return answers, sorted(engine.requests.stop_ids), found


def counted(answers: Sequence[Answer]) -> Counts:
    """Our engine's counts. Raises UserError where nothing was decoded."""
    stats = [answer.output.stats for answer in answers]
    accepted = [sum(rounds) for rounds in zip(*(each.accepted_per_depth for each in stats if each.calls), strict=True)]
    drafts = sum(each.calls for each in stats)
    check(drafts > 0, "no answer has a second token, so nothing was drafted; raise max_tokens")
    return Counts(drafts, accepted, [answer.output.token_ids for answer in answers])


def job_of(
    config: Config, out: Path, prompts: list[list[int]], stop_ids: list[int], found: Mapping[str, Any]
) -> dict[str, Any]:
    """What vllm_job.py reads. Stop tokens are given by id: those our engine stops at, and no others."""
    depth = config.chain.max_depth
    longest = max(map(len, prompts)) + config.max_tokens + depth + 1
    llm = {
        "model": config.target.path,
        "trust_remote_code": config.target.trust_remote_code,
        "dtype": found["dtype"],
        "max_model_len": min(longest, found["max_positions"]),
        "max_num_seqs": config.batch_size,
        "enforce_eager": True,  # nothing is timed, so nothing is worth compiling
        "disable_log_stats": False,  # the counters are among them
        "skip_tokenizer_init": True,
        "speculative_config": {"method": "eagle", "model": config.draft.path, "num_speculative_tokens": depth},
    }
    stops = [] if config.ignore_eos else stop_ids
    sampling = {"temperature": 0.0, "max_tokens": config.max_tokens, "detokenize": False}
    return {
        "llm": llm | (config.vllm.arguments or {}),
        "sampling": sampling | {"ignore_eos": True, "stop_token_ids": stops},
        "prompts": prompts,
        "answer": str(out / "vllm_answer.json"),
    }


def serve(job: Mapping[str, Any], vllm: VLLM, out: Path) -> Counts:
    """vLLM's counts for a job. Raises UserError, in one line, where it fails; its own words are in `out`/vllm.log."""
    answer, log = Path(job["answer"]), out / "vllm.log"
    write_json(out / "vllm_job.json", job)
    answer.unlink(missing_ok=True)
    variables = environment(vllm.cpu_kv_gib)
    with log.open("wb") as file:
        status = run([vllm.python, str(JOB), str(out / "vllm_job.json")], file, variables, vllm.timeout_s)
    check(status is not None, f"vLLM took longer than vllm.timeout_s={vllm.timeout_s:g} and was ended; see {log}")
    lines = log.read_text("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    check(status == 0, f"vLLM failed with status {status}: {last} (all of it in {log})")
    return counts_of(answer, len(job["prompts"]), job["llm"]["speculative_config"]["num_speculative_tokens"])


def environment(cpu_kv_gib: int) -> dict[str, str]:
    """The variables vLLM runs under; what the user has set stays as it is."""
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes cores for itself
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a failure is then this process's own
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # what there is of the target was fetched when our engine loaded it
    }
    theirs = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return ours | theirs | {"PYTHONSAFEPATH": "1"}  # the modules beside vllm_job.py are not vLLM's


def run(program: list[str], log: Any, variables: dict[str, str], timeout_s: float) -> int | None:
    """The exit status of a program, None where it took too long. Whatever it started ends with it."""
    process = subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def counts_of(path: Path, prompts: int, depth: int) -> Counts:
    """The answer of vllm_job.py. Raises UserError for one that is not there, or not to the job."""
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
    """The version of the vLLM that an interpreter has. Raises UserError where it has none that can be imported."""
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


def compared(own: Counts, served: Counts) -> dict[str, Any]:
    """Both engines' figures, by how much vLLM's differ, and how many answers are the same token for token."""
    pairs = zip(own.token_ids, served.token_ids, strict=True)
    return {
        "eagle_train": own.figures,
        "vllm": served.figures,
        "relative_difference": served.acceptance_length / own.acceptance_length - 1,
        "equal_answers": sum(ours == theirs for ours, theirs in pairs),
    }


def summary(found: Mapping[str, Any]) -> str:
    """A few lines for the terminal."""
    own, served = found["eagle_train"], found["vllm"]
    return "\n".join(
        [
            aligned(comparison(own, served)),
            f"acceptance length in vLLM against ours: {change(found['relative_difference'], 2)}",
            f"answers with the same tokens: {found['equal_answers']} of {found['prompts']}",
        ]
    )


def comparison(own: Mapping[str, Any], served: Mapping[str, Any]) -> str:
    """A row a figure."""
    rows = [
        ["1 + accepted / drafts", *(number(each["acceptance_length"], 3) for each in (own, served))],
        ["tokens per call (TPC)", *(number(each["tpc"], 3) for each in (own, served))],
    ]
    for depth, shares in enumerate(zip(own["acceptance_per_depth"], served["acceptance_per_depth"], strict=True), 1):
        rows.append([f"accepted at depth {depth}", *map(percent, shares)])
    for name, key in (("drafts", "drafts"), ("accepted tokens", "accepted_tokens"), ("tokens of answers", "tokens")):
        rows.append([name, *(number(each[key], 0) for each in (own, served))])
    return table(["", "eagle_train", "vLLM"], rows)


def markdown(found: Mapping[str, Any]) -> str:
    """report.md."""
    config = found["config"]
    quant = "" if found["quant"] == "none" else f", {found['quant']}"
    setting = (
        f"{subject(found)}{quant}; {found['tree']}; temperature 0; {several(found['prompts'], 'prompt')} of "
        f"{code(config['questions'])}, at most {config['max_tokens']} tokens each."
    )
    notes = [
        f"vLLM's acceptance length differs by {change(found['relative_difference'], 2)}. Answers with the same tokens: "
        f"{found['equal_answers']} of {found['prompts']}. Both are greedy and lossless, so that they part only where "
        "rounding decides between two tokens.",
        "`1 + accepted / drafts` is vLLM's mean acceptance length; TPC leaves out what was accepted behind an answer's "
        "end.",
    ]
    if found["caveat"] is not None:
        notes.append(f"Mind that {found['caveat']}.")
    title = f"# {found['vllm']['acceptance_length']:.2f} tokens a round in vLLM {found['provenance']['vllm']}"
    own, served = found["eagle_train"], found["vllm"]
    return "\n\n".join([title, setting, comparison(own, served), *notes, "## Made on", made_on(found)]) + "\n"


if __name__ == "__main__":
    main()
