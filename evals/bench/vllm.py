"""The job of an evaluation for vLLM, and our engine's counts beside vLLM's. Nothing is timed.

Knows nothing of reports.
"""

from collections.abc import Sequence
from typing import Any

from eagle_train.diagnosis.vllm import Counts, counts_of, job_for
from evals.bench.session import Session
from evals.bench.statistics import Answer


def counted(answers: Sequence[Answer]) -> Counts:
    """Our engine's counts. Raises UserError where nothing was decoded."""
    return counts_of([answer.output for answer in answers])


def job_of(session: Session, prompts: list[list[int]]) -> dict[str, Any]:
    """The input of vllm_job.py. Stop tokens are given by id: those our engine stops at, and no others."""
    config, target, depth = session.config, session.target, session.config.chain.max_depth
    longest = max(map(len, prompts)) + config.max_tokens + depth + 1
    kind = session.artifact.draft.kind  # vLLM's names of methods are ours of kinds
    return job_for(
        config.target.path,
        {"method": kind, "model": config.draft.path, "num_speculative_tokens": depth},
        prompts,
        session.out / "vllm_answer.json",
        dtype=target.dtype,
        max_model_len=min(longest, target.max_positions),
        max_num_seqs=config.batch_size,
        max_tokens=config.max_tokens,
        stop_ids=[] if config.ignore_eos else session.requests.stop_ids,
        more=config.vllm.arguments,
        ranks=session.world.size,
        trust_remote_code=config.target.trust_remote_code,
    )
