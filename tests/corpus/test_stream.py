"""corpus/stream.py: every document is packed as one of its own, counted, and resumed bit for bit."""

import copy
import functools
import gzip
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from eagle_train.corpus import feed, json_files
from eagle_train.corpus.feed import CHUNK, Feed, shuffled
from eagle_train.corpus.rows import parse
from eagle_train.corpus.source import DataConfig, SourceConfig, open_source
from eagle_train.corpus.stream import Batch, Stream, heldout_batches
from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.errors import UserError
from tests.support.processes import run
from tests.support.word_chats import (
    ASSISTANT,
    DIVIDING,
    END,
    LAST,
    START,
    TEMPLATE,
    chat,
    make_renderer,
    make_rows,
    tokens_of,
)


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def same(a: Batch, b: Batch) -> bool:
    tensors = ((a.tokens, b.tokens), (a.positions, b.positions), (a.supervised, b.supervised))
    return a.lengths == b.lengths and all(torch.equal(x, y) for x, y in tensors)


def segments(batches: list[Batch]) -> list[tuple[list[int], list[int], list[bool]]]:
    """(tokens, positions, supervised) of every segment, padding included."""
    out = []
    for batch in batches:
        for tokens, positions, supervised, lengths in zip(
            batch.tokens, batch.positions, batch.supervised, batch.lengths, strict=True
        ):
            assert sum(lengths) == len(tokens)
            parts = (tensor.split(lengths) for tensor in (tokens, positions, supervised))
            out += [tuple(part.tolist() for part in segment) for segment in zip(*parts, strict=True)]
    return out


def plain_segments(rows: list[dict], size: int, long_documents: str) -> list[tuple[list[int], list[int], list[bool]]]:
    """The plain twin: each document, or piece of one, by itself."""
    out = []
    for row in rows:
        tokens = tokens_of(row)
        first = tokens.index(ASSISTANT) + 1
        if len(tokens) > size and long_documents == "drop":
            continue
        for begin in range(0, len(tokens), size):
            n = len(tokens[begin : begin + size])
            supervised = [j >= 1 and j + 1 < n and begin + j + 1 >= first for j in range(n)]
            if any(supervised):
                out.append((tokens[begin : begin + n], list(range(n)), supervised))
    return out


