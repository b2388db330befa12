"""Configuration: where the YAMLs are, how a command starts, and how a user's mistake becomes one line.

Knows nothing of models, data or training: each dataclass lives with the code that reads it. DESIGN sections 3.10, 3.11.
"""

import functools
import io
import json
import math
import os
import re
import reprlib
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn, TypeVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle_train.terminal import printable
from eagle_train.usage import usage

T = TypeVar("T")

PLACEHOLDER = re.compile(r"(\\*)\$\{")  # what OmegaConf would fill in

TEXTS = ("prompt", "grammar.regex", "grammar.ebnf", "data.assistant_pattern")
OPEN = ("data.template_kwargs.", "target.template_kwargs.", "data.roles.")  # mappings whose keys are the user's own

PACKAGE = Path(__file__).parent
# A wheel carries the YAMLs inside the package; in a clone they lie beside it.
CONF_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


CHAIN, FULL = re.compile(r"chain(0|[1-9]\d{0,5})"), re.compile(r"d([1-9]\d{0,5})_bf([1-9]\d{0,5})")
TREES = ("chain1", "chain2", "chain3", "chain5", "d3_bf2")  # of those that have no YAML, some to be shown
ANY_TREE = "any chainN and dM_bfN (depth M, N children each)"
BESIDE = {"target": "or a directory or hub id", "tree": f"or {ANY_TREE}, or FILE.yaml"}  # a group's YAMLs
SHORT = {"target.path": "target", "draft.path": "draft", "tree.table": "tree"}  # see `named_path`
FORMAT_WARNING = warnings.formatwarning  # Python's own
OWN = (PACKAGE, PACKAGE.parent / "evals", PACKAGE.parent / "data")  # where our code is

SURROGATE = re.compile("[\\ud800-\\udfff]")  # what a text of JSON may hold and UTF-8 may not
HALF = "half of a surrogate pair: no text can be made of it"


class UserError(Exception):
    """A user's mistake, told in one line: the field, its value, and what would be right."""


def check(condition: bool, message: str) -> None:
    """Raise UserError(message) unless `condition` holds."""
    if not condition:
        raise UserError(message)


