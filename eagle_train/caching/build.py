"""A cache from start to end: its size, the target's states of a run's first pass, shard by shard, and the index.

Shards are written into OUT.partial, which becomes OUT at the end. `made_of.json` there has what they are made of; the
same command goes on behind the shards that are there: the data are rendered again, and nothing is computed twice.
"""

import json
import logging
import os
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle_train.caching.options import MIB, Run
from eagle_train.caching.size import Size, check_room, layout_of, new_walk, size_of
from eagle_train.caching.walk import WalkedBatch
from eagle_train.caching.writer import ShardWriter, document_parts, rank_of, shards_of, writing
from eagle_train.corpus.preview import check_data, check_same_data
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import check_found, pin
from eagle_train.corpus.stream import PackedRow, Stream, heldout_batches
from eagle_train.distributed import World
from eagle_train.drafts import TargetStates
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.models.cached_target import copy_small_files, write_ends
from eagle_train.models.loading import DTYPES, check_placement, load_target, training_dtype
from eagle_train.models.state_files import HEADER, INDEX, Header, Shard, index_of, partial_of
from eagle_train.models.target import Target
from eagle_train.one_writer import beside, one_writer
from eagle_train.ops.tensor_files import write_tensors
from eagle_train.progress import progress
from eagle_train.results import in_words, write_json
from eagle_train.training.assembly import (
    divided,
    look_ahead,
    made_with,
    renderer_of,
    round_target,
    today,
    with_compiled_target,
)
from eagle_train.training.checkpoint.format import flush
from eagle_train.training.lookahead import Lookahead
from eagle_train.training.target_pass import Placed, target_states, to_device
from eagle_train.training.train_config import accumulation

_LOG = logging.getLogger(__name__)
_MADE_OF = "made_of.json"
_NONE = TargetStates(torch.empty(0), {})  # of a batch whose documents are all there


@dataclass(frozen=True)
class Built:
    """What a build wrote, or with `plan` is to write."""

    size: Size
    header: Header | None


def build_cache(run: Run, world: World) -> Built:
    """Write the states that `run` reads of its target in a pass over its data to the directory `run.cache.out`.

    All ranks call it; each writes shards of its own. Raises UserError for data that cannot be read, for a cache that
    is there already, was begun with other settings, and where the disk has not the room.
    """
    out = Path(run.cache.out)
    with nullcontext() if run.cache.plan else one_writer(out, beside(out), world):
        return _built(run, world, out)


def _built(run: Run, world: World, out: Path) -> Built:
    check(run.cache.plan or not out.exists(), f"out={out}: exists; give another directory, remove it, or verify=true")
    check_found(run.data)
    run = replace(run, target=training_dtype(run.target, resolve_device(run.cache.device), world))
    begun = world.by_main(lambda: _Begun.at(partial_of(out)))
    run.data.date = world.agreed(run.data.date or begun.made_of.get("data.date") or today())
    pin(run.data, partial(made_with, begun.made_of) if begun.made_of else None, world)
    renderer = renderer_of(run.target, run.data, run.hf_config)
    for note in world.by_each(lambda: check_data(run.data, renderer)):
        if world.is_main:
            warnings.warn(note, stacklevel=1)
    check_same_data(run.data, world)
    size = _told(run, renderer, world)
    if run.cache.plan:
        return Built(size, None)
    world.by_main(lambda: check_room(out, size.disk_bytes - begun.disk_bytes))
    return Built(size, _Build(run, renderer, world, begun).finished(size))


def _told(run: Run, renderer: ChatRenderer, world: World) -> Size:
    """The size of the whole cache, which is logged."""
    computed = DTYPES[run.target.dtype]
    assert computed is not None  # `training_dtype` leaves no auto
    walk = new_walk(run, Stream(run.data, renderer, run.train.micro_batch_rows, world), set())
    for rows in world.by_each(lambda: _heldout(run, renderer)):
        walk.marked(rows)
    size = size_of(run, walk, layout_of(run, computed))
    if world.is_main:
        _LOG.info("out=%s: %s", run.cache.out, size)
    return size


def _heldout(run: Run, renderer: ChatRenderer) -> list[list[PackedRow]]:
    """The packed rows of each held-out batch."""
    rows = run.train.micro_batch_rows
    found = []
    for batch in heldout_batches(run.data, renderer, rows, run.train.eval_batches):
        lengths = [_without_padding(*each) for each in zip(batch.supervised, batch.lengths, strict=True)]
        found.append([PackedRow(*each) for each in zip(batch.tokens, batch.supervised, lengths, strict=True)])
    return found


