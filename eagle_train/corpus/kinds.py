"""What kind of file a file is, by its name and by its first bytes. What we do not read is told with what to do."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from eagle_train.errors import UserError, check, one_line

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}
JSON_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".json", ".ndjson") for packed in ("", *COMPRESSIONS))
KINDS = {"JSON": JSON_SUFFIXES, "Parquet": (".parquet",), "Arrow": (".arrow",)}
FILE_SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)
HEAD = 1 << 16  # bytes that are looked at

UNPACK = "unpack it, and give what is in it"
UTF_16 = "UTF-16 or UTF-32 text: convert it with iconv -f UTF-16 -t UTF-8 FILE > NEW"
SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer in the data's place: fetch the data with git lfs pull",
    b"\x1f\x8b": "gzip data: let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "Zstandard data: let its name end in .zst",
    b"PAR1": "Parquet: let its name end in .parquet",
    b"ARROW1": "Arrow: let its name end in .arrow",
    b"PK\x03\x04": f"a zip archive: {UNPACK}",
    b"BZh": f"bzip2 data: {UNPACK}",
    b"\xfd7zXZ\x00": f"xz data: {UNPACK}",
    b"7z\xbc\xaf": f"a 7-Zip archive: {UNPACK}",
    b"SQLite format 3": "a SQLite database: write its rows as JSONL",
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"\x00\x00\xfe\xff": UTF_16,
    b"<": "HTML or XML, a web page perhaps in the place of a download",
}
OWN = {"Parquet": b"PAR1", "Arrow": b"ARROW1", "gzip": b"\x1f\x8b", "Zstandard": b"\x28\xb5\x2f\xfd"}
NAMES = {
    (".csv", ".tsv"): "CSV: a directory of CSV files is read; give the one that it is in, or write it as JSONL",
    (".txt", ".md"): "plain text: write it as JSONL, {'text': ...} a line, for data=text",
    (".zip", ".tar", ".tar.gz", ".tgz", ".7z", ".bz2", ".xz", ".rar"): f"packed in a way that is not read: {UNPACK}",
    (".xls", ".xlsx", ".pkl", ".pickle", ".npy", ".npz", ".pt", ".h5", ".db"): "of no kind that is read: write JSONL",
    (".yaml", ".yml"): "YAML: write it as JSONL",
}


def kind_of(file: str) -> str | None:
    """JSON, Parquet or Arrow, by the file's name; None for others."""
    return next((kind for kind, suffixes in KINDS.items() if file.lower().endswith(suffixes)), None)


def advice(file: str) -> str | None:
    """What a file is whose name says that we do not read it."""
    return next((told for suffixes, told in NAMES.items() if file.lower().endswith(suffixes)), None)


def compression_of(file: str) -> str | None:
    return next((name for suffix, name in COMPRESSIONS.items() if file.lower().endswith(suffix)), None)


def check_contents(file: str) -> None:
    """Raise UserError for a file that cannot be read, or whose first bytes are of another kind than its name says."""
    kind = compression_of(file) or kind_of(file)
    check_head(file, read_head(file, compressed=True), kind)
    if compression_of(file):
        check_head(file, read_head(file), "JSON")


def check_head(file: str, head: bytes, kind: str | None) -> None:
    for signature, told in SIGNATURES.items():
        check(not head.startswith(signature) or OWN.get(kind) == signature, f"{file}: is {told}")
    hollow = head != b"" and head.strip(b"\0") == b""
    check(not hollow, f"{file}: begins with nothing but NUL bytes, as a file does that was not written to its end")
    check(head[257:262] != b"ustar", f"{file}: is a tar archive: {UNPACK}")
    if kind == "JSON":
        check(json.detect_encoding(head[:4]).startswith("utf-8"), f"{file}: is {UTF_16}")


def read_head(file: str, compressed: bool = False) -> bytes:
    """A file's first bytes; `compressed`: as they lie on the disk."""
    with reading(file, compressed) as stream:
        return stream.read(HEAD)


@contextmanager
def reading(file: str, compressed: bool = False) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed unless told otherwise. Raises UserError where it cannot be read, and where what is
    compressed is not, or is cut short."""
    packing = None if compressed else compression_of(file)
    try:
        with open_file(file, packing) as stream:
            yield stream
    except (EOFError, zlib.error, OSError) as error:
        damaged = packing is not None and getattr(error, "errno", None) is None  # not the disk's error
        told = f"not {packing}, or not all of it" if damaged else "cannot be read"
        raise UserError(f"{file}: {told}: {one_line(error)}") from error


def open_file(file: str, packing: str | None) -> IO[bytes]:
    if packing == "gzip":
        return gzip.open(file)
    if packing == "Zstandard":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(open(file, "rb"), "zstd"), HEAD)
    return open(file, "rb")


def go_to(stream: IO[bytes], offset: int) -> None:
    """Go on from a byte of a file that was just opened; what is compressed is read to there."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset > 0 and (read := len(stream.read(min(offset, HEAD)))):
        offset -= read