def one_line(error: Exception) -> str:
    """The first line of a library's message, which is the one that says what is wrong."""
    return " ".join(str(error).strip().split("\n")[0].split())


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """What a library raises meanwhile becomes a UserError: `what`, and the first line of what it said."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries raise what they like
        kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
        raise UserError(f"{what}: {kind}{one_line(error)}") from error


class _Short(reprlib.Repr):
    def repr_int(self, number: int, level: int) -> str:
        """Python refuses to write the longest."""
        bits = number.bit_length()
        return super().repr_int(number, level) if bits < 14_000 else f"a whole number of {bits} bits"


def shown(value: Any) -> str:
    """What there is to see of a value, however large, on one line."""
    short = _Short()
    short.maxlevel, short.maxstring, short.maxother = 2, 60, 60
    return " ".join(short.repr(value).split())


def build(cls: type[T], values: Any, field: str) -> T:
    """`values` as the dataclass `cls`; unknown keys and wrong types are refused with a UserError that names `field`."""
    check(isinstance(values, Mapping), f"{field}={values!r}: must be a mapping")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
    except OmegaConfBaseException as error:
        own = error.full_key or misfit(cls, values)
        key = ".".join(part for part in (field, own) if part)
        said = no_list(key, values.get(own)) if "is not a ListConfig" in str(error) else one_line(error)
        raise UserError(f"{key}: {said}") from error


def no_list(key: str, value: Any) -> str:
    """What to give where a list is wanted; of one that Hydra took for a text, why."""
    if isinstance(value, str) and value.startswith("["):
        return f"no list is read in {shown(value)}: texts in it with = or other marks stand in quotes, {key}=['a=b']"
    if OmegaConf.is_list(value):
        return f"must be a list of lists, as {key}=[[...], [...]]"
    return f"must be a list, as {key}=[...]"


def misfit(cls: type, values: Mapping[str, Any]) -> str:
    """The first key whose value the dataclass does not take; of a list within a list OmegaConf does not tell."""
    for key in values:
        try:
            OmegaConf.merge(OmegaConf.structured(cls), {key: values[key]})
        except OmegaConfBaseException:
            return key
    return ""


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
    key = f"++{key}" if key.startswith(OPEN) else key
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
    # Beside it: Hydra's parser takes overrides before its options or behind them, not both.
    return [each for override, other in pairs for each in (override, *([] if other is None else [f"{other}=null"]))]


def tree_of(name: str) -> dict[str, Any] | None:
    """The tree that a name describes by itself, as a YAML in conf/tree would; None for any other name. DESIGN 3.5."""
    if found := CHAIN.fullmatch(name):
        return {"_target_": "eagle_train.inference.tree.chain", "length": int(found[1])}
    if found := FULL.fullmatch(name):
        depth, branching = map(int, found.groups())
        return {"_target_": "eagle_train.inference.tree.full", "depth": depth, "branching": branching}
    return None


def offer_trees(arguments: Iterable[str]) -> None:
    """Let Hydra find the trees that `tree=NAME` asks for without a YAML, and some more that configs begin with."""
    given = [argument.partition("=") for argument in arguments]
    asked = [name for key, _, value in given if key.lstrip("+") == "tree" for name in value.split(",")]
    for name in (*TREES, *asked):
        if (tree := tree_of(name.strip())) is not None:
            ConfigStore.instance().store(name.strip(), tree, group="tree", provider="eagle_train")


offer_trees(())


def named_path(override: str) -> list[str]:
    """`target=X`, `draft=X` and `tree=X.yaml`, where X is no YAML of that group: a directory, a hub id, a file.

    A tree's other names are left to Hydra, see `offer_trees`.
    """
    key, _, value = override.partition("=")
    if key not in ("target", "draft", "tree") or not value or value.startswith("{"):
        return [override]
    if (CONF_DIR / key / f"{value}.yaml").exists() or (key == "tree" and not value.endswith(".yaml")):
        return [override]
    short = {"draft": ["draft.path="], "target": ["target=hf", "target.path="], "tree": ["tree=table", "tree.table="]}
    return [*short[key][:-1], short[key][-1] + value]


def check_overrides(config_name: str, arguments: list[str]) -> None:
    """Compose once before Hydra does, so that an unknown key, or one not given, is one line and told at once."""
    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    given = parser.parse_args(arguments)
    if given.multirun or given.config_dir or given.config_path:  # many configs, or files beside ours
        return
    config = compose(given.config_name or config_name, given.overrides)
    if not given.cfg and not given.info:  # it will run
        check_complete(config)


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
    try:
        if GlobalHydra.instance().is_initialized():  # a command is running
            return hydra.compose(config_name, overrides)
        with hydra.initialize_config_dir(str(CONF_DIR.resolve()), version_base="1.3"):
            return hydra.compose(config_name, overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(misread(overrides, config_name) or refused(error)) from error


def misread(overrides: list[str], config_name: str) -> str | None:
    """What is wrong with the first override of a kind that Hydra refuses in words of its own."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if key == "draft.path" and config_name == "train":  # see `named_path`
            return f"draft={value}: must be one of dense3; what gives weights to begin with is train.init_from=DIR"
        if not key or (not equals and not key.startswith("~")):
            return f"{override}: must be KEY=VALUE (--help tells the keys)"
        if value == "null" and (CONF_DIR / key).is_dir():
            options = sorted(path.stem for path in (CONF_DIR / key).glob("*.yaml") if path.stem != "base")
            return f"{override}: must be one of {', '.join(options)}, or left out"
    return None


