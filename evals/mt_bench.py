"""What a draft is worth on a file of questions: tokens per call, latency, and the speed-up over plain decoding.

Plain and speculative decoding share the target and the engine's code, and answer the same questions batch by batch in
turn, so that whatever else the machine does hits both alike. Paper sections 2.2 and 2.4 (table 1); DESIGN sections 3.8
and 3.10. Knows nothing of a question's row, of the figures' arithmetic or of a report's looks.

    python -m evals.mt_bench draft=DIR questions=FILE.jsonl tree=chain3 temperature=0 top_p=0.9 out=DIR
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts.format import load_draft, read_artifact
from eagle_train.cli import command
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.graphs import check_graphs
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import check_drafting
from eagle_train.inference.drafters.eagle import ALIGNMENTS, Eagle
from eagle_train.inference.requests.readable import chats
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.quantised import Quant, quant_of, quantised
from eagle_train.models.target import Target
from eagle_train.progress import progress
from eagle_train.results import json_text, prepared, provenance, redact, write_json, write_text
from eagle_train.settings import build
from evals import figures, replay, report
from evals.figures import Answer, Together
from evals.prompts import prompt_of
from evals.questions import Question, read_questions
from evals.stopwatch import Stopwatch, runs_ahead

WARM_UP_TOKENS = 16
NO_DRAFTS = "tree: no round was of a batch size that it drafts for, so there is nothing to measure; try chain3"
TURN_SEEDS = 1 << 20  # far enough apart that no two requests of a run share a seed


@dataclass
class Artifact:
    """`path`: a directory that eagle-export wrote. `alignment`: see inference/drafters/eagle.py."""

    path: str
    alignment: str

    def __post_init__(self) -> None:
        check(self.alignment in ALIGNMENTS, f"draft.alignment={self.alignment}: must be {' or '.join(ALIGNMENTS)}")


@dataclass
class Config:
    """conf/commands/mt_bench.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    tree: Any
    quant: Quant
    draft: Artifact
    questions: str
    out: str
    limit: int | None
    batch_size: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    drafting: str
    compile: bool
    graphs: bool
    device: str
    threads: int | None

    def __post_init__(self) -> None:
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")
        check(self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1")
        check_tree(self.tree, self.batch_size)
        check_drafting(self.drafting)
        self.params = SamplingParams(self.temperature, self.top_p, self.top_k, self.max_tokens, self.seed)


def check_tree(tree: Any, batch_size: int) -> None:
    """Raise UserError for a tree, or a table of trees, that drafts for no batch of up to this size."""
    drafts = any(tree.max_depth > 0 for tree, _ in dispatched(Dispatcher(tree), batch_size))
    check(
        drafts,
        f"tree: it drafts nothing at batch sizes up to batch_size={batch_size}, so there is nothing to measure; try "
        "chain3",
    )


def dispatched(dispatcher: Dispatcher, batch_size: int) -> list[tuple[Tree, list[int]]]:
    """The trees that batches of 1 to `batch_size` rows get, and the sizes of each: a batch gets smaller by and by."""
    by_tree = groupby(range(1, batch_size + 1), lambda size: dispatcher.dispatch(size).tree)
    return [(tree, list(sizes)) for tree, sizes in by_tree]


@dataclass
class Run:
    """An engine and its answers so far, batch by batch: each batch was decoded together."""

    engine: Engine
    batches: list[Together] = field(default_factory=list)

    def ask(self, questions: Sequence[Question], params: SamplingParams) -> None:
        self.batches += ask(self.engine, questions, params)

    @property
    def answers(self) -> list[Answer]:
        return list(chain.from_iterable(self.batches))


@command("mt_bench")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device = resolve_device(config.device)
    check_graphs(config.graphs, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    about = read_artifact(config.draft.path)
    questions = read_questions(config.questions, config.limit)
    out = prepared(config.out)
    target = load_target(config.target, device, reads=chats)
    options = {name: getattr(config, name) for name in ("drafting", "compile", "graphs")}
    options["max_batch_size"] = config.batch_size
    plain = Run(Engine(target, **options))
    drafter = drafter_of(target, config.draft, config.quant)
    speculative = Run(Engine(target, drafter, config.tree, **options))
    check_fit(plain.engine, questions, config.max_tokens)
    measure([plain, speculative], questions, config.params, config.batch_size)
    found = {
        **measured(plain, speculative, config),
        "draft_training": about.training,
        "draft_source": about.source,
        "config": redact(OmegaConf.to_container(values)),
        "provenance": provenance(),
    }
    if config.batch_size == 1:
        figures.check_timing(found)
    write(out, found, plain.answers, speculative.answers)
    print(report.summary(found))
    print(f"written to {out}: report.md, results.json, acceptance.png, answers.jsonl")


def drafter_of(target: Target, artifact: Artifact, quant: Quant) -> Eagle:
    return Eagle(quantised(load_draft(artifact.path, target.identity), quant), target, artifact.alignment)


def check_fit(engine: Engine, questions: Iterable[Question], max_tokens: int) -> None:
    """Raise UserError for a question whose prompts might not fit the context, before any is answered."""
    for question in questions:
        messages = list(question.history)
        for turn, text in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": text})
            prompt_of(engine, question, turn, messages, before=(turn - 1) * max_tokens)
            messages.append({"role": "assistant", "content": ""})


def ask(engine: Engine, questions: Sequence[Question], params: SamplingParams) -> list[Together]:
    """All turns: the questions' first turns together, then their second ones with the engine's own first answers."""
    histories = [list(question.history) for question in questions]
    answered = []
    for turn in range(1, max(len(question.turns) for question in questions) + 1):
        asked = [pair for pair in zip(questions, histories, strict=True) if len(pair[0].turns) >= turn]
        for question, messages in asked:
            messages.append({"role": "user", "content": question.turns[turn - 1]})
        prompts = [prompt_of(engine, question, turn, messages) for question, messages in asked]
        outputs = engine.generate(prompts, [seeded(params, question, turn) for question, _ in asked])
        for (_, messages), output in zip(asked, outputs, strict=True):
            messages.append({"role": "assistant", "content": output.text})
        rows = zip(asked, prompts, outputs, strict=True)
        answered.append([Answer(question, turn, prompt, output) for (question, _), prompt, output in rows])
    return answered


def seeded(params: SamplingParams, question: Question, turn: int) -> SamplingParams:
    """With the seed that is this turn's own."""
    return params.with_seed_after(question.line + turn * TURN_SEEDS)


def measure(runs: Sequence[Run], questions: list[Question], params: SamplingParams, batch_size: int) -> None:
    """All runs answer all questions in turn, after a warm-up; who goes first changes with every batch."""
    batches = [questions[i : i + batch_size] for i in range(0, len(questions), batch_size)]
    for run in runs:
        ask(run.engine, batches[0], replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens)))
        run.engine.stage_seconds.clear()
        run.engine.stages_entered.clear()
    bar = progress(len(batches), "batch")
    for number, batch in enumerate(batches):
        first = number % len(runs)
        for run in (*runs[first:], *runs[:first]):
            run.ask(batch, params)
        bar.update(number + 1)
    bar.close()


