"""What quantising a draft costs and gains: tokens per call, acceptance, drafting latency and bytes. Paper table 2.

The draft as it is, in FP8 and in INT4, and exports of it that were rounded otherwise, answer the same questions batch
by batch in turn, one target for all, so that whatever else the machine does hits them alike. Knows nothing of how
weights are rounded.

    python -m evals.quantisation draft=DIR questions=FILE.jsonl scope=ffn also=[DIR] out=DIR
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts.format import read_artifact
from eagle_train.artifacts.markdown import aligned, code, plain
from eagle_train.cli import command
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.requests.readable import chats
from eagle_train.models.draft import Draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.quantised import SCOPES, Quant
from eagle_train.results import prepared, provenance, redact, write_json, write_text
from eagle_train.settings import build
from evals import figures
from evals.mt_bench import NO_DRAFTS, Artifact, Run, check_fit, check_tree, drafter_of, labels, measure
from evals.questions import Question, read_questions
from evals.report import change, made_on, number, sampling, several, subject, table
from evals.stopwatch import Stopwatch

LABELS = {"none": "as it is", "fp8": "FP8", "int4": "INT4"}
SCOPE = {"ffn": "its feed-forward", "all_linear": "all its matrices"}


@dataclass
class Config:
    """conf/commands/quantisation.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    tree: Any
    draft: Artifact
    scope: str
    also: list[str]
    questions: str
    out: str
    limit: int | None
    batch_size: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    device: str
    threads: int | None

    def __post_init__(self) -> None:
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")
        check(self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1")
        check_tree(self.tree, self.batch_size)
        check(self.scope in SCOPES, f"scope={self.scope}: must be {' or '.join(SCOPES)}")
        self.params = SamplingParams(self.temperature, self.top_p, self.top_k, self.max_tokens, self.seed)
        self.quants = {scheme: Quant(scheme, self.scope) for scheme in LABELS}


@dataclass
class Timed(Run):
    """A run that also knows, for each batch of questions, the seconds spent drafting and the rounds that drafted.

    A GPU is waited for around each stage, as nothing else of the run is timed.
    """

    drafting: list[tuple[float, int]] = field(default_factory=list)

    def ask(self, questions: Sequence[Question], params: SamplingParams) -> None:
        watch = Stopwatch(self.engine.target.device)
        with watch.watching(forwards=False):
            super().ask(questions, params)
        self.drafting.append((watch.stages["drafting"], watch.entered["drafting"]))


@command("quantisation")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device = resolve_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    questions = read_questions(config.questions, config.limit)
    out = prepared(config.out)
    about = read_artifact(config.draft.path)
    source, quant = about.source, about.quant
    check(quant.scheme == "none", f"draft={config.draft.path}: quantised already, {quant}; export it with quant=none")
    target = load_target(config.target, device, reads=chats)
    drafters = {scheme: drafter_of(target, config.draft, quant) for scheme, quant in config.quants.items()}
    for name, path in names_of(config.also, source, config.draft.path).items():
        drafters[name] = drafter_of(target, replace(config.draft, path=path), Quant())
    runs = {
        scheme: Timed(Engine(target, drafter, config.tree, max_batch_size=config.batch_size))
        for scheme, drafter in drafters.items()
    }
    check_fit(runs["none"].engine, questions, config.max_tokens)
    measure(list(runs.values()), questions, config.params, config.batch_size)
    found = {
        "schemes": {scheme: measured(run, runs["none"]) for scheme, run in runs.items()},
        "scope": config.scope,
        "draft_source": source,
        "tree": labels(runs["none"].engine.dispatcher, config.batch_size),
        "temperature": config.temperature,
        "batch_size": config.batch_size,
        "prompts": len(runs["none"].answers),
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "config": redact(OmegaConf.to_container(values)),
        "provenance": provenance(),
    }
    write_text(out / "report.md", markdown(found))
    write_json(out / "results.json", found)
    print(aligned(comparison(found["schemes"])))
    print(f"written to {out}: report.md, results.json")


def names_of(exports: Sequence[str], source: str, draft: str) -> dict[str, str]:
    """The directories of exports by how they were rounded, and by the directory besides where several were rounded
    alike. Raises UserError for one of another draft."""
    abouts = {path: read_artifact(path) for path in exports}
    for path, about in abouts.items():
        same = about.source == source
        check(same, f"also={path}: made from a draft of fingerprint {about.source}, and draft={draft} is {source}")
        check(about.quant.scheme != "none", f"also={path}: is not quantised; the draft itself is measured anyway")
    names = {path: f"{about.quant}, {about.rounding}" for path, about in abouts.items()}
    alike = Counter(names.values())
    return {name if alike[name] == 1 else f"{name}, {path}": path for path, name in names.items()}


def measured(run: Timed, plain: Timed) -> dict[str, Any]:
    """A scheme's figures, beside those of the draft as it is. Raises UserError where nothing was decoded.

    A round's drafting is the tree's whole growth, LM head included: the paper's time to generate three tokens.
    Latencies are medians over the batches of questions, ratios those of the same batch.
    """
    tpc, stats = figures.tpc(run.answers), [answer.output.stats for answer in run.answers]
    check(tpc is not None, figures.NO_DECODING)
    pairs = [pair for pair in zip(run.drafting, plain.drafting, strict=True) if all(rounds for _, rounds in pair)]
    check(len(pairs) > 0, NO_DRAFTS)
    times = [[seconds * 1e3 / rounds for seconds, rounds in pair] for pair in pairs]
    answers = zip(run.answers, plain.answers, strict=True)
    return {
        "tpc": tpc,
        "tpc_change": tpc / figures.tpc(plain.answers) - 1,
        "tokens": sum(each.tokens for each in stats),
        "calls": sum(each.calls for each in stats),
        "acceptance_per_depth": figures.acceptance(run.answers),
        "draft_latency_ms": statistics.median(own for own, _ in times),
        "relative_draft_latency": statistics.median(own / other for own, other in times),
        "feed_forward_bytes": feed_forward_bytes(run.engine.drafter.draft),
        "differing_answers": sum(own.output.token_ids != other.output.token_ids for own, other in answers),
    }


def feed_forward_bytes(draft: Draft) -> int:
    """What the feed-forward parts hold in memory, as they run here."""
    tensors = [tensor for layer in draft.layers for tensor in (*layer.mlp.parameters(), *layer.mlp.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def comparison(schemes: Mapping[str, Mapping[str, Any]]) -> str:
    """A row a scheme."""
    header = ["draft", "TPC", "change", "acceptance by depth", "drafting, ms a round", "relative", "feed-forward, MB"]
    rows = [
        [
            LABELS.get(scheme) or plain(scheme),
            number(found["tpc"], 3),
            change(found["tpc_change"]),
            " ".join(number(share) for share in found["acceptance_per_depth"]),
            number(found["draft_latency_ms"]),
            number(found["relative_draft_latency"]),
            number(found["feed_forward_bytes"] / 1e6),
        ]
        for scheme, found in schemes.items()
    ]
    return table(header, rows)


def markdown(found: Mapping[str, Any]) -> str:
    """report.md."""
    config, schemes = found["config"], found["schemes"]
    setting = (
        f"{subject(found)}, {SCOPE[found['scope']]} in few bits; {found['tree']}; "
        f"{sampling(config)}; batches of {found['batch_size']}; {several(found['prompts'], 'prompt')} of "
        f"{code(config['questions'])}."
    )
    notes = [
        "TPC: tokens committed in decoding, by calls of the target; its change is against the draft as it is. Drafting "
        "takes the median over the batches of questions, which all drafts answered in turn; relative is the median of "
        "each batch's time divided by that of the draft as it is. MB are 10^6 bytes, as held in memory in this run."
    ]
    differing = {name: each["differing_answers"] for name, each in schemes.items() if name != "none"}
    said = ", ".join(f"{LABELS.get(name) or plain(name)} {count}" for name, count in differing.items())
    notes.append(f"Answers that differ from those with the draft as it is: {said}.")
    parts = ["# A draft in few bits", setting, comparison(schemes), *notes, "## Made on", made_on(found)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
