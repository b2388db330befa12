"""softmax, truncated to its most likely entries: top-k, then top-p. Knows nothing of what is sampled.

Sorting a vocabulary of today takes milliseconds. What is kept is all entries down to some logit, and that logit is
found digit by digit instead: a histogram over the leading bits of the logits says in which bin it lies, a second one
over the next bits in which part of that bin. The number of steps is fixed, so nothing waits for the device.

Sums over entries are sums of integers. They are exact, so that no order of summation and no other row can change what
is kept.
"""

import torch
import torch.nn.functional as F

from eagle_train.ops.cumulative import cumulative_sum

# The two of a CPU are measured, with one thread; what bounds the memory elsewhere is not.
_SORTED_ON_CPU = 8192  # up to so many entries a CPU sorts one row faster than it searches it, if there is a top-k
_CPU_CHUNK = 1 << 18  # entries at a time: what is computed on the way stays in the caches
_CHUNK = 1 << 24  # on other devices, where it only bounds the memory: about 40 bytes an entry
_SHIFTS = (20, 9, 0)  # the digits of 31 bits, the leading one first: 11, 11 and 9 bits
_ONE = 2.0**60  # probability 1 as an integer: float32 above 2^-37 is exact, and a row's sum stays below 2^63

# The compiler does not look into an operator: its own code for the many small steps would compile for long.
torch.library.define(
    "eagle_train::searched_truncation", "(Tensor scaled, Tensor top_k, Tensor top_p, bool any_top_k) -> Tensor"
)


def truncated_softmax(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, any_top_k: bool = True
) -> torch.Tensor:
    """softmax of scaled, truncated to top-k (0: off), then to top-p (1: off), and normalised.

    scaled: float32 or float64 [B, N, V], the greatest of a row 0; top_k int64 [B]; top_p float32 [B]; any_top_k: False
    if every top_k is 0, which saves time. Returns the shape and dtype of `scaled`. Top-k keeps all entries as great as
    the k-th. Top-p keeps entries, the greatest first and lower indices first among equals, as long as the mass before
    them is below it, and at least one. No gradient.
    """
    # By nothing that other rows have a part in: a row has the same bits in any batch.
    small = scaled.device.type == "cpu" and scaled.shape[-1] <= _SORTED_ON_CPU
    if small or scaled.dtype == torch.float64:
        return sorted_truncation(scaled, top_k, top_p)
    if torch.compiler.is_compiling():
        return torch.ops.eagle_train.searched_truncation(scaled, top_k, top_p, any_top_k)
    return searched_truncation(scaled, top_k, top_p, any_top_k)


