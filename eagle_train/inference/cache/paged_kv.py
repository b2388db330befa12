"""The paged KV cache of one model, and the attention functions that read and write it.

A slot holds one token's key and value in every layer; a block is BLOCK slots. Models use the cache only through the
`attend` that `PagedKV.extend` or `PagedKV.tree` returns. block_pool.py decides which sequence has which block, the same
ones for target and draft. Knows nothing of token ids, sampling or requests. DESIGN section 3.6; paper section 3.1.

Shapes: A active rows, W blocks of a row, S slots, Q query heads, K key/value heads, D head width (a layer's own), T new
tokens or nodes, N nodes of a tree so far.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from eagle_train.inference.cache.block_pool import blocks_for
from eagle_train.inference.cache.prefix import BLOCK, ZEROS, ContiguousPrefix, Prefix, RowRange
from eagle_train.inference.cache.suffix import Masks, Pairs, Suffix, append, joint_attention
from eagle_train.models.shapes import KVShape
from eagle_train.ops import paged
from eagle_train.ops.attention import merge, packed_attention, partial_attention, slot_attention, with_sinks
from eagle_train.ops.rule import Attend, Rule
from eagle_train.ops.visible_slots import VisibleSlots

# Keys or values of a layer that a call over ranges must read for the call to be worth its cost, on a CPU.
_LEAST_IN_PLACE = 2**17

_Write = Callable[[int, torch.Tensor, torch.Tensor], None]
_OverSlots = Callable[[int, torch.Tensor, Rule], tuple[torch.Tensor, torch.Tensor]]
_OverPart = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]


def _unseen_slots(prefix: Prefix, slots: int, rule: Rule) -> int:
    """So many first slots, whole blocks and not all `slots`, are behind the windows of all tokens after the prefix."""
    if rule.window is None or rule.chunk is not None:
        return 0
    unseen = min(max(0, prefix.shortest - rule.window + 1), slots - 1)
    return unseen // BLOCK * BLOCK


class PagedKV:
    """A model's keys and values in all blocks. Layers may differ in heads and widths, and keys in width from values.

    `memory`: for each (K, D) one tensor [n, slots, K, D] of the n keys and values, of any layers, that have this shape.
    `layers`: each layer's keys and values as views [slots, K, D].
    `on_write`: called with a layer that has written its keys and values of a prefill, before it attends.
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
        """`shapes`: by layer. `given`: for layers without keys and values of their own, the layer whose they use.
        `joint`: tree attention over prefix and nodes in one product under one mask; False: over each apart, merged.
        """
        self.given = given or {}
        self.on_write: Callable[[int], None] | None = None
        self._is_joint = joint
        self.gathers = 0  # how often attention read copies of slots, which take time and memory by the table's width
        self._workspaces: dict[tuple[int, int, int], torch.Tensor] = {}  # see `_workspace`
        self._parts: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by (K, D): (layer, 0 for keys or 1 for values)
        for layer, (heads, *widths) in shapes.items():
            for which, width in enumerate(widths):
                self._parts.setdefault((heads, width), []).append((layer, which))
        where = {part: (i, j) for i, parts in enumerate(self._parts.values()) for j, part in enumerate(parts)}
        own = {layer: (*where[layer, 0], *where[layer, 1]) for layer in shapes}
        self._where = own | {layer: own[other] for layer, other in self.given.items()}
        self.hold(
            [
                torch.zeros(len(parts), blocks * BLOCK, heads, width, dtype=dtype, device=device)
                for (heads, width), parts in self._parts.items()
            ]
        )

    @property
    def slots(self) -> int:
        """The number of slots, used or not."""
        return self.memory[0].shape[1]

    def grown(self, blocks: int) -> list[torch.Tensor]:
        """Copies of `memory` with `blocks` blocks in all, the new ones zero."""
        grown = [x.new_zeros(x.shape[0], blocks * BLOCK, *x.shape[2:]) for x in self.memory]
        for new, old in zip(grown, self.memory, strict=True):
            new[:, : self.slots] = old
        return grown

    def hold(self, memory: list[torch.Tensor]) -> None:
        """Use the tensors that `grown` returned from now on."""
        self.memory, self.layers = memory, self._by_layer(memory)

    @property
    def by_block(self) -> list[torch.Tensor]:
        """Views of `memory`, [n, blocks, BLOCK, K, D] each."""
        return [x.unflatten(1, (self.slots // BLOCK, BLOCK)) for x in self.memory]

    def extend(self, prefix: Prefix, positions: torch.Tensor) -> Attend:
        """Attention of T tokens over each row's prefix and, causally, over themselves; writes their keys and values.

        `positions` int64 [A, T], directly after the prefix. A row's slot s holds position s, so the causal mask is
        `slot <= position`, which also hides stale slots.
        """
        (rows, length), write = positions.shape, self._writes(prefix.next_slots(positions))
        if prefix.longest == 0:
            whole = packed_attention([[length]] * rows)

            def fresh(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
                write(layer, k, v)
                return whole(layer, q, k, v, rule)

            return fresh
        reach = prefix.longest + length
        seen = VisibleSlots(positions, None, reach, whole=not prefix.ragged)
        over_slots = self._over_slots(prefix, seen, reach, length)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            write(layer, k, v)
            return with_sinks(*over_slots(layer, q, rule), rule)

        return attend

    def tree(self, prefix: Prefix, suffix: Suffix, positions: torch.Tensor, ancestors: torch.Tensor) -> Attend:
        """Attention of T further nodes of a tree over each row's prefix and their ancestors. Their keys and values are
        appended to `suffix`, not written to the cache.

        `positions` int64 [A, T]: the nodes'; `ancestors` bool [T, N], or [A, T, N] where the rows' trees differ: the
        mask of the T nodes over all nodes of the suffix, themselves included.
        """
        suffix.positions = append(suffix.positions, positions, 1)
        masks = Masks(prefix, positions, suffix.positions, ancestors)
        over_prefix = self._over_slots(prefix, masks.prefix, prefix.longest)
        committed = self._committed(prefix, prefix.longest) if self._is_joint else None

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            if layer not in self.given:
                suffix.append(layer, k, v)
            k, v = suffix.layers[self.given.get(layer, layer)]
            if committed is not None:
                return joint_attention(q, *committed(layer), k, v, rule, masks)
            over_nodes = partial_attention(q, k, v, masks.suffix(rule), rule)
            return with_sinks(*merge(over_prefix(layer, q, rule), over_nodes), rule)

        return attend

    def commit(self, suffix: Suffix, prefix: Prefix, path: torch.Tensor) -> None:
        """Write the suffix's nodes `path`, int64 [A, P], to the P slots that follow each row's prefix.

        `path` may be longer than the accepted path: the extra slots are after the new length and are overwritten in the
        next round. The suffix may have padding rows after the A.
        """
        active, length = path.shape
        slots = prefix.slots(prefix.positions(length))  # [A, P]
        index = path.view(1, active, 1, length, 1)
        for memory, parts in zip(self.memory, self._parts.values(), strict=True):
            kept = torch.stack([suffix.layers[layer][which] for layer, which in parts])  # [n, A or more, K, N, D]
            memory[:, slots] = kept[:, :active].take_along_dim(index, dim=3).transpose(2, 3)  # [n, A, P, K, D]

    def _by_layer(self, tensors: list[torch.Tensor]) -> Pairs:
        """Each layer's keys and values, as views of tensors whose first dimensions are those of `memory`."""
        rows = [tensor.unbind() for tensor in tensors]
        return {layer: (rows[i][j], rows[m][n]) for layer, (i, j, m, n) in self._where.items()}

    def _views(self, first: int, count: int) -> Pairs:
        """Each layer's keys and values in `count` slots from `first` on, as views [1, K, count, D]."""
        return self._by_layer([x.narrow(1, first, count).unsqueeze(1).transpose(2, 3) for x in self.memory])

    def _writes(self, slots: torch.Tensor | slice) -> _Write:
        """A function that writes a layer's k, v [A, K, T, D] to slots [A, T], or to a slice of T where A is 1."""
        if isinstance(slots, slice):
            views = self._views(slots.start, slots.stop - slots.start)

            def write(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
                if layer not in self.given:
                    keys, values = views[layer]
                    keys.copy_(k)
                    values.copy_(v)
        else:

            def write(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
                if layer in self.given:
                    return
                keys, values = self.layers[layer]
                if paged.writes(keys, values):
                    paged.write(k, v, keys, values, slots)
                else:
                    keys[slots], values[slots] = k.transpose(1, 2), v.transpose(1, 2)  # [A, T, K, D]

        if (tell := self.on_write) is None:
            return write

        def write_and_tell(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            write(layer, k, v)
            if layer not in self.given:
                tell(layer)

        return write_and_tell

    def _over_slots(self, prefix: Prefix, seen: VisibleSlots, slots: int, more: int = 0) -> _OverSlots:
        """A function of layer, q [A, Q, T, D] and rule: attention over the rows' first `slots` slots, masked by `seen`.

        It returns the output [A, Q, T, D] and the log-sum-exp [A, Q, T]. On a GPU and with few queries it is paged
        attention through the block table. On a CPU keys and values are read where they lie, see `_in_place`. Else they
        are gathered first, see `_committed`; of a layer with a window, no blocks that none of the queries sees.
        """
        gathered: dict[int, tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], VisibleSlots]] = {}
        in_place = self._in_place(prefix, seen, slots, more)

        def attend(layer: int, q: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = self.layers[layer]
            if paged.supports(q, keys, values):
                runs = seen.runs(rule)
                return paged.paged_attention(q, keys, values, prefix.blocks, BLOCK, *runs, rule.scale, rule.softcap)
            if in_place is not None and not rule.is_local:
                return in_place(layer, q, rule)
            first = _unseen_slots(prefix, slots, rule)
            if first not in gathered:
                gathered[first] = self._committed(prefix, slots, more, first), seen.behind(first)
            read, visible = gathered[first]
            return slot_attention(q, *read(layer), visible, rule.behind_first if first else rule)

        return attend

    def _in_place(self, prefix: Prefix, seen: VisibleSlots, slots: int, more: int) -> _OverSlots | None:
        """As `_over_slots`, on a CPU and for rules that are not local, without a copy of what all rows have; None where
        the rows' slots are not ranges, or so few that a copy is faster.

        Rows that lie at equal distances are read by one call. Rows of unequal lengths are read so up to the shortest's
        last block; what is behind it is gathered, and the two parts are merged.
        """
        shared = (prefix.shortest - 1) // BLOCK * BLOCK if prefix.ragged else slots  # every row has slots behind it
        memory = self.memory[0]
        if memory.device.type != "cpu" or shared <= 0:
            return None
        ranges = prefix.ranges(shared)
        work = len(seen.positions) * shared * memory.shape[2] * memory.shape[3]
        if not ranges or work < _LEAST_IN_PLACE * len(ranges):
            return None
        views = [(each.rows, self._range_views(each, shared)) for each in ranges]

        def over_ranges(layer: int, q: torch.Tensor, attend: _OverPart) -> tuple[torch.Tensor, torch.Tensor]:
            if len(views) == 1:
                return attend(q, *views[0][1][layer], slice(None))
            parts = [attend(q[rows], *own[layer], rows) for rows, own in views]
            return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

        if shared == slots:

            def over_all(layer: int, q: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
                return over_ranges(layer, q, lambda q, k, v, rows: slot_attention(q, k, v, seen.rows(rows), rule))

            return over_all
        behind = seen.behind(shared)
        rest = self._gathered_blocks(
            prefix.blocks[:, shared // BLOCK :], prefix.lengths + more - shared, slots - shared
        )

        def over_both(layer: int, q: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
            first, rule = rule.skip_first, rule.behind_first

            def all_seen(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: slice
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return partial_attention(q, k[:, :, first:], v[:, :, first:], None, rule)

            return merge(over_ranges(layer, q, all_seen), slot_attention(q, *rest(layer), behind, rule))

        return over_both

    def _range_views(self, rows: RowRange, count: int) -> Pairs:
        """Each layer's keys and values in the rows' first `count` slots, as views [A, K, count, D]."""
        number, views = rows.rows.stop - rows.rows.start, []
        for x in self.memory:
            n, slots, heads, width = x.shape
            one = heads * width
            size, stride = (n, number, count, heads, width), (slots * one, rows.spacing * one, one, width, 1)
            views.append(x.as_strided(size, stride, rows.first * one).transpose(2, 3))
        return self._by_layer(views)

    def _committed(
        self, prefix: Prefix, slots: int, more: int = 0, first: int = 0
    ) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """A function that returns a layer's keys and values in each row's slots from `first`, a block's first, up to
        `slots`, [A, K, slots - first, D].

        Views if the row's slots are a range; else gathered, with zeros after the prefix and `more` tokens.
        """
        if isinstance(prefix, ContiguousPrefix):
            assert slots <= prefix.capacity, (slots, prefix)
            return self._views(prefix.first_slot + first, slots - first).__getitem__
        self.gathers += 1
        held = prefix.lengths + more
        if held.device.type == "cpu":
            return self._gathered_blocks(prefix.blocks[:, first // BLOCK :], held - first, slots - first)
        positions = torch.arange(first, slots, device=held.device).expand(len(held), -1)
        index = prefix.slots(positions).masked_fill(positions >= held.unsqueeze(1), ZEROS * BLOCK)
        flat = index.flatten()

        def gathered(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = (x.index_select(0, flat).unflatten(0, index.shape).transpose(1, 2) for x in self.layers[layer])
            return k, v

        return gathered

    def _gathered_blocks(
        self, blocks: torch.Tensor, held: torch.Tensor, slots: int
    ) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """As `_committed`, by whole blocks into memory that all layers and rounds use again: memory that is new takes a
        CPU as long as the copy. What is returned holds until the next call.

        `blocks` int64 [A, W]; `held` int64 [A]: how many slots of each row are read, zeros follow.
        """
        rows, width = len(held), blocks_for(slots)
        table = F.pad(blocks[:, :width], (0, width - min(width, blocks.shape[1])), value=ZEROS)
        table = table.masked_fill(torch.arange(width) * BLOCK >= held.unsqueeze(1), ZEROS).flatten()  # [A * width]
        # The slots of a row's last block that are not held, [A, BLOCK]; one behind all rows where there is none.
        behind = held.unsqueeze(1) + torch.arange(BLOCK)
        stale = (held.unsqueeze(1) % BLOCK > 0) & (behind // BLOCK == held.unsqueeze(1) // BLOCK)
        own = torch.arange(rows).unsqueeze(1) * width * BLOCK + behind
        stale_slots = own.masked_fill(~stale, rows * width * BLOCK).flatten()

        def gathered(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            pair = []
            for which, stored in enumerate(self.layers[layer]):
                heads, wide = stored.shape[1:]
                flat = self._workspace(which, len(table) * BLOCK + 1, heads, wide)
                by_block = flat[:-1].view(len(table), -1)
                torch.index_select(stored.reshape(-1, by_block.shape[1]), 0, table, out=by_block)
                flat.index_fill_(0, stale_slots, 0.0)
                pair.append(flat[:-1].view(rows, -1, heads, wide)[:, :slots].transpose(1, 2))
            return pair[0], pair[1]

        return gathered

    def _workspace(self, which: int, slots: int, heads: int, width: int) -> torch.Tensor:
        """Memory [slots, K, D] for gathered keys (0) or values (1), which is kept."""
        key, wanted = (which, heads, width), slots * heads * width
        if key not in self._workspaces or len(self._workspaces[key]) < wanted:
            self._workspaces.pop(key, None)
            with torch.inference_mode(False):  # who decodes without it must be able to write
                self._workspaces[key] = self.memory[0].new_empty(wanted + wanted // 4)  # contexts grow
        return self._workspaces[key][:wanted].view(slots, heads, width)
