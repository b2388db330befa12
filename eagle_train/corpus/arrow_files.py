"""Rows of Parquet and Arrow files, of a directory that `datasets` saved, and of a hub data set: all are Arrow's."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_train.corpus.json_files import files_identity
from eagle_train.corpus.kinds import check_contents, kind_of
from eagle_train.corpus.rows import ArrowRow, PlacedRow, Row
from eagle_train.errors import UserError, check, one_line

BATCH_ROWS = 256  # in memory at a time
INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"  # that `save_to_disk` writes
NO_DATA = (INFO, STATE, SPLITS, "dataset_infos.json", "config.json")


class Parquet:
    """Rows of Parquet files, a batch of a row group at a time. Raises UserError for one that is none or is damaged."""

    def __init__(self, files: list[str]):
        self.files = files

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        for file in self.files:
            with open_parquet(file) as table:
                yield from rows_of(table, file, start)
                start = max(0, start - table.metadata.num_rows)


def open_parquet(file: str) -> Any:
    # Loaded where needed: most data is JSONL, and every command pays for imports.
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except ValueError as error:
        raise UserError(f"{file}: not Parquet: {one_line(error)}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error


def rows_of(table: Any, file: str, start: int) -> Iterator[PlacedRow]:
    """Rows of an open Parquet file from number `start` on; row groups before it are not read."""
    first = 0
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group).num_rows
        if first + size > start:
            rows = enumerate(group_rows(table, group, file), first)
            yield from ((f"{file}: row {number + 1}", row) for number, row in rows if number >= start)
        first += size


def group_rows(table: Any, group: int, file: str) -> Iterator[ArrowRow]:
    try:
        for batch in table.iter_batches(BATCH_ROWS, row_groups=[group]):
            yield from (ArrowRow(batch, number) for number in range(batch.num_rows))
    except (OSError, ValueError) as error:  # behind a footer that is whole
        raise UserError(f"{file}: row group {group + 1} is damaged: {one_line(error)}") from error


class Arrow:
    """Rows of Arrow files, of either of Arrow's two formats, where they lie on the disk (memory-mapped)."""

    def __init__(self, files: list[str]):
        self.files = files

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        for file in self.files:
            table = map_arrow(file)
            number = start
            for batch in table.slice(start).to_batches(BATCH_ROWS):
                for row in range(batch.num_rows):
                    number += 1
                    yield f"{file}: row {number}", ArrowRow(batch, row)
            start = max(0, start - table.num_rows)


def map_arrow(file: str) -> Any:
    """A file as a pyarrow.Table that takes no memory. Raises UserError for one that is damaged or none."""
    import pyarrow

    try:
        memory = pyarrow.memory_map(file)
        is_file = memory.read(6) == b"ARROW1"
        memory.seek(0)
        return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(memory).read_all()
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not Arrow, or not all of it: {one_line(error)}") from error


def is_saved(path: str) -> bool:
    """Whether a directory is what `save_to_disk` of `datasets` wrote."""
    return any(all(os.path.isfile(os.path.join(path, name)) for name in names) for names in ((INFO, STATE), (SPLITS,)))


def saved_files(path: str, split: str, field: str) -> list[str]:
    """The Arrow files of a Dataset, or of a split of a DatasetDict, that was saved to disk. `field`: of the config.

    Raises UserError for a split that is not there, and for a directory that is not whole."""
    directory, where = Path(path), f"{field} is {path}"
    if (directory / SPLITS).is_file():
        splits = read_json(directory / SPLITS).get("splits", [])
        wanted = f"{key_of(field)} must be one of {', '.join(splits)}"
        check(split in splits, f"{where}, which has no split {split!r}; {wanted}")
        return saved_files(str(directory / split), "", field)
    check((directory / STATE).is_file(), f"{where}; {directory / STATE} is missing: is all of it there?")
    state = read_json(directory / STATE)
    own = state.get("_split")
    alone = f"{where}, one data set without splits"
    check(split in ("", "train", own), f"{alone}{f', but for {own}' if own else ''}; {key_of(field)} is {split!r}")
    old = state.get("_indices_data_files")
    check(not old, f"{where}; an old `datasets` saved it as a choice of rows: save it again with one of today")
    files = [str(directory / each["filename"]) for each in state.get("_data_files", [])]
    for file in files:
        check(Path(file).is_file(), f"{where}; {file} is missing: is all of it there?")
        check_contents(file)
    check(bool(files), f"{where}; {STATE} names no files")
    return files


def key_of(field: str) -> str:
    """The config's key of the split that goes with a path."""
    return f"{field.rpartition('.')[0]}.split"


def read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error
    check(isinstance(values, dict), f"{file}: must hold a JSON object")
    return values


class Hub:
    """A hub data set, or a directory laid out like one, through `datasets`. Raises UserError where it does not load, or
    not all of it."""

    def __init__(self, path: str, name: str | None, split: str, field: str):
        # Loaded where needed: it takes a second.
        import datasets

        self.place = f"{path} ({f'{name}, ' if name else ''}{split})"
        try:
            self.dataset = datasets.load_dataset(path, name, split=split, streaming=True)
        except Exception as error:  # a file's reader raises what it likes
            raise UserError(f"{field} is {path}; it is no file, and no data set: {one_line(error)}") from error

    def identity(self) -> str:
        info = self.dataset.info  # told by the hub, as far as it knows
        return f"{self.place} {info.version} {info.dataset_size}"

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        rows = enumerate(self.read(self.dataset.skip(start)), start + 1)
        while True:
            try:
                number, row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # of another shard, of other columns
                raise UserError(f"{self.place}: cannot be read to its end: {one_line(error)}") from error
            yield f"{self.place}: row {number}", row

    def read(self, dataset: Any) -> Iterator[Row | ArrowRow]:
        """Rows of a datasets.IterableDataset; Python's own where types are not known (CSV), for they may change."""
        if dataset.features is None:
            yield from dataset
            return
        for table in dataset.with_format("arrow").iter(BATCH_ROWS):
            for batch in table.to_batches():
                yield from (ArrowRow(batch, number) for number in range(batch.num_rows))


def check_directory(directory: Path, field: str) -> None:
    """Raise UserError for files of several kinds, of which `datasets` would read those of one and say nothing, and for
    files that are not what their names say. A README may say which are meant."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file() and file.name not in NO_DATA]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(directory).parts)]
    kinds = Counter(kind_of(file.name) or "CSV" for file in files if kind_of(file.name) or file.suffix == ".csv")
    found = ", ".join(f"{kind} ({number})" for kind, number in kinds.items())
    told = f"{field} is {directory}, which holds files of several kinds: {found}; give a glob, {directory}/*.jsonl, say"
    check(len(kinds) < 2 or (directory / "README.md").exists(), told)
    for file in files:
        zstandard = f"{field} is {directory}; {file.name} is read from there by a glob alone: give {directory}/*.zst"
        check(file.suffix != ".zst", zstandard)  # for which `datasets` wants a package more
        if kind_of(file.name):
            check_contents(str(file))
