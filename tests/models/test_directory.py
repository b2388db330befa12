"""What is no checkpoint is told by its kind, in one line, by every command alike."""

import json
from pathlib import Path

import pytest
import transformers
from huggingface_hub import constants

from eagle_train import export, generate, train
from eagle_train.errors import UserError
from eagle_train.models.loading import TargetConfig, check_target, load_config, load_target
from tests.support.command_line import call, save_target
from tests.support.tiny import tiny_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 16060556376\n"


def said_of(path: Path) -> str:
    with pytest.raises(UserError) as error:
        load_config(TargetConfig(str(path)))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"target.path={path}: ")
    return str(error.value).partition(": ")[2]


def directory(path: Path, **files: str | bytes) -> Path:
    """A directory with these files, whose names have `__` for a dot."""
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_adapters(tmp_path):
    config = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"})
    path = directory(tmp_path / "lora", adapter_config__json=config, adapter_model__safetensors=b"")
    said = said_of(path)
    assert said.startswith("LoRA or other PEFT adapters of meta-llama/Llama-3.1-8B; merge them into the model first")
    assert "merge_and_unload" in said


def test_adapters_beside_a_model(copy):
    """transformers would load the model and the adapters on top of it."""
    (copy / "adapter_config.json").write_text("{}")
    assert said_of(copy).startswith("LoRA or other PEFT adapters; merge them")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin"])
def test_git_lfs_pointers(copy, name):
    (copy / name).write_text(POINTER)
    assert said_of(copy) == f"{name} is a Git LFS pointer, not the file it stands for; run `git lfs pull` there"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"llama__gguf": b"GGUF\3\0\0\0"}, "GGUF files"),
        (
            {"consolidated__00__pth": b"PK", "params__json": "{}", "tokenizer__model": b"x"},
            "weights in their maker's own",
        ),
        ({"consolidated__safetensors": b"", "params__json": "{}"}, "weights in their maker's own format"),
        ({"model_index__json": "{}"}, "a diffusion pipeline"),
        ({"tokenizer__json": "{}", "tokenizer_config__json": "{}"}, "a tokenizer alone"),
        ({"model__safetensors": b""}, "weights without config.json"),
        ({"model__onnx": b""}, "an ONNX model"),
        ({"config__json": "{}", "consolidated__safetensors": b""}, "weights in their maker's own format"),
        ({"config__json": "{}", "model__pth": b""}, "weights in a .pth file"),
        ({"config__json": "{}", "pytorch_model_fsdp__bin": b""}, "a distributed checkpoint of torch"),
        ({"config__json": "{}", "zero_to_fp32__py": ""}, "DeepSpeed's shards; run `python zero_to_fp32.py . .` there"),
        ({"config__json": "{}", "config_sentence_transformers__json": "{}"}, "a model of sentence-transformers"),
        ({}, "no config.json there"),
    ],
)
def test_what_is_no_checkpoint(tmp_path, files, kind):
    assert said_of(directory(tmp_path / "given", **files)).startswith(kind)


def test_a_directory_of_checkpoints(tmp_path):
    """As a trainer's output and the hub's cache are."""
    (tmp_path / "snapshots" / "7ae5").mkdir(parents=True)
    (tmp_path / "snapshots" / "7ae5" / "config.json").write_text("{}")
    assert said_of(tmp_path) == f"no config.json there; give {tmp_path / 'snapshots' / '7ae5'}, which has one"


def test_a_gguf_file_and_other_files(tmp_path):
    for content, kind in ((b"GGUF\3\0\0\0", "a GGUF file, which cannot be trained on"), (b"\0", "a file")):
        file = tmp_path / "llama.gguf"
        file.write_bytes(content)
        assert said_of(file).startswith(f"{kind}; give a Hugging Face checkpoint's directory")


def test_gguf_files_beside_a_config(copy):
    (copy / "model.safetensors").rename(copy / "llama.gguf")
    assert said_of(copy).startswith("GGUF files")


def test_gguf_files_beside_weights_are_no_matter(copy):
    (copy / "llama.gguf").write_bytes(b"GGUF")
    (copy / "consolidated.00.pth").write_bytes(b"PK")
    assert load_config(TargetConfig(str(copy))).model_type == "llama"


def test_a_draft(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eagle_train": {"format": 1}}))
    assert said_of(copy) == "a draft that eagle-export wrote; give the target that it was made for"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration is an encoder-",
        ),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "ViTModel is no causal language model"),
        ({"model_type": "clip"}, "model_type clip is no causal language model"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train", "export", "generate"])
def test_every_command_says_it(copy, tmp_path, capsys, config, kind, command):
    """Before a weight is read: these are a Llama's."""
    (copy / "config.json").write_text(json.dumps(config))
    data = ("data=messages", "data.path=none.jsonl", f"out={tmp_path / 'out'}")
    arguments = {
        "plan": (train.main, "plan=true", *data),
        "train": (train.main, *data),
        "export": (export.main, f"checkpoint={copy}", f"out={tmp_path / 'out'}", "layout=trtllm"),
        "generate": (generate.main, "prompt=hi"),
    }
    main, *given = arguments[command]
    assert call(main, *given, f"target={copy}") == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"error: target.path={copy}: {kind}")
    assert "\n" not in said


