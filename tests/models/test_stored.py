"""What is wrong with a checkpoint's files is told from their headers, before a weight is read, in plan and run."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from eagle_train import train
from eagle_train.errors import UserError
from eagle_train.models import checkpoint_quantisation as module
from eagle_train.models import loading
from eagle_train.models.family import auto_class
from eagle_train.models.loading import TargetConfig, check_target, load_config, load_target
from tests.support.command_line import call, save_target
from tests.support.multimodal import FAMILIES, multimodal_config, multimodal_model
from tests.support.tiny import SIZES, tiny_model

EMBEDDING, HEAD, GATE = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate_proj.weight"


def edit(path: Path, rename=lambda name: name, **tensors: torch.Tensor | None) -> None:
    """Change a checkpoint's tensors, by name: None for none."""
    found = load_file(path / "model.safetensors") | tensors
    kept = {rename(name): tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})


def configure(path: Path, **values) -> None:
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))


def said_of(path: Path, monkeypatch, capsys, tmp_path) -> str:
    """What plan and run say of a checkpoint alike; neither comes to its weights."""
    monkeypatch.setattr(loading, "placed", lambda *_: pytest.fail("its weights are read"))
    given = (f"target={path}", "data=messages", "data.path=none.jsonl", f"out={tmp_path / 'out'}", "data.row_tokens=64")
    said = []
    for plan in ("true", "false"):
        capsys.readouterr()
        assert call(train.main, *given, f"plan={plan}") == 2
        said.append(capsys.readouterr().err.strip())
    with pytest.raises(UserError) as error:
        load_target(TargetConfig(str(path)), "cpu")
    start = f"error: target.path={path}: "
    assert said[0] == said[1] == f"error: {error.value}"
    assert said[0].startswith(start)
    assert "\n" not in said[0]
    return said[0].removeprefix(start)


@pytest.mark.parametrize(
    ("tensors", "values", "said"),
    [
        (
            {EMBEDDING: None},
            {},
            f"no file has the embedding, {EMBEDDING}; give a complete checkpoint of a causal language model",
        ),
        (
            {HEAD: None},
            {},
            f"no file has the LM head, {HEAD}, and config.json has no tie_word_embeddings=true; give a complete "
            "checkpoint of a causal language model",
        ),
        ({GATE: None}, {}, f"1 weights are missing, ['{GATE}'] first; give a complete checkpoint"),
        (
            {EMBEDDING: torch.zeros(90, 32)},
            {},
            f"{EMBEDDING} has shape [90, 32] in model.safetensors, and config.json (vocab_size=96, hidden_size=32) "
            "makes it [96, 32]; give the config.json of these weights",
        ),
        (
            {},
            {"vocab_size": 64},
            f"{EMBEDDING} has shape [96, 32] in model.safetensors, and config.json (vocab_size=64, hidden_size=32) "
            "makes it [64, 32]; give the config.json of these weights",
        ),
        (
            {GATE: torch.zeros(48, 32).to(torch.float8_e4m3fn)},
            {},
            f"{GATE} in model.safetensors is of type F8_E4M3, which is quantised, and config.json has no "
            "quantization_config; copy config.json from where the weights come from",
        ),
        (
            {GATE: None, GATE.replace("weight", "qweight"): torch.zeros(4, 48, dtype=torch.int32)},
            {},
            "model.layers.1.mlp.gate_proj has a qweight of type I32 in model.safetensors, which is quantised, and "
            "config.json has no quantization_config; copy config.json from where the weights come from",
        ),
    ],
)
def test_what_the_files_do_not_hold(copy, tensors, values, said, monkeypatch, capsys, tmp_path):
    edit(copy, **tensors)
    configure(copy, **values)
    assert said_of(copy, monkeypatch, capsys, tmp_path) == said


@pytest.mark.parametrize("length", [0, 100, 20000])
def test_a_file_that_ends_early(copy, length, monkeypatch, capsys, tmp_path):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    said = said_of(copy, monkeypatch, capsys, tmp_path)
    assert said.startswith("model.safetensors is damaged or ends too early, download it again: ")


