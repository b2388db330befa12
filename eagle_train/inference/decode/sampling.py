"""Speculative sampling: the target's distribution p, the draft's proposals, and their verification.

What is committed has the target's own distribution, whatever was drafted. All functions are batched: no loop over rows,
no host synchronisation, no shape that depends on values; so torch.compile with a dynamic batch dimension compiles twice
only, for one row and for several. Knows nothing of models, KV caches or requests. Paper section 3.2, DESIGN 3.7.

Shapes: B batch rows, N tree nodes, P nodes of a tree level that have children, C children, V vocabulary. Levels are
unrolled in Python; a tree's tables (tree.py) are tensors [N, ...].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.tree import Tree
from eagle_train.ops.cumulative import cumulative_sum
from eagle_train.ops.transfer import to_device
from eagle_train.ops.truncation import mass, normalised, truncated_softmax

_HOTTEST = torch.finfo(torch.float32).max  # a greater temperature is infinite in float32, and -inf / inf is NaN
DRAFT_MODES = ("greedy", "multinomial", "multinomial_without_replacement")


def _as_int64(value: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits: torch's int64 is signed and wraps around."""
    return value - (1 << 64) if value >> 63 else value


# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GOLDEN = _as_int64(0x9E3779B97F4A7C15)
_MIX_1 = _as_int64(0xBF58476D1CE4E5B9)
_MIX_2 = _as_int64(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser: a bijection of int64 in which each input bit affects all output bits."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """`count` uniform random numbers per row: a function of its seed and position, not of the rest of the batch.

    seeds, positions: int64 [...], which broadcast. `positions`: absolute, of the token whose logits are sampled, or of
    the tree's root, so that no two rounds of a request share numbers. Returns float64 [..., count] in [0, 1), multiples
    of 2^-53: float32's 24 bits could not draw tokens of smaller probability.
    """
    key = _mix(_mix(seeds * _GOLDEN) + positions * _GOLDEN)
    draws = torch.arange(1, count + 1, device=seeds.device)
    return _shift_right(_mix(key[..., None] + draws * _GOLDEN), 11).double() * 2.0**-53


@dataclass(frozen=True)
class SamplingTensors:
    """The batch's sampling settings as tensors, and flags on the host by which unneeded work is skipped."""

    temperature: torch.Tensor  # float32 [B]; 0 is greedy
    top_k: torch.Tensor  # int64 [B]; 0 is off
    top_p: torch.Tensor  # float32 [B]; 1 is off
    min_p: torch.Tensor  # float32 [B]; 0 is off
    any_top: bool  # some row with a temperature above 0 uses top-k or top-p
    any_top_k: bool  # some row with a temperature above 0 uses top-k
    any_min_p: bool  # some row with a temperature above 0 uses min-p
    all_greedy: bool  # every temperature is 0

    @classmethod
    def from_lists(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        device: torch.device | str,
        min_p: Sequence[float] | None = None,
    ) -> "SamplingTensors":
        """From one entry per row. `min_p`: None: off in all rows."""
        min_p = [0.0] * len(temperature) if min_p is None else min_p
        rows = list(zip(temperature, top_k, top_p, min_p, strict=True))
        return cls(
            to_device([min(t, _HOTTEST) for t in temperature], device, torch.float32),
            to_device(top_k, device, torch.int64),
            to_device(top_p, device, torch.float32),
            to_device(min_p, device, torch.float32),
            any_top=any(t > 0 and (k > 0 or p < 1) for t, k, p, _ in rows),
            any_top_k=any(t > 0 and k > 0 for t, k, _, _ in rows),
            any_min_p=any(t > 0 and m > 0 for t, _, _, m in rows),
            all_greedy=not any(t > 0 for t in temperature),
        )

    @property
    def prepared(self) -> "SamplingTensors":
        """The same settings with the flags of a kind that rounds are recorded and compiled for: where min-p is used,
        the work of all settings is done, which changes no bit of rows without them."""
        return replace(self, any_top=True, any_top_k=True) if self.any_min_p else self

    def rows(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> "SamplingTensors":
        """The settings of the rows that `pick` selects from a tensor [B]."""
        temperature, top_k, top_p, min_p = map(pick, (self.temperature, self.top_k, self.top_p, self.min_p))
        return replace(self, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def probabilities(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """The distributions p that are sampled: temperature, then top-k, top-p and min-p, then renormalisation.

    logits [B, N, V] of any floating dtype, -inf where a grammar forbids a token. Returns float32 [B, N, V] (float64 for
    float64). Temperature 0 puts all mass on the most likely token, the one of lowest id among equals. Top-k keeps all
    tokens that are as likely as the k-th. Top-p keeps the smallest set of most likely tokens whose mass reaches it,
    lower ids first among equals, and at least one token. Min-p keeps the tokens that are at least min-p times as likely
    as the most likely one. The same as transformers' warpers.
    """
    logits = at_least_float32(logits)
    if sampling.all_greedy:
        return _one_hot(logits)
    scaled = _over_temperature(logits, sampling.temperature)
    if sampling.any_top:
        probs = truncated_softmax(scaled, sampling.top_k, sampling.top_p, sampling.any_top_k)
    else:
        probs = scaled.softmax(-1)
    if sampling.any_min_p:
        probs = _without_unlikely(probs, sampling.min_p)
    return torch.where((sampling.temperature == 0)[:, None, None], _one_hot(logits), probs)


def _without_unlikely(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """probs [B, N, V] without what is less likely than min_p [B] times the most likely token, normalised."""
    min_p = min_p[:, None, None].to(probs.dtype)
    kept = probs * (probs >= min_p * probs.amax(-1, keepdim=True))
    return torch.where(min_p > 0, kept / mass(kept), probs)  # other rows have the same bits in any batch


def restrict(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """logits [..., V] with -inf where `allowed`, bool [..., V], is False; unchanged where no token is allowed.

    Where all allowed tokens have -inf or NaN, they become equally likely.
    """
    hopeless = ~(allowed & (logits > -torch.inf)).any(-1, keepdim=True)
    logits = logits.masked_fill(allowed & hopeless, 0.0)
    return logits.masked_fill(~allowed & allowed.any(-1, keepdim=True), -torch.inf)


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """As float32; float64 stays, for exact tests."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    """[..., V]: 1 at the first maximum, 0 elsewhere."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _over_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits [B, N, V] / temperature [B], shifted so that the maximum is 0; temperature 0 counts as 1.

    Infinite logits, as float16 may have, become the largest finite number: inf - inf would be NaN.
    """
    logits = logits.clamp(max=torch.finfo(logits.dtype).max)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    # Shifted before the division: over a tiny temperature the maximum would overflow.
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def sample(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: the token at which the cumulative distribution exceeds u.

    probs [..., V] non-negative, with any positive sum; u float64 [...] in [0, 1); they broadcast. Returns int64 [...].
    Never a token of probability 0, however the sums are rounded; a row without any mass gives token 0.
    """
    # A parallel cumulative sum is not exactly monotone, hence the second condition.
    cumulative = cumulative_sum(probs, torch.float64)
    passed = (cumulative > u[..., None] * cumulative[..., -1:]) & (probs > 0)
    first = passed.to(torch.uint8).argmax(-1)
    return torch.where(passed.any(-1), first, probs.argmax(-1))


def propose(
    logits: torch.Tensor,
    num_children: int,
    mode: str = "greedy",
    temperature: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The draft's children for each of a level's P parents, and the distribution q that they were drawn from.

    logits [B, P, V]; temperature float32 [B] and noise float64 [B, P, C] in [0, 1) are for the multinomial modes only.
    Returns tokens int64 [B, P, C], and q float32 [B, P, V], None for "greedy". Children are ordered: a parent with
    fewer than C takes the first ones.

    - "greedy": the C most likely tokens. q is a point mass, whatever the temperature (paper section 3.2).
    - "multinomial": C independent draws from q = softmax(logits / temperature), without top-k and top-p.
    - "multinomial_without_replacement": each is drawn from q without the earlier ones, renormalised. When q has no mass
      left, token 0 is proposed, which `verify` rejects.

    A row at temperature 0 has the C most likely tokens in these modes too, and q as at temperature 1: any q that the
    children have mass in accepts the target's most likely token.
    """
    assert mode in DRAFT_MODES, mode
    if mode == "greedy":
        if num_children == 1:  # argmax is faster than topk
            return logits.argmax(-1, keepdim=True), None
        return logits.topk(num_children).indices, None
    assert temperature is not None, mode
    assert noise is not None, mode
    q = _over_temperature(at_least_float32(logits), temperature).softmax(-1)
    if mode == "multinomial":
        drawn = sample(q[:, :, None], noise)  # [B, P, 1, V] with [B, P, C]
    else:
        tokens, q_r = [], q  # q_r [B, P, V]: q without the tokens drawn so far
        for rank in range(num_children):
            tokens.append(sample(q_r, noise[:, :, rank]))
            q_r = normalised(q_r.scatter(-1, tokens[-1][..., None], 0.0))
        drawn = torch.stack(tokens, -1)
    best = logits.topk(num_children).indices
    return torch.where((temperature == 0)[:, None, None], best, drawn), q


class Verified(NamedTuple):
    """What a round commits of each row: the tokens on the path to `node`, then `next_token`, the root of the next."""

    node: torch.Tensor  # int64 [B]: the deepest accepted node; 0, the root, where none was accepted
    next_token: torch.Tensor  # int64 [B]: the target's own


def verify_sampled(
    tree: AnyTree,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    sampling: SamplingTensors,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> Verified:
    """`verify_chosen` with one draw from p at each node, from logits on, so that it is compiled as one graph.

    tokens int64 [B, N]; logits [B, N, V]; seeds int64 [B]; lengths int64 [B]: the root's position.
    """
    # [B, N]: by the position of the node's token, so that the draw is the one of decoding without drafts
    draws = uniform(seeds[:, None], lengths[:, None] + tree.depth, 1).squeeze(-1)
    return verify_chosen(tree, tokens, sample(probabilities(logits, sampling), draws))


def verify_chosen(
    tree: AnyTree, tokens: torch.Tensor, chosen: torch.Tensor, also: torch.Tensor | None = None
) -> Verified:
    """A node is accepted if its token, and that of each ancestor, is the one that the target chose after its parent.

    tokens int64 [B, N]; chosen int64 [B, N]: the target's token after each node, its most likely one or one drawn from
    p. For greedy drafts this is multi-round speculative sampling: q is a point mass, so the first child is accepted
    with probability p(x), the next with its share of the remaining mass, and otherwise the token comes from the
    residual; a single draw from p does all three. A draw depends on seed and position alone (`uniform`), so the tokens
    are those of decoding without drafts, whatever the tree. Of siblings with the same token one counts: see
    `Tree.siblings_repeat`. `also`: bool [B, N], further nodes that are accepted after their parents; the result is then
    another (relaxed.py).
    """
    match = tokens == tree.at_parents(chosen)
    node = tree.accepted(match if also is None else match | also)
    return Verified(node, chosen.gather(1, node[:, None])[:, 0])


def child_round(
    p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, replacement: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One round of multi-round speculative sampling, for a child `token` int64 [B] drawn from q. DESIGN section 3.7.

    p, q [B, V]. Returns the probability of acceptance [B], and p and q [B, V] for the next sibling if this one is
    rejected. A token with q = 0 is never accepted, and leaves p unchanged.
    """
    column = token[:, None]
    p_x, q_x = p.gather(1, column)[:, 0], q.gather(1, column)[:, 0]
    accept = torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1.0)
    rest = (p - q).clamp(min=0.0)
    if not replacement:
        q = normalised(q.scatter(1, column, 0.0))
    # An empty residual means that acceptance was certain up to rounding; p then serves as well.
    has_rest = (rest > 0).any(-1, keepdim=True)
    return accept, torch.where(has_rest, normalised(rest), p), q


def verify(
    tree: Tree,
    tokens: torch.Tensor,
    p: torch.Tensor,
    coins: torch.Tensor,
    final: torch.Tensor,
    q: torch.Tensor,
    replacement: bool = True,
) -> Verified:
    """Multi-round speculative sampling over a tree of drawn tokens. What it commits has the target's distribution.

    tokens int64 [B, N]; p [B, N, V]: the target's distribution after each node; coins [B, N] and final [B]: independent
    uniforms in [0, 1), by which nodes are accepted (the root's is unused) and the next token is drawn; q [B, N, V]: the
    distribution from which each node's children were drawn, with or without replacement.
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    node = torch.zeros_like(tokens[:, 0])  # [B]: the deepest accepted node so far
    residual = p[:, 0]  # [B, V]: what the next token is drawn from, or the next child compared with
    for depth, fanout in enumerate(tree.fanout):
        parent = node
        here = tree.depth[parent] == depth  # [B]; the other rows stopped at a shallower node
        residual = torch.where(here[:, None], p[rows, parent], residual)
        q_r = q[rows, parent]
        for rank in range(fanout):
            child = tree.children[parent, rank]  # [B]; -1 where the node has no such child
            waiting = here & (child >= 0) & (node == parent)
            accept, residual_if_rejected, q_r = child_round(residual, q_r, tokens[rows, child], replacement)
            accepted = waiting & (coins[rows, child] < accept)
            residual = torch.where((waiting & ~accepted)[:, None], residual_if_rejected, residual)
            node = torch.where(accepted, child, node)
    return Verified(node, sample(residual, final))


def verify_drawn(
    tree: Tree,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    sampling: SamplingTensors,
    draws: torch.Tensor,
    q: torch.Tensor,
    replacement: bool,
) -> Verified:
    """`verify` from logits on, so that it is compiled as one graph.

    tokens int64 [B, N]; logits [B, N, V]; draws [B, 1 + N or more]: the uniform of the next token, then the nodes'
    coins; q and `replacement` as for `verify`.
    """
    p, coins = probabilities(logits, sampling), draws[:, 1 : 1 + tree.num_nodes]
    return verify(tree, tokens, p, coins, draws[:, 0], q, replacement)
