"""The same prompts in vLLM, where it is installed: the same files must have as many drafts accepted there as in our
engine. Nothing is timed.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_train.artifacts.format import Artifact
from eagle_train.artifacts.layouts import NAMES, layout_of
from eagle_train.diagnosis.causes import Finding, NotChecked
from eagle_train.diagnosis.learning import Learnt
from eagle_train.diagnosis.options import DoctorConfig
from eagle_train.diagnosis.texts import Question
from eagle_train.diagnosis.vllm import Counts, counts_of, dtype_for, job_for, run_job, share_of_free, version_of
from eagle_train.distributed import ALONE, World
from eagle_train.drafts import DraftConfig
from eagle_train.drafts.layouts import Layout
from eagle_train.inference import Output, Requests
from eagle_train.models.draft_quantisation import Quant

IN_VLLM = "the same prompts in vLLM"
LEAST_LOSS = 0.05
"""Of tokens a round, relative: both engines decode greedily, and where rounding lets answers differ, so do the rounds
behind. In fp32 24 prompts had the same counts in both."""


def in_vllm(
    config: DoctorConfig,
    about: Artifact | None,
    draft: DraftConfig,
    requests: Requests,
    questions: Sequence[Question],
    outputs: Sequence[Output],
    depth: int,
    world: World = ALONE,
) -> Learnt:
    """What vLLM accepts of the draft's files against our engine's counts. `about`: what our own artifact says, None
    for a draft of others; `outputs`: our answers, a question each; `world`: the ranks that hold the target together, of
    which the first starts vLLM, on as many GPUs. Raises UserError where vLLM fails."""
    layout = _of_others(draft) if about is None else _of_ours(about)
    if isinstance(layout, str):
        return _not_asked(layout)
    vllm = config.vllm
    if not world.by_main(lambda: shutil.which(vllm.python) is not None):
        return _not_asked(f"vllm.python={vllm.python}: no such program; `bash launch/vllm.sh` makes it")
    own, target = counts_of(outputs, config.max_tokens), requests.target
    prompts = [question.prompt for question in questions]
    job = job_for(
        config.target.path,
        layout.speculative_config(config.path, depth),
        prompts,
        Path(config.out) / "vllm_answer.json",
        dtype=dtype_for(target.dtype, "none" if about is None else about.quant.scheme, target.device),
        max_positions=target.max_positions,
        max_num_seqs=config.batch_size,
        max_tokens=config.max_tokens,
        stop_ids=requests.stop_ids,
        more=share_of_free(target.device) | (vllm.arguments or {}),
        ranks=world.size,
        trust_remote_code=config.target.trust_remote_code,
    )
    version, served = world.by_main(lambda: (version_of(vllm.python), run_job(job, vllm, Path(config.out))))
    figures: dict[str, Any] = {"vllm": {**served.figures, "version": version}, "engine": own.figures}
    if served.acceptance_length >= (1 - LEAST_LOSS) * own.acceptance_length:
        return Learnt([], [], figures)
    lost = own.acceptance_length - served.acceptance_length
    return Learnt([Finding("engine", _said(own, served), lost)], [], figures)


def _of_ours(about: Artifact) -> Layout | str:
    """The layout of an artifact's files, where vLLM reads it; else why it is not asked."""
    layout = layout_of(about.layout, about.draft)
    if layout is not None and layout.vllm:
        return layout
    own = about.draft.layouts.get("vllm")
    refusal = f"has no draft={about.draft.kind}" if own is None else own.refusal(about.draft, about.quant)
    if refusal is not None:
        return f"{NAMES['vllm']} {refusal}"
    return "the draft is not in vLLM's layout; eagle-export layout=vllm writes it"


def _of_others(draft: DraftConfig) -> Layout | str:
    """The layout of drafts of this kind, which tells how vLLM is given the files of others; or why it is not asked."""
    layout = draft.layouts.get("vllm")
    if layout is None:
        return f"{NAMES['vllm']} reads no files of draft={draft.kind}"
    refusal = layout.refusal(draft, Quant())
    return layout if refusal is None else f"{NAMES['vllm']} {refusal}"


def _not_asked(reason: str) -> Learnt:
    return Learnt([], [NotChecked(IN_VLLM, reason)], {})


def _said(own: Counts, served: Counts) -> str:
    """Both engines' acceptance, and the first token in which an answer differs."""
    depths = zip(served.acceptance, own.acceptance, strict=True)
    told = ", ".join(f"{theirs:.2f} for {ours:.2f}" for theirs, ours in depths)
    pairs = list(enumerate(zip(own.token_ids, served.token_ids, strict=True), 1))
    differs = next(((number, ours, theirs) for number, (ours, theirs) in pairs if ours != theirs), None)
    said = f"vLLM accepts fewer drafts of the same files than our engine: by depth {told}."
    if differs is None:
        return f"{said} All answers have the same tokens, so that the target is the same, and the draft is not."
    number, ours, theirs = differs
    length = min(len(ours), len(theirs))
    place = next((place for place in range(length) if ours[place] != theirs[place]), length)
    same = sum(ours == theirs for _, (ours, theirs) in pairs)
    where = f"the first other token is number {place + 1} of answer {number}"
    return f"{said} {same} of {len(pairs)} answers are the same; {where}."
