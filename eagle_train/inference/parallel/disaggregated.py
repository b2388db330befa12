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

Messages are JSON, then one tensor, over Gloo and host memory on any device, because a timeout in NCCL ends the waiting
process. torchrun ends all processes when one dies; processes that are started one by one, with RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT set, keep running.

Shapes: A sequences, T tokens of a text, H hidden.
"""

import itertools
import json
import math
import warnings
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from eagle_train.distributed import World
from eagle_train.errors import OptionError, check, one_line, shown
from eagle_train.inference.cache.block_pool import blocks_for
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.bookkeeping import FirstToken
from eagle_train.inference.decode.logprobs import TokenLogprobs
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parts import AnyDraft, Parts, build_parts
from eagle_train.inference.requests.admission import enqueue, seat
from eagle_train.inference.requests.prefiller import Chunk
from eagle_train.inference.requests.sampling_params import SamplingParams, is_number
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.models.target import Target

FOREVER = timedelta(days=365)
_LONGEST_S = 10**9  # the largest timeout
_POLL_S = 0.01
_NUMBERS = itertools.count()
_FAILED, _AWAITED, _ARRIVED = range(3)  # answers; the least over the decode ranks is what all of them go by


@dataclass(frozen=True, eq=False)
class Line:
    """The connection between the decode process and one prefill process. It has its own process group, because Gloo
    closes all connections of a group after a timeout. Methods raise RuntimeError on a timeout, or if the other process
    has ended."""

    other: int  # rank
    group: Any

    def send_tensor(self, tensor: torch.Tensor, timeout: timedelta = FOREVER) -> None:
        self._wait(dist.isend(tensor, self.other, self.group), timeout)

    def recv_tensor(self, tensor: torch.Tensor, timeout: timedelta = FOREVER) -> torch.Tensor:
        """Receive into `tensor` and return it."""
        self._wait(dist.irecv(tensor, self.other, self.group), timeout)
        return tensor

    @staticmethod
    def _wait(work: dist.Work | None, timeout: timedelta) -> None:
        assert work is not None  # it is None only for a process outside the group
        work.wait(timeout)

    def send(self, message: Any, timeout: timedelta = FOREVER) -> None:
        """Send a value that JSON can represent."""
        text = torch.frombuffer(bytearray(_as_json(message).encode()), dtype=torch.uint8)
        self.send_tensor(torch.tensor([len(text)]), timeout)
        self.send_tensor(text, timeout)

    def recv(self, timeout: timedelta = FOREVER) -> Any:
        """Receive a value that the other process sent with `send`."""
        length = self.recv_tensor(torch.empty(1, dtype=torch.int64), timeout)
        return json.loads(self.recv_tensor(torch.empty(int(length), dtype=torch.uint8), timeout).numpy().tobytes())


def _as_json(message: Any) -> str:
    """Mappings of any kind as objects, other iterables as arrays."""
    return json.dumps(message, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value))


def connect(world: World) -> list[Line]:
    """A decode rank's lines, one to each prefill group, or a prefill rank's one line to its decode rank. The first
    `world.shard_size` ranks decode. Collective: all ranks must call it, once. Raises UserError if none is left for
    prefill."""
    each = world.shard_size
    started = "1 process was" if world.size == 1 else f"{world.size} processes were"
    parts = "one for decoding and one for prefill" if each == 1 else f"{each} for decoding and {each} for prefill"
    check(world.size > each, f"{started} started: start at least {2 * each}, {parts}")
    groups = {rank: dist.new_group([rank % each, rank], backend="gloo") for rank in range(each, world.size)}
    if world.rank < each:
        return [Line(rank, group) for rank, group in groups.items() if rank % each == world.rank]
    return [Line(world.rank % each, groups[world.rank])]


@dataclass(eq=False)
class _Task:
    """A prefill task of a prefill process: sequences, each from its first token that is not in the cache."""

    sequences: list[Sequence]
    starts: list[int]
    sizes: list[int]  # elements that `_serialize_kv` returns for each
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
        _check_draft(parts)
        self._parts, self._local = parts, parts.prefiller
        return self

    def prefill(self, chunks: list[Chunk], is_decoding: bool) -> None:
        """Collect finished tasks and send new ones. Waits briefly if there is nothing to decode or to send."""
        here = any(sequence in self._returned for sequence, _ in chunks)
        if not is_decoding and not here and (not chunks or None not in self._tasks.values()):
            answers = [task.answer for task in self._tasks.values() if task is not None]
            wait(answers, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        self._collect()
        self._hand_out([sequence for sequence, _ in chunks if sequence not in self._returned])
        own = [chunk for chunk in chunks if chunk[0] in self._returned or not self._tasks]
        self._local.prefill(own, is_decoding)
        self._returned.intersection_update(self._parts.scheduler.unfinished)

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

    def _end(self, line: Line) -> None:
        """End a prefill process."""
        with suppress(RuntimeError):  # it may have ended
            line.send(None, self._timeout)

    def _hand_out(self, sequences: list[Sequence]) -> None:
        """Divide sequences between the idle prefill processes, round-robin."""
        idle = [line for line, task in self._tasks.items() if task is None]
        target = self._parts.target
        for place, line in enumerate(idle[: len(sequences)]):
            some = sequences[place :: len(idle)]
            starts = [sequence.num_computed for sequence in some]
            sizes = [_size_of(self._parts, sequence.num_computed, len(sequence.to_prefill)) for sequence in some]
            request = {
                "number": next(_NUMBERS),
                "target": target.identity.fingerprint,
                "dtype": str(target.dtype),
                "texts": [sequence.to_prefill for sequence in some],
                "starts": starts,
                # The texts are rendered already, and the values of a template's variables may be no JSON.
                "params": [vars(sequence.params) | {"chat_template_kwargs": None} for sequence in some],
                "size": sum(sizes),
            }
            task = _Task(some, starts, sizes, self._threads.submit(self._ask, line, request))
            del self._tasks[line]  # moves the line to the end of the order
            self._tasks[line] = task
            for sequence in some:
                sequence.remote_task = task

    def _ask(self, line: Line, request: dict) -> tuple[list[FirstToken], torch.Tensor] | None:
        """A prefill process's answer: each prompt's first token, and the serialised rest (`_serialize_kv`); None where
        its prefill failed and its target is whole. Runs in a thread, so that decoding goes on."""
        line.send(request, self._timeout)
        answer = line.recv(self._timeout)
        if answer["number"] != request["number"]:  # of a request that an earlier engine abandoned
            raise RuntimeError("its answer is to another request")
        target = self._parts.target
        if "tokens" not in answer:
            if target.together is not None:  # it has ended, see `PrefillServer.serve`
                raise RuntimeError("its prefill failed")
            return None
        payload = torch.empty(request["size"], dtype=target.dtype, pin_memory=target.device.type == "cuda")
        return list(map(_as_first_token, answer["tokens"])), line.recv_tensor(payload, self._timeout)

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
        task.answer.add_done_callback(lambda answer: None if answer.exception() else self._end(line))

    def _take(self, task: _Task, answer: tuple[list[FirstToken], torch.Tensor] | None) -> None:
        """A task's sequences are prefilled, or will be here if there is no answer. Sequences that were cancelled or
        preempted in the meantime are ignored."""
        rows = [row for row, each in enumerate(task.sequences) if each.remote_task is task and not each.finish_reason]
        new = [task.sequences[row] for row in rows]
        for sequence in new:
            sequence.remote_task = None
        if answer is None or not new:
            self._returned.update(new)
            return
        tokens, payload = answer
        pieces = payload.to(self._parts.target.device, non_blocking=True).split(task.sizes)
        for row, sequence in zip(rows, new, strict=True):
            sequence.last_hidden = _load_kv(self._parts, sequence, task.starts[row], pieces[row])
            self._first_tokens[sequence] = tokens[row]


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
        process. Raises OptionError for a divided target with a draft where `divide_draft` is None."""
        config = replace(config or EngineConfig(), **options)
        self._parts = build_parts(target, draft, "chain3", "cpu", config, None)
        _check_draft(self._parts)

    def serve(self, lines: list[Line]) -> None:
        """Serve prefill requests until the decode process closes, or drops this one's group because another rank of it
        failed. With a divided target also until a prefill fails here. `lines`: from `connect`.

        Raises RuntimeError if the decode process has ended, or has given up waiting. Where another rank of the group
        hangs, the forward waits for it until the group's collectives time out."""
        (line,) = lines
        while request := line.recv():
            try:
                tokens, payload = self.prefill(request)
            except Exception as error:  # after any error the decode process prefills these itself
                warnings.warn(f"prefill of {len(request['texts'])} texts failed: {one_line(error)}", stacklevel=2)
                for sequence in self._parts.scheduler.unfinished:
                    sequence.finish_reason = "failed"
                self._parts.scheduler.leave()
                line.send({"number": request["number"]})
                if self._parts.target.together is not None:
                    return  # the others may wait for this rank in their forwards, so the group is dropped
            else:
                line.send({"number": request["number"], "tokens": tokens})
                line.send_tensor(payload.cpu())

    @torch.inference_mode()
    def prefill(self, request: dict) -> tuple[list[FirstToken], torch.Tensor]:
        """The first token of each text, and the serialised rest (`_serialize_kv`) of all, a 1-D tensor. Raises
        UserError if the decode process has another target or draft."""
        parts, scheduler, target = self._parts, self._parts.scheduler, self._parts.target
        drafters, sequences = parts.runner.drafters, []
        for place, (text, params) in enumerate(zip(request["texts"], request["params"], strict=True)):
            given = SamplingParams(**params)
            short = replace(given, max_tokens=2, min_tokens=0, stop=None)  # no request ends with its first token
            matcher, adjustment = parts.requests.matcher_of(short), parts.requests.adjustment_of(given)
            sequence = Sequence(place, text, short, frozenset(), matcher, adjustment=adjustment)
            seat(sequence, drafters.seat(short.drafter), drafters)
            sequences.append(sequence)
        same = target.identity.fingerprint == request["target"]
        check(same, f"target {target.name}: the decode process has another")
        own, other = str(target.dtype), request["dtype"]
        check(own == other, f"target {target.name}: it is in {own} here, and the decode process has it in {other}")
        enqueue(sequences, scheduler, parts.memory)
        tokens: dict[Sequence, FirstToken] = {}
        states: dict[Sequence, torch.Tensor] = {}
        while scheduler.has_unfinished:
            scheduler.admit()
            parts.prefiller.prefill(scheduler.chunks(parts.config.prefill_tokens), is_decoding=False)
            ready = scheduler.ready
            tokens |= dict(zip(ready, parts.prefiller.first_tokens(ready), strict=True)) if ready else {}
            for sequence in ready:
                start = request["starts"][sequence.index]
                states[sequence] = _serialize_kv(parts, sequence, start, sequence.last_hidden)
                sequence.finish_reason = "prefilled"
            scheduler.leave()
        payload = torch.cat([states[sequence] for sequence in sequences])
        check(len(payload) == request["size"], "draft, divide_draft or prefix_cache: the decode process has another")
        return [tokens[sequence] for sequence in sequences], payload


