"""What serving engines would make of a draft's directory: their loading rules, replayed on names, shapes and dtypes.

Each engine's rules are read from its own source, named with its version in the docstrings. A replay knows nothing of
values, kernels and devices, and only of names as Hugging Face's Llama has them. Shapes: H hidden size, N outputs,
K inputs.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Shape = tuple[int, ...]
Tensors = dict[str, tuple[Shape, torch.dtype]]
Config = dict[str, Any]

# The dimension along which a loader takes its part of a tensor, of one rank or more: what is beyond it is cut off.
CUT = {"QKVParallelLinear": 0, "MergedColumnParallelLinear": 0, "RowParallelLinear": 1}
NARROW = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn)


@dataclass
class Loaded:
    """What would happen. `parameters`: the engine's own names and shapes, fused as the engine fuses them.

    `filled` holds those that come whole from the file, `uninitialised` the others: raw memory, or what they were made
    with (ones for norms, the lowest number for FP8 scales). Of the file's names, `skipped` are dropped without an
    error, `spoiled` taken and cut, padded or cast to something else, without an error either. `errors` stop the engine.
    What the engine takes from the target (embedding, LM head) is no parameter here.
    """

    parameters: dict[str, Shape] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    uninitialised: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)  # of the layers, where the engine looks for them

    @property
    def whole(self) -> bool:
        return not (self.uninitialised or self.spoiled or self.errors)


@dataclass(frozen=True)
class Linear:
    """A linear module of the engine: `parts` are the file's last names and their N, fused along N; `kind` its class."""

    name: str
    kind: str
    parts: dict[str, int]
    inputs: int
    bias: bool = False


@dataclass(frozen=True)
class Slot:
    """Where one tensor of the file goes. `dtype` None: bf16, fp16 or fp32."""

    parameter: str
    shape: Shape
    dtype: torch.dtype | None = None
    cut: int | None = None


def replay(engine: str, config: Config, tensors: Tensors, target: Config) -> Loaded:
    """Load a draft's `config.json` and tensors beside a target with this `config.json`; engines: see ENGINES."""
    return ENGINES[engine](config, tensors, target)


