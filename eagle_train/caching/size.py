"""What a cache will take, before anything is computed: documents, tokens, bytes; by rendering the data."""

import math
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from eagle_train.caching.options import Run
from eagle_train.caching.walk import Totals, Walk
from eagle_train.corpus.feed import MalformedRow, received, render
from eagle_train.corpus.stream import Packer, Stream
from eagle_train.errors import check
from eagle_train.models.cached_target import ends_bytes, small_files
from eagle_train.models.loading import TargetConfig
from eagle_train.models.state_files import Layout
from eagle_train.progress import progress
from eagle_train.results import in_words
from eagle_train.training.cost.target_shape import TargetShape

_HEADERS = 4096  # bytes of the files' headers and of cache.json, about
ALL = 20_000  # rows of data that are all rendered; of more as many are drawn


@dataclass(frozen=True)
class Size:
    """`disk_bytes` of a whole cache. `sampled`: the rows of data that the numbers are made from, None for all;
    `error`: how far a sample's tokens may be off, two standard errors as a share."""

    documents: int
    tokens: int
    disk_bytes: int
    sampled: int | None = None
    error: float = 0.0

    def __str__(self) -> str:
        by = "" if self.sampled is None else f" (by {self.sampled:,} rows, within {self.error:.1%})"
        about = "" if self.sampled is None else "about "
        return f"{about}{self.documents:,} documents, {self.tokens:,} tokens{by}: {in_words(self.disk_bytes)} on disk"


def size_of(run: Run, walk: Walk, layout: Layout) -> Size:
    """The size of the cache that the documents of `walk` make; the walk is used up. All ranks call it.

    Raises UserError as reading and rendering rows does.
    """
    heldout = replace(walk.totals)  # met before, all of them
    bar = progress(None, "row of data read")
    while not walk.is_over and walk.stream.position.drawn <= ALL:
        next(walk)
        bar.update(walk.stream.position.drawn)
    bar.close()
    walk.close()
    if walk.is_over:
        return _sized(run, walk.totals, layout)
    return _sampled(run, walk, layout, heldout)


def _sized(run: Run, totals: Totals, layout: Layout) -> Size:
    ends = bytes_of_ends(run.hf_config, run.target, layout.computed.itemsize)
    small = sum(file.stat().st_size for file in small_files(run.target.path))
    return Size(totals.documents, totals.tokens, _HEADERS + small + ends + _bytes_of(run, totals, layout))


def bytes_of_ends(hf_config: Any, target: TargetConfig, itemsize: int) -> int:
    """Of the target's embedding and LM head. Whether they are one follows from the model that its class builds: of a
    multimodal config, either part may say so."""
    shape = TargetShape.of(hf_config, target.trust_remote_code, f"target.path={target.path}")
    return ends_bytes(shape.vocabulary, shape.hidden, shape.tied, itemsize)


def _bytes_of(run: Run, totals: Totals, layout: Layout) -> int:
    only = run.cache.supervised_only
    one = layout.document_bytes(0, 0, only)
    return totals.documents * one + layout.document_bytes(totals.tokens, totals.kept, only) - one


def _drawn(run: Run, walk: Walk) -> tuple[int, list[Totals]]:
    """How many rows the data have, and what is packed of each of ALL rows that are drawn from them with equal chances.

    Every rank reads all rows, and renders those that come to every so manieth place; returns its own.
    """
    draw, share, rows = random.Random(0), dict[int, Totals](), 0
    feed, packer, world = walk.stream.feed, Packer(run.data), walk.world
    bar = progress(None, "row counted")
    for name, source in feed.sources.items():
        for placed in source.rows():
            rows += 1
            place = rows - 1 if rows <= ALL else draw.randrange(rows)
            if place < ALL and place % world.size == world.rank:
                rendered = render(placed, run.data.sources[name], feed.renderer)
                share[place] = _totals_of(packer, received(rendered, run.data), run)
            bar.update(rows)
    bar.close()
    return rows, [share[place] for place in sorted(share)]


def _sampled(run: Run, walk: Walk, layout: Layout, heldout: Totals) -> Size:
    """By a sample; documents that are twice in the data count twice. `heldout`: what is written of other data. All
    ranks call it: none waits for another that reads all of the data, which may take longer than ranks wait."""
    world = walk.world
    rows, own = world.by_each(lambda: _drawn(run, walk))
    everyone = world.exchange(own)
    sample = [everyone[place % world.size][place // world.size] for place in range(min(rows, ALL))]
    tokens = [each.tokens for each in sample]
    mean = fmean(tokens)
    share = rows / len(sample)
    if run.most_rows is not None:
        counts = walk.stream.counts
        fill = counts["tokens"] / max(1, counts["tokens"] + counts["padding"])
        share = min(share, run.most_rows * run.data.row_tokens * fill / max(1, sum(tokens)))
    totals = Totals(
        *(round(share * sum(getattr(each, name) for each in sample)) + met for name, met in vars(heldout).items())
    )
    size = _sized(run, totals, layout)
    error = 2 * stdev(tokens) / math.sqrt(len(tokens)) / max(mean, 1e-9)
    error *= 1 - heldout.tokens / max(1, totals.tokens)  # of these nothing is guessed
    return Size(size.documents, size.tokens, size.disk_bytes, len(sample), error)


def _totals_of(packer: Packer, documents: list | MalformedRow, run: Run) -> Totals:
    """Of a row of data: what of its documents is packed."""
    totals = Totals()
    if isinstance(documents, MalformedRow):
        return totals
    for supervised in packer.slots_of(documents):
        tokens = len(supervised)
        totals.documents += 1
        totals.tokens += tokens
        totals.kept += int(supervised.sum()) if run.cache.supervised_only else tokens
    return totals


def check_room(out: Path, needed: int) -> None:
    """Raise UserError where the disk of `out` has not so many bytes left."""
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    check(
        needed <= free,
        f"out={out}: needs {in_words(needed)}, and its disk has {in_words(free)} left; give another directory, "
        "precision=bf16 or fp8, or fewer data",
    )


def layout_of(run: Run, computed: torch.dtype) -> Layout:
    """How a token's states will lie on disk, of a target that computes in this dtype."""
    width = run.hf_config.get_text_config().hidden_size
    return Layout(width, len(run.draft.target_layers), run.cache.precision, computed)


def new_walk(run: Run, stream: Stream, known: set[bytes]) -> Walk:
    """A walk over the run's rows."""
    return Walk(stream, known, run.cache.supervised_only, run.most_rows, run.parallel.target != "replicated")