@pytest.mark.parametrize("long_documents", ["split", "drop"])
def test_packing_equals_the_plain_twin(tmp_path, long_documents):
    rows = make_rows(150, longest=20)
    path = write_jsonl(tmp_path / "heldout.jsonl", rows)
    config = DataConfig(path="x.jsonl", heldout=path, row_tokens=24, long_documents=long_documents)
    batches = heldout_batches(config, make_renderer(), 4, 1000)
    packed = segments(batches)
    documents = [segment for segment in packed if segment[0][0] != 0]
    padding = [segment for segment in packed if segment[0][0] == 0]
    expected = plain_segments(rows, 24, long_documents)
    assert sorted(documents) == sorted(expected)
    assert all(not any(tokens) and not any(supervised) for tokens, _, supervised in padding)
    assert all(positions == list(range(len(tokens))) for tokens, positions, _ in padding)
    assert [len(batch.lengths) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert all(batch.tokens.dtype == batch.positions.dtype == torch.int64 for batch in batches)
    assert all(batch.supervised.dtype == torch.bool for batch in batches)


def test_held_out_rows_that_are_not_used_are_not_read(tmp_path):
    rows = make_rows(150, longest=20)
    every, begun = write_jsonl(tmp_path / "every.jsonl", rows), write_jsonl(tmp_path / "begun.jsonl", rows[:75])
    with Path(begun).open("a") as file:
        file.write("no row\n")
    expected = heldout_batches(DataConfig("x", heldout=every, row_tokens=24), make_renderer(), 4, 1000)
    found = heldout_batches(DataConfig("x", heldout=begun, row_tokens=24), make_renderer(), 4, 3)
    assert len(found) == 3 < len(expected)
    assert all(same(one, other) for one, other in zip(found, expected, strict=False))


def test_no_token_is_lost(tmp_path):
    """What goes in comes out, to the token, however it is split, save for tails too short to have a slot to supervise:
    those are counted as skipped."""
    rows = [row for row in make_rows(200, longest=30) if len(tokens_of(row)) % 16 not in (1, 2)]
    path = write_jsonl(tmp_path / "heldout.jsonl", rows)
    config = DataConfig(path="x.jsonl", heldout=path, row_tokens=16, supervise="all")
    out = Counter(
        token for tokens, _, _ in segments(heldout_batches(config, make_renderer("all"), 4, 1000)) for token in tokens
    )
    del out[0]
    assert out == Counter(token for row in rows for token in tokens_of(row))


@pytest.mark.parametrize("long_documents", ["split", "drop"])
def test_counts(tmp_path, long_documents):
    short, long = chat([1], [2, 3]), chat([1, 2, 3], [*range(20)])  # 6 and 26 tokens
    long_prompt, mute = chat([*range(20)], [1]), {"messages": [{"role": "user", "content": "1 2 3"}]}
    path = write_jsonl(tmp_path / "train.jsonl", [short, long, long_prompt, mute, short, short])
    config = DataConfig(path=path, row_tokens=12, long_documents=long_documents, shuffle_window=0)
    stream = Stream(config, make_renderer(), 1)
    while stream.position.sources[""][0] == 0:
        batch = next(stream)
        assert batch.tokens.shape == (1, 12)
    # One epoch, and the one document of the next that it took to learn that the first was over.
    assert stream.counts["documents"] == stream.position.drawn > 6
    if long_documents == "split":
        # The first piece of the long prompt, the mute document, and the long answer's tail of two tokens.
        assert (stream.counts["split"], stream.counts["dropped"], stream.counts["skipped"]) == (2, 0, 3)
    else:
        assert (stream.counts["split"], stream.counts["dropped"], stream.counts["skipped"]) == (0, 2, 1)


def test_tokens_and_padding_are_those_of_the_batches(tmp_path):
    config = DataConfig(path=write_jsonl(tmp_path / "train.jsonl", make_rows(60)), row_tokens=32)
    stream = Stream(config, make_renderer(), 1)
    packed = segments([next(stream) for _ in range(30)])
    in_batches = [
        sum(len(tokens) for tokens, _, _ in packed if (tokens[0] == 0) == padding) for padding in (False, True)
    ]
    waiting = sum(sum(row.lengths) for row in stream.ready), sum(row.room for row in stream.ready)
    assert [stream.counts["tokens"] - waiting[0], stream.counts["padding"] - waiting[1]] == in_batches
    assert in_batches[1] < 0.1 * in_batches[0]


@pytest.mark.parametrize("window", [0, 1, 7, 100])
def test_shuffling_permutes_within_windows(tmp_path, window):
    rows = make_rows(45)
    config = DataConfig(path=write_jsonl(tmp_path / "train.jsonl", rows), shuffle_window=window, seed=3)
    source = open_source(config)
    epochs = [[parse(*placed) for placed in shuffled(source, config, "", epoch, 0)] for epoch in (0, 1)]
    size = max(window, 1)
    for order in epochs:
        for begin in range(0, len(rows), size):
            key = str
            assert sorted(order[begin : begin + size], key=key) == sorted(rows[begin : begin + size], key=key)
    assert (epochs[0] == rows) == (size == 1)
    assert (epochs[0] == epochs[1]) == (size == 1)
    for start in (0, 1, 6, 7, 44, 45):
        assert [parse(*placed) for placed in shuffled(source, config, "", 0, start)] == epochs[0][start:]


def test_another_seed_is_another_order(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(100))
    streams = [Stream(DataConfig(path, row_tokens=64, seed=seed), make_renderer(), 2) for seed in (0, 0, 1)]
    first, again, other = (next(stream) for stream in streams)
    assert same(first, again)
    assert not same(first, other)


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("window", [0, 16])
def test_resume_is_exact_at_any_batch(tmp_path, window):
    # Documents of up to two rows' length, so that rows wait in the state for their batch.
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(40, longest=40))
    config = DataConfig(path, row_tokens=40, shuffle_window=window)
    stream = Stream(config, make_renderer(), 2)
    states, batches = [], []
    for _ in range(60):
        states.append(saved_and_loaded(stream.state_dict()))
        batches.append(next(stream))
    counts = dict(stream.counts)
    assert stream.position.sources[""][0] >= 2
    for at in (0, *random.Random(0).sample(range(60), 8)):
        resumed = Stream(config, make_renderer(), 2)
        next(resumed)
        resumed.load_state_dict(states[at])
        assert all(same(one, other) for one, other in zip(islice(resumed, 60 - at), batches[at:], strict=True))
        assert resumed.counts == counts


