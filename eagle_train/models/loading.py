"""Loading a target: its checkpoint straight to where each weight belongs, on one device, over ranks, or offloaded.

What cannot be loaded so is refused before a weight is read, as far as the checkpoint's config tells. DESIGN 3.4.
"""

import atexit
import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import get_max_memory
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.errors import UserError, check, foreign, one_line, shown
from eagle_train.hardware import computes_fp8, low_precision, resolve_device, warn_of_emulation
from eagle_train.models.checkpoint_quantisation import check_quantization_config, quantization_config_of
from eagle_train.models.config_json import check_generation, check_values, misfit
from eagle_train.models.directory import check_directory, folder_of, read_mapping, weight_files
from eagle_train.models.family import auto_class, check_family, skeleton
from eagle_train.models.head import head_of
from eagle_train.models.shapes import heads_of
from eagle_train.models.state_files import HEADER, read_header
from eagle_train.models.stored import check_stored
from eagle_train.models.target import Target
from eagle_train.settings import bundled


@dataclass
class TargetConfig:
    """Which target, and how it is loaded. `dtype`: float32, bfloat16 or auto: bf16 on a GPU that computes in
    it, and to train also on a CPU that does, else fp32.

    `chat_template`: a file with a template in the place of the tokenizer's own. `template_kwargs`: that template's own
    variables, for prompts that are asked of it (training data have `data.template_kwargs`).

    `cached`: `path` is a directory of eagle-cache, which holds the target's hidden states in the place of its layers.

    `offload`: layers that do not fit on the device, or into `device_gib` of it, wait in the host's memory and, where
    that is full, on the disk; Accelerate fetches each when its turn comes.
    """

    path: str  # a directory, or a hub id (USER/NAME)
    dtype: str = "auto"  # auto | float32 | bfloat16. auto: bf16 where the hardware has it, but fp32 to decode on a CPU
    trust_remote_code: bool = False  # true: run the Python code that comes with the target
    chat_template: str | None = None  # a file with the chat template that is served, if not the tokenizer's own
    template_kwargs: dict[str, Any] | None = None  # the template's variables, for prompts
    cached: bool = False  # true: path is what eagle-cache wrote, hidden states in the place of layers; for eagle-train
    offload: bool = False  # true: layers that do not fit on the device wait in the host's memory, then on disk
    device_gib: float | None = None  # of the device, for the target, with offload; null: all that is free

    def __post_init__(self) -> None:
        check(bool(self.path), "target.path is empty: give a directory or a hub id")
        self.path = bundled(os.path.expanduser(self.path))
        check(self.dtype in DTYPES, f"target.dtype={self.dtype}: must be one of {', '.join(DTYPES)}")
        check(not (self.cached and self.offload), "target.offload=true: target=cached has no layers; leave it out")
        gib = self.device_gib
        check(gib is None or gib > 0, f"target.device_gib={gib}: must be null or above 0")
        check(gib is None or self.offload, f"target.device_gib={gib}: needs target.offload=true")


OWN_CODE = "; give target.trust_remote_code=true if you trust it"
DRAFT = "eagle_train"  # a key that the config.json of our drafts has
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENIZERS = ("tokenizer*", "tekken.json", "*.model", "*.tiktoken", "vocab.*")
PLACEMENTS = ("replicated", "fsdp2", "tensor")

Reads = Callable[[TargetConfig, Any, int], None]
"""reads(config, tokenizer, number of embeddings): see `load_target`."""


