"""corpus/json_files.py: rows of lines, arrays and objects over several lines, compressed or not, from any row on."""

import gzip
import io
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from eagle_train.corpus import file_formats, json_files
from eagle_train.corpus.arrow_files import Arrow, Parquet
from eagle_train.corpus.json_files import JsonFiles
from eagle_train.corpus.plain_files import PlainFiles
from eagle_train.corpus.rows import parse
from eagle_train.corpus.source import DataConfig, open_source
from eagle_train.errors import UserError

BOM = b"\xef\xbb\xbf"
TRICKY = ['"', "\\", '\\"', "],", "[{", "}", "\n", "é\u2028", "a,b", ""]


def zstandard(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard}
SHAPES: dict[str, Callable[[list[dict]], str]] = {
    "lines": lambda rows: "\n".join(map(json.dumps, rows)) + "\n\n",
    "array": json.dumps,
    "raw": lambda rows: json.dumps(rows, ensure_ascii=False, separators=(",", ":")),
    "pretty": lambda rows: "\n " + json.dumps(rows, indent=4) + "\n\n",
    "objects": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows),
    "joined": lambda rows: "".join(map(json.dumps, rows)),
    "returns": lambda rows: "\r".join(map(json.dumps, rows)),
    "broken": lambda rows: "\n".join(json.dumps(row).replace(", ", ",\n", 1) for row in rows),
}
PLACES = {"lines": ":{}"} | dict.fromkeys(("objects", "joined", "returns", "broken"), ": object {}")


def tricky_rows(number: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)

    def value(depth: int):
        kind = rng.randrange(6 if depth else 3)
        text = "".join(rng.choices(TRICKY, k=rng.randint(0, 3)))
        if kind == 3:
            return [value(depth - 1) for _ in range(rng.randint(0, 3))]
        return {text: value(depth - 1), "b": None} if kind > 3 else (text, 1.5, None)[kind]

    return [{"id": i, "value": value(3)} for i in range(number)]


def write(path: Path, rows: list[dict], shape: str = "lines", bom: bytes = b"") -> Path:
    path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](bom + SHAPES[shape](rows).encode()))
    return path


def read(source: JsonFiles, start: int = 0) -> list[tuple[str, dict]]:
    return [(place, parse(place, row)) for place, row in source.rows(start)]


