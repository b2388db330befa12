"""Keys and values of one model in blocks of slots, and the `attend`s that read them.

The models reach it through `attend` alone. Which blocks a sequence has is decided elsewhere (block_pool.py), and is the
same for target and draft. Knows nothing of tokens, sampling or requests. DESIGN section 3.6; paper sections 3.1, 3.4.

Shapes: A active rows, W blocks of a row, S slots, K key/value heads, D head width (a layer's own), T new tokens.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from eagle_train.models.shapes import KVShape
from eagle_train.ops.attention import (
    Attend,
    Rule,
    VisibleSlots,
    additive_mask,
    merge,
    packed_attention,
    partial_attention,
    slot_attention,
    with_sinks,
)
from eagle_train.ops.transfer import to_device

Write = Callable[[int, torch.Tensor, torch.Tensor], None]
Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]  # keys and values, by layer
BLOCK = 16  # slots
ZEROS, WASTE = 0, 1  # a block that is never written, read beyond a row's slots; one that is written for padding


class Prefix:
    """How many slots of each active row are committed, and the blocks that hold them and those of the next round."""

    longest: int  # the greatest of the lengths, or more
    ragged: bool  # False: every length is `longest`

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [A]: committed slots of each row."""
        raise NotImplementedError

    @cached_property
    def blocks(self) -> torch.Tensor:
        """int64 [A, W]: each row's blocks in the order of its tokens, then WASTE."""
        raise NotImplementedError

    @staticmethod
    def of(
        lengths: list[int], blocks: list[list[int]], device: torch.device, there: torch.Tensor | None = None
    ) -> "Prefix":
        """`there`: the lengths, where the device has them already."""
        if len(blocks) == 1 and blocks[0] == list(range(blocks[0][0], blocks[0][0] + len(blocks[0]))):
            return ContiguousPrefix(lengths[0], blocks[0], device, there)
        width = max(map(len, blocks))
        table = to_device([row + [WASTE] * (width - len(row)) for row in blocks], device)
        tensor = to_device(lengths, device) if there is None else there
        return PagedPrefix(tensor, table, max(lengths), len(set(lengths)) > 1)

    def at(self, lengths: list[int]) -> "Prefix":
        """The same rows with other lengths."""
        tensor = to_device(lengths, self.lengths.device)
        return PagedPrefix(tensor, self.blocks, max(lengths), len(set(lengths)) > 1)

    def at_most(self, lengths: torch.Tensor, longest: int) -> "Prefix":
        """The same rows with lengths [A] that the device alone knows."""
        return PagedPrefix(lengths, self.blocks, longest, ragged=True)

    def grown(self, tokens: int) -> "Prefix":
        """The prefix after every row got `tokens` more."""
        return PagedPrefix(self.lengths + tokens, self.blocks, self.longest + tokens, self.ragged)

    def positions(self, count: int) -> torch.Tensor:
        """Those of each row's next `count` tokens, int64 [A, count]."""
        return self.lengths.unsqueeze(1) + torch.arange(count, device=self.lengths.device)

    def next_slots(self, positions: torch.Tensor) -> torch.Tensor | slice:
        """`slots` of the positions [A, T] that follow the prefix: a slice where they follow one another."""
        return self.slots(positions)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Where the store keeps what is at these positions [A, T]; padding beyond a row's blocks goes to waste."""
        place = positions // BLOCK
        block = self.blocks.gather(1, place.clamp(max=self.blocks.shape[1] - 1))
        block = block.masked_fill(place >= self.blocks.shape[1], WASTE)
        return block * BLOCK + positions % BLOCK


class PagedPrefix(Prefix):
    """That of any batch: lengths and blocks are tensors."""

    def __init__(self, lengths: torch.Tensor, blocks: torch.Tensor, longest: int, ragged: bool):
        self.lengths, self.blocks, self.longest, self.ragged = lengths, blocks, longest, ragged