def load_config(config: TargetConfig) -> Any:
    """The target's Hugging Face config. Raises UserError where there is none."""
    path, place = Path(config.path), f"target.path={config.path}"
    if config.cached:
        read_header(path, place)
    is_name = not path.is_absolute() and not config.path.startswith(".") and len(path.parts) == 2
    check(path.exists() or is_name, f"{place}: no such directory; give one, or a hub id (USER/NAME)")
    if path.exists():
        check_directory(path, place)
        is_cache = (path / HEADER).is_file()
        check(
            config.cached or not is_cache,
            f"{place}: a cache of hidden states, without the target's layers; give the target, or to train from it "
            "target=cached",
        )
    else:
        with foreign(f"{place}: no such directory, and no hub id"):
            validate_repo_id(config.path)
    folder = folder_of(config.path)
    if not path.exists() and constants.HF_HUB_OFFLINE:
        check(
            folder is not None,
            f"{place}: no such directory, not in the hub's cache ({constants.HF_HUB_CACHE}), and with "
            "HF_HUB_OFFLINE=1 it is not downloaded",
        )
        assert folder is not None
        check_directory(folder, place)
    values, generation = (_read_if_there(folder, name, place) for name in ("config.json", "generation_config.json"))
    hint = OWN_CODE if values and "auto_map" in values and not config.trust_remote_code else ""
    if values is not None:
        check_values(values, hint, place)
    if generation is not None:
        check_generation(generation, place)
    try:
        found = AutoConfig.from_pretrained(
            config.path,
            trust_remote_code=config.trust_remote_code,
            attn_implementation="eager",  # attention is ours, whatever a config.json says
        )
    except StrictDataclassError as error:  # which says where, and its cause what
        raise UserError(f"{place}: config.json: {misfit(one_line(error.__cause__))}") from error
    except Exception as error:  # what a config's own class raises for values that it does not expect
        kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"config.json: {type(error).__name__}: "
        raise UserError(f"{place}: {kind}{one_line(error)}{hint}") from error
    check(not hasattr(found, DRAFT), f"{place}: a draft that eagle-export wrote; give the target that it was made for")
    return found


def _read_if_there(folder: Path | None, name: str, place: str) -> dict[str, Any] | None:
    """What a checkpoint's JSON file holds; None where it is not there, or of a name on the hub not fetched yet."""
    return None if folder is None or not (folder / name).is_file() else read_mapping(folder / name, place)


def check_target(config: TargetConfig, hf_config: Any, device: torch.device | None = None) -> None:
    """Raise UserError, before a weight is read, for a family that cannot be a target (see `check_family`), a
    quantisation that cannot be read (`check_quantization_config`), and files that do not hold its weights
    (`check_stored`).

    `device`: where it is to run; None in a plan."""
    place = f"target.path={config.path}"
    check_quantization_config(hf_config, place, device)
    model = skeleton(hf_config, config.trust_remote_code, place)
    check_family(type(model), model.config, place)
    folder = folder_of(config.path)
    # Of the hub's cache, some may yet have to be fetched.
    if folder is not None and all(file.exists() for file in weight_files(folder, place)):
        check_stored(folder, model, quantization_config_of(hf_config) is not None, place)


def check_placement(
    config: TargetConfig, hf_config: Any, placement: str, shard_size: int, computes_fp8: bool = True
) -> None:
    """Raise UserError for a target that cannot be loaded so, whole or divided over `shard_size` ranks: what its config
    alone tells, before a weight is read. `computes_fp8`: whether the device does."""
    check(not config.offload or placement == "replicated", f"target.offload=true: not with parallel.target={placement}")
    text, quantised = hf_config.get_text_config(), quantization_config_of(hf_config)
    for heads in {heads_of(text, layer).keys for layer in range(text.num_hidden_layers)}:
        check(
            placement != "tensor" or heads % shard_size == 0,
            f"parallel.target=tensor: {heads} key/value heads cannot be divided between {shard_size} processes",
        )
    if quantised and placement != "replicated":
        check(
            quantised.get("quant_method", "bitsandbytes") != "bitsandbytes",  # whose configs may leave it out
            f"parallel.target={placement}: bitsandbytes' weights cannot be divided; use parallel.target=replicated, or "
            "a checkpoint in FP8",
        )
        if quantised.get("weight_block_size") and (placement == "tensor" or not computes_fp8):
            _check_blocks(config, hf_config, placement, shard_size)


BLOCK_DIMS = {"colwise": -2, "rowwise": -1, "packed_colwise": -2, "packed_rowwise": -1}  # divided by a plan's entry


def _check_blocks(config: TargetConfig, hf_config: Any, placement: str, shard_size: int) -> None:
    """Raise UserError unless each rank gets whole FP8 blocks of every weight.

    transformers divides weights and their blocks' scales each for itself, and gives numbers the scales of others where
    a block is cut. FSDP2 puts blocks together again before they are used, unless a rank makes numbers of its part.
    """
    model = skeleton(hf_config, config.trust_remote_code, f"target.path={config.path}")
    quantised = quantization_config_of(hf_config)
    block, unquantised = quantised["weight_block_size"], quantised.get("modules_to_not_convert")
    head = head_of(model)
    linears = {name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and each is not head}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if placement == "tensor":
            entry = model.tp_plan.get(re.sub(r"\.\d+\.", ".*.", module))
        else:  # rows, and of a stack of experts whole ones
            entry = "colwise" if module in linears else None
        if entry not in BLOCK_DIMS or not should_convert_module(module, unquantised):
            continue
        dim = BLOCK_DIMS[entry]
        size = weight.shape[dim] // (2 if entry.startswith("packed") else 1)
        check(
            size % (shard_size * block[dim]) == 0,
            f"parallel.target={placement}: {size} of {name} must be a multiple of {shard_size} processes * FP8 blocks "
            f"of {block[dim]} = {shard_size * block[dim]}; use fewer processes, or parallel.target=replicated",
        )


