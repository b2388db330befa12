"""Queues requests, seats their drafters, and sizes the cache for them. Knows nothing of rounds or models."""

import warnings

from eagle_train.errors import OptionError, check
from eagle_train.inference.cache.block_memory import BlockMemory
from eagle_train.inference.cache.block_pool import blocks_for
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.drafters.drafters import Drafters
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.inference.requests.sequence import Sequence


def seat(sequence: Sequence, drafter: str | None, drafters: Drafters) -> None:
    """This one of the drafters drafts for a request from now on; None: none does."""
    sequence.drafter, sequence.is_read = drafter, drafters.reads_texts(drafter)
    if (kind := drafters.caching(drafter)) != sequence.cached_by:
        sequence.cached_by = kind
        del sequence.block_hashes[sequence.num_computed // BLOCK :]  # of blocks to come, which will hold other things


def drop_drafter(drafters: Drafters, sequence: Sequence) -> None:
    """A request goes on without drafts. Its blocks to come lack its drafter's keys and values."""
    drafters.leave(sequence.drafter, sequence.key)
    seat(sequence, None, drafters)


def stop_drafting(drafters: Drafters, sequence: Sequence, reason: str) -> None:
    """A request's drafter was wrong: it goes on without drafts, once it is told."""
    if sequence.drafter is not None:
        told = f"drafter {sequence.drafter}: {reason}; request {sequence.index} goes on without drafts"
        warnings.warn(told, stacklevel=2)
        drop_drafter(drafters, sequence)


def room_for(rows: int, longest: int, deepest: int) -> int:
    """The `kv_tokens` with which an engine never keeps one of `rows` requests waiting, and leaves a GPU's other memory
    to others. `longest`: the most tokens of a prompt and its answer; `deepest`: how deep its drafts may be."""
    return rows * (blocks_for(longest + deepest + 1) + 1) * BLOCK


def enqueue(sequences: list[Sequence], scheduler: Scheduler, memory: BlockMemory) -> None:
    """Queue requests. Raises UserError, with nothing queued, where one of them alone would not fit into a fixed cache.

    Else the cache grows until a full batch of the largest request fits, as far as there is memory.
    """
    kv_tokens, total = memory.kv_tokens, memory.pool.total
    room = "" if kv_tokens is not None else f", and the device had memory for {total * BLOCK}"
    for sequence in sequences:
        need = sequence.most_blocks = blocks_for(_most_slots(sequence, scheduler.ahead))
        check(
            not memory.is_fixed or need <= total,
            f"kv_tokens={kv_tokens}: {sequence.name} and its answer need {need * BLOCK}{room}",
            OptionError,
        )
    needs = [each.most_blocks for each in (*scheduler.unfinished, *sequences)]
    most = max(needs, default=0)
    blocks = (most + 1) * min(scheduler.rows, len(needs))
    if not memory.is_fixed and blocks > total:
        memory.grow(blocks, least=most)
    memory.pool.region = most
    scheduler.waiting.extend(sequences)


def _most_slots(sequence: Sequence, ahead: int) -> int:
    return len(sequence.prompt) + sequence.params.max_tokens + ahead
