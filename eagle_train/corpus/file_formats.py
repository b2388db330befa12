"""File formats: recognised by name and checked by first bytes. For an unsupported one, errors say what to do."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from eagle_train.errors import UserError, check, one_line

_COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}
_JSON_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".json", ".ndjson") for packed in ("", *_COMPRESSIONS))
KINDS = {
    "JSON": _JSON_SUFFIXES,
    "Parquet": (".parquet",),
    "Arrow": (".arrow",),
}
FILE_SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)
PLAIN = "plain text"  # the kind of a file that is one text, whatever its name; data.format=text alone reads it
_PLAIN_SUFFIXES = (".txt", ".md")
HEAD = 1 << 16  # bytes that are inspected

_UNPACK = "unpack it, and give what is in it"
_CSV = "CSV: give the directory that it is in, or convert it to JSONL"
_UTF_16 = "UTF-16 or UTF-32 text: convert it with iconv -f UTF-16 -t UTF-8 FILE > NEW"
_SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer instead of the data: fetch the data with git lfs pull",
    b"\x1f\x8b": "gzip data: its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "Zstandard data: its name must end in .zst",
    b"PAR1": "Parquet: its name must end in .parquet",
    b"ARROW1": "Arrow: its name must end in .arrow",
    b"PK\x03\x04": f"a zip archive: {_UNPACK}",
    b"BZh": f"bzip2 data: {_UNPACK}",
    b"\xfd7zXZ\x00": f"xz data: {_UNPACK}",
    b"7z\xbc\xaf": f"a 7-Zip archive: {_UNPACK}",
    b"SQLite format 3": "a SQLite database: export its rows to JSONL",
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"\x00\x00\xfe\xff": _UTF_16,
    b"<": "HTML or XML, perhaps a web page instead of a download",
}
_OWN = {"Parquet": b"PAR1", "Arrow": b"ARROW1", "gzip": b"\x1f\x8b", "Zstandard": b"\x28\xb5\x2f\xfd"}
_OWN[PLAIN] = b"<"  # a text may be HTML
_NAMES = {
    (".csv",): _CSV,
    (".tsv",): _CSV,
    _PLAIN_SUFFIXES: "plain text: data=text reads it, a file as one text",
    (".zip", ".tar", ".tar.gz", ".tgz", ".7z", ".bz2", ".xz", ".rar"): f"of an unsupported compression: {_UNPACK}",
    (
        ".xls",
        ".xlsx",
        ".pkl",
        ".pickle",
        ".npy",
        ".npz",
        ".pt",
        ".h5",
        ".db",
    ): "of an unsupported format: convert it to JSONL",
    (".yaml", ".yml"): "YAML: convert it to JSONL",
}


def kind_of(file: str, takes_plain: bool = False) -> str | None:
    """JSON, Parquet or Arrow, by the file's name; None for others.

    `takes_plain`: PLAIN for those others that are not known to be something else.
    """
    known = next((kind for kind, suffixes in KINDS.items() if file.lower().endswith(suffixes)), None)
    is_plain = file.lower().endswith(_PLAIN_SUFFIXES) or advice(file) is None
    return PLAIN if known is None and takes_plain and is_plain else known


def advice(file: str) -> str | None:
    """What a file of an unsupported format is, by its name, and what to do; None for others."""
    return next((what for suffixes, what in _NAMES.items() if file.lower().endswith(suffixes)), None)


def _compression_of(file: str) -> str | None:
    return next((name for suffix, name in _COMPRESSIONS.items() if file.lower().endswith(suffix)), None)


def check_contents(file: str, takes_plain: bool = False) -> None:
    """Raise UserError for a file that cannot be read, or whose first bytes are of another format than its name.
    `takes_plain`: see `kind_of`."""
    kind = _compression_of(file) or kind_of(file, takes_plain)
    _check_head(file, read_head(file, compressed=True), kind)
    if _compression_of(file):
        _check_head(file, read_head(file), kind_of(file, takes_plain))


def _check_head(file: str, head: bytes, kind: str | None) -> None:
    own = None if kind is None else _OWN.get(kind)
    for signature, found in _SIGNATURES.items():
        check(not head.startswith(signature) or own == signature, f"{file}: is {found}")
    hollow = head != b"" and head.strip(b"\0") == b""
    check(not hollow, f"{file}: begins with NUL bytes alone, so it was not written completely")
    check(head[257:262] != b"ustar", f"{file}: is a tar archive: {_UNPACK}")
    if kind == "JSON":
        check(json.detect_encoding(head[:4]).startswith("utf-8"), f"{file}: is {_UTF_16}")


def read_head(file: str, compressed: bool = False) -> bytes:
    """A file's first bytes; `compressed`: without decompression."""
    with reading(file, compressed) as stream:
        return stream.read(HEAD)


@contextmanager
def reading(file: str, compressed: bool = False) -> Iterator[io.BufferedIOBase]:
    """A file's bytes, decompressed unless `compressed`. Raises UserError for a file that cannot be read, or whose
    compressed data is invalid or incomplete."""
    packing = None if compressed else _compression_of(file)
    try:
        with open_file(file, packing) as stream:
            yield stream
    except (EOFError, zlib.error, OSError) as error:
        damaged = packing is not None and getattr(error, "errno", None) is None  # else an error of the disk
        problem = f"not {packing}, or incomplete" if damaged else "cannot be read"
        raise UserError(f"{file}: {problem}: {one_line(error)}") from error


def open_file(file: str, packing: str | None) -> io.BufferedIOBase:
    if packing == "gzip":
        return gzip.open(file)
    if packing == "Zstandard":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(open(file, "rb"), "zstd"), HEAD)
    return open(file, "rb")


def go_to(stream: io.BufferedIOBase, offset: int) -> None:
    """Skip to a byte of a file that was just opened; a compressed file is read up to it."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset > 0 and (read := len(stream.read(min(offset, HEAD)))):
        offset -= read
