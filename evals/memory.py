"""What this process holds in memory, as Linux tells it. Knows nothing of what is held."""

from pathlib import Path


def resident_bytes() -> int:
    """Held now."""
    return status("VmRSS")


def peak_bytes() -> int:
    """The most that was ever held; `ru_maxrss`, which looks like it, begins with the parent process's."""
    return status("VmHWM")


def status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024
