"""The rows that decode: what the device knows of each, and the inputs of the next round. DESIGN section 3.9.

Knows nothing of who is admitted or finished.
"""

import torch

from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.adjustments import Adjustments
from eagle_train.inference.decode.logprobs import LogprobRows
from eagle_train.inference.decode.relaxed import Relaxed
from eagle_train.inference.decode.rounds import RoundInputs
from eagle_train.inference.decode.sampling import uniform
from eagle_train.inference.drafters.drafter import Pending, RowText, TreePlan
from eagle_train.inference.grammar.guided import Guidance
from eagle_train.inference.requests.prefiller import adjustments_of, logprobs_of, sampling_of
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.inference.runner import Runner
from eagle_train.ops.transfer import to_device


class Batch:
    """Pending tokens and sampling settings of the active sequences, row by row.

    A method that raises, for example out of memory, changes nothing: call it again.
    """

    def __init__(self, runner: Runner):
        self._runner, self._device = runner, runner.target.device
        self._rows: list[Sequence] = []  # of `pending`
        self._seated: list[Sequence] = []  # of the settings
        self._sampling, self._seeds = sampling_of([], self._device)
        self._seats: list[str | None] = []
        self._adjustments: Adjustments | None = None
        self._logprobs: LogprobRows | None = None
        self.pending = self._no_rows()

    def add(self, sequences: list[Sequence], pending: Pending) -> None:
        """New rows, behind the others; `seat` comes before the next round."""
        self.pending = self.pending.concat_rows(pending) if self._rows else pending
        self._rows = [*self._rows, *sequences]

    def clear(self) -> None:
        """No row is left."""
        self.pending, self._rows = self._no_rows(), []
        self.seat([])

    def seat(self, sequences: list[Sequence]) -> None:
        """These are the rows from now on, in this order; the others are dropped. All of them were added."""
        if self._rows != sequences:
            places = {sequence: row for row, sequence in enumerate(self._rows)}
            kept = to_device([places[sequence] for sequence in sequences], self._device, torch.long)
            self.pending, self._rows = self.pending.rows(kept), list(sequences)
        if self._seated != sequences:
            sampling, seeds = sampling_of(sequences, self._device)
            vocab_size = self._runner.target.identity.vocab_size
            self._adjustments = adjustments_of(sequences, vocab_size, self._device)
            self._sampling, self._seeds, self._logprobs = sampling, seeds, logprobs_of(sequences)
            self._seated = list(sequences)
        self._seats = [sequence.drafter for sequence in sequences]

    def inputs(self, plan: TreePlan, in_flight: int | None, guidance: Guidance | None) -> RoundInputs:
        """The next round's inputs. `in_flight`: most tokens of a row that a round with unknown results commits; None:
        there is no such round."""
        active, pending = self._seated, self.pending
        if in_flight is None:  # otherwise only the device knows how far the drafter is behind
            counts = {each.num_known - each.num_computed for each in active}
            pending = pending.narrow(max(counts), is_full=len(counts) == 1)
        lengths, blocks = [each.committed for each in active], [each.blocks for each in active]
        prefix = Prefix.of(lengths, blocks, self._device, pending.lengths)
        if in_flight is not None:
            prefix = prefix.with_device_lengths(pending.lengths, prefix.longest + in_flight, prefix.shortest)
        draft_prefix = None
        if self._runner.drafts(plan, pending):
            if in_flight is None:
                draft_prefix = prefix.with_lengths([each.num_computed for each in active])
            else:
                least = min(each.num_computed for each in active)
                draft_prefix = prefix.with_device_lengths(pending.draft_lengths, prefix.longest, least)
        drafting, draws = self._runner.config.drafting, None
        if drafting != "greedy" and plan.tree.num_nodes > 1 and not self._sampling.all_greedy:
            draws = uniform(self._seeds, prefix.lengths, plan.num_draws)
        texts = None
        if draft_prefix is not None and any(map(self._runner.drafters.reads_texts, self._seats)):
            texts = [RowText(each.key, each.prompt, each.generated) for each in active]
        return RoundInputs(
            plan,
            prefix,
            draft_prefix,
            pending,
            self._sampling,
            self._seeds,
            drafting,
            draws,
            guidance,
            self._seats,
            texts,
            None if self._adjustments is None else self._adjustments.now(),
            self._logprobs,
            Relaxed.of([each.relaxation for each in active], self._device),
        )

    def _no_rows(self) -> Pending:
        hidden = torch.empty(0, 1, self._runner.width, dtype=self._runner.target.dtype, device=self._device)
        tokens = torch.empty(0, 1, dtype=torch.long, device=self._device)
        return Pending(tokens, hidden, tokens[:, 0], tokens[:, 0])
