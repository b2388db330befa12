"""This process's memory, as Linux reports it, and the command line of evaluations that measure it.

Knows nothing of what is in memory.
"""

import sys
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf

from eagle_train.cli import tell_plainly
from eagle_train.errors import check
from eagle_train.settings import build

T = TypeVar("T")
_STATUS = Path("/proc/self/status")


def options(cls: type[T], usage: str) -> T:
    """The command line's `key=value`s as the dataclass `cls`; `--help` prints `usage` and ends. Raises UserError."""
    tell_plainly()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage.strip())
        sys.exit()
    return build(cls, OmegaConf.from_dotlist(sys.argv[1:]), "")


def resident_bytes() -> int:
    """Resident memory now."""
    return status("VmRSS")


def peak_bytes() -> int:
    """The largest resident memory so far. `ru_maxrss`, which looks alike, begins with the parent process's."""
    return status("VmHWM")


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    told = _STATUS.read_text().partition(f"{field}:")[2].split() if _STATUS.exists() else []
    check(len(told) > 0, f"{field}: this system does not tell it in {_STATUS}; memory is measured on Linux")
    return int(told[0]) * 1024
