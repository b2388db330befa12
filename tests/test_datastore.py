"""eagle-datastore: an index of chats and of plain texts, builds that are stopped, and users' mistakes."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from eagle_train import datastore
from eagle_train.corpus.conversations import ROLES, conversation_of
from eagle_train.corpus.render import ChatRenderer
from eagle_train.inference.lookup import datastore_writer
from eagle_train.inference.lookup.datastore import Datastore
from eagle_train.inference.lookup.suffix_array import SEPARATOR
from eagle_train.models.loading import TargetConfig, load_tokenizer
from eagle_train.retrieval import build
from eagle_train.retrieval import size as sizes
from tests.support.command_line import call, chats, save_target, write_jsonl

KILLED = """
import os, signal, sys
from eagle_train import datastore
from eagle_train.inference.lookup import datastore_writer

sort, sorted_before = datastore_writer.sorted_suffixes, []

def killed(tokens):
    sorted_before.append(1)
    if len(sorted_before) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return sort(tokens)

datastore_writer.sorted_suffixes = killed
datastore.main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A directory with a target and two files of conversations, of which one row is malformed."""
    root = tmp_path_factory.mktemp("datastore")
    save_target(root / "target")
    write_jsonl(root / "a.jsonl", chats(40))
    write_jsonl(root / "b.jsonl", [*chats(20, seed=1), {"messages": "none"}, *chats(20, seed=2)])
    return root


def arguments(made: Path, out: Path, *overrides: str) -> list[str]:
    return [f"target={made / 'target'}", "data=messages", f"data.path={made / 'a.jsonl'}", f"out={out}", *overrides]


def run(made: Path, out: Path, *overrides: str) -> int:
    return call(datastore.main, *arguments(made, out, *overrides))


def of_both(made: Path) -> list[str]:
    paths = (f"{name}: {{path: {made / name}.jsonl}}" for name in "ab")
    return ["data.path=null", f"data.mix={{{', '.join(paths)}}}", "data.malformed=skip", "limit=39", "shard_tokens=250"]


def documents_in(folder: Path) -> list[list[int]]:
    tokens = np.concatenate([np.load(file) for file in sorted(folder.glob("*.tokens.npy"))])
    ends = np.flatnonzero(tokens == SEPARATOR)
    return [part[part != SEPARATOR].tolist() for part in np.split(tokens, ends + 1)[:-1]]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_documents_are_those_of_a_training(made, tmp_path, capsys):
    assert run(made, tmp_path / "index") == 0
    renderer = ChatRenderer(load_tokenizer(TargetConfig(str(made / "target"))))
    rows = [json.loads(line) for line in (made / "a.jsonl").read_text().splitlines()]
    documents = [each.tokens.tolist() for row in rows for each in renderer(conversation_of(row, "messages", {}, ROLES))]
    assert documents_in(tmp_path / "index") == documents
    tokens = sum(map(len, documents))
    printed = capsys.readouterr().out
    assert f"index: {tokens:,} tokens of {len(documents)} documents in 1 shard" in printed
    drafted = Datastore.open(tmp_path / "index", renderer.tokenizer.get_vocab()).continuations(
        documents[0][:5], depth=3
    )
    assert drafted.match == 5
    assert documents[0][5] in drafted.tokens


def test_plain_texts_are_documents(made, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.md").write_text(f"abc{name}")
    given = ("data=text", f"data.path={tmp_path}/*.md", "limit=1")
    assert run(made, tmp_path / "index", *given) == 0
    tokenizer = load_tokenizer(TargetConfig(str(made / "target")))
    (document,) = documents_in(tmp_path / "index")
    assert tokenizer.decode(document, skip_special_tokens=True) == "abca"


@pytest.fixture(scope="module")
def whole(made) -> dict[str, bytes]:
    """The files of an index of both data sets that was built in one go."""
    assert run(made, made / "whole", *of_both(made)) == 0
    return contents(made / "whole")


def test_a_build_that_was_killed_goes_on_behind_its_last_shard(made, tmp_path, whole, capsys):
    out, given = tmp_path / "index", of_both(made)
    ran = subprocess.run([sys.executable, "-c", KILLED, *arguments(made, out, *given)])
    assert ran.returncode == -signal.SIGKILL
    assert not out.exists()
    assert run(made, out, *given[:-1], "shard_tokens=99") == 2
    assert "was begun with shard_tokens=250, not 99; give another directory, or remove" in capsys.readouterr().err
    assert run(made, out, *given) == 0
    printed = capsys.readouterr()
    assert "goes on after 3 finished shards" in printed.err
    assert "1 rows left out" in printed.out
    assert contents(out) == whole


def test_each_row_is_read_once_wherever_a_build_stops(made, tmp_path, whole, monkeypatch):
    """Between two data sets too, and with a malformed row before and behind."""
    sort = datastore_writer.sorted_suffixes
    shards = len(json.loads(whole["datastore.json"])["shards"])
    assert shards > 4
    for stop in range(1, shards):
        sorted_before = []

        def stopped(tokens, stop=stop, sorted_before=sorted_before):
            sorted_before.append(1)
            if len(sorted_before) > stop:
                raise KeyboardInterrupt
            return sort(tokens)

        monkeypatch.setattr(datastore_writer, "sorted_suffixes", stopped)
        assert run(made, tmp_path / f"{stop}", *of_both(made)) == 130
        monkeypatch.setattr(datastore_writer, "sorted_suffixes", sort)
        assert run(made, tmp_path / f"{stop}", *of_both(made)) == 0
        assert contents(tmp_path / f"{stop}") == whole


def test_data_of_the_hub_stay_at_the_commit_that_a_build_began_with(made, tmp_path, monkeypatch):
    commits, sort, sorted_before = [], datastore_writer.sorted_suffixes, []

    def pinned(data, known):
        commits.append(f"newest {len(commits)}" if known is None else known("data.revision"))
        data.revision = commits[-1]

    def stopped(tokens):
        sorted_before.append(1)
        if len(sorted_before) > 1:
            raise KeyboardInterrupt
        return sort(tokens)

    monkeypatch.setattr(build, "pin", pinned)
    monkeypatch.setattr(datastore_writer, "sorted_suffixes", stopped)
    assert run(made, tmp_path / "index", "shard_tokens=250") == 130
    monkeypatch.setattr(datastore_writer, "sorted_suffixes", sort)
    assert run(made, tmp_path / "index", "shard_tokens=250") == 0
    assert commits == ["newest 0", "newest 0"]


def test_worker_processes_build_the_same(made, tmp_path, whole):
    assert run(made, tmp_path / "index", *of_both(made), "data.workers=1") == 0
    built = contents(tmp_path / "index")
    assert built == whole


def said(printed: str) -> tuple[int, int, int]:
    """Tokens, rows and sampled rows that are told before the build."""
    (line,) = (line for line in printed.splitlines() if "of memory while a shard is sorted" in line)
    words = line.replace(",", "").replace("(", "").split()
    return int(words[2]), int(words[5]), int(words[8])


def test_the_size_is_told_before(made, tmp_path, capsys, monkeypatch):
    assert run(made, tmp_path / "all") == 0
    documents = documents_in(tmp_path / "all")
    exact = sum(map(len, documents)) + len(documents)
    assert said(capsys.readouterr().err) == (exact, 40, 40)
    monkeypatch.setattr(sizes, "SAMPLE", 20)
    assert run(made, tmp_path / "sampled") == 0
    tokens, rows, sampled = said(capsys.readouterr().err)
    assert (rows, sampled) == (40, 20)
    assert tokens != exact
    assert abs(tokens - exact) < exact / 4


def test_the_sample_is_drawn_from_all_rows(monkeypatch):
    """Each row has the same chance, the last ones too."""
    monkeypatch.setattr(sizes, "SAMPLE", 50)
    taken: list[int] = []
    row = namedtuple("row", "source placed")
    feed = namedtuple("feed", "config renderer")(namedtuple("config", "sources")({"": None}), None)
    monkeypatch.setattr(sizes, "rows_from", lambda *_: (row("", number) for number in range(1000)))
    monkeypatch.setattr(sizes, "render", lambda placed, *_: taken.append(placed) or placed)
    monkeypatch.setattr(sizes, "received", lambda rendered, _: [])
    assert sizes.size_of(feed, None) == sizes.Size(1000, 0, 50)
    assert taken[:50] == list(range(50))
    assert len(taken) == pytest.approx(50 * (1 + np.log(1000 / 50)), rel=0.3)


def test_a_disk_without_room_is_told_and_nothing_is_left(made, tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9000, 0, 4000))
    assert run(made, tmp_path / "index") == 2
    told = rf"error: out={tmp_path / 'index'}: needs about \d\.\d KiB, and its disk has 3\.9 KiB left; give another"
    assert re.search(told, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9000, 0, 9000))
    assert run(made, tmp_path / "index") == 0


def test_a_build_that_goes_on_needs_room_for_the_rest_alone(made, tmp_path, monkeypatch):
    sort, sorted_before = datastore_writer.sorted_suffixes, []

    def stopped(tokens):
        sorted_before.append(1)
        if len(sorted_before) > 3:
            raise KeyboardInterrupt
        return sort(tokens)

    monkeypatch.setattr(datastore_writer, "sorted_suffixes", stopped)
    assert run(made, tmp_path / "index", "shard_tokens=250") == 130
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9000, 0, 4000))  # of about 8600 that all of it takes
    monkeypatch.setattr(datastore_writer, "sorted_suffixes", sort)
    assert run(made, tmp_path / "index", "shard_tokens=250") == 0


def test_held_out_data_are_not_read(made, tmp_path):
    assert run(made, tmp_path / "index", "data.heldout=none.jsonl") == 0


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["limit=0"], "limit=0: must be at least 1, or null"),
        (["shard_tokens=0"], "shard_tokens=0: must be from 1 to "),
        (["out=''"], "out is empty: give out=DIR"),
        (["data.path=none.jsonl"], "data.path is none.jsonl; there is no such file"),
        (["data.malformd=skip"], "data.malformd"),
        (["target=none/at/all"], "target.path=none/at/all: no such directory"),
    ],
)
def test_mistakes_are_told_in_one_line(made, tmp_path, capsys, overrides, told):
    assert run(made, tmp_path / "index", *overrides) == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert "Traceback" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_malformed_row_ends_the_build_unless_it_is_skipped(made, tmp_path, capsys):
    path = f"data.path={made / 'b.jsonl'}"
    assert run(made, tmp_path / "index", path) == 2
    assert f"error: {made / 'b.jsonl'}:21: " in capsys.readouterr().err
    assert run(made, tmp_path / "index", path, "data.malformed=skip") == 0
    printed = capsys.readouterr()
    assert "of 40 documents" in printed.out
    assert "1 rows left out" in printed.out


def test_an_index_that_is_there_stays(made, tmp_path, capsys):
    assert run(made, tmp_path / "index") == 0
    before = contents(tmp_path / "index")
    assert run(made, tmp_path / "index") == 2
    assert "index: exists; give another directory, or remove it" in capsys.readouterr().err
    assert contents(tmp_path / "index") == before


def test_several_processes_are_refused(made, tmp_path, capsys, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert run(made, tmp_path / "index") == 2
    assert "WORLD_SIZE=2: eagle-datastore runs in one process" in capsys.readouterr().err
