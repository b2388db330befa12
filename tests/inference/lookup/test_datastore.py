"""inference/lookup/datastore.py: lookups against a search through all documents, and what is no datastore."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle_train.errors import UserError
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.lookup.datastore import Datastore
from eagle_train.inference.lookup.suffix_array import ORDER, TOKEN_LIMIT
from tests.support.datastores import hits, most_frequent, paths_of, vocabulary_of, write_datastore

ALPHABETS = ([0, 1], [1, 2, 3], [0, 255, 256, 65535, 0xFFFFFF, TOKEN_LIMIT - 1], list(range(40)))


def documents_of(rng: random.Random, alphabet: list[int]) -> list[list[int]]:
    return [rng.choices(alphabet, k=rng.randint(1, 60)) for _ in range(rng.randint(1, 12))]


def context_of(rng: random.Random, documents: list[list[int]], alphabet: list[int]) -> list[int]:
    """The beginning of a document, or other tokens, or one behind the other."""
    document = rng.choice(documents)
    own = document[: rng.randint(0, len(document))]
    return [*rng.choices(alphabet, k=rng.randint(0, 6)), *own][-rng.randint(1, 40) :]


@pytest.mark.parametrize("seed", range(60))
def test_lookups_are_those_of_a_search_through_all_documents(tmp_path, seed):
    rng = random.Random(seed)
    alphabet = ALPHABETS[seed % len(ALPHABETS)]
    documents = documents_of(rng, alphabet)
    store = Datastore.open(write_datastore(tmp_path / "store", documents, shard_tokens=rng.choice([1, 50, 10_000])))
    for _ in range(40):
        context = context_of(rng, documents, alphabet)
        least = rng.randint(1, 3)
        most, depth, nodes = rng.randint(least, ORDER), rng.randint(1, 9), rng.randint(1, 20)
        match, found = hits(documents, context, most, least)
        drafted = store.continuations(context, most, least, max_hits=10_000, depth=depth, max_nodes=nodes)
        assert drafted.match == match
        counts = most_frequent(found, depth, nodes)
        paths = paths_of(drafted.tokens, drafted.parents)
        shares = dict(zip(paths, drafted.frequencies, strict=True))
        assert shares == {path: count / len(found) for path, count in counts.items()}
        Tree((-1, *drafted.parents))  # raises unless nodes are level by level
        siblings = [(parent, -counts[path]) for parent, path in zip(drafted.parents, paths, strict=True)]
        assert siblings == sorted(siblings)


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    store = Datastore.open(write_datastore(tmp_path / "store", [[1, 2, 3, 4]]))
    for context in ([], [2], [9, 9], [3, 1]):
        drafted = store.continuations(context, least_match=2)
        assert (drafted.tokens, drafted.parents, drafted.frequencies, drafted.match) == ([], [], [], 0)
    drafted = store.continuations([3, 4])  # the document ends there
    assert (drafted.tokens, drafted.match) == ([], 2)


def test_of_many_hits_some_are_read_at_equal_distances(tmp_path):
    """900 hits go on with 1 and 100 with 2, in three shards; of 50 that are read it is 45 and 5."""
    documents = [[7, 8, 1]] * 900 + [[7, 8, 2]] * 100
    random.Random(0).shuffle(documents)
    store = Datastore.open(write_datastore(tmp_path / "store", documents, shard_tokens=1400))
    assert len(store.header.shards) == 3
    drafted = store.continuations([7, 8], max_hits=50)
    assert drafted.tokens == [1, 2]
    assert drafted.frequencies == pytest.approx([0.9, 0.1], abs=0.05)
    assert sum(drafted.frequencies) == pytest.approx(1)
    assert drafted == store.continuations([7, 8], max_hits=50)
    assert len(store.continuations([7, 8], max_hits=1).tokens) == 1


def test_another_process_reads_what_this_one_wrote(tmp_path):
    write_datastore(tmp_path / "store", [[1, 2, 3, 4], [1, 2, 3, 5]], shard_tokens=1)
    program = (
        "import sys\nfrom eagle_train.inference.lookup.datastore import Datastore\n"
        "print(Datastore.open(sys.argv[1]).continuations([9, 1, 2]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(Datastore.open(tmp_path / "store").continuations([9, 1, 2]))
    assert "tokens=[3, 4, 5], parents=[0, 1, 1]" in ran.stdout


def changed_header(store: Path, **changes: object) -> None:
    file = store / "datastore.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_no_datastore_is_refused(tmp_path):
    store = write_datastore(tmp_path / "store", [[1, 2, 3]])
    (tmp_path / "begun.partial").mkdir()
    cases = [
        (tmp_path / "none", r"^datastore=.*none: no such directory; give what eagle-datastore wrote"),
        (tmp_path / "begun", r"begun: no such directory; .*begun\.partial is not complete: .* resumes it"),
        (tmp_path, r"no datastore\.json there"),
    ]
    for path, told in cases:
        with pytest.raises(UserError, match=told):
            Datastore.open(path)
    for changes, told in (({"version": 2}, "has version 2, and this reads 1"), ({"shards": [{}]}, "is no header")):
        before = (store / "datastore.json").read_text()
        changed_header(store, **changes)
        with pytest.raises(UserError, match=told):
            Datastore.open(store, field="drafter.datastore")
        (store / "datastore.json").write_text(before)
    (store / "datastore.json").write_text("{")
    with pytest.raises(UserError, match=r"datastore\.json cannot be read"):
        Datastore.open(store)


@pytest.mark.parametrize("kind", ["tokens", "suffixes"])
def test_a_damaged_array_is_refused(tmp_path, kind):
    store = write_datastore(tmp_path / "store", [[1, 2, 3]])
    file = store / f"00000.{kind}.npy"
    whole = file.read_bytes()
    for content, told in ((whole[:20], "cannot be read"), (whole[:-4], "cannot be read"), (b"", "cannot be read")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"00000\.{kind}\.npy {told}"):
            Datastore.open(store)
    np.save(file, np.arange(9))
    with pytest.raises(UserError, match=rf"00000\.{kind}\.npy holds int64 \[9\], not"):
        Datastore.open(store)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot be read: .*No such file"):
        Datastore.open(store)


def test_another_tokenizer_is_refused_with_the_first_difference(tmp_path):
    store = write_datastore(tmp_path / "store", [[1, 2, 3]], vocabulary=10)
    own = vocabulary_of(10)
    Datastore.open(store, own)
    swapped = own | {"t4": 6, "t6": 4}
    cases = [
        (swapped, "token 4 is 't4' there, and 't6' in the target's"),
        (vocabulary_of(9), "token 9 is 't9' there, and none in the target's"),
        (vocabulary_of(12), "token 10 is none there, and 't10' in the target's"),
        ({token: number for token, number in own.items() if number != 3}, "token 3 is 't3' there, and none"),
    ]
    for vocabulary, told in cases:
        with pytest.raises(UserError, match=f"^drafter.datastore={store}: was made for another tokenizer: {told}"):
            Datastore.open(store, vocabulary, field="drafter.datastore")
