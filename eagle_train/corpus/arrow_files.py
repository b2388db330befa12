"""Rows of Parquet and Arrow files, of a directory that `datasets` saved, and of a hub data set: all through Arrow."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_train.corpus.file_formats import check_contents, kind_of
from eagle_train.corpus.json_files import files_identity
from eagle_train.corpus.rows import ArrowRow, PlacedRow, Row
from eagle_train.errors import UserError, check, foreign, one_line

_COMMIT = re.compile("[0-9a-f]{40}")
_BATCH_ROWS = 256  # rows in memory at a time
_INFO, _STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"  # that `save_to_disk` writes
_NO_DATA = (_INFO, _STATE, _SPLITS, "dataset_infos.json", "config.json")


class Parquet:
    """Rows of Parquet files, a batch of a row group at a time. Raises UserError for an invalid or damaged file."""

    def __init__(self, files: list[str]):
        self.files = files

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        for file in self.files:
            with _open_parquet(file) as table:
                yield from _rows_of(table, file, start)
                start = max(0, start - table.metadata.num_rows)


def _open_parquet(file: str) -> Any:
    # Imported where needed: most data is JSONL, and every command would pay for the import.
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except ValueError as error:
        raise UserError(f"{file}: not Parquet: {one_line(error)}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error


def _rows_of(table: Any, file: str, start: int) -> Iterator[PlacedRow]:
    """Rows of an open Parquet file from number `start` on; row groups before it are not read."""
    first = 0
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group).num_rows
        if first + size > start:
            rows = enumerate(_group_rows(table, group, file), first)
            yield from ((f"{file}: row {number + 1}", row) for number, row in rows if number >= start)
        first += size


def _group_rows(table: Any, group: int, file: str) -> Iterator[ArrowRow]:
    try:
        for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group]):
            yield from (ArrowRow(batch, number) for number in range(batch.num_rows))
    except (OSError, ValueError) as error:  # the footer was valid
        raise UserError(f"{file}: row group {group + 1} is damaged: {one_line(error)}") from error


class Arrow:
    """Rows of memory-mapped Arrow files, of either of Arrow's two formats."""

    def __init__(self, files: list[str]):
        self.files = files

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        for file in self.files:
            table = _map_arrow(file)
            number = start
            for batch in table.slice(start).to_batches(_BATCH_ROWS):
                for row in range(batch.num_rows):
                    number += 1
                    yield f"{file}: row {number}", ArrowRow(batch, row)
            start = max(0, start - table.num_rows)


def _map_arrow(file: str) -> Any:
    """A memory-mapped file as a pyarrow.Table. Raises UserError for an invalid or damaged file."""
    import pyarrow

    try:
        memory = pyarrow.memory_map(file)
        is_file = memory.read(6) == b"ARROW1"
        memory.seek(0)
        return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(memory).read_all()
    except (OSError, ValueError) as error:
        problem = "not Arrow, or incomplete" if getattr(error, "errno", None) is None else "cannot be read"
        raise UserError(f"{file}: {problem}: {one_line(error)}") from error


def is_saved(path: str) -> bool:
    """Whether a directory was written by `save_to_disk` of `datasets`."""
    return any(
        all(os.path.isfile(os.path.join(path, name)) for name in names) for names in ((_INFO, _STATE), (_SPLITS,))
    )


def is_dictionary(path: str) -> bool:
    """Whether `save_to_disk` wrote several splits there, a DatasetDict."""
    return os.path.isfile(os.path.join(path, _SPLITS))


def saved_splits(path: str) -> list[str | None] | None:
    """The splits of a DatasetDict that was saved to disk, or the one that a saved Dataset says it is, None where it
    says none; None for another directory."""
    if not is_saved(path):
        return None
    if is_dictionary(path):
        return list(_read_json(Path(path) / _SPLITS).get("splits", []))
    return [_read_json(Path(path) / _STATE).get("_split")]


