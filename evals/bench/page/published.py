"""Our figures beside published ones of the same kind: one table for all results of a section."""

from collections.abc import Sequence

from evals.bench.page.blocks import Block
from evals.bench.page.figure import Figure
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import Source
from evals.bench.page.references import SPEEDUP, SPEEDUP_OF_BATCHES, STEP, beside, of_drafted, quantised, spec_bench

CALLED = {3: "a chain of 3", 5: "a chain of 5", 7: "a chain of 7", 60: "60 nodes"}  # by how many tokens are drafted
DRAFTED = {"chain3": 3, "chain5": 5, "chain7": 7, "n60": 60, "dynamic60": 60}  # trees with published figures


def tpc(sources: Sequence[Source]) -> list[Block]:
    """TPC of trees beside published figures of as many drafted tokens, for those that have any."""
    ours = [(each, _drafted(each), source) for source in sources for each in figures_of(source) if each.name == "TPC"]
    found: list[Block] = []
    for drafted in dict.fromkeys(drafted for _, drafted, _ in ours if drafted is not None):
        own = [(figure.of, target_of(source), figure.value) for figure, its, source in ours if its == drafted]
        found.append(beside(f"TPC of {CALLED[drafted]}", own, of_drafted(drafted)))
    return found


def speedup(sources: Sequence[Source]) -> list[Block]:
    """Speed-ups at batch size 1, those of larger batches, and Spec-Bench's table."""
    ours: dict[bool, list[tuple[str, str, float]]] = {False: [], True: []}
    for source in sources:
        on = f"{target_of(source)}, {source.provenance.get('gpu') or source.provenance.get('cpu')}"
        for figure in figures_of(source):
            if figure.name == "speed-up":
                ours[figure.batch_size != 1].append((figure.of, on, figure.value))
    found: list[Block] = []
    if ours[False]:
        found += [beside("Speed-up over plain decoding", ours[False], SPEEDUP), spec_bench()]
    if ours[True]:
        found.append(beside("Speed-up over plain decoding, larger batches", ours[True], SPEEDUP_OF_BATCHES))
    return found


def quantised_drafts(sources: Sequence[Source]) -> list[Block]:
    """The paper's table 2."""
    return [quantised()]


def step(sources: Sequence[Source]) -> list[Block]:
    """Time and tokens a second of a training step."""
    ours = []
    for source in sources:
        config = source.config
        tokens = f"{config['tokens_per_step']:,} tokens"
        of = f"{config['layers']} x {config['hidden']}, {config['vocab']:,} tokens in the vocabulary"
        ours.append((f"this step, s for {tokens}", of, source.found["ours"]["step_s"]))
        ours.append(("this step, tokens/s", of, source.found["ours"]["tokens_per_s"]))
    return [beside("A training step", ours, STEP)]


def target_of(source: Source) -> str:
    """The target's name, or what stands for it."""
    return str(source.found.get("target") or "this target")


def _drafted(figure: Figure) -> int | None:
    """How many tokens the tree drafts that a figure is of; None for a tree without published figures."""
    return next((DRAFTED[part] for part in figure.of.split(", ") if part in DRAFTED), None)
