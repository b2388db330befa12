"""Random models: their weights follow from the seed alone, also where two ranks hold them together."""

import pytest
import torch

from eagle_train.distributed import ALONE, World
from eagle_train.errors import UserError
from evals.bench.random_models import ShapesConfig, random_target
from tests.support.processes import start_ranks
from tests.support.random_models_job import CONFIGS, EXPERTS, SEED, WINDOW, computed


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("random") / "found.pt"
    start_ranks(2, "random_models_job", out)
    return torch.load(out, weights_only=False)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_have_the_models_of_one_process(of_two, name):
    one, two = computed(CONFIGS[name], ALONE), of_two[name]
    assert one["share"] == 1
    assert two["share"] < 0.85  # the rest are embedding, LM head, norms
    assert (one["sums"], two["sums"]) == (0, 7)  # of the embedding and of both halves of three layers
    torch.testing.assert_close(one["logits"], two["logits"], rtol=1e-4, atol=1e-5)
    assert one["logits"].std() > 0.1
    assert one["plain"] == one["drafted"] == two["plain"] == two["drafted"]
    assert len({token for tokens in one["plain"] for token in tokens}) > 1
    for key, weight in one["draft"].state_dict().items():
        assert torch.equal(weight, two["draft"].state_dict()[key]), key
    assert (two["draft"].config.window, two["draft"].config.sink) == (WINDOW, True)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Of a family that has weights of all kinds."""
    own = {"model_type": "gpt_oss", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = ShapesConfig(EXPERTS | own, None, "float32").target
    return random_target(config, torch.float32, "cpu", seed=seed).model.state_dict()


def test_weights_are_normal_and_constants_stay(capfd):
    first, again, other = weights_of(SEED), weights_of(SEED), weights_of(SEED + 1)
    drawn = {name for name, weight in first.items() if weight.ndim >= 2 or name.endswith(("sinks", "router.bias"))}
    assert len(drawn) < len(first)
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, other[name]) == (name not in drawn), name
        if name not in drawn:
            assert weight.unique().tolist() in ([0.0], [1.0]), name
        elif weight.numel() > 1000:
            assert weight.std().item() == pytest.approx(0.1, rel=0.1), name
    assert len({weight.flatten()[0].item() for name, weight in first.items() if name in drawn}) == len(drawn)
    assert capfd.readouterr() == ("", "")


def test_ranks_that_cannot_divide_a_shape_are_refused():
    config = ShapesConfig(CONFIGS["llama"], None, "float32").target
    with pytest.raises(UserError, match=r"2 key/value heads cannot be divided between 3 processes"):
        random_target(config, torch.float32, "cpu", world=World(size=3, shard_size=3))
