"""The nodes of a tree that are not in the cache yet: their keys and values, and who sees whom. DESIGN section 3.6.

Knows nothing of blocks. Shapes: A active rows, Q query heads, K key/value heads, D head width, T querying nodes, N
nodes of a tree so far, S committed slots.
"""

import torch

from eagle_train.inference.cache.prefix import Prefix
from eagle_train.ops.attention import partial_attention, with_sinks
from eagle_train.ops.rule import Rule, additive_mask
from eagle_train.ops.visible_slots import VisibleSlots

Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer."""


def joint_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    masks: "Masks",
) -> torch.Tensor:
    """Attention of a tree's nodes q [A, Q, T, D] over the committed keys, values [A, K, S, D] and the nodes' k, v
    [A, K, N, D] in one product; the mask [A, 1, T, S + N] is made once for all layers of the same reach."""
    mask = masks.joint(rule, (len(q), 1, q.shape[2]), keys.shape[2], k.shape[2])
    keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
    return with_sinks(*partial_attention(q, keys, values, mask, rule), rule)


def append(tensor: torch.Tensor | None, more: torch.Tensor, dim: int) -> torch.Tensor:
    return more.clone() if tensor is None else torch.cat((tensor, more), dim)


class Suffix:
    """Keys and values of a tree's nodes, which are written to the cache only after acceptance.

    `layers`: [A, K, N, D] each, by layer.
    """

    def __init__(self) -> None:
        self.layers: Pairs = {}
        self.positions: torch.Tensor | None = None  # int64 [A, N]; None before the first node

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append a layer's k, v [A, K, T, D] of T further nodes."""
        before = self.layers.get(layer, (None, None))
        # Copied, because the memory of k and v may be reused after the call.
        self.layers[layer] = append(before[0], k, 2), append(before[1], v, 2)

    def rows(self, index: torch.Tensor) -> "Suffix":
        """The same of the rows `index` int64."""
        some = Suffix()
        some.layers = {layer: (k[index], v[index]) for layer, (k, v) in self.layers.items()}
        some.positions = None if self.positions is None else self.positions[index]
        return some


class Masks:
    """Masks of a tree's T nodes over the prefix and over the nodes; made once for all layers of the same reach."""

    def __init__(self, prefix: Prefix, positions: torch.Tensor, suffix_positions: torch.Tensor, seen: torch.Tensor):
        """`positions` int64 [A, T]: the querying nodes'; `suffix_positions` int64 [A, N]; `seen` bool [T, N], or
        [A, T, N] where the rows' trees differ."""
        self.prefix = VisibleSlots(positions, prefix.lengths.unsqueeze(1), prefix.longest, whole=not prefix.ragged)
        self._positions, self._suffix_positions, self._seen = positions, suffix_positions, seen
        self._suffix_masks: dict[tuple, torch.Tensor | None] = {}
        self._joint_masks: dict[tuple, torch.Tensor] = {}

    def suffix(self, rule: Rule) -> torch.Tensor | None:
        """Additive mask [A or 1, 1, T, N] over the nodes; None for a single node, which attends to itself."""
        if rule.reach not in self._suffix_masks:
            self._suffix_masks[rule.reach] = self._suffix_mask(rule)
        return self._suffix_masks[rule.reach]

    def joint(self, rule: Rule, shape: tuple[int, int, int], slots: int, nodes: int) -> torch.Tensor:
        """Additive mask [*shape, slots + nodes] over the prefix's slots, then the nodes. `shape`: (A, 1, T)."""
        if rule.reach not in self._joint_masks:
            parts = (self.prefix.mask(rule), slots), (self.suffix(rule), nodes)
            device = self._positions.device
            whole = [
                torch.zeros(*shape, width, device=device) if part is None else part.expand(*shape, width)
                for part, width in parts
            ]
            self._joint_masks[rule.reach] = torch.cat(whole, dim=3)
        return self._joint_masks[rule.reach]

    def _suffix_mask(self, rule: Rule) -> torch.Tensor | None:
        if self._seen.shape[-2:].numel() == 1:
            return None
        seen = self._seen if self._seen.ndim == 3 else self._seen.unsqueeze(0)  # [A or 1, T, N]
        if rule.is_local or rule.skip_first > 1:  # a tree's nodes are behind the first position
            seen = seen & rule.sees(self._positions.unsqueeze(2), self._suffix_positions.unsqueeze(1))  # [A, T, N]
        return additive_mask(seen.unsqueeze(1))