def read(directory: Path) -> tuple[Config, Tensors]:
    """What `replay` takes, of a directory with config.json and model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text("utf-8"))
    return config, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def vllm(config: Config, tensors: Tensors, target: Config) -> Loaded:
    """vLLM 0.32, `method: eagle`.

    The class: transformers_utils/configs/eagle.py. EagleLlamaForCausalLM: models/llama_eagle.py; with every norm,
    EagleMistralForCausalLM: models/mistral_eagle.py and mistral.py. Names: AutoWeightsLoader in models/utils.py.
    """
    known = ("EagleLlamaForCausalLM", "EagleMistralForCausalLM")
    first, *_ = config.get("architectures") or [""]
    architecture = first if first.startswith("Eagle") else f"Eagle{first}"
    errors = mismatches(config, target)
    if architecture not in known:
        return Loaded(errors=[*errors, f"architectures={first}: {architecture} is none of {', '.join(known)}"])
    if "layer_types" in config:
        errors.append("layer_types: looked up as if the target's layers came before")
    full = architecture == known[1]
    attention_bias = bool(config.get("attention_bias") or config.get("bias"))
    modules = [
        Linear("model.fc", "RowParallelLinear" if full else "ReplicatedLinear", *fusion(config)),
        *linears(config, config.get("qkv_bias", attention_bias), attention_bias, bool(config.get("mlp_bias"))),
    ]
    offset = target["num_hidden_layers"]
    slots = norms(config, full)
    for module in modules:  # to its quantisation, the draft's first layer is the one after the target's last
        name = re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + offset}", module.name)
        slots |= slots_of(module, scheme(config, name, module.kind, same, lambda name: None))
    embedding = "model.embed_tokens.weight"
    if not full and "embed_tokens.weight" in tensors:  # kept, where it is not the target's
        slots[embedding] = Slot(embedding, (config["vocab_size"], config["hidden_size"]))

    def rename(name: str) -> str:
        is_prefixed = not full or name.startswith("layers.") or name == "norm.weight"  # Mistral's rules leave out fc
        return f"model.{name}" if is_prefixed else name

    def unknown(name: str) -> str | None:
        is_skipped = name.endswith(".bias") or "rotary_emb.inv_freq" in name or rename(name) == embedding
        return None if is_skipped else f"{name}: there is no module or parameter named {rename(name)}"

    loaded = load(slots, tensors, rename, unknown, errors)
    if full and not config.get("quantization_config"):  # the only case in which missing tensors are looked for
        loaded.errors += [f"{name}: not initialised" for name in sorted(loaded.uninitialised) if "norm" in name]
    return loaded


def sglang(config: Config, tensors: Tensors, target: Config) -> Loaded:
    """SGLang 0.5.23, `--speculative-algorithm EAGLE`: models/llama_eagle.py, llama.py (_legacy_load_weights).

    Its MistralForCausalLMEagle is of no use here: it makes a final norm and does not apply it.
    """
    errors = mismatches(config, target)
    if config.get("architectures") != ["LlamaForCausalLMEagle"]:
        return Loaded(errors=[*errors, f"architectures={config.get('architectures')}: must be LlamaForCausalLMEagle"])
    if config.get("tie_word_embeddings"):
        errors.append("tie_word_embeddings: the embedding and the LM head are each replaced, and would be one")
    positions = (config["max_position_embeddings"], target["max_position_embeddings"])
    if positions[0] < positions[1]:
        errors.append(f"max_position_embeddings={positions[0]}: fewer than the target's {positions[1]}")
    attention_bias = bool(config.get("attention_bias") or config.get("bias"))
    slots = norms(config, full=False) | slots_of(Linear("model.fc", "Linear", *fusion(config), bias=True), None)

    def ignored(name: str, pattern: str) -> bool:
        return same(name, pattern) or (not pattern.startswith("re:") and name.endswith(f".{pattern}"))

    def unmatched(name: str) -> None:
        errors.append(f"quantization_config: {name} is in no targets, and not ignored")

    for module in linears(config, attention_bias, attention_bias, False):
        slots |= slots_of(module, scheme(config, module.name, module.kind, ignored, unmatched))

    return load(slots, tensors, lambda name: f"model.{name}", lambda name: None, errors)


def trtllm(config: Config, tensors: Tensors, target: Config) -> Loaded:
    """TensorRT-LLM 1.2, the TensorRT engine's EAGLE-1: models/eagle/model.py, llama/model.py, model_weights_loader.py.

    Its PyTorch backend loads EAGLE-3 only. A `quantization_config` is not read. Parameters are one drafter's, by the
    names they have in the file.
    """
    errors = mismatches(config, target)
    if target.get("tie_word_embeddings"):
        errors.append("the target's file has no lm_head.weight of its own")
    slots = norms(config, full=False) | slots_of(Linear("model.fc", "Linear", *fusion(config), bias=True), None)
    for module in linears(config, False, False, False):
        slots |= slots_of(module, None)
    embedding = "model.embed_tokens.weight"
    slots[embedding] = Slot(embedding, (target["vocab_size"], config["hidden_size"]))
    # q, k and v are one there, and nothing else
    slots = {name: Slot(name if ".mlp." in name else slot.parameter, slot.shape) for name, slot in slots.items()}
    loaded = load(slots, tensors, lambda name: f"model.{name}", lambda name: None, errors, is_padded)
    loaded.errors += [f"{name}: missing" for name in sorted(loaded.uninitialised)]
    return loaded


def vllm_eagle3(config: Config, tensors: Tensors, target: Config, is_parallel: bool = False) -> Loaded:
    """vLLM 0.33, `method: eagle3`, and a directory in the format of speculators.

    Eagle3LlamaForCausalLM: models/llama_eagle3.py; configs/speculators/base.py and algos.py (update_eagle3).
    """
    config, errors = speculators_as_vllm(config) if "speculators_config" in config else (config, [])
    known = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "PeagleLlamaForCausalLM")
    errors += mismatches(config, target)
    if (config.get("architectures") or [""])[0] not in known:
        return Loaded(errors=[*errors, f"architectures={config.get('architectures')}: none of {', '.join(known)}"])
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    errors += seen_layers(ids or default_layers(target), config, target, first=0)
    modules = [Linear("model.fc", "ReplicatedLinear", *fused(config)), *eagle3_linears(config)]
    slots, offset = eagle3_norms(config), target["num_hidden_layers"]
    for module in modules:
        # The name that q, k and v of each layer were made with lacks `self_attn`; the feed-forward's is whole.
        name = re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + offset}", module.name)
        name = name.replace(".self_attn.qkv_proj", ".qkv_proj")
        slots |= slots_of(module, scheme(config, name, module.kind, same, lambda name: None))
    whole = target["vocab_size"]
    mapped = config.get("draft_vocab_size", whole) != whole  # else vLLM has no place for a map
    slots |= vocabulary_slots(config, "draft_id_to_target_id" if mapped else None)
    masked: Tensors = {}
    if is_parallel:
        tensors, masked = parallel_drafting(config, tensors, errors)
        slots["mask_hidden"] = Slot("mask_hidden", (1, modules[0].inputs))
        tensors |= masked

    def rename(name: str) -> str:
        if "d2t" in name:
            return "draft_id_to_target_id"
        return name if "lm_head" in name or name in masked else "model." + name.replace("midlayer.", "layers.0.")

    def unknown(name: str) -> str | None:
        return None if "t2d" in name else f"{name}: KeyError"

    loaded = load(slots, tensors, rename, unknown, errors)
    loaded.windows = windows(config, loaded.errors)
    return loaded


def windows(config: Config, errors: list[str]) -> list[int | None]:
    """By layer, from models/llama.py: EAGLE-3's class says how many of the target's layers come before."""
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if not types:
        return [None] * count
    errors += ["layer_types: out of bounds"] if len(types) < count else []
    return [config["sliding_window"] if each == "sliding_attention" else None for each in types[:count]]


def vllm_peagle(config: Config, tensors: Tensors, target: Config) -> Loaded:
    """The same with `parallel_drafting`, which a directory of speculators' peagle turns on by itself: update_peagle of
    algos.py, and _init_parallel_drafting_params of v1/spec_decode/llm_base_proposer.py."""
    return vllm_eagle3(config, tensors, target, is_parallel=True)


def parallel_drafting(config: Config, tensors: Tensors, errors: list[str]) -> tuple[Tensors, Tensors]:
    """The tensors without `mask_hidden`, and it as a row, which it is made on being loaded."""
    if "pard_token" not in config and "ptd_token_id" not in config:
        errors.append("the draft model config must have `pard_token`")
    found = {name: value for name, value in tensors.items() if "mask_hidden" in name}
    if not found:
        errors.append("mask_hidden not found in weights")
    rows = {name: ((1, math.prod(shape)), dtype) for name, (shape, dtype) in found.items()}
    return {name: value for name, value in tensors.items() if name not in found}, rows


def speculators_as_vllm(config: Config) -> tuple[Config, list[str]]:
    """What vLLM makes of a config.json in the format of speculators, and what it refuses in it."""
    try:
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        config["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, IndexError):
        return config, ["Invalid speculators config structure"]
    kind = config.get("speculators_model_type")
    if kind not in ("eagle3", "peagle") or "transformer_layer_config" not in config:
        return config, ["no speculators-format model"]
    layers = dict(config["transformer_layer_config"])
    if kind == "peagle":
        layers |= {name: config[name] for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
        layers |= {name: config.get(name, False) for name in ("norm_before_residual", "norm_before_fc")}
        return layers | {"architectures": ["PeagleLlamaForCausalLM"], "pard_token": config["mask_token_id"]}, []
    layers["draft_vocab_size"] = config.get("draft_vocab_size")
    layers["norm_before_residual"] = config.get("norm_before_residual", True)
    layers |= {name: config.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    layers["architectures"] = ["Eagle3LlamaForCausalLM"]
    for name in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        layers |= {name: config[name]} if config.get(name) else {}
    return layers, []


def sglang_eagle3(config: Config, tensors: Tensors, target: Config) -> Loaded:
    """SGLang 0.5.23, `--speculative-algorithm EAGLE3`: models/llama_eagle3.py."""
    errors = mismatches(config, target)
    if config.get("architectures") != ["LlamaForCausalLMEagle3"]:
        return Loaded(errors=[*errors, f"architectures={config.get('architectures')}: must be LlamaForCausalLMEagle3"])
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    errors += seen_layers([each + 1 for each in ids or []] or default_layers(target), config, target, first=1)
    if config.get("norm_before_residual"):
        errors.append("norm_before_residual: not read, computed without")
    if len(ids or [0] * 3) == 1:
        errors.append("fc is left out: its inputs are as wide as the embedding")
    slots = eagle3_norms(config)
    slots |= slots_of(Linear("model.fc", "Linear", *fused(config), bias=bool(config.get("bias"))), None)
    for module in eagle3_linears(config):  # names in its quantisation lack the layer: prefixes are the model's own
        name = re.sub(r"layers\.\d+\.(self_attn\.)?", "", module.name)
        name = name.replace("model.o_proj", "model.self_attn.o_proj").replace("mlp.", "")
        slots |= slots_of(module, scheme(config, name, module.kind, same, lambda name: errors.append(name)))
    slots |= vocabulary_slots(config, "hot_token_id" if "d2t" in tensors else None)

    def rename(name: str) -> str:
        if "d2t" in name:
            return "hot_token_id"
        return name if name == "lm_head.weight" else "model." + name.replace("midlayer", "layers.0")

    return load(slots, tensors, rename, lambda name: None, errors)


def default_layers(target: Config) -> list[int]:
    layers = target["num_hidden_layers"]
    return [2, layers // 2, layers - 3]


def seen_layers(ids: list[int], config: Config, target: Config, first: int) -> list[str]:
    """What is wrong with the layers before which states are kept: each is kept once, in the layers' order."""
    seen = [each for each in range(first, target["num_hidden_layers"]) if each in ids]
    wanted = config.get("num_aux_hidden_states", 3)
    return [] if seen == ids and len(seen) == wanted else [f"layer ids {ids}: {len(seen)} states, and {wanted} wanted"]