def saved_files(path: str, split: str, field: str) -> list[str]:
    """The Arrow files of a Dataset, or of a split of a DatasetDict, that was saved to disk.

    `field`: the config's, for errors. Raises UserError for a missing split and an incomplete directory.
    """
    directory, where = Path(path), f"{field} is {path}"
    if (directory / _SPLITS).is_file():
        splits = _read_json(directory / _SPLITS).get("splits", [])
        wanted = f"{_key_of(field)} must be one of {', '.join(splits)}"
        check(split in splits, f"{where}, which has no split {split!r}; {wanted}")
        return saved_files(str(directory / split), "", field)
    check((directory / _STATE).is_file(), f"{where}; {directory / _STATE} is missing: is it complete?")
    state = _read_json(directory / _STATE)
    own = state.get("_split")
    alone = f"{where}, one data set without splits"
    check(split in ("", "train", own), f"{alone}{f', but for {own}' if own else ''}; {_key_of(field)} is {split!r}")
    old = state.get("_indices_data_files")
    check(
        not old, f"{where}; an old version of `datasets` saved it as indices of rows: save it again with a current one"
    )
    files = [str(directory / each["filename"]) for each in state.get("_data_files", [])]
    for file in files:
        check(Path(file).is_file(), f"{where}; {file} is missing: is it complete?")
        check_contents(file)
    check(bool(files), f"{where}; {_STATE} names no files")
    return files


def _key_of(field: str) -> str:
    """The config's key of the split that belongs to a path."""
    return f"{field.rpartition('.')[0]}.split"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error
    check(isinstance(values, dict), f"{file}: must hold a JSON object")
    return values


def commit_of(path: str, revision: str | None, field: str) -> str | None:
    """The commit of a hub data set's branch or tag, None for its main branch. What is given, where the hub may not be
    asked. Raises UserError where the hub knows no such data set or revision."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(revision or ""):
        return revision
    at = f" at revision {revision}" if revision else ""
    with foreign(f"{field} is {path}; it is no file, and no data set of the hub{at}"):
        return huggingface_hub.dataset_info(path, revision=revision).sha


class Hub:
    """A hub data set at a `revision`, or a directory laid out like one, through `datasets`. Raises UserError if it
    cannot be read."""

    def __init__(self, path: str, name: str | None, split: str, field: str, revision: str | None = None):
        # Imported where needed: it takes a second.
        import datasets

        self.place, self.revision = f"{path} ({f'{name}, ' if name else ''}{split})", revision
        at = {} if revision is None else {"revision": revision}
        try:
            self.dataset = datasets.load_dataset(path, name, split=split, streaming=True, **at)
        except Exception as error:  # readers of files may raise anything
            raise UserError(f"{field} is {path}; it is no file, and no data set: {one_line(error)}") from error

    def identity(self) -> str:
        info = self.dataset.info  # what the hub reports
        return f"{self.place} {info.version} {info.dataset_size}{f' {self.revision}' if self.revision else ''}"

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        rows = enumerate(self._rows_of(self.dataset.skip(start)), start + 1)
        while True:
            try:
                number, row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # a later shard may be damaged or have other columns
                raise UserError(f"{self.place}: cannot be read to its end: {one_line(error)}") from error
            yield f"{self.place}: row {number}", row

    def _rows_of(self, dataset: Any) -> Iterator[Row | ArrowRow]:
        """Rows of a datasets.IterableDataset: as Python objects where the types are unknown (CSV) and may change."""
        if dataset.features is None:
            yield from dataset
            return
        for table in dataset.with_format("arrow").iter(_BATCH_ROWS):
            for batch in table.to_batches():
                yield from (ArrowRow(batch, number) for number in range(batch.num_rows))


def check_directory(directory: Path, field: str) -> None:
    """Raise UserError for files of several formats, of which `datasets` would silently read one, and for files whose
    contents are of another format than their names. A README may declare which files are meant."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file() and file.name not in _NO_DATA]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(directory).parts)]
    kinds = Counter(kind_of(file.name) or "CSV" for file in files if kind_of(file.name) or file.suffix == ".csv")
    found = ", ".join(f"{kind} ({number})" for kind, number in kinds.items())
    problem = (
        f"{field} is {directory}, which holds files of several kinds: {found}; give a glob, as {directory}/*.jsonl"
    )
    check(len(kinds) < 2 or (directory / "README.md").exists(), problem)
    for file in files:
        zstandard = f"{field} is {directory}; {file.name} is read only through a glob: give {directory}/*.zst"
        check(file.suffix != ".zst", zstandard)  # `datasets` needs one more package for it
        if kind_of(file.name):
            check_contents(str(file))