def measured(plain: Run, speculative: Run, config: Config) -> dict[str, Any]:
    """What was measured, in seconds unless a name says otherwise. Raises UserError where nothing was decoded."""
    answers, engine = speculative.answers, speculative.engine
    compared = figures.compare(plain.batches, speculative.batches)
    acceptance = figures.acceptance(answers)
    check(len(acceptance) > 0, NO_DRAFTS)
    if config.temperature > 0 and config.drafting != "greedy":
        compared["differing_answers"] = None  # two samples may well differ
    depths = {tree.max_depth for tree, _ in dispatched(engine.dispatcher, config.batch_size)} - {0}
    own, other = ({**figures.latency(run.batches), **stages(run, config)} for run in (speculative, plain))
    return {
        "tpc": figures.tpc(answers),
        **compared,
        "acceptance_per_depth": acceptance,
        "acceptance_after_depth_before": figures.conditional(acceptance) if len(depths) == 1 else None,
        **own,
        **{f"plain_{name}": value for name, value in other.items()},
        "repeated_8grams": figures.repeated_ngrams(answer.output.token_ids for answer in answers),
        **figures.counts(answers, config.max_tokens),
        "per_category_and_turn": figures.groups(answers),
        "train_serve_check": train_serve_check(speculative, config.batch_size),
        "alignment": config.draft.alignment,
        "quant": str(quant_of(engine.drafter.draft)),
        "tree": labels(engine.dispatcher, config.batch_size),
        "temperature": config.temperature,
        "batch_size": config.batch_size,
        "target": engine.target.name,
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "device": engine.target.device.type,
    }


