"""The EAGLE drafter: processes the pending tokens with the target's hidden states, then drafts a tree (growing.py).

Paper sections 2 and 3.4; DESIGN sections 3.1, 3.5. Knows nothing of validation or requests.

Shapes: A active rows, N wanted tokens, H hidden.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eagle_train.drafts import Draft, Head, shift_hidden
from eagle_train.errors import check
from eagle_train.hardware import warn_of_emulation
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.drafters.drafter import (
    MAX_PENDING,
    Drafted,
    DraftRound,
    Level,
    Needs,
    Outcome,
    Pending,
    TreePlan,
    pick,
)
from eagle_train.inference.drafters.growing import Growing, Nodes, keep_drafted
from eagle_train.inference.parallel.divided_draft import divide_draft
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.parallel.vocabulary import DividedHead
from eagle_train.models.draft_quantisation import scheme_of_lm_head
from eagle_train.models.fused import fuse_products
from eagle_train.models.head import quantised
from eagle_train.models.patches import optimize_for_decoding
from eagle_train.models.shapes import KVShape
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Compiled, Forward
from eagle_train.ops.rule import Attend
from eagle_train.ops.weight_codes import FP8

ALIGNMENTS = ("accepted", "last")


class Eagle(Growing[Nodes]):
    """Proposes with an EAGLE draft, of any kind that drafts a token after the other.

    `alignment`: which tokens of a round the draft processes again, with the target's hidden states instead of its own
    (paper section 3.4): all `accepted` ones, as EAGLE does; or the `last` alone, as the paper does, and the one before
    it if that was a leaf, which the draft has not processed. With `last`, drafts depend on a sequence's history: tokens
    that are prefilled again, after a preemption or in another request, get the target's hidden states.
    """

    needs = Needs(grows=True, waits=False, checks=False)

    def __init__(self, draft: Draft, target: Target, alignment: str = "accepted"):
        check(alignment in ALIGNMENTS, f"alignment={alignment}: must be {' or '.join(ALIGNMENTS)}")
        width, own = target.embedding.shape[1], draft.config.hidden_size
        check(own == width, f"draft.hidden_size={own}: must be the target's, {width}")
        self.draft = fuse_products(draft.to(target.device, target.dtype).eval().requires_grad_(False))
        self.needs = replace(self.needs, layers=draft.config.target_layers)
        self.models = [self.draft]
        self.target, self.alignment = target, alignment
        self.lm_head_kind = "target"
        self.use_heads(self.made_heads())
        weights = [head.lm_head.weight for head in self.heads]
        optimize_for_decoding(self.draft, target.dtype, weights, drop_hooks=True)
        self.use_cache(draft.config.num_kv_heads)
        self.compiled: Forward | None = None  # `forward`
        self.compiled_at: Forward | None = None  # `forward_at`

    def run_forward(self, *given: Any) -> torch.Tensor:
        """`forward`, compiled where it was. An attribute that is one of its methods would keep a drafter's memory until
        Python looks for circles."""
        return (self.compiled or self.forward)(*given)

    def run_forward_at(self, *given: Any) -> torch.Tensor:
        """`forward_at` likewise."""
        return (self.compiled_at or self.forward_at)(*given)

    def made_heads(self) -> list[Head]:
        """What is proposed with: one for all levels, or one for each."""
        return [Head(self.draft, self.target.lm_head, level) for level in range(max(1, self.draft.config.own_heads))]

    def use_heads(self, heads: list[Head]) -> None:
        self.heads, self.head = heads, heads[0]

    def use_cache(self, num_kv_heads: int) -> None:
        """Have an empty cache for so many key/value heads."""
        config, target = self.draft.config, self.target
        shape = KVShape(num_kv_heads, config.head_dim, config.head_dim)
        self.cache = PagedKV(dict.fromkeys(range(config.cached_layers), shape), 0, target.dtype, target.device)
        self.caches = [self.cache]

    def divide(self, ranks: Ranks) -> None:
        """Keep this rank's part of the draft, and multiply with its part of the LM head. All ranks call it, once,
        before anything is drafted."""
        divide_draft(self.draft, ranks)
        heads = self.made_heads()
        for head in heads:
            head.lm_head = divided = DividedHead(head.lm_head, ranks)
            if self.lm_head_kind != "target":
                made = scheme_of_lm_head(self.lm_head_kind, divided.part.weight.shape[1])
                divided.part = quantised(divided.part, made)
        self.use_heads(heads)
        weights = [head.lm_head.part.weight for head in heads]
        optimize_for_decoding(self.draft, self.target.dtype, weights, drop_hooks=True)
        self.use_cache(self.draft.config.num_kv_heads // ranks.size)

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The draft's states [A, T, W] at tokens [A, T]; `hidden` [A, T, H]: what each is fed, of the token before."""
        return self.draft(self.target.embed(tokens), hidden, positions, attend)

    def forward_at(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The states of `forward` at the indices `wanted` int64 [A, N] alone, [A, N, W]."""
        return self.draft(self.target.embed(tokens), hidden, positions, attend, wanted)

    def use_lm_head(self, kind: str) -> None:
        """Propose with the LM head of the `target`, or with a copy of it in `fp8` or `int4`: see `EngineConfig`.

        Warns where the device has no FP8 products. Raises OptionError where it has no product for so many inputs.
        """
        if kind == self.lm_head_kind:
            return
        heads = self.made_heads()
        if kind != "target":
            made = scheme_of_lm_head(kind, heads[0].lm_head.weight.shape[1])
            if kind == "fp8":
                warn_of_emulation("draft_lm_head", FP8, self.target.device, plain="target")
            for head in heads:
                head.lm_head = quantised(head.lm_head, made)
        self.use_heads(heads)
        self.lm_head_kind = kind

    def compile(self, sizes: Iterable[tuple[int, TreePlan]]) -> list[Callable[[], None]]:
        forward, forward_at = (Compiled(x, self.target.device) for x in (self.forward, self.forward_at))
        self.compiled, self.compiled_at = forward, forward_at
        aligned, grown, sizes = set(), set(), list(sizes)
        catches_up = any(plan.tree.num_nodes == 1 for _, plan in sizes)
        for rows, plan in sizes:
            if isinstance(plan.tree, DynamicTree):
                grown |= {(rows, 1), (rows, plan.tree.top_k)}
            aligned |= {(rows, count + 1) for count in range(1, plan.tree.max_depth + 1)}  # accepted, and one
            aligned |= {(rows, count) for count in (2, MAX_PENDING) if catches_up}
            grown |= {(rows, 1), *((rows, len(level.parents)) for level in plan.levels[1:])}  # none accepted; nodes
        return [
            partial(self.prepare, each, *shape)
            for each, sizes in ((forward_at, aligned), (forward, grown))
            for shape in sorted(sizes)
        ]

    def prepare(self, forward: Compiled, rows: int, length: int) -> None:
        """Compile `forward` or `forward_at` for tokens [rows, length]."""
        hidden = self.target.embedding.new_zeros(rows, length, self.draft.config.hidden_size)
        tokens = torch.zeros(rows, length, dtype=torch.long, device=hidden.device)
        wanted = [tokens.new_zeros(rows, 1)] if forward is self.compiled_at else []
        forward.prepare(tokens, hidden, tokens, *wanted)

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
    ) -> None:
        # No state is needed: prefill only fills the cache.
        fed = self.draft.fuse(paired(hidden, positions, before))
        self.forward_at(tokens, fed, positions, positions[:, :0], self.cache.extend(prefix, positions))

    def propose(self, round: DraftRound) -> Drafted:
        hidden = self.align(round.draft_prefix, round.pending)
        nodes = Nodes(self.cache, round.plan, round.prefix)
        return self.grow(round.plan, hidden, round.pending.last, nodes, round.choice)

    def align(self, prefix: Prefix, pending: Pending) -> torch.Tensor:
        """Process the pending tokens with the target's states. Returns the draft's at the last one [A, 1, W]."""
        count, fed = pending.tokens.shape[1], self.draft.fuse(pending.hidden)
        positions = prefix.positions(count)
        attend = self.cache.extend(prefix, positions)
        if count == 1:
            return self.run_forward(pending.tokens, fed, positions, attend)
        return self.run_forward_at(pending.tokens, fed, positions, pending.end, attend)

    def level_states(self, tokens: torch.Tensor, above: torch.Tensor, level: Level, nodes: Nodes) -> torch.Tensor:
        fed = self.draft.fed(pick(above, level.above))
        return self.run_forward(tokens, fed, *nodes.next_level(len(tokens), level))

    def readable(self, states: torch.Tensor) -> torch.Tensor:
        return self.draft.read(states)

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        if self.alignment == "accepted":
            return outcome.pending
        return keep_drafted(self.cache, round, drafted, outcome)


def paired(hidden: torch.Tensor, positions: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """What slots of a prefill are paired with, [A, T, S], see `Drafter.prefill`."""
    previous = shift_hidden(hidden, positions)
    if before is not None:  # the rows that have a prefix
        follows = (positions[:, 0] > 0).unsqueeze(1)
        previous[:, 0] = torch.where(follows, before, previous[:, 0])
    return previous


def check_alignment(alignment: str) -> None:
    """Raise UserError unless `alignment` is one of ALIGNMENTS."""
    check(alignment in ALIGNMENTS, f"draft.alignment={alignment}: must be {' or '.join(ALIGNMENTS)}")
