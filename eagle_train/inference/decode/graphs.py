"""How drafting and validation are launched: operation by operation, or as recordings of the whole. Paper section 3.4.

There is a recording for each size of batch and of caches, and tree; rows and slots are padded to powers of two, so that
there are few. All that differs between two rounds of the same sizes is in tensors, which are copied to where the
recordings read. Knows nothing of requests.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eagle_train.errors import OptionError, check
from eagle_train.inference.cache.paged_kv import BLOCK, SCRATCH, PagedKV, PagedPrefix, Prefix, Suffix
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.decode.validation import validate
from eagle_train.inference.drafters.drafter import Choice, Drafted, Drafter, Pending, TreePlan
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Forward
from eagle_train.ops.graphs import CudaGraphs, Padded, Record, Recordings

LEAST_SLOTS = 256


class Eager:
    """Operation by operation."""

    validate = staticmethod(validate)

    def propose(self, drafter: Drafter, *given: Any) -> Drafted:
        return drafter.propose(*given)

    def forget(self, slots: int) -> None:
        """The stores are others now, and a sequence has so many slots at most."""


EAGER = Eager()


def check_graphs(
    graphs: bool, device: torch.device | str, is_divided: bool = False, is_offloaded: bool = False
) -> None:
    """Raise OptionError for graphs without a GPU, or of a target that is divided over ranks or offloaded."""
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
    """What an engine launches with; sizes as for `Graphs`."""
    return Graphs(partial(CudaGraphs, device), rows, pending) if graphs else EAGER


class Graphs:
    """`Drafter.propose` and `validate`, recorded. What they return is to be read before they are called again, but
    for `validate`'s hidden states; suffixes may have more rows than there are."""

    def __init__(self, recorder: Callable[[], Record], rows: int, pending: int):
        """`recorder`: makes what records. At most: `rows` of a batch, `pending` tokens that a round leaves of a row."""
        self.recorder, self.rows, self.pending = recorder, rows, pending
        self.forget(slots=0)

    def forget(self, slots: int) -> None:
        """As `Eager.forget`."""
        self.slots = slots
        # Apart: validation must not write to the memory of what was drafted.
        self.drafting, self.validation = Recordings(self.recorder()), Recordings(self.recorder())

    def sizes(self, prefix: Prefix) -> tuple[int, int]:
        """To how many rows and slots a batch is padded."""
        rows, slots = len(prefix.lengths), max(prefix.blocks.shape[1] * BLOCK, LEAST_SLOTS)
        return min(power_of_two(rows), self.rows), min(power_of_two(slots), self.slots)

    def propose(
        self, drafter: Drafter, plan: TreePlan, prefix: Prefix, read: Prefix, pending: Pending, choice: Choice
    ) -> Drafted:
        """As `drafter.propose`, without a grammar. One that catches up on more is not recorded."""
        if pending.tokens.shape[1] > self.pending:
            return drafter.propose(plan, prefix, read, pending, choice)
        active, (rows, slots), mode = len(prefix.lengths), self.sizes(prefix), choice.mode

        def work(
            lengths: torch.Tensor,
            blocks: torch.Tensor,
            lengths_read: torch.Tensor,
            tokens: torch.Tensor,
            hidden: torch.Tensor,
            counts: torch.Tensor,
            *drawn: torch.Tensor,
        ) -> Drafted:
            whole, last = PagedPrefix(lengths, blocks, slots, ragged=True), Pending(tokens, hidden, counts, lengths)
            temperature, noise = drawn or (None, None)
            same = Choice(mode, temperature, noise)
            return drafter.propose(plan, whole, whole.with_device_lengths(lengths_read, slots), last, same)

        inputs = [
            *padded_prefix(prefix, rows, slots),
            Padded(read.lengths, (rows,)),
            Padded(pending.tokens, (rows, self.pending)),
            Padded(pending.hidden, (rows, self.pending, pending.hidden.shape[2])),
            Padded(pending.counts, (rows,), fill=1),
            *(Padded(x, (rows, *x.shape[1:])) for x in (choice.temperature, choice.noise) if x is not None),
        ]
        tokens, q, suffix = self.drafting((rows, slots, plan, mode), work, inputs)
        return Drafted(tokens[:active], None if q is None else q[:active], suffix)

    def validate(
        self,
        target: Target,
        read: Forward,
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
            return validate(target, read, cache, PagedPrefix(lengths, blocks, slots, ragged=True), tree, tokens, ranks)

        inputs = [*padded_prefix(prefix, rows, slots), Padded(tokens, (rows, tree.num_nodes))]
        hidden, logits, suffix = self.validation((rows, slots, tree), work, inputs)
        return hidden[:active].clone(), logits[:active], suffix  # hidden states wait for the drafter


def padded_prefix(prefix: Prefix, rows: int, slots: int) -> tuple[Padded, Padded]:
    """Lengths and blocks. Rows that are not there are empty, and what they write goes to waste."""
    return Padded(prefix.lengths, (rows,)), Padded(prefix.blocks, (rows, slots // BLOCK), fill=SCRATCH)


def power_of_two(number: int) -> int:
    """The next one from `number` on."""
    return 1 << (number - 1).bit_length()
