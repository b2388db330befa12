"""The engine: continuous batching; each `step` decodes one round of the running requests. DESIGN section 3.9.

It schedules; runner.py computes the round: prefill, dispatch, draft, validate, sample, commit. Requests advance
independently: each accepts its own number of tokens per round and leaves the batch when it finishes, and a waiting
request takes its row. Knows nothing of drafting and verification.

Ranks of one tensor-parallel target each run the whole engine and must be given the same requests in the same order.
Scheduling depends on tokens only, which are the same on every rank (parallel/tensor_parallel.py), and on the answers of
prefill processes, on whose arrival the ranks agree (parallel/disaggregated.py).
"""

import math
import time
from collections.abc import Sequence as Listing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from eagle_train.errors import check, shown
from eagle_train.hardware import current
from eagle_train.inference.batch import Batch
from eagle_train.inference.decode.adaptive import Told
from eagle_train.inference.decode.bookkeeping import FirstToken, Gain, RoundResult
from eagle_train.inference.decode.stage_times import StageTimes
from eagle_train.inference.drafters.checks import WRONG_VALUES
from eagle_train.inference.drafters.drafter import Pending, TreePlan
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parallel.disaggregated import RemotePrefill
from eagle_train.inference.parts import Acceptance, AnyDraft, AnyTarget, build_parts
from eagle_train.inference.requests.admission import drop_drafter, enqueue, seat, stop_drafting
from eagle_train.inference.requests.prefiller import Prefiller
from eagle_train.inference.requests.requests import Prompt, params_of
from eagle_train.inference.requests.sampling_params import SamplingParams
from eagle_train.inference.requests.sequence import Output, Sequence, Update
from eagle_train.ops.transfer import to_device


class _Flight(NamedTuple):
    """A round that was launched and whose results are not on the host yet."""

    sequences: list[Sequence]
    result: RoundResult
    plan: TreePlan
    follows_prefill: bool  # and takes longer: the processor's caches hold other things

    @property
    def is_awaited(self) -> bool:
        """Whether the next round cannot be launched before these results are on the host."""
        return any(sequence.is_awaited for sequence in self.sequences)


