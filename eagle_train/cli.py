"""How a command starts: Hydra's overrides, `--help`, signals, and a user's mistake as its end.

Knows nothing of models, data or training, and nothing that computes imports it. DESIGN sections 3.10, 3.11.
"""

import functools
import io
import logging
import os
import re
import select
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle_train.errors import UserError, check, one_line, report
from eagle_train.fields import bases, defaults_of
from eagle_train.hydra_private import argument_parser
from eagle_train.misread import BESIDE, HELP, SHORT, added, is_group, misread, one_of
from eagle_train.settings import CONF_DIR, PACKAGE
from eagle_train.terminal import log_to_stderr, printable
from eagle_train.tree_names import TREES, tree_of
from eagle_train.usage import usage

_LOG = logging.getLogger(__name__)
COMMANDS = "commands"  # where in conf/ their YAMLs are; all other folders are groups
PLACEHOLDER = re.compile(r"(\\*)\$\{")  # what OmegaConf would fill in

TEXTS = ("prompt", "grammar.regex", "grammar.ebnf", "data.assistant_pattern")
# Mappings whose keys are the user's own.
OPEN = (
    *("data.template_kwargs.", "target.template_kwargs.", "data.roles.", "suite.columns."),
    *("study.variants.", "study.decoding.", "study.trees."),
)

TRAINING = ("train", "cache")  # commands whose `draft` is a kind and its settings, not a directory
FORMAT_WARNING = warnings.formatwarning  # Python's own
OWN = (PACKAGE, PACKAGE.parent / "evals", PACKAGE.parent / "data")  # where our code is


def is_value(override: str, parser: OverridesParser) -> bool:
    """Whether Hydra reads `key=value` as one value; free text it would refuse, or split at its commas."""
    try:
        return not parser.parse_override(override).is_sweep_override()
    except HydraException:
        return False


def as_typed(override: str, parser: OverridesParser) -> str:
    """An override as Hydra should read it: a value that is no Hydra expression (free text, say) is quoted."""
    key, equals, value = override.partition("=")
    if not equals or override.startswith("-"):
        return override
    if key in TEXTS and value:  # text, whatever it looks like: 42, null, {a: b}, ${x}
        value = PLACEHOLDER.sub(lambda m: m[1] * 2 + "\\${", value)
        return f"{key}={quoted(value)}"
    key = f"++{key}" if f"{key}.".startswith(OPEN) and value not in ("null", "{}") else key
    return f"{key}={value}" if is_value(override, parser) else f"{key}={quoted(value)}"


def quoted(value: str) -> str:
    """A text in Hydra's quotes, where a backslash escapes only quotes and, before them, itself."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), value) + "'"


# Of these one holds; given on the command line, it takes the place of the other, which a preset may have.
EITHER = {"train.steps": "train.minutes", "train.minutes": "train.steps"}


def with_others_off(overrides: list[str]) -> list[str]:
    """The overrides, and null for the other of `EITHER` where one is given alone."""
    given = {override.partition("=")[0] for override in overrides}
    off = {key: other for key, other in EITHER.items() if other not in given and f"{key}=null" not in overrides}
    pairs = ((override, off.get(override.partition("=")[0])) for override in overrides)
    # Beside it: the end is for Hydra's own options, see `overrides_first`.
    return [each for override, other in pairs for each in (override, *([] if other is None else [f"{other}=null"]))]


OWN_DRAFTERS = ("drafter=file", "drafter=mine")  # options of the group whose keys are the user's own


def with_own_keys(overrides: list[str]) -> list[str]:
    """The overrides, where `drafter.KEY=VALUE` may be any key if the drafter is the user's own."""
    is_own = any(override in OWN_DRAFTERS for override in overrides)
    return [f"++{each}" if is_own and each.startswith("drafter.") else each for each in overrides]


def offer_trees(arguments: Iterable[str]) -> None:
    """Let Hydra find the trees that `tree=NAME` asks for without a YAML, and some more that configs begin with."""
    given = [argument.partition("=") for argument in arguments]
    asked = [name for key, _, value in given if key.lstrip("+") == "tree" for name in value.split(",")]
    for name in (*TREES, *asked):
        if (tree := tree_of(name.strip())) is not None:
            ConfigStore.instance().store(name.strip(), tree, group="tree", provider="eagle_train")


offer_trees(())
for _group, _option in bases():
    ConfigStore.instance().store(_option, defaults_of(_group, _option), group=_group, provider="eagle_train")