def load_target(
    config: TargetConfig,
    device: torch.device | str = "auto",
    placement: str = "replicated",
    world: World = ALONE,
    reads: Reads | None = None,
) -> Target:
    """The target and its tokenizer, whole or this rank's part. Raises UserError for a checkpoint that is not whole.

    `device`: where its weights are; `auto`: the GPU if there is one. `reads`: raises UserError, before a weight is
    read, where what will be asked of the target cannot be.
    """
    check(
        not config.cached,
        f"target=cached: {config.path} holds hidden states for eagle-train, and no layers to run; give the target",
    )
    device = torch.device(resolve_device("auto") if device == "auto" else device)
    hf_config = load_config(config)
    check_target(config, hf_config, device)
    check_placement(config, hf_config, placement, world.shard_size, computes_fp8(device))
    path, place = Path(config.path), f"target.path={config.path}"
    has_weights = not path.is_dir() or bool(weight_files(path, place))
    check(has_weights, f"{place}: no model.safetensors there, nor its index; enough for a plan, not for more")
    tokenizer = load_tokenizer(config)
    if reads is not None:
        reads(config, tokenizer, hf_config.get_text_config().vocab_size)
    dtype = DTYPES[config.dtype] or default_dtype(device)
    warn_of_emulation("target.dtype", dtype, device)
    auto = auto_class(hf_config, f"target.path={config.path}")
    try:
        model, report = auto.from_pretrained(
            config.path,
            config=hf_config,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=config.trust_remote_code,
            **placement_options(config, device, placement, world),
        )
    except Exception as error:  # of transformers, safetensors, pickle, and the library of a quantisation
        raise UserError(f"target.path={config.path}: {_loading_error(error)}{one_line(error)}") from error
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    check(
        not missing,
        f"target.path={config.path}: {len(missing)} weights are missing or of the wrong shape, {missing[:1]} first; "
        "give a complete checkpoint",
    )
    together = together_of(model, placement, world)
    try:
        return Target(model, tokenizer, config.path, together, config.template_kwargs)
    except ImportError as error:  # transformers looks for kernels when a model first runs
        raise UserError(f"target.path={config.path}: {one_line(error)}") from error


def _loading_error(error: Exception) -> str:
    """What begins a message about weights that could not be loaded, by what transformers or another library raised."""
    if isinstance(error, OSError | ValueError | ImportError | SafetensorError):  # which say it themselves
        return ""
    reasons = {"conversion": "a weight cannot be converted: ", "mismatched_sizes": "a weight has the wrong shape: "}
    known = next((reason for part, reason in reasons.items() if part in str(error)), None)
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    return known or f"its weights cannot be loaded: {kind}"


def placement_options(config: TargetConfig, device: torch.device, placement: str, world: World) -> dict[str, Any]:
    """What tells transformers to load each weight straight to where it belongs: if they are divided, each rank's part
    and nothing else. Raises UserError."""
    if placement == "replicated":
        return placed(config, device)
    sizes: dict[str, Any] = {"tp_size" if placement == "tensor" else "fsdp_size": world.shard_size}
    if world.shard_size < world.size:
        sizes["dp_replicate_size"] = world.size // world.shard_size
    check(
        world.shard_size == world.size or can_copy(),
        f"parallel.target_shard_size={world.shard_size}: transformers {transformers.__version__} divides a target over "
        f"all {world.size} processes only; leave parallel.target_shard_size out, or install 5.23 or newer",
    )
    return {"distributed_config": DistributedConfig(**sizes)}


def can_copy() -> bool:
    """Whether transformers can divide a target over a part of the ranks, and have others hold copies."""
    return "dp_replicate_size" in {field.name for field in fields(DistributedConfig)}


