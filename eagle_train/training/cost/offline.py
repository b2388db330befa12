"""When a cache of the target's states is faster than the target: its bytes and seconds, from FLOPs and the disk's
speed. Knows nothing of files.
"""

from dataclasses import dataclass

from eagle_train.results import in_words


@dataclass(frozen=True)
class Offline:
    """A run's states of the target on disk. `token_bytes`: what a token takes there. Seconds of a token on all GPUs of
    the job together: of the `target`'s forward, of the `draft`, which is all else, and of the `disk`, to read or to
    write it.
    """

    token_bytes: int
    target: float
    draft: float
    disk: float

    @property
    def first_epoch(self) -> int | None:
        """From how many epochs on the cache is faster, its making included; None: never.

        Making it is a forward of each token, written meanwhile; an epoch from it is the draft's, read meanwhile.
        """
        once, saved = max(self.target, self.disk), self.target + self.draft - max(self.draft, self.disk)
        return int(once / saved) + 1 if saved > 0 else None

    def advice(self, disk: str) -> str:
        """Of a run with the target, in a line. `disk`: the speed that is reckoned with, in words."""
        size = f"{self.token_bytes / 2**10:,.4g} KiB a token, {in_words(self.token_bytes * 1e6)} a million"
        first = self.first_epoch
        pays = "reading them takes longer than the target" if first is None else f"faster from {first} epochs on"
        return f"the target's states on disk (eagle-cache): {size}; {pays}, {disk}"

    def reading(self, disk: str) -> str:
        """Of a run from a cache, in a line."""
        rate = self.token_bytes / max(self.draft, self.disk)
        slower = self.disk > self.draft
        said = f", which takes {self.disk / self.draft:.2g} times as long as the draft" if slower else ""
        return (
            f"reading from disk: {self.token_bytes / 2**10:,.4g} KiB a token, {in_words(rate)}/s in all, {disk}{said}"
        )
