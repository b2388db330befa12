"""What test_cache.py starts on several ranks: eagle-cache, or eagle-train from what it wrote."""

import importlib
import os

from eagle_train.caching import build
from tests.support.command_line import call


def main(command: str, arguments: list[str]) -> None:
    """`command`: cache or train. The process ends here, with the command's status."""
    if os.environ["RANK"] != "0":
        build._Begun.at = None  # what an interrupted cache left is read by the first rank alone
    call(importlib.import_module(f"eagle_train.{command}").main, *arguments)
