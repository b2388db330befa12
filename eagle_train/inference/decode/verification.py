"""Chooses how a sampled round is verified, and compiles it on request. Paper section 3.2, DESIGN section 3.7.

sampling.py computes. Greedy rounds do not come here. Knows nothing of models, caches or requests.

Shapes: R rows that this rank samples, N tree nodes, V vocabulary, H hidden.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.sampling import (
    SamplingTensors,
    Verified,
    uniform,
    verify_drawn,
    verify_sampled,
)
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import TreePlan
from eagle_train.ops.compiled import compiling
from eagle_train.ops.torch_private import with_own_sizes

KINDS = ((0, 1.0, 0.0), (0, 0.5, 0.0), (1, 0.5, 0.0), (1, 0.5, 0.5))
"""top_k, top_p and min_p of a sampled round of each kind that is compiled and recorded: without all three, with top-p,
with top-k, and with min-p, beside which the others may be."""


class Verification:
    """Verifies rounds in which a row has a temperature above 0. `drafting`: as in `EngineConfig`."""

    def __init__(self, drafting: str):
        self.drafting = drafting
        self._sampled, self._drawn = verify_sampled, verify_drawn
        self._dtype: torch.dtype | None = None  # of the logits that graphs are compiled for

    def __call__(
        self,
        tree: AnyTree,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        seeds: torch.Tensor,
        lengths: torch.Tensor,
        draws: torch.Tensor | None,
        q: torch.Tensor | None,
    ) -> Verified:
        """Which nodes of the tree with the tokens int64 [R, N] the target accepts by its logits [R, N, V], and the next
        token.

        seeds int64 [R]; lengths int64 [R]: committed tokens; draws float64 [R, plan.num_draws]: the round's random
        numbers, None for greedy drafts; q [R, N, V]: the distribution that each node's children were drawn from, None
        where they were not drawn.
        """
        # Trees by row and logits that were adjusted are not compiled for: no request may wait for the compiler.
        eager = not isinstance(tree, Tree) or logits.dtype != self._dtype
        sampled, drawn = (verify_sampled, verify_drawn) if eager else (self._sampled, self._drawn)
        sampling = sampling if eager else sampling.prepared
        if q is None or draws is None:  # without both: accept what the target draws itself, correct for any drafts
            return sampled(tree, tokens, logits, sampling, seeds, lengths)
        assert isinstance(tree, Tree)
        # A row without drafts has no tokens, and a q of 0.
        return drawn(tree, tokens.clamp(min=0), logits, sampling, draws, q, self.drafting == "multinomial")

    def compile(self, sizes: list[tuple[int, TreePlan]], lm_head: torch.Tensor) -> list[Callable[[], None]]:
        """Use torch.compile from now on. Returns calls that compile for these pairs of rows and plan.

        lm_head [V, H]: of which shape, dtype and device are used. For each plan, one graph for one row and one for
        several (paper section 3.2), each of all KINDS.
        """
        # In two steps a GPU's reductions over a row are faster alone, but torch 2.11 fails at fusing them.
        self._dtype = lm_head.dtype
        options: Any = {"split_reductions": False} if lm_head.device.type == "cuda" else None
        with compiling():
            self._sampled = with_own_sizes(torch.compile(verify_sampled, dynamic=True, options=options))
            self._drawn = with_own_sizes(torch.compile(verify_drawn, dynamic=True, options=options))
        shapes = {(min(rows, 2), plan): None for rows, plan in sizes if isinstance(plan.tree, Tree)}
        jobs: list[Callable[[], None]] = [
            partial(self._prepare, rows, plan, kind, lm_head) for rows, plan in shapes for kind in KINDS
        ]
        torch.compiler.config.recompile_limit += len(jobs)
        return jobs

    def _prepare(self, rows: int, plan: TreePlan, kind: tuple[int, float, float], lm_head: torch.Tensor) -> None:
        """Compile by a call on dummy tensors. `kind`: one of KINDS."""
        device, tree = lm_head.device, plan.tree
        assert isinstance(tree, Tree)
        top_k, top_p, min_p = kind
        sampling = SamplingTensors.from_lists([1.0] * rows, [top_k] * rows, [top_p] * rows, device, [min_p] * rows)
        tokens = torch.zeros(rows, tree.num_nodes, dtype=torch.long, device=device)
        logits = lm_head.new_zeros(*tokens.shape, len(lm_head))
        seeds, lengths = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        draws = q = None
        if self.drafting != "greedy" and tree.num_nodes > 1:
            draws, q = uniform(seeds, lengths, plan.num_draws), torch.zeros_like(logits, dtype=torch.float32)
        with compiling():
            self(tree, tokens, logits, sampling, seeds, lengths, draws, q)
