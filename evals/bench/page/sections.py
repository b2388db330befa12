"""The sections of the report, one for each evaluation, in the order of the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from evals.bench.page import decoding, others, published, training
from evals.bench.page.blocks import Block, Entry, Notes, Section
from evals.bench.page.gather import TRAINING, UNREADABLE, Source
from evals.bench.page.shown import origin_of

G = TypeVar("G")


@dataclass(frozen=True)
class Kind:
    """A section: its title, what it measures, the blocks of one result, and those on all results together."""

    title: str
    about: str
    blocks: Callable[[Source], Sequence[Block]]
    closing: Callable[[Sequence[Source]], Sequence[Block]] | None = None


KINDS = {
    "doctor": Kind("The doctor", "What keeps the draft from being accepted, or from paying.", others.doctor),
    "mt_bench": Kind("What a draft is worth", "One draft against plain decoding.", decoding.mt_bench, published.tpc),
    "compare": Kind(
        "Drafters beside one another",
        "On the same prompts, batch by batch in turn.",
        decoding.compare,
        published.speedup,
    ),
    "latency": Kind(
        "Latency", "Times over batch sizes, contexts and trees, all decodings in turn.", decoding.latency, published.tpc
    ),
    "tune_trees": Kind("Trees", "Which tree pays at which batch size: expected of measured rounds.", others.tune_trees),
    "quantisation": Kind(
        "Quantised drafts",
        "A draft as it is, in FP8 and in INT4, in turn.",
        others.quantisation,
        published.quantised_drafts,
    ),
    "switches": Kind("Optimisations", "Each turned off and on, on the same prompts in turn.", others.switches),
    "gating": Kind("Whether to draft", "The gate and tree=auto against fixed choices.", others.gating),
    "serving": Kind("In vLLM", "The same draft and prompts in this engine and in vLLM.", decoding.serving),
    "experiments": Kind(
        "Drafts trained otherwise", "At equal time or equal tokens.", training.experiments, published.tpc
    ),
    TRAINING: Kind("Training runs", "Loss by step, and held-out figures.", training.training),
    "train_throughput": Kind(
        "Cost of a training step", "Against a naive step, in turn.", training.train_throughput, published.step
    ),
}
OTHERS = "others"
REST = Kind("Other results", "Results without a section of their own, as their files have them.", others.any_other)


def sections_of(sources: Sequence[Source]) -> list[Section]:
    """Those that have results, each with its results in the order given."""
    found = []
    for name, kind in {**KINDS, OTHERS: REST}.items():
        own = [each for each in sources if (each.evaluation if each.evaluation in KINDS else OTHERS) == name]
        if own:
            blocks = {each.name: _read(kind.blocks, each) for each in own}
            entries = [Entry(each.name, [*(blocks[each.name] or _unread(each)), *origin_of(each)]) for each in own]
            read = [each for each in own if blocks[each.name] is not None]
            found.append(Section(name, kind.title, kind.about, entries, _closing(kind, read)))
    return found


def _closing(kind: Kind, sources: Sequence[Source]) -> Sequence[Block]:
    """On all results together from which it can be made."""
    make = kind.closing
    if make is None:
        return []
    read = [each for each in sources if _read(make, [each]) is not None]
    return make(read) if read else []


def _read(make: Callable[[G], Sequence[Block]], given: G) -> Sequence[Block] | None:
    """The blocks; None where another version wrote the result."""
    try:
        return make(given)
    except UNREADABLE:
        return None


def readable(source: Source) -> Source:
    """The result; its values alone, none of which is known, where what stands below every result cannot be made."""
    foreign = Source(source.name, source.evaluation, {"values": source.found})
    return source if _read(origin_of, source) is not None else foreign


def _unread(source: Source) -> list[Block]:
    told = f"Written by another version of evals.{source.evaluation}, or by another program: its values as they are."
    return [Notes("Not read", [told]), *others.any_other(source)]