def test_a_state_in_memory_stays_what_it_was(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(40, longest=40))
    stream = Stream(DataConfig(path, row_tokens=40), make_renderer(), 1)
    while not stream.ready:
        next(stream)
    state = stream.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(20):
        next(stream)
    stream.load_state_dict(state)
    for _ in range(20):
        next(stream)
    assert str(state) == str(kept)


def test_resume_with_another_micro_batch_gives_the_same_rows(tmp_path):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(70)), row_tokens=40)
    stream = Stream(config, make_renderer(), 3)
    next(stream)
    state = stream.state_dict()
    resumed = Stream(config, make_renderer(), 1)
    resumed.load_state_dict(state)
    expected = [row for batch in islice(stream, 4) for row in batch.tokens.tolist()]
    assert [batch.tokens[0].tolist() for batch in islice(resumed, 12)] == expected


def test_resume_renders_nothing_that_was_drawn_before(tmp_path, monkeypatch):
    rows = make_rows(300)
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", rows), row_tokens=40, shuffle_window=8)
    stream = Stream(config, make_renderer(), 1)
    while stream.position.drawn < 200:
        next(stream)
    rendered: list = []
    render = feed.render
    monkeypatch.setattr(feed, "render", lambda placed, *rest: rendered.append(placed) or render(placed, *rest))
    resumed = Stream(config, make_renderer(), 1)
    resumed.load_state_dict(stream.state_dict())
    next(resumed)
    order = [place for epoch in range(2) for place, _ in shuffled(open_source(config), config, "", epoch, 0)]
    start = stream.position.drawn
    assert [place for place, _ in rendered] == order[start : start + feed.CHUNK]


@pytest.mark.parametrize("window", [0, 24])
def test_resume_reads_no_line_long_before_its_place(tmp_path, monkeypatch, window):
    """Behind the first, which tells that there are rows; what is compressed is read, but not cut into lines."""
    monkeypatch.setattr(json_files, "MARK_ROWS", 32)
    rows, texts = make_rows(500), []
    for part, chosen in enumerate((rows[:100], rows[100:350], rows[350:])):
        texts.append("\n" * part + "".join(json.dumps(row) + "\n" for row in chosen))
    for suffix, write in {".jsonl": str.encode, ".jsonl.gz": lambda text: gzip.compress(text.encode(), 0)}.items():
        paths = [tmp_path / f"{part}{suffix}" for part in range(3)]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(write(text))
        config = DataConfig(str(tmp_path / f"*{suffix}"), row_tokens=40, shuffle_window=window)
        stream = Stream(config, make_renderer(), 1)
        while stream.position.drawn < 270:
            next(stream)
        state = saved_and_loaded(stream.state_dict())
        at = state["marks"][""]
        assert at[0] > 270 - 32 - 24
        expected = list(islice(stream, 60))
        spoilt, first = at[2], texts[0].index("\n") + 1
        paths[0].write_bytes(write(texts[0][:first] + "x" * (len(texts[0]) - first)))
        paths[1].write_bytes(write("x" * spoilt + texts[1][spoilt:]))
        resumed = Stream(config, make_renderer(), 1)
        resumed.load_state_dict(state)
        assert all(same(one, other) for one, other in zip(islice(resumed, 60), expected, strict=True))
        assert resumed.position.sources[""][0] == 0  # not yet at the spoilt lines again


