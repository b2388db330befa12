"""Over how many ranks weights are divided, where the settings leave it open."""

from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.training import placement
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.placement import chosen

DIVIDED = {"backend": "fsdp2", "target": "fsdp2"}
ORDER = [  # target_shard_size, draft_shard_size, reshard_after_forward: the best first
    (8, 8, False),
    (8, 8, True),
    (8, 16, False),
    (8, 16, True),
    (16, 8, False),
    (16, 8, True),
    (16, 16, False),
    (16, 16, True),
]


@pytest.fixture(autouse=True)
def _transformers_of_today(monkeypatch):
    """5.23 or newer: older ones divide a target over all ranks."""
    monkeypatch.setattr(placement, "can_copy", lambda: True)


def found(settings: dict[str, Any], ranks: int = 16, node: int = 8, tried: int = 0) -> tuple:
    """What is chosen where the first so many of those that are tried do not fit."""
    answers = iter([False] * tried)
    made = chosen(ParallelConfig(**settings), ranks, node, lambda _: next(answers, True))
    return made.target_shard_size, made.draft_shard_size, made.reshard_after_forward


@pytest.mark.parametrize("tried", range(len(ORDER)))
def test_what_moves_most_stays_within_a_node_while_that_fits(tried):
    assert found(DIVIDED, tried=tried) == ORDER[tried]


def test_what_fits_nowhere_is_divided_as_far_as_it_can_be():
    assert chosen(ParallelConfig(**DIVIDED), 16, 8, lambda _: False).draft_shard_size == 16
    assert found(DIVIDED, tried=99) == ORDER[-1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (None, None, None)),
        ({"backend": "ddp"}, (None, None, None)),
        ({"backend": "ddp", "target": "tensor"}, (8, None, None)),
        ({"backend": "fsdp2"}, (None, 8, False)),
        ({"backend": "fsdp2", "draft_shard_size": "world"}, (None, 16, False)),
        ({"backend": "fsdp2", "draft_shard_size": "node", "reshard_after_forward": True}, (None, 8, True)),
        ({"backend": "fsdp2", "draft_shard_size": 4}, (None, 4, False)),
        (DIVIDED | {"target_shard_size": "world", "draft_shard_size": 2}, (16, 2, False)),
    ],
)
def test_what_is_given_stays(settings, expected):
    assert found(settings) == expected


def test_one_node_is_the_world():
    assert found(DIVIDED, ranks=8, node=8) == (8, 8, False)
    assert found(DIVIDED, ranks=8, node=8, tried=1) == (8, 8, True)


def test_a_target_that_transformers_cannot_copy_is_divided_over_all(monkeypatch):
    monkeypatch.setattr(placement, "can_copy", lambda: False)
    assert found(DIVIDED) == (16, 8, False)
    assert found(DIVIDED | {"target_shard_size": "node"}) == (8, 8, False)  # and loading refuses it


def test_nothing_is_asked_where_nothing_is_open():
    given = ParallelConfig("fsdp2", draft_shard_size=4, reshard_after_forward=True)
    assert chosen(given, 16, 8, lambda _: pytest.fail("asked")) == given


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"backend": "fsdp2", "draft_shard_size": 5},
            "parallel.draft_shard_size=5: must divide the number of processes, 16",
        ),
        (DIVIDED | {"target_shard_size": 3}, "parallel.target_shard_size=3: must divide the number of processes, 16"),
        (
            {"backend": "fsdp2", "draft_shard_size": 0},
            "parallel.draft_shard_size=0: must be at least 1, or node or world",
        ),
        (
            {"backend": "fsdp2", "draft_shard_size": "rack"},
            "parallel.draft_shard_size=rack: must be at least 1, or node or world",
        ),
        (
            {"backend": "ddp", "draft_shard_size": 2},
            "parallel.draft_shard_size=2: parallel.backend=ddp does not read it; use fsdp2",
        ),
        (
            {"backend": "deepspeed", "reshard_after_forward": False},
            "parallel.reshard_after_forward=false: parallel.backend=deepspeed does not read it; use fsdp2",
        ),
    ],
)
def test_what_cannot_be_is_told(settings, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        found(settings)
