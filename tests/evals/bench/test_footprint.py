"""The memory of drafters: weights that are not the target's, caches, host structures, mapped files."""

import mmap

import torch

from eagle_train.inference import Drafter, Eagle
from eagle_train.inference.drafters.trained import drafter_of
from evals.bench.footprint import cache_bytes_per_token, file_bytes, traced_bytes, weight_bytes
from tests.support.tiny import shared_target, tiny_draft, tiny_mtp


def test_weights_are_the_drafters_own():
    target = shared_target()
    draft = tiny_draft(target)
    drafter = Eagle(draft, target)
    own = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in [*draft.parameters(), *draft.buffers()]
    }
    assert weight_bytes(drafter, target) == sum(own.values()) > 0


def test_what_is_held_in_containers_counts_once():
    target, drafter = shared_target(), Drafter()
    table = torch.zeros(10, dtype=torch.int64)
    drafter.tables = {"a": [table, table[3:]], "b": (torch.zeros(3, dtype=torch.int8),)}
    drafter.target, drafter.embedding, drafter.me = target, target.embedding, drafter
    assert weight_bytes(drafter, target) == 80 + 3


def test_a_tokens_keys_and_values():
    target = shared_target()
    drafter = Eagle(tiny_draft(target), target)
    config = drafter.draft.config
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert cache_bytes_per_token(drafter) == values * drafter.cache.memory[0].element_size()
    assert cache_bytes_per_token(Drafter()) == 0
    chain = drafter_of(tiny_mtp(target, modules=3), target)
    assert cache_bytes_per_token(chain) == 3 * values / config.num_layers * 4 + 2 * 32 * 4 / 16  # states of each block
    assert weight_bytes(chain, target) == weight_bytes(Eagle(tiny_mtp(target, modules=3), target), target)


def test_files_that_are_read_as_memory(tmp_path):
    (tmp_path / "index").write_bytes(b"a" * 5000)
    drafter = Drafter()
    with (tmp_path / "index").open("rb") as file:
        drafter.index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert file_bytes(drafter) == 5000
    assert weight_bytes(drafter, shared_target()) == 0


def test_what_python_allocates():
    assert 800_000 < traced_bytes(lambda: [0] * 100_000) < 900_000
    assert traced_bytes(lambda: None) < 10_000