def fused(config: Config) -> tuple[dict[str, int], int]:
    """The parts and inputs of EAGLE-3's `fc`."""
    width = config.get("target_hidden_size") or config["hidden_size"]
    return {"fc": config["hidden_size"]}, config.get("num_aux_hidden_states", 3) * width


def eagle3_linears(config: Config) -> Iterator[Linear]:
    """As `linears`; layer 0's queries, keys and values read embedding and hidden state."""
    for module in linears(config, False, False, False):
        is_first = module.name == "model.layers.0.self_attn.qkv_proj"
        yield replace(module, inputs=2 * config["hidden_size"]) if is_first else module


def eagle3_norms(config: Config) -> dict[str, Slot]:
    """Of vLLM and SGLang, which make both of a layer's input norms in every layer."""
    width, layers = config["hidden_size"], range(config["num_hidden_layers"])
    kinds = ("post_attention_layernorm", "input_layernorm", "hidden_norm")
    names = [f"model.layers.{layer}.{kind}.weight" for layer in layers for kind in kinds]
    found = {name: Slot(name, (width,)) for name in [*names, "model.norm.weight"]}
    if config.get("fc_norm"):
        numbers = range(config.get("num_aux_hidden_states", 3))
        found |= {f"model.fc_norm.{i}.weight": Slot(f"model.fc_norm.{i}.weight", (width,)) for i in numbers}
    inner = config.get("eagle_config") or {}
    if inner.get("norm_before_fc", config.get("norm_before_fc")):  # applied first, then each part's own
        found["model.input_norm.weight"] = Slot("model.input_norm.weight", (fused(config)[1],))
    return found


