"""Prefills sequences in chunks and samples their first tokens. Paper sections 3 (stage 1) and 3.3.

`LocalPrefiller` does it in this process, `RemotePrefill` (parallel/disaggregated.py) in others. Knows nothing of
rounds or of admission.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Protocol

import torch

from eagle_train.inference.cache.prefix import BLOCK, Prefix
from eagle_train.inference.decode.adjustments import AdjustedText, Adjustments
from eagle_train.inference.decode.bookkeeping import FirstToken
from eagle_train.inference.decode.logprobs import LogprobRows
from eagle_train.inference.decode.sampling import SamplingTensors
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.requests.requests import Requests
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.inference.runner import Runner
from eagle_train.ops.transfer import to_device

Chunk = tuple[Sequence, int]
"""A sequence, and how many of its tokens are prefilled next."""


class Prefiller(Protocol):
    """Prefills sequences, here or in other processes. Sets their `num_computed` and `last_hidden`."""

    def prefill(self, chunks: list[Chunk], is_decoding: bool) -> bool:
        """Prefill these chunks, or send them to other processes without waiting. `is_decoding`: the batch has rows to
        decode. Returns whether any was prefilled here."""

    def first_tokens(self, sequences: list[Sequence]) -> list[FirstToken]:
        """The first tokens of prefilled sequences."""


class LocalPrefiller:
    """Prefills in this process."""

    def __init__(self, runner: Runner, requests: Requests, on_prefill: Callable[[Sequence], None]):
        """`on_prefill`: called with each sequence after a chunk of it was written to the caches.

        `on_fault`, to be set: called before that with a sequence whose drafter could not read the chunk, and why."""
        self._runner, self._requests, self._on_prefill = runner, requests, on_prefill
        self.on_fault: Callable[[Sequence, str], None] = _refuse

    def prefill(self, chunks: list[Chunk], is_decoding: bool) -> bool:
        """Prefill all chunks, batch by batch."""
        for batch in batches(chunks):
            self._prefill_batch(batch)
        return bool(chunks)

    def first_tokens(self, sequences: list[Sequence]) -> list[FirstToken]:
        """Samples from the target's hidden states at the prompts' last tokens."""
        device = self._runner.target.device
        sampling, seeds = sampling_of(sequences, device)
        lengths = to_device([sequence.num_computed - 1 for sequence in sequences], device)
        hidden = torch.stack([each.last_hidden for each in sequences])
        guidance = self._requests.guidance(sequences, chain(0))
        adjustments = adjustments_of(sequences, self._runner.target.identity.vocab_size, device)
        changes = None if adjustments is None else adjustments.now()
        logprobs = logprobs_of(sequences)
        return self._runner.first_tokens(hidden, lengths, sampling, seeds, guidance, changes, logprobs)

    def _prefill_batch(self, chunks: list[Chunk]) -> None:
        new = [sequence for sequence, _ in chunks]
        texts = [
            sequence.to_prefill[sequence.num_computed : sequence.num_computed + count] for sequence, count in chunks
        ]
        starts, blocks = [sequence.num_computed for sequence in new], [sequence.blocks for sequence in new]
        prefix = Prefix.of(starts, blocks, self._runner.target.device)
        before = torch.stack([self._hidden_before(each) for each in new]) if prefix.longest > 0 else None
        hidden, reasons = self._runner.prefill(prefix, texts, before, [each.drafter for each in new])
        for row, reason in reasons.items():
            self.on_fault(new[row], reason)
        for sequence, text, state in zip(new, texts, hidden, strict=True):
            sequence.num_computed, sequence.last_hidden = sequence.num_computed + len(text), state
            self._on_prefill(sequence)

    def _hidden_before(self, sequence: Sequence) -> torch.Tensor:
        """[S]: the target's states at the last computed token; zeros where none was."""
        if sequence.last_hidden is not None:
            return sequence.last_hidden
        if sequence.num_computed > 0:  # a prefix was found in the cache
            assert self._runner.ends is not None
            return self._runner.ends.hidden[sequence.blocks[sequence.num_computed // BLOCK - 1]]
        target = self._runner.target
        return torch.zeros(self._runner.width, dtype=target.dtype, device=target.device)


def batches(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Chunks that are prefilled together. Those with lengths between the same powers of two are one batch, so that less
    than half of it is padding, and those that begin a text are apart: their attention is causal and needs no mask."""
    return [list(alike) for _, alike in groupby(sorted(chunks, key=_kind), _kind)]


def sampling_of(sequences: list[Sequence], device: torch.device) -> tuple[SamplingTensors, torch.Tensor]:
    """The sequences' sampling settings, and their seeds int64 [A]."""
    params = [sequence.params for sequence in sequences]
    temperature, top_k, top_p = ([getattr(p, name) for p in params] for name in ("temperature", "top_k", "top_p"))
    sampling = SamplingTensors.from_lists(temperature, top_k, top_p, device, [p.min_p for p in params])
    return sampling, to_device([p.seed for p in params], device, torch.int64)


def adjustments_of(sequences: list[Sequence], vocab_size: int, device: torch.device) -> Adjustments | None:
    """What the sequences change of the target's logits; None where none changes anything."""
    rows = [
        AdjustedText(each.adjustment, each.prompt, each.generated) if each.adjustment is not None else None
        for each in sequences
    ]
    return Adjustments(rows, vocab_size, device) if any(rows) else None


def logprobs_of(sequences: list[Sequence]) -> LogprobRows | None:
    """Which sequences ask for log-probabilities; None where none does."""
    return LogprobRows.of([each.params.logprobs for each in sequences])


def _refuse(sequence: Sequence, reason: str) -> None:
    raise RuntimeError(f"drafter {sequence.drafter}: {reason}")


def _kind(chunk: Chunk) -> tuple[bool, int]:
    """Whether tokens before the chunk are computed, and the exponent of the least power of two above its length."""
    sequence, length = chunk
    return sequence.num_computed > 0, length.bit_length()
