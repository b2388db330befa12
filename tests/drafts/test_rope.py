"""A draft's rotary settings: the angles of its target's own module, in terms that serving engines read alike."""

import math
import re
from typing import Any

import pytest
import torch
from transformers import HunYuanDenseV1Config, LlamaConfig, Ministral3Config, PhimoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from eagle_train.artifacts.card import caveats
from eagle_train.artifacts.format import Artifact
from eagle_train.drafts import EagleConfig
from eagle_train.drafts.rope import ROPE_KEYS, without_sections
from eagle_train.errors import UserError
from eagle_train.models.layers import Rotary
from eagle_train.models.target import Identity

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 32,
    "max_position_embeddings": 512,
}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [3.0] * 8}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, **FACTORS}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
POSITIONS = torch.tensor([[0, 1, 7, 100]])


def llama(**rope: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, rope_parameters=rope)


TARGETS = {
    "hunyuan": (
        HunYuanDenseV1Config(
            **SIZES,
            head_dim=16,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        ),
        HunYuanDenseV1RotaryEmbedding,
    ),
    "phimoe": (
        PhimoeConfig(**SIZES, rope_parameters=LONG | {"short_mscale": 1.25, "long_mscale": 1.5}),
        PhimoeRotaryEmbedding,
    ),
    "dynamic": (llama(rope_type="dynamic", rope_theta=1e4, factor=4.0), LlamaRotaryEmbedding),
    "longrope": (llama(**LONG), LlamaRotaryEmbedding),
    "longrope with a scale": (llama(**LONG, attention_factor=1.7), LlamaRotaryEmbedding),
    "longrope with a factor": (llama(**LONG, factor=2.0), LlamaRotaryEmbedding),
    "yarn with a scale": (llama(**YARN, attention_factor=1.0), LlamaRotaryEmbedding),
    "yarn with two scales": (llama(**YARN, mscale=0.7, mscale_all_dim=1.0), LlamaRotaryEmbedding),
    "yarn with half a scale": (llama(**YARN, mscale=0.7, mscale_all_dim=0.0), LlamaRotaryEmbedding),
    "sections": (llama(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]), LlamaRotaryEmbedding),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_draft_turns_as_its_target_by_keys_that_engines_read(name):
    config, module = TARGETS[name]
    draft = EagleConfig.from_target(config, num_layers=1)
    cos, sin = Rotary(draft)(POSITIONS)
    wanted_cos, wanted_sin = module(config)(torch.zeros(1), POSITIONS)
    torch.testing.assert_close(cos[:, 0], wanted_cos)
    torch.testing.assert_close(sin[:, 0].abs(), wanted_sin.abs())
    assert set(draft.rope_parameters) <= set(ROPE_KEYS)
    assert draft.rope_parameters["rope_type"] != "dynamic", "vLLM's depends on the longest context"


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        (LONG | {"attention_factor": 1.7}, 1.7),
        (LONG | {"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(128))),
        (LONG | {"short_mscale": 1.25, "long_mscale": 1.5}, 1.25),
    ],
)
def test_what_longrope_scales_by_stands_where_engines_look(rope, scale):
    own = EagleConfig.from_target(llama(**LONG), num_layers=1, rope_parameters=rope).rope_parameters
    assert own["short_mscale"] == own["attention_factor"] == pytest.approx(scale)
    assert own["long_mscale"] == pytest.approx(rope.get("long_mscale", scale))


def sglang_scale_of_yarn(rope: dict[str, Any]) -> float:
    """By layers/rotary_embedding/factory.py and yarn.py of SGLang 0.5.23, which know no `attention_factor`."""

    def scale(mscale: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * mscale * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") is None or rope.get("mscale_all_dim") is None:
        return scale(1.0)
    return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"attention_factor": 1.0},
        {"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"attention_factor": 1 / (1 + 0.1 * math.log(4))},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 0.0},
        {"mscale": 0.7},
    ],
    ids=str,
)
def test_what_yarn_scales_by_stands_where_sglang_looks(keys):
    draft = EagleConfig.from_target(llama(**YARN, **keys), num_layers=1)
    _, wanted = ROPE_INIT_FUNCTIONS["yarn"](llama(**YARN, **keys))
    assert Rotary(draft).scale == pytest.approx(wanted)
    assert sglang_scale_of_yarn(draft.rope_parameters) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "default"}, "rope_theta: must be given with rope_type=default"),
        ({"rope_type": ["yarn"], "rope_theta": 1e4}, "rope_type=['yarn']: must be one of default, "),
        ({"rope_theta": [1e4]}, "rope_theta=[10000.0]: must be a number above 0"),
        ({"rope_theta": math.inf}, "rope_theta=inf: must be a number above 0"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5: must be above 0 and at most 1"),
        ({"rope_theta": 1e4, "rope_type": "linear"}, "factor: must be given with rope_type=linear"),
        (YARN | {"factor": True}, "factor=True: must be a number above 0"),
        (YARN | {"attention_factor": [1.0]}, "attention_factor=[1.0]: must be a number above 0"),
        (YARN | {"truncate": 0}, "truncate=0: must be true or false"),
        (YARN | {"mscale": "1", "mscale_all_dim": 1.0}, "mscale='1': must be a number"),
        (
            LONG | {"short_factor": [1.0]},
            "short_factor=[1.0]: must be 8 numbers, one for each frequency of a head",
        ),
        (LONG | {"long_factor": 2.0}, "long_factor=2.0: must be a list of numbers above 0"),
        (LONG | {"partial_rotary_factor": 0.5}, "short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, ...]: must be 4 numbers"),
    ],
)
def test_settings_of_which_nothing_can_be_computed_are_refused(rope, message):
    with pytest.raises(UserError, match=rf"^draft\.rope_parameters\.{re.escape(message)}"):
        EagleConfig.from_target(llama(**LONG), num_layers=1, rope_parameters=rope)


def test_what_changes_no_angle_is_left_out():
    scaled = Ministral3Config(**SIZES, head_dim=16).rope_parameters | {"llama_4_scaling_beta": 0.1}
    config = Ministral3Config(**SIZES, head_dim=16, rope_parameters=scaled)
    assert "llama_4_scaling_beta" not in EagleConfig.from_target(config, num_layers=1).rope_parameters


def test_a_setting_that_nobody_reads_is_refused():
    with pytest.raises(UserError, match=r"^draft\.rope_parameters\.alpha: must be one of rope_type, rope_theta, "):
        EagleConfig.from_target(llama(**LONG), num_layers=1, rope_parameters={"rope_theta": 1e4, "alpha": 2.0})


@pytest.mark.parametrize("kind", ["longrope", "llama3", "yarn"])
def test_a_length_that_engines_need_is_asked_for(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match=rf"original_max_position_embeddings: must be given with rope_type={kind}$"):
        EagleConfig.from_target(llama(**LONG), num_layers=1, rope_parameters=rope)


def test_a_type_may_have_its_old_name():
    assert without_sections({"rope_type": None, "type": "yarn", "mrope_section": [1]}) == {"rope_type": "yarn"}
    assert without_sections({"type": "mrope"}) == {"rope_type": "default"}


def test_an_export_says_how_long_a_context_longrope_allows():
    draft = EagleConfig.from_target(llama(**LONG), num_layers=1, first_token="skip")
    target = Identity("target", "0", 64, 32, 2)
    for layout, option in {"vllm": "--max-model-len", "sglang": "--context-length"}.items():
        (said,) = caveats(Artifact(draft, target, layout))
        assert said.endswith(f"serve with {option} 128 or less")
    assert not caveats(Artifact(draft, target, "native"))
