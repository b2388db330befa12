"""Disaggregated prefill: one process decodes, others prefill for it. Paper section 3.3.

Rank 0 is the decode process and has the requests. It sends new prompts to the prefill processes (`PrefillServer`), the
other ranks. They return each prompt's first token, last hidden state, and keys and values of target and draft, which
rank 0 writes into its own KV cache blocks. If a prefill process fails or times out, rank 0 prefills the prompts itself.

A target that is divided over S ranks (tensor parallel) has a decode group, ranks 0 to S - 1, and one or more prefill
groups, each the next S ranks. Rank i of the decode group has a line to rank i of each prefill group, which has the same
heads, and receives the blocks of these. All ranks of the decode group have the same requests, and agree in each step
which answers have arrived. If one rank of a prefill group fails or times out, all drop the group.

    world = distributed.start(device, shard_size=S)
    target = load_target(config, device, "tensor" if S > 1 else "replicated", world)
    lines = connect(world)
    if world.rank < S:
        prefill = RemotePrefill(lines)
        outputs = Engine(target, draft, prefill=prefill).generate(prompts)
        prefill.close()
    else:
        PrefillServer(target, draft).serve(lines)

With S > 1 and a draft, the engine and the server are given one `divide_draft`, true or false.

A layer's keys and values leave as soon as it has written them, while the rest of the forward runs (kv_pieces.py says
what is sent). The decode rank has them in host memory until the answer is whole, and only then in its cache: what
comes of an answer that fails, or that nobody waits for any more, is discarded. `timeout_s` is for the whole answer.

Messages go over Gloo and host memory on any device (lines.py). torchrun ends all processes when one dies; processes
that are started one by one, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, keep running.
"""

import itertools
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from eagle_train.errors import check, one_line, shown
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.bookkeeping import FirstToken
from eagle_train.inference.decode.logprobs import TokenLogprobs
from eagle_train.inference.parallel.kv_pieces import Answer, first_blocks, layout, units_of, unpack
from eagle_train.inference.parallel.lines import Deadline, Line
from eagle_train.inference.parallel.prefill_server import check_draft, layout_options
from eagle_train.inference.parts import Parts
from eagle_train.inference.requests.prefiller import Chunk
from eagle_train.inference.requests.sampling_params import is_number
from eagle_train.inference.requests.sequence import Sequence

_LONGEST_S = 10**9  # the largest timeout
_POLL_S = 0.01
_NUMBERS = itertools.count()
_FAILED, _AWAITED, _ARRIVED = range(3)  # answers; the least over the decode ranks is what all of them go by


@dataclass(eq=False)
class _Task:
    """A prefill task of a prefill process: sequences, each from its first token that is not in the cache."""

    sequences: list[Sequence]
    starts: list[int]
    first: list[int]  # of `first_blocks`
    answer: Future

    @property
    def state(self) -> int:
        """_FAILED, _AWAITED or _ARRIVED."""
        if not self.answer.done():
            return _AWAITED
        return _ARRIVED if self.answer.exception() is None else _FAILED


