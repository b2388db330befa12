"""Grammars' masks in a stage that is recorded: the host computes them when a replay comes to where they are read.

Knows nothing of models or requests. guided.py computes masks.

Shapes: A active rows, N tree nodes, V vocabulary, W 32-bit words of a bitmask over it.
"""

import torch

from eagle_train.inference.grammar.guided import Guidance, StopMasks
from eagle_train.ops.graphs import Record


class RecordedMasks:
    """`NodeMasks` of a recorded stage, which `use` gives a round's guidance before each replay. Padding rows may say
    anything."""

    def __init__(self, masks: StopMasks, rows: int, record: Record):
        """`rows`: of the recording; `record`: what records it."""
        self._masks, self._pause = masks, record.pause
        self._text = torch.full((rows, 1, len(masks.stop)), -1, dtype=torch.int32, device=masks.stop.device)
        self._guidance: Guidance | None = None

    def use(self, guidance: Guidance) -> None:
        """The guidance of the round that is replayed next."""
        self._guidance = guidance
        self._text[: len(guidance.text)] = guidance.text

    def set_tokens(self, tokens: torch.Tensor) -> None:
        """Give the trees' tokens int64 [rows, nodes drafted so far]."""

        def give() -> None:
            assert self._guidance is not None
            self._guidance.set_tokens(tokens[: len(self._guidance.text)])

        self._pause(give)

    def set_nodes(self, tokens: torch.Tensor, parents: torch.Tensor) -> None:
        """The same of trees that differ by row, with the nodes' parents int64 [rows, nodes drafted so far]."""

        def give() -> None:
            assert self._guidance is not None
            rows = len(self._guidance.text)
            self._guidance.set_nodes(tokens[:rows], parents[:rows])

        self._pause(give)

    def allowed(self, nodes: list[int]) -> torch.Tensor:
        """bool [rows, len(nodes), V]: the tokens allowed after each node."""
        rows, _, words = self._text.shape
        bits = torch.full((rows, len(nodes), words), -1, dtype=torch.int32, device=self._text.device)

        def fill() -> None:
            assert self._guidance is not None
            found = self._guidance.bits_after(nodes)
            bits[: len(found)] = found

        self._pause(fill)
        return self._masks.allowed(bits, self._text)