class Together:
    """Ranks as threads: each `World`'s exchange waits for the others'."""

    def __init__(self, size: int):
        self.size, self.barrier, self.given = size, threading.Barrier(size, timeout=300), [None] * size

    def run(self, task: Callable[[World], Any]) -> list[Any]:
        """What `task` returns on each rank."""
        worlds = [World(rank, self.size) for rank in range(self.size)]
        for world in worlds:
            object.__setattr__(world, "exchange", functools.partial(self.exchange, world.rank))
        with ThreadPoolExecutor(self.size) as pool:
            running = [pool.submit(self.one, task, world) for world in worlds]
        failed = [each.exception() for each in running if each.exception() is not None]
        if failed:  # what went wrong, not that the others were left alone
            raise min(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [each.result() for each in running]

    def one(self, task: Callable[[World], Any], world: World) -> Any:
        try:
            return task(world)
        except BaseException:
            self.barrier.abort()
            raise

    def exchange(self, rank: int, own: Any) -> list[Any]:
        self.given[rank] = own
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone


def drawn_by(
    size: int, config: DataConfig, rows: int, batches: int, state: dict | None = None, template: str = TEMPLATE
) -> tuple[list, dict]:
    """The rows that `size` ranks draw in `batches` micro-batches of `rows` rows together, and the state after them."""

    def task(world: World) -> tuple[list[Batch], dict]:
        stream = Stream(config, make_renderer(template=template), rows // size, world)
        if state is not None:
            stream.load_state_dict(saved_and_loaded(state))
        return list(islice(stream, batches)), stream.state_dict()

    everyone = Together(size).run(task)
    assert all(str(other) == str(everyone[0][1]) for _, other in everyone)
    drawn = [row for at in range(batches) for own, _ in everyone for row in own[at].tokens.tolist()]
    return drawn, everyone[0][1]


def test_any_number_of_ranks_draws_the_same_rows(tmp_path):
    """Also where the number changes on the way, with a mixture, and with documents that wait for their batch."""
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", make_rows(90, 40, seed)) for seed, name in enumerate("ab")]
    mix = {name: SourceConfig(path, weight=weight) for name, path, weight in zip("ab", paths, (1, 3), strict=True)}
    config = DataConfig(mix=mix, row_tokens=40, shuffle_window=16)
    whole, last = drawn_by(1, config, 6, 40)
    for sizes in ((2, 3), (3, 1), (1, 2), (6, 2)):
        first, state = drawn_by(sizes[0], config, 6, 15)
        second, end = drawn_by(sizes[1], config, 6, 25, state)
        assert first + second == whole
        assert str(end) == str(last)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_a_rank_parses_and_tokenises_its_own_rows_only(tmp_path, monkeypatch, kind):
    """Of what is another's it reads the bytes, to pass them by."""
    rows = make_rows(200)
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    if kind != "jsonl":
        (tmp_path / "hub").mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path := str(tmp_path / "hub" / "rows.parquet"))
    config = DataConfig(path if kind != "hub" else str(tmp_path / "hub"), row_tokens=40, shuffle_window=16)
    placed = list(shuffled(open_source(config), config, "", 0, 0))
    assert not any(isinstance(row, dict) for _, row in placed)
    order = [place for place, _ in placed]
    open_source(config)  # looks at the first row
    rendered, parsed = {}, []
    render, parse_row = feed.render, feed.parse
    monkeypatch.setattr(feed, "parse", lambda place, row: parsed.append(place) or parse_row(place, row))
    monkeypatch.setattr(
        feed,
        "render",
        lambda placed, *rest: rendered.setdefault(id(rest[1]), []).append(placed[0]) or render(placed, *rest),
    )
    renderers = [make_renderer() for _ in range(3)]
    Together(3).run(lambda world: next(Stream(config, renderers[world.rank], 2, world)))
    for rank, renderer in enumerate(renderers):
        assert rendered[id(renderer)] == order[: 3 * feed.CHUNK][rank::3]
    assert sorted(parsed) == sorted(order[: 3 * feed.CHUNK])


def test_every_document_once_an_epoch_whatever_the_ranks(tmp_path):
    rows = make_rows(130)
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", rows), row_tokens=40, shuffle_window=32)
    state, seen, sizes = None, [], (1, 3, 2, 3, 1)
    for size in sizes:
        drawn, state = drawn_by(size, config, 6, 4, state)
        seen += [token - 4 for row in drawn for at, token in enumerate(row[1:], 1) if row[at - 1] == START]
    waiting = [row for kind in ("open", "ready") for row in state[kind]]
    seen += [t - 4 for row in waiting for before, t in itertools.pairwise(row["tokens"].tolist()) if before == START]
    epoch, number = state["position"]["sources"][""]
    assert epoch >= 1
    counted = Counter(seen)
    assert sum(counted.values()) == epoch * len(rows) + number
    assert set(counted.values()) <= {epoch, epoch + 1}
    assert len(counted) == len(rows)


def answers_of(rows: list[list[int]]) -> list[int]:
    """The answers that documents of the template DIVIDING end with, by their numbers."""
    return [row[at + 1] - 4 for row in rows for at, token in enumerate(row) if token == LAST]


def test_a_divided_row_is_drawn_whole_and_goes_on_within_itself(tmp_path):
    """Each of its documents once, whatever the ranks and wherever the run stops."""
    rows = [[chat([9], [100 + 3 * i + turn])["messages"] for turn in range(1 + i % 3)] for i in range(30)]
    path = write_jsonl(tmp_path / "train.jsonl", [{"messages": [*itertools.chain(*turns)]} for turns in rows])
    config = DataConfig(path, row_tokens=24, shuffle_window=8)
    whole, last = drawn_by(1, config, 2, 20, template=DIVIDING)
    halved = 0
    for at, sizes in enumerate(itertools.product((1, 2), (1, 2)), 5):
        first, state = drawn_by(sizes[0], config, 2, at, template=DIVIDING)
        waiting = answers_of([row["tokens"].tolist() for kind in ("open", "ready") for row in state[kind]])
        halved += len({(a - 100) // 3 for a in answers_of(first)} & {(a - 100) // 3 for a in waiting})
        second, end = drawn_by(sizes[1], config, 2, 20 - at, state, template=DIVIDING)
        assert first + second == whole
        assert str(end) == str(last)
    assert halved > 0
    counted = Counter(answers_of([*whole, *(r["tokens"].tolist() for kind in ("open", "ready") for r in last[kind])]))
    epoch, number = last["position"]["sources"][""]
    times = [{counted[100 + 3 * i + turn] for turn in range(len(turns))} for i, turns in enumerate(rows)]
    assert all(len(each) == 1 for each in times)
    assert sum(sum(each) for each in times) == epoch * len(rows) + number
    assert set().union(*times) <= {epoch, epoch + 1}
    assert last["counts"]["divided"] > 0


def test_frequent_tokens_are_those_of_answers_whatever_the_ranks(tmp_path):
    rows = [chat([9, 9, 9, 9, 9, 9], answer) for answer in ([5, 5, 5], [6, 6], [5, 3], [7, 7], [8])]
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", rows), row_tokens=40)
    ranked = [END, 5 + 4, 6 + 4, 7 + 4, 3 + 4, 8 + 4]  # 5, 4, 2, 2, 1 and 1 times
    for size, number in itertools.product((1, 3), range(1, 7)):
        found = Together(size).run(lambda world, n=number: Stream(config, make_renderer(), 2, world).frequent_tokens(n))
        assert found == [sorted(ranked[:number])] * size
    assert Stream(config, make_renderer(), 2).frequent_tokens(8) == sorted([*ranked, 0, 1])  # more than there are


def test_frequent_tokens_are_counted_in_all_of_a_mixture(tmp_path):
    """Until the last source was read once, however often a small one was."""
    large = write_jsonl(tmp_path / "large.jsonl", [chat([9], [token, token]) for token in range(20, 60)])
    small = write_jsonl(tmp_path / "small.jsonl", [chat([9], [5])])
    mix = {"large": SourceConfig(large), "small": SourceConfig(small)}
    found = Stream(DataConfig(mix=mix, row_tokens=40), make_renderer(), 1).frequent_tokens(42)
    assert found == sorted([END, 5 + 4, *(token + 4 for token in range(20, 60))])


def test_counting_tokens_leaves_the_stream_as_it_is(tmp_path):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(40)), row_tokens=40)
    stream = Stream(config, make_renderer(), 1)
    stream.frequent_tokens(5)
    assert same(next(stream), next(Stream(config, make_renderer(), 1)))


def test_worker_processes_draw_the_same_rows(tmp_path):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(200)), row_tokens=40)
    expected = list(islice(Stream(config, make_renderer(), 2), 30))
    stream = Stream(replace(config, workers=1), make_renderer(), 2)
    assert all(same(one, other) for one, other in zip(islice(stream, 30), expected, strict=True))
    stream.close()