def _as_first_token(given: Any) -> FirstToken:
    """From what JSON has made of it."""
    token, logprobs = given
    if logprobs is not None:
        token_id, logprob, top = logprobs
        logprobs = TokenLogprobs(token_id, logprob, [(other, number) for other, number in top])
    return FirstToken(token, logprobs)


def _check_draft(parts: Parts) -> None:
    """Raise OptionError where decode and prefill ranks would each measure for themselves whether to divide a draft."""
    is_whole, drafts = parts.target.together is None, bool(parts.runner.drafters.by_name)
    is_told = is_whole or not drafts or parts.config.divide_draft is not None
    check(
        is_told,
        "divide_draft=None: must be true or false with disaggregated prefill, the same on all ranks",
        OptionError,
    )


def _blocks_of(sequence: Sequence, start: int) -> list[int]:
    """The blocks that hold a sequence's prompt from token `start` on."""
    return sequence.blocks[start // BLOCK : blocks_for(len(sequence.to_prefill))]


def _size_of(parts: Parts, start: int, end: int) -> int:
    """Elements that `_serialize_kv` returns for a text of `end` tokens."""
    blocks = blocks_for(end) - start // BLOCK
    return blocks * sum(map(_block_size, parts.memory.by_block)) + parts.runner.width


def _block_size(x: torch.Tensor) -> int:
    """Elements of a block in x [n, blocks, ...]."""
    return x.shape[0] * math.prod(x.shape[2:])


def _serialize_kv(parts: Parts, sequence: Sequence, start: int, hidden: torch.Tensor) -> torch.Tensor:
    """The cache's blocks of a text from token `start` on, then the target's hidden state [H] at its last token, as one
    1-D tensor. `start` may lie inside a block, which is sent whole."""
    blocks = _blocks_of(sequence, start)
    return torch.cat([*(x[:, blocks].flatten() for x in parts.memory.by_block), hidden])


def _load_kv(parts: Parts, sequence: Sequence, start: int, payload: torch.Tensor) -> torch.Tensor:
    """Write the output of `_serialize_kv` into the sequence's own blocks; returns the hidden state [H]."""
    blocks = _blocks_of(sequence, start)
    for x in parts.memory.by_block:
        own, payload = payload.tensor_split([len(blocks) * _block_size(x)])
        x[:, blocks] = own.view(x.shape[0], len(blocks), *x.shape[2:])
    sequence.num_computed = len(sequence.to_prefill)
    parts.scheduler.register(sequence)
    return payload
