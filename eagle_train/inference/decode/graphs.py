"""Rounds as CUDA graphs, all of them recorded before the first request. Paper section 3.4.

A round is three graphs: drafting, validation, and its end, which samples and commits; three, because sampling has
several variants, and the target's forward is then recorded once for them all. Each reads what the one before left.

A graph is recorded for each tree and number of rows, and for several numbers of slots only where attention copies them.
What differs between rounds of equal sizes is in tensors, which are copied to the graph's inputs before it is replayed.
recording.py says which sizes there are. Knows nothing of requests.

Shapes: A active rows, N tree nodes, P pending tokens, W blocks of a row, H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from eagle_train.errors import OptionError, check
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH, PagedPrefix, Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.rounds import RoundInputs, Validated
from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import Choice, Drafted, DraftRound, Pending, TreePlan
from eagle_train.ops.graphs import Padded, Record, Recordings

Propose = Callable[[DraftRound], Drafted]
Validate = Callable[[Prefix, AnyTree, torch.Tensor], Validated]
Size = tuple[int, int]  # rows and slots of a row
Finish = Callable[[RoundInputs, Drafted, Validated], tuple[Pending, torch.Tensor]]
DraftingKey = tuple[Size, TreePlan, str]  # with the drafting mode
ValidationKey = tuple[Size, Tree]


class Kind(NamedTuple):
    """What the host knows of a round's sampling, by which work is left out."""

    all_greedy: bool
    any_top: bool
    any_top_k: bool
    any_min_p: bool  # rounds with it are not recorded
    is_drawn: bool  # drafts are drawn

    @classmethod
    def of(cls, inputs: RoundInputs) -> "Kind":
        sampling = inputs.sampling
        flags = (sampling.all_greedy, sampling.any_top, sampling.any_top_k, sampling.any_min_p)
        return cls(*flags, inputs.draws is not None)


EndKey = tuple[Size, TreePlan, Kind]


def check_graphs(
    graphs: bool | None, device: torch.device | str, together: Any = None, is_offloaded: bool = False
) -> None:
    """Raise OptionError where graphs are asked for without a GPU, or of a target that is offloaded, or that ranks hold
    together and do not talk by NCCL. `together`: the process group of these ranks; None: the target is whole."""
    kind = torch.device(device).type
    check(not graphs or kind == "cuda", f"graphs=True: needs a GPU; the device is {kind}", OptionError)
    check(
        not graphs or together is None or "cuda:nccl" in str(dist.get_backend_config(together)),
        "graphs=True: the target's ranks do not talk by NCCL, and the host waits within a forward; must be False",
        OptionError,
    )
    check(
        not graphs or not is_offloaded,
        "graphs=True: the target is offloaded, and its weights are fetched within a forward; must be False",
        OptionError,
    )


