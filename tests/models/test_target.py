"""The target: what it hands out is the model's own, and a model that is not whole or not understood is refused."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from eagle_train.corpus.tokens import Encoder
from eagle_train.errors import UserError
from eagle_train.models import forward, probe
from eagle_train.models.loading import TargetConfig, check_placement, load_config, load_target, load_tokenizer
from eagle_train.models.shapes import rope_limit
from eagle_train.models.target import Target
from eagle_train.models.weights import check_loaded, fingerprint
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.rule import Rule
from eagle_train.training.cost.target_shape import TargetShape
from tests.support.packed_rows import packed_and_alone
from tests.support.tiny import FAMILIES, GROUPED_FLOPS, STATEFUL, random_tokens, shared_target, tiny_model, tiny_target

WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    tiny_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy of the saved target that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(directory: Path, **changes) -> None:
    """Replace tensors of a saved model; None takes one away."""
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def refused(config_or_path: TargetConfig | Path, *words: str) -> None:
    config = config_or_path if isinstance(config_or_path, TargetConfig) else TargetConfig(str(config_or_path))
    with pytest.raises(UserError) as error:
        load_target(config, "cpu")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# --- what it hands out


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_give_the_models_own_logits(family):
    """With and without padding behind, for a sequence longer than windows and chunks."""
    target = shared_target(family)
    tokens = torch.tensor(random_tokens(30, 30, seed=1))
    positions = torch.arange(30).expand(2, -1)
    ours = target.lm_head(target.hidden_states(tokens, positions, packed_attention([[30], [30]])))
    target.model.set_attn_implementation("eager")
    own = target.model(input_ids=tokens).logits
    target.model.set_attn_implementation("eagle_train")
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_as_each_document_alone(family):
    torch.testing.assert_close(*packed_and_alone(shared_target(family)), rtol=1e-4, atol=1e-4)


def test_values_may_be_narrower_than_keys():
    """In bf16 too, which a CPU attends to in its own way."""
    torch.testing.assert_close(*packed_and_alone(tiny_target("deepseek_v3")), rtol=1e-4, atol=1e-4)
    tiny_target("deepseek_v3", dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["phi3", "dynamic"])
def test_texts_end_where_rope_would_change(family):
    """Padding that lies beyond changes nothing before it."""
    target = tiny_target(family)
    assert target.max_positions == 48
    assert target.context == "48 (beyond, one text's RoPE would change the others')"
    tokens = torch.tensor(random_tokens(60))
    states = [
        target.hidden_states(tokens[:, :length], torch.arange(length)[None], packed_attention([[length]]))
        for length in (48, 60)
    ]
    torch.testing.assert_close(states[0], states[1][:, :48], rtol=1e-4, atol=1e-4)
    target.model.set_attn_implementation("eager")
    own = target.model(input_ids=tokens[:, :48]).logits
    torch.testing.assert_close(target.lm_head(states[0]), own, rtol=1e-4, atol=1e-4)


def test_where_rope_changes_by_layer_type():
    config = transformers.LlamaConfig(max_position_embeddings=64)
    assert rope_limit(config) is None
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    config.rope_parameters = {"sliding_attention": {"rope_type": "default"}, "full_attention": longrope}
    assert rope_limit(config) == 32


def test_embedding_and_head_are_the_models_own_and_frozen():
    target = shared_target()
    tokens = torch.tensor(random_tokens(5))
    assert torch.equal(target.embed(tokens), target.model.get_input_embeddings()(tokens))
    assert target.lm_head.weight is target.model.get_output_embeddings().weight
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_embedding_scale_makes_embeddings_as_large_as_hidden_states(family):
    target = tiny_target(family)
    with torch.no_grad():
        target.model.get_input_embeddings().weight.mul_(0.01)
    tokens = torch.arange(target.identity.vocab_size).view(4, -1)
    positions = torch.arange(tokens.shape[1]).expand(4, -1)
    hidden = target.hidden_states(tokens, positions, packed_attention([[tokens.shape[1]]] * 4))
    scaled = target.embedding_scale() * target.embed(tokens)
    assert 0.5 < scaled.square().mean().sqrt() / hidden.square().mean().sqrt() < 2
    assert torch.tensor(target.embedding_scale()).log2().frac() == 0


def test_head_knows_scaling_and_softcapping():
    assert shared_target("cohere2").lm_head.scale == shared_target("cohere2").config.logit_scale != 1.0
    assert shared_target("gemma2").lm_head.softcap == shared_target("gemma2").config.final_logit_softcapping
    assert shared_target("llama").lm_head.scale == 1.0


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_llama_4s_experts_run_on_the_tokens_that_chose_them(chosen):
    model = tiny_model("llama4", num_experts_per_tok=chosen)
    tokens = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as every:
        expected = model(input_ids=tokens).logits
    Target(model)
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=GROUPED_FLOPS) as routed:
        found = model(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    layers, size = model.config.num_hidden_layers, 3 * 2 * model.config.hidden_size * model.config.intermediate_size
    sparse = sum(getattr(module, "routed", False) for module in model.modules())
    assert sparse == layers  # of these, each token leaves all but the chosen experts
    assert every.get_total_flops() - routed.get_total_flops() == tokens.numel() * sparse * (4 - chosen) * size


# --- the check at start-up


@pytest.mark.parametrize(
    ("family", "lost"), [("gemma2", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks"), ("llama4", "chunk")]
)
def test_lost_attention_rule_is_noticed(family, lost, monkeypatch):
    def forgetful(**fields) -> Rule:
        return Rule(**fields | {lost: None})

    changes = {"attn_logit_softcapping": 0.5} if lost == "softcap" else {}
    model = tiny_model(family, **changes)
    Target(model)
    monkeypatch.setattr(forward, "Rule", forgetful)
    with pytest.raises(UserError, match="misses the model's own logits"):
        Target(model)


def test_unknown_head_scaling_is_noticed():
    model = tiny_model("llama")
    model.config.logit_scale = 0.5  # read by us, not by Llama
    with pytest.raises(UserError, match=r"llama\) is not supported"):
        Target(model)


@pytest.mark.parametrize("scale", [1.0, 0.95])
def test_what_rounding_alone_does_is_allowed_for(monkeypatch, scale):
    """Eight billion random weights in bf16 miss by 6 % on a GPU."""
    monkeypatch.setattr(probe, "LOW_PRECISION", 1e-3)
    model = tiny_model("llama").bfloat16()
    model.config.logit_scale = scale
    if scale == 1.0:
        Target(model)
        return
    with pytest.raises(UserError, match="misses the model's own logits"):
        Target(model)


def test_hidden_state_before_the_final_norm_is_noticed(monkeypatch):
    model = tiny_model("llama")
    states = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    monkeypatch.setattr(Target, "hidden_states", lambda self, *args: states[-1].repeat(1, 2, 1))
    with pytest.raises(UserError, match="misses the model's own logits"):
        Target(model)


@pytest.mark.parametrize("family", STATEFUL)
def test_a_state_beside_attention_is_noticed(family):
    with pytest.raises(UserError, match=rf"document in its row changes .*%; this family \({family}\), which keeps"):
        tiny_target(family)


# --- what is refused


def test_whole_checkpoint_loads(saved):
    target = load_target(TargetConfig(str(saved)), "cpu")
    assert target.tokenizer is None
    assert target.name == str(saved)
    assert (target.identity.hidden_size, target.identity.vocab_size, target.identity.num_layers) == (32, 96, 3)


def test_missing_weight(copy):
    edit(copy, **{WEIGHT: None})
    refused(copy, WEIGHT, "missing")


def test_weight_of_the_wrong_shape(copy):
    edit(copy, **{WEIGHT: torch.zeros(3, 3)})
    refused(copy, str(copy), "shape")


def test_weight_that_is_not_finite(copy):
    edit(copy, **{WEIGHT: torch.full((48, 32), float("nan"))})
    refused(copy, WEIGHT, "not finite")


@pytest.mark.parametrize("length", [0, 100, 5000])
def test_truncated_weights(copy, length):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refused(copy, str(copy))


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    refused(copy, "model.safetensors")


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "nobody_knows"}'])
def test_config_that_says_nothing(copy, text):
    (copy / "config.json").write_text(text)
    refused(copy, str(copy))


@pytest.mark.parametrize(
    ("values", "message"), [({"hidden_size": "wide"}, "wide"), ({"num_attention_heads": 3}, "(3)")]
)
def test_config_that_cannot_be(copy, values, message):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))
    refused(copy, str(copy), message)


def test_no_such_directory(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no such directory")
    refused(TargetConfig("./nowhere"), "no such directory")
    refused(TargetConfig("nobody/nowhere"), "nobody/nowhere")


@pytest.mark.parametrize("name", [WEIGHT, "lm_head.weight", "model.norm.weight"])
def test_meta_tensor(name):
    model = tiny_model("llama")
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, attribute, torch.nn.Parameter(torch.empty_like(getattr(module, attribute), device="meta")))
    with pytest.raises(UserError, match=f"{name} is on the meta device"):
        Target(model)


def test_config_values():
    for values in ({"path": ""}, {"path": "x", "dtype": "float16"}):
        with pytest.raises(UserError, match=r"target\."):
            TargetConfig(**values)


# --- who it is


def test_identity_is_the_same_in_every_precision(saved):
    identities = [load_target(TargetConfig(str(saved), dtype), "cpu").identity for dtype in ("float32", "bfloat16")]
    assert identities[0] == identities[1]


def test_identity_tells_weights_apart(saved):
    known = load_target(TargetConfig(str(saved)), "cpu").identity.fingerprint
    assert known == shared_target("llama").identity.fingerprint
    assert known != tiny_target("llama", seed=1).identity.fingerprint
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.mul_(1.05)
    assert known != Target(model).identity.fingerprint


def test_a_multimodal_checkpoint_loads_as_its_text_model(tmp_path):
    """Llama 4's: vision tower and projector beside the language model."""
    text = tiny_model("llama4")
    vision = transformers.Llama4VisionConfig(
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        **{"vision_output_dim": 32, "image_size": 28, "patch_size": 14},
        **{"projector_input_dim": 16, "projector_output_dim": 16},
    )
    config = transformers.Llama4Config(text_config=text.config.to_dict(), vision_config=vision.to_dict())
    whole = transformers.Llama4ForConditionalGeneration(config)
    whole.language_model.load_state_dict(text.state_dict())
    whole.save_pretrained(tmp_path)
    target, known = load_target(TargetConfig(str(tmp_path)), "cpu"), Target(text)
    assert target.identity.fingerprint == known.identity.fingerprint
    tokens, positions = torch.arange(20)[None] % 96, torch.arange(20)[None]
    attend = packed_attention([[20]])
    torch.testing.assert_close(
        target.hidden_states(tokens, positions, attend), known.hidden_states(tokens, positions, attend)
    )
    shape = TargetShape.of(load_config(TargetConfig(str(tmp_path))))
    assert shape.parameters == text.num_parameters()