class Engine:
    """Generates with a target and an optional drafter. The outputs are the target's own, whatever is drafted.

    The target must not be changed while the engine is in use. On a CPU in fp32 the engine also keeps fp16 copies of the
    weights of target and draft where that changes no result; they take half as much memory again (ops/linear.py).
    """

    def __init__(
        self,
        target: AnyTarget,
        draft: AnyDraft = None,
        tree: Any = "chain3",
        config: EngineConfig | None = None,
        *,
        device: str = "auto",
        prefill: RemotePrefill | None = None,
        acceptance: Acceptance | None = None,
        **options: Any,
    ):
        """`target`: a directory, a hub id, a TargetConfig or a loaded Target; `device`: where the others are loaded,
        `cpu`, `cuda`, `cuda:N`, or `auto`: the GPU if there is one.

        `draft`: a directory that eagle-export wrote, a Draft, a Drafter, or None for plain decoding. Also a mapping of
        these by name: requests choose one (`SamplingParams.drafter`), the first is the default.
        `tree`: a name (`chainN`, `dM_bfN`, `n8`, `auto`, `dynamic`), FILE.yaml, a Tree, a DynamicTree, a mapping
        {largest batch size: tree} or a Dispatcher. Unused without a draft.
        `config`, and `options` that replace its fields by name: see `EngineConfig`.
        `prefill`: the connection to prefill processes (disaggregated prefill). `acceptance`: replaces the verification
        result of each round, given the round's inputs and trees, for measurements (`SimulatedAcceptance`). Of a row
        without drafts nothing is accepted whatever it says. It is recorded in a CUDA graph, so that it must follow from
        tensors alone, and not have the host wait. Raises UserError.
        """
        config = replace(config or EngineConfig(), **options)
        parts = build_parts(target, draft, tree, device, config, acceptance)
        self.config, self.target, self.dispatcher = parts.config, parts.target, parts.dispatcher
        self._requests, self._memory, self._scheduler = parts.requests, parts.memory, parts.scheduler
        self._runner, self._batch = parts.runner, Batch(parts.runner)
        # A method of this engine would be a circle, in which its memory stays until Python looks for circles.
        parts.prefiller.on_fault = partial(stop_drafting, parts.runner.drafters)
        self._prefiller: Prefiller = parts.prefiller if prefill is None else prefill.attach(parts)
        self._overlap = self.target.device.type == "cuda" if config.overlap is None else config.overlap
        self._adaptive = parts.adaptive
        self._round_began: float | None = None  # since when the host does nothing but the round whose results come next
        self._round_took = math.inf  # seconds, about the least of the last rounds
        self._left_at = 0.0  # when the last step ended
        self._prefilled = False  # since the last round
        self._plain = parts.plain
        self._in_flight: _Flight | None = None
        self._advanced: dict[Sequence, None] = {}  # sequences to report in this step, in order
        self._first_token_reported = False  # in the previous step; this step then decodes without prefill
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
        """One output per prompt: text, token ids or chat messages each. With `n` in its parameters a prompt has n, one
        after the other in the flat list.

        `params`: one for all (the outputs then use seed, seed + 1, ...) or a list (a prompt's outputs do). Raises
        UserError, before anything runs, for a prompt that is empty or does not fit the target's context, and while
        other requests are unfinished.
        """
        check(isinstance(prompts, list | tuple), "prompts: must be a list of prompts")
        check(not self.has_unfinished, "prompts: other requests are unfinished; call step until they are done")
        sequences = self._requests.sequences(prompts, params_of(params, len(prompts)))
        self._queue(sequences)
        try:
            while self.has_unfinished:
                self.step()
        finally:
            self._cancel_all()
        return [self.output(sequence) for sequence in sequences]

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> Sequence:
        """Queue a request, which `step` then advances. Raises UserError as `generate` does, and for `n` above 1."""
        params = SamplingParams() if params is None else params
        check(isinstance(params, SamplingParams), f"params={shown(params)}: must be SamplingParams")
        check(params.n == 1, f"n={params.n}: must be 1 here, one request has one answer; use generate")
        sequence = self._requests.sequence(self._num_added, prompt, params)
        self._queue([sequence])
        self._num_added += 1
        return sequence

    def cancel(self, request: Sequence) -> None:
        """Cancel a request between two steps; its output keeps the generated tokens. No effect on a finished one."""
        if request in self._scheduler.unfinished:
            request.finish_reason = "cancelled"
            if request in self._active:
                self._remove_finished()
            else:
                self._leave()

    def output(self, request: Sequence) -> Output:
        """The tokens and text of a request that `step` has reported so far."""
        return self._requests.output(request)

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Admit requests, prefill, and decode one round. Paper section 3, figure 4. Returns each request's new tokens.

        With `overlap` these are the previous round's. A step that samples first tokens reports them and leaves decoding
        to the next step. If a step raises, for example out of memory, no request is lost: call it again.
        """
        with current(self.target.device):
            return self._step()

    def _step(self) -> list[Update]:
        """As `step`."""
        if self._runner.ranks.group is None and time.perf_counter() - self._left_at > self._round_took:
            # A round in flight may have ended long ago: the caller did something else. Ranks, which must all know a
            # round's time or none, give the least of theirs.
            self._round_began = None
        self._remove_finished()  # who finished in a step that raised has a row still
        began = not self._first_token_reported and self._prefill()
        self._first_token_reported = began and bool(self._advanced)
        if began:
            self._round_began = None
        if not self._first_token_reported:
            self._decode()
        advanced, self._advanced = self._advanced, {}
        self._left_at = time.perf_counter()
        return [self._requests.update(sequence) for sequence in advanced]

    def _queue(self, sequences: list[Sequence]) -> None:
        """New requests wait, each with the drafter that it names. Raises UserError."""
        for sequence in sequences:
            seat(sequence, self._runner.drafters.seat(sequence.params.drafter), self._runner.drafters)
        enqueue(sequences, self._scheduler, self._memory)

    def _prefill(self) -> bool:
        """Admit requests and prefill a chunk of their prompts; returns whether any prefill ended."""
        self._make_room()
        self._scheduler.admit(self._begin)
        chunks = self._scheduler.chunks(self.config.prefill_tokens)
        is_here = self._prefiller.prefill(chunks, is_decoding=bool(self._active))
        self._prefilled |= is_here
        ready = self._scheduler.ready
        if self._adaptive is not None:
            self._adaptive.opening.lengths.read(sum(count for _, count in chunks) if is_here else 0, len(ready))
        if ready:
            self._activate(ready, self._prefiller.first_tokens(ready))
        return bool(ready)

    def _begin(self, sequence: Sequence) -> None:
        """A request is to be prefilled: it loses its drafter if drafts do not pay."""
        if self._adaptive is not None and sequence.drafter is not None and sequence.acceptance is None:
            sequence.acceptance = self._adaptive.new()
            rows = min(len(self._scheduler.unfinished), self._scheduler.rows)
            if not self._adaptive.opens(sequence.drafter, sequence.params.max_tokens, rows):
                seat(sequence, None, self._runner.drafters)

    def _activate(self, sequences: list[Sequence], tokens: list[FirstToken]) -> None:
        """Move prefilled sequences to the batch, each with its first token, or, if it was preempted, with the pending
        token that it had."""
        now, hidden = time.perf_counter(), torch.stack([each.last_hidden for each in sequences])
        finite = hidden.isfinite().all(1).tolist()
        pairs = list(zip(sequences, tokens, strict=True))
        pending = [[sequence.generated[-1] if sequence.generated else first.token] for sequence, first in pairs]
        lengths = to_device([sequence.num_computed for sequence in sequences], hidden.device)
        # What may run out of memory comes before any change of state, so that the next step can retry.
        self._batch.add(
            sequences,
            Pending(
                to_device(pending, hidden.device), hidden.unsqueeze(1), torch.ones_like(lengths), lengths, is_full=True
            ),
        )
        self._scheduler.activate(sequences)
        for (sequence, first), is_finite in zip(pairs, finite, strict=True):
            sequence.last_hidden = None
            if not is_finite:
                sequence.fail()
                self._advanced[sequence] = None
            elif not sequence.generated:
                sequence.start(*first, now=now)
                self._requests.cut_at_stop_strings(sequence)
                self._advanced[sequence] = None
        self._remove_finished()

    def _decode(self) -> None:
        """Launch a round, then process the results of the previous one; without overlap also its own."""
        self._make_room()
        if self._in_flight is None:
            self._round_began = time.perf_counter()
        previous, self._in_flight = self._in_flight, self._launch()
        self._finish(previous)
        if not self._overlap:
            self._wait_in_flight()

    def _launch(self) -> _Flight | None:
        """Launch a round of the active rows; None if no row has a token left to generate."""
        if not any(map(self._may_go_on, self._active)):
            return None
        if self._adaptive is None:
            plan = self.dispatcher.dispatch(len(self._active))
        else:
            plan = self._adaptive.choose(self._active)
        if all(sequence.drafter is None for sequence in self._active):
            plan = self._plain
        guidance = self._requests.guidance(self._active, plan.tree)
        in_flight = None if self._in_flight is None else self._in_flight.result.max_tokens
        inputs = self._batch.inputs(plan, in_flight, guidance)
        self._batch.pending, result = self._runner.run(inputs)
        follows_prefill, self._prefilled = self._prefilled, False
        return _Flight(list(self._active), result, plan, follows_prefill)

    def _finish(self, flight: _Flight | None) -> None:
        """Append a round's tokens to its sequences and remove those that finish. Synchronises with the device."""
        if flight is None:
            return
        with self.stage_times.stage("bookkeeping"):
            gains, now = flight.result.gains(), time.perf_counter()
            self._learn(flight, gains, now)
            for row, (sequence, gain) in enumerate(zip(flight.sequences, gains, strict=True)):
                if sequence.finish_reason:  # it finished after the launch
                    continue
                if gain.at_fault:
                    reason = flight.result.reasons.get(row, WRONG_VALUES)
                    stop_drafting(self._runner.drafters, sequence, reason)
                if gain.tokens:
                    sequence.advance(gain.tokens, len(gain.tokens) - 1, gain.depth, now, gain.logprobs)
                    self._requests.cut_at_stop_strings(sequence)
                    # If it finished early, `draft_lag` also counts tokens that were cut off.
                    sequence.num_computed = max(sequence.num_computed, sequence.num_known - gain.draft_lag)
                if not gain.finite:
                    sequence.fail()
                self._advanced[sequence] = None
            self._remove_finished()

    def _learn(self, flight: _Flight, gains: list[Gain], now: float) -> None:
        """Tell who chooses trees what a round brought and took."""
        seconds, self._round_began = None if self._round_began is None else now - self._round_began, now
        if self._adaptive is None:
            return
        told = []
        if flight.plan is not self._plain:
            told = [
                Told(sequence, gain.depth if sequence.drafter is not None else 0, len(gain.tokens) - 1)
                for sequence, gain in zip(flight.sequences, gains, strict=True)
                if gain.tokens
            ]
        seconds = None if flight.follows_prefill else seconds
        if seconds is not None:
            self._round_took = min(seconds, 1.05 * self._round_took)
        if self._adaptive.observe(flight.plan, told, len(flight.sequences), seconds):
            for sequence in flight.sequences:
                drop_drafter(self._runner.drafters, sequence)

    def _wait_in_flight(self) -> None:
        flight, self._in_flight = self._in_flight, None
        self._finish(flight)

    def _make_room(self) -> None:
        """Allocate blocks for the next round; preempts the newest sequences if too few are free. Waits for the round in
        flight only if the allocation depends on its results."""
        if self._in_flight is not None:
            flight = self._in_flight
            if not flight.is_awaited and self._scheduler.make_room(flight.result.max_tokens):
                return
            self._wait_in_flight()
        self._scheduler.make_room()
        self._remove_finished()

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether it has a token left to generate after the round in flight, which commits at least one."""
        coming = self._in_flight is not None and sequence in self._in_flight.sequences
        return len(sequence.generated) + coming < sequence.params.max_tokens

    def _remove_finished(self) -> None:
        """Free the rows and blocks of finished sequences, and the rows of preempted ones."""
        stay = [sequence for sequence in self._active if not sequence.finish_reason]
        self._batch.seat(stay)  # first: where it raises, the next step finds them unfinished and reports them
        if len(stay) < len(self._active):
            self._leave()

    def _leave(self) -> None:
        """Release what finished sequences have."""
        for sequence in self._scheduler.leave():
            self._runner.drafters.leave(sequence.drafter, sequence.key)
            if self._adaptive is not None and sequence.generated:  # others were cancelled while they waited
                self._adaptive.opening.lengths.answered(len(sequence.generated))

    def _cancel_all(self) -> None:
        """Cancel what an interrupted `generate` has left; otherwise it would stay unfinished."""
        for sequence in self._scheduler.unfinished:
            sequence.finish_reason = "cancelled"
        self._leave()
        self._batch.clear()
        self._in_flight, self._first_token_reported = None, False
        self._advanced.clear()

    @property
    def _active(self) -> list[Sequence]:
        """The sequences of the batch, in the order of its rows."""
        return self._scheduler.active
