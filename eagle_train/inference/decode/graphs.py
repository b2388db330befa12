"""Launches drafting and validation, kernel by kernel or as CUDA graphs. Paper section 3.4.

A graph is recorded for each tree, number of rows and number of slots; rows and slots are padded to powers of two, so
that there are few graphs. What differs between rounds of equal sizes is in tensors, which are copied to the graph's
inputs before it is replayed. Knows nothing of requests.

Shapes: A active rows, N tree nodes, P pending tokens, W blocks of a row, H hidden, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eagle_train.errors import OptionError, check
from eagle_train.inference.cache.paged_kv import PagedKV, Suffix
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH, PagedPrefix, Prefix
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.decode.validation import validate
from eagle_train.inference.drafters.drafter import Choice, Drafted, Drafter, Pending, TreePlan
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Forward
from eagle_train.ops.graphs import CudaGraphs, Padded, Record, Recordings

LEAST_SLOTS = 256  # of a row that a graph is recorded for


class Eager:
    """Launches kernel by kernel."""

    validate = staticmethod(validate)

    def propose(self, drafter: Drafter, *given: Any) -> Drafted:
        """`drafter.propose(*given)`."""
        return drafter.propose(*given)

    def forget(self, slots: int) -> None:
        """The cache's tensors were replaced; a row has at most `slots` slots now."""


EAGER = Eager()


def check_graphs(
    graphs: bool | None, device: torch.device | str, is_divided: bool = False, is_offloaded: bool = False
) -> None:
    """Raise OptionError where graphs are asked for without a GPU, or of a target that is divided or offloaded."""
    kind = torch.device(device).type
    check(not graphs or kind == "cuda", f"graphs=True: needs a GPU; the device is {kind}", OptionError)
    check(
        not graphs or not is_divided,
        "graphs=True: the target is divided over ranks, which talk to each other within a forward; must be False",
        OptionError,
    )
    check(
        not graphs or not is_offloaded,
        "graphs=True: the target is offloaded, and its weights are fetched within a forward; must be False",
        OptionError,
    )


def launcher(graphs: bool, device: torch.device, rows: int, pending: int) -> "Eager | Graphs":
    """The engine's launcher. `rows` and `pending`: as for `Graphs`."""
    return Graphs(partial(CudaGraphs, device), rows, pending) if graphs else EAGER


class Graphs:
    """Launches `Drafter.propose` and `validate` as CUDA graphs.

    The next call of the same method overwrites what one returned, except `validate`'s hidden states. Suffixes have the
    padding rows too.
    """

    def __init__(self, recorder: Callable[[], Record], rows: int, pending: int):
        """`recorder`: returns an object that records. `rows`: of the largest batch; `pending`: the most tokens that a
        round leaves for the drafter to process in the next one."""
        self._recorder, self._rows, self._pending = recorder, rows, pending
        self.forget(slots=0)

    def forget(self, slots: int) -> None:
        """As `Eager.forget`."""
        self._slots = slots
        # Separate memory: validation must not overwrite what was drafted.
        self.drafting, self.validation = Recordings(self._recorder()), Recordings(self._recorder())

    def sizes(self, prefix: Prefix) -> tuple[int, int]:
        """The numbers of rows and slots that a batch is padded to."""
        rows, slots = len(prefix.lengths), max(prefix.blocks.shape[1] * BLOCK, LEAST_SLOTS)
        return min(_power_of_two(rows), self._rows), min(_power_of_two(slots), self._slots)

    def propose(
        self, drafter: Drafter, plan: TreePlan, prefix: Prefix, draft_prefix: Prefix, pending: Pending, choice: Choice
    ) -> Drafted:
        """As `drafter.propose`, for rounds without a grammar.

        A round in which the drafter catches up on more than `pending` tokens is not recorded: it is rare.
        """
        if pending.tokens.shape[1] > self._pending:
            return drafter.propose(plan, prefix, draft_prefix, pending, choice)
        active, (rows, slots), mode = len(prefix.lengths), self.sizes(prefix), choice.mode

        def work(
            lengths: torch.Tensor,  # int64 [rows]
            blocks: torch.Tensor,  # int64 [rows, slots / BLOCK]
            draft_lengths: torch.Tensor,  # int64 [rows]
            tokens: torch.Tensor,  # int64 [rows, pending]
            hidden: torch.Tensor,  # [rows, pending, H]
            counts: torch.Tensor,  # int64 [rows]
            *drawn: torch.Tensor,  # temperature [rows] and noise [rows, draws], or none
        ) -> Drafted:
            whole, last = PagedPrefix(lengths, blocks, slots, ragged=True), Pending(tokens, hidden, counts, lengths)
            temperature, noise = drawn or (None, None)
            same = Choice(mode, temperature, noise)
            return drafter.propose(plan, whole, whole.with_device_lengths(draft_lengths, slots), last, same)

        inputs = [
            *_padded_prefix(prefix, rows, slots),
            Padded(draft_prefix.lengths, (rows,)),
            Padded(pending.tokens, (rows, self._pending)),
            Padded(pending.hidden, (rows, self._pending, pending.hidden.shape[2])),
            Padded(pending.counts, (rows,), fill=1),  # 0 would place the pending token at -1
            *(Padded(x, (rows, *x.shape[1:])) for x in (choice.temperature, choice.noise) if x is not None),
        ]
        tokens, q, suffix = self.drafting((rows, slots, plan, mode), work, inputs)
        return Drafted(tokens[:active], None if q is None else q[:active], suffix)

    def validate(
        self,
        target: Target,
        forward: Forward,
        cache: PagedKV,
        prefix: Prefix,
        tree: Tree,
        tokens: torch.Tensor,
        ranks: Ranks,
    ) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
        """As `validate`."""
        active, (rows, slots) = len(prefix.lengths), self.sizes(prefix)

        def work(
            lengths: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
            return validate(
                target, forward, cache, PagedPrefix(lengths, blocks, slots, ragged=True), tree, tokens, ranks
            )

        inputs = [*_padded_prefix(prefix, rows, slots), Padded(tokens, (rows, tree.num_nodes))]
        hidden, logits, suffix = self.validation((rows, slots, tree), work, inputs)
        return hidden[:active].clone(), logits[:active], suffix  # the drafter may use the hidden states rounds later


def _padded_prefix(prefix: Prefix, rows: int, slots: int) -> tuple[Padded, Padded]:
    """Lengths and block table. Padding rows have length 0, and write to the SCRATCH block."""
    return Padded(prefix.lengths, (rows,)), Padded(prefix.blocks, (rows, slots // BLOCK), fill=SCRATCH)


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
