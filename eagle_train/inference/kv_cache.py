"""Keys and values of one model for a batch of sequences, contiguous, and the `attend`s that read them.

The models reach it through `attend` alone, so another store can take its place without touching them. Knows nothing of
tokens, sampling or requests. DESIGN section 3.6; paper section 3.1.

Shapes: L layers, A active rows, S slots, K key/value heads, D head width, T new tokens.
"""

from dataclasses import dataclass

import torch

from eagle_train.ops.attention import Attend, Rule, additive, causal_attention, merge, partial_attention, with_sinks


@dataclass(frozen=True)
class Prefix:
    """How many slots of each active row are committed: on the device, and what the host knows of it."""

    lengths: torch.Tensor  # [A] int64
    longest: int
    ragged: bool

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Prefix":
        return cls(torch.tensor(lengths, device=device), max(lengths), len(set(lengths)) > 1)

    def grown(self, tokens: int) -> "Prefix":
        """The prefix after every row got `tokens` more."""
        return Prefix(self.lengths + tokens, self.longest + tokens, self.ragged)


class KVCache:
    """Contiguous keys and values [L, rows, S, K, D]; rows 0..A-1 are the active ones."""

    def __init__(
        self, layers: int, heads: int, width: int, rows: int, slots: int, dtype: torch.dtype, device: torch.device
    ):
        self.keys = torch.zeros(layers, rows, slots, heads, width, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def move_row(self, source: int, destination: int) -> None:
        """Let a row take another's place, so that the active rows stay together."""
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]

    def write(self, layer: int | slice, rows: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """Store k, v [(L,) A, K, T, D] at rows [A] and slots [A, T]."""
        where = (layer, rows.unsqueeze(1), slots)
        self.keys[where] = k.transpose(-3, -2)
        self.values[where] = v.transpose(-3, -2)

    def fresh(self, rows: torch.Tensor, length: int) -> Attend:
        """`attend` of a prefill: the tokens are the first of their rows; their keys and values are kept."""
        slots = torch.arange(length, device=rows.device).expand(len(rows), -1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            self.write(layer, rows, slots, k, v)
            return causal_attention(q, k, v, rule)

        return attend

    def extend(self, prefix: Prefix, positions: torch.Tensor) -> Attend:
        """`attend` of T tokens that follow each row's prefix; their keys and values are kept. `positions` [A, T].

        A slot is its token's position, so `slot <= position` is all of causality, whatever lies in slots beyond.
        """
        active, length = positions.shape
        rows = torch.arange(active, device=positions.device)
        slots = torch.arange(prefix.longest + length, device=positions.device)
        keys, values = self.committed(active, len(slots))
        masks: dict[tuple, torch.Tensor | None] = {}

        def mask(rule: Rule) -> torch.Tensor | None:
            if length == 1 and not prefix.ragged and not rule.is_local:
                return None
            queries = positions.unsqueeze(2)
            return additive(((slots <= queries) & rule.sees(queries, slots)).unsqueeze(1))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            self.write(layer, rows, positions, k, v)
            if rule.reach not in masks:
                masks[rule.reach] = mask(rule)
            return with_sinks(*partial_attention(q, keys[layer], values[layer], masks[rule.reach], rule), rule)

        return attend

    def tree(self, prefix: Prefix, suffix: "Suffix", positions: torch.Tensor, ancestors: torch.Tensor) -> Attend:
        """`attend` of T more nodes of a tree over each row's prefix and the nodes before them, kept in `suffix`.

        `positions` [A, T] are the nodes'; `ancestors` bool [T, nodes so far] says which nodes each of them sees.
        """
        suffix.positions = append(suffix.positions, positions, 1)
        masks = Masks(prefix, positions, suffix.positions, ancestors)
        keys, values = self.committed(len(positions), prefix.longest)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            k, v = suffix.append(layer, k, v)
            return over_both(q, keys[layer], values[layer], k, v, rule, masks)

        return attend

    def committed(self, active: int, slots: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Views of each layer's keys and of its values in the first slots, [A, K, slots, D]."""
        keys, values = (cache[:, :active, :slots].transpose(2, 3).unbind() for cache in (self.keys, self.values))
        return keys, values

    def commit(self, suffix: "Suffix", prefix: Prefix, path: torch.Tensor) -> None:
        """Write the nodes `path` [A, P] of the suffix to the slots that follow each row's prefix.

        Nodes beyond the accepted ones may be among them: their slots lie beyond the new length and are written anew.
        """
        active, length = path.shape
        slots = prefix.lengths.unsqueeze(1) + torch.arange(length, device=path.device)
        rows = torch.arange(active, device=path.device)
        index = path.view(1, active, 1, length, 1)
        k, v = (torch.stack(tensors).take_along_dim(index, dim=3) for tensors in (suffix.keys, suffix.values))
        self.write(slice(None), rows, slots, k, v)


def over_both(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    masks: "Masks",
) -> torch.Tensor:
    """Attention over the committed keys and values and over k, v, merged by log-sum-exp."""
    prefix_mask, suffix_mask = masks.of(rule)
    committed = partial_attention(q, keys, values, prefix_mask, rule)
    return with_sinks(*merge(committed, partial_attention(q, k, v, suffix_mask, rule)), rule)


def append(tensor: torch.Tensor | None, more: torch.Tensor, dim: int) -> torch.Tensor:
    return more if tensor is None else torch.cat((tensor, more), dim)


class Suffix:
    """Keys and values of a tree's nodes, kept out of the cache until they are accepted: [A, K, nodes, D] a layer."""

    def __init__(self, layers: int):
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.positions: torch.Tensor | None = None  # [A, nodes]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer] = append(self.keys[layer], k, 2)
        self.values[layer] = append(self.values[layer], v, 2)
        return self.keys[layer], self.values[layer]


class Masks:
    """Additive masks of the prefix and of the suffix, made once for all layers with the same window and chunk."""

    def __init__(self, prefix: Prefix, positions: torch.Tensor, suffix_positions: torch.Tensor, seen: torch.Tensor):
        self.prefix, self.positions, self.suffix_positions, self.seen = prefix, positions, suffix_positions, seen
        self.made: dict[tuple, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def of(self, rule: Rule) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[A or 1, 1, T or 1, S] of the prefix, None where every slot is seen, and [A or 1, 1, T, nodes]."""
        if rule.reach not in self.made:
            self.made[rule.reach] = self.prefix_mask(rule), self.suffix_mask(rule)
        return self.made[rule.reach]

    def prefix_mask(self, rule: Rule) -> torch.Tensor | None:
        prefix = self.prefix
        if not prefix.ragged and not rule.is_local:
            return None
        slots = torch.arange(prefix.longest, device=prefix.lengths.device)
        seen = slots < prefix.lengths.view(-1, 1, 1)
        if rule.is_local:
            seen = seen & rule.sees(self.positions.unsqueeze(2), slots)
        return additive(seen.unsqueeze(1))

    def suffix_mask(self, rule: Rule) -> torch.Tensor | None:
        if self.seen.numel() == 1:
            return None
        seen = self.seen.unsqueeze(0)
        if rule.is_local:
            seen = seen & rule.sees(self.positions.unsqueeze(2), self.suffix_positions.unsqueeze(1))
        return additive(seen.unsqueeze(1))