class ContiguousPrefix(Prefix):
    """That of a batch of one, where the host knows the length and the blocks follow one another: slots are a range.

    So hardly anything need be computed: tensors are made when they are asked for.
    """

    ragged = False

    def __init__(self, length: int, blocks: list[int], device: torch.device, there: torch.Tensor | None = None):
        self.longest, self.row, self.device, self.first_slot = length, blocks, device, blocks[0] * BLOCK
        self.there = there

    @cached_property
    def lengths(self) -> torch.Tensor:
        return to_device([self.longest], self.device) if self.there is None else self.there

    @cached_property
    def blocks(self) -> torch.Tensor:
        return to_device([self.row], self.device)

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return len(self.row) * BLOCK

    def at(self, lengths: list[int]) -> "ContiguousPrefix":
        return ContiguousPrefix(lengths[0], self.row, self.device)

    def grown(self, tokens: int) -> "ContiguousPrefix":
        return ContiguousPrefix(self.longest + tokens, self.row, self.device)

    def positions(self, count: int) -> torch.Tensor:
        return torch.arange(self.longest, self.longest + count, device=self.device).unsqueeze(0)

    def has_room(self, count: int) -> bool:
        return self.longest + count <= self.capacity

    def next_slots(self, positions: torch.Tensor) -> torch.Tensor | slice:
        count, first = positions.shape[1], self.first_slot + self.longest
        return slice(first, first + count) if self.has_room(count) else super().slots(positions)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Those of positions that follow the prefix."""
        has_room = self.has_room(positions.shape[1])
        return positions + self.first_slot if has_room else super().slots(positions)


class PagedKV:
    """Keys and values of all blocks. Layers may differ in their heads and widths, and keys in width from values.

    One tensor [n, slots, K, D] holds the n layers' keys and values that are of one shape.
    """

    def __init__(
        self,
        shapes: Mapping[int, KVShape],
        blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        given: Mapping[int, int] | None = None,
        joint: bool = False,
    ):
        """`shapes`: by layer. `given`: layers that read the keys and values of the layer that is named, and have none
        of their own. `joint`: a tree attends to prefix and nodes at once, under one mask, not to each apart."""
        self.given = given or {}
        self._over_tree = _joint if joint else _split
        self.parts: dict[tuple[int, int], list[tuple[int, int]]] = {}  # heads, width: each layer, and 0 (keys) or 1
        for layer, (heads, *widths) in shapes.items():
            for which, width in enumerate(widths):
                self.parts.setdefault((heads, width), []).append((layer, which))
        where = {part: (i, j) for i, parts in enumerate(self.parts.values()) for j, part in enumerate(parts)}
        own = {layer: (*where[layer, 0], *where[layer, 1]) for layer in shapes}
        self.where = own | {layer: own[other] for layer, other in self.given.items()}
        self.hold(
            [
                torch.zeros(len(parts), blocks * BLOCK, heads, width, dtype=dtype, device=device)
                for (heads, width), parts in self.parts.items()
            ]
        )

    def by_layer(self, tensors: list[torch.Tensor]) -> Pairs:
        """Each layer's keys and values, of tensors whose first dimension is the memory's."""
        rows = [tensor.unbind() for tensor in tensors]
        return {layer: (rows[i][j], rows[m][n]) for layer, (i, j, m, n) in self.where.items()}

    def run(self, first: int, count: int) -> Pairs:
        """Each layer's keys and values in `count` slots from `first` on, where they lie: [1, K, count, D]."""
        return self.by_layer([x.narrow(1, first, count).unsqueeze(1).transpose(2, 3) for x in self.memory])

    @property
    def slots(self) -> int:
        """How many there are, used or not."""
        return self.memory[0].shape[1]

    def grown(self, blocks: int) -> list[torch.Tensor]:
        """What is to be held with so many blocks in all: those there are, and empty ones."""
        grown = [x.new_zeros(x.shape[0], blocks * BLOCK, *x.shape[2:]) for x in self.memory]
        for new, old in zip(grown, self.memory, strict=True):
            new[:, : self.slots] = old
        return grown

    def hold(self, memory: list[torch.Tensor]) -> None:
        """Go on with what `grown` gave."""
        self.memory, self.layers = memory, self.by_layer(memory)

    @property
    def by_block(self) -> list[torch.Tensor]:
        """As [n, blocks, BLOCK, K, D] each."""
        return [x.unflatten(1, (self.slots // BLOCK, BLOCK)) for x in self.memory]

    def writes(self, slots: torch.Tensor | slice) -> Write:
        """What stores a layer's k, v [A, K, T, D] at slots [A, T], or at a slice of T where A is 1."""
        if isinstance(slots, slice):
            there = self.run(slots.start, slots.stop - slots.start)

            def write(layer: int, *pair: torch.Tensor) -> None:
                if layer not in self.given:
                    for place, x in zip(there[layer], pair, strict=True):
                        place.copy_(x)
        else:

            def write(layer: int, *pair: torch.Tensor) -> None:
                if layer not in self.given:
                    for place, x in zip(self.layers[layer], pair, strict=True):
                        place[slots] = x.transpose(1, 2)

        return write

    def extend(self, prefix: Prefix, positions: torch.Tensor) -> Attend:
        """`attend` of T tokens that follow each row's prefix; their keys and values are kept. `positions` [A, T].

        The s-th slot of a row is that of position s, so `slot <= position` is all of causality, whatever lies beyond.
        """
        (rows, length), write = positions.shape, self.writes(prefix.next_slots(positions))
        if prefix.longest == 0:
            whole = packed_attention([[length]] * rows)

            def fresh(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
                write(layer, k, v)
                return whole(layer, q, k, v, rule)

            return fresh
        reach = prefix.longest + length
        committed = self.committed(prefix, reach, length)
        seen = VisibleSlots(positions, None, reach, whole=not prefix.ragged)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            write(layer, k, v)
            return with_sinks(*slot_attention(q, *committed(layer), seen, rule), rule)

        return attend

    def tree(self, prefix: Prefix, suffix: "Suffix", positions: torch.Tensor, ancestors: torch.Tensor) -> Attend:
        """`attend` of T more nodes of a tree over each row's prefix and the nodes before them, kept in `suffix`.

        `positions` [A, T] are the nodes'; `ancestors` bool [T, nodes so far] says which nodes each of them sees.
        """
        suffix.positions = append(suffix.positions, positions, 1)
        masks = Masks(prefix, positions, suffix.positions, ancestors)
        committed = self.committed(prefix, prefix.longest)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            if layer not in self.given:
                suffix.append(layer, k, v)
            k, v = suffix.layers[self.given.get(layer, layer)]
            return self._over_tree(q, *committed(layer), k, v, rule, masks)

        return attend

    def committed(
        self, prefix: Prefix, slots: int, more: int = 0
    ) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """A layer's keys and values in each row's first `slots` slots, [A, K, slots, D]; zeros beyond the prefix and
        `more` tokens.

        Blocks that follow one another are read where they lie; others are gathered.
        """
        if isinstance(prefix, ContiguousPrefix):
            assert slots <= prefix.capacity, (slots, prefix)
            there = self.run(prefix.first_slot, slots)
            return there.__getitem__
        held = prefix.lengths + more
        positions = torch.arange(slots, device=held.device).expand(len(held), -1)
        index = prefix.slots(positions).masked_fill(positions >= held.unsqueeze(1), ZEROS * BLOCK)
        flat = index.flatten()  # index_select takes half the time of an index of two dimensions, on a CPU

        def gathered(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = (x.index_select(0, flat).unflatten(0, index.shape).transpose(1, 2) for x in self.layers[layer])
            return k, v

        return gathered

    def commit(self, suffix: "Suffix", prefix: Prefix, path: torch.Tensor) -> None:
        """Write the nodes `path` [A, P] of the suffix to the slots that follow each row's prefix.

        Nodes beyond the accepted ones may be among them: their slots lie beyond the new length and are written anew.
        The suffix may have more rows, which are left out.
        """
        active, length = path.shape
        slots = prefix.slots(prefix.positions(length))
        index = path.view(1, active, 1, length, 1)
        for memory, parts in zip(self.memory, self.parts.values(), strict=True):
            kept = torch.stack([suffix.layers[layer][which] for layer, which in parts])
            memory[:, slots] = kept[:, :active].take_along_dim(index, dim=3).transpose(2, 3)


class BlockEnds:
    """The target's hidden state at the last token of each block [blocks, H]: who goes on from there needs it."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str):
        self.hidden = torch.zeros(0, width, dtype=dtype, device=device)

    def grown(self, blocks: int) -> list[torch.Tensor]:
        """As `PagedKV.grown`."""
        return [torch.cat((self.hidden, self.hidden.new_zeros(blocks - len(self.hidden), self.hidden.shape[1])))]

    def hold(self, memory: list[torch.Tensor]) -> None:
        """As `PagedKV.hold`."""
        (self.hidden,) = memory

    @property
    def by_block(self) -> list[torch.Tensor]:
        """As [1, blocks, H]."""
        return [self.hidden.unsqueeze(0)]

    def write(self, prefix: Prefix, hidden: torch.Tensor) -> None:
        """Of the tokens that follow each row's prefix, with hidden states [A, T, H], note those that end a block."""
        slots = prefix.slots(prefix.positions(hidden.shape[1]))
        self.hidden[torch.where(slots % BLOCK == BLOCK - 1, slots // BLOCK, WASTE)] = hidden


def _split(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    masks: "Masks",
) -> torch.Tensor:
    """Attention over the committed keys and values and over k, v, merged by log-sum-exp."""
    committed = slot_attention(q, keys, values, masks.prefix, rule)
    return with_sinks(*merge(committed, partial_attention(q, k, v, masks.suffix(rule), rule)), rule)


def _joint(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    masks: "Masks",
) -> torch.Tensor:
    """The twin of `_split`, with a mask [A, 1, T, S + nodes] that is made once for all layers of the same reach."""
    mask = masks.joint(rule, (len(q), 1, q.shape[2]), keys.shape[2], k.shape[2])
    keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
    return with_sinks(*partial_attention(q, keys, values, mask, rule), rule)


def append(tensor: torch.Tensor | None, more: torch.Tensor, dim: int) -> torch.Tensor:
    return more.clone() if tensor is None else torch.cat((tensor, more), dim)


class Suffix:
    """Keys and values of a tree's nodes, kept out of the cache until they are accepted: [A, K, nodes, D] a layer."""

    def __init__(self) -> None:
        self.layers: Pairs = {}
        self.positions: torch.Tensor | None = None  # [A, nodes]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        before = self.layers.get(layer, (None, None))
        # Copies: the memory of what an attend is given may be used anew.
        self.layers[layer] = append(before[0], k, 2), append(before[1], v, 2)


class Masks:
    """What a tree's nodes see of the prefix and of one another, made once for all layers of the same reach."""

    def __init__(self, prefix: Prefix, positions: torch.Tensor, suffix_positions: torch.Tensor, seen: torch.Tensor):
        self.prefix = VisibleSlots(positions, prefix.lengths.unsqueeze(1), prefix.longest, whole=not prefix.ragged)
        self.positions, self.suffix_positions, self.seen = positions, suffix_positions, seen
        self.suffix_made: dict[tuple, torch.Tensor | None] = {}
        self.joint_made: dict[tuple, torch.Tensor] = {}

    def suffix(self, rule: Rule) -> torch.Tensor | None:
        """Additive [A or 1, 1, T, nodes]; None of a node alone."""
        if rule.reach not in self.suffix_made:
            self.suffix_made[rule.reach] = self.suffix_mask(rule)
        return self.suffix_made[rule.reach]

    def joint(self, rule: Rule, shape: tuple[int, int, int], slots: int, nodes: int) -> torch.Tensor:
        """Additive [*shape, slots + nodes]: what is seen of the prefix, then of the nodes."""
        if rule.reach not in self.joint_made:
            parts = (self.prefix.mask(rule), slots), (self.suffix(rule), nodes)
            device = self.positions.device
            whole = [
                torch.zeros(*shape, width, device=device) if part is None else part.expand(*shape, width)
                for part, width in parts
            ]
            self.joint_made[rule.reach] = torch.cat(whole, dim=3)
        return self.joint_made[rule.reach]

    def suffix_mask(self, rule: Rule) -> torch.Tensor | None:
        if self.seen.numel() == 1:
            return None
        seen = self.seen.unsqueeze(0)
        if rule.is_local:
            seen = seen & rule.sees(self.positions.unsqueeze(2), self.suffix_positions.unsqueeze(1))
        return additive_mask(seen.unsqueeze(1))