DRAW = """
import multiprocessing, sys
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Stream

assert "transformers.modeling_utils" not in sys.modules  # each worker would spend seconds on it
from tests.support.word_chats import make_renderer

renderer = make_renderer()
renderer.tokenizer.chat_template += "{% for i in range(99999) %}{% endfor %}"  # so that workers are at work
stream = Stream(DataConfig(sys.argv[1], row_tokens=4000, workers=2), renderer, 1)
next(stream)
print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
for _ in stream:
    pass
"""


@pytest.mark.parametrize(("victim", "system"), [("owner", "Linux"), ("worker", "Linux"), ("worker", "macOS")])
def test_no_worker_outlives_its_pool(tmp_path, victim, system):
    """Its owner is killed, or another worker, so that nobody reads what it made, nor what it was to make: more than a
    pipe holds."""
    path = write_jsonl(tmp_path / "train.jsonl", [chat([1], [*range(2000)])] * 400)
    if system == "macOS":  # whose Python has no such function; each process reads this file first
        (tmp_path / "sitecustomize.py").write_text("import signal\n\ndel signal.sigtimedwait\n")
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    job = subprocess.Popen([sys.executable, "-c", DRAW, path], env=environment, stdout=-1, stderr=-1, text=True)
    workers = [int(worker) for worker in job.stdout.readline().split()]
    assert len(workers) == 2
    os.kill(job.pid if victim == "owner" else workers[0], signal.SIGKILL)
    _, told = job.communicate()  # until the last of them has closed the pipes
    assert job.returncode == (-signal.SIGKILL if victim == "owner" else 1)
    assert ("BrokenProcessPool" in told) == (victim == "worker")