def named_path(override: str, command: str = "train") -> list[str]:
    """`target=X`, `draft=X`, `tree=X.yaml`, `drafter=X.yaml`, where X is no YAML of the group but a path or hub id.

    A tree's other names are left to Hydra, see `offer_trees`.
    """
    key, _, value = override.partition("=")
    if key not in ("target", "draft", "tree", "drafter") or not value or value.startswith("{"):
        return [override]
    has_kinds = key != "draft" or command in TRAINING  # elsewhere it is a directory, whatever its name
    if has_kinds and (CONF_DIR / key / f"{value}.yaml").exists():
        return [override]
    if key in ("tree", "drafter") and not value.endswith(".yaml"):
        return [override]
    short = {
        "draft": ["draft.path="],
        "drafter": ["drafter=file", "drafter.file="],
        "target": ["target=hf", "target.path="],
        "tree": ["tree=table", "tree.table="],
    }
    return [*short[key][:-1], short[key][-1] + value]


def check_overrides(config_name: str, arguments: list[str]) -> None:
    """Compose once before Hydra does, so that an unknown key, or one not given, is one line and told at once."""
    given = divided(arguments)
    if given.config_dir or given.config_path:  # files beside ours
        return
    for overrides in jobs_of(given.overrides) if given.multirun else [given.overrides]:
        config = compose(given.config_name or config_name, overrides)
        if not given.cfg and not given.info:  # it will run
            check_complete(config)


def jobs_of(overrides: list[str]) -> list[list[str]]:
    """Overrides of some jobs of a multirun, in which each value of a sweep is there once; without patterns of choices,
    which always fit."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException:  # `compose` tells what is wrong
        return [overrides]
    given = [pair for pair in zip(overrides, parsed, strict=True) if pair[1].value_type != ValueType.GLOB_CHOICE_SWEEP]
    values = [list(each.sweep_string_iterator()) if each.is_sweep_override() else [] for _, each in given]

    def job(number: int) -> list[str]:
        chosen = zip(given, values, strict=True)
        return [
            f"{each.get_key_element()}={own[min(number, len(own) - 1)]}" if own else as_given
            for (as_given, each), own in chosen
        ]

    return [job(number) for number in range(max(map(len, values), default=0) or 1)]


def divided(arguments: list[str]) -> Namespace:
    """Hydra's own options and, as `overrides`, the rest, in any order. Raises UserError for options that do not fit."""
    parser = argument_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_intermixed_args(arguments)


def overrides_first(arguments: Iterable[str]) -> list[str]:
    """Arguments with Hydra's own options at their end: its parser does not take overrides on both sides of these."""
    options = list(arguments)
    overrides = divided(options).overrides
    for override in overrides:
        options.remove(override)
    return [*overrides, *options]


def refuse(message: str) -> NoReturn:
    """What argparse is to do, which would print its usage."""
    raise UserError(f"{message} (keys are given as KEY=VALUE; --help tells them)")


