"""corpus/file_formats.py: a file that is not what its name says is told by what it is, with what to do."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from eagle_train.corpus import file_formats
from eagle_train.corpus.rows import parse
from eagle_train.corpus.source import DataConfig, check_found, open_source
from eagle_train.errors import UserError

ROW = json.dumps({"messages": [{"role": "user", "content": "é"}]}, ensure_ascii=False) + "\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def zipped() -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("a.jsonl", ROW)
    return packed.getvalue()


def zstandard() -> bytes:
    return pa.Codec("zstd").compress(ROW.encode(), asbytes=True)


def tarred() -> bytes:
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as archive:
        archive.addfile(member := tarfile.TarInfo("a.jsonl"), io.BytesIO(b""))
        assert member.size == 0
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        *((f"a{suffix}", POINTER, "is a Git LFS pointer instead of the data: fetch the data with git lfs pull")
          for suffix in (".jsonl", ".json", ".jsonl.gz", ".json.zst", ".parquet", ".arrow")),
        *(("a.jsonl", ROW.encode(code), "is UTF-16 or UTF-32 text: convert it with iconv -f UTF-16 -t UTF-8")
          for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")),
        ("a.json.gz", gzip.compress(ROW.encode("utf-16")), "is UTF-16 or UTF-32 text"),
        ("a.jsonl", zipped(), "is a zip archive: unpack it"),
        ("a.jsonl.gz", zipped(), "is a zip archive: unpack it"),
        ("a.jsonl", gzip.compress(ROW.encode()), r"is gzip data: its name must end in \.gz"),
        ("a.jsonl", zstandard(), r"Zstandard data: its name must end in \.zst"),
        ("a.jsonl.gz", gzip.compress(tarred()), "is a tar archive"),
        ("a.jsonl", b"PAR1....", r"is Parquet: its name must end in \.parquet"),
        ("a.parquet", b"<!DOCTYPE html>\n<html>", "is HTML or XML, perhaps a web page"),
        ("a.parquet", gzip.compress(b""), "is gzip data"),
        ("a.jsonl", bytes(9), "begins with NUL bytes alone"),
        ("a.jsonl", ROW.encode()[:9] + bytes(9), "jsonl:1: holds NUL bytes"),
        ("a.jsonl", ROW.encode("latin-1"), "jsonl:1: not UTF-8: "),
    ],
)  # fmt: skip
def test_what_a_file_is_in_truth(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path / 'a'}.*{told}"):
        parse(*next(open_source(DataConfig(str(tmp_path / name))).rows()))
    if "jsonl:1" not in told:  # no row was read
        with pytest.raises(UserError, match=told):
            check_found(DataConfig("x/y", heldout=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.csv", "a.csv is CSV: give the directory that it is in, or convert it to JSONL"),
        ("a.TSV", "is CSV: "),
        ("a.txt", "is plain text: data=text reads it, a file as one text"),
        ("a.jsonl.xz", "of an unsupported compression: unpack it"),
        ("a.zip", "of an unsupported compression: unpack it"),
        ("a.tar.gz", "of an unsupported compression: unpack it"),
        ("a.pkl", "of an unsupported format: convert it to JSONL"),
        ("rows", r"files must be all JSON \(.jsonl, .jsonl.gz, .jsonl.zst, .*or all Parquet .*, not .*/rows"),
    ],
)
def test_what_is_not_read_by_its_name(tmp_path, name, told):
    (tmp_path / name).write_text(ROW)
    for path in (tmp_path / name, tmp_path / f"{name[:-1]}*"):
        with pytest.raises(UserError, match=rf"^data\.path is {str(path).replace('*', '[*]')}; .*{told}"):
            check_found(DataConfig(str(path)))


def test_names_are_read_in_capitals_too(tmp_path):
    (tmp_path / "A.JSONL").write_text(ROW)
    assert len(list(open_source(DataConfig(str(tmp_path / "A.JSONL"))).rows())) == 1


def test_each_file_of_a_glob_is_looked_at_before_any_is_read(tmp_path):
    for name, content in {"a": ROW.encode(), "b": POINTER}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"b\.jsonl: is a Git LFS pointer"):
        check_found(DataConfig(str(tmp_path / "*.jsonl")))


@pytest.mark.parametrize(
    ("path", "told"),
    [("https://host/a.jsonl", "download the file first"), ("~/a.jsonl", r"write \$HOME instead of ~")],
)
def test_paths_that_are_of_no_file_are_told_why(path, told):
    with pytest.raises(UserError, match=rf"there is no such file; .*{told}"):
        check_found(DataConfig(path))


def test_a_compressed_files_name_may_be_in_a_directory_of_any_name(tmp_path: Path):
    (tmp_path / "d.gz").mkdir()
    (tmp_path / "d.gz" / "a.jsonl").write_text(ROW)
    assert len(list(open_source(DataConfig(str(tmp_path / "d.gz" / "a.jsonl"))).rows())) == 1


def test_what_a_compressed_file_holds_is_checked_as_its_own_kind(tmp_path, monkeypatch):
    """Text of this code is refused as JSON alone."""
    path = tmp_path / "a.other.gz"
    path.write_bytes(gzip.compress(ROW.encode("utf-16-le")))
    monkeypatch.setitem(file_formats.KINDS, "Other", (".other.gz",))
    file_formats.check_contents(str(path))
