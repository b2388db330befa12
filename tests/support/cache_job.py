"""What test_cache.py starts on several ranks: eagle-cache, or eagle-train from what it wrote."""

import importlib

from tests.support.command_line import call


def main(command: str, arguments: list[str]) -> None:
    """`command`: cache or train. The process ends here, with the command's status."""
    call(importlib.import_module(f"eagle_train.{command}").main, *arguments)
