"""Disaggregated prefill: one process decodes, others read the prompts for it. Paper section 3.3.

The process of rank 0 has the requests. It hands new prompts to those of the other ranks (`serve_prefill`), which send
back each prompt's first token, last hidden state, and keys and values of target and draft; it puts these into blocks of
its own and decodes. What a prefill process cannot read, or does not in time, the decode process reads itself.

    world = distributed.start(device)
    lines = connect(world)
    if world.is_main:
        engine = DecodeEngine(target, draft, lines=lines)
        outputs = engine.generate(prompts)
        engine.close()
    else:
        serve_prefill(Engine(target, draft), lines)

Messages are JSON, then one tensor, through host memory and Gloo on any device: a process that NCCL waits for in vain
takes the waiting one with it. Under torchrun one that dies takes the others with it all the same; started one by one,
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, the rest goes on.

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
from eagle_train.errors import check, one_line, shown
from eagle_train.inference.cache.block_pool import blocks_for
from eagle_train.inference.cache.paged_kv import BLOCK
from eagle_train.inference.engine import Engine
from eagle_train.inference.requests.sequence import SamplingParams, Sequence, is_number

DECODER = 0  # its rank
FOREVER = timedelta(days=365)
LONGEST = 10**9  # seconds, that anything can be waited for
A_MOMENT = 0.01  # seconds
NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class Line:
    """What the decode process and one prefill process tell each other, in a group of their own: Gloo closes all of a
    group's connections when one does not answer in time. Raises RuntimeError then, or where the other one is gone."""

    other: int  # rank
    group: Any

    def send(self, tensor: torch.Tensor, timeout: timedelta = FOREVER) -> None:
        dist.isend(tensor, self.other, self.group).wait(timeout)

    def receive(self, tensor: torch.Tensor, timeout: timedelta = FOREVER) -> torch.Tensor:
        """In place."""
        dist.irecv(tensor, self.other, self.group).wait(timeout)
        return tensor

    def tell(self, message: Any, timeout: timedelta = FOREVER) -> None:
        """Send what JSON can say."""
        text = torch.frombuffer(bytearray(as_json(message).encode()), dtype=torch.uint8)
        self.send(torch.tensor([len(text)]), timeout)
        self.send(text, timeout)

    def hear(self, timeout: timedelta = FOREVER) -> Any:
        """The other end of `tell`."""
        length = self.receive(torch.empty(1, dtype=torch.int64), timeout)
        return json.loads(self.receive(torch.empty(int(length), dtype=torch.uint8), timeout).numpy().tobytes())


def as_json(message: Any) -> str:
    """Mappings of any kind as objects, and listings as arrays."""
    return json.dumps(message, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value))


def connect(world: World) -> list[Line]:
    """The decode process's lines to the prefill processes, or a prefill process's one; all ranks must call it, once.
    Raises UserError where there is one process only."""
    check(world.size > 1, "1 process was started: one decodes, and at least one more must read the prompts")
    groups = {rank: dist.new_group([DECODER, rank], backend="gloo") for rank in range(world.size) if rank != DECODER}
    if world.rank == DECODER:
        return [Line(rank, group) for rank, group in groups.items()]
    return [Line(DECODER, groups[world.rank])]


@dataclass(eq=False)
class Errand:
    """Sequences whose texts a prefill process reads, each from where its cache ends, and what is to come of it."""

    sequences: list[Sequence]
    starts: list[int]
    sizes: list[int]  # numbers that `packed` makes of each
    answer: Future | None = None


