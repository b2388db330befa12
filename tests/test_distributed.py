"""What a job's environment may say of its processes."""

import pytest

from eagle_train import distributed
from eagle_train.config import UserError


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, WORLD_SIZE=2: must be whole numbers, RANK below WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: must be whole numbers, RANK below WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set, and WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "MASTER_PORT is not set, and WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_cannot_be(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.place() == (0, 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{message}"):
        distributed.place()