def vocabulary_slots(config: Config, offsets: str | None) -> dict[str, Slot]:
    """Of the LM head, and of the draft's tokens where the file has them."""
    size = config.get("draft_vocab_size") or config["vocab_size"]
    found = {"lm_head.weight": Slot("lm_head.weight", (size, config["hidden_size"]))}
    return found | ({offsets: Slot(offsets, (size,), torch.int64)} if offsets else {})


ENGINES: dict[str, Callable[[Config, Tensors, Config], Loaded]] = {
    "vllm": vllm,
    "sglang": sglang,
    "trtllm": trtllm,
    "vllm-eagle3": vllm_eagle3,
    "vllm-peagle": vllm_peagle,
    "sglang-eagle3": sglang_eagle3,
}


def mismatches(config: Config, target: Config) -> list[str]:
    """What runs on no engine, or as something else than a draft for this target."""
    wanted = {"model_type": "llama", "hidden_act": "silu"}
    wanted |= {name: target[name] for name in ("hidden_size", "vocab_size")}
    found = {"hidden_act": "silu"} | config
    if config.get("quantization_config") is not None:
        wanted["quant_method"] = "compressed-tensors"
        found["quant_method"] = config["quantization_config"].get("quant_method")
    return [f"{name}={found.get(name)}: must be {value}" for name, value in wanted.items() if found.get(name) != value]


