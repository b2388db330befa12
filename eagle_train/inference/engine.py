"""The engine: requests come and go at any time, and `step` decodes a round of all that run. DESIGN section 3.9.

It decides who takes part in a round; runner.py computes the round: prefill, dispatch, draft, validate, sample, commit.
Requests advance independently: each accepts as many tokens as it can, leaves when it is finished, and the next one
takes its row. Knows nothing of how tokens are proposed or verified.

Ranks that share one target (tensor parallel) each run the whole engine and must be given the same requests in the same
order: all decisions then follow from tokens, which are the same on every rank (parallel/tensor_parallel.py).
"""

import time
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from eagle_train.errors import check, shown
from eagle_train.inference.batch import Batch
from eagle_train.inference.decode.bookkeeping import RoundResult
from eagle_train.inference.decode.stage_times import StageTimes
from eagle_train.inference.drafters.drafter import Pending
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parallel.disaggregated import RemotePrefill
from eagle_train.inference.parts import Acceptance, AnyDraft, AnyTarget, build_parts
from eagle_train.inference.requests.admission import enqueue
from eagle_train.inference.requests.prefiller import Prefiller
from eagle_train.inference.requests.requests import Prompt, params_of
from eagle_train.inference.requests.sequence import Output, SamplingParams, Sequence, Update
from eagle_train.ops.transfer import to_device


class _Flight(NamedTuple):
    """A round that was launched and whose results the host does not have yet."""

    sequences: list[Sequence]
    result: RoundResult

    @property
    def is_guided(self) -> bool:
        return any(sequence.matcher is not None for sequence in self.sequences)


