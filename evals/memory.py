"""What this process holds in memory, as Linux tells it, and how commands that measure it are told what to do.

Knows nothing of what is held.
"""

import sys
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf

from eagle_train.cli import tell_plainly
from eagle_train.settings import build

T = TypeVar("T")


def options(cls: type[T], usage: str) -> T:
    """The command line's `key=value`s as the dataclass `cls`; `--help` prints `usage` and ends. Raises UserError."""
    tell_plainly()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage.strip())
        sys.exit()
    return build(cls, OmegaConf.from_dotlist(sys.argv[1:]), "")


def resident_bytes() -> int:
    """Held now."""
    return status("VmRSS")


def peak_bytes() -> int:
    """The most that was ever held; `ru_maxrss`, which looks like it, begins with the parent process's."""
    return status("VmHWM")


def status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024