def fusion(config: Config) -> tuple[dict[str, int], int]:
    """The parts and inputs of `fc`."""
    return {"fc": config["hidden_size"]}, 2 * config["hidden_size"]


def linears(config: Config, qkv_bias: bool, attention_bias: bool, mlp_bias: bool) -> Iterator[Linear]:
    """The layers' linear modules, fused as vLLM and SGLang both fuse them: models/llama.py of either."""
    width, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    head_dim = config.get("head_dim") or width // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        yield Linear(f"{attention}.qkv_proj", "QKVParallelLinear", parts, width, qkv_bias)
        yield Linear(f"{attention}.o_proj", "RowParallelLinear", {"o_proj": width}, queries, attention_bias)
        parts = {"gate_proj": inner, "up_proj": inner}
        yield Linear(f"{mlp}.gate_up_proj", "MergedColumnParallelLinear", parts, width, mlp_bias)
        yield Linear(f"{mlp}.down_proj", "RowParallelLinear", {"down_proj": width}, inner, mlp_bias)


def norms(config: Config, full: bool) -> dict[str, Slot]:
    """The norms: all of them, or none before layer 0 and none at the end."""
    layers = range(config["num_hidden_layers"])
    names = [f"model.layers.{layer}.post_attention_layernorm.weight" for layer in layers]
    names += [f"model.layers.{layer}.input_layernorm.weight" for layer in layers if full or layer > 0]
    names += ["model.norm.weight"] if full else []
    return {name: Slot(name, (config["hidden_size"],)) for name in names}


def slots_of(module: Linear, group: Config | None) -> dict[str, Slot]:
    """The file's names for a linear module, plain or quantised as this group of a quantization_config says.

    INT4: compressed_tensors_wNa16.py; FP8, a scale a row: compressed_tensors_w8a8_fp8.py; of both engines alike.
    """
    slots, cut = {}, CUT.get(module.kind)
    for part, outputs in module.parts.items():
        above = module.name.rpartition(".")[0]
        for leaf, shape, dtype in leaves(outputs, module.inputs, group):
            along = cut if leaf != "weight_shape" and not (cut == 1 and shape[1] == 1) else None
            slots[f"{above}.{part}.{leaf}"] = Slot(f"{module.name}.{leaf}", shape, dtype, along)
        if module.bias:
            slots[f"{above}.{part}.bias"] = Slot(f"{module.name}.bias", (outputs,))
    return slots


def leaves(outputs: int, inputs: int, group: Config | None) -> list[tuple[str, Shape, torch.dtype | None]]:
    if group is None:
        return [("weight", (outputs, inputs), None)]
    weights = group["weights"]
    if weights["type"] == "int":
        columns = inputs // (weights["group_size"] if weights["strategy"] == "group" else inputs)
        return [
            ("weight_packed", (outputs, math.ceil(inputs * weights["num_bits"] / 32)), torch.int32),
            ("weight_scale", (outputs, columns), None),
            ("weight_shape", (2,), torch.int64),
        ]
    return [("weight", (outputs, inputs), torch.float8_e4m3fn), ("weight_scale", (outputs, 1), torch.float32)]


