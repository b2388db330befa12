"""Whether a family can be a target is found out on a small twin of it, behind its windows, before a weight is read.

EVERY_FAMILY=1 pytest tests/models/test_family.py    tries all that transformers has, not each fifth: two minutes
"""

import os

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from eagle_train import train
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models import family, forward, twin
from eagle_train.models.family import check_family, skeleton
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.rule import Rule
from tests.support.command_line import call
from tests.support.packed_rows import packed_and_alone
from tests.support.presets import shapes_of
from tests.support.tiny import SIZES, continued, random_tokens, tiny_draft, tiny_tokenizer

OWN_CONFIGS = {  # what a family's default config lacks
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
SILENT = {"qwen2_5_omni": {"enable_audio_output": False}}  # without the models that speak, which take ten seconds
FAST = ("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "phimoe", "qwen3_vl", "mistral3")


@pytest.fixture
def unknown(monkeypatch):
    """Nothing is known of any family."""
    monkeypatch.setattr(family, "known", {})


def said_against(config) -> str | None:
    """What a config is refused for; None where it passes."""
    try:
        model = skeleton(config, False, "target")
        check_family(type(model), model.config, "target")
    except UserError as error:
        return str(error)
    return None


# --- windows


def phimoe(window: int) -> Target:
    """PhiMoE's attention is not told of the window that its mask has."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**SIZES, **experts, sliding_window=window)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return Target(model)


@pytest.mark.parametrize("window", [8, 32])
def test_a_window_that_stands_in_the_mask_alone_is_honoured(window):
    target, tokens = phimoe(window), torch.tensor(random_tokens(100))
    model = target.model
    states = target.hidden_states(tokens, torch.arange(100)[None], packed_attention([[100]]))
    model.set_attn_implementation("eager")
    own = model(input_ids=tokens).logits
    model.set_attn_implementation("eagle_train")
    torch.testing.assert_close(target.lm_head(states), own, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*packed_and_alone(target), rtol=1e-4, atol=1e-4)
    assert {reach.window for reach in target.reaches.values()} == {window}


def test_such_a_window_is_honoured_in_decoding():
    target, prompts = phimoe(8), random_tokens(5, 19)
    outputs = Engine(target, tiny_draft(target), "d3_bf2").generate(
        prompts, SamplingParams(max_tokens=20, ignore_eos=True)
    )
    assert [output.token_ids for output in outputs] == [continued(target, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize(
    ("config", "values", "lost"),
    [
        ("MistralConfig", {"sliding_window": 4096}, "window"),
        ("Gemma3TextConfig", {"sliding_window": 1024}, "window"),
        ("Llama4TextConfig", {"attention_chunk_size": 8192, "num_local_experts": 4, "num_hidden_layers": 4}, "chunk"),
    ],
)
def test_a_lost_window_is_noticed_however_long(config, values, lost, monkeypatch, unknown):
    made = getattr(transformers, config)(**SIZES | values)
    assert said_against(made) is None
    monkeypatch.setattr(family, "known", {})
    monkeypatch.setattr(forward, "Rule", lambda **fields: Rule(**fields | {lost: None}))
    assert "misses the model's own logits" in said_against(made)


def test_a_window_that_a_config_names_otherwise_is_refused(monkeypatch, unknown):
    """A twin that keeps it would be read only in front of it."""
    monkeypatch.setattr(twin, "FEW", ())
    assert said_against(transformers.MistralConfig(**SIZES, sliding_window=100)) == (
        "target: what attention does beyond 100 tokens in this family (mistral) cannot be checked, for its config "
        "names them in no way that is known; it is not supported"
    )


def test_what_lies_beyond_ropes_border_is_looked_at(monkeypatch, unknown):
    """Ministral 3 scales its queries from a position on; here as if by the place in the call, as Llama 4 does."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "llama_4_scaling_beta": 0.5}
    rope |= {"original_max_position_embeddings": 4096}
    config = transformers.Ministral3Config(**SIZES, rope_parameters=rope)
    assert said_against(config) is None
    from transformers.models.ministral3 import modeling_ministral3 as module

    real = module.get_llama_4_attn_scale
    by_place = lambda ids, *rest: real(torch.arange(ids.shape[-1]).expand_as(ids), *rest)  # noqa: E731
    monkeypatch.setattr(module, "get_llama_4_attn_scale", by_place)
    monkeypatch.setattr(family, "known", {})
    assert "what stands before a document" in said_against(config)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("doge", "it makes masks of its own"),
        ("deepseek_v32", "(deepseek_v32) attends to the keys that an indexer of its own chooses (index_topk)"),
        ("glm_moe_dsa", "(glm_moe_dsa) attends to the keys that an indexer of its own chooses (index_topk)"),
        ("mistral_large4", "(mistral_large4) attends to the keys that an indexer of its own chooses (index_topk)"),
    ],
)
def test_a_family_that_chooses_its_keys_is_refused(name, said):
    """However many keys it chooses: they are fewer in its twin."""
    assert said in said_against(CONFIG_MAPPING[name]())


