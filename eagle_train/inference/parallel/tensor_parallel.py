"""The ranks that hold one target together: each samples some rows of the batch, and all get the results.

Paper section 3.2, DESIGN section 3.7. Every rank computes the same hidden states, so that any of them could sample any
row. The batch is divided instead, padded to a multiple of the ranks: each applies the LM head, the probabilities and
the verification to its own rows only. Random numbers hang on a row's seed and place, so that whoever samples it has the
same ones. Knows nothing of models or requests.

Shapes: A active rows, R rows of a rank.
"""

from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The ranks of a process group; None: this process alone, and everything here costs nothing."""

    def __init__(self, group: Any = None, device: torch.device | str = "cpu", divided: bool = True):
        """`divided`: each rank samples some rows of the batch; False: each samples all of them."""
        self.group, self.device, self.divided = group, device, divided and group is not None
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def rows_per_rank(self, rows: int) -> int:
        """How many of `rows` rows each rank samples."""
        return -(-rows // self.size) if self.divided else rows

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows [R, ...] of x [A, ...]: as many on every rank, the last row again where there are none."""
        if not self.divided:
            return x
        count = self.rows_per_rank(len(x))
        rows = torch.arange(count * self.rank, count * (self.rank + 1), device=x.device)
        return x[rows.clamp(max=len(x) - 1)]

    def all(self, batch: int, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the ranks found for their rows, int64 [R] or [R, W] each, for the whole batch; told in one call."""
        if not self.divided:
            return own
        columns = torch.column_stack(own)
        everyone = columns.new_empty(self.size * len(columns), columns.shape[1])
        dist.all_gather_into_tensor(everyone, columns, group=self.group)
        parts = everyone[:batch].split([x[0].numel() for x in own], dim=1)
        return tuple(part.reshape(batch, *x.shape[1:]) for part, x in zip(parts, own, strict=True))

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers, on every rank; waited for."""
        if self.group is None:
            return number
        least = torch.tensor(number, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def agreed(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's x, on every rank: drafts may hang on a rounding, and the target must read the same tokens.

        In place."""
        if self.group is not None:
            dist.broadcast(x, group=self.group, group_src=0)
        return x
