"""Rounds as CUDA graphs, all of them recorded before the first request. Paper section 3.4.

A round is three recordings: drafting, validation, and its end, which samples and commits; three, because sampling has
several variants, and the target's forward is then recorded once for them all. Each reads what the one before left. With
a grammar drafting and the end have pauses, in which the host computes masks.

They are made for each tree and number of rows, and for several numbers of slots only where attention copies them. Trees
that differ by row are inputs: there is one recording for all of a plan's, and one for all of its chains.
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
from eagle_train.inference.decode.row_trees import AnyTree, RowTrees
from eagle_train.inference.decode.tree_forms import TreeForm
from eagle_train.inference.drafters.drafter import Choice, Drafted, DraftRound, Pending, TreePlan
from eagle_train.inference.grammar.guided import NodeMasks, StopMasks
from eagle_train.inference.grammar.recorded import RecordedMasks
from eagle_train.ops.graphs import Padded, Record, Recordings

Propose = Callable[[DraftRound], Drafted]
Validate = Callable[[Prefix, AnyTree, torch.Tensor], Validated]
Size = tuple[int, int]  # rows and slots of a row
Finish = Callable[
    [RoundInputs, Drafted, Validated, NodeMasks | None, torch.Tensor | None],
    tuple[Pending, torch.Tensor, torch.Tensor | None],
]
DraftingKey = tuple[Size, TreePlan, str, bool]  # with the drafting mode, and whether it asks a grammar
ValidationKey = tuple[Size, TreeForm]


class Kind(NamedTuple):
    """What the host knows of a round's sampling, by which work is left out."""

    all_greedy: bool
    any_top: bool
    any_top_k: bool
    any_min_p: bool
    is_drawn: bool  # drafts are drawn
    is_guided: bool  # some rows have a grammar

    @classmethod
    def of(cls, inputs: RoundInputs) -> "Kind":
        sampling = inputs.sampling.prepared
        flags = (sampling.all_greedy, sampling.any_top, sampling.any_top_k, sampling.any_min_p)
        return cls(*flags, inputs.draws is not None, inputs.guidance is not None)


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

    def __init__(self, recorder: Callable[[], Record], pending: int, masks: StopMasks | None = None):
        """`recorder`: returns an object that records. `pending`: the most tokens that a round leaves for the drafter to
        process in the next one. `masks`: for rounds with grammars; None: they are not recorded."""
        self.pending, self.masks = pending, masks
        # Separate memory: validation must not overwrite what was drafted, nor a round's end what it reads.
        self.drafting, self.validation, self.ends = (Recordings(recorder()) for _ in range(3))
        self._sizes: dict[TreeForm, list[Size]] = {}  # recorded ones, by validation
        self._of_grammars: dict[DraftingKey | EndKey, RecordedMasks] = {}
        self._logits: dict[tuple[int, int], torch.Tensor] = {}  # by N and V: [rows, N, V], for all recordings

    def drafting_key(self, inputs: RoundInputs) -> DraftingKey | None:
        """The recording that a round's drafting fits; None where there is none.

        There is none for a round in which the drafter catches up on more than `pending` tokens, which is rare, or a row
        has no drafter.
        """
        size = self._size(inputs, _planned(inputs))
        if size is None or inputs.draft_prefix is None or inputs.pending.tokens.shape[1] > self.pending:
            return None
        if None in inputs.seats:
            return None
        key = size, inputs.plan, inputs.choice.mode, inputs.guidance is not None
        return key if key in self.drafting.made else None

    def validation_key(self, inputs: RoundInputs, tree: AnyTree) -> ValidationKey | None:
        """The recording that a round's validation fits, with this tree; None where there is none."""
        form = TreeForm.of(inputs.plan.tree, tree)
        size = self._size(inputs, form) if tree.num_nodes <= form.num_nodes else None
        return None if size is None else (size, form)

    def end_key(self, inputs: RoundInputs) -> EndKey | None:
        """The recording that a round's end fits, if drafting, where there is any, and validation fit theirs; else None.

        It reads what they leave, so that they must run before it.
        """
        size = self._size(inputs, _planned(inputs))
        if size is None or (inputs.draft_prefix is not None and self.drafting_key(inputs) is None):
            return None
        key = size, inputs.plan, Kind.of(inputs)
        return key if key in self.ends.made else None

    def _size(self, inputs: RoundInputs, form: TreeForm) -> Size | None:
        """The least recorded size that has room for a round's rows and block table."""
        rows, slots = len(inputs.prefix.lengths), inputs.prefix.blocks.shape[1] * BLOCK
        fits = [size for size in self._sizes.get(form, []) if size[0] >= rows and size[1] >= slots]
        return min(fits, default=None)

    def record_drafting(
        self, size: Size, inputs: RoundInputs, propose: Propose, vocab_size: int, is_guided: bool
    ) -> None:
        """Record `propose` for rounds of this size and of the inputs' plan and drafting mode.

        `inputs`: of any round without grammars; its tensors are used once. `is_guided`: for rounds with grammars.
        """
        plan, mode = inputs.plan, inputs.choice.mode
        key = (size, plan, mode, is_guided)
        masks = self._masks(key, self.drafting) if key[-1] else None

        def work(
            lengths: torch.Tensor,  # int64 [rows]
            blocks: torch.Tensor,  # int64 [rows, slots / BLOCK]
            draft_lengths: torch.Tensor,  # int64 [rows]
            tokens: torch.Tensor,  # int64 [rows, pending]
            hidden: torch.Tensor,  # [rows, pending, H]
            counts: torch.Tensor,  # int64 [rows]
            *drawn: torch.Tensor,  # temperature [rows] and noise [rows, draws], or none
        ) -> Drafted:
            whole = _prefix(lengths, blocks)
            before, pending = _to_read(whole, draft_lengths, tokens, hidden, counts)
            temperature, noise = drawn or (None, None)
            choice = Choice(mode, temperature, noise, masks)
            return propose(DraftRound(plan, whole, before, pending, choice, vocab_size))

        self.drafting.add(key, work, self._drafting_inputs(size, inputs))

    def _masks(self, key: DraftingKey | EndKey, recordings: Recordings) -> RecordedMasks:
        """Grammars' masks for the recording of this key, which is about to be made."""
        assert self.masks is not None
        return self._of_grammars.setdefault(key, RecordedMasks(self.masks, key[0][0], recordings.record))

    def _use_grammars(self, key: DraftingKey | EndKey, inputs: RoundInputs) -> None:
        if key in self._of_grammars:
            assert inputs.guidance is not None
            self._of_grammars[key].use(inputs.guidance)

    def propose(self, key: DraftingKey, inputs: RoundInputs) -> Drafted:
        """What `propose` returns for a round that fits this recording."""
        active = len(inputs.prefix.lengths)
        self._use_grammars(key, inputs)
        drafted: Drafted = self.drafting(key, self._drafting_inputs(key[0], inputs))
        tokens, q, suffix, trees, places, *_ = drafted
        if trees is not None:  # another object each time, since it keeps what follows from its tables
            trees = RowTrees(trees.parents[:active], trees.real[:active], trees.max_depth)
        q, places = (None if x is None else x[:active] for x in (q, places))
        return Drafted(tokens[:active], q, suffix, trees, places)

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

    def record_validation(self, size: Size, inputs: RoundInputs, form: TreeForm, validate: Validate) -> None:
        """Record `validate` for rounds of this size and trees of this form. `inputs`: as for `record_drafting`."""

        def work(
            lengths: torch.Tensor,
            blocks: torch.Tensor,
            tokens: torch.Tensor,
            *tables: torch.Tensor,  # see TreeForm.tables
        ) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
            hidden, logits, suffix = validate(_prefix(lengths, blocks), form.tree(tables), tokens)
            return hidden, self._kept(logits), suffix

        tree = form.example(inputs.pending.tokens.device)
        tokens = inputs.pending.tokens.new_zeros(1, tree.num_nodes)
        self.validation.add((size, form), work, _validation_inputs((size, form), inputs, tokens, tree))
        self._sizes.setdefault(form, []).append(size)

    def validate(self, key: ValidationKey, inputs: RoundInputs, tokens: torch.Tensor, tree: AnyTree) -> Validated:
        """What `validate` returns for a round that fits this recording."""
        active, nodes = tokens.shape
        hidden, logits, suffix = self.validation(key, _validation_inputs(key, inputs, tokens, tree))
        return Validated(hidden[:active, :nodes], logits[:active, :nodes], suffix)

    def record_end(
        self, size: Size, inputs: RoundInputs, finish: Finish, is_guided: bool, is_checked: bool = False
    ) -> None:
        """Record `finish` for rounds of this size and of the inputs' plan and kind, whose drafting and validation are
        recorded. `inputs`, `is_guided`: as for `record_drafting`. `is_checked`: the drafter is, so that rows may be
        without drafts."""
        plan, form, drafts = inputs.plan, _planned(inputs), inputs.draft_prefix is not None
        key: EndKey = (size, plan, Kind.of(inputs)._replace(is_guided=is_guided))
        masks = self._masks(key, self.ends) if is_guided else None
        may_lack = drafts and is_checked  # drafts, in some rows; drawn ones of such a drafter are not recorded
        validation = self.validation.made[size, form]
        lengths, blocks, tokens, *tables = validation.inputs
        drafted, to_read = Drafted(tokens), list[torch.Tensor]()
        if drafts:
            drafting = self.drafting.made[size, plan, inputs.choice.mode, is_guided]
            drafted, (_, _, *to_read) = drafting.result, drafting.inputs

        def work(
            seeds: torch.Tensor,  # int64 [rows]
            temperature: torch.Tensor,  # float32 [rows]
            top_k: torch.Tensor,  # int64 [rows]
            min_p: torch.Tensor,  # float32 [rows]
            top_p: torch.Tensor,  # float32 [rows]
            *more: torch.Tensor,  # undrafted bool [rows], or draws float64 [rows, draws], or none
        ) -> tuple[Pending, torch.Tensor, torch.Tensor | None]:
            prefix, tree = _prefix(lengths, blocks), form.tree(tables)
            undrafted, draws = (more[0], ()) if may_lack else (None, more)
            trees = tree if isinstance(tree, RowTrees) else None
            draft_prefix, pending = _to_read(prefix, *to_read[:4]) if drafts else (None, inputs.pending)
            own = replace(
                inputs,
                prefix=prefix,
                draft_prefix=draft_prefix,
                pending=pending,
                sampling=replace(inputs.sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
                seeds=seeds,
                draws=draws[0] if draws else None,
                guidance=None,
            )
            read = drafted._replace(tokens=tokens, trees=trees)  # as validation has them
            return finish(own, read, Validated(*validation.result), masks, undrafted)

        none = torch.zeros_like(inputs.seeds, dtype=torch.bool) if may_lack else None
        self.ends.add(key, work, _end_inputs(size, inputs, none))

    def finish(
        self, key: EndKey, inputs: RoundInputs, undrafted: torch.Tensor | None
    ) -> tuple[Pending, torch.Tensor, torch.Tensor | None]:
        """What `finish` returns for a round that fits this recording, after its drafting and validation. `undrafted`:
        as of `Proposed`."""
        active = len(inputs.prefix.lengths)
        self._use_grammars(key, inputs)
        pending, report, row_depth = self.ends(key, _end_inputs(key[0], inputs, undrafted))
        tensors = (pending.tokens, pending.hidden, pending.counts, pending.lengths)
        # Copied: the drafter may use them rounds later, when the graph has run again.
        tokens, hidden, counts, lengths = (x[:active].clone() for x in tensors)
        kept = Pending(tokens, hidden, counts, lengths, pending.is_full)
        return kept, report[:active], None if row_depth is None else row_depth[:active]

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


def _to_read(
    prefix: Prefix, draft_lengths: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor, counts: torch.Tensor
) -> tuple[Prefix, Pending]:
    """What a drafter has of the rows, and what it has still to read."""
    return prefix.with_device_lengths(draft_lengths, prefix.longest), Pending(tokens, hidden, counts, prefix.lengths)


def _padded_prefix(prefix: Prefix, size: Size) -> tuple[Padded, Padded]:
    """Lengths and block table. Padding rows have length 0, and write to the SCRATCH block."""
    rows, slots = size
    return Padded(prefix.lengths, (rows,)), Padded(prefix.blocks, (rows, slots // BLOCK), fill=SCRATCH)


def _planned(inputs: RoundInputs) -> TreeForm:
    """The form of the trees of a round that is drafted by a recording."""
    return TreeForm.all_of(inputs.plan.tree)[0]


def _validation_inputs(key: ValidationKey, inputs: RoundInputs, tokens: torch.Tensor, tree: AnyTree) -> list[Padded]:
    (size, form), rows = key, key[0][0]
    tables = [Padded(x, (rows, form.num_nodes)[: x.ndim]) for x in form.tables(tree)]
    return [*_padded_prefix(inputs.prefix, size), Padded(tokens, (rows, form.num_nodes)), *tables]


def _end_inputs(size: Size, inputs: RoundInputs, undrafted: torch.Tensor | None) -> list[Padded]:
    (rows, _), sampling = size, inputs.sampling
    ones = [Padded(sampling.top_p, (rows,), fill=1)]
    given = [Padded(x, (rows,)) for x in (inputs.seeds, sampling.temperature, sampling.top_k, sampling.min_p)]
    lacking = [] if undrafted is None else [Padded(undrafted, (rows,))]
    draws = [] if inputs.draws is None else [Padded(inputs.draws, (rows, inputs.draws.shape[1]))]
    return [*given, *ones, *lacking, *draws]
