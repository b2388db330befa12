"""Formats of drafts that we do not read: their names are told, from config.json."""

import json

import pytest

from eagle_train.artifacts.foreign import load_foreign
from eagle_train.artifacts.foreign_formats import other_format
from eagle_train.errors import UserError
from tests.support.tiny import tiny_target


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "a DFlash draft"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1]}}, "a DFlash draft"),
        ({"speculators_model_type": "dflash"}, "a DFlash draft"),
        ({"speculators_model_type": "dspark"}, "a DSpark draft"),
        ({"speculators_model_type": "mtp"}, "an MTP module"),
        ({"speculators_model_type": "xpress"}, "a draft of speculators' kind xpress"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "an MLP speculator"),
        ({"model_type": "mlp_speculator"}, "an MLP speculator"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "a Medusa draft in vLLM's layout"),
        ({"architectures": ["DeepSeekMTPModel"]}, "an MTP module"),
    ],
)
def test_a_format_is_named(values, what):
    assert (other_format(values) or "").startswith(what)


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        {"architectures": ["PEagleDraftModel"], "dflash_config": {"mask_token_id": 5}},
        {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]},
        {"architectures": None, "model_type": None},
    ],
)
def test_what_may_be_read_has_no_name(values):
    assert other_format(values) is None


def test_it_is_told_before_the_tensors_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "dflash"}))
    with pytest.raises(UserError, match=r": is a DFlash draft; EAGLE, .* and Medusa are read$"):
        load_foreign(tmp_path, tiny_target())
