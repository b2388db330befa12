"""How results are told on the page: numbers with intervals, configs as overrides, captions. Texts are plain."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_train.cli import quoted
from eagle_train.errors import typed
from evals.bench.page.blocks import Block, Facts, Notes, Table
from evals.bench.page.cautions import cautions, prompts_of
from evals.bench.page.gather import TRAINING, Source
from evals.bench.report import sampled, several
from evals.bench.suites import given_of, suite_of

ABOUT: tuple[str, ...] = (
    "target",
    "draft",
    "drafter",
    "drafters",
    "tree",
    "trees",
    "study",
    "batch_size",
    "batch_sizes",
    "context_lengths",
)
# What of a config its caption tells.
ABOUT += ("questions", "documents", "tasks", "limit", "repeats", "temperature", "max_tokens", "acceptance", "device")
_SHORT = {"target.path": "target", "draft.path": "draft"}  # keys that an override may call so
# Keys of a training run's config that its caption tells, and how an override says them.
OF_TRAINING = {"target.path": "target", "draft.kind": "draft", "draft.num_layers": "draft.num_layers"}
OF_TRAINING |= {key: key for key in ("data.path", "optim.lr", "optim.tokens_per_step", "train.steps", "train.minutes")}
EVALUATIONS = {path.stem for path in Path(__file__).parents[2].glob("*.py")}
_WHOLE = ("drafters", "tasks")  # keys whose mappings are one value on a command line
_PLAIN = re.compile(r"[\w./+-]*[a-z/][\w./+-]*", re.IGNORECASE)  # a text that Hydra reads as one wherever it stands


def spread(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    """`1.19 (1.05 to 1.38)`, or the value alone, or nothing."""
    if value is None:
        return ""
    told = f"{value:,.{digits}f}"
    return told if interval is None else f"{told} ({interval[0]:,.{digits}f} to {interval[1]:,.{digits}f})"


def percents(shares: Sequence[float]) -> list[str]:
    """Shares in percent, without the sign."""
    return [f"{100 * share:.1f}" for share in shares]


def overrides(config: Any, key: str = "") -> list[tuple[str, str]]:
    """A config as dotted keys with values as an override has them; what is null or empty is left out."""
    if isinstance(config, Mapping) and config:
        above = f"{key}." if key else ""
        return [pair for name, value in config.items() for pair in overrides(value, f"{above}{name}")]
    if config is None or config in ({}, []):
        return []
    return [(key, f"[{', '.join(map(typed, config))}]" if isinstance(config, list) else typed(config))]


def command(source: Source) -> str:
    """The command that makes such a result, with the settings that matter most; empty where no single one does."""
    if source.evaluation != TRAINING and source.evaluation not in EVALUATIONS:
        return ""
    if source.evaluation == TRAINING:
        given = dict(overrides(source.config))
        said = [f"{name}={given[key]}" for key, name in OF_TRAINING.items() if key in given]
        return shlex.join(["eagle-train", *said])
    config = {key: source.config.get(key) for key in ABOUT}
    config |= {"study": (config["study"] or {}).get("name"), "tree": _tree(config["tree"])}
    config["draft"] = config["draft"] if (config["draft"] or {}).get("path") else None
    config["target"] = {"path": (config["target"] or {}).get("path")}
    config["drafter"] = source.found.get("drafter")  # by its name; all its options are in the config
    own = sampled(source.config) if "temperature" in source.config else {}
    config |= {key: str(value).replace("'", "") for key, value in own.items()}  # a mapping as one types it
    config |= {key: as_value(config[key]) for key in _WHOLE if isinstance(config[key], Mapping | list)}
    said = [f"{_SHORT.get(key, key)}={value}" for key, value in overrides(config)]
    return shlex.join(["python", "-m", f"evals.{source.evaluation}", *said, *_suite(source.config.get("suite"))])


def _suite(values: Any) -> list[str]:
    """A suite by its name, and its keys that were given."""
    name = suite_of(values)
    if name is None:
        return []
    given = (
        (key, as_value(each) if isinstance(each, Mapping) else typed(each))
        for key, each in given_of(values, name).items()
    )
    return [f"suite={name}", *(f"suite.{key}={value}" for key, value in given)]


def as_value(value: Any) -> str:
    """A value within a mapping or a list, as Hydra reads it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_value, value))}]"
    is_free = isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in ("null", "true", "false"))
    return quoted(value) if is_free else typed(value)


def _tree(tree: Any) -> Any:
    """A chain by its name; any other tree as it is."""
    is_chain = isinstance(tree, Mapping) and str(tree.get("_target_", "")).endswith(".chain")
    return f"chain{tree['length']}" if is_chain else tree


def hardware(source: Source) -> str:
    """The processor that did the work, in a few words; empty where it was not written."""
    made = source.provenance
    if made.get("gpu"):
        return str(made["gpu"])
    said = [made.get("cpu"), made.get("instructions"), made and f"{made.get('threads')} of {made.get('cores')} cores"]
    return ", ".join(str(each) for each in said if each)


def count_of(source: Source) -> str:
    """How many prompts and repeats a result is over; empty where it does not say."""
    prompts, repeats = prompts_of(source), source.config.get("repeats")
    said = [] if prompts is None else [several(prompts, "prompt")]
    return ", ".join(said + ([several(repeats, "repeat")] if repeats else []))


def origin_of(source: Source) -> list[Block]:
    """How a result was made, and what not to conclude from it; what stands below each result."""
    made = source.provenance
    load = " ".join(f"{each:g}" for each in made.get("load_average") or [])
    top = [
        ("command, in the main", command(source)),
        ("date", str(source.found.get("date") or "not written")),
        ("hardware", hardware(source) or "not written"),
        ("over", count_of(source)),
    ]
    more = [(name, str(value)) for name, value in made.items() if value is not None and name != "load_average"]
    blocks: list[Block] = []
    if said := cautions(source):
        blocks.append(Notes("What not to conclude", said))
    blocks.append(Facts("How it was made", [pair for pair in top if pair[1]], folded=False))
    blocks.append(Facts("Versions and hardware", [*more, ("load average", load)] if made else []))
    blocks.append(Facts("Config", overrides(source.config)))
    return [block for block in blocks if not (isinstance(block, Facts) and not block.items)]


def in_columns(caption: str, first: str, columns: Mapping[str, Sequence[str]], names: Sequence[str]) -> Table:
    """A table from its columns, of which the first names the rows."""
    rows = [[name, *(column[place] for column in columns.values())] for place, name in enumerate(names)]
    return Table(caption, [first, *columns], rows)
