"""Sampling on the ranks of one tensor-parallel target: each samples a part of the batch, and results are all-gathered.

Paper section 3.2, DESIGN section 3.7. Every rank computes the same hidden states. The batch is padded to a multiple of
the ranks and divided: each rank computes LM head, probabilities and verification for its own rows only. Random numbers
depend on a row's seed and position alone, so that every rank would draw the same. Knows nothing of models or requests.

Shapes: A active rows, R rows of a rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first name is of torch 2.13 on


class Ranks:
    """The ranks of a process group; None: one process, without communication."""

    def __init__(self, group: Any = None, device: torch.device | str = "cpu", divided: bool = True):
        """`divided`: each rank samples a part of the batch; False: each samples all rows, and rank 0's count."""
        self.group, self.device, self.divided = group, device, divided and group is not None
        self.divided_head: Any = None  # a `DividedHead`, where the LM head is divided too
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def rows_per_rank(self, rows: int) -> int:
        """The number of rows that each rank samples of a batch of `rows`."""
        return -(-rows // self.size) if self.divided else rows

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows [R, ...] of x [A, ...]. R is the same on every rank; padding repeats the last row."""
        if not self.divided:
            return x
        count = self.rows_per_rank(len(x))
        rows = torch.arange(count * self.rank, count * (self.rank + 1), device=x.device)
        return x[rows.clamp(max=len(x) - 1)]

    def own_rows(self, rows: int) -> list[int]:
        """The numbers of the R rows that `own` picks of a batch of `rows`."""
        if not self.divided:
            return list(range(rows))
        count = self.rows_per_rank(rows)
        return [min(row, rows - 1) for row in range(count * self.rank, count * (self.rank + 1))]

    def logits(self, lm_head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, ..., V] of this rank's rows of hidden states [A, ..., H]."""
        return lm_head(self.own(hidden)) if self.divided_head is None else self.divided_head.of_own_rows(hidden)

    def all(self, batch: int, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All-gather results of the ranks' rows, int64 [R] or [R, W] each, as [A] or [A, W]; `batch` is A. Where each
        rank samples all rows, rank 0's: others may differ by rounding, as each chooses its kernels by its own times.
        One collective for all tensors."""
        if self.group is None:
            return own
        columns = torch.column_stack(own)
        if self.divided:
            everyone = columns.new_empty(self.size * len(columns), columns.shape[1])
            _all_gather(everyone, columns, group=self.group)
        else:
            everyone = self.agreed(columns)
        parts = everyone[:batch].split([x[0].numel() for x in own], dim=1)
        return tuple(part.reshape(batch, *x.shape[1:]) for part, x in zip(parts, own, strict=True))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce (sum) of x, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather of a tensor [...] that has one shape on all ranks: [size, ...]."""
        if self.group is None:
            return x.unsqueeze(0)
        everyone = x.new_empty(self.size * x.numel())
        _all_gather(everyone, x.flatten(), group=self.group)
        return everyone.view(self.size, *x.shape)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All-to-all of x [size, ...]: entry r goes to rank r, and entry r of the result is rank r's."""
        if self.group is None:
            return x
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self.group)
        return received

    def least(self, number: int) -> int:
        """All-reduce (min) of an integer; synchronises."""
        if self.group is None:
            return number
        least = torch.tensor(number, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def least_of_hosts(self, numbers: list[int]) -> list[int]:
        """All-reduce (min) of each of some integers, between the hosts: the device is not waited for."""
        if self.group is None:
            return numbers
        least = torch.tensor(numbers)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return least.tolist()

    def agreed(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's x, in place: drafts may differ by rounding, and all ranks must verify the same tokens."""
        if self.group is not None:
            dist.broadcast(x, group=self.group, group_src=0)
        return x