def scheme(
    config: Config,
    name: str,
    kind: str,
    ignored: Callable[[str, str], bool],
    unmatched: Callable[[str], None],
) -> Config | None:
    """The group of the draft's quantization_config that a module of this name and class is in, None where it is plain.

    compressed_tensors.py and utils.py of vLLM and SGLang. Neither tells the draft's configuration what its fused
    modules are made of, so that q_proj or gate_proj, written out, name nothing.
    """
    quantisation = config.get("quantization_config")
    if quantisation is None or any(ignored(name, pattern) for pattern in quantisation.get("ignore", [])):
        return None
    groups = [(target, group) for group in quantisation["config_groups"].values() for target in group["targets"]]
    by_name = (group for target, group in groups if same(name, target))
    by_kind = (group for target, group in groups if same(kind, target) or is_within(target, kind))
    group = next(by_name, None) or next(by_kind, None)
    if group is None:
        unmatched(name)
        return None
    weights, activations = group["weights"], group.get("input_activations")
    form = group.get("format") or quantisation["format"]
    packed = form == "pack-quantized" and weights["type"] == "int" and weights["strategy"] in ("group", "channel")
    rows = form == "float-quantized" and weights["type"] == "float" and weights["strategy"] == "channel"
    dynamic = activations is not None and activations.get("dynamic")
    assert (packed and activations is None) or (rows and dynamic), f"{name}: no scheme of eagle-export: {group}"
    return group


def same(name: str, pattern: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else name == pattern


def is_within(target: str, kind: str) -> bool:
    return not target.startswith("re:") and target.lower() in kind.lower()


def is_cut(shape: Shape, slot: Slot) -> bool:
    """Whether a larger tensor is taken in part: parameter.py and linear.py of vLLM and SGLang narrow it."""
    if slot.cut is None or len(shape) != len(slot.shape) or shape[slot.cut] < slot.shape[slot.cut]:
        return False
    return all(has == wants for d, (has, wants) in enumerate(zip(shape, slot.shape, strict=True)) if d != slot.cut)


def is_padded(shape: Shape, slot: Slot) -> bool:
    """Whether a smaller tensor is filled up with zeros: `fill` of TensorRT-LLM's model_weights_loader.py."""
    return len(shape) == len(slot.shape) and all(has <= wants for has, wants in zip(shape, slot.shape, strict=True))


def load(
    slots: dict[str, Slot],
    tensors: Tensors,
    rename: Callable[[str], str],
    unknown: Callable[[str], str | None],
    errors: list[str],
    is_taken: Callable[[Shape, Slot], bool] = is_cut,
) -> Loaded:
    """Put each tensor into its slot.

    `unknown` gives the error for a name that has no slot, or None where it is skipped; `is_taken` tells whether a
    tensor that does not fit its slot goes in nevertheless.
    """
    loaded, given = Loaded(errors=list(errors)), set()
    for name, (shape, dtype) in tensors.items():
        slot = slots.get(rename(name))
        if slot is None:
            error = unknown(name)
            loaded.errors += [error] if error else []
            loaded.skipped |= set() if error else {name}
            continue
        given.add(rename(name))
        if shape != slot.shape and not is_taken(shape, slot):
            loaded.errors.append(f"{name}: {shape} does not fit {slot.shape}")
        elif shape != slot.shape or not is_kept(dtype, slot.dtype):
            loaded.spoiled.add(name)
    for name, slot in slots.items():
        fused = loaded.parameters.get(slot.parameter)
        is_one = fused is None or slot.dtype == torch.int64  # all parts of a module share one weight_shape
        loaded.parameters[slot.parameter] = slot.shape if is_one else (fused[0] + slot.shape[0], *slot.shape[1:])
        if name not in given:
            loaded.uninitialised.add(slot.parameter)
    loaded.filled = set(loaded.parameters) - loaded.uninitialised
    return loaded


def is_kept(dtype: torch.dtype, wanted: torch.dtype | None) -> bool:
    """Whether a copy keeps what the numbers mean; every engine's copy casts, and says nothing."""
    return dtype == wanted if wanted is not None else dtype not in NARROW
