"""What commands write: files that are whole or not there, JSON, where a result came from, and what must not leave the
machine. DESIGN section 3.10.
"""

import json
import math
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from eagle_train.errors import UserError, check, one_line
from eagle_train.hardware import cpu_name, instructions

SECRET_NAME = re.compile("token|key|secret|passw|credential", re.IGNORECASE)
SECRET_EVEN_AS_NUMBER = re.compile("secret|passw", re.IGNORECASE)
# Tokens of text, which are no secret: `draft.first_token`, `tokenizer`, `pad_token`.
TEXT_TOKEN = re.compile("tokeniz|(first|pad|bos|eos|unk|mask|stop|special)_token", re.IGNORECASE)
# Prefixed keys of the usual services, web tokens, passwords in addresses and `token=...` inside a longer text.
SECRET_VALUE = re.compile(
    r"\b(hf_|sk-|wandb_v1_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|AIza|eyJ)[\w.-]{12,}"
    r"|://[^/\s:@]+:[^/\s@]+@"
    r"|(?i:token|key|secret|password)=[^\s&]{8,}"
    r"|^(local-)?[0-9a-f]{40}$"
)
# A commit looks like a W&B key of 40 hexadecimal digits.
COMMIT_NAME = re.compile("revision|commit|sha", re.IGNORECASE)


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


def in_words(size: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    units = ((30, "GiB"), (20, "MiB"))
    unit, name = next(((2**power, each) for power, each in units if size >= 2**power), (2**10, "KiB"))
    return f"{size / unit:,.1f} {name}"


def count_in_words(count: float) -> str:
    """A number of parameters in thousands, millions or billions."""
    unit, name = next((each for each in ((1e9, "B"), (1e6, "M")) if count >= each[0]), (1e3, "k"))
    return f"{count / unit:,.4g} {name}"


def time_in_words(seconds: float) -> str:
    """Seconds as they are, or in minutes or hours."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} hours"


def provenance() -> dict[str, Any]:
    """Versions, hardware and the machine's load: what every result is written beside. DESIGN section 3.10."""
    packages = ("eagle-train", "torch", "transformers")
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
        "cpu": cpu_name(),
        "instructions": instructions(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _version(package: str) -> str | None:
    """None for a package that runs from its sources and was not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def redact(config: Any, name: str = "") -> Any:
    """`config` as plain dicts and lists in which whatever may be a secret reads "<redacted>".

    That is a text below a key whose name contains token, key, secret, password or credential (unless it speaks of
    tokens of text), and a text that looks like a service's key, wherever it is. `name` is the dotted key of `config`.
    """
    if isinstance(config, Mapping):
        return {key: redact(value, f"{name}.{key}") for key, value in config.items()}
    # OmegaConf's lists are neither list nor tuple.
    if hasattr(config, "__iter__") and not isinstance(config, str | bytes):
        return [redact(value, name) for value in config]
    return "<redacted>" if is_secret(name, config) else config


def is_secret(name: str, value: Any) -> bool:
    """Whether the value at the dotted key `name` must not leave the machine."""
    if not isinstance(value, str):  # `max_tokens` and `num_key_value_heads` are none
        return value is not None and bool(SECRET_EVEN_AS_NUMBER.search(name))
    is_commit = COMMIT_NAME.search(name.rpartition(".")[2])
    return bool(SECRET_NAME.search(TEXT_TOKEN.sub("", name)) or (SECRET_VALUE.search(value) and not is_commit))
