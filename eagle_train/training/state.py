"""What a run has come to, beside its weights: kept by a checkpoint, restored by a resumed run. DESIGN section 3.11."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class TrainState:
    """Counts of a run so far, and where its data are read next.

    `step`: optimiser steps made, skipped ones included. `tokens`: tokens of all ranks, padding included. `skipped`:
    steps whose gradient was unsound. `norms`: the gradient norms of recent steps (runaway.py). `stream`: the data
    stream's state after the last whole step. `seconds` of training, and whether the run is `finished`.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    norms: list[float] = field(default_factory=list)
    stream: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    finished: bool = False

    def saved(self, target: dict[str, Any], target_quant: str) -> dict[str, Any]:
        """What a checkpoint keeps: this state, the random generators', the target's identity, and how it computes."""
        return {
            "stream": self.stream,
            "random": random_state(),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "finished": self.finished,
            "skipped": self.skipped,
            "norms": self.norms,
            "target": target,
            "target_quant": target_quant,
        }

    @classmethod
    def restored(cls, step: int, saved: dict[str, Any]) -> "TrainState":
        """The state of a checkpoint of `step`, from what `saved` gave. Sets no random generator."""
        names = ("tokens", "skipped", "norms", "stream", "seconds", "finished")
        return cls(step, **{name: saved[name] for name in names})


def random_state() -> dict[str, Any]:
    """State of Python's and torch's generators, and of the current CUDA device's, as values a checkpoint can keep."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`'s result. CUDA's part is left out where either side has no CUDA device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
