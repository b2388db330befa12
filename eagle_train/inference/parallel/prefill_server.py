"""A prefill process of disaggregated prefill (disaggregated.py): prefills what the decode process sends it.

A layer's keys and values leave as soon as it has written them, while the rest of the forward runs (kv_pieces.py).
"""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eagle_train.errors import OptionError, UserError, check, one_line
from eagle_train.hardware import current
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.decode.bookkeeping import FirstToken
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parallel.kv_pieces import FAILED, HIDDEN, TOKENS, Send, Sender, layout
from eagle_train.inference.parallel.lines import Line, Outbox, as_bytes
from eagle_train.inference.parts import AnyDraft, Parts, build_parts
from eagle_train.inference.requests.admission import enqueue, seat
from eagle_train.inference.requests.prefiller import batches
from eagle_train.inference.requests.sampling_params import SamplingParams
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.models.target import Target


class PrefillServer:
    """Prefills for the decode process; each rank of a divided target for its own decode rank."""

    def __init__(
        self,
        target: Target,
        draft: AnyDraft = None,
        config: EngineConfig | None = None,
        **options: Any,
    ):
        """Arguments as for `Engine`; target, draft, `divide_draft` and `prefix_cache` must be those of the decode
        process. What is made at the start for rounds, graphs say, is left out. Raises OptionError for a divided target
        with a draft where `divide_draft` is None."""
        config = replace(config or EngineConfig(), **options)
        self._parts = build_parts(target, draft, "chain3", "cpu", config, None, decodes=False)
        check_draft(self._parts)

    def serve(self, lines: list[Line]) -> None:
        """Serve prefill requests until the decode process closes, or drops this one's group because another rank of it
        failed. With a divided target also until a prefill fails here. `lines`: from `connect`.

        Raises RuntimeError if the decode process has ended, or has given up waiting. Where another rank of the group
        hangs, the forward waits for it until the group's collectives time out."""
        (line,) = lines
        outbox = Outbox(line, self._parts.target.device)
        while request := line.recv():
            send = partial(outbox.put, request["number"])
            try:
                tokens = self.prefill(request, send)
            except Exception as error:  # after any error the decode process prefills these itself
                warnings.warn(f"prefill of {len(request['texts'])} texts failed: {one_line(error)}", stacklevel=2)
                for sequence in self._parts.scheduler.unfinished:
                    sequence.finish_reason = "failed"
                self._parts.scheduler.leave()
                send(FAILED)
                outbox.flush()
                if self._parts.target.together is not None:
                    return  # the others may wait for this rank in their forwards, so the group is dropped
            else:
                send(TOKENS, as_bytes(tokens))
                outbox.flush()

    @torch.inference_mode()
    def prefill(self, request: dict, send: Send) -> list[FirstToken]:
        """The first token of each text; everything else of them is sent. Raises UserError, with nothing sent, if the
        decode process has another target or draft."""
        with current(self._parts.target.device):
            return self._prefill(request, send)

    def _prefill(self, request: dict, send: Send) -> list[FirstToken]:
        """As `prefill`."""
        parts, scheduler = self._parts, self._parts.scheduler
        self._check(request)
        sequences = [
            self._sequence(place, text, params)
            for place, (text, params) in enumerate(zip(request["texts"], request["params"], strict=True))
        ]
        enqueue(sequences, scheduler, parts.memory)
        sender = Sender(parts.runner.stores, sequences, request["starts"], send)
        tokens: dict[Sequence, FirstToken] = {}
        while scheduler.has_unfinished:
            scheduler.admit()
            for batch in batches(scheduler.chunks(parts.config.prefill_tokens)):
                with sender.sending(batch):
                    parts.prefiller.prefill(batch, is_decoding=False)
            ready = scheduler.ready
            tokens |= dict(zip(ready, parts.prefiller.first_tokens(ready), strict=True)) if ready else {}
            for sequence in ready:
                sequence.finish_reason = "prefilled"
            scheduler.leave()
        send(HIDDEN, torch.cat([sequence.last_hidden for sequence in sequences]))
        return [tokens[sequence] for sequence in sequences]

    def _check(self, request: dict) -> None:
        """Raise UserError if the decode process has another target or draft."""
        target, runner = self._parts.target, self._parts.runner
        same = target.identity.fingerprint == request["target"]
        check(same, f"target {target.name}: the decode process has another")
        own, other = str(target.dtype), request["dtype"]
        check(own == other, f"target {target.name}: it is in {own} here, and the decode process has it in {other}")
        if layout(runner.stores, runner.width) != request["layout"]:
            here, there = layout_options(self._parts), request["options"]
            name = next((name for name in here if here[name] != there[name]), "draft")
            raise UserError(f"{name}={here[name]}: the decode process has {there[name]}; give both the same")

    def _sequence(self, place: int, text: list[int], params: dict) -> Sequence:
        """What is prefilled for a text."""
        parts, given = self._parts, SamplingParams(**params)
        drafters = parts.runner.drafters
        short = replace(given, max_tokens=2, min_tokens=0, stop=None)  # no request ends with its first token
        matcher, adjustment = parts.requests.matcher_of(short), parts.requests.adjustment_of(given)
        sequence = Sequence(place, text, short, frozenset(), matcher, adjustment=adjustment)
        seat(sequence, drafters.seat(short.drafter), drafters)
        return sequence


def layout_options(parts: Parts) -> dict[str, Any]:
    """The options of an engine that `layout` follows from, as JSON has them; of a draft its name and the size of its
    caches."""
    drafters = parts.runner.drafters.by_name.items()
    drafts = [f"{name} ({', '.join(map(_size_of, each.caches)) or 'no cache'})" for name, each in drafters]
    config = parts.config
    options = {"prefix_cache": config.prefix_cache, "divide_draft": config.divide_draft}
    return {**options, "draft": ", ".join(drafts) or None}


def _size_of(cache: PagedKV) -> str:
    heads, width = cache.memory[0].shape[2:]
    return f"{len(cache.layers)} layers of {heads} x {width}"


def check_draft(parts: Parts) -> None:
    """Raise OptionError where decode and prefill ranks would each measure for themselves whether to divide a draft."""
    is_whole, drafts = parts.target.together is None, bool(parts.runner.drafters.by_name)
    is_told = is_whole or not drafts or parts.config.divide_draft is not None
    check(
        is_told,
        "divide_draft=None: must be true or false with disaggregated prefill, the same on all ranks",
        OptionError,
    )
