"""inference/lookup/datastore_writer.py: shard by shard, resumed after a kill, whole or not there."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle_train.errors import UserError
from eagle_train.inference.lookup import datastore_writer
from eagle_train.inference.lookup.datastore import Datastore
from eagle_train.inference.lookup.datastore_writer import DatastoreWriter, made_of_earlier
from tests.support.command_line import disk_for
from tests.support.datastores import fill, vocabulary_of, write_datastore

DOCUMENTS = [random.Random(number).choices(range(30), k=number % 23) for number in range(200)]
SHARD_TOKENS = 300
KILLED = f"""
import os, signal, sys
from pathlib import Path
from eagle_train.inference.lookup import datastore_writer
from tests.support.datastores import fill, vocabulary_of

sort, sorted_before = datastore_writer.sorted_suffixes, []

def killed(tokens):
    sorted_before.append(1)
    if len(sorted_before) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return sort(tokens)

datastore_writer.sorted_suffixes = killed
writer = datastore_writer.DatastoreWriter(Path(sys.argv[1]), {{"data": "a"}}, vocabulary_of(64), {SHARD_TOKENS}, 0)
fill(writer, {DOCUMENTS})
"""


def writer_at(out: Path, made_of: dict | None = None, shard_tokens: int = SHARD_TOKENS) -> DatastoreWriter:
    return DatastoreWriter(out, {"data": "a"} if made_of is None else made_of, vocabulary_of(64), shard_tokens, 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    """The files of an index that was built in one go."""
    out = tmp_path_factory.mktemp("whole") / "store"
    writer = writer_at(out)
    fill(writer, DOCUMENTS)
    writer.close()
    return contents(out)


def test_counts_and_shards(tmp_path):
    store = Datastore.open(write_datastore(tmp_path / "store", DOCUMENTS, SHARD_TOKENS))
    header = store.header
    assert header.documents == sum(map(bool, DOCUMENTS))
    assert header.tokens == sum(map(len, DOCUMENTS)) == sum(shard.suffixes for shard in header.shards)
    assert all(SHARD_TOKENS <= shard.tokens < SHARD_TOKENS + 24 for shard in header.shards[:-1])
    assert len(header.shards) > 5
    told = json.loads((tmp_path / "store" / "datastore.json").read_text())
    assert (told["tokens"], told["documents"], told["vocabulary"]) == (header.tokens, header.documents, 64)


def test_a_build_that_was_killed_goes_on_behind_its_last_shard(tmp_path, whole, monkeypatch):
    out = tmp_path / "store"
    ran = subprocess.run([sys.executable, "-c", KILLED, str(out)])
    assert ran.returncode == -signal.SIGKILL
    assert not out.exists()
    assert made_of_earlier(out) == {"data": "a"}
    sorted_again = []
    sort = datastore_writer.sorted_suffixes
    monkeypatch.setattr(datastore_writer, "sorted_suffixes", lambda tokens: sorted_again.append(1) or sort(tokens))
    writer = writer_at(out)
    assert len(writer.shards) == 3
    assert writer.tokens == sum(map(len, DOCUMENTS[: writer.place])) > 0
    fill(writer, DOCUMENTS)
    writer.close()
    assert contents(out) == whole
    assert len(sorted_again) == len(writer.shards) - 3
    assert not writer.partial.exists()


def begun(out: Path, documents: int = 120) -> DatastoreWriter:
    """A build that stopped in the middle."""
    writer = writer_at(out)
    fill(writer, DOCUMENTS[:documents])
    assert len(writer.shards) >= 3
    return writer


@pytest.mark.parametrize("kind", ["tokens", "suffixes"])
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_shard_that_is_damaged_is_built_again(tmp_path, whole, caplog, kind, damage):
    out = tmp_path / "store"
    file = begun(out).partial / f"00001.{kind}.npy"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-5] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    writer = writer_at(out)
    assert len(writer.shards) == 1
    assert "shard 1 is damaged: it is built again" in caplog.text
    fill(writer, DOCUMENTS)
    writer.close()
    assert contents(out) == whole


def test_an_index_that_is_there_or_of_other_texts_is_refused(tmp_path):
    out = write_datastore(tmp_path / "store", DOCUMENTS)
    with pytest.raises(UserError, match=f"^out={out}: exists; give another directory, or remove it"):
        writer_at(out)
    out = tmp_path / "other"
    partial = begun(out).partial
    with pytest.raises(UserError, match=f"was begun with data=a, not b; give another directory, or remove {partial}"):
        writer_at(out, {"data": "b"})
    (partial / "progress.json").unlink()
    with pytest.raises(UserError, match="is there, and no build began it; remove it"):
        writer_at(out)


def test_nothing_to_index_is_refused(tmp_path):
    writer = writer_at(tmp_path / "store")
    fill(writer, [[], []])
    with pytest.raises(UserError, match="the data hold no token"):
        writer.close()
    assert not (tmp_path / "store").exists()


def test_a_full_disk_is_told_and_the_build_goes_on_behind_it(tmp_path, whole):
    out = tmp_path / "store"
    writer = writer_at(out)
    fill(writer, DOCUMENTS[:60])
    with disk_for(1000), pytest.raises(UserError, match=f"^out={out}: cannot be written: .*the same command resumes"):
        fill(writer, DOCUMENTS)
    writer = writer_at(out)
    fill(writer, DOCUMENTS)
    writer.close()
    assert contents(out) == whole


def test_the_size_on_disk(tmp_path):
    writer = writer_at(tmp_path / "store")
    fill(writer, DOCUMENTS)
    writer.close()
    stored = sum(np.load(file).nbytes for file in (tmp_path / "store").glob("*.npy"))
    assert writer.disk_bytes == stored
