"""The sampling stage: drafts are accepted or refused, and the next token is drawn. Paper section 3.2, DESIGN 3.7.

Picks the verification that a round needs, and can have it compiled. The mathematics is sampling.py's. Knows nothing of
models, caches or requests.

Shapes: R rows that this rank samples, N tree nodes, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch

from eagle_train.inference.decode.sampling import (
    SamplingTensors,
    Verified,
    uniform,
    verify_drawn,
    verify_sampled,
)
from eagle_train.inference.drafters.drafter import TreePlan
from eagle_train.ops.compiled import compiling
from eagle_train.ops.torch_private import with_own_sizes


class Verification:
    """Verifies rounds in which some row has a temperature; `drafting`: how children are chosen (`EngineConfig`)."""

    def __init__(self, drafting: str):
        self.drafting = drafting
        self._sampled, self._drawn = verify_sampled, verify_drawn

    def __call__(
        self,
        plan: TreePlan,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        seeds: torch.Tensor,
        lengths: torch.Tensor,
        draws: torch.Tensor | None,
        q: torch.Tensor | None,
    ) -> Verified:
        """Which nodes of tokens [R, N] the target accepts by its logits [R, N, V], and the token after the last one.

        seeds, lengths int64 [R]: a row's seed, and its committed tokens. draws [R, draws]: the round's random numbers,
        None for greedy drafts. q [R, N, V]: what each node's children were drawn from, None where they were not drawn.
        """
        if q is None or draws is None:  # a drafter may draw unasked; the target's own draw is right for any drafts
            return self._sampled(plan.tree, tokens, logits, sampling, seeds, lengths)
        return self._drawn(plan.tree, tokens, logits, sampling, draws, q, self.drafting == "multinomial")

    def compile(self, sizes: list[tuple[int, TreePlan]], lm_head: torch.Tensor) -> list[Callable[[], None]]:
        """Verify by torch.compile from now on. Returns calls that compile for these numbers of rows and plans.

        lm_head [V, H] gives vocabulary, dtype and device. Paper section 3.2: one graph for one row and one for several,
        each with top-k or top-p and without.
        """
        self._sampled = with_own_sizes(torch.compile(verify_sampled, dynamic=True))
        self._drawn = with_own_sizes(torch.compile(verify_drawn, dynamic=True))
        shapes = {(min(rows, 2), plan): None for rows, plan in sizes}
        jobs: list[Callable[[], None]] = [
            partial(self._prepare, rows, plan, top_p, lm_head) for rows, plan in shapes for top_p in (1.0, 0.5)
        ]
        torch.compiler.config.recompile_limit += len(jobs)
        return jobs

    def _prepare(self, rows: int, plan: TreePlan, top_p: float, lm_head: torch.Tensor) -> None:
        """Compile for so many rows; top_p 1 is for those without top-k and top-p."""
        device, tree = lm_head.device, plan.tree
        sampling = SamplingTensors.from_lists([1.0] * rows, [0] * rows, [top_p] * rows, device)
        tokens = torch.zeros(rows, tree.num_nodes, dtype=torch.long, device=device)
        logits = lm_head.new_zeros(*tokens.shape, len(lm_head))
        seeds, lengths = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        draws = q = None
        if self.drafting != "greedy" and tree.num_nodes > 1:
            draws, q = uniform(seeds, lengths, plan.num_draws), torch.zeros_like(logits, dtype=torch.float32)
        with compiling():
            self(plan, tokens, logits, sampling, seeds, lengths, draws, q)