def _without_padding(supervised: torch.Tensor, lengths: list[int]) -> list[int]:
    """The lengths of a row's documents, of its segments."""
    ends_in_padding = lengths and not supervised[sum(lengths[:-1]) :].any()
    return lengths[:-1] if ends_in_padding else lengths


@dataclass(frozen=True)
class _Begun:
    """What an earlier build left in the partial directory: what it is made of, its shards, the keys of their documents,
    and the bytes that they take. Empty where none was begun. `is_foreign`: something is there that no build began."""

    made_of: dict[str, Any]
    shards: list[str]
    known: set[bytes]
    disk_bytes: int
    is_foreign: bool

    @classmethod
    def at(cls, partial: Path) -> "_Begun":
        file, shards = partial / _MADE_OF, shards_of(partial)
        made_of = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        keys = (_shard(partial / name).array("keys", "u1") for name in shards)
        known = {key.tobytes() for each in keys for key in each}
        taken = sum((partial / name).stat().st_size for name in shards)
        is_foreign = not made_of and partial.exists() and any(partial.iterdir())
        return cls(made_of, shards, known, taken, is_foreign)


def _shard(path: Path) -> Shard:
    return Shard(path, f"out={path.parent}")


class _Build:
    """One rank's part of a build, its target loaded in the dtype of `run`, which is no auto. `written`: tokens that
    this rank has written."""

    def __init__(self, run: Run, renderer: ChatRenderer, world: World, begun: _Begun):
        self.run, self.renderer, self.out = run, renderer, Path(run.cache.out)
        self.partial, self.written = partial_of(self.out), 0
        device = resolve_device(run.cache.device)
        parts = run.target, run.hf_config, run.draft, run.train, run.optim
        parallel, self.world = divided(run.parallel, world, device, *parts, run.data.row_tokens)
        check_placement(run.target, run.hf_config, parallel.target, self.world.shard_size)
        self.target: Target = load_target(run.target, device, parallel.target, self.world)
        self.embedding_scale = self.target.embedding_scale()
        if run.train.target_quant == "fp8":
            round_target(self.target, self.world)
        self.layers = run.draft.target_layers
        rows = run.train.micro_batch_rows, run.data.row_tokens
        _, self.compiled = with_compiled_target(parallel, self.target, *rows, self.layers)
        stream = Stream(run.data, renderer, run.train.micro_batch_rows, self.world)
        self.walk = new_walk(run, stream, begun.known)
        self.made_of = json.loads(json.dumps(self._made_of(stream)))
        self._begin(begun)
        self.layout = layout_of(run, self.target.dtype)
        only, size = run.cache.supervised_only, run.cache.shard_mib * MIB
        number = sum(rank_of(name) == world.rank for name in begun.shards)
        self.writer = ShardWriter(self.partial, world.rank, number, self.layout, only, size, self.out)

    def _made_of(self, stream: Stream) -> dict[str, Any]:
        """All that the cache's contents depend on."""
        run, identity = self.run, self.target.identity
        made_of: dict[str, Any] = {f"data.{key}": value for key, value in stream.made_of().items()}
        made_of["data.date"] = run.data.date
        made_of |= {"data.heldout": run.data.heldout, "data.heldout_revision": run.data.heldout_revision}
        made_of |= {f"train.{key}": getattr(run.train, key) for key in ("micro_batch_rows", "eval_batches")}
        made_of |= {"train.target_quant": run.train.target_quant, "train.steps, as rows": run.most_rows}
        made_of |= {"target (its fingerprint)": identity.fingerprint, "target.dtype": str(self.target.dtype)}
        made_of |= {"draft (the target's layers)": list(self.layers), "processes": self.world.size}
        own = ("precision", "supervised_only", "shard_mib")
        return made_of | {key: getattr(run.cache, key) for key in own}

    def _begin(self, begun: _Begun) -> None:
        """Begin a new cache, or go on with one. Raises UserError for one of other settings."""
        for key, value in (self.made_of if begun.made_of else {}).items():
            earlier = begun.made_of.get(key)
            problem = f"out={self.out}: was begun with {key}={earlier}, not {value}"
            check(earlier == value, f"{problem}; give another directory, or remove {self.partial}")
        problem = f"out={self.out}: {self.partial} is there, and no build began it; remove it"
        check(not begun.is_foreign, problem)
        if self.world.is_main:
            if begun.known:
                _LOG.info("%s: goes on after %d finished shards", self.partial, len(begun.shards))
            write_json(self.partial / _MADE_OF, self.made_of)
        self.world.exchange(None)
        check((self.partial / _MADE_OF).is_file(), f"out={self.out}: must be a directory that all processes see")

    def finished(self, size: Size) -> Header:
        """Compute and write all states, then the index and the header; the cache appears at `out`."""
        train, data = self.run.train, self.run.data
        steps = accumulation(self.run.optim, train, data.row_tokens, self.world.size)
        walk: Any = self.walk  # of a stream, what is drawn ahead is asked of it
        ahead = look_ahead(walk, self.target, self.run.draft, train, steps, self.world, self.compiled)
        computed = ahead.target_states
        ahead.target_states = lambda batch: computed(batch) if _walked(batch).is_wanted else _NONE
        with ahead.start(steps=None):
            is_whole = self._write_pass(ahead, size)
            self._write_heldout(ahead)
        self.writer.close()
        shards = [name for each in self.world.exchange(self.writer.names) for name in each]
        rows = None if is_whole else self.run.most_rows
        return self.world.by_main(lambda: self._write_index(sorted(shards), rows))

    def _write_pass(self, ahead: Lookahead, size: Size) -> bool:
        """Write the states of the run's rows, in their order. Returns whether these are all of the data."""
        bar, is_over = progress(size.tokens, "token"), False
        while not is_over:
            batches = ahead.step()
            is_over = ahead.state["is_over"]
            for batch, states in ahead.with_states(batches):
                self._write(_walked(batch), states)
            bar.update(min(size.tokens - 1, self.world.size * self.written))
        bar.update(size.tokens)
        bar.close()
        return ahead.state["is_whole"]

    def _write_heldout(self, ahead: Lookahead) -> None:
        """Write the states of held-out rows, each rank those that it measures (evaluate.py)."""
        batches = [self.walk.marked(rows) for rows in _heldout(self.run, self.renderer)]
        for start in range(0, len(batches), self.world.size):
            number = start + self.world.rank
            batch = batches[number] if number < len(batches) else batches[0]
            if batch.found or self.run.parallel.target != "replicated":  # then forwards are collective
                states = target_states(self.target, to_device(batch, self.target.device), self.layers)
                if number < len(batches):
                    self._write(batch, states)

    def _write(self, batch: WalkedBatch, states: TargetStates) -> None:
        """Write the documents that are first met in a batch."""
        if batch.found:
            parts = self.writer.parts_of(states, self.layers)
            for each in batch.found:
                span = slice(each.start, each.end)
                of_document = document_parts(parts, each.row, each.start, each.end)
                tokens, supervised = batch.tokens[each.row, span], batch.supervised[each.row, span]
                self.writer.add(each.key, tokens, supervised, of_document)
                self.written += len(tokens)
        self.writer.reached()

    def _write_index(self, shards: list[str], rows: int | None) -> Header:
        """Write the index, what training needs of the target, and the header, and let the cache appear. `rows`: of the
        header."""
        missing = [name for name in shards if not (self.partial / name).is_file()]
        check(not missing, f"out={self.out}: must be a directory that all processes see; {missing[:1]} is not there")
        index = index_of([_shard(self.partial / name) for name in shards])
        head, cache = self.target.lm_head, self.run.cache
        header = Header(
            target=asdict(self.target.identity),
            dtype=str(self.target.dtype).removeprefix("torch."),
            precision=cache.precision,
            supervised_only=cache.supervised_only,
            layers=list(self.layers),
            target_quant=self.run.train.target_quant,
            embedding_scale=self.embedding_scale,
            scale=head.scale,
            softcap=head.softcap,
            documents=len(index["keys"]),
            tokens=int(index["tokens"].sum()),
            shards=shards,
            rows=rows,
            made_of=self.made_of,
        )
        with writing(self.out):
            write_tensors(index, self.partial / INDEX)
            write_ends(self.target, self.partial)
            copy_small_files(self.run.target, self.partial)
            write_json(self.partial / HEADER, header.as_json())
            for file in self.partial.iterdir():
                flush(file)
            os.rename(self.partial, self.out)
            (self.out / _MADE_OF).unlink()  # until then the same command goes on
        return header


def _walked(batch: Placed | WalkedBatch) -> WalkedBatch:
    """The host's batch of one on the device."""
    host = batch.host if isinstance(batch, Placed) else batch
    assert isinstance(host, WalkedBatch), "drawn by a walk"
    return host


def summary(built: Built, out: str) -> str:
    """What a build wrote, in a line."""
    header = built.header
    if header is None:
        return f"{out}: {built.size}"
    taken = sum(file.stat().st_size for file in Path(out).rglob("*") if file.is_file())
    shards = "1 shard" if len(header.shards) == 1 else f"{len(header.shards)} shards"
    return f"{out}: {header.tokens:,} tokens of {header.documents:,} documents in {shards}, {in_words(taken)}"
