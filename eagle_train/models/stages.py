"""Forwards of some of a model's layers: the others hand the states on, and a forward may go on from given states.

`patches.use_stages` gives layers the class that this needs. Of what lies before the layers and behind them all runs as
in any forward. Knows nothing of drafts, caches or families.

Shapes: B rows, T tokens, H hidden.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn


class Stages:
    """What the layers of one model do in a forward. As long as nobody asks for a part, they run as they always do."""

    def __init__(self) -> None:
        self._layers: Collection[int] | None = None  # those that run; None: all, and nothing is noted
        self._entry: torch.Tensor | None = None
        self._kept_layer = -1
        self._kept: torch.Tensor | None = None

    def part(
        self,
        forward: Callable[[], torch.Tensor],
        layers: Collection[int],
        entry: torch.Tensor | None = None,
        keep: int = -1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `forward`, which runs the model once, returns with these layers alone, [B, T, H], and the output of the
        layer `keep`, one of them; None for -1. `entry` [B, T, H]: what the first of them reads instead of embeddings.
        """
        self._layers, self._entry, self._kept_layer = layers, entry, keep
        try:  # an exception within, out of memory, say, must not change the forwards to come
            return forward(), self._kept
        finally:
            self._layers = self._entry = self._kept = None

    def call(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a layer does that is called: run, or hand on."""
        if self._layers is None:
            return forward(*args, **kwargs)
        states = args[0] if args else kwargs["hidden_states"]
        if layer == 0 and self._entry is not None:
            states = self._entry
        if layer not in self._layers:
            return states
        args, kwargs = ((states, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": states})
        output = forward(*args, **kwargs)
        if layer == self._kept_layer:
            self._kept = output
        return output


class StagedLayer(nn.Module):
    """A layer that does as `stages` says; mixed into the class that it has. Only for layers that return their states
    alone: who uses it checks that a forward in parts is the whole one."""

    stages: Stages
    number: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stages.call(self.number, super().forward, *args, **kwargs)