@pytest.mark.parametrize("gib", [4e-5, 9e-5])  # of 0.00011: nothing fits, and some layers do
def test_what_does_not_fit_waits_elsewhere_and_is_the_same_target(saved, gib):
    tokens, positions = torch.tensor(random_tokens(20)), torch.arange(20)[None]
    whole, offloaded = (
        load_target(TargetConfig(str(saved)), "cpu"),
        load_target(TargetConfig(str(saved), offload=True, device_gib=gib), "cpu"),
    )
    elsewhere = [parameter.is_meta for parameter in offloaded.model.parameters()]
    assert any(elsewhere)
    assert all(elsewhere) == (gib < 5e-5)
    assert (whole.is_offloaded, offloaded.is_offloaded) == (False, True)
    attend = packed_attention([[20]])
    states = (target.hidden_states(tokens, positions, attend) for target in (whole, offloaded))
    torch.testing.assert_close(*states)  # a norm that waits elsewhere is the family's own
    assert torch.equal(whole.embed(tokens), offloaded.embed(tokens))
    assert torch.equal(whole.lm_head.weight, offloaded.lm_head.weight)
    assert whole.identity == offloaded.identity


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device_gib": 1.0}, r"^target\.device_gib=1\.0: needs target\.offload=true$"),
        ({"device_gib": 0.0, "offload": True}, r"^target\.device_gib=0\.0: must be null or above 0$"),
    ],
)
def test_offload_config(values, message):
    with pytest.raises(UserError, match=message):
        TargetConfig("somewhere", **values)