def sorted_truncation(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`truncated_softmax` by a sort: the plain twin. A row without top-k and top-p is its plain softmax, to the bit."""
    top_k, top_p = top_k[:, None, None], top_p[:, None, None]
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    vocabulary = scaled.shape[-1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    kth = ordered.gather(-1, (k - 1).expand(*ordered.shape[:-1], 1))  # [B, N, 1]: the k-th greatest logit
    probs = ordered.masked_fill(ordered < kth, -torch.inf).softmax(-1)
    mass_before = F.pad(cumulative_sum(probs, probs.dtype)[..., :-1], (1, 0))
    # Rounding may bring the mass to 1 before the last token, which top-p 1 must keep. A tiny top-p is 0 in float32: the
    # first token, before which there is no mass, is kept anyway.
    kept = probs * ((mass_before < top_p) | (top_p >= 1) | (mass_before == 0))
    truncated = torch.zeros_like(probs).scatter_(-1, index, normalised(kept))
    return torch.where((top_k > 0) | (top_p < 1), truncated, scaled.softmax(-1))


def normalised(weights: torch.Tensor) -> torch.Tensor:
    """Non-negative weights [..., V] divided by their sum; all zeros stay."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def mass(probs: torch.Tensor) -> torch.Tensor:
    """The sum of probabilities [..., V], in their dtype [..., 1]: of a row that is alone, several threads add up parts,
    so that a sum of floats has other bits than in a batch."""
    return ((probs * _ONE).long().sum(-1, keepdim=True).double() / _ONE).to(probs.dtype)


def searched_truncation(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, any_top_k: bool = True
) -> torch.Tensor:
    """`truncated_softmax` of float32 without a sort. A row without top-k and top-p is its plain softmax, to the bit.

    It keeps what `sorted_truncation` keeps, given the same probabilities. But softmax adds up a row in the row's order,
    and in float32 the order changes the last bits of all probabilities; where the mass before an entry is as close to
    top-p as that, one of the two may keep an entry more.
    """
    rows = scaled.flatten(0, -2)  # [R, V]
    k, p = (x[:, None].expand(scaled.shape[:-1]).reshape(-1, 1) for x in (top_k, top_p))  # [R, 1]
    entries = _CPU_CHUNK if scaled.device.type == "cpu" else _CHUNK
    size = max(1, entries // scaled.shape[-1])
    chunks = zip(rows.split(size), k.split(size), p.split(size), strict=True)
    return torch.cat([_truncated_rows(*chunk, any_top_k) for chunk in chunks]).view(scaled.shape)


torch.library.impl("eagle_train::searched_truncation", "CompositeExplicitAutograd", searched_truncation)


@torch.library.register_fake("eagle_train::searched_truncation")
def _searched_truncation_shape(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, any_top_k: bool
) -> torch.Tensor:
    return scaled.new_empty(scaled.shape)


def _truncated_rows(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, any_top_k: bool) -> torch.Tensor:
    """scaled float32 [R, V]; top_k and top_p [R, 1]."""
    # The bits of non-negative floats are ordered as the floats are. The key of the greatest logit is 0.
    keys = scaled.abs().view(torch.int32)
    if any_top_k:
        everything = torch.iinfo(torch.int64).max
        ones = torch.ones((1, 1), dtype=torch.int64, device=scaled.device)
        last, _, _ = _first_to_reach(keys, ones, torch.where(top_k > 0, top_k, everything))
        scaled = scaled.masked_fill(keys > last, -torch.inf)
    probs = scaled.softmax(-1)
    wanted = _as_mass(top_p)
    last, before, mass = _first_to_reach(keys, (probs * _ONE).long(), wanted)
    tied = keys == last
    rank = cumulative_sum(tied, torch.int32)  # among equals, from 1 on
    count = rank[:, -1:]
    each = (mass // count.clamp(min=1)).clamp(min=1)
    # So many of the equals have less mass than `wanted` before them. In 32 bits: a CPU compares more of them at a time.
    needed = ((wanted - before - 1) // each + 1).clamp(max=torch.iinfo(torch.int32).max).int()
    kept = (keys < last) | (tied & (rank <= needed))
    # Not by a sum of floats: of a row that is alone several threads sum up parts, in another order.
    total = (before + needed.minimum(count) * each).double() / _ONE
    return torch.where(top_p < 1, probs * kept / total.float(), probs)


def _as_mass(top_p: torch.Tensor) -> torch.Tensor:
    """float32 [R, 1] -> int64: the least mass that float32 would round to top_p or more; at least 1.

    So a sum that float32 cannot tell from top-p reaches it: three times 0.1 is 0.3.
    """
    below = torch.nextafter(top_p, torch.zeros_like(top_p))
    middle = ((below.double() + top_p.double()) * (_ONE / 2)).long()
    return (middle + (middle.float() < top_p * _ONE)).clamp(min=1)  # the middle itself is rounded to the even one


def _first_to_reach(
    keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row the least key whose entries, with those of all lesser keys, have a weight of `wanted` or more in sum.

    keys int32 [R, V], non-negative; weights int64 [R or 1, V or 1], non-negative; wanted int64 [R, 1], positive.
    Returns the key int32 [R, 1], the weight of all lesser keys and that of the key, int64 [R, 1]. The greatest possible
    key where all of the row's weight is less.
    """
    prefix, before, mass = keys.new_zeros(len(keys), 1), torch.zeros_like(wanted), wanted
    above = 31
    for shift in _SHIFTS:
        bits = above - shift
        high = keys >> shift
        # Those outside the bin weigh nothing, wherever they are added. The first digit has all in one bin.
        inside = weights.expand(keys.shape) if above == 31 else weights * ((high >> bits) == prefix)
        sums = wanted.new_zeros(len(keys), 1 << bits).scatter_add_(1, (high & ((1 << bits) - 1)).long(), inside)
        up_to = before + sums.cumsum(-1)
        digit = (up_to < wanted).sum(-1, keepdim=True).clamp(max=(1 << bits) - 1)
        mass = sums.gather(1, digit)
        before = up_to.gather(1, digit) - mass
        prefix = (prefix << bits) | digit.int()
        above = shift
    return prefix, before, mass
