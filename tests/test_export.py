"""eagle-export: what each engine would load of what it writes, that it is what was trained, and what is refused.

Somebody else's drafts are here made by hand, in the layouts of EAGLE's own repository, of vLLM and of SGLang.
"""

import errno
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train import export
from eagle_train.artifacts import format, hub
from eagle_train.artifacts.card import card, read_evaluations
from eagle_train.artifacts.foreign import load_foreign, refuse_other
from eagle_train.artifacts.format import load_draft, read_artifact, save_draft, write_artifact
from eagle_train.artifacts.layouts import expected_shapes, from_layout
from eagle_train.artifacts.tensors import file_tensors
from eagle_train.artifacts.verify import check_names, verify
from eagle_train.drafts import Draft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models.draft_quantisation import Quant, quant_of, quantise_draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.one_writer import beside, one_writer
from eagle_train.ops.weight_codes import dequantise
from tests.support.command_line import call, chats, save_target, write_jsonl
from tests.support.serving_engines import read, replay
from tests.support.tiny import tiny_draft, tiny_eagle3, tiny_medusa, tiny_mtp, tiny_peagle

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
SERVED = [
    *[(engine, "eagle1", quant, "ffn") for engine in ("vllm", "sglang") for quant in ("none", "int4", "fp8")],
    *[("vllm", "full", quant, "ffn") for quant in ("none", "int4", "fp8")],
    *[("vllm", norms, quant, "all_linear") for norms in ("eagle1", "full") for quant in ("int4", "fp8")],
    ("trtllm", "eagle1", "none", "ffn"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A directory with `target`, its artifacts `eagle1` and `full` in fp32, and `other`, another target."""
    home = tmp_path_factory.mktemp("export")
    save_target(home / "target", **WIDE)
    save_target(home / "other", seed=1, **WIDE)
    target = load_target(TargetConfig(str(home / "target")), "cpu")
    for norms in ("eagle1", "full"):
        rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        draft = tiny_draft(target, norms=norms, num_layers=3, rope_parameters=rope)
        save_draft(draft, home / norms, target.identity, {"steps": 7}, torch.float32)
    return home


@pytest.fixture(scope="module")
def target(home):
    return load_target(TargetConfig(str(home / "target")), "cpu")


def exported(home: Path, out: Path, *arguments: str, source: str = "eagle1") -> Path:
    assert call(export.main, f"checkpoint={home}/{source}", f"out={out}", "device=cpu", *arguments) == 0
    return out


def refusal(capsys, *arguments: str) -> str:
    """The line with which these arguments are refused; nothing is left behind."""
    (out,) = [Path(argument.removeprefix("out=")) for argument in arguments if argument.startswith("out=")]
    before = sorted(out.parent.rglob("*"))
    capsys.readouterr()
    assert call(export.main, "device=cpu", *arguments) == 2
    assert sorted(out.parent.rglob("*")) == before
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_second_export_to_one_place_is_refused(home, tmp_path, capsys):
    out = tmp_path / "out"
    with one_writer(out, beside(out)):
        assert f"out={out}: process " in refusal(capsys, f"checkpoint={home}/eagle1", f"out={out}")
    exported(home, out)
    assert list(tmp_path.iterdir()) == [out]


# --- what engines load


@pytest.mark.parametrize(("engine", "norms", "quant", "scope"), SERVED)
def test_the_engine_loads_it_whole_and_so_do_we(home, tmp_path, engine, norms, quant, scope):
    given = [f"target={home}/target"] if engine == "trtllm" else []
    out = exported(
        home, tmp_path / "out", f"layout={engine}", f"quant={quant}", f"quant.scope={scope}", *given, source=norms
    )
    config, tensors = read(out)
    loaded = replay(engine, config, tensors, json.loads((home / "target" / "config.json").read_text()))
    assert (loaded.errors, loaded.uninitialised, loaded.spoiled) == ([], set(), set())
    assert loaded.skipped <= {"fc.bias", "embed_tokens.weight"}
    ours = quantise_draft(load_draft(home / norms), Quant(quant, scope))
    assert load_draft(out).config == replace(ours.config, first_token="skip")
    wanted, found = file_tensors(ours, torch.bfloat16), file_tensors(load_draft(out), torch.bfloat16)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    written = from_layout(engine, ours.config, load_file(out / "model.safetensors"))
    torch.testing.assert_close(written, wanted, rtol=0, atol=0)


def test_positions_are_told_to_old_and_new_readers(home, tmp_path):
    config = json.loads((exported(home, tmp_path / "out", "layout=vllm") / "config.json").read_text())
    rope = load_draft(home / "eagle1").config.rope_parameters
    assert config["rope_parameters"] == rope
    assert config["rope_scaling"] | {"rope_theta": config["rope_theta"]} == rope
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_the_library_reads_what_is_packed(home, tmp_path):
    """By compressed-tensors' own decompression."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    for quant in ("int4", "fp8"):
        out = exported(home, tmp_path / quant, "layout=vllm", f"quant={quant}")
        config = QuantizationConfig(**json.loads((out / "config.json").read_text())["quantization_config"])
        compressor = BaseCompressor.get_value_from_registry(config.format)
        name, tensors = "layers.1.mlp.up_proj", load_file(out / "model.safetensors")
        own = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(name)}
        theirs = compressor.decompress(own, config.config_groups["group_0"])["weight"]
        ours = dequantise(*load_draft(out).get_submodule(name).parts())
        torch.testing.assert_close(theirs.float(), ours, rtol=2**-7, atol=0)


def test_sglang_is_given_the_tokens_of_a_draft_that_knows_a_part(home, target, tmp_path):
    tokens = [3, 5, 8, 40]
    draft = tiny_draft(target, vocab_size=4, vocabulary=tokens)
    save_draft(draft, tmp_path / "draft", target.identity)
    out = exported(tmp_path, tmp_path / "out", "layout=sglang", source="draft")
    assert torch.load(out / "token_map.pt", weights_only=True) == tokens
    assert "--speculative-token-map /path/to/draft/token_map.pt" in (out / "README.md").read_text()
    assert load_draft(out).config.vocabulary == tokens


# --- what was trained


@pytest.mark.parametrize("arguments", [["layout=vllm"], ["layout=vllm", "quant=int4"], ["quant=fp8"]], ids=str)
def test_twice_gives_the_same_bytes(home, tmp_path, arguments):
    first, again = (exported(home, tmp_path / name / "draft", *arguments) for name in ("one", "two"))
    assert contents(first) == contents(again)
    assert sorted(contents(first)) == ["README.md", "config.json", "model.safetensors"]


def test_it_says_which_draft_it_replaces(home, tmp_path, capsys):
    out = exported(home, tmp_path / "out", "layout=native")
    assert "replaces" not in capsys.readouterr().out
    exported(home, out, "layout=sglang")
    assert "replaces the native draft that was there" in capsys.readouterr().out.splitlines()
    (out / "config.json").write_text('{"eagle_train": {"version": 0}}')
    exported(home, out, "layout=sglang")
    assert "replaces the draft that was there" in capsys.readouterr().out.splitlines()


def test_an_export_can_be_exported(home, tmp_path):
    """By way of SGLang's layout the same as straight on, and quantised ones as they are."""
    straight = exported(home, tmp_path / "straight" / "draft", "layout=vllm", "quant=fp8")
    exported(home, tmp_path / "way", "layout=sglang", "dtype=float32")
    assert contents(exported(tmp_path, tmp_path / "round" / "draft", "layout=vllm", "quant=fp8", source="way")) == (
        contents(straight)
    )
    small = exported(tmp_path, tmp_path / "small", "layout=native", source="straight/draft")
    assert read_artifact(small).quant == Quant("fp8")
    assert load_file(small / "model.safetensors").keys() == load_file(straight / "model.safetensors").keys()
    assert read_artifact(small).source == read_artifact(home / "eagle1").source


@pytest.mark.parametrize("quant", ["none", "int4", "fp8"])
def test_answers_with_an_export_are_those_with_the_trained_draft(home, target, tmp_path, quant):
    out = exported(home, tmp_path / "out", "layout=vllm", f"quant={quant}", "dtype=float32")
    params, prompts = SamplingParams(max_tokens=12), [[5, 9, 11], [40, 41, 42, 43]]
    trained = quantise_draft(load_draft(home / "eagle1"), Quant(quant)).attending(first_token="skip")
    for one, other in zip(
        Engine(target, load_draft(out, target.identity), "chain3").generate(prompts, params),
        Engine(target, trained, "chain3").generate(prompts, params),
        strict=True,
    ):
        assert (one.token_ids, one.rounds) == (other.token_ids, other.rounds)


@pytest.mark.parametrize(
    ("quant", "damage"),
    [
        ("none", {"layers.1.mlp.up_proj.weight": 1.01}),
        ("fp8", {"layers.1.mlp.up_proj.weight_scale": 1.01}),
        ("int4", {"layers.1.mlp.up_proj.weight_scale": 1.01}),
    ],
)
def test_what_is_not_what_was_trained_gets_no_name(home, tmp_path, monkeypatch, quant, damage):
    def damaged(tensors, *arguments, **options):
        save_file({name: x * damage[name] if name in damage else x for name, x in tensors.items()}, *arguments)

    monkeypatch.setattr(format, "write_tensors", damaged)
    with pytest.raises(AssertionError, match=r"up_proj.weight.* is not what was written"):
        call(export.main, f"checkpoint={home}/eagle1", f"out={tmp_path}/out", f"quant={quant}")
    assert not list(tmp_path.iterdir())


def test_names_and_outputs_are_looked_at_too(home, target, tmp_path):
    trained, about = load_draft(home / "eagle1"), read_artifact(home / "eagle1")
    wrong = tiny_draft(target, seed=1, num_layers=3)
    about = replace(about, draft=wrong.config)
    with pytest.raises(AssertionError, match="outputs are"):
        write_artifact(about, wrong, tmp_path / "a", "", lambda at: verify(at, about, wrong, trained))
    about = replace(about, quant=Quant("fp8"))
    small = quantise_draft(wrong, Quant("fp8"))
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.gate_proj is .* off"):
        write_artifact(about, small, tmp_path / "a", "", lambda at: verify(at, about, small, trained))
    out = exported(home, tmp_path / "out", "layout=vllm")
    save_file(load_file(out / "model.safetensors") | {"norm.weight": torch.ones(128)}, out / "model.safetensors")
    with pytest.raises(AssertionError, match="not the names vllm loads"):
        check_names(out, read_artifact(out))


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (partial(tiny_mtp, modules=3), "further.1.fc.weight"),
        (partial(tiny_peagle, steps=3), "mask_hidden"),
        (partial(tiny_medusa, heads=3), "layers.2.mlp.0.bias"),
    ],
)
def test_outputs_of_all_passes_are_looked_at(home, target, tmp_path, made, name):
    trained, wrong = made(target), made(target)
    with torch.no_grad():
        wrong.get_parameter(name).add_(0.5)
    about = replace(read_artifact(home / "eagle1"), draft=wrong.config)
    with pytest.raises(AssertionError, match="outputs are"):
        write_artifact(about, wrong, tmp_path / "a", "", lambda at: verify(at, about, wrong, trained))