def test_offload_and_division_are_two_ways(saved):
    with pytest.raises(UserError, match=r"^target\.offload=true: not with parallel\.target=fsdp2$"):
        load_target(TargetConfig(str(saved), offload=True), "cpu", placement="fsdp2")


def quantise(directory: Path, size: int = 16) -> dict[str, torch.Tensor]:
    """Make a saved target's projections FP8 in blocks, as checkpoints on the hub are; returns their values."""
    changes, values = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(1, (-1, size)).unflatten(0, (-1, size))
            scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            changes[name], changes[f"{name}_scale_inv"] = small.flatten(2).flatten(0, 1), scale
            values[name] = (small.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)
    edit(directory, **changes)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [size, size],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return values


def test_a_quantised_checkpoint_loads_through_its_own_config(copy):
    """Without a GPU transformers turns FP8 back into numbers."""
    values = quantise(copy)
    target, exact = load_target(TargetConfig(str(copy)), "cpu"), tiny_model("llama")
    exact.load_state_dict(exact.state_dict() | values)
    tokens, positions = torch.tensor(random_tokens(20)), torch.arange(20)[None]
    hidden = target.hidden_states(tokens, positions, packed_attention([[20]]))
    torch.testing.assert_close(target.lm_head(hidden), exact(tokens).logits, rtol=1e-4, atol=1e-4)