def test_a_file_of_weights_that_is_missing(tmp_path):
    """Without any of them the config alone can still be planned with."""
    tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    files[1].unlink()
    assert said_of(tmp_path) == (
        f"1 of {len(files)} files of weights are missing, ['{files[1].name}'] first; download them again"
    )
    for file in tmp_path.glob("model-*.safetensors"):
        file.unlink()
    load_config(TargetConfig(str(tmp_path)))


def test_the_index_of_another_format_is_no_matter(copy):
    """Downloads often leave out the .bin files, and keep their index."""
    (copy / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1-of-2.bin"}}')
    assert load_config(TargetConfig(str(copy))).model_type == "llama"


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off", b"\x80\x02}q\x00."])
def test_damaged_pickles_are_one_line(copy, content):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError) as error:
        load_target(TargetConfig(str(copy)), "cpu")
    assert str(error.value).startswith(f"target.path={copy}: ")
    assert "wrong shape" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_quantisation_that_needs_a_gpu_is_told_as_such(copy, monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("GPU is required to run it")

    monkeypatch.setattr("transformers.modeling_utils.get_hf_quantizer", missing)
    with pytest.raises(UserError) as error:
        load_target(TargetConfig(str(copy)), "cpu")
    assert str(error.value) == f"target.path={copy}: its weights cannot be loaded: GPU is required to run it"


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_quantisation_without_its_method_is_one_line(copy, tmp_path, capsys, command):
    """As MLX writes it."""
    config = json.loads((copy / "config.json").read_text())
    config |= {"quantization_config": {"group_size": 64, "bits": 4}}
    (copy / "config.json").write_text(json.dumps(config))
    given = (f"target={copy}", "data=messages", "data.path=none.jsonl", "data.row_tokens=64", f"out={tmp_path / 'out'}")
    assert call(train.main, *given, f"plan={str(command == 'plan').lower()}") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"error: target.path={copy}: ")
    assert "quant_method" in said


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_a_checkpoint_with_code_of_its_own(copy):
    """Its twin is of that code's class."""
    config = json.loads((copy / "config.json").read_text())
    own = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": own}))
    (copy / "modeling_mine.py").write_text(CODE)
    assert said_of(copy).endswith("; give target.trust_remote_code=true if you trust it")
    target = load_target(TargetConfig(str(copy), trust_remote_code=True), "cpu")
    assert type(target.model).__name__ == "MineForCausalLM"
    (copy / "modeling_mine.py").write_text("import no_such_library_anywhere\n" + CODE)
    with pytest.raises(UserError, match=r"^target\.path=.*no_such_library_anywhere"):
        load_config(TargetConfig(str(copy), trust_remote_code=True))


@pytest.mark.parametrize("malformed", ["refuse", "skip"])
def test_a_token_beyond_the_embedding_is_told_with_its_row(tmp_path, capsys, malformed):
    """A tokenizer that got tokens, and a model that did not: here of 60 tokens, and `a` is the 67th."""
    target = save_target(tmp_path / "target", vocab_size=60)
    known = {"messages": [{"role": "user", "content": "0"}, {"role": "assistant", "content": "12"}]}
    data = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "0"}, {"role": "assistant", "content": "1a"}]}
    template = "{% for m in messages %}{{ m['content'] + '!' }}{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    data.write_text("".join(json.dumps(each) + "\n" for each in (known, known, row, *[known] * 30)))
    given = (f"target={target}", "data=messages", f"data.path={data}", "data.row_tokens=32", "train.steps=1")
    given = (*given, "optim.tokens_per_step=32", "train.micro_batch_rows=1", "draft.num_layers=1", "device=cpu")
    capsys.readouterr()
    given = (*given, "data.shuffle_window=0", f"data.malformed={malformed}", f"out={tmp_path / 'out'}")
    status, said = call(train.main, *given), capsys.readouterr().err
    if malformed == "skip":
        assert status == 0
        return
    assert status == 2
    assert f"{data}:3: token 67 ('a') is beyond the 60 embeddings of the target; give it the tokenizer that" in said


