"""A draft in vLLM, beside the same draft in our engine: acceptance, and whether the answers are the same.

Greedy, on the same prompts and token for token: differences come from the export, from how vLLM reads it, or from
rounding. DESIGN sections 3.8, 3.10.

    python -m evals.serving draft=DIR questions=FILE.jsonl out=DIR     # DIR: of eagle-export layout=vllm
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from eagle_train.artifacts.card import caveats
from eagle_train.artifacts.layouts import layout_of
from eagle_train.artifacts.markdown import aligned, code
from eagle_train.diagnosis.vllm import VLLM, Counts, run_job, version_of
from eagle_train.errors import check
from eagle_train.inference import SamplingParams
from eagle_train.settings import build
from evals.bench.answering import answer_questions
from evals.bench.config import BenchConfig, check_least
from evals.bench.contexts import by_context
from evals.bench.evaluation import evaluation
from evals.bench.report import change, contexts, document, loops, made_on, number, percent, several, subject, table
from evals.bench.requests import check_fit
from evals.bench.session import Session
from evals.bench.statistics import Answer, looping, token_ids
from evals.bench.trees import one_chain, tree_name
from evals.bench.vllm import counted, job_of


@dataclass(kw_only=True)
class Config(BenchConfig):
    """conf/commands/serving.yaml, which says what each key is. Raises UserError for values that cannot be."""

    tree: Any
    vllm: VLLM
    limit: int | None
    batch_size: int
    ignore_eos: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "batch_size")
        check(self.seed == 0, f"seed={self.seed}: decoding is greedy here, and nothing is drawn; leave it out")
        self.chain = one_chain(self.tree, self.options.gate)
        self.params = SamplingParams(0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)


@evaluation("serving")
def main(values: DictConfig) -> None:
    session = Session(build(Config, values, ""))
    config, about = session.config, session.artifact
    layout = layout_of(about.layout, about.draft)
    wanted = f"draft={config.draft.path}: of layout={about.layout}; export it with layout=vllm"
    check(layout is not None and bool(layout.vllm), wanted)
    version = version_of(config.vllm.python)
    answers = our_answers(session)
    job = job_of(session, [answer.prompt for answer in answers])
    found = {
        "prompts": len(answers),
        "looping_answers": looping(token_ids(answers)),
        "by_context": by_context(answers, session.target.max_positions),
        "tree": tree_name(config.chain),
        "quant": str(about.quant),
        "caveats": caveats(about),
        "max_positions": session.target.max_positions,
        **session.about(),
    }
    found["provenance"] |= {"vllm": version}
    del session.target, session.requests, session.draft
    gc.collect()
    torch.cuda.empty_cache()  # vLLM needs all of a GPU's memory
    if not session.world.is_main:
        return
    found |= compared(counted(answers, config.max_tokens), run_job(job, config.vllm, session.out))
    session.report(found, markdown(found))
    session.say(summary(found), f"written to {session.out}: report.md, results.json, and vllm_job.json to vllm.log")


def our_answers(session: Session[Config]) -> list[Answer]:
    """Our engine's answers."""
    config = session.config
    longest = check_fit(session.requests, session.questions, config.max_tokens)
    engine = session.engine(session.drafter(), config.tree, max_batch_size=config.batch_size, longest=longest)
    batches = answer_questions(engine, session.requests, session.questions, config.params)
    return [answer for batch in batches for answer in batch]


def compared(own: Counts, served: Counts) -> dict[str, Any]:
    """Both engines' figures, the difference of vLLM's, and how many answers are the same token for token."""
    pairs = zip(own.token_ids, served.token_ids, strict=True)
    return {
        "eagle_train": own.figures,
        "vllm": served.figures,
        "relative_difference": served.acceptance_length / own.acceptance_length - 1,
        "equal_answers": sum(ours == theirs for ours, theirs in pairs),
    }


def summary(found: Mapping[str, Any]) -> str:
    """For the terminal."""
    table = aligned(comparison(found["eagle_train"], found["vllm"]))
    differs = f"acceptance length in vLLM against ours: {change(found['relative_difference'], 2)}"
    same = f"answers with the same tokens: {found['equal_answers']} of {found['prompts']}"
    return "\n".join([table, differs, same, *loops(found)])


def comparison(own: Mapping[str, Any], served: Mapping[str, Any]) -> str:
    """A row per figure."""
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
        f"{found['equal_answers']} of {found['prompts']}. Both are greedy and lossless, so that they differ only "
        "where rounding decides between two tokens.",
        "`1 + accepted / drafts` is vLLM's mean acceptance length; TPC leaves out what was accepted after an answer's "
        "end.",
    ]
    notes += [f"Mind that {each}." for each in found["caveats"]]
    along = f"{contexts(found['by_context'])}\n\nOf our engine: vLLM's counters tell no single rounds."
    title = f"{found['vllm']['acceptance_length']:.2f} tokens a round in vLLM {found['provenance']['vllm']}"
    text = "\n\n".join([setting, comparison(found["eagle_train"], found["vllm"]), *notes])
    return document({title: text, "By context": along, "Made on": made_on(found)})


if __name__ == "__main__":
    main()