def test_a_full_disk_leaves_nothing(home, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(format, "write_text", full)  # the card, which is the last
    assert "No space left" in refusal(capsys, f"checkpoint={home}/eagle1", f"out={tmp_path}/out")


def test_rounding_by_the_targets_states(home, target, tmp_path, capsys):
    """With data that say which inputs matter, other codes, in the same layout."""
    text = write_jsonl(tmp_path / "chats.jsonl", chats(60))
    given = [f"target={home}/target", "data=messages", f"data.path={text}", "data.row_tokens=64"]
    given += ["layout=vllm", "quant=int4", "quant.scope=all_linear", "calibration_tokens=300"]
    nearest = exported(home, tmp_path / "nearest", *given)
    gptq = exported(home, tmp_path / "gptq", *given, "rounding=gptq")
    assert (read_artifact(gptq).rounding, read_artifact(nearest).rounding) == ("gptq", "nearest")
    assert "rounded with error feedback on the target's states" in (gptq / "README.md").read_text()
    one, other = (load_file(place / "model.safetensors") for place in (nearest, gptq))
    assert {name: x.shape for name, x in one.items()} == {name: x.shape for name, x in other.items()}
    (name, config) = "layers.1.mlp.up_proj.weight_packed", json.loads((home / "target" / "config.json").read_text())
    assert not torch.equal(one[name], other[name])
    assert replay("vllm", *read(gptq), config).whole
    assert contents(exported(home, tmp_path / "again" / "gptq", *given, "rounding=gptq")) == contents(gptq)
    line = refusal(capsys, f"checkpoint={home}/eagle1", f"out={tmp_path}/out", *given, "rounding=gptq", "data.path=no")
    assert "data.path" in line


@pytest.mark.parametrize("quant", ["none", "fp8", "int4"])
def test_medusa_heads_are_for_our_engine(home, target, tmp_path, capsys, quant):
    draft = tiny_medusa(target, heads=3, num_layers=2)
    save_draft(draft, tmp_path / "heads", target.identity, dtype=torch.float32)
    out = exported(tmp_path, tmp_path / "out", f"quant={quant}", "dtype=float32", source="heads")
    assert read_artifact(out).draft == draft.config
    assert quant_of(load_draft(out)).scheme == quant
    text = (out / "README.md").read_text()
    assert "\n# Medusa heads for " in text
    assert "\nMedusa heads (3, blocks in each: 2) that propose tokens for " in text
    assert "rotary" not in text
    for layout in ("vllm", "sglang"):
        line = refusal(capsys, f"checkpoint={tmp_path}/heads", f"out={tmp_path}/no", f"layout={layout}")
        assert line == f"error: layout={layout}: is for no draft of draft=medusa; use one of native, trtllm"
    line = refusal(capsys, f"checkpoint={tmp_path}/heads", f"out={tmp_path}/no", "layout=trtllm")
    assert line == "error: layout=trtllm: its file repeats the target's LM head; give target=PATH"


@pytest.mark.parametrize(
    ("made", "title", "said"),
    [
        (tiny_draft, "An EAGLE draft", " of 2 layers that proposes"),
        (partial(tiny_eagle3, num_layers=1), "An EAGLE-3 draft", " of one layer that proposes"),
        (partial(tiny_peagle, num_layers=2), "A P-EAGLE draft", " of 2 layers that proposes, 8 in one forward,"),
        (tiny_mtp, "An MTP module", " of one layer that proposes"),
        (partial(tiny_mtp, modules=2), "A chain of 2 MTP modules", " that proposes"),
        (partial(tiny_medusa, heads=3), "Medusa heads", " (3, blocks in each: 1) that propose"),
    ],
    ids=["eagle", "eagle3", "peagle", "mtp", "chain", "medusa"],
)
def test_a_card_says_what_kind_a_draft_is(target, tmp_path, made, title, said):
    draft = made(target)
    save_draft(draft, tmp_path / "draft", target.identity)
    text = (exported(tmp_path, tmp_path / "out", source="draft") / "README.md").read_text()
    assert f"tags: [{draft.config.kind}, " in text
    assert f"\n# {title} for " in text
    assert f"\n{title}{said} tokens for " in text


# --- what is refused


@pytest.mark.parametrize(
    ("overrides", "arguments", "reason"),
    [
        ({"ffn": "moe"}, ["layout=vllm"], "vLLM runs no draft with draft.ffn=moe"),
        ({"irope": True}, ["layout=sglang"], "SGLang runs no draft with draft.irope=true"),
        (
            {"window": 8},
            ["layout=vllm"],
            "vLLM gives an EAGLE draft no window of its own, and this one has one (draft.w",
        ),
        (
            {"sink": True},
            ["layout=sglang"],
            "SGLang has no sinks in its Llama layers, and this draft has them (draft.s",
        ),
        ({"norms": "full"}, ["layout=sglang"], "SGLang has no class that applies both"),
        ({"norms": "full"}, ["layout=trtllm", "target={home}/target"], "TensorRT-LLM has no class that applies both"),
        ({"vocab_size": 2, "vocabulary": [4, 5]}, ["layout=vllm"], "proposes from the target's whole vocabulary"),
        ({"fc_bias": True}, ["layout=vllm"], "vLLM drops the bias of fc"),
        ({"mlp_bias": True}, ["layout=sglang"], "SGLang drops the biases of the feed-forward"),
        ({"o_bias": True}, ["layout=trtllm", "target={home}/target"], "TensorRT-LLM has no biases in its layers"),
        ({}, ["layout=sglang", "quant=int4", "quant.scope=all_linear"], "SGLang runs fc as it is"),
        ({}, ["layout=trtllm", "quant=fp8", "target={home}/target"], "formats (quant); use quant=none or layout=n"),
        ({}, ["layout=trtllm"], "its file repeats the target's embedding; give target=PATH"),
        ({}, ["layout=vllm", "target={home}/other"], "made for target"),
        ({"intermediate_size": 200}, ["quant=int4"], "must be multiples of 16 and 128"),
        ({}, ["quant.scheme=int3"], "quant.scheme=int3: must be one of none, int4, fp8"),
        ({}, ["rounding=gptq"], "rounding=gptq: nothing is rounded; give quant=int4 or quant=fp8"),
        ({}, ["rounding=gptq", "quant=int4"], "rounding=gptq: reads the target's states; give target=PATH"),
        ({}, ["rounding=gptq", "quant=int4", "target={home}/target"], "reads chat data; give data=messages"),
        (
            {},
            [
                *("rounding=gptq", "quant=int4", "target={home}/target", "data=messages", "data.path=x.jsonl"),
                "target.template_kwargs={{thinking: false}}",
            ],
            "target.template_kwargs={'thinking': False}: is for commands that read no data; give data.template_kwargs",
        ),
        ({}, ["evaluations=[{home}/none.json]"], "none.json: cannot be read"),
    ],
)
def test_wrong_combinations(home, target, tmp_path, capsys, overrides, arguments, reason):
    draft = tiny_draft(target, **overrides)
    save_draft(draft, tmp_path / "draft", target.identity)
    arguments = [argument.format(home=home) for argument in arguments]
    assert reason in refusal(capsys, f"checkpoint={tmp_path}/draft", f"out={tmp_path}/out", *arguments)


def test_a_whole_model_is_no_draft(home, tmp_path, capsys):
    line = refusal(capsys, f"checkpoint={home}/target", f"out={tmp_path}/out")
    assert "neither a run nor an export of eagle_train" in line
    assert "a whole model is a target and no draft" in line


def test_what_cannot_be_is_refused_before_the_target_is_loaded(home, target, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export, "load_target", None)
    save_draft(tiny_draft(target, intermediate_size=200), tmp_path / "draft", target.identity)
    given = (f"checkpoint={tmp_path}/draft", f"out={tmp_path}/out", f"target={home}/target")
    assert "must be multiples of 16 and 128" in refusal(capsys, *given, "quant=int4")


def test_a_quantised_draft_is_not_quantised_again(home, tmp_path, capsys):
    exported(home, tmp_path / "small", "quant=int4")
    line = refusal(capsys, f"checkpoint={tmp_path}/small", f"out={tmp_path}/out", "quant=fp8")
    assert "quant.scheme=fp8: the draft is quantised already, int4 (ffn)" in line


@pytest.mark.parametrize("quant", ["none", "int4", "fp8"])
@pytest.mark.parametrize("length", [0, 300, 20000])
def test_truncated_files(home, tmp_path, capsys, quant, length):
    path = exported(home, tmp_path / "cut", "layout=vllm", f"quant={quant}") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "model.safetensors cannot be read" in refusal(capsys, f"checkpoint={tmp_path}/cut", f"out={tmp_path}/out")


@pytest.mark.parametrize(
    ("quant", "changes", "words"),
    [
        ("int4", {"weight_packed": None}, "is missing"),
        ("int4", {"weight_scale": torch.full((256, 1), float("nan")).bfloat16()}, "not finite"),
        ("int4", {"weight_scale": torch.ones(256, 1)}, "is torch.float32, must be torch.bfloat16"),
        ("int4", {"weight_shape": torch.tensor([256, 64])}, "weight_shape is"),
        ("int4", {"weight_packed": torch.zeros(256, 8, dtype=torch.int32)}, "has shape (256, 8), must be (256, 16)"),
        ("fp8", {"weight": torch.zeros(256, 128).bfloat16()}, "is torch.bfloat16, must be torch.float8_e4m3fn"),
        ("fp8", {"weight_scale": torch.ones(1, 1)}, "has shape (1, 1), must be (256, 1)"),
        ("none", {"weight": torch.zeros(256, 128, dtype=torch.int8)}, "is torch.int8, must be floating-point"),
    ],
)
def test_damaged_tensors(home, tmp_path, quant, changes, words):
    path = exported(home, tmp_path / "bad", f"quant={quant}") / "model.safetensors"
    tensors = load_file(path) | {f"layers.1.mlp.up_proj.{part}": tensor for part, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(UserError) as error:
        load_draft(tmp_path / "bad")
    assert words in str(error.value)
    assert "layers.1.mlp.up_proj" in str(error.value)


# --- drafts of others


def foreign(
    target,
    directory: Path,
    layout: str = "reference",
    norms: str = "eagle1",
    num_layers: int = 3,
    biases: tuple[str, ...] = (),
    **changes,
) -> Draft:
    """Write a draft as others do. `changes`: tensors to add, or None to take away."""
    biases = dict.fromkeys(("fc_bias", *biases) if layout == "bias" else biases, True)
    draft = tiny_draft(target, num_layers=num_layers, norms=norms, first_token="skip", **biases)
    tensors = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    if layout in ("reference", "bias"):
        tensors["embed_tokens.weight"] = target.embedding.clone()
    if layout == "sglang":
        tensors |= {"fc.bias": torch.zeros(128), "lm_head.weight": target.lm_head.weight.clone()}
    if layout == "vllm":
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": num_layers,
        "vocab_size": 96,
        "rms_norm_eps": draft.config.rms_norm_eps,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "bias": layout == "bias",
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if layout in ("reference", "bias"):
        torch.save(tensors, directory / "pytorch_model.bin")
    elif layout == "vllm":  # in two files
        parts = [dict(list(tensors.items())[half::2]) for half in range(2)]
        for i, part in enumerate(parts):
            save_file(part, directory / f"part-{i}.safetensors")
        places = {name: f"part-{i}.safetensors" for i, part in enumerate(parts) for name in part}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(tensors, directory / "model.safetensors")
    return draft


@pytest.mark.parametrize(
    ("layout", "norms", "num_layers"),
    [
        ("reference", "eagle1", 1),
        ("bias", "eagle1", 1),
        ("vllm", "eagle1", 2),
        ("vllm", "full", 3),
        ("sglang", "eagle1", 4),
    ],
)
def test_drafts_of_others_are_read(home, target, tmp_path, layout, norms, num_layers):
    draft = foreign(target, tmp_path / "theirs", layout, norms, num_layers)
    out = exported(tmp_path, tmp_path / "out", f"target={home}/target", "dtype=float32", source="theirs")
    loaded = load_draft(out, target.identity)
    assert loaded.config == draft.config
    torch.testing.assert_close(loaded.state_dict(), draft.state_dict(), rtol=0, atol=0)
    assert read_artifact(out).training == {"imported": f"{tmp_path}/theirs"}


@pytest.mark.parametrize("biases", [("qkv_bias",), ("qkv_bias", "o_bias"), ("o_bias", "mlp_bias")])
@pytest.mark.parametrize("engine", ["native", "vllm", "sglang"])
def test_biases_of_others_are_read_and_served(home, target, tmp_path, capsys, biases, engine):
    """Qwen2's drafts have them on queries, keys and values; an engine that has more of them is given zeros."""
    draft = foreign(target, tmp_path / "theirs", "reference", num_layers=2, biases=biases)
    arguments = [f"target={home}/target", "dtype=float32", f"layout={engine}"]
    if engine == "sglang" and "mlp_bias" in biases:
        assert "drops the biases" in refusal(capsys, f"checkpoint={tmp_path}/theirs", f"out={tmp_path}/out", *arguments)
        return
    out = exported(tmp_path, tmp_path / "out", *arguments, source="theirs")
    loaded = load_draft(out, target.identity)
    assert loaded.config == draft.config
    torch.testing.assert_close(loaded.state_dict(), draft.state_dict(), rtol=0, atol=0)
    if engine != "native":
        config, tensors = read(out)
        served = replay(engine, config, tensors, json.loads((home / "target" / "config.json").read_text()))
        assert (served.errors, served.uninitialised, served.spoiled) == ([], set(), set())
        assert not served.skipped
        known = expected_shapes(engine, loaded.config, target.identity)
        assert {name: shape for name, (shape, _) in tensors.items()} == known


def test_a_file_may_have_another_name(target, tmp_path):
    """Without an index engines read all safetensors there are; beside model.safetensors ours reads no others."""
    draft = foreign(target, tmp_path / "theirs", "sglang")
    own = tmp_path / "theirs" / "model.safetensors"
    own.rename(own.with_name("eagle-00001.safetensors"))
    found = load_foreign(tmp_path / "theirs", target)
    torch.testing.assert_close(found.state_dict(), draft.state_dict(), rtol=0, atol=0)
    own.with_name("eagle-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"its weights cannot be read: .*model\.safetensors"):
        load_foreign(tmp_path / "theirs", target)


def test_biases_that_are_zero_everywhere_are_none(home, target, tmp_path):
    """As SGLang's layout has them beside those of queries, keys and values."""
    zeros = {f"layers.{layer}.self_attn.o_proj.bias": torch.zeros(128) for layer in range(2)}
    draft = foreign(target, tmp_path / "theirs", "sglang", num_layers=2, biases=("qkv_bias",), **zeros)
    assert load_foreign(tmp_path / "theirs", target).config == draft.config


def test_a_config_within_a_config_is_read(target, tmp_path):
    """As vLLM writes it; what it does not say is never told as what it says."""
    draft = foreign(target, tmp_path / "theirs", "sglang")
    path = tmp_path / "theirs" / "config.json"
    own = json.loads(path.read_text())
    for nested in (
        {"model": own},
        {"model": own, "truncated_vocab_size": 96, "hidden_size": 99},  # of what, nobody says
        {"transformer_layer_config": own},
        own | {"quantization_config": None, "hidden_act": None, "id2label": 5, "dtype": "float9", "pad_token_id": ""},
    ):
        path.write_text(json.dumps({"model_type": "eagle", **nested}))
        assert load_foreign(tmp_path / "theirs", target).config == draft.config
    path.write_text(json.dumps({key: value for key, value in own.items() if key != "max_position_embeddings"}))
    assert load_foreign(tmp_path / "theirs", target).config.max_position_embeddings == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"d2t": torch.zeros(4)},
            "config.json: d2t has shape (4,) and torch.float32, and must be a row of whole numbers",
        ),
        ({"fc.weight": None}, "has no fc.weight"),
        ({"fc.weight": torch.zeros(128, 256).to(torch.float8_e4m3fn)}, "is quantised; give the unquantised draft"),
        ({"layers.0.mlp.up_proj.weight_scale": torch.ones(256, 1)}, "is quantised; give the unquantised draft"),
        ({"embed_tokens.weight": torch.zeros(96, 128)}, "its embed_tokens.weight is not the embedding of"),
        (
            {"norm.weight": torch.ones(128)},
            "has norm.weight, but not the other of the first layer's input norm and the final norm",
        ),
        ({"layers.2.mlp.up_proj.weight": None}, "tensor layers.2.mlp.up_proj.weight is missing"),
        ({"layers.0.self_attn.q_proj.bias": torch.ones(128)}, "q_proj.bias is not part of this draft"),
        ({"embed_layernorm.weight": torch.ones(128)}, "embed_layernorm.weight is not part of this draft"),
        ({"fc.weight": torch.zeros(128, 128)}, "tensor fc.weight has shape (128, 128), must be (128, 256)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_drafts_of_others_that_are_none(home, target, tmp_path, capsys, changes, message):
    foreign(target, tmp_path / "theirs", "sglang", **changes)
    arguments = [f"checkpoint={tmp_path}/theirs", f"out={tmp_path}/out", f"target={home}/target"]
    assert message in refusal(capsys, *arguments)


def test_drafts_of_speculators_are_read(target, tmp_path):
    """One layer, by names of their own, with or without a bias of what joins the two inputs; with norms, none."""
    draft = foreign(target, tmp_path / "theirs", "bias", num_layers=1)
    own = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config = {"speculators_model_type": "eagle", "layernorms": False, "transformer_layer_config": own}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    tensors = {
        next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name): tensor
        for name, tensor in draft.state_dict().items()
    }
    (tmp_path / "theirs" / "pytorch_model.bin").unlink()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    loaded = load_foreign(tmp_path / "theirs", target)
    assert loaded.config == draft.config
    torch.testing.assert_close(loaded.state_dict(), draft.state_dict(), rtol=0, atol=0)
    save_file(tensors | {"embedding_layernorm.weight": torch.ones(128)}, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(UserError, match="has a norm after the embedding"):
        load_foreign(tmp_path / "theirs", target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1', "config.json is no JSON from line 1, column 8 on"),
        (b"[1]", "config.json holds no mapping"),
        (b"\xff\xfe", "config.json is no text in UTF-8"),
    ],
)
def test_configs_of_others_that_are_none(target, tmp_path, text, message):
    foreign(target, tmp_path / "theirs", "sglang")
    (tmp_path / "theirs" / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=message):
        load_foreign(tmp_path / "theirs", target)


def test_fp16_has_no_numbers_as_small_as_bf16(target):
    """And an embedding that was rounded so is still the target's."""
    own = target.embedding.bfloat16() * torch.logspace(0, -30, len(target.embedding), base=2)[:, None].bfloat16()
    assert not torch.equal(own.half().bfloat16(), own)
    known = SimpleNamespace(embedding=own, name="t")
    refuse_other("embed_tokens.weight", "embedding", own.half(), known, "draft")
    for other in (own.half().flip(0), own * 1.008):  # another, and one that was trained a little further
        with pytest.raises(UserError, match="is not the embedding of t"):
            refuse_other("embed_tokens.weight", "embedding", other, known, "draft")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"out": "{taken}"}, "holds no draft"),
        ({"checkpoint": "{taken}"}, "/taken: no checkpoint there; give the directory of a training run"),
        (
            {"rounding": "gptq", "quant": "int4", "data": "messages", "data.path": "no.jsonl"},
            "data.path is no.jsonl; there is no such file",
        ),
    ],
)
def test_what_is_wrong_beforehand_costs_no_target(home, tmp_path, capsys, monkeypatch, given, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("important")
    monkeypatch.setattr(export, "load_target", None)
    given = {"checkpoint": f"{home}/eagle1", "target": f"{home}/target", "out": f"{tmp_path}/out"} | given
    overrides = [f"{key}={value}".format(taken=tmp_path / "taken") for key, value in given.items()]
    assert message in refusal(capsys, *overrides)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 64}, "config.json: hidden_size is 64, and 128 in target"),
        ({"vocab_size": 95}, "config.json: vocab_size is 95, and 96 in target"),
        ({"quantization_config": {}}, "is quantised; give the unquantised draft"),
        ({"num_attention_heads": 3}, "config.json: num_key_value_heads is 2, and must divide num_attention_heads, 3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and must be a whole number of 1 or more"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4', and must be a whole number"),
        ({"num_attention_heads": 6, "head_dim": None}, "num_attention_heads is 6, and must divide hidden_size, 128"),
        ({"head_dim": 31}, "head_dim is 31, and must be even"),
        ({"max_position_embeddings": 128.5}, "max_position_embeddings is 128.5, and must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, and must be a number above 0"),
        ({"rope_theta": "x"}, "rope_theta is 'x', and must be a number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', and must be a mapping"),
        ({"rope_scaling": {"type": "foo"}}, "rope_scaling is of type 'foo', and must be one of default, linear"),
        ({"rope_scaling": {"type": "linear", "factor": "a"}}, "rope_scaling.factor is 'a', and must be a number"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling {'rope_type': 'llama3'} has no factor, low_freq_"),
        ({"draft_vocab_size": 50}, "draft_vocab_size is 50 in config.json; give a draft with all 96 tokens"),
        ({"hidden_size": None, "vocab_size": None}, "config.json has no hidden_size, vocab_size"),
        ({"hidden_size": None, "model": {"vocab_size": 96}}, "has no hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' in config.json, and must be silu"),
        ({"truncated_vocab_size": 50}, "truncated_vocab_size is 50 in config.json"),
    ],
)
def test_configs_of_others_that_do_not_fit(home, target, tmp_path, capsys, values, message):
    foreign(target, tmp_path / "theirs", "sglang")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    arguments = [f"checkpoint={tmp_path}/theirs", f"out={tmp_path}/out"]
    assert "give target=PATH" in refusal(capsys, *arguments)
    assert message in refusal(capsys, *arguments, f"target={home}/target")