DIE = """
import sys
from eagle_train.corpus import feed
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Stream
from tests.support.word_chats import die_while_writing, make_renderer

feed.work = die_while_writing
next(Stream(DataConfig(sys.argv[1], row_tokens=4000, workers=2), make_renderer(), 1))
"""


def test_a_worker_that_is_killed_in_its_result_ends_the_run(tmp_path):
    """Which the pool does not notice by itself: it would wait for ever."""
    path = write_jsonl(tmp_path / "train.jsonl", [chat([1], [2, 3])] * 400)
    done = run([sys.executable, "-c", DIE, path], env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 1
    assert "BrokenProcessPool" in done.stderr


class _Other:
    """Two ranks, of whom the other has lost its data."""

    size, rank = 2, 0

    def exchange(self, own, side="data"):
        return [own, CommonError("train.jsonl: cannot be read: [Errno 5] Input/output error")]


def test_what_one_rank_cannot_read_is_raised_on_all(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(100, 3, 0))
    rows = Feed(DataConfig(path), make_renderer(), _Other())
    with pytest.raises(CommonError, match="Input/output error"):
        next(rows.documents(rows.start()))


@pytest.mark.parametrize("error", [UserError("hub: cannot be read"), OSError(5, "Input/output error")])
def test_data_that_cannot_be_read_any_more_end_the_run_as_a_common_error(tmp_path, monkeypatch, error):
    """After all rows of what was read before, so that what they teach can be kept."""
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(200, 3, 0))
    rows = Feed(DataConfig(path), make_renderer(), ALONE)
    whole = rows.draws

    def broken(position):
        yield from islice(whole(position), 100)
        raise error

    monkeypatch.setattr(rows, "draws", broken)
    drawn = []
    with pytest.raises(CommonError, match=r"cannot be read|Input/output error"):
        drawn.extend(rows.documents(rows.start()))
    assert len(drawn) == 100 // CHUNK * CHUNK