def placed(config: TargetConfig, device: torch.device) -> dict[str, Any]:
    """What tells transformers to load each weight straight to where it belongs."""
    own: str | int = "cpu"
    if device.type != "cpu":
        own = device.index if device.index is not None else torch.cuda.current_device()
    if not config.offload:
        return {"device_map": {"": own}}
    room = {place: size for place, size in get_max_memory().items() if place in (own, "cpu")}
    if config.device_gib is not None:
        room[own] = round(config.device_gib * 2**30)
    folder = tempfile.mkdtemp(prefix="eagle_train-offload-")  # for weights that are not in the checkpoint as they are
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": "auto", "max_memory": room, "offload_folder": folder}


def together_of(model: PreTrainedModel, placement: str, world: World) -> Any:
    """The process group of the ranks that compute a loaded model's forwards together; None for one alone. Raises
    UserError as `check_divided`."""
    if placement == "tensor":
        check_divided(model, world.shard_size)
    if placement != "tensor" or world.shard_size == 1:
        return None
    assert world.shard_mesh is not None, "ranks that hold a target together have a mesh"
    return world.shard_mesh["shard"].get_group()


def check_divided(model: PreTrainedModel, shard_size: int) -> None:
    """Raise UserError unless the family's tensor-parallel plan divides at least half of the weights."""
    parameters = list(model.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    own = sum(x.to_local().numel() if isinstance(x, DTensor) else x.numel() for x in parameters)
    check(
        own <= size * (1 + 1 / shard_size) / 2,
        f"parallel.target=tensor: the plan of {model.config.model_type} leaves {own / size:.0%} of the weights on each "
        f"of {shard_size} ranks; use parallel.target=fsdp2",
    )


def default_dtype(device: torch.device | str) -> torch.dtype:
    """`auto` as inference means it: on a CPU fp32, whose few rows are bound by memory and are packed besides."""
    return torch.float32 if torch.device(device).type == "cpu" else low_precision(device)


def training_dtype(config: TargetConfig, device: torch.device | str, world: World = ALONE) -> TargetConfig:
    """`auto` as training means it: bf16 where the device is made for it, else fp32.

    All ranks call it. Raises CommonError where their devices are made for different ones: ranks would add gradients of
    different precision, and hold parts of one target in two.
    """
    if config.dtype != "auto":
        return config
    own = str(low_precision(device)).removeprefix("torch.")
    hosts = dict(world.exchange((own, socket.gethostname())))
    told = ", ".join(f"{name} on {host}" for name, host in sorted(hosts.items()))
    problem = f"target.dtype=auto: {told}, by what their hardware computes in; give target.dtype=float32"
    check(len(hosts) == 1, f"{problem}, which all do, or take nodes of one kind", CommonError)
    return replace(config, dtype=own)


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer, with the chat template that is asked for, or None where a local directory has none."""
    directory = Path(config.path)
    if directory.is_dir() and not any(any(directory.glob(pattern)) for pattern in TOKENIZERS):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the tokenizers library knows nothing more special
        file, place = directory / "tokenizer.json", f"target.path={config.path}"
        if file.is_file():
            read_mapping(file, place)
        hint = "" if config.trust_remote_code or "trust_remote_code" not in str(error) else OWN_CODE
        lack = "" if file.is_file() or not directory.is_dir() else " (there is no tokenizer.json)"
        raise UserError(f"{place}: its tokenizer cannot be read{lack}: {one_line(error)}{hint}") from error
    processors = directory / "chat_template.json"  # where older multimodal checkpoints have it
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(config.chat_template), "target.chat_template")
    elif tokenizer.chat_template is None and processors.is_file():
        tokenizer.chat_template = _read_template(processors, "target.path")
    found = tokenizer.chat_template
    check(
        found is None or isinstance(found, str | dict),
        f"target.path={config.path}: its tokenizer has chat_template={shown(found)}; it must be a text",
    )
    return tokenizer


def _read_template(file: Path, field: str) -> str:
    """A chat template's text: the file itself, or its key chat_template where it is JSON. Raises UserError."""
    try:
        text = file.expanduser().read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{field}={file}: cannot be read: {one_line(error)}") from error
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not JSON: a template may begin as JSON does
        text = json.loads(text)["chat_template"]
    check(isinstance(text, str) and text.strip() != "", f"{field}={file}: holds no chat template")
    return text
