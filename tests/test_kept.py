"""What tests train once (tests/support/kept.py): a draft is found again for the same target and settings alone."""

import pytest
import torch

from eagle_train.drafts import Draft
from eagle_train.models.target import Target
from tests.support import kept
from tests.support.tiny import tiny_draft, tiny_target


@pytest.fixture
def folder(tmp_path, monkeypatch) -> None:
    """An empty one."""
    monkeypatch.setenv(kept.FOLDER, str(tmp_path))


def other_weights(target: Target) -> Target:
    with torch.no_grad():
        target.model.model.norm.weight[0] += 1
    return target


@pytest.mark.parametrize(
    ("target", "settings", "is_new"),
    [
        (tiny_target, {}, False),
        (tiny_target, {"num_layers": 1}, True),
        (lambda: other_weights(tiny_target()), {}, True),
        (lambda: tiny_target(dtype=torch.bfloat16), {}, True),
        (lambda: tiny_target(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), {}, True),
    ],
    ids=["same", "setting", "weights", "dtype", "config"],
)
def test_a_draft_is_trained_once(folder, target, settings, is_new):
    trained = []

    @kept.kept
    def train(target: Target, **settings: int) -> Draft:
        trained.append(settings)
        return tiny_draft(target, **settings)

    first = train(tiny_target())
    second = train(target(), **settings)
    assert len(trained) == 1 + is_new
    assert second is not first
    if not is_new:
        for name, weight in first.state_dict().items():
            assert torch.equal(second.state_dict()[name], weight)
            assert second.state_dict()[name].data_ptr() != weight.data_ptr()
