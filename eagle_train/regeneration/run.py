"""A whole run: rows are read, answered and written; an interrupted run continues where it stopped."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from eagle_train.corpus.rows import PlacedRow
from eagle_train.corpus.source import Source, open_source, pin
from eagle_train.distributed import ALONE, World
from eagle_train.inference.requests.sampling_keys import KEYS
from eagle_train.progress import progress
from eagle_train.regeneration.by_engine import answer_by_engine
from eagle_train.regeneration.by_server import answer_by_server
from eagle_train.regeneration.dialogue import dialogue_of
from eagle_train.regeneration.options import RegenerateConfig
from eagle_train.regeneration.outcome import Outcome
from eagle_train.regeneration.row_log import RowLog, earlier_settings
from eagle_train.training.assembly import today

_OF_DATA = ("path", "name", "split", "revision", "format", "columns", "roles", "date")


def regenerate(config: RegenerateConfig, world: World = ALONE) -> None:
    """Write the answers to `config.out` and print the counts. Raises UserError.

    `world`: the ranks that hold the target together. All read the data and answer; the first alone writes. Sets
    `config.data.date` to the date that all render prompts with.
    """
    earlier = world.by_main(lambda: earlier_settings(Path(config.out)))
    pin(config.data, earlier.get if earlier else None, world)
    source = open_source(config.data)
    dialogue_of(1, next(source.rows()), config.data)  # raises before a weight is loaded
    config.data.date = world.by_main(lambda: _date_of(config))
    settings = _settings(config, source.identity())
    log = world.by_main(lambda: RowLog(Path(config.out), settings))  # of which the others use what is done
    last = None if config.limit is None else max(log.done, config.limit)
    again = log.left_out if config.retry_left_out else frozenset()
    first = min([log.done, *(number - 1 for number in again)])
    rows = ((number, row) for number, row in _rows(source, first, last) if number > log.done or number in again)
    dialogues = (dialogue_of(number, placed, config.data) for number, placed in rows)
    answered = answer_by_server(config, dialogues) if config.server.url else answer_by_engine(config, dialogues, world)
    outcome, bar = Outcome(log, config.server), progress(last, "row", first)
    for dialogue in answered:
        if world.is_main:
            outcome.add(dialogue)
            bar.update(dialogue.number, f"{len(outcome.left_out)} left out")
    bar.close()
    if world.is_main:
        outcome.close()


def _rows(source: Source, first: int, last: int | None) -> Iterator[tuple[int, PlacedRow]]:
    """Rows with their numbers, which count from 1: those behind number `first`, up to `last`."""
    return enumerate(islice(source.rows(first), None if last is None else last - first), first + 1)


def _date_of(config: RegenerateConfig) -> str | None:
    """The date that prompts are rendered with: the one that is given, else that of the rows that are there, else today.
    None where a server renders them."""
    if config.server.url:
        return None
    return config.data.date or earlier_settings(Path(config.out)).get("data.date") or today()


def _settings(config: RegenerateConfig, identity: str) -> dict[str, Any]:
    """What the answers depend on: a run continues the file of another only if these are the same."""
    data, target = config.data, config.target
    read = {key: getattr(data, key) for key in _OF_DATA}
    asked: dict[str, Any] = {"target": config.model, "target.chat_template": target.chat_template}
    asked["data.template_kwargs"] = data.template_kwargs
    params = {key: getattr(config.params, key) for key in (*KEYS, "max_tokens", "seed")}
    params["logit_bias"] = {
        str(token): number for token, number in (params["logit_bias"] or {}).items()
    }  # as JSON has it
    return asked | {f"data.{key}": value for key, value in read.items()} | {"data": identity} | params