class RemotePrefill:
    """Prefills on the prefill processes, as long as there are any; an `Engine`'s `prefill`."""

    def __init__(self, lines: list[Line], timeout_s: float = 60.0):
        """`lines`: from `connect`. `timeout_s`: a prefill process that takes longer for a task is dropped, and its
        group with it. Raises UserError."""
        right = is_number(timeout_s, 0, _LONGEST_S) and timeout_s > 0
        check(right, f"timeout_s={shown(timeout_s)}: must be above 0, and at most {_LONGEST_S} seconds")
        check(len(lines) > 0, "lines=[]: must be the lines to the prefill processes that connect returns")
        self._timeout = timedelta(seconds=timeout_s)
        self._tasks: dict[Line, _Task | None] = dict.fromkeys(lines)  # in round-robin order, the next line first
        self._threads = ThreadPoolExecutor(len(lines))
        self._returned: set[Sequence] = set()  # whose prefill failed elsewhere, to be prefilled here
        self._first_tokens: dict[Sequence, FirstToken] = {}  # of sequences prefilled elsewhere, until they decode

    def attach(self, parts: Parts) -> "RemotePrefill":
        """Prefill for the engine with these parts. Raises OptionError for a divided target with a draft
        where `divide_draft` is None."""
        check_draft(parts)
        self._parts, self._local = parts, parts.prefiller
        return self

    def prefill(self, chunks: list[Chunk], is_decoding: bool) -> bool:
        """Collect finished tasks and send new ones. Waits briefly if there is nothing to decode or to send."""
        here = any(sequence in self._returned for sequence, _ in chunks)
        if not is_decoding and not here and (not chunks or None not in self._tasks.values()):
            answers = [task.answer for task in self._tasks.values() if task is not None]
            wait(answers, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        self._collect()
        self._hand_out([sequence for sequence, _ in chunks if sequence not in self._returned])
        own = [chunk for chunk in chunks if chunk[0] in self._returned or not self._tasks]
        prefilled = self._local.prefill(own, is_decoding)
        self._returned.intersection_update(self._parts.scheduler.unfinished)
        return prefilled

    def first_tokens(self, sequences: list[Sequence]) -> list[FirstToken]:
        """First tokens, received with the answers or sampled here."""
        own = [sequence for sequence in sequences if sequence not in self._first_tokens]
        drawn = dict(zip(own, self._local.first_tokens(own), strict=True)) if own else {}
        drawn |= self._first_tokens
        self._first_tokens.clear()
        return [drawn[sequence] for sequence in sequences]

    def close(self) -> None:
        """End the prefill processes. The object cannot be used afterwards."""
        self._threads.shutdown()
        for line, task in self._tasks.items():
            if task is None or task.answer.exception() is None:
                self._end(line)
            else:
                line.close()

    def _end(self, line: Line) -> None:
        """End a prefill process."""
        with suppress(RuntimeError):  # it may have ended
            line.send(None, self._timeout)

    def _hand_out(self, sequences: list[Sequence]) -> None:
        """Divide sequences between the idle prefill processes, round-robin."""
        idle = [line for line, task in self._tasks.items() if task is None]
        target, runner, options = self._parts.target, self._parts.runner, layout_options(self._parts)
        for place, line in enumerate(idle[: len(sequences)]):
            some = sequences[place :: len(idle)]
            starts = [sequence.num_computed for sequence in some]
            request = {
                "number": next(_NUMBERS),
                "target": target.identity.fingerprint,
                "dtype": str(target.dtype),
                "layout": layout(runner.stores, runner.width),
                "options": options,
                "texts": [sequence.to_prefill for sequence in some],
                "starts": starts,
                # The texts are rendered already, and the values of a template's variables may be no JSON.
                "params": [vars(sequence.params) | {"chat_template_kwargs": None} for sequence in some],
            }
            first = first_blocks([len(sequence.to_prefill) for sequence in some], starts)
            answer = Answer(units_of(runner.stores), first[-1], len(some), runner.width, target.dtype)
            task = _Task(some, starts, first, self._threads.submit(self._ask, line, request, answer))
            del self._tasks[line]  # moves the line to the end of the order
            self._tasks[line] = task
            for sequence in some:
                sequence.remote_task = task

    @torch.inference_mode()
    def _ask(self, line: Line, request: dict, answer: Answer) -> Answer | None:
        """A prefill process's answer; None where its prefill failed and its target is whole. Runs in a thread, so that
        decoding goes on."""
        deadline = Deadline(self._timeout)
        line.send(request, deadline.left)
        if answer.receive(line, request["number"], deadline):
            return answer
        if self._parts.target.together is not None:  # it has ended, see `PrefillServer.serve`
            raise RuntimeError("its prefill failed")
        return None

    def _collect(self) -> None:
        """Collect the answers that are there on all decode ranks, and drop prefill processes that failed for one."""
        tasks = {line: task for line, task in self._tasks.items() if task is not None}
        if not tasks:
            return
        states = self._parts.runner.ranks.least_of_hosts([task.state for task in tasks.values()])
        for (line, task), state in zip(tasks.items(), states, strict=True):
            if state == _ARRIVED:
                self._tasks[line] = None
                self._take(task, task.answer.result())
            elif state == _FAILED:
                self._drop(line, task)
                self._take(task, None)

    def _drop(self, line: Line, task: _Task) -> None:
        """Ask no more of a prefill process. If it is another of its group that failed, it ends after its answer."""
        del self._tasks[line]
        error = task.answer.exception() if task.answer.done() else None
        reason = "another rank of its group failed" if error is None else one_line(error)
        warnings.warn(f"prefill process {line.other} is dropped: {reason}", stacklevel=2)
        task.answer.add_done_callback(lambda answer: line.close() if answer.exception() else self._end(line))

    def _take(self, task: _Task, answer: Answer | None) -> None:
        """A task's sequences are prefilled, or will be here if there is no answer. Sequences that were cancelled or
        preempted in the meantime are ignored."""
        rows = [row for row, each in enumerate(task.sequences) if each.remote_task is task and not each.finish_reason]
        new = [task.sequences[row] for row in rows]
        for sequence in new:
            sequence.remote_task = None
        if answer is None or not new:
            self._returned.update(new)
            return
        self._write(task, answer, new)
        hidden = answer.hidden.to(self._parts.target.device, non_blocking=True)
        for row, sequence in zip(rows, new, strict=True):
            sequence.num_computed, sequence.last_hidden = len(sequence.to_prefill), hidden[row]
            self._parts.scheduler.register(sequence)
            self._first_tokens[sequence] = _as_first_token(answer.tokens[row])

    def _write(self, task: _Task, answer: Answer, wanted: list[Sequence]) -> None:
        """Write an answer's pieces into these sequences' own blocks. Only whole answers come here, and a piece that is
        late has nowhere to go: until now, none of them was in the cache."""
        places = torch.full((task.first[-1],), -1)  # for each block of the answer, the sequence's, if it is wanted
        for sequence, start, (first, end) in zip(task.sequences, task.starts, pairwise(task.first), strict=True):
            if sequence in wanted:
                places[first:end] = torch.tensor(sequence.blocks[start // BLOCK :][: end - first])
        units = list(units_of(self._parts.runner.stores).values())
        for unit, blocks, content in answer.pieces:
            unpack(units[unit], places[blocks], content)


def _as_first_token(given: Any) -> FirstToken:
    """From what JSON has made of it."""
    token, logprobs = given
    if logprobs is not None:
        token_id, logprob, top = logprobs
        logprobs = TokenLogprobs(token_id, logprob, [(other, number) for other, number in top])
    return FirstToken(token, logprobs)