@pytest.mark.parametrize("layout", ["reference", "sglang"])
def test_damaged_files_of_others(home, target, tmp_path, capsys, layout):
    foreign(target, tmp_path / "theirs", layout)
    (path,) = [p for p in (tmp_path / "theirs").iterdir() if p.suffix in (".bin", ".safetensors")]
    path.write_bytes(path.read_bytes()[:1000])
    arguments = [f"checkpoint={tmp_path}/theirs", f"out={tmp_path}/out", f"target={home}/target"]
    assert "its weights cannot be read" in refusal(capsys, *arguments)


def test_a_pickle_that_is_more_than_tensors_is_not_run(home, target, tmp_path, capsys):
    foreign(target, tmp_path / "theirs", "reference")
    torch.save({"fc.weight": SimpleNamespace()}, tmp_path / "theirs" / "pytorch_model.bin")
    arguments = [f"checkpoint={tmp_path}/theirs", f"out={tmp_path}/out", f"target={home}/target"]
    assert "its weights cannot be read" in refusal(capsys, *arguments)


# --- the card and the hub


def results(home: Path, path: Path, **changes) -> Path:
    """A file as evals.quantisation writes it, with what a card reads."""
    scheme = {"tpc": 2.5, "acceptance_per_depth": [0.7, 0.5, 0.3]}
    values = {
        "draft_source": read_artifact(home / "eagle1").source,
        "schemes": {"none": scheme, "int4": scheme | {"tpc": 2.25}},
        "tree": "chain3",
        "temperature": 0.0,
        "prompts": 9,
        "config": {"questions": "some/where/questions.jsonl"},
    } | changes
    path.write_text(json.dumps(values))
    return path