def stages(run: Run, config: Config) -> dict[str, Any]:
    """Milliseconds of each stage, see `figures.stages`: on a CPU those of the run itself.

    A GPU is only told what to do while a stage lasts, and to wait for it slows rounds. There a batch is answered again,
    apart, and watched: of those with drafts the one with the most rounds.
    """
    engine, batches = run.engine, run.batches
    if not runs_ahead(engine.target.device):
        return figures.stages(engine.stage_seconds, engine.stages_entered, len(batches))
    batch = max(batches, key=lambda batch: (len(figures.acceptance(batch)) > 0, figures.num_rounds([batch])))
    params = [seeded(config.params, answer.question, answer.turn) for answer in batch]
    watch = Stopwatch(engine.target.device)
    with watch.watching(forwards=False):
        engine.generate([answer.prompt for answer in batch], params)
    return figures.stages(watch.stages, watch.entered, 1)


def labels(dispatcher: Dispatcher, batch_size: int) -> str:
    """The trees that batches of up to this size get, in a few words."""
    trees = dispatched(dispatcher, batch_size)
    if len(trees) == 1:
        return label(trees[0][0])
    return ", ".join(f"{label(tree)} (batch size {' to '.join(map(str, ends(sizes)))})" for tree, sizes in trees)


def label(tree: Tree) -> str:
    """A tree in a few words."""
    if tree.max_depth == 0:
        return "no draft"
    if tree.is_chain:
        return f"chain{tree.max_depth}"
    return f"tree of {tree.num_nodes - 1} nodes, depth {tree.max_depth}"


def ends(sizes: list[int]) -> list[int]:
    return sorted({sizes[0], sizes[-1]})


def train_serve_check(run: Run, batch_size: int) -> dict[str, float | None]:
    """Acceptance at depth 1 as served and as training sees it; agreement on the target's text and on the file's.

    As training sees it: None where the root has more children at one batch size than at another, as an answer does not
    tell which of its rounds had how many; and where drafts may be other than the most likely tokens.
    """
    target, draft = run.engine.target, run.engine.drafter.draft
    children = {tree.fanout[0] for tree, _ in dispatched(run.engine.dispatcher, batch_size)}
    served = [(answer.prompt, answer.output) for answer in run.answers]
    depth_1, own = replay.served_as_trained(target, draft, served, max(children))
    references = []
    for answer in run.answers:
        if answer.question.reference:
            tokens = target.tokenizer(answer.question.reference, add_special_tokens=False)["input_ids"]
            references.append((answer.prompt, tokens[: target.max_positions - len(answer.prompt)]))
    return {
        "depth_1_served": figures.acceptance(run.answers)[0],
        "depth_1_as_trained": depth_1 if len(children) == 1 and run.engine.drafting == "greedy" else None,
        "agreement_on_own_answers": own,
        "agreement_on_reference_answers": replay.agreement(target, draft, references),
    }


def write(out: Path, found: dict[str, Any], plain: list[Answer], answers: list[Answer]) -> None:
    """All files, each whole or not there; `results.json` last, so that it stands for all of them."""
    rows = [
        {
            "question_id": answer.question.id,
            "category": answer.question.category,
            "turn": answer.turn,
            "answer": answer.output.text,
            "tokens": answer.output.stats.tokens,
            "calls": answer.output.stats.calls,
            "finish_reason": answer.output.finish_reason,
            "same_as_plain": answer.output.token_ids == other.output.token_ids,
        }
        for answer, other in zip(answers, plain, strict=True)
    ]
    write_text(out / "answers.jsonl", "".join(json_text(row, ensure_ascii=False) + "\n" for row in rows))
    report.plot_acceptance(found, out / "acceptance.png")
    write_text(out / "report.md", report.markdown(found))
    write_json(out / "results.json", found)


if __name__ == "__main__":
    main()