def test_a_mixture_follows_its_weights_and_each_part_its_epochs(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", make_rows(50, 3, seed)) for seed, name in enumerate("ab")]
    mix = {"a": SourceConfig(paths[0], weight=0.2), "b": SourceConfig(paths[1], weight=0.6)}
    stream = Stream(DataConfig(mix=mix, row_tokens=40), make_renderer(), 1)
    while stream.position.drawn < 2000:
        next(stream)
    drawn = {name: 50 * epoch + number for name, (epoch, number) in stream.position.sources.items()}
    assert sum(drawn.values()) == stream.position.drawn
    assert drawn["a"] / stream.position.drawn == pytest.approx(0.25, abs=0.04)  # 4 standard deviations


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"path": "x.jsonl", "mix": {"a": SourceConfig("a.jsonl")}},
            r"data\.path is x\.jsonl; with data\.mix it must be null",
        ),
        ({"mix": {"a": SourceConfig()}}, r"data\.mix\.a\.path is missing"),
        ({"mix": {"a": SourceConfig("a.jsonl", weight=0)}}, r"data\.mix\.a\.weight is 0; it must be above 0"),
        (
            {"mix": {"a": SourceConfig("a.jsonl", format="x")}},
            r"data\.mix\.a\.format is 'x'; it must be one of messages",
        ),
        ({}, r"data\.path is missing"),
        ({"path": "x.jsonl", "workers": -1}, r"data\.workers is -1; it must be 0 or more"),
    ],
)
def test_impossible_data(values, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**values)


@pytest.mark.parametrize(
    ("key", "value"), [("row_tokens", 41), ("seed", 1), ("columns", {"messages": "messages"}), ("supervise", "all")]
)
def test_state_of_another_config_is_refused(tmp_path, key, value):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(70)), row_tokens=40)
    state = Stream(config, make_renderer(), 1).state_dict()
    with pytest.raises(UserError, match=rf"data\.{key} is .*resume with the same data"):
        Stream(replace(config, **{key: value}), make_renderer(), 1).load_state_dict(state)


def test_state_of_other_data_is_refused(tmp_path):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(70)), heldout="a.jsonl")
    state = Stream(config, make_renderer(), 1).state_dict()
    Stream(replace(config, heldout="b.jsonl"), make_renderer(), 1).load_state_dict(state)
    other = write_jsonl(tmp_path / "other.jsonl", make_rows(70))
    with pytest.raises(UserError, match=r"data\.path is .*other.jsonl"):
        Stream(replace(config, path=other), make_renderer(), 1).load_state_dict(state)
    write_jsonl(tmp_path / "train.jsonl", make_rows(71))
    with pytest.raises(UserError, match=r"data\.path \(names and sizes"):
        Stream(config, make_renderer(), 1).load_state_dict(state)


def test_a_row_that_cannot_be_rendered_is_named(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [*make_rows(2), {"messages": []}])
    with pytest.raises(UserError, match=r"train\.jsonl:3: the row has no turns"):
        list(Stream(DataConfig(path, shuffle_window=0), make_renderer(), 1))


BAD = [{"messages": []}, {"turns": []}]
BROKEN = '{"messages": '


def with_bad_rows(tmp_path: Path, rows: list[dict]) -> str:
    """A file of `rows` with three that are none between them."""
    lines = [json.dumps(row) for row in [*rows[:5], BAD[0], *rows[5:20], BAD[1], *rows[20:]]]
    path = tmp_path / "some_bad.jsonl"
    path.write_text("\n".join([*lines[:30], BROKEN, *lines[30:]]) + "\n")
    return str(path)


@pytest.mark.parametrize("workers", [0, 1])
def test_malformed_rows_are_left_out_if_asked(tmp_path, workers):
    """The rest is what it is without them; they are told of and counted, each time they come."""
    rows = make_rows(40)
    config = DataConfig(write_jsonl(tmp_path / "good.jsonl", rows), row_tokens=40, shuffle_window=0)
    bad = replace(config, path=with_bad_rows(tmp_path, rows), malformed="skip", workers=workers)
    expected, stream = Stream(config, make_renderer(), 1), Stream(bad, make_renderer(), 1)
    with pytest.warns(UserWarning, match=r"^left out: \S+some_bad\.jsonl:\d+: ") as told:
        assert all(same(next(stream), next(expected)) for _ in range(30))
    stream.close()
    places = [str(each.message).split(":")[2] for each in told]
    assert places[:3] == ["6", "22", "31"]
    passes = expected.counts["documents"] // len(rows)
    assert passes >= 1
    assert (
        len(places)
        == stream.counts["malformed"]
        == 3 * passes + sum(expected.position.sources[""][1] > n for n in (5, 20, 28))
    )
    assert {**stream.counts, "malformed": 0} == expected.counts