@pytest.mark.parametrize("bom", [b"", BOM], ids=["", "bom"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suffix", PACK)
def test_every_shape_of_a_file_gives_its_rows_and_their_places(tmp_path, suffix, shape, bom):
    rows = tricky_rows(30)
    path = write(tmp_path / f"rows.json{suffix}", rows, shape, bom)
    told = read(open_source(DataConfig(str(path))))
    assert [row for _, row in told] == rows
    named = PLACES.get(shape, ": element {}")
    assert [place for place, _ in told] == [f"{path}{named.format(i + 1)}" for i in range(30)]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_where_an_array_is_read_in_parts_does_not_show(tmp_path, monkeypatch, size):
    monkeypatch.setattr(json_files, "CHUNK", size)
    rows = tricky_rows(12, seed=size)
    for shape in ("array", "raw", "pretty", "objects"):
        assert [row for _, row in read(JsonFiles([str(write(tmp_path / "a.json", rows, shape))]))] == rows


@pytest.mark.parametrize("suffix", PACK)
def test_a_source_goes_on_at_a_mark_of_another_without_reading_what_is_before(tmp_path, monkeypatch, suffix):
    """Files of all shapes in one glob; the places are those of a reading from the start."""
    monkeypatch.setattr(json_files, "MARK_ROWS", 5)
    rows = tricky_rows(96)
    files = [
        str(write(tmp_path / f"{i}.json{suffix}", rows[12 * i : 12 * i + 12], shape)) for i, shape in enumerate(SHAPES)
    ]
    first = JsonFiles(files)
    told = read(first)
    assert [row for _, row in told] == rows
    made = []
    monkeypatch.setattr(json_files, "cuts_of", count_cuts(made))
    for start in (0, 3, 11, 12, 13, 37, 59, 95, 96):
        other = JsonFiles(files)
        other.remember(first.mark(start))
        made.clear()
        assert read(other, start) == told[start:]
        assert len(made) <= 96 - start + 5


def count_cuts(made: list) -> Callable:
    cuts_of = json_files.cuts_of

    def counted(*args):
        name, cuts = cuts_of(*args)
        return name, (made.append(0) or cut for cut in cuts)

    return counted


def test_compressions_and_shapes_mix_in_a_glob(tmp_path):
    rows = tricky_rows(12)
    for i, (suffix, shape) in enumerate(zip(PACK, ("lines", "array", "lines"), strict=True)):
        write(tmp_path / f"{i}.jsonl{suffix}", rows[4 * i : 4 * i + 4], shape)
    assert [row for _, row in read(open_source(DataConfig(str(tmp_path / "*"))))] == rows


class Endless(io.RawIOBase):
    """An array that never ends; counts what was read of it."""

    def __init__(self):
        self.parts, self.num_read, self.left = itertools.repeat(b'{"a": "' + b"x" * 991 + b'"},'), 0, b"["

    def read(self, size: int = -1) -> bytes:
        while len(self.left) < size:
            self.left += next(self.parts)
        told, self.left = self.left[:size], self.left[size:]
        self.num_read += len(told)
        return told


def test_a_large_array_is_never_in_memory_whole(monkeypatch):
    opened = []
    monkeypatch.setattr(file_formats, "open_file", lambda *_: opened.append(Endless()) or opened[-1])
    rows = JsonFiles(["endless.json"]).rows()
    assert [parse(*row)["a"][:2] for row in itertools.islice(rows, 3000)] == ["xx"] * 3000
    assert opened[-1].num_read <= 3000 * 1001 + json_files.CHUNK + file_formats.HEAD


def test_rows_are_parsed_when_they_are_needed(tmp_path):
    """One that is malformed has its place, and those behind it are read."""
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, {a: [1, "]"]}, {"b": tru}, [], {"a": 2}]')
    placed = list(JsonFiles([str(path)]).rows())
    assert [parse(*placed[i]) for i in (0, 4)] == [{"a": 1}, {"a": 2}]
    for i, told in ((1, "not JSON: Expecting property name"), (2, "not JSON: Expecting value"), (3, "not list")):
        with pytest.raises(UserError, match=rf"a\.json: element {i + 1}: .*{told}"):
            parse(*placed[i])


def test_a_broken_first_line_is_no_object_of_several(tmp_path):
    """The rows behind it are read."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": [1}\n\n{"a": 2}\n{"a": 3}\n')
    placed = list(JsonFiles([str(path)]).rows())
    assert [place for place, _ in placed] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert parse(*placed[2]) == {"a": 3}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"a": 1}, {"a": 2}', "element 2: the file ends within its array; is it complete"),
        ('[{"a": 1},', "element 2: the file ends within its array"),
        ('[{"a": 1}, {"a": "', "element 2: the file ends within its array"),
        ("[", "element 1: the file ends within its array"),
        ('[{"a": 1}}, {"a": 2}]', r"element 1: not JSON: '}' closes nothing"),
        ('[{"a": 1}]\n[{"a": 2}]', "more follows after the array"),
        ('[{"a": 1},]', "element 2: not JSON: Expecting value"),
        ('[,{"a": 1}]', "element 1: not JSON: Expecting value"),
        ('{\n"a": 1\n}\n{\n"a"', "object 2: not JSON"),
        ('{\n"a": 1\n}\n}\n', "object 2: not JSON: '}' closes nothing"),
        ('{"a": 1}\n{"a": 2', "json:2: not JSON"),
    ],
)
def test_a_file_that_is_not_whole_is_one_line_with_its_place(tmp_path, text, told):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        read(JsonFiles([str(path)]))


def test_a_quote_that_is_missing_does_not_take_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "LONGEST", 1000)
    monkeypatch.setattr(json_files, "CHUNK", 100)
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, {"a: 1}' + ', {"a": 1}' * 999 + "]")
    with pytest.raises(UserError, match=r"element 2: not JSON: it does not end within 1000 bytes"):
        read(JsonFiles([str(path)]))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("shape", ["lines", "array"])
def test_what_is_compressed_and_cut_short_is_one_line(tmp_path, suffix, shape):
    path = write(tmp_path / f"a.json{suffix}", tricky_rows(5000), shape)
    path.write_bytes(path.read_bytes()[:-20])
    name = {".gz": "gzip", ".zst": "Zstandard"}[suffix]
    with pytest.raises(UserError, match=rf"^{path}: not {name}, or incomplete: "):
        read(open_source(DataConfig(str(path))))
    path.write_bytes(b'{"a": 1}\n' * 9)
    with pytest.raises(UserError, match=rf"^{path}: not {name}, or incomplete: "):
        open_source(DataConfig(str(path)))


def test_marks_of_byte_order_within_a_file_are_none_of_its_rows(tmp_path):
    """As where files were put together."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(2 * (BOM + b'{"a": 1}\n{"a": 2}\n'))
    assert [row["a"] for _, row in read(open_source(DataConfig(str(path))))] == [1, 2, 1, 2]


@pytest.mark.parametrize("made", [JsonFiles, PlainFiles, Parquet, Arrow])
def test_files_that_vanish_are_one_line(tmp_path, made):
    """Checkpoints keep the files' sizes, so they look at them while a run lasts."""
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    source = made([str(file)])
    assert source.identity()
    file.unlink()
    for look in (source.identity, lambda: next(source.rows())):
        with pytest.raises(UserError, match=rf"^{file}: cannot be read: .*No such file"):
            look()
