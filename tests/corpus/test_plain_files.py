"""corpus/plain_files.py: a file of plain text is one row of data.format=text, and of no other format."""

import gzip
import pickle

import pytest

from eagle_train.corpus import plain_files
from eagle_train.corpus.rows import parse
from eagle_train.corpus.source import DataConfig, check_found, open_source
from eagle_train.errors import UserError

TEXTS = {"a.md": "# A\n", "b.py": "def b():\n    return 'é'\n", "c": "<html>", "d.txt.gz": "packed\n"}


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        content = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return tmp_path


def test_each_file_is_a_row_from_any_number_on(folder):
    source = open_source(DataConfig(f"{folder}/*", format="text"))
    for start in range(len(TEXTS) + 1):
        rows = [(place, parse(place, pickle.loads(pickle.dumps(row)))) for place, row in source.rows(start)]
        assert rows == [(f"{folder}/{name}", {"text": text}) for name, text in list(TEXTS.items())[start:]]


def test_the_identity_changes_with_the_files(folder):
    before = open_source(DataConfig(f"{folder}/*", format="text")).identity()
    (folder / "a.md").write_text("# AB\n")
    assert open_source(DataConfig(f"{folder}/*", format="text")).identity() != before


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("e.txt", "é".encode("latin-1"), "e.txt: not UTF-8: "),
        ("e.txt", "é".encode("utf-16"), "e.txt: is UTF-16 or UTF-32 text"),
        ("e.zip", b"PK\x03\x04", "e.zip is of an unsupported compression"),
        ("e.jsonl", b"{}\n", "there are 3 plain text, 1 JSON: files must be all JSON .*, or all plain text"),
        ("e.txt", b"x" * 99, "e.txt: is one text, and longer than 90 bytes: divide it"),
    ],
)
def test_what_is_no_plain_text(folder, monkeypatch, name, content, told):
    monkeypatch.setattr(plain_files, "LONGEST", 90)
    (folder / "d.txt.gz").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        [parse(*placed) for placed in open_source(DataConfig(f"{folder}/*", format="text")).rows()]


def test_chats_are_no_plain_text(folder):
    with pytest.raises(UserError, match=r"a\.md is plain text: data=text reads it"):
        check_found(DataConfig(f"{folder}/a.md"))