class DecodeEngine(Engine):
    """The engine of the decode process: its requests' texts are read by the prefill processes, while there are any."""

    def __init__(self, *arguments: Any, lines: list[Line], timeout_s: float = 60.0, **options: Any):
        """An `Engine`'s arguments, and `timeout_s`: a prefill process that keeps what it was handed for longer is given
        up. Raises UserError where the target is divided over ranks."""
        right = is_number(timeout_s, 0, LONGEST) and timeout_s > 0
        check(right, f"timeout_s={shown(timeout_s)}: must be above 0, and at most {LONGEST} seconds")
        check(len(lines) > 0, "lines=[]: must be those to the prefill processes, as connect gives them")
        super().__init__(*arguments, **options)
        check(self.target.together is None, f"target {self.target.name}: disaggregated, it must be whole on every rank")
        self.timeout = timedelta(seconds=timeout_s)
        self.errands: dict[Line, Errand | None] = dict.fromkeys(lines)
        self.threads = ThreadPoolExecutor(len(lines))
        self.unread: set[Sequence] = set()  # whose texts came back as they were
        self.first_tokens: dict[Sequence, int] = {}  # of those whose texts were read apart, until they decode

    def read(self, chunks: list[tuple[Sequence, int]]) -> None:
        here = any(sequence in self.unread for sequence, _ in chunks)
        if not self.active and not here and (not chunks or None not in self.errands.values()):  # nothing but to wait
            answers = [errand.answer for errand in self.errands.values() if errand is not None]
            wait(answers, timeout=A_MOMENT, return_when=FIRST_COMPLETED)
        for line in list(self.errands):
            self.collect(line)
        self.hand_out([sequence for sequence, _ in chunks if sequence not in self.unread])
        super().read([chunk for chunk in chunks if chunk[0] in self.unread or not self.errands])
        self.unread.intersection_update(self.scheduler.unfinished)

    def firsts(self, new: list[Sequence]) -> list[int]:
        own = [sequence for sequence in new if sequence not in self.first_tokens]
        drawn = dict(zip(own, super().firsts(own), strict=True)) if own else {}
        drawn |= self.first_tokens
        self.first_tokens.clear()
        return [drawn[sequence] for sequence in new]

    def hand_out(self, sequences: list[Sequence]) -> None:
        """Divide the texts between the prefill processes that have nothing to do, whose turns come round."""
        idle = [line for line, errand in self.errands.items() if errand is None]
        for place, line in enumerate(idle[: len(sequences)]):
            some = sequences[place :: len(idle)]
            starts = [sequence.read for sequence in some]
            sizes = [size_of(self, sequence.read, len(sequence.to_prefill)) for sequence in some]
            request = {
                "number": next(NUMBERS),
                "target": self.target.identity.fingerprint,
                "dtype": str(self.target.dtype),
                "texts": [sequence.to_prefill for sequence in some],
                "starts": starts,
                "params": [vars(sequence.params) for sequence in some],
                "size": sum(sizes),
            }
            errand = Errand(some, starts, sizes)
            del self.errands[line]  # and to the end of the queue
            self.errands[line] = errand
            errand.answer = self.threads.submit(self.ask, line, request)
            for sequence in some:
                sequence.reader = errand

    def ask(self, line: Line, request: dict) -> tuple[list[int], torch.Tensor] | None:
        """First tokens of texts, and all else that a prefill process packed; None where it could not read them. In a
        thread, so that decoding goes on meanwhile."""
        line.tell(request, self.timeout)
        answer = line.hear(self.timeout)
        if answer["number"] != request["number"]:  # one that an engine before this one no longer waited for
            raise RuntimeError("its answer is to something else")
        if "tokens" not in answer:
            return None
        is_gpu = self.target.device.type == "cuda"
        packed = torch.empty(request["size"], dtype=self.target.dtype, pin_memory=is_gpu)
        return answer["tokens"], line.receive(packed, self.timeout)

    def collect(self, line: Line) -> None:
        """What a prefill process has sent, if it has: its sequences have read their texts, or are to be read here. Some
        may have been cancelled by now, or had to give up their blocks."""
        errand = self.errands[line]
        if errand is None or not errand.answer.done():
            return
        self.errands[line] = None
        if error := errand.answer.exception():
            del self.errands[line]
            warnings.warn(f"prefill process {line.other} is given up: {one_line(error)}", stacklevel=2)
        answer = None if error else errand.answer.result()
        rows = [row for row, each in enumerate(errand.sequences) if each.reader is errand and not each.finish_reason]
        new = [errand.sequences[row] for row in rows]
        for sequence in new:
            sequence.reader = None
        if answer is None or not new:
            self.unread.update(new)
            return
        tokens, packed = answer
        parts = packed.to(self.target.device, non_blocking=True).split(errand.sizes)
        for row, sequence in zip(rows, new, strict=True):
            sequence.last_hidden = unpack(self, sequence, errand.starts[row], parts[row])
            self.first_tokens[sequence] = tokens[row]

    def close(self) -> None:
        """Let the prefill processes end. Nothing may be handed out afterwards."""
        self.threads.shutdown()
        for line, errand in self.errands.items():
            if errand is None or errand.answer.exception() is None:
                with suppress(RuntimeError):  # one that died meanwhile
                    line.tell(None, self.timeout)