def test_the_front_matter_names_the_licence_that_the_user_gives(home, tmp_path):
    out = exported(home, tmp_path / "out", "license=llama3.1")
    front = (out / "README.md").read_text().split("---\n")[1].splitlines()
    assert {"library_name: eagle_train", "license: llama3.1"} <= set(front)
    assert "Licence" not in (out / "README.md").read_text()
    again = tmp_path / "again"  # an export of an export keeps it
    assert call(export.main, f"checkpoint={out}", f"out={again}", "device=cpu") == 0
    assert "\nlicense: llama3.1\n" in (again / "README.md").read_text()
    unknown = (exported(home, tmp_path / "unknown") / "README.md").read_text()
    assert "\nlicense:" not in unknown
    assert "## Licence\n\nNot stated." in unknown


def test_the_card_tells_what_the_artifact_knows(home, tmp_path):
    measured = results(home, tmp_path / "results.json")
    out = exported(home, tmp_path / "out", "layout=vllm", "quant=int4", f"evaluations=[{measured}]")
    text = (out / "README.md").read_text()
    target, source = read_artifact(out).target, read_artifact(out).source
    for words in (
        f"weights' fingerprint {target.fingerprint}",
        f"fingerprint {source}",
        "3 layers, hidden size 128, vocabulary 96",
        '"rope_type": "llama3"',
        "layer 0 has no input norm; there is no final norm",
        "the feed-forward in INT4 in groups of 128, rounded to nearest; the rest bfloat16",
        "- steps: 7",
        "| not quantised | chain3 | 0 | 9 of questions.jsonl | 2.500 |",
        "| int4 | chain3 | 0 | 9 of questions.jsonl | 2.250 | 0.70 0.50 0.30 |",
        '"method": "eagle", "model": "/path/to/draft"',
    ):
        assert words in text
    sizes = {row.split(" | ")[0]: row.split(" | ")[1:] for row in text.splitlines() if row.count("|") == 4}
    bytes_of = sum(x.nbytes for x in load_file(out / "model.safetensors").values())
    assert sizes["| all"][1] == f"{bytes_of / 1e6:.3f} |"
    # what was measured stays known
    again = exported(tmp_path, tmp_path / "again", source="out")
    assert "| 2.250 |" in (again / "README.md").read_text()