class Graphs:
    """Recorded drafting, validation, and ends of rounds.

    The next replay of the same method overwrites what one returned. Suffixes have the padding rows too.
    """

    def __init__(self, recorder: Callable[[], Record], pending: int):
        """`recorder`: returns an object that records. `pending`: the most tokens that a round leaves for the drafter to
        process in the next one."""
        self.pending = pending
        # Separate memory: validation must not overwrite what was drafted, nor a round's end what it reads.
        self.drafting, self.validation, self.ends = (Recordings(recorder()) for _ in range(3))
        self._sizes: dict[Tree, list[Size]] = {}  # recorded ones, by validation
        self._logits: dict[tuple[int, int], torch.Tensor] = {}  # by N and V: [rows, N, V], for all recordings

    def drafting_key(self, inputs: RoundInputs) -> DraftingKey | None:
        """The recording that a round's drafting fits; None where there is none.

        There is none for a round in which the drafter catches up on more than `pending` tokens, or a row has no
        drafter: it is rare.
        """
        size = self._size(inputs)
        if size is None or inputs.draft_prefix is None or inputs.pending.tokens.shape[1] > self.pending:
            return None
        if None in inputs.seats:
            return None
        key = size, inputs.plan, inputs.choice.mode
        return key if key in self.drafting.made else None

    def validation_key(self, inputs: RoundInputs) -> ValidationKey | None:
        """The recording that a round's validation fits; None where there is none."""
        size = self._size(inputs)
        return (size, inputs.plan.tree) if size is not None and isinstance(inputs.plan.tree, Tree) else None

    def end_key(self, inputs: RoundInputs) -> EndKey | None:
        """The recording that a round's end fits, if drafting, where there is any, and validation fit theirs; else None.

        It reads what they leave, so that they must run before it.
        """
        size = self._size(inputs)
        if size is None or (inputs.draft_prefix is not None and self.drafting_key(inputs) is None):
            return None
        key = size, inputs.plan, Kind.of(inputs)
        return key if key in self.ends.made else None

    def _size(self, inputs: RoundInputs) -> Size | None:
        """The least recorded size that has room for a round's rows and block table."""
        rows, slots = len(inputs.prefix.lengths), inputs.prefix.blocks.shape[1] * BLOCK
        tree = inputs.plan.tree
        recorded = self._sizes.get(tree, []) if isinstance(tree, Tree) else []
        fits = [size for size in recorded if size[0] >= rows and size[1] >= slots]
        return min(fits, default=None)

    def record_drafting(self, size: Size, inputs: RoundInputs, propose: Propose, vocab_size: int) -> None:
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
            return propose(DraftRound(plan, whole, before, last, Choice(mode, temperature, noise), vocab_size))

        self.drafting.add((size, plan, mode), work, self._drafting_inputs(size, inputs))

    def propose(self, key: DraftingKey, inputs: RoundInputs) -> Drafted:
        """What `propose` returns for a round that fits this recording."""
        active = len(inputs.prefix.lengths)
        tokens, q, suffix, *_ = self.drafting(key, self._drafting_inputs(key[0], inputs))
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
        assert isinstance(tree, Tree)

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

    def record_end(self, size: Size, inputs: RoundInputs, finish: Finish) -> None:
        """Record `finish` for rounds of this size and of the inputs' plan and kind, whose drafting and validation are
        recorded. `inputs`: as for `record_drafting`."""
        plan, drafts = inputs.plan, inputs.draft_prefix is not None
        assert isinstance(plan.tree, Tree)
        validation = self.validation.made[size, plan.tree]
        lengths, blocks, tokens = validation.inputs
        drafted = Drafted(tokens)
        if drafts:
            drafted = self.drafting.made[size, plan, inputs.choice.mode].result._replace(tokens=tokens)

        def work(
            seeds: torch.Tensor,  # int64 [rows]
            temperature: torch.Tensor,  # float32 [rows]
            top_k: torch.Tensor,  # int64 [rows]
            top_p: torch.Tensor,  # float32 [rows]
            *draws: torch.Tensor,  # float64 [rows, draws], or none
        ) -> tuple[Pending, torch.Tensor]:
            prefix = _prefix(lengths, blocks)
            own = replace(
                inputs,
                prefix=prefix,
                draft_prefix=prefix if drafts else None,
                sampling=replace(inputs.sampling, temperature=temperature, top_k=top_k, top_p=top_p),
                seeds=seeds,
                draws=draws[0] if draws else None,
            )
            return finish(own, drafted, Validated(*validation.result))

        self.ends.add((size, plan, Kind.of(inputs)), work, _end_inputs(size, inputs))

    def finish(self, key: EndKey, inputs: RoundInputs) -> tuple[Pending, torch.Tensor]:
        """What `finish` returns for a round that fits this recording, after its drafting and validation."""
        active = len(inputs.prefix.lengths)
        pending, report = self.ends(key, _end_inputs(key[0], inputs))
        tensors = (pending.tokens, pending.hidden, pending.counts, pending.lengths)
        # Copied: the drafter may use them rounds later, when the graph has run again.
        return Pending(*(x[:active].clone() for x in tensors)), report[:active]

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


def _end_inputs(size: Size, inputs: RoundInputs) -> list[Padded]:
    (rows, _), sampling = size, inputs.sampling
    ones = [Padded(sampling.top_p, (rows,), fill=1)]
    given = [Padded(x, (rows,)) for x in (inputs.seeds, sampling.temperature, sampling.top_k)]
    draws = [] if inputs.draws is None else [Padded(inputs.draws, (rows, inputs.draws.shape[1]))]
    return [*given, *ones, *draws]
