"""Results on disk, for the report: found, read, and named by the evaluation that made them. DESIGN section 3.8."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle_train.errors import UserError, check, foreign, one_line
from eagle_train.results import redact

_LOG = logging.getLogger(__name__)
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What reading a result raises that another version wrote, or another program under the same name."""
METRICS = "metrics.jsonl"
TRAINING = "training"  # the evaluation's name that a training run's metrics get
_DEEPEST = 3  # how far within a file of several results these are looked for


@dataclass(frozen=True)
class Source:
    """One result. `name`: its path, and its key in a file of several; `evaluation`: what made it; `found`: what was
    written; `answers`: the rows of answers.jsonl beside it."""

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
        found = _below(path) if path.is_dir() else list(_of_file(path))
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
    return [source for path in paths for source in _of_file(path, named=False)]


def _of_file(path: Path, named: bool = True) -> Iterator[Source]:
    """The results of a file; none where it is another file of JSON. `named`: by the user; of other files that are no
    JSON after all, none."""
    if path.name == METRICS:
        yield _training(path)
        return
    text = path.read_bytes()
    if b'"evaluation"' in text:  # a tokenizer's or a config's JSON is not parsed
        try:
            found = json_of(text, path)
        except UserError as error:
            if named:
                raise
            _LOG.warning("left out: %s", error)
            return
        yield from _within(found, path.as_posix(), path)


def _within(found: Any, name: str, path: Path, depth: int = 0) -> Iterator[Source]:
    if not isinstance(found, Mapping) or depth > _DEEPEST:
        return
    if isinstance(found.get("evaluation"), str):
        yield Source(name, found["evaluation"], found, _answers(path.with_name("answers.jsonl")))
        return
    for key, value in found.items():
        yield from _within(value, f"{name}: {key}", path, depth + 1)


def _answers(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        return []
    return [json_of(line, path) for line in path.read_bytes().splitlines()]


def _training(path: Path) -> Source:
    """A training run, from its records and the config beside them. A last line without its end was torn by a kill."""
    lines = path.read_bytes().splitlines(keepends=True)
    records = [json_of(line, path) for line in lines if line.endswith(b"\n")]
    beside = path.with_name("config.yaml")
    with foreign(f"{beside}"):
        config = redact(OmegaConf.to_container(OmegaConf.load(beside))) if beside.is_file() else {}
    return Source(path.as_posix(), TRAINING, {"records": records, "config": config})


def json_of(text: bytes, path: Path) -> Any:
    """The text of a file as JSON. Raises UserError that names the file."""
    try:
        return json.loads(text)
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"{path}: no JSON: {one_line(error)}") from error
