"""The text part of multimodal checkpoints is a target like any other: planned, loaded, trained on and decoded."""

from pathlib import Path

import pytest
import torch

from eagle_train import train
from eagle_train.drafts import EagleConfig
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models.forward import decoder_of
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.training.cost.target_shape import TargetShape
from tests.support.command_line import call, chats, write_jsonl
from tests.support.multimodal import FAMILIES, multimodal_config, multimodal_model
from tests.support.packed_rows import packed_and_alone
from tests.support.tiny import continued, random_tokens, tiny_draft, tiny_tokenizer

every = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint with its tokenizer of each family."""
    places = {}
    for family in FAMILIES:
        places[family] = tmp_path_factory.mktemp(family)
        multimodal_model(family).save_pretrained(places[family])
        tiny_tokenizer().save_pretrained(places[family])
    return places


@pytest.fixture(scope="module")
def targets(saved) -> dict[str, Target]:
    return {family: load_target(TargetConfig(str(place)), "cpu") for family, place in saved.items()}


@every
def test_hidden_states_give_the_models_own_logits(family, targets):
    """Behind every window, and in packed rows as alone."""
    target, tokens = targets[family], torch.tensor(random_tokens(40, vocabulary=90))
    states = target.hidden_states(tokens, torch.arange(40)[None], packed_attention([[40]]))
    target.model.set_attn_implementation("eager")
    own = target.model(input_ids=tokens).logits
    target.model.set_attn_implementation("eagle_train")
    torch.testing.assert_close(target.lm_head(states), own, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*packed_and_alone(target), rtol=1e-4, atol=1e-4)


@every
def test_it_is_planned_and_trained_on(family, saved, tmp_path, capsys):
    data = write_jsonl(tmp_path / "chats.jsonl", chats(40))
    given = (f"target={saved[family]}", "data=messages", f"data.path={data}", "data.row_tokens=64", "train.steps=2")
    given = (*given, "optim.tokens_per_step=128", "train.micro_batch_rows=2", "draft.num_layers=1", "device=cpu")
    assert call(train.main, "plan=true", *given, f"out={tmp_path / 'none'}") == 0
    assert "GFLOP a token" in capsys.readouterr().out
    assert call(train.main, *given, f"out={tmp_path / 'out'}") == 0
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count('"loss"') >= 2


@every
def test_it_decodes_as_transformers_does(family, targets):
    target, prompts = targets[family], random_tokens(5, 19, vocabulary=90)
    engine = Engine(target, tiny_draft(target), "d3_bf2", max_batch_size=2)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        own = continued(target, prompt, 16)
        text = next((i + 1 for i, token in enumerate(own) if token >= 90), 16)  # behind it an image would stand
        assert output.token_ids[:text] == own[:text]


@every
def test_the_draft_is_the_language_models(family):
    """Its first layer's heads, and RoPE without M-RoPE's sections, that say nothing at a text's positions."""
    draft = EagleConfig.from_target(multimodal_config(family))
    assert (draft.hidden_size, draft.num_heads, draft.num_kv_heads, draft.head_dim) == (32, 4, 2, 8)
    assert not any(key.startswith("mrope") for key in draft.rope_parameters)
    assert draft.rope_parameters["rope_theta"] > 0


@every
def test_a_plan_counts_the_language_models_work_alone(family):
    """A vision tower is in memory, but no token of a text is multiplied with it."""
    model = multimodal_model(family)
    shape = TargetShape.of(model.config)
    assert shape.parameters == model.num_parameters()
    linears = [each.weight for each in decoder_of(model).modules() if isinstance(each, torch.nn.Linear)]
    assert shape.active == sum(weight.numel() for weight in linears)