def refused(error: Exception) -> str:
    """What Hydra says of an override, and what would be right."""
    options = getattr(error, "options", None)  # of a group that has none of that name
    options = options and [name for name in options if name in TREES or tree_of(name) is None]
    hint = f"there are {', '.join(options)}" if options else "--help tells the keys"
    hint += f", and {ANY_TREE}" if options and TREES[0] in options else ""
    return f"{one_line(error).rstrip('.')} ({hint})"


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Makes `task(config)` a command with Hydra's overrides.

    A UserError ends it with one line on stderr and status 2; so do an unknown override and a value left at `???`. An
    interrupt ends it with one line, too.
    """

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=str(CONF_DIR.resolve()), config_name=config_name)
        @functools.wraps(task)
        def run(config: DictConfig) -> None:
            try:
                check_complete(config)
                task(config)
                sys.stdout.flush()
            except OmegaConfBaseException as error:
                sys.exit(report(UserError(one_line(error))))
            except UserError as error:  # caught here, because Hydra would add its own lines to it
                sys.exit(report(error))
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                sys.exit(128 + signal.SIGINT)  # as shells have it
            except BrokenPipeError:
                if not reader_left():
                    raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
                sys.exit(128 + signal.SIGPIPE)

        @functools.wraps(task)
        def main() -> None:
            sys.argv[1:] = read(config_name)
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # what is no user's mistake keeps its traceback
            run()

        return main

    return decorate


def read(config_name: str) -> list[str]:
    """What a command was given, as Hydra reads it. `--help` and an override that does not fit end the process here."""
    tell_plainly()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage(CONF_DIR, config_name, BESIDE))
        sys.exit()
    parser = OverridesParser.create()
    multirun = bool({"-m", "--multirun"} & set(sys.argv))
    arguments = with_others_off([override for argument in sys.argv[1:] for override in named_path(argument)])
    offer_trees(arguments)
    arguments = arguments if multirun else [as_typed(argument, parser) for argument in arguments]
    try:
        check_overrides(config_name, arguments)
    except UserError as error:
        sys.exit(report(error))
    return arguments


def tell_plainly() -> None:
    """From here on warnings of ours are one line each, and no character fails for want of an encoding."""
    warnings.formatwarning = warning_text
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def warning_text(message: Any, category: type[Warning], file: str, line: int, source: str | None = None) -> str:
    """A warning as it is printed: where in the code it arose is told of other libraries' alone."""
    if category is UserWarning and any(Path(file).is_relative_to(folder) for folder in OWN):
        return f"warning: {printable(' '.join(str(message).split()))}\n"
    return FORMAT_WARNING(message, category, file, line, source)


def reader_left() -> bool:
    """Whether nobody reads any more what is printed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are told whatever is asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


def report(error: UserError) -> int:
    """Print a user's mistake; returns the exit status."""
    sys.stderr.write(f"error: {printable(' '.join(str(error).split()))}\n")  # at once, so that ranks' lines do not mix
    return 2


def prepared(out: str) -> Path:
    """The directory for results, made and tried before time is spent on them. Raises UserError."""
    check(out != "", "out is empty: give out=PATH")
    check_room(Path(out), out)
    return Path(out)


def prepared_file(out: str) -> Path:
    """The same for results that are one file."""
    check(not Path(out).is_dir(), f"out={out}: must be a file's name, and is {'empty' if out == '' else 'a directory'}")
    if not is_stream(Path(out)):
        check_room(Path(out).parent, out)
    return Path(out)


def check_room(directory: Path, out: str) -> None:
    """Make the directory. Raises UserError, naming `out`, where no file can be written into it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UserError(f"out={out}: nothing can be written there: {error.strerror}") from error


def is_stream(path: Path) -> bool:
    """Whether a pipe or a device is there, which must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is either whole or not there. A link stays, and so does a pipe or device (/dev/stdout).
    Raises UserError where it cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """The same for a file that is no text."""
    path = path if is_stream(path) else path.resolve()
    partial = path.with_name(f".{path.name}.partial")
    try:
        if is_stream(path):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        if partial.is_file():
            partial.unlink()
        raise UserError(f"{path}: cannot be written: {one_line(error)}") from error


def write_json(path: Path, values: Any) -> None:
    """Write `values` as indented JSON, whole or not at all; see `finite`."""
    write_text(path, json_text(values, indent=2) + "\n")


def json_text(values: Any, **options: Any) -> str:
    """`values` as JSON, see `finite`; `options` of json.dumps."""
    return json.dumps(finite(values), allow_nan=False, **options)


def finite(values: Any) -> Any:
    """The same with null for NaN and infinities, in lists and mappings too: JSON has no such numbers."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
