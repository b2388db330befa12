"""Drafting and validation as CUDA graphs, all of them recorded before the first request. Paper section 3.4.

A graph is recorded for each tree and number of rows, and for several numbers of slots only where attention copies them.
What differs between rounds of equal sizes is in tensors, which are copied to the graph's inputs before it is replayed.
recording.py says which sizes there are. Knows nothing of requests.

Shapes: A active rows, N tree nodes, P pending tokens, W blocks of a row, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch

from eagle_train.errors import OptionError, check
from eagle_train.inference.cache.paged_kv import Suffix
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH, PagedPrefix, Prefix
from eagle_train.inference.decode.rounds import RoundInputs, Validated
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import Choice, Drafted, Pending, TreePlan
from eagle_train.ops.graphs import Padded, Record, Recordings

Propose = Callable[[TreePlan, Prefix, Prefix, Pending, Choice], Drafted]
Validate = Callable[[Prefix, Tree, torch.Tensor], Validated]
Size = tuple[int, int]  # rows and slots of a row
DraftingKey = tuple[Size, TreePlan, str]  # with the drafting mode
ValidationKey = tuple[Size, Tree]


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


class Graphs:
    """Recorded `Drafter.propose` and `validate`.

    The next replay of the same method overwrites what one returned. Suffixes have the padding rows too.
    """

    def __init__(self, recorder: Callable[[], Record], pending: int):
        """`recorder`: returns an object that records. `pending`: the most tokens that a round leaves for the drafter to
        process in the next one."""
        self.pending = pending
        # Separate memory: validation must not overwrite what was drafted.
        self.drafting, self.validation = Recordings(recorder()), Recordings(recorder())
        self._sizes: dict[Tree, list[Size]] = {}  # recorded ones, by validation
        self._logits: dict[tuple[int, int], torch.Tensor] = {}  # by N and V: [rows, N, V], for all recordings

    def drafting_key(self, inputs: RoundInputs) -> DraftingKey | None:
        """The recording that a round's drafting fits; None where there is none.

        There is none for a round in which the drafter catches up on more than `pending` tokens: it is rare.
        """
        size = self._size(inputs)
        if size is None or inputs.draft_prefix is None or inputs.pending.tokens.shape[1] > self.pending:
            return None
        key = size, inputs.plan, inputs.choice.mode
        return key if key in self.drafting.made else None

    def validation_key(self, inputs: RoundInputs) -> ValidationKey | None:
        """The recording that a round's validation fits; None where there is none."""
        size = self._size(inputs)
        return None if size is None else (size, inputs.plan.tree)

    def _size(self, inputs: RoundInputs) -> Size | None:
        """The least recorded size that has room for a round's rows and block table."""
        rows, slots = len(inputs.prefix.lengths), inputs.prefix.blocks.shape[1] * BLOCK
        fits = [size for size in self._sizes.get(inputs.plan.tree, ()) if size[0] >= rows and size[1] >= slots]
        return min(fits, default=None)

    def record_drafting(self, size: Size, inputs: RoundInputs, propose: Propose) -> None:
        """Record `propose` for rounds of this size and of the inputs' plan and drafting mode.

        `inputs`: of any round; its tensors are used once.
        """
        plan, mode = inputs.plan, inputs.choice.mode

        def work(
            lengths: torch.Tensor,  # int64 [rows]
            blocks: torch.Tensor,  # int64 [rows, slots / BLOCK]
            draft_lengths: torch.Tensor,  # int64 [rows]
            tokens: torch.Tensor,  # int64 [rows, pending]
            hidden: torch.Tensor,  # [rows, pending, H]
            counts: torch.Tensor,  # int64 [rows]
            *drawn: torch.Tensor,  # temperature [rows] and noise [rows, draws], or none
        ) -> Drafted:
            whole, last = _prefix(lengths, blocks), Pending(tokens, hidden, counts, lengths)
            temperature, noise = drawn or (None, None)
            before = whole.with_device_lengths(draft_lengths, whole.longest)
            return propose(plan, whole, before, last, Choice(mode, temperature, noise))

        self.drafting.add((size, plan, mode), work, self._drafting_inputs(size, inputs))

    def propose(self, key: DraftingKey, inputs: RoundInputs) -> Drafted:
        """What `propose` returns for a round that fits this recording."""
        active = len(inputs.prefix.lengths)
        tokens, q, suffix = self.drafting(key, self._drafting_inputs(key[0], inputs))
        return Drafted(tokens[:active], None if q is None else q[:active], suffix)

    def _drafting_inputs(self, size: Size, inputs: RoundInputs) -> list[Padded]:
        (rows, _), pending, choice, draft_prefix = size, inputs.pending, inputs.choice, inputs.draft_prefix
        assert draft_prefix is not None
        return [
            *_padded_prefix(inputs.prefix, size),
            Padded(draft_prefix.lengths, (rows,)),
            Padded(pending.tokens, (rows, self.pending)),
            Padded(pending.hidden, (rows, self.pending, pending.hidden.shape[2])),
            Padded(pending.counts, (rows,), fill=1),  # 0 would place the pending token at -1
            *(Padded(x, (rows, *x.shape[1:])) for x in (choice.temperature, choice.noise) if x is not None),
        ]

    def record_validation(self, size: Size, inputs: RoundInputs, validate: Validate) -> None:
        """Record `validate` for rounds of this size and of the inputs' tree. `inputs`: as for `record_drafting`."""
        tree = inputs.plan.tree

        def work(
            lengths: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
            hidden, logits, suffix = validate(_prefix(lengths, blocks), tree, tokens)
            return hidden, self._kept(logits), suffix

        tokens = inputs.pending.tokens.new_zeros(1, tree.num_nodes)
        self.validation.add((size, tree), work, _validation_inputs(size, inputs, tokens))
        self._sizes.setdefault(tree, []).append(size)

    def validate(self, key: ValidationKey, inputs: RoundInputs, tokens: torch.Tensor) -> Validated:
        """What `validate` returns for a round that fits this recording."""
        active = len(inputs.prefix.lengths)
        hidden, logits, suffix = self.validation(key, _validation_inputs(key[0], inputs, tokens))
        return Validated(hidden[:active], logits[:active], suffix)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, N, V] in the memory of those of all sizes: they would be the largest part of every recording."""
        rows, *shape = logits.shape
        kept = self._logits.get((shape[0], shape[1]))
        if kept is None or len(kept) < rows:  # before the recording: the first call of what is recorded comes here
            kept = self._logits[shape[0], shape[1]] = torch.empty_like(logits)
        return kept[:rows].copy_(logits)


def _prefix(lengths: torch.Tensor, blocks: torch.Tensor) -> PagedPrefix:
    """Rows whose lengths the device alone knows."""
    return PagedPrefix(lengths, blocks, blocks.shape[1] * BLOCK, ragged=True)


def _padded_prefix(prefix: Prefix, size: Size) -> tuple[Padded, Padded]:
    """Lengths and block table. Padding rows have length 0, and write to the SCRATCH block."""
    rows, slots = size
    return Padded(prefix.lengths, (rows,)), Padded(prefix.blocks, (rows, slots // BLOCK), fill=SCRATCH)


def _validation_inputs(size: Size, inputs: RoundInputs, tokens: torch.Tensor) -> list[Any]:
    return [*_padded_prefix(inputs.prefix, size), Padded(tokens, (size[0], tokens.shape[1]))]