def test_a_shard_that_ends_early(tmp_path, monkeypatch, capsys):
    tiny_model().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    said = said_of(tmp_path / "sharded", monkeypatch, capsys, tmp_path)
    assert said.startswith(f"{shard.name} is damaged or ends too early, download it again: ")


@pytest.mark.parametrize("lost", [EMBEDDING, HEAD])
def test_of_tied_weights_one_is_enough(tmp_path, lost):
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    edit(tmp_path, **{EMBEDDING: torch.ones(96, 32), HEAD: torch.ones(96, 32)} | {lost: None})
    config = TargetConfig(str(tmp_path))
    check_target(config, load_config(config))


def test_a_quantised_checkpoint_is_its_librarys(copy):
    """Its matrices have other names and shapes; but an LM head of another size is wrong there too."""
    edit(copy, **{GATE: None, GATE.replace("weight", "qweight"): torch.zeros(4, 48, dtype=torch.int32)})
    configure(copy, quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    config = TargetConfig(str(copy))
    check_target(config, load_config(config))
    edit(copy, **{HEAD: None, HEAD.replace("weight", "qweight"): torch.zeros(4, 96, dtype=torch.int32)})
    check_target(config, load_config(config))
    edit(copy, **{EMBEDDING: torch.zeros(90, 32)})
    with pytest.raises(UserError, match="has shape"):
        check_target(config, load_config(config))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, None),
        ({GATE: None}, f"1 weights are missing, ['{GATE}'] first; give a complete checkpoint"),
        ({EMBEDDING: torch.zeros(90, 32)}, f"{EMBEDDING} has shape [90, 32] in pytorch_model.bin, and config.json "),
        ({"optimizer": 1}, "pytorch_model.bin holds more than weights; give a checkpoint in safetensors, as "),
        ({"run": print}, "pytorch_model.bin is damaged, or holds more than weights; give a checkpoint in safetensors"),
    ],
)
def test_pickles_are_looked_at_too(copy, content, said, monkeypatch, capsys, tmp_path):
    tensors = load_file(copy / "model.safetensors") | (content or {})
    torch.save({name: each for name, each in tensors.items() if each is not None}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    if said is None:
        config = TargetConfig(str(copy))
        return check_target(config, load_config(config))
    assert said_of(copy, monkeypatch, capsys, tmp_path).startswith(said)


# --- names that are not the model's


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_multimodal_checkpoint_passes_and_its_head_is_missed(family, tmp_path):
    multimodal_model(family).save_pretrained(tmp_path)
    config = TargetConfig(str(tmp_path))
    check_target(config, load_config(config))
    head = next(name for name in load_file(tmp_path / "model.safetensors") if name.endswith("lm_head.weight"))
    edit(tmp_path, **{head: None})
    with pytest.raises(UserError, match="no file has the LM head"):
        check_target(config, load_config(config))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("model.language_model", "language_model.model").replace(
            "lm_head", "language_model.lm_head"
        ),
        lambda name: name.removeprefix("model."),
    ],
    ids=["older", "without"],
)
def test_weights_under_other_prefixes_are_found(rename, tmp_path):
    """As older versions of transformers wrote them."""
    model = multimodal_model("llava")
    model.save_pretrained(tmp_path, save_original_format=False)
    edit(tmp_path, rename)
    target = load_target(TargetConfig(str(tmp_path), dtype="float32"), "cpu")
    assert torch.equal(target.lm_head.weight, model.lm_head.weight)
    assert torch.equal(target.embedding, model.get_input_embeddings().weight)


