"""The job of an evaluation for vLLM, and our engine's counts beside vLLM's. Nothing is timed.

Knows nothing of reports.
"""

from collections.abc import Sequence
from typing import Any

from eagle_train.artifacts.layouts import layout_of
from eagle_train.diagnosis.vllm import Counts, counts_of, dtype_for, job_for
from evals.bench.session import Session
from evals.bench.statistics import Answer


def counted(answers: Sequence[Answer], max_tokens: int) -> Counts:
    """As `counts_of`."""
    return counts_of([answer.output for answer in answers], max_tokens)


def job_of(session: Session, prompts: list[list[int]]) -> dict[str, Any]:
    """The input of vllm_job.py. Stop tokens are given by id: those our engine stops at, and no others."""
    config, target, depth = session.config, session.target, session.config.chain.max_depth
    layout = layout_of(session.artifact.layout, session.artifact.draft)
    assert layout is not None
    return job_for(
        config.target.path,
        layout.speculative_config(config.draft.path, depth),
        prompts,
        session.out / "vllm_answer.json",
        dtype=dtype_for(target.dtype, session.artifact.quant.scheme, target.device),
        max_positions=target.max_positions,
        max_num_seqs=config.batch_size,
        max_tokens=config.max_tokens,
        stop_ids=[] if config.ignore_eos else session.requests.stop_ids,
        more=config.vllm.arguments,
        ranks=session.world.size,
        trust_remote_code=config.target.trust_remote_code,
    )