def serve_prefill(engine: Engine, lines: list[Line]) -> None:
    """Read prompts for the decode process until it has no more. The engine has the same target and draft as its own."""
    (line,) = lines
    while request := line.hear():
        try:
            tokens, packed = read(engine, request)
        except Exception as error:  # whatever it was, the decode process reads these itself
            warnings.warn(f"{len(request['texts'])} texts go back unread: {one_line(error)}", stacklevel=2)
            for sequence in engine.scheduler.unfinished:
                sequence.finish_reason = "failed"
            engine.scheduler.leave()
            engine.advanced.clear()
            line.tell({"number": request["number"]})
        else:
            line.tell({"number": request["number"], "tokens": tokens})
            line.send(packed.cpu())


@torch.inference_mode()
def read(engine: Engine, request: dict) -> tuple[list[int], torch.Tensor]:
    """First tokens of texts, and all else that the decode process needs of them. Raises UserError where it has another
    target or draft."""
    sequences = []
    for place, (text, params) in enumerate(zip(request["texts"], request["params"], strict=True)):
        params = replace(SamplingParams(**params), max_tokens=2, stop=None)  # the first token ends nothing here
        sequences.append(Sequence(place, text, params, frozenset(), engine.requests.matcher_of(params)))
    same = engine.target.identity.fingerprint == request["target"]
    check(same, f"target {engine.target.name}: the decode process has another")
    own, other = str(engine.target.dtype), request["dtype"]
    check(own == other, f"target {engine.target.name}: it is in {own} here, and the decode process has it in {other}")
    engine.enqueue(sequences)
    packs = {}
    while engine.scheduler.unfinished:
        engine.prefill()
        for row, sequence in enumerate(engine.active):
            packs[sequence] = pack(engine, sequence, request["starts"][sequence.index], engine.pending.hidden[row, 0])
            sequence.finish_reason = "read"
        engine.leave()
    engine.advanced.clear()  # nobody here is told
    packed = torch.cat([packs[sequence] for sequence in sequences])
    check(len(packed) == request["size"], "draft or prefix_cache: the decode process has another")
    return [sequence.generated[0] for sequence in sequences], packed


def blocks_of(sequence: Sequence, start: int) -> list[int]:
    """The blocks that hold a sequence's text from `start` on."""
    return sequence.blocks[start // BLOCK : blocks_for(len(sequence.to_prefill))]


def size_of(engine: Engine, start: int, end: int) -> int:
    """Numbers that `pack` makes of a text of `end` tokens."""
    blocks = blocks_for(end) - start // BLOCK
    return blocks * sum(map(block_size, engine.memory.by_block)) + engine.target.embedding.shape[1]


def block_size(x: torch.Tensor) -> int:
    """Numbers of a block in x [L, blocks, ...]."""
    return x.shape[0] * math.prod(x.shape[2:])


def pack(engine: Engine, sequence: Sequence, start: int, hidden: torch.Tensor) -> torch.Tensor:
    """All that is kept of a text from `start` on, whole blocks, and the target's hidden state [H] at its end; a row."""
    blocks = blocks_of(sequence, start)
    return torch.cat([*(x[:, blocks].flatten() for x in engine.memory.by_block), hidden])


def unpack(engine: Engine, sequence: Sequence, start: int, packed: torch.Tensor) -> torch.Tensor:
    """Put what `pack` gave into a sequence's own blocks; returns the hidden state [H]."""
    blocks = blocks_of(sequence, start)
    for x in engine.memory.by_block:
        own, packed = packed.tensor_split([len(blocks) * block_size(x)])
        x[:, blocks] = own.view(x.shape[0], len(blocks), *x.shape[2:])
    sequence.read = len(sequence.to_prefill)
    engine.scheduler.note(sequence)
    return packed
