"""Results on disk, for the report: found, read, and named by the evaluation that made them. DESIGN section 3.8."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from eagle_train.errors import UserError, check, foreign, one_line, shown
from eagle_train.results import finite, redact
from eagle_train.terminal import printable

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration, RuntimeError, OSError)
"""What reading a result raises that another version wrote, or another program under the same name."""
METRICS = "metrics.jsonl"
RESULTS = "results.json"
ANSWERS, OF_ANSWERS = "answers.jsonl", "mt_bench"  # rows for each turn, and the evaluation that writes them
SUMMED = ("tokens", "calls")  # of the answers, whose sums the result has
TRAINING = "training"  # the evaluation's name that a training run's metrics get
_DEEPEST = 3  # how far within a file of several results these are looked for


@dataclass(frozen=True)
class Source:
    """One result. `name`: its path, and its key in a file of several; `evaluation`: what made it; `found`: what was
    written; `answers`: the rows of answers.jsonl beside it. Texts have no control characters, as a page can have none.
    """

    name: str
    evaluation: str
    found: Mapping[str, Any]
    answers: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    @property
    def config(self) -> Mapping[str, Any]:
        """The config it was made with; empty where none was written."""
        return self.found.get("config") or {}

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Versions, hardware and load; empty where they were not written."""
        return self.found.get("provenance") or {}


def gather(places: Sequence[str] | None, field: str = "results") -> list[Source]:
    """All results in these files and directories; None: those below outputs/, or else the published ones.

    Raises UserError, naming `field`, for a place that is not there, for a file that is no result, and where there is
    none.
    """
    if places is None:
        return _first_with_results([Path("outputs"), Path("evals/results")])
    sources: list[Source] = []
    for place in places:
        path = Path(place)
        check(path.exists(), f"{field}={place}: not there")
        found = _below(path) if path.is_dir() else _of_file(path)
        told = "no evaluation's result is there; one has the key `evaluation`, which older ones lack: measure again"
        check(len(found) > 0, f"{field}={place}: {told}")
        sources += found
    return sources


def _first_with_results(places: Iterable[Path]) -> list[Source]:
    for place in places:
        if place.is_dir() and (found := _below(place)):
            return found
    raise UserError("results: nothing was found below outputs/ or evals/results; give results=[DIR]")


def _below(directory: Path) -> list[Source]:
    paths = sorted(path for pattern in ("*.json", METRICS) for path in directory.rglob(pattern))
    return [source for path in paths if path.is_file() for source in _unless_broken(_of_file, path) or []]


def _unless_broken(read: Callable[[Path], T], path: Path) -> T | None:
    """What is read of a file that no user named; None, and a warning, for one that is broken."""
    try:
        return read(path)
    except UserError as error:
        _LOG.warning("left out: %s", error)
        return None


def _of_file(path: Path) -> list[Source]:
    """The results of a file; none where it is another file of JSON. Raises UserError for one that is broken."""
    if path.name == METRICS:
        return [_training(path)]
    text = _bytes_of(path)
    # A tokenizer's or a config's JSON is not parsed; a result is, also one that ends before it says that it is one.
    is_result = path.name == RESULTS or b'"evaluation"' in text
    return list(_within(json_of(text, path), path.as_posix(), path)) if is_result else []


def _within(found: Any, name: str, path: Path, depth: int = 0) -> Iterator[Source]:
    if not isinstance(found, Mapping) or depth > _DEEPEST:
        return
    if isinstance(found.get("evaluation"), str):
        answers = _answers(path.with_name(ANSWERS), found, name) if found["evaluation"] == OF_ANSWERS else []
        yield _source(name, found["evaluation"], found, answers)
        return
    for key, value in found.items():
        yield from _within(value, f"{name}: {key}", path, depth + 1)


def _source(name: str, evaluation: str, found: Mapping[str, Any], answers: Sequence[Mapping[str, Any]] = ()) -> Source:
    """The result, with texts for a page. Raises UserError where what every result has is of another type."""
    for key in ("config", "provenance"):
        value = found.get(key)
        check(value is None or isinstance(value, Mapping), f"{name}: {key}={shown(value)}: must be a mapping")
    date, rows = found.get("date"), found.get("rows", [])
    check(date is None or isinstance(date, str), f"{name}: date={shown(date)}: must be a text")
    are_rows = isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows)
    check(are_rows, f"{name}: rows={shown(rows)}: must be a list of mappings")
    return Source(printable(name), printable(evaluation), _printable(found), answers)


def _printable(found: Any) -> Any:
    """The same with all texts as `printable` has them."""
    if isinstance(found, Mapping):
        return {printable(str(key)): _printable(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_printable(value) for value in found]
    return printable(found) if isinstance(found, str) else found


def _answers(path: Path, found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The answers beside a result; none where there are none, where they are broken, and where they are of another run,
    whose tokens and calls are others."""
    rows = _unless_broken(_answer_rows, path) if path.is_file() else None
    if rows is None:
        return []
    sums = {key: sum(row[key] for row in rows) for key in SUMMED}
    told = {key: found.get(key) for key in SUMMED}
    if sums != told:
        _LOG.warning("left out: %s: %s in all; it is of another run than %s, which has %s", path, sums, name, told)
    return rows if sums == told else []


def _answer_rows(path: Path) -> list[Mapping[str, Any]]:
    rows = _rows(_bytes_of(path).splitlines(), path)
    counted = all(isinstance(row.get(key), int) for row in rows for key in SUMMED)
    check(counted, f"{path}: each line must have {' and '.join(SUMMED)}, whole numbers")
    return rows


def _training(path: Path) -> Source:
    """A training run, from its records and the config beside them. A last line without its end was torn by a kill."""
    lines, beside = _bytes_of(path).splitlines(keepends=True), path.with_name("config.yaml")
    records = _rows([line for line in lines if line.endswith(b"\n")], path)
    config = (_unless_broken(_config_of, beside) if beside.is_file() else None) or {}
    return _source(path.as_posix(), TRAINING, {"records": records, "config": config})


def _config_of(path: Path) -> Mapping[str, Any]:
    with foreign(f"{path}"):
        config = redact(OmegaConf.to_container(OmegaConf.load(path)))
    check(isinstance(config, Mapping), f"{path}: must be a mapping")
    return config


def _rows(lines: Iterable[bytes], path: Path) -> list[Mapping[str, Any]]:
    rows = [json_of(line, path) for line in lines]
    check(all(isinstance(row, Mapping) for row in rows), f"{path}: each line must be a mapping")
    return rows


def _bytes_of(path: Path) -> bytes:
    with foreign(f"{path}"):
        return path.read_bytes()


def json_of(text: bytes, path: Path) -> Any:
    """The text of a file as JSON, with null for NaN and infinities, which other programs write. Raises UserError that
    names the file."""
    try:
        return finite(json.loads(text))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested without end
        raise UserError(f"{path}: no JSON: {one_line(error)}") from error
