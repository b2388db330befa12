"""What test_cache.py and test_distributed.py start on several ranks: eagle-cache, or eagle-train."""

import importlib
import os

import torch

from eagle_train.caching import build
from eagle_train.models import loading
from tests.support.command_line import call


def main(command: str, arguments: list[str], bf16_ranks: tuple[int, ...] = ()) -> None:
    """`command`: cache or train. The process ends here, with the command's status. `bf16_ranks`: those whose hardware
    computes in bf16; none where nobody's matters."""
    if bf16_ranks:
        dtype = torch.bfloat16 if int(os.environ["RANK"]) in bf16_ranks else torch.float32
        loading.low_precision = lambda device: dtype
    if os.environ["RANK"] != "0":
        build._Begun.at = None  # what an interrupted cache left is read by the first rank alone
    call(importlib.import_module(f"eagle_train.{command}").main, *arguments)
