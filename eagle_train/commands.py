"""The installed commands: their arguments are parsed before any slow import.

So `--help` and an invalid override are answered at once. Knows nothing of what a command does.
"""

import signal
from importlib import import_module

from eagle_train.cli import parse_arguments


def train() -> None:
    _run("train")


def export() -> None:
    _run("export")


def generate() -> None:
    _run("generate")


def regenerate() -> None:
    _run("regenerate")


def datastore() -> None:
    _run("datastore")


def cache() -> None:
    _run("cache")


def doctor() -> None:
    _run("doctor")


def _run(name: str) -> None:
    parse_arguments(name)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else whoever started us wants none to end us
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import has nothing to tell or to tidy up
    main = import_module(f"eagle_train.{name}").main
    signal.signal(signal.SIGINT, handler)
    main()