def test_an_unknown_quantisation_is_refused(copy):
    """transformers would load its numbers as if they were weights."""
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "squeezed"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="transformers cannot read quant_method=squeezed; give the checkpoint"):
        load_target(TargetConfig(str(copy)), "cpu")


def test_a_quantised_weight_that_cannot_be_converted_is_told_as_such(copy):
    quantise(copy)
    name = WEIGHT + "_scale_inv"
    edit(copy, **{name: load_file(copy / "model.safetensors")[name][:, :1].repeat(1, 3)})
    with pytest.raises(UserError, match=r"^target\.path=.*: a weight cannot be converted: "):
        load_target(TargetConfig(str(copy)), "cpu")


def quantised_config(family: str, quantisation: dict, **changes) -> Any:
    config = tiny_model(family, **changes).config
    config.quantization_config = quantisation
    return config


@pytest.mark.parametrize("placement", ["fsdp2", "tensor"])
def test_a_target_in_4_bits_is_not_divided(placement):
    for said in ({"quant_method": "bitsandbytes"}, {}):
        config = quantised_config("llama", {"load_in_4bit": True, **said})
        check_placement(TargetConfig("x"), config, "replicated", 1)
        with pytest.raises(
            UserError, match=rf"^parallel\.target={placement}: bitsandbytes' weights cannot be divided; "
        ):
            check_placement(TargetConfig("x"), config, placement, 2)


@pytest.mark.parametrize(
    ("family", "placement", "shard_size", "block", "refused"),
    [
        ("llama", "tensor", 2, 8, None),  # attention's 32, and 48
        (
            "llama",
            "tensor",
            2,
            16,
            "48 of model.layers.0.mlp.gate_proj.weight must be a multiple of 2 processes * FP8 blocks ",
        ),
        ("llama", "fsdp2", 2, 8, None),
        (
            "llama",
            "fsdp2",
            4,
            8,
            "48 of model.layers.0.mlp.gate_proj.weight must be a multiple of 4 processes * FP8 blocks ",
        ),
        ("qwen3_moe", "fsdp2", 2, 8, None),
        ("qwen3_moe", "tensor", 2, 8, None),
        (
            "mixtral",
            "tensor",
            2,
            16,
            "48 of model.layers.0.mlp.experts.gate_up_proj must be a multiple of 2 processes ",
        ),
        ("mixtral", "fsdp2", 2, 16, None),  # whole experts
        ("llama4", "tensor", 2, 16, "48 of model.layers.0.feed_forward.experts.gate_up_proj must be a multiple of 2 "),
    ],
)
def test_a_rank_gets_whole_blocks_of_an_fp8_target(family, placement, shard_size, block, refused):
    quantisation = {"quant_method": "fp8", "weight_block_size": [block, block]}
    config = quantised_config(family, quantisation, num_key_value_heads=4)
    if refused is None:
        return check_placement(TargetConfig("x"), config, placement, shard_size, computes_fp8=False)
    with pytest.raises(UserError) as error:
        check_placement(TargetConfig("x"), config, placement, shard_size, computes_fp8=False)
    assert str(error.value).startswith(f"parallel.target={placement}: {refused}")
    if placement == "fsdp2":
        check_placement(TargetConfig("x"), config, placement, shard_size, computes_fp8=True)
    config.quantization_config["modules_to_not_convert"] = [".*proj", "lm_head"]
    check_placement(TargetConfig("x"), config, placement, shard_size, computes_fp8=False)