@pytest.mark.parametrize(
    ("layout", "target", "hub_id", "command", "told"),
    [
        ("vllm", "me/target", None, "vllm serve me/target --speculative-config", ["/path/to/draft"]),
        (
            "vllm",
            "runs/target",
            None,
            "vllm serve /path/to/target --speculative",
            ["/path/to/draft", "/path/to/target"],
        ),
        ("vllm", "me/target", "me/draft", '"model": "me/draft"', []),
        ("vllm", "/models/target", "me/draft", "vllm serve /models/target --speculative", []),
        ("sglang", "me/target", "me/draft", "--speculative-draft-model-path me/draft", []),
        ("vllm", "/my models/target", None, "vllm serve '/my models/target' --speculative", ["/path/to/draft"]),
        ("trtllm", "me/target", "me/draft", "--model_dir /path/to/target", ["/path/to/draft", "/path/to/target"]),
        ("native", "me/target", "me/draft", "eagle-generate target=me/target draft=/path/to/draft", ["/path/to/draft"]),
    ],
)
def test_commands_of_a_card_run_in_any_directory(home, tmp_path, monkeypatch, layout, target, hub_id, command, told):
    """Of what a reader has to replace, it is said what it stands for."""
    (tmp_path / "runs" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    about = read_artifact(home / "eagle1")
    about = replace(about, layout=layout, target=replace(about.target, name=target))
    text = card(about, load_file(home / "eagle1" / "model.safetensors"), hub_id)
    assert command in text
    for place in ("/path/to/draft", "/path/to/target"):
        assert (f"`{place}` stands for " in text) == (place in told)


def test_what_an_engine_leaves_out_is_told(home, target, tmp_path, capsys):
    said = "serving engines begin the draft at the second token"
    out = exported(home, tmp_path / "out", "layout=vllm")
    assert f"note: {said}" in capsys.readouterr().out
    assert f"Note: {said}" in (out / "README.md").read_text()
    assert load_draft(out).config.first_token == "skip"  # as it is run
    exported(tmp_path, tmp_path / "back", source="out")
    assert f"note: {said}" in capsys.readouterr().out
    save_draft(tiny_draft(target, first_token="skip"), tmp_path / "skip", target.identity)
    for source, engine in ((home / "eagle1", "native"), (tmp_path / "skip", "vllm")):
        out = exported(source.parent, tmp_path / engine, f"layout={engine}", source=source.name)
        assert "note:" not in capsys.readouterr().out
        assert "Note:" not in (out / "README.md").read_text()


RESULTS = {
    "draft_source": "abcd",
    **{"quant": "none", "tree": "chain3", "temperature": 0.0, "prompts": 3, "config": {"questions": "q"}},
    **{"tpc": 2.5, "acceptance_per_depth": [0.5]},
}


def test_evaluations_of_this_draft(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    (found,) = read_evaluations([str(tmp_path / "results.json")], "abcd")
    assert (found["weights"], found["tpc"], found["questions"]) == ("none", 2.5, "q")


def test_what_a_row_of_a_card_does_not_show_is_noted(tmp_path):
    """A suite has no file of questions; what was measured otherwise than a row's columns say is told."""
    config = {"questions": None, "context_lengths": [256, 512], "engine": {"drafting": "multinomial"}, "min_p": 0.1}
    results = RESULTS | {"config": config, "suite": {"title": "MT-Bench", "thinking": False}, "lossy": True}
    results |= {"looping_answers": 0.25, "provenance": {"cpu": "EPYC", "gpu": "H100", "eagle-train": "0.1.0"}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (found,) = read_evaluations([str(tmp_path / "results.json")], "abcd")
    assert (found["questions"], found["hardware"]) == ("MT-Bench", "H100, eagle-train 0.1.0")
    assert found["notes"] == [
        "LOSSY: relaxed acceptance, answers need not be the target's own",
        "contexts of 256, 512 tokens",
        "thinking off",
        "multinomial drafts",
        "min p 0.1",
        "25 % of the answers end in a loop, which is easy to draft",
    ]
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    assert read_evaluations([str(tmp_path / "results.json")], "abcd")[0]["notes"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "give a results.json"),
        ("{}", "give a results.json"),
        ('{"draft_source": "0123"}', "measured another draft, with fingerprint 0123"),
        (
            '{"draft_source": "abcd", "tree": "chain3", "rows": [], "config": {}}',
            "give a results.json",
        ),  # of evals.latency
        (json.dumps(RESULTS | {"tpc": None}), "give a results.json"),
        (json.dumps(RESULTS | {"acceptance_per_depth": [0.5, None]}), "give a results.json"),
    ],
)
def test_evaluations_of_something_else(tmp_path, content, message):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_evaluations([str(tmp_path / "results.json")], "abcd")


class Hub:
    """Stands in for the hub; keeps what it was given."""

    repositories: dict[str, tuple[bool, dict[str, bytes]]] = {}  # noqa: RUF012
    error: Exception | None = None

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
        if self.error:
            raise self.error
        assert exist_ok
        self.repositories[name] = (private, {})
        return f"https://hub/{name}"

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        with pytest.raises(UserError, match="writes there"), one_writer(folder_path, beside(folder_path)):
            pass
        assert commit_message == "A draft for speculative decoding"  # whatever its kind
        self.repositories[repo_id][1].update(contents(Path(folder_path)))


def test_an_export_is_pushed(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub, "HfApi", Hub)
    out = exported(home, tmp_path / "out", "layout=vllm", "push_to=me/draft")
    assert Hub.repositories == {"me/draft": (True, contents(out))}
    assert '"model": "me/draft"' in (out / "README.md").read_text()
    assert "pushed to https://hub/me/draft" in capsys.readouterr().out
    monkeypatch.setattr(Hub, "error", OSError("401 Unauthorized"))
    assert call(export.main, f"checkpoint={home}/eagle1", f"out={tmp_path}/out", "push_to=me/draft") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"error: push_to=me/draft: 401 Unauthorized; the draft is in {tmp_path}/out"
    assert load_draft(out)


def test_a_draft_comes_from_the_hub(home, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: asked.append(name) or home / "eagle1")
    assert call(export.main, "checkpoint=me/draft", f"out={tmp_path}/out") == 0
    assert asked == ["me/draft"]

    def missing(name, allow_patterns):
        raise OSError("404 Client Error")

    monkeypatch.setattr(hub, "snapshot_download", missing)
    shutil.rmtree(tmp_path / "out")
    assert "checkpoint=me/draft: no such directory" in refusal(capsys, "checkpoint=me/draft", f"out={tmp_path}/out")