def test_experts_that_are_stored_one_by_one_are_whole(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    assert any(".experts.3." in name for name in load_file(tmp_path / "model.safetensors"))
    config = TargetConfig(str(tmp_path))
    check_target(config, load_config(config))


# --- what a config says it is


@pytest.mark.parametrize(
    "declared",
    [
        "LlamaForSequenceClassification",
        "LlamaForTokenClassification",
        "LlamaModel",
        "LlamaForRewardModel",
        "LlamaForCausalLMEagle3",
        "PI0ForConditionalGeneration",
    ],
)
def test_what_goes_on_with_no_text_is_refused(tmp_path, declared, monkeypatch, capsys):
    """Also where an LM head that nobody trained could be made of its embedding."""
    save_target(tmp_path / "copy", tie_word_embeddings=True)
    configure(tmp_path / "copy", architectures=[declared])
    assert said_of(tmp_path / "copy", monkeypatch, capsys, tmp_path) == (
        f"{declared} is no causal language model; a target goes on with a text, as Llama does"
    )


@pytest.mark.parametrize(
    "declared",
    [None, [], "LlamaForCausalLM", ["LLaMAForCausalLM"], ["LlamaForCausalLM", "X"], "ReformerModelWithLMHead"],
)
def test_what_goes_on_passes(declared):
    config = transformers.LlamaConfig(**SIZES)
    vars(config)["architectures"] = declared  # transformers 5.17 checks what it is given, and so what it reads
    assert auto_class(config, "target") is transformers.AutoModelForCausalLM


@pytest.mark.parametrize(
    ("family", "declared", "auto"),
    [
        ("llava", "LlavaForConditionalGeneration", transformers.AutoModelForImageTextToText),
        ("gemma3", None, transformers.AutoModelForCausalLM),
    ],
)
def test_multimodal_classes_pass(family, declared, auto):
    config = multimodal_config(family)
    config.architectures = declared and [declared]
    assert auto_class(config, "target") is auto


# --- a quantisation that cannot be read here


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method=awq needs gptqmodel: `pip install gptqmodel`, or {}"),
        (
            {"quant_method": "gptq", "bits": 4},
            "quant_method=gptq needs optimum and gptqmodel: `pip install optimum gptqmodel`, or {}",
        ),
        ({"quant_method": "quanto"}, "quant_method=quanto needs optimum-quanto: `pip install optimum-quanto`, or {}"),
        ({"quant_method": "modelopt"}, "transformers cannot read quant_method=modelopt; {}"),
        ({"quant_method": "nvfp4"}, "transformers cannot read quant_method=nvfp4; {}"),
        (
            {"group_size": 64, "bits": 4},  # as MLX writes it
            "quantization_config={{'bits': 4, 'group_size': 64}} has no quant_method, as transformers wants it; {}",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": 5},
            "its quantization_config (quant_method=compressed-tensors) cannot be read: ",
        ),
    ],
)
def test_a_quantisation_that_cannot_be_read(copy, quantisation, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(module, "is_installed", lambda name: name == "compressed_tensors")
    configure(copy, quantization_config=quantisation)
    found = said_of(copy, monkeypatch, capsys, tmp_path)
    assert found.startswith(said.format("give the checkpoint that it was made from, which is not quantised"))


def test_libraries_are_named_for_every_method_that_asks_for_some(monkeypatch):
    """transformers' own check fails for want of them in no other."""
    quiet = {"awq": {"bits": 4}, "gptq": {"bits": 4}, "auto-round": {"bits": 4, "group_size": 128}}
    quiet |= {"torchao": {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}}}
    named = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    assert named >= {*module.LIBRARIES, *module.FP8, *module.UNREAD}
    monkeypatch.setattr(module, "is_installed", lambda name: True)
    for method in named - module.LIBRARIES.keys() - {"nvfp4", "gguf"}:
        config = transformers.LlamaConfig(quantization_config={"quant_method": method} | quiet.get(method, {}))
        module.check_quantization_config(config, "target", torch.device("cpu"))


def test_what_transformers_says_of_the_device_is_told(monkeypatch):
    monkeypatch.setattr(module, "is_installed", lambda name: True)
    config = transformers.LlamaConfig(quantization_config={"quant_method": "eetq"})
    module.check_quantization_config(config, "target", None)
    with pytest.raises(UserError, match=r"^target: quant_method=eetq cannot be read on cpu, give the checkpoint .*: "):
        module.check_quantization_config(config, "target", torch.device("cpu"))


def test_a_quantisation_of_the_language_model_alone_is_seen(tmp_path):
    """As some multimodal checkpoints have it; transformers reads it there too."""
    config = multimodal_config("llava")
    config.text_config.quantization_config = {"quant_method": "awq", "bits": 4}
    assert module.quantization_config_of(config) == config.text_config.quantization_config