def test_layers_with_an_indexer_beside_their_attention_are_refused():
    """It returns the numbers of blocks, which no rounding touches."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
    kinds = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    config = CONFIG_MAPPING["minimax_m3_vl_text"](num_hidden_layers=3, layer_types=kinds, **sizes, **experts)
    assert "misses the model's own logits" in said_against(config)


# --- by behaviour


def test_attention_that_gets_no_keywords_is_refused(monkeypatch, unknown):
    """Of any family: a Llama here."""
    config, real = transformers.LlamaConfig(**SIZES), LlamaAttention.forward

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **_):
        return real(self, hidden_states, position_embeddings, attention_mask)

    assert said_against(config) is None
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    monkeypatch.setattr(family, "known", {})
    assert said_against(config) == (
        "target: this family (llama) cannot be run with attention from outside: keywords that its forward is given do "
        "not come to it"
    )


def test_attention_that_goes_its_own_way_is_refused(monkeypatch, unknown):
    config = transformers.MistralConfig(**SIZES)

    def forward(self, hidden_states, *_, **__):
        return self.o_proj(self.q_proj(hidden_states).cumsum(1)), None

    monkeypatch.setattr(MistralAttention, "forward", forward)
    assert said_against(config) == "target: no attention of this family (mistral) can be reached; it is not supported"


NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "values", "said"),
    [
        ("BertConfig", {}, "reads what stands after a token too, as an encoder does"),
        ("GPT2Config", {}, None),
        ("OpenAIGPTConfig", {}, "attention"),
        (
            "MambaConfig",
            {},
            "(mamba) keeps a state beside its attention's keys and values, which can neither be packed nor",
        ),
        (
            "JambaConfig",
            {},
            "(jamba) keeps a state beside its attention's keys and values, which can neither be packed",
        ),
        (
            "RwkvConfig",
            {},
            "(rwkv) keeps a state beside its attention's keys and values, which can neither be packed nor",
        ),
        ("BloomConfig", {}, "does not say what a target needs"),
        ("BlipConfig", {"text_config": NARROW, "vision_config": NARROW}, "cannot be run on text alone"),
    ],
)
def test_other_kinds(config, values, said):
    found = said_against(getattr(transformers, config)(**values))
    assert found is None if said is None else said in found


@pytest.mark.parametrize("config", ["StableLmConfig", "NemotronConfig", "DogeConfig"])
@pytest.mark.parametrize("plan", ["true", "false"])
def test_plan_and_run_refuse_alike(config, plan, tmp_path, capsys):
    made = getattr(transformers, config)(**SIZES)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    given = (f"target={tmp_path / 'target'}", "data=messages", "data.path=none.jsonl", f"out={tmp_path / 'out'}")
    capsys.readouterr()
    assert call(train.main, *given, f"plan={plan}", "data.row_tokens=64") == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(
        f"error: target.path={tmp_path / 'target'}: this family ({made.model_type}) cannot be run with"
    )
    assert "\n" not in said


def test_a_target_without_rotary_positions_is_refused_before_its_weights(tmp_path, capsys):
    made = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=96, n_positions=128)
    made.architectures = ["GPT2LMHeadModel"]
    made.save_pretrained(tmp_path / "target")  # and no weights
    given = (f"target={tmp_path / 'target'}", "data=messages", "data.path=none.jsonl", f"out={tmp_path / 'out'}")
    for plan in ("true", "false"):
        assert call(train.main, *given, f"plan={plan}", "data.row_tokens=64") == 2
        assert "its config has no rope_parameters; a draft needs a Llama-like target" in capsys.readouterr().err


def test_layers_that_attend_more_than_once_for_a_token_are_not_decoded():
    """DiffLlama's attend twice: of their keys and values one would overwrite the other."""
    config = transformers.DiffLlamaConfig(**SIZES)
    target = Target(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert max(target.layers.calls.values()) > 1
    with pytest.raises(UserError, match="can be trained on, not decoded: a layer attends more than once for a token"):
        Engine(target)


# --- twins


def test_a_twin_changes_no_random_numbers(unknown):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    assert said_against(transformers.LlamaConfig(**SIZES)) is None
    assert torch.equal(torch.rand(3), expected)


def test_a_twin_has_the_layers_and_switches_of_the_model():
    config = transformers.Qwen2Config(
        num_hidden_layers=12, use_sliding_window=True, sliding_window=4096, max_window_layers=8, rope_theta=5e5
    )
    small = twin.twin_of(transformers.Qwen2ForCausalLM, config).config
    assert small.layer_types == config.layer_types
    assert (small.sliding_window, small.rope_parameters) == (8, config.rope_parameters)
    assert small.num_attention_heads > small.num_key_value_heads or config.num_key_value_heads == 32


def test_long_ropes_border_stays_where_it_was():
    """Texts end there, and a twin's must not be shorter than a probe."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = transformers.Phi3Config(**SIZES, original_max_position_embeddings=48, rope_parameters=rope)
    small = twin.twin_of(transformers.Phi3ForCausalLM, config).config
    assert small.original_max_position_embeddings == 48
    assert said_against(config) is None


LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama3_1_8b", "llama4_maverick", "qwen3_8b")]


@pytest.mark.parametrize("shapes", ["llama3_3_70b", "llama4_scout", *LARGE])
def test_the_targets_of_presets_pass(shapes):
    assert said_against(shapes_of(shapes).target) is None


# --- all families that transformers has


def default_config(name: str):
    return CONFIG_MAPPING[name](**OWN_CONFIGS.get(name, {}))


@pytest.mark.parametrize("name", FAST)
def test_a_familys_default_config_passes(name):
    assert said_against(default_config(name)) is None


ALL = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})
EVERY = int(os.environ.get("EVERY_FAMILY", "5"))


def with_few_layers(values: dict, most: int = 4) -> dict:
    """A config's fields and those of the configs in it: each model has at most so many layers."""
    depth, few = values.get("num_hidden_layers"), {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = with_few_layers(value, most)
        elif isinstance(value, list) and len(value) == depth:
            value = value[:most]
        elif twin.DEPTHS.search(str(key)) and isinstance(value, int):
            value = min(value, most)
        few[key] = value
    return few


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL[::EVERY])
def test_every_family_passes_or_is_refused_in_one_line(name):
    """Its default config, with few layers."""
    try:
        config = CONFIG_MAPPING[name](**OWN_CONFIGS.get(name, {}) | SILENT.get(name, {}))
        config = type(config).from_dict(with_few_layers(config.to_dict()))
    except Exception as error:
        pytest.skip(f"its default config cannot be: {error}")
    said = said_against(config)
    assert said is None or (said.startswith("target") and "\n" not in said)
