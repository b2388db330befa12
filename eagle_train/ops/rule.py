"""What a layer asks of attention, and the form in which a model calls it. Knows no kernels, models or caches.

Shapes: B batch, T new tokens, S keys, Q query heads, K key/value heads, D head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class Rule:
    """What a layer asks of attention beside causality.

    `window`: a query sees the last `window` positions, its own included. `chunk`: it sees its own chunk of positions
    only (Llama 4's iRoPE). `softcap`: scores become softcap * tanh(scores / softcap) (Gemma 2). `sinks` [Q]: a logit
    per head that takes part in the softmax and has no value (gpt-oss). `skip_first`: the keys at so many first
    positions, fewer than a block of the cache has, are each seen by their own query alone (slots that a draft does not
    have, DESIGN sections 3.1 and 3.3).
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    skip_first: int = 0

    @property
    def reach(self) -> tuple[int | None, int | None, int]:
        """What masks depend on: rules of the same reach share them."""
        return self.window, self.chunk, self.skip_first

    @property
    def is_local(self) -> bool:
        return self.window is not None or self.chunk is not None

    @property
    def sees_all(self) -> bool:
        """Whether causality is all there is."""
        return not self.is_local and not self.skip_first

    @cached_property
    def behind_first(self) -> "Rule":
        """The same where the positions that it skips are not among the keys."""
        return replace(self, skip_first=0)

    def having(self, sinks: torch.Tensor | None) -> "Rule":
        """The same with these sinks. Parameters are given anew in each call: a backend may put others in their
        place."""
        if sinks is None:
            return self
        return Rule(self.scale, self.window, self.chunk, self.softcap, sinks, self.skip_first)

    def sees(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Which keys there are for a query, bool; causality is the caller's. Both arguments broadcast."""
        near = torch.ones((), dtype=torch.bool, device=query_positions.device)
        if self.window is not None:
            near = near & (query_positions - key_positions < self.window)
        if self.chunk is not None:
            near = near & (query_positions // self.chunk == key_positions // self.chunk)
        if self.skip_first:
            near = near & ((key_positions >= self.skip_first) | (query_positions == key_positions))
        return near

    def first(self, positions: torch.Tensor) -> torch.Tensor:
        """The first position that a query sees, for queries at `positions`, int64: from there to itself it sees all."""
        first = torch.zeros_like(positions)
        if self.window is not None:
            first = (positions - (self.window - 1)).clamp(min=0)
        if self.chunk is not None:
            first = torch.maximum(first, positions // self.chunk * self.chunk)
        if self.skip_first:
            first = torch.maximum(first, positions.clamp(max=self.skip_first))
        return first


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Rule], torch.Tensor]
"""attend(layer, q [B,Q,T,D], k [B,K,T,D], v [B,K,T,D], rule) -> [B,Q,T,D]; keys and values are the new tokens'."""


def additive_mask(seen: torch.Tensor) -> torch.Tensor:
    """A bool mask as fp32 numbers to add to scores: 0 where a key is seen, -inf where not."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)


class Uncompiled:
    """An `Attend` that torch.compile calls and does not look into. It takes one for another: looked into, each batch's
    lengths would be compiled anew, and so would each of the ways to attend."""

    def __init__(self, attend: Attend):
        self._attend = attend

    @torch.compiler.disable
    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        return self._attend(layer, q, k, v, rule)