def check_complete(config: DictConfig) -> None:
    """Raise UserError for values left at `???`, or taken from a key that is not there."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
    except OmegaConfBaseException as error:
        raise UserError(one_line(error)) from error
    are = "is" if len(missing) == 1 else "are"
    wanted = " ".join(f"{SHORT.get(key, key)}=VALUE" for key in missing)
    check(not missing, f"{', '.join(missing)} {are} needed: give {wanted}")


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """A command's config with these overrides. Raises UserError for one that does not fit."""
    overrides = with_others_off(overrides)
    offer_trees(overrides)
    place = config_name if "/" in config_name else f"{COMMANDS}/{config_name}"  # Hydra's --config-name has the folder
    try:
        config = composed(place, overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(told_of(overrides, config_name, place) or f"{one_line(error)} {HELP}") from error
    wrong = added(overrides, lambda right: composed(place, right))
    check(wrong is None, str(wrong))
    return config


def composed(place: str, overrides: list[str], return_hydra_config: bool = False) -> DictConfig:
    """What Hydra makes of a YAML in conf/ and overrides."""
    if GlobalHydra.instance().is_initialized():  # a command is running
        return hydra.compose(place, overrides, return_hydra_config)
    with hydra.initialize_config_dir(str(CONF_DIR.resolve()), version_base="1.3"):
        return hydra.compose(place, overrides, return_hydra_config)


def told_of(overrides: list[str], config_name: str, place: str) -> str | None:
    """What is wrong with the first override that does not fit the config at `place`, where that is known."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "draft.path" and config_name in TRAINING:  # see `named_path`
            return f"draft={value}: {one_of('draft', value)}; what gives weights to begin with is train.init_from=DIR"
    if not (CONF_DIR / f"{place}.yaml").is_file():
        return f"--config-name {config_name}: there is no {place}.yaml in {CONF_DIR}"
    return misread(overrides, lambda right: composed(place, right, return_hydra_config=True))


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Makes `task(config)` a command with Hydra's overrides.

    A UserError ends it with one line on stderr and status 2; so do an unknown override, a value left at `???`, and a
    file or directory that the user may not open. An interrupt ends it with one line, too.
    """

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=str(CONF_DIR.resolve()), config_name=f"{COMMANDS}/{config_name}")
        @functools.wraps(task)
        def run(config: DictConfig) -> None:
            from eagle_train.hardware import keep_to_quota  # with torch, which the task's module has loaded

            try:
                check_complete(config)
                keep_to_quota()
                with ending_with_its_reader():
                    task(config)
            except OmegaConfBaseException as error:
                sys.exit(report(UserError(one_line(error))))
            except PermissionError as error:  # of any file that is the user's to open
                if error.filename is None:
                    raise
                sys.exit(report(UserError(f"{error.filename}: {error.strerror}")))
            except UserError as error:  # caught here, because Hydra would add its own lines to it
                sys.exit(report(error))
            except KeyboardInterrupt:
                _LOG.info("interrupted")
                sys.exit(128 + signal.SIGINT)  # as shells have it

        @functools.wraps(task)
        def main() -> None:
            sys.argv[1:] = parse_arguments(config_name)
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of evals/__init__.py, until all is imported
                signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # what is no user's mistake keeps its traceback
            run()

        return main

    return decorate


def parse_arguments(config_name: str) -> list[str]:
    """The command line's overrides, as Hydra parses them. `--help` and an invalid override end the process here."""
    tell_plainly()
    if {"-h", "--help"} & set(sys.argv[1:]):
        try:
            given = choices(config_name, sys.argv[1:])
        except UserError as error:
            sys.exit(report(error))
        with ending_with_its_reader():
            print(usage(CONF_DIR, config_name, BESIDE, given))
        sys.exit()
    multirun = bool({"-m", "--multirun"} & set(sys.argv))
    try:
        arguments = as_overrides(config_name, overrides_first(sys.argv[1:]), multirun)
        check_overrides(config_name, arguments)
    except UserError as error:
        sys.exit(report(error))
    return arguments


def choices(config_name: str, arguments: Iterable[str]) -> dict[str, str]:
    """The groups' options among a command's arguments. Raises UserError for one that there is not."""
    words = [each for each in arguments if not each.startswith("-")]
    pairs = [each.partition("=") for each in as_overrides(config_name, words)]
    chosen = {key: option for key, equals, option in pairs if equals and is_group(key) and not option.startswith("{")}
    no_kind = [f"{key}={value}" for key, _, value in pairs if key == "draft.path" and config_name in TRAINING]
    if chosen or no_kind:
        compose(config_name, [*(f"{group}={option}" for group, option in chosen.items()), *no_kind])
    return chosen


def as_overrides(config_name: str, arguments: Iterable[str], multirun: bool = False) -> list[str]:
    """A command's arguments as a user gives them, `target=PATH` for short, as Hydra's overrides."""
    parser = OverridesParser.create()
    given = [override for argument in arguments for override in named_path(argument, config_name)]
    overrides = with_own_keys(with_others_off(given))
    offer_trees(overrides)
    return overrides if multirun else [as_typed(each, parser) for each in overrides]


def tell_plainly() -> None:
    """From here on our warnings and log records are one line each, and no character fails for want of an encoding."""
    log_to_stderr()
    warnings.formatwarning = warning_text
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as it is printed: where in the code it arose is told of other libraries' alone."""
    if category is UserWarning and any(Path(filename).is_relative_to(folder) for folder in OWN):
        return f"warning: {printable(' '.join(str(message).split()))}\n"
    return FORMAT_WARNING(message, category, filename, lineno, line)


@contextmanager
def ending_with_its_reader() -> Iterator[None]:
    """All that is printed is read, or the process ends as one does whose reader has left, without a traceback."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
        sys.exit(128 + signal.SIGPIPE)


def reader_left() -> bool:
    """Whether nobody reads any more what is printed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are told whatever is asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))