FLOATS = "it must be one of auto, float64, float32, float16, bfloat16"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "frob"}},
            "its config; rope_parameters.rope_type='frob' may be one of default, ",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "1"}},
            "its config has rope_parameters.rope_theta='1'; it must be a number above 0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
            "its config has rope_parameters.factor=0; it must be a number above 0",
        ),
        ({"num_attention_heads": 0}, "config.json: "),
        ({"hidden_size": -1}, "config.json: The hidden size (-1) is not a multiple"),
        ({"num_hidden_layers": 0}, "its config has num_hidden_layers=0; it must be 1 or more"),
        ({"num_hidden_layers": 10**9}, "its config has num_hidden_layers=1000000000; it must be 10000 at most"),
        ({"num_key_value_heads": 3}, "its config has num_key_value_heads=3; it must divide num_attention_heads, 4"),
        ({"num_key_value_heads": 0}, "its config has num_key_value_heads=0; it must be 1 or more"),
        ({"head_dim": 0}, "its config has head_dim=0; it must be 1 or more"),
        ({"hidden_act": "nothing"}, "its config has hidden_act='nothing', which is not known"),
        ({"layer_types": ["sliding_attention"]}, "config.json: `num_hidden_layers` (3) must be equal to the number of"),
        ({"vocab_size": None}, "config.json: vocab_size=null; it must be int"),
        ({"eos_token_id": "x"}, "config.json: eos_token_id='x'; it must be int or list or null"),
        ({"max_position_embeddings": None}, "config.json: max_position_embeddings=null; it must be int"),
        ({"dtype": "float9"}, f"config.json has dtype='float9'; {FLOATS}"),
        ({"dtype": "int8"}, f"config.json has dtype='int8'; {FLOATS}"),
        ({"architectures": 3}, "config.json has architectures=3; it must be a list with the name of a class"),
        ({"model_type": ["llama"]}, "config.json has model_type=['llama']; give a causal language model's"),
        ({"model_type": "frob"}, "transformers {} knows no model_type=frob; install a newer one"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_config_that_cannot_be_is_one_line(copy, tmp_path, capsys, values, said, command):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))
    given = (f"target={copy}", "data=messages", "data.path=none.jsonl", f"out={tmp_path / 'out'}")
    assert call(train.main, *given, f"plan={str(command == 'plan').lower()}") == 2
    found = capsys.readouterr().err.strip().splitlines()[-1]
    assert found.startswith(f"error: target.path={copy}: ")
    assert said.format(transformers.__version__) in found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{", "config.json is no JSON from line 1, column 2 on"),
        ("config.json", "[]", "config.json holds no mapping"),
        ("config.json", b"\xff", "config.json is no text in UTF-8"),
        ("config.json", "{}", "config.json has model_type=None; give a causal language model's"),
        ("generation_config.json", "", "generation_config.json is no JSON from line 1, column 1 on"),
        (
            "generation_config.json",
            b"\xef\xbb\xbf{}",
            "generation_config.json begins with a byte order mark; save it ",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": "a"}',
            "generation_config.json has eos_token_id='a'; it must be ",
        ),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no mapping"),
        ("special_tokens_map.json", "{", "special_tokens_map.json is no JSON from line 1, column 2 on"),
    ],
)
def test_small_files_that_are_damaged(copy, name, content, said):
    """transformers goes on without a generation_config.json that it cannot read, and where answers end is lost."""
    (copy / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said_of(copy).startswith(said)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "model.safetensors.index.json is no JSON from line 1, column 2 on"),
        ("{}", "weight_map in model.safetensors.index.json must name the file of each weight, in the same directory, "),
        ('{"weight_map": {"a": "../b.safetensors"}}', "weight_map in model.safetensors.index.json must name the file "),
        ('{"weight_map": {"a": 3}}', "weight_map in model.safetensors.index.json must name the file of each weight, "),
    ],
)
def test_an_index_that_cannot_be(copy, index, said):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    assert said_of(copy).startswith("files of weights, and neither model.safetensors nor pytorch_model.bin ")
    (copy / "model.safetensors.index.json").write_text(index)
    assert said_of(copy).startswith(said)


# --- names of the hub


@pytest.fixture
def cached(copy, tmp_path, monkeypatch) -> Path:
    """The checkpoint as the hub's cache has it, by the name some/one."""
    repository = tmp_path / "hub" / "models--some--one"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("7ae5")
    (repository / "snapshots").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return copy.rename(repository / "snapshots" / "7ae5")


def test_what_the_hubs_cache_holds_is_looked_at(cached):
    config = TargetConfig("some/one")
    check_target(config, load_config(config))
    file = cached / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(UserError, match=r"^target\.path=some/one: model\.safetensors is damaged or ends too early"):
        check_target(config, load_config(config))
    file.unlink()
    (cached / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^target\.path=some/one: LoRA or other PEFT adapters"):
        load_config(config)
    (cached / "adapter_config.json").unlink()
    (cached / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"^target\.path=some/one: config\.json is no JSON from line 1"):
        load_config(config)


def test_what_the_hubs_cache_lacks_is_left_to_be_fetched(cached, monkeypatch):
    fetched = transformers.AutoConfig.from_pretrained(cached)
    (cached / "config.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: fetched)
    assert load_config(TargetConfig("some/one")) is fetched


def test_a_name_that_is_nowhere(cached):
    with pytest.raises(UserError, match=r"^target\.path=some/other: no such directory, not in the hub's cache .*, and"):
        load_config(TargetConfig("some/other"))
    with pytest.raises(UserError, match=r"^target\.path=so me/other: no such directory, and no hub id: "):
        load_config(TargetConfig("so me/other"))
