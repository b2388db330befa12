"""What the engine's caches should hold, and what nobody may read from them. DESIGN 3.1, 3.6."""

import torch

from eagle_train.drafts import Draft, shift_hidden
from eagle_train.inference import Engine
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import BLOCK, ZEROS
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from tests.support.inside import active_in, drafter_of, inside, pool_of, runner_of, scheduler_of


class Recorder:
    """`attend` for one document that keeps each layer's keys and values [K, T, D]."""

    def __init__(self):
        self.keys, self.values = [], []

    def __call__(self, layer, q, k, v, rule):
        self.keys.append(k[0])
        self.values.append(v[0])
        return packed_attention([[q.shape[2]]])(layer, q, k, v, rule)


def slots_of(sequence: Sequence) -> list[int]:
    return [block * BLOCK + i for block in sequence.blocks for i in range(BLOCK)]


def check_cache(cache: PagedKV, sequence: Sequence, wanted: Recorder, error: float = 1e-4) -> None:
    for layer, pair in enumerate(zip(wanted.keys, wanted.values, strict=True)):
        for stored, alone in zip(cache.layers[layer], pair, strict=True):
            slots = slots_of(sequence)[: alone.shape[1]]
            torch.testing.assert_close(stored[slots], alone.transpose(0, 1), rtol=error, atol=error)


def fresh(target: Target, draft: Draft, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, Recorder, Recorder]:
    """Hidden states of target and draft for tokens read in one go, the contract of DESIGN 3.1; and their caches."""
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    of_target, of_draft = Recorder(), Recorder()
    hidden = target.hidden_states(ids, positions, of_target)
    previous = shift_hidden(hidden, positions)
    return hidden[0], draft(target.embed(ids), previous, positions, of_draft)[0], of_target, of_draft


@torch.inference_mode()
def spoil(engine: Engine) -> None:
    """Make NaN of every slot that holds no committed token."""
    named = [block * BLOCK + i for block in pool_of(engine).hash_of for i in range(BLOCK)]
    for cache, of_target in ((runner_of(engine).cache, True), (drafter_of(engine).cache, False)):
        free = torch.ones(cache.slots, dtype=torch.bool)
        free[ZEROS * BLOCK : (ZEROS + 1) * BLOCK] = False
        if active_in(engine):
            lengths = inside(engine).batch.pending.lengths if of_target else inside(engine).batch.pending.draft_lengths
            for sequence, length in zip(active_in(engine), lengths.tolist(), strict=True):
                free[slots_of(sequence)[:length]] = False
        for sequence in scheduler_of(engine).prefilling:
            free[slots_of(sequence)[: sequence.num_computed]] = False
        free[named] = False
        for memory in cache.memory:
            memory[:, free] = torch.nan