def test_a_run_that_met_a_malformed_row_goes_on_without_such_rows(tmp_path):
    """Bit for bit as if it had left them out from the beginning; and heldout data and a draft's vocabulary can too."""
    path = with_bad_rows(tmp_path, make_rows(40))
    refusing, skipping = (DataConfig(path, row_tokens=40, malformed=how) for how in ("refuse", "skip"))
    stream, states = Stream(refusing, make_renderer(), 1), []
    with pytest.raises(feed.MalformedRow, match=r"some_bad\.jsonl:(6|22|31): "):
        states.extend(stream.state_dict() for _ in stream)
    whole, resumed = (Stream(skipping, make_renderer(), 1) for _ in range(2))
    resumed.load_state_dict(states[-1])
    with pytest.warns(UserWarning, match="left out"):
        batches = list(islice(whole, len(states) + 20))
    with pytest.warns(UserWarning, match="left out"):
        assert all(map(same, resumed, batches[len(states) :]))
    assert len(whole.frequent_tokens(7)) == 7
    for config in (refusing, skipping):
        config.path, config.heldout = "x", path
    with pytest.raises(UserError, match=r"some_bad\.jsonl:6: the row has no turns"):
        heldout_batches(refusing, make_renderer(), 1, 10)
    assert len(heldout_batches(skipping, make_renderer(), 1, 10)) == 10


FUSSY = TEMPLATE + "{% if messages[0]['content'] == '1' %}"


@pytest.mark.parametrize(
    ("template", "content", "told"),
    [
        (TEMPLATE, "1 \ud83d", "the text holds half of a surrogate pair"),
        (
            FUSSY + "{{ messages[0]['content'] + 1 }}{% endif %}",
            "1",
            "the chat template fails on the conversation: TypeError",
        ),
        (FUSSY + "{{ messages[0].nothing.at_all }}{% endif %}", "1", "the chat template refuses the conversation"),
    ],
)
def test_whatever_a_row_breaks_it_is_the_row(tmp_path, template, content, told):
    """One rank has it, and all are to meet it."""
    path = write_jsonl(tmp_path / "train.jsonl", [*make_rows(3), chat([1], [2])])
    text = Path(path).read_text().replace('"content": "1"', f'"content": {json.dumps(content)}')
    Path(path).write_text(text)
    renderer = make_renderer("all")
    stream = Stream(DataConfig(path, row_tokens=40, shuffle_window=0), renderer, 1)
    renderer.tokenizer.chat_template = template
    with pytest.raises(feed.MalformedRow, match=rf"train\.jsonl:\d: {told}"):
        list(stream)


@pytest.mark.parametrize(("good", "bad", "refused"), [(0, 101, True), (800, 100, False), (800, 102, True)])
def test_too_many_malformed_rows_are_refused(tmp_path, good, bad, refused):
    """A tenth, from a hundred on: then it is the config that does not fit the data."""
    path = write_jsonl(tmp_path / "train.jsonl", [*make_rows(good), *BAD[:1] * bad, *make_rows(1)])
    stream = Stream(DataConfig(path, row_tokens=40, malformed="skip", shuffle_window=0), make_renderer(), 1)
    drawn = takewhile(lambda _: stream.position.drawn < good + bad, stream)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(UserError) if refused else nullcontext() as error:
        list(drawn)
    assert stream.counts["malformed"] == (101 if refused else bad)
    if refused:
        wanted = f"data.malformed=skip: 101 of {good + 101} rows are malformed, for example "
        assert str(error.value).startswith(wanted)


def test_data_without_anything_to_learn_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "mute.jsonl", [{"messages": [{"role": "user", "content": "1 2 3"}]}] * 5)
    mix = {"one": SourceConfig(path), "two": SourceConfig(path)}
    for config, told in ((DataConfig(path), rf"path is {path}"), (DataConfig(mix=mix), "mix is one, two")):
        with pytest.raises(CommonError, match=rf"^data\.{told}; it has no supervised token: .*'skipped': \d+"):
            next(Stream(config, make_renderer(), 1))
    with pytest.raises(UserError, match=r"data\.heldout is .*no supervised token"):
        heldout_batches(DataConfig("x", heldout=path), make_renderer(), 1, 1)


def test_no_heldout_no_batches():
    assert heldout_batches(DataConfig("x"), make_renderer(), 1, 1) == []
