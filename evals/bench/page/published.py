"""Our figures beside published ones of the same kind: one table for all results of a section."""

from collections.abc import Sequence

from evals.bench.page.blocks import Block
from evals.bench.page.figure import Figure
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import Source
from evals.bench.page.references import SPEEDUP, STEP, beside, of_drafted, quantised

CHAINS = {f"chain{length}": length for length in (3, 5, 7)}  # trees with published figures


def tpc(sources: Sequence[Source]) -> list[Block]:
    """TPC of chains beside published figures of as long ones, for lengths that have any."""
    ours = [(each, _chain(each), source) for source in sources for each in figures_of(source) if each.name == "TPC"]
    found: list[Block] = []
    for length in dict.fromkeys(length for _, length, _ in ours if length is not None):
        own = [(figure.of, target_of(source), figure.value) for figure, its, source in ours if its == length]
        found.append(beside(f"TPC of a chain of {length}", own, of_drafted(length)))
    return found


def speedup(sources: Sequence[Source]) -> list[Block]:
    """Speed-ups at batch size 1."""
    ours = [
        (
            figure.of,
            f"{target_of(source)}, {source.provenance.get('gpu') or source.provenance.get('cpu')}",
            figure.value,
        )
        for source in sources
        for figure in figures_of(source)
        if figure.name == "speed-up" and figure.batch_size == 1
    ]
    return [beside("Speed-up over plain decoding", ours, SPEEDUP)] if ours else []


def quantised_drafts(sources: Sequence[Source]) -> list[Block]:
    """The paper's table 2."""
    return [quantised()]


def step(sources: Sequence[Source]) -> list[Block]:
    """Time of a training step."""
    ours = []
    for source in sources:
        config = source.config
        tokens = f"{config['tokens_per_step']:,} tokens"
        of = f"{config['layers']} x {config['hidden']}, {config['vocab']:,} tokens in the vocabulary"
        ours.append((f"this step, s for {tokens}", of, source.found["ours"]["step_s"]))
    return [beside("A training step", ours, STEP)]


def target_of(source: Source) -> str:
    """The target's name, or what stands for it."""
    return str(source.found.get("target") or "this target")


def _chain(figure: Figure) -> int | None:
    """The length of the chain that a figure is of; None for another tree."""
    return next((CHAINS[part] for part in figure.of.split(", ") if part in CHAINS), None)