def test_a_tokenizer_that_cannot_be_read(copy):
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"^target\.path=.*: tokenizer\.json is no JSON from line 1, column 2 on$"):
        load_target(TargetConfig(str(copy)), "cpu")
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"^target\.path=.*: its tokenizer cannot be read: "):
        load_target(TargetConfig(str(copy)), "cpu")


def test_a_tokenizer_in_mistrals_own_format_is_read(tmp_path):
    """Mistral's newer checkpoints have no tokenizer.json. Byte b is token b + 3, behind the special ones."""
    transformers.MistralConfig().save_pretrained(tmp_path)
    assert load_tokenizer(TargetConfig(str(tmp_path))) is None
    special = [
        {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(["<unk>", "<s>", "</s>"])
    ]
    vocabulary = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    sizes = {"num_vocab_tokens": 256, "default_vocab_size": 259, "default_num_special_tokens": 3, "version": "v7"}
    tekken = {"config": {"pattern": r"\S+|\s+", **sizes}, "vocab": vocabulary, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    tokenizer = load_tokenizer(TargetConfig(str(tmp_path)))
    assert Encoder(tokenizer)("<s>é a</s>").ids == [1, *(byte + 3 for byte in "é a".encode()), 2]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def test_a_checkpoint_in_4_bits_stays_so(tmp_path):
    """Its twin computes with the numbers that the 4 bits stand for; the library's kernel for a CPU rounds to bf16."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="it was not installed")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    exact = tiny_model("llama", std=0.05, **WIDE)
    exact.save_pretrained(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=four_bits, dtype=torch.float32)
    model.save_pretrained(tmp_path / "small")
    tokens, positions = torch.tensor(random_tokens(20)), torch.arange(20)[None]
    unrounded = exact(tokens).logits
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            values = bitsandbytes.functional.dequantize_4bit(module.weight, module.weight.quant_state)
            exact.get_submodule(name).weight.data = values.float()
    target = load_target(TargetConfig(str(tmp_path / "small")), "cpu")
    assert target.model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    logits = target.lm_head(target.hidden_states(tokens, positions, packed_attention([[20]])))
    expected = exact(tokens).logits
    assert (logits - expected).norm() < 0.03 * expected.norm()
    assert (logits - unrounded).norm() > 0.05 * expected.norm()


def test_weights_of_quantised_types_are_looked_at():
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    check_loaded(model, "x")
    assert len(fingerprint(model)) == 16
    layer.weight.data = torch.full(layer.weight.shape, torch.nan).to(torch.float8_e4m3fn)
    with pytest.raises(UserError, match="is not finite; the checkpoint is damaged"):
        check_loaded(model, "x")


def test_a_target_that_cannot_run_here_is_one_line(saved, monkeypatch):
    """transformers looks for an FP8 checkpoint's kernels when the model first runs."""

    def missing(*_):
        raise ImportError("needs kernels:\npip install kernels")

    monkeypatch.setattr(Target, "check_states", missing)
    with pytest.raises(UserError, match=f"^target.path={saved}: needs kernels:$"):
        load_target(TargetConfig(str(saved)), "cpu")


@pytest.mark.gpu
def test_a_quantised_target_stays_so_on_a_gpu(saved, tmp_path):
    pytest.importorskip("kernels", reason="transformers' FP8 products are in a kernel of the hub")
    directory = tmp_path / "wide"
    tiny_model("llama", std=0.05, **WIDE).save_pretrained(directory)
    values = quantise(directory, 128)
    target = load_target(TargetConfig(str(directory)), "cuda")
    assert target.model.model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    exact = tiny_model("llama", std=0.05, **WIDE)
    exact.load_state_dict(exact.state_dict() | values)
    tokens, positions = torch.tensor(random_tokens(20)), torch.arange(20)[None]
    hidden = target.hidden_states(tokens.cuda(), positions.cuda(), packed_attention([[20]]))
    expected = exact(tokens).logits
    assert (target.lm_head(hidden).float().cpu() - expected).norm() < 0.1 * expected.norm()