class Engine:
    """Generates with a target and, if there is one, a drafter. The outputs are the target's own, whatever is drafted.

    The target must not be changed while the engine is in use. On a CPU in fp32 its weights and the draft's are kept in
    fp16 besides where that changes no result, which is half as much memory again (ops/linear.py).
    """

    def __init__(
        self,
        target: AnyTarget,
        draft: AnyDraft = None,
        tree: Any = "chain3",
        config: EngineConfig | None = None,
        *,
        device: str = "cpu",
        prefill: RemotePrefill | None = None,
        acceptance: Acceptance | None = None,
        **options: Any,
    ):
        """`target`: a directory, a hub id, a TargetConfig or a loaded Target; `device`: where the others are loaded.

        `draft`: a directory that eagle-export wrote, a Draft, a Drafter, or None for plain decoding.
        `tree`: a name (`chainN`, `dM_bfN`, a YAML in conf/tree), a Tree, a mapping {largest batch size: tree} or a
        Dispatcher. Unused without a draft.
        `config`, and `options` that replace its fields by name: see `EngineConfig`.
        `prefill`: processes that read prompts for this one. `acceptance`: replaces what rounds accept, for measurements
        (`SimulatedAcceptance`). Raises UserError.
        """
        config = replace(config or EngineConfig(), **options)
        parts = build_parts(target, draft, tree, device, config, acceptance)
        self.config, self.target, self.dispatcher = parts.config, parts.target, parts.dispatcher
        self._requests, self._memory, self._scheduler = parts.requests, parts.memory, parts.scheduler
        self._runner, self._batch = parts.runner, Batch(parts.runner)
        self._prefiller: Prefiller = parts.prefiller if prefill is None else prefill.attach(parts)
        self._overlap = self.target.device.type == "cuda" if config.overlap is None else config.overlap
        self._in_flight: _Flight | None = None
        self._advanced: dict[Sequence, None] = {}  # those that got tokens in this step, in order
        self._first_token_reported = False  # the previous step reported first tokens: this one runs their round
        self._num_added = 0

    @property
    def stage_times(self) -> StageTimes:
        """Wall time of each stage so far."""
        return self._runner.times

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_unfinished

    def generate(
        self, prompts: Listing[Prompt], params: SamplingParams | Listing[SamplingParams] | None = None
    ) -> list[Output]:
        """One output per prompt: text, token ids or chat messages each.

        `params`: one for all (request i then uses seed + i) or a list. Raises UserError, before anything runs, for a
        prompt that is empty or does not fit the target's context, and while other requests are unfinished.
        """
        check(isinstance(prompts, list | tuple), "prompts: must be a list of prompts")
        check(not self.has_unfinished, "requests were added before: step until they are done")
        new = self._requests.sequence
        sequences = [new(i, prompt, params_of(params, i, len(prompts))) for i, prompt in enumerate(prompts)]
        enqueue(sequences, self._scheduler, self._memory)
        try:
            while self.has_unfinished:
                self.step()
        finally:
            self._cancel_all()
        return [self.output(sequence) for sequence in sequences]

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> Sequence:
        """Queue a request, which `step` then advances. Raises UserError as `generate` does."""
        params = SamplingParams() if params is None else params
        check(isinstance(params, SamplingParams), f"params={shown(params)}: must be SamplingParams")
        sequence = self._requests.sequence(self._num_added, prompt, params)
        enqueue([sequence], self._scheduler, self._memory)
        self._num_added += 1
        return sequence

    def cancel(self, request: Sequence) -> None:
        """End a request between two steps; its output has what was generated. A finished one stays as it is."""
        if request in self._scheduler.unfinished:
            request.finish_reason = "cancelled"
            self._remove_finished()
            self._scheduler.leave()  # it may be waiting, or be read

    def output(self, request: Sequence) -> Output:
        """What a request has generated so far, as far as `step` has reported it."""
        return self._requests.output(request)

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Admit, read prompts, and decode one round. Paper section 3, figure 4. Returns what it brought each request.

        With `overlap` that is what the previous round brought. A step that samples first tokens reports them and leaves
        the round to the next. After a step that raises, for want of memory say, no request is lost: step again.
        """
        began = not self._first_token_reported and self._prefill()
        self._first_token_reported = began and bool(self._advanced)
        if not self._first_token_reported:
            self._decode()
        advanced, self._advanced = self._advanced, {}
        return [self._requests.update(sequence) for sequence in advanced]

    def _prefill(self) -> bool:
        """Admit requests and read prompts; returns whether any was read to its end and now decodes."""
        self._make_room()
        self._scheduler.admit()
        self._prefiller.prefill(self._scheduler.chunks(self.config.prefill_tokens), is_decoding=bool(self._active))
        ready = self._scheduler.ready
        if ready:
            self._activate(ready, self._prefiller.first_tokens(ready))
        return bool(ready)

    def _activate(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Their prompts were read, and they decode: with their first tokens, or, after a preemption, with the pending
        tokens that they had."""
        now, hidden = time.perf_counter(), torch.stack([each.last_hidden for each in sequences])
        finite = hidden.isfinite().all(1).tolist()
        pairs = list(zip(sequences, tokens, strict=True))
        pending = [[sequence.generated[-1] if sequence.generated else token] for sequence, token in pairs]
        lengths = to_device([sequence.num_computed for sequence in sequences], hidden.device)
        # First what may fail, for want of memory say: until here nothing has changed, and the next step does it again.
        self._batch.add(
            Pending(to_device(pending, hidden.device), hidden.unsqueeze(1), torch.ones_like(lengths), lengths)
        )
        self._scheduler.activate(sequences)
        for (sequence, token), is_finite in zip(pairs, finite, strict=True):
            sequence.last_hidden = None
            if not is_finite:
                sequence.fail()
                self._advanced[sequence] = None
            elif not sequence.generated:
                sequence.start(token, now)
                self._requests.cut_at_stop_strings(sequence)
                self._advanced[sequence] = None
        self._remove_finished()

    def _decode(self) -> None:
        """Launch a round, and take in the results of the previous one; without overlap also its own."""
        self._make_room()
        previous, self._in_flight = self._in_flight, self._launch()
        self._finish(previous)
        if not self._overlap:
            self._wait_in_flight()

    def _launch(self) -> _Flight | None:
        """Launch a round of the active rows; None where none of them has a token to generate."""
        if not any(map(self._may_go_on, self._active)):
            return None
        plan = self.dispatcher.dispatch(len(self._active))
        guidance = self._requests.guidance(self._active, plan.tree)
        in_flight = None if self._in_flight is None else self._in_flight.result.max_tokens
        inputs = self._batch.inputs(plan, in_flight, guidance)
        self._batch.pending, result = self._runner.run(inputs)
        return _Flight(list(self._active), result)

    def _finish(self, flight: _Flight | None) -> None:
        """Give a round's tokens to its sequences, and remove those that finish. The host waits for the results."""
        if flight is None:
            return
        with self.stage_times.stage("bookkeeping"):
            gains, now = flight.result.gains(), time.perf_counter()
            for sequence, gain in zip(flight.sequences, gains, strict=True):
                if sequence.finish_reason:  # it finished after the launch
                    continue
                if gain.tokens:
                    sequence.advance(gain.tokens, len(gain.tokens) - 1, flight.result.max_depth, now)
                    self._requests.cut_at_stop_strings(sequence)
                    # Where it finished early, `draft_lag` also counts tokens that it did not get.
                    sequence.num_computed = max(sequence.num_computed, sequence.num_known - gain.draft_lag)
                if not gain.finite:
                    sequence.fail()
                self._advanced[sequence] = None
            self._remove_finished()

    def _wait_in_flight(self) -> None:
        flight, self._in_flight = self._in_flight, None
        self._finish(flight)

    def _make_room(self) -> None:
        """Give active sequences blocks for the next round; preempts the newest where there are too few. The round in
        flight is waited for where that depends on its results."""
        if self._in_flight is not None:
            flight = self._in_flight
            if not flight.is_guided and self._scheduler.make_room(flight.result.max_tokens):
                return
            self._wait_in_flight()
        before = list(self._active)
        self._scheduler.make_room()
        if len(self._active) < len(before):
            self._batch.keep([row for row, sequence in enumerate(before) if sequence in self._active])
            self._remove_finished()

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether it has a token left to generate after the round in flight, which brings at least one."""
        coming = self._in_flight is not None and sequence in self._in_flight.sequences
        return len(sequence.generated) + coming < sequence.params.max_tokens

    def _remove_finished(self) -> None:
        """Finished sequences give up their rows and blocks."""
        stay = [row for row, sequence in enumerate(self._active) if not sequence.finish_reason]
        if len(stay) < len(self._active):
            self._batch.keep(stay)
            self._scheduler.leave()
        self._batch.seat(self._active)

    def _cancel_all(self) -> None:
        """Those that are left of an interrupted `generate`: no one would step for them."""
        for sequence in self._scheduler.unfinished:
            sequence.finish_reason = "cancelled"
        self._scheduler.leave()
        self._batch.clear()
        self._in_flight, self._first_token_reported = None, False
        self._advanced.clear()

    @property
    def _active(self) -> list[Sequence]:
        """The batch's sequences, row by row."""
        return self._scheduler.active
