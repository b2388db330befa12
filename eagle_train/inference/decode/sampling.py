"""From logits to tokens without changing the target's distribution: p, the draft's proposals, and their verification.

Everything is batched: no loop over the batch, no host synchronisation, no shape that depends on data; so that
torch.compile with a dynamic batch dimension compiles for batch 1 and for batch > 1 only. Knows nothing of models, KV
caches or requests. Paper section 3.2, DESIGN section 3.7.

Shapes: B batch rows, N tree nodes, D tree depth, P parents of one tree level, C children, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from eagle_train.inference.decode.tree import Tree
from eagle_train.ops.cumulative import cumulative_sum
from eagle_train.ops.transfer import to_device

HOTTEST = torch.finfo(torch.float32).max  # beyond, float32 has infinity, by which a forbidden token's logit is NaN
DRAFT_MODES = ("greedy", "multinomial", "multinomial_without_replacement")


def as_int64(value: int) -> int:
    """An unsigned 64-bit constant as the signed integer with the same bits: torch's integers are signed and wrap."""
    return value - (1 << 64) if value >> 63 else value


# Constants of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
GOLDEN = as_int64(0x9E3779B97F4A7C15)
MIX_1 = as_int64(0xBF58476D1CE4E5B9)
MIX_2 = as_int64(0x94D049BB133111EB)


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned shift: torch's own would fill in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser: a bijection of int64 in which every input bit moves every output bit."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """`count` random numbers per row that depend on its seed and position alone, not on the rest of the batch.

    seeds, positions: int64 [...], broadcast against each other; the position is the absolute one of the token whose
    logits are sampled, or of the tree's root, so that no two steps of a request share numbers. Returns float64
    [..., count] in [0, 1), multiples of 2^-53: with float32's 24 bits, tokens rarer than that could not be drawn.
    """
    key = mix(mix(seeds * GOLDEN) + positions * GOLDEN)
    draws = torch.arange(1, count + 1, device=seeds.device)
    return shift_right(mix(key[..., None] + draws * GOLDEN), 11).double() * 2.0**-53


@dataclass(frozen=True)
class SamplingTensors:
    """The batch's sampling settings, with what the host knows of them, so that work nobody asked for is left out."""

    temperature: torch.Tensor  # float32 [B]; 0 takes the most likely token
    top_k: torch.Tensor  # int64 [B]; 0 is off
    top_p: torch.Tensor  # float32 [B]; 1 is off
    any_top: bool  # some row with a temperature above 0 uses top-k or top-p
    all_greedy: bool  # every temperature is 0

    @classmethod
    def from_lists(
        cls, temperature: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], device: torch.device | str
    ) -> "SamplingTensors":
        """One entry per row."""
        rows = zip(temperature, top_k, top_p, strict=True)
        return cls(
            to_device([min(t, HOTTEST) for t in temperature], device, torch.float32),
            to_device(top_k, device, torch.int64),
            to_device(top_p, device, torch.float32),
            any_top=any(t > 0 and (k > 0 or p < 1) for t, k, p in rows),
            all_greedy=not any(t > 0 for t in temperature),
        )

    def rows(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> "SamplingTensors":
        """The settings of the rows that `pick` takes of a tensor."""
        return replace(self, temperature=pick(self.temperature), top_k=pick(self.top_k), top_p=pick(self.top_p))


def probabilities(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """The distributions that are sampled: temperature, then top-k, then top-p, then renormalised.

    logits [B, N, V] of any floating dtype, -inf where a grammar forbids a token. Returns float32 [B, N, V] (float64 for
    float64). Temperature 0 is all mass on the most likely token, the first of equals. Top-k keeps the equals of the
    k-th; top-p keeps the smallest set of most likely tokens whose mass reaches it, lower ids first among equals, and
    at least one token. The same as transformers' warpers.
    """
    logits = at_least_float32(logits)
    if sampling.all_greedy:
        return one_hot(logits)
    scaled = over_temperature(logits, sampling.temperature)
    if sampling.any_top:
        probs = truncated_softmax(scaled, sampling.top_k[:, None, None], sampling.top_p[:, None, None])
    else:
        probs = scaled.softmax(-1)
    return torch.where((sampling.temperature == 0)[:, None, None], one_hot(logits), probs)


def restrict(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """logits [..., V] with -inf where `allowed`, bool [..., V], is False; where no token is allowed they stay.

    Where none that is allowed has a chance (all -inf or NaN), all of them have the same.
    """
    hopeless = ~(allowed & (logits > -torch.inf)).any(-1, keepdim=True)
    logits = logits.masked_fill(allowed & hopeless, 0.0)
    return logits.masked_fill(~allowed & allowed.any(-1, keepdim=True), -torch.inf)


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """float64 stays, for proofs; everything else becomes float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def one_hot(logits: torch.Tensor) -> torch.Tensor:
    """[..., V]: 1 at the first of the greatest, 0 elsewhere."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def over_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits [B, N, V] / temperature [B], shifted to a maximum of 0; rows with temperature 0 count as 1.

    What overflowed to infinity in a narrow dtype counts as the greatest number: infinity less itself is NaN.
    """
    logits = logits.clamp(max=torch.finfo(logits.dtype).max)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    # Shifted first: divided by a tiny temperature the greatest would overflow.
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def truncated_softmax(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """softmax of scaled [B, N, V], restricted to top-k [B, 1, 1] (0: off), then to top-p [B, 1, 1] (1: off)."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    vocabulary = scaled.shape[-1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    kth = ordered.gather(-1, (k - 1).expand(*ordered.shape[:-1], 1))
    probs = ordered.masked_fill(ordered < kth, -torch.inf).softmax(-1)
    mass_before = F.pad(cumulative_sum(probs, probs.dtype)[..., :-1], (1, 0))
    # Rounding may bring the mass to 1 before the last token: top-p 1 has to keep it all the same.
    # As float32 a tiny top-p is 0: the first token has no mass before it and stays.
    kept = probs * ((mass_before < top_p) | (top_p >= 1) | (mass_before == 0))
    return torch.zeros_like(probs).scatter_(-1, index, normalised(kept))


def normalised(weights: torch.Tensor) -> torch.Tensor:
    """[..., V] non-negative, divided by their sum; all zero stays all zero."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def sample(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token of each row at which the cumulative distribution passes u.

    probs [..., V] non-negative (any positive sum), u float64 [...] in [0, 1), broadcast against each other. Returns
    int64 [...]. Never a token of probability zero, however close u is to 1 and however the sums are rounded; only a row
    without any mass returns token 0.
    """
    # A parallel cumulative sum need not be monotone to the last bit, hence the test for mass beside that of the sum.
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
    """The draft's children for each parent of a level, and the distribution q that they were drawn from.

    logits [B, P, V]; temperature float32 [B] and noise float64 [B, P, C] in [0, 1) for the multinomial modes only.
    Returns tokens int64 [B, P, C], and q [B, P, V], or None for "greedy". Children are ordered: a node with fewer takes
    the first ones.

    - "greedy": the C most likely tokens; q is a point mass, which needs no temperature or top-p (paper section 3.2).
    - "multinomial": independent draws from q = softmax(logits / temperature), without top-k and top-p. Rows with
      temperature 0 use 1: from all mass on one token there is only one child to draw.
    - "multinomial_without_replacement": each drawn from q without the ones before it, renormalised. When q has no
      mass left, token 0 is proposed, which `verify` refuses.
    """
    assert mode in DRAFT_MODES, mode
    if mode == "greedy":
        if num_children == 1:  # the faster one
            return logits.argmax(-1, keepdim=True), None
        return logits.topk(num_children).indices, None
    assert temperature is not None, mode
    assert noise is not None, mode
    q = over_temperature(at_least_float32(logits), temperature).softmax(-1)
    if mode == "multinomial":
        return sample(q[:, :, None], noise), q
    tokens, q_r = [], q
    for rank in range(num_children):
        tokens.append(sample(q_r, noise[:, :, rank]))
        q_r = normalised(q_r.scatter(-1, tokens[-1][..., None], 0.0))
    return torch.stack(tokens, -1), q


class Verified(NamedTuple):
    """What a round gave each row: the drafted tokens down to `node`, and behind them `next_token`, the next root."""

    node: torch.Tensor  # int64 [B]: the last that was accepted, the root where none was
    next_token: torch.Tensor  # int64 [B]


def verify_sampled(
    tree: Tree,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    sampling: SamplingTensors,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> Verified:
    """`verify_chosen` above temperature 0, from logits to what is committed; to be compiled as one.

    tokens int64 [B, N]; logits [B, N, V]; seeds and lengths int64 [B], the latter the root's position.
    """
    draws = uniform(seeds[:, None], lengths[:, None] + tree.depth, 1).squeeze(-1)
    return verify_chosen(tree, tokens, sample(probabilities(logits, sampling), draws))


def verify_chosen(tree: Tree, tokens: torch.Tensor, chosen: torch.Tensor) -> Verified:
    """A node is accepted if it and all above it are what the target has chosen itself.

    tokens, chosen int64 [B, N]; `chosen` is the target's own token after each node: its most likely one, or one drawn
    from p. For greedy drafts this is multi-round speculative sampling: their q is a point mass, so the first child is
    accepted with probability p(x), the next with p(y) of what is left, and what no child is comes from the rest; one
    draw from p does all three. As a draw hangs on seed and position alone (`uniform`), the tokens are those of decoding
    without drafts, whatever the tree. Among siblings with the same token the first counts.
    """
    match = tokens == chosen.index_select(1, tree.parent)
    node = torch.where(match[:, None], tree.priority[:, None], tree.if_rejected).amin(-1).argmax(-1)
    return Verified(node, chosen.gather(1, node[:, None])[:, 0])


def child_round(
    p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, replacement: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One round of multi-round speculative sampling: `token` [B], drawn from q, stands for p. DESIGN section 3.7.

    p, q [B, V]. Returns the probability of acceptance [B], and p and q for the next sibling, should this one be
    rejected. A token that q does not hold is never accepted and leaves p as it is.
    """
    column = token[:, None]
    p_x, q_x = p.gather(1, column)[:, 0], q.gather(1, column)[:, 0]
    accept = torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1.0)
    rest = (p - q).clamp(min=0.0)
    if not replacement:
        q = normalised(q.scatter(1, column, 0.0))
    # No rest means that acceptance was certain but for rounding; p itself is then as good.
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
    """Multi-round speculative sampling over a tree of drawn tokens; what it commits is distributed as the target's own.

    tokens int64 [B, N]; p [B, N, V] the target's distribution after each node; coins [B, N] and final [B] independent
    uniforms in [0, 1), the root's coin unused; q [B, N, V] the distribution each node's children were drawn from, with
    or without replacement.
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    node = torch.zeros_like(tokens[:, 0])  # the last accepted
    residual = p[:, 0]
    for depth, fanout in enumerate(tree.fanout):
        parent = node
        here = tree.depth[parent] == depth  # the other rows have stopped above
        residual = torch.where(here[:, None], p[rows, parent], residual)
        q_r = q[rows, parent]
        for rank in range(fanout):
            child = tree.children[parent, rank]
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
    """`verify` from logits to what is committed; to be compiled as one.

    tokens int64 [B, N]; logits [B, N, V]; draws [B, 1 + N or more]: the number of the token that ends the round, then
    the nodes' coins; q and `replacement` as for `verify`.
    """
    p, coins = probabilities(logits, sampling), draws[:, 1 : 1 + tree.num_nodes]
    return verify(tree, tokens, p, coins, draws[:, 0], q, replacement)
