"""The frozen target: a Hugging Face causal LM, loaded by its own class, whole or divided over ranks. DESIGN 3.4.

It hands out hidden states (the output of the final norm), the embedding and the LM head, and knows nothing of drafts,
losses or caches. Attention comes from outside: whoever calls passes `attend`, which transformers carries as a keyword
to the attention function registered here.
"""

import atexit
import hashlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate.utils import align_module_device, get_max_memory
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from eagle_train.config import UserError, check, one_line
from eagle_train.distributed import ALONE, World
from eagle_train.models.experts import route_experts
from eagle_train.ops.attention import Attend, Rule, lengths_of, packed_attention
from eagle_train.ops.compiled import Compiled
from eagle_train.ops.linear import FP8_GPU, is_gpu, linear, use_fast_linear
from eagle_train.ops.norm import use_fast_norms

PROBE_TOKENS = 24  # of the start-up check


def attention_of_target(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    attend: Attend,
    token_positions: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # what else a family passes (dropout, position ids) says nothing of which keys are seen
) -> tuple[torch.Tensor, None]:
    """The attention function every target is loaded with: a family's keywords become a `Rule` for `attend`.

    That nothing a family needs is lost here is checked at start-up, see `Target.check_states`.
    """
    layer_types = getattr(module.config, "layer_types", None)
    chunked = layer_types is not None and layer_types[module.layer_idx] == "chunked_attention"
    rule = Rule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        chunk=module.config.attention_chunk_size if chunked else None,
        softcap=softcap,
        sinks=s_aux,
    )
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = query * temperature_correction(module, token_positions).to(query.dtype)
    return attend(module.layer_idx, query, key, value, rule).transpose(1, 2).contiguous(), None


def temperature_correction(module: torch.nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """What turns Llama 4's scaling of queries by their place in the call into that by their positions [B, T].

    Returns [B, 1, T, 1]. In a packed row or a tree the two differ; transformers knows the first only.
    """

    def scale(position: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((position.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    places = torch.arange(positions.shape[1], device=positions.device)
    return (scale(positions) / scale(places))[:, None, :, None]


AttentionInterface.register("eagle_train", attention_of_target)


@dataclass
class TargetConfig:
    """Which target, and how it is loaded. `dtype`: auto (bf16 on a GPU, fp32 on a CPU), float32 or bfloat16.

    `offload`: layers that do not fit on the device, or into `device_gib` of it, wait in the host's memory and, where
    that is full, on the disk; Accelerate fetches each when its turn comes.
    """

    path: str
    dtype: str = "auto"
    trust_remote_code: bool = False
    offload: bool = False
    device_gib: float | None = None

    def __post_init__(self) -> None:
        check(bool(self.path), "target.path is empty: give a directory or a hub id")
        self.path = os.path.expanduser(self.path)
        check(self.dtype in DTYPES, f"target.dtype={self.dtype}: must be one of {', '.join(DTYPES)}")
        gib = self.device_gib
        check(gib is None or gib > 0, f"target.device_gib={gib}: must be null or above 0")
        check(gib is None or self.offload, f"target.device_gib={gib}: needs target.offload=true")


DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
PLACEMENTS = ("replicated", "fsdp2", "tensor")


@dataclass(frozen=True)
class LMHead:
    """The frozen LM head: logits = cap(scale * (hidden @ weight.T + bias)), cap(x) = softcap * tanh(x / softcap)."""

    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def of(self, tokens: torch.Tensor) -> "LMHead":
        """The head of these tokens alone, ids [V']."""
        return replace(self, weight=self.weight[tokens], bias=None if self.bias is None else self.bias[tokens])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        logits = linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass
class Identity:
    """What a draft remembers of its target, so that it is never run with another."""

    name: str
    fingerprint: str
    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass
class Target:
    """A frozen causal LM. `tokenizer` is None where the directory has none.

    `together`: the process group of ranks that compute every forward together (tensor parallel), each with some of the
    heads. LM head and embedding are whole on every rank, however the rest is divided.
    """

    model: PreTrainedModel
    tokenizer: Any = None
    name: str = "target"
    together: Any = None
    kv_shapes: dict[int, tuple[int, int, int]] = field(init=False)  # by layer: heads on this rank, widths of k and v
    rope_limit: int | None = field(init=False)
    identity: Identity = field(init=False)
    lm_head: LMHead = field(init=False)
    embedding: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        refuse_unloaded(self.model, self.name)
        self.model.eval().requires_grad_(False)
        use_fast_linear(self.model)
        self.lm_head = lm_head_of(self.model)
        with align_module_device(self.model.get_input_embeddings()):
            self.embedding = whole(self.model.get_input_embeddings().weight)
        config = self.config
        self.rope_limit = rope_limit(config)
        self.check_states()
        self.identity = Identity(
            name=self.name,
            fingerprint=fingerprint(self.model),
            hidden_size=config.hidden_size,
            vocab_size=self.lm_head.weight.shape[0],
            num_layers=config.num_hidden_layers,
        )

    @property
    def config(self) -> Any:
        """The text model's Hugging Face config."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def is_offloaded(self) -> bool:
        """Whether some weights are on the device only while they are needed."""
        return any(weight.is_meta for weight in self.model.parameters())

    @property
    def max_positions(self) -> int:
        """How long a text may be."""
        return context_of(self.config)[0]

    @property
    def context(self) -> str:
        """`max_positions`, and what sets it where that is RoPE, in words."""
        return context_of(self.config)[1]

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, key/value heads of each on this rank, and their width, for those who keep keys and values.

        Raises UserError where layers differ in these, or values are not as wide as keys.
        """
        layers, shapes = self.config.num_hidden_layers, set(self.kv_shapes.values())
        heads, width, _ = min(shapes)
        family = self.model.config.model_type
        check(
            len(self.kv_shapes) == layers and shapes == {(heads, width, width)},
            f"target {self.name}: {family} can be trained on, not decoded: (heads, width of keys, "
            f"of values) are {', '.join(map(str, sorted(shapes)))} in {len(self.kv_shapes)} of {layers} layers; "
            "they must be the same in all, and the widths equal",
        )
        return layers, heads, width

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings [B, T, H] of int64 tokens [B, T]."""
        return F.embedding(tokens, self.embedding)

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the LM head reads: the final norm's output [B, T, H] for int64 tokens and positions [B, T].

        Ranks that compute together must all call it, with the same tokens; `attend` gets the rank's own heads.
        """
        decoder = self.model.get_decoder()
        if decoder is self.model:  # Llama 4's text model names no decoder
            decoder = self.model.model
        own = {"attend": attend, "token_positions": positions}  # carried to `attention_of_target`
        if self.rope_limit is not None:  # padding, and what is drafted beyond a text's end, may lie there
            positions = positions.clamp(max=self.rope_limit - 1)
        return decoder(input_ids=tokens, position_ids=positions, use_cache=False, **own).last_hidden_state

    @cached_property
    def compiled(self) -> Compiled:
        """`hidden_states` by torch.compile, for whoever asks. Once it is compiled, the model must stay as it is."""
        return Compiled(self.hidden_states, self.device)

    def own_hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """`hidden_states` where every rank has packed rows of its own, as many as the others."""
        if self.together is None:
            return self.hidden_states(tokens, positions, attend)
        tokens, positions = (gathered(x, self.together) for x in (tokens, positions))
        hidden = self.hidden_states(tokens, positions, packed_attention(lengths_of(positions)))
        return hidden.chunk(dist.get_world_size(self.together))[dist.get_rank(self.together)]

    def embedding_scale(self) -> float:
        """The power of two that makes token embeddings about as large as hidden states (root mean squares)."""
        tokens = torch.linspace(0, self.identity.vocab_size - 1, PROBE_TOKENS, device=self.device).long()[None]
        positions = torch.arange(PROBE_TOKENS, device=self.device)[None]
        hidden = self.hidden_states(tokens, positions, packed_attention([[PROBE_TOKENS]]))
        ratio = hidden.float().square().mean() / self.embed(tokens).float().square().mean()
        return 2.0 ** round(math.log2(ratio.item()) / 2)

    @torch.no_grad()
    def check_states(self) -> None:
        """LMhead(h) must be the model's own logits, computed with transformers' own attention; behind another document
        in a packed row, too.

        Catches a head with a scaling we do not know, the wrong hidden state, and an attention rule that got lost; and
        what a layer carries from token to token other than by `attend`, which neither packing nor decoding would know
        of. Raises UserError.
        """
        length = min(PROBE_TOKENS, self.max_positions)
        tokens = torch.arange(length, device=self.device).remainder(self.config.vocab_size)[None]
        positions = torch.arange(length, device=self.device)[None]
        self.model.set_attn_implementation("eager")
        own = whole(self.model(input_ids=tokens, use_cache=False).logits).float()
        route_experts(self.model)  # what is ours from here on must give the same
        use_fast_norms(self.model)
        self.model.set_attn_implementation("eagle_train")
        packed = packed_attention([[length, length]])
        self.kv_shapes = {}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            self.kv_shapes[layer] = (k.shape[1], k.shape[3], v.shape[3])
            return packed(layer, q, k, v, rule)

        hidden = self.hidden_states(tokens.repeat(1, 2), positions.repeat(1, 2), attend)
        ours, behind = self.lm_head(hidden).float().chunk(2, dim=1)
        bound, family = 1e-3 if self.dtype == torch.float32 else 5e-2, self.model.config.model_type
        error = ((ours - own).norm() / own.norm()).item()
        check(
            error <= bound,
            f"target {self.name}: the LM head applied to the hidden states misses the model's own logits by "
            f"{error:.1%}; this family ({family}) is not supported",
        )
        error = ((behind - ours).norm() / ours.norm()).item()
        check(
            error <= bound,
            f"target {self.name}: what stands before a document in its row changes its logits by {error:.1%}; this "
            f"family ({family}), which keeps a state beside its attention's keys and values, is not supported",
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be divided over ranks, on every rank."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(own: torch.Tensor, group: Any) -> torch.Tensor:
    """The ranks' tensors of one shape, one after the other."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own.contiguous(), group=group)
    return torch.cat(everyone)


def division(placement: str, world: World) -> dict[str, Any]:
    """What tells transformers to load each rank's part of the weights and nothing else, if they are divided."""
    if placement == "replicated":
        return {}
    sizes = {"tp_size" if placement == "tensor" else "fsdp_size": world.share}
    if world.share < world.size:
        sizes["dp_replicate_size"] = world.size // world.share
    known = {field.name for field in fields(DistributedConfig)}
    check(
        sizes.keys() <= known,
        f"parallel.share={world.share}: transformers {transformers.__version__} divides a target over all "
        f"{world.size} processes only; leave parallel.share out, or install 5.23 or newer",
    )
    return {"distributed_config": DistributedConfig(**sizes)}


def load_config(config: TargetConfig) -> Any:
    """The target's Hugging Face config. Raises UserError where there is none."""
    path = Path(config.path)
    local = path.is_absolute() or config.path.startswith(".") or len(path.parts) != 2
    check(
        path.is_dir() or not local, f"target.path={config.path}: no such directory; give one, or a hub id (USER/NAME)"
    )
    try:
        return AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"target.path={config.path}: {one_line(error)}") from error


def check_placement(
    config: TargetConfig, hf_config: Any, placement: str, share: int, computes_fp8: bool = True
) -> None:
    """Raise UserError for a target that cannot be loaded so, whole or divided over `share` ranks: what its config alone
    tells, before a weight is read. `computes_fp8`: whether the device does."""
    quantised = getattr(hf_config, "quantization_config", None)
    check(
        not quantised or AutoHfQuantizer.supports_quant_method(quantised),
        f"target.path={config.path}: transformers knows no quant_method={quantised and quantised.get('quant_method')}",
    )
    check(not config.offload or placement == "replicated", f"target.offload=true: not with parallel.target={placement}")
    heads = getattr(hf_config.get_text_config(), "num_key_value_heads", None) or share
    check(
        placement != "tensor" or heads % share == 0,
        f"parallel.target=tensor: {heads} key/value heads cannot be divided between {share} processes",
    )
    if quantised and placement != "replicated":
        check(
            quantised.get("quant_method", "bitsandbytes") != "bitsandbytes",  # whose configs may leave it out
            f"parallel.target={placement}: bitsandbytes' weights cannot be divided; use parallel.target=replicated, or "
            "a checkpoint in FP8",
        )
        if quantised.get("weight_block_size") and (placement == "tensor" or not computes_fp8):
            check_blocks(config, hf_config, placement, share)


BLOCK_DIMS = {"colwise": -2, "rowwise": -1, "packed_colwise": -2, "packed_rowwise": -1}  # divided by a plan's entry


def check_blocks(config: TargetConfig, hf_config: Any, placement: str, share: int) -> None:
    """Raise UserError unless each rank gets whole FP8 blocks of every weight.

    transformers divides weights and their blocks' scales each for itself, and gives numbers the scales of others where
    a block is cut. FSDP2 puts blocks together again before they are used, unless a rank makes numbers of its part.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    quantised = hf_config.quantization_config
    block, unquantised = quantised["weight_block_size"], quantised.get("modules_to_not_convert")
    head = model.get_output_embeddings()
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
            size % (share * block[dim]) == 0,
            f"parallel.target={placement}: {size} of {name} must be a multiple of {share} processes * FP8 blocks of "
            f"{block[dim]} = {share * block[dim]}; use fewer processes, or parallel.target=replicated",
        )


def load_target(
    config: TargetConfig, device: torch.device | str = "cpu", placement: str = "replicated", world: World = ALONE
) -> Target:
    """The target and its tokenizer, whole or this rank's part. Raises UserError for a checkpoint that is not whole."""
    hf_config = load_config(config)
    check_placement(config, hf_config, placement, world.share, is_gpu(torch.device(device), FP8_GPU))
    options = {"trust_remote_code": config.trust_remote_code}
    if placement == "replicated":
        options |= placed(config, torch.device(device))
    dtype = DTYPES[config.dtype] or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=hf_config,
            dtype=dtype,
            output_loading_info=True,
            **options,
            **division(placement, world),
        )
    except RuntimeError as error:  # after transformers' report
        reason = "cannot be converted" if "conversion" in str(error) else "has the wrong shape"
        raise UserError(f"target.path={config.path}: a weight {reason}: {one_line(error)}") from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:  # ImportError: what its quantisation needs
        raise UserError(f"target.path={config.path}: {one_line(error)}") from error
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    check(
        not missing,
        f"target.path={config.path}: {len(missing)} weights are missing or of the wrong shape, {missing[:1]} first; "
        "give a complete checkpoint",
    )
    if placement == "tensor":
        check_divided(model, world.share)
    together = world.shares["share"].get_group() if placement == "tensor" and world.share > 1 else None
    return Target(model, load_tokenizer(config), config.path, together)


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


def check_divided(model: PreTrainedModel, share: int) -> None:
    """Raise UserError unless the family's tensor-parallel plan divides at least half of the weights."""
    parameters = list(model.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    own = sum(x.to_local().numel() if isinstance(x, DTensor) else x.numel() for x in parameters)
    check(
        own <= size * (1 + 1 / share) / 2,
        f"parallel.target=tensor: the plan of {model.config.model_type} leaves {own / size:.0%} of the weights on each "
        f"of {share} ranks; use parallel.target=fsdp2",
    )


def training_dtype(config: TargetConfig, device: torch.device | str) -> TargetConfig:
    """`auto` as training means it: bf16 on a GPU and on a CPU with bf16 instructions, fp32 on others."""
    fast = torch.device(device).type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return replace(config, dtype="bfloat16" if fast else "float32") if config.dtype == "auto" else config


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer, or None where a local directory has none."""
    directory = Path(config.path)
    if directory.is_dir() and not any(directory.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the tokenizers library knows nothing more special
        raise UserError(f"target.path={config.path}: its tokenizer cannot be read: {one_line(error)}") from error


def refuse_unloaded(model: PreTrainedModel, name: str) -> None:
    """Raise UserError if a weight is still on the meta device or is not finite."""
    for key, parameter in weights_of(model):
        check(not parameter.is_meta, f"target {name}: {key} is on the meta device; load its weights first")
        own = parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()
        sample = own.flatten()[:: max(1, own.numel() // 1024)].float()  # quantised types know no isfinite
        check(bool(sample.isfinite().all()), f"target {name}: {key} is not finite; the checkpoint is damaged")


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by its name; one that Accelerate keeps elsewhere is fetched while it is looked at."""
    names = {name for name, _ in model.named_parameters()}  # tied ones have one
    for prefix, module in model.named_modules():
        with align_module_device(module):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if name in names:
                    yield name, parameter


def lm_head_of(model: PreTrainedModel) -> LMHead:
    """The LM head with the scaling and soft-capping its family applies."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    if scale is None:
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    softcap = getattr(config, "final_logit_softcapping", None)
    with align_module_device(head):
        bias = None if getattr(head, "bias", None) is None else whole(head.bias)
        return LMHead(whole(head.weight), bias, scale, softcap)


def rope_limit(config: Any) -> int | None:
    """From which position on one text of a call changes the rotary frequencies of all texts in it; None: nowhere.

    transformers chooses those of longrope and dynamic by the largest position of the call.
    """
    rope, ends = getattr(config, "rope_parameters", None) or {}, []
    for each in (rope, *(values for values in rope.values() if isinstance(values, dict))):  # some by layer type
        if each.get("rope_type") == "longrope":
            ends.append(each["original_max_position_embeddings"])
        elif each.get("rope_type") == "dynamic":
            ends.append(config.max_position_embeddings)
    return min(ends, default=None)


def context_of(config: Any) -> tuple[int, str]:
    """How long a text may be of a target so configured; and that in words, with its reason where it is RoPE."""
    limit = rope_limit(config)
    if limit is None:
        return config.max_position_embeddings, str(config.max_position_embeddings)
    return limit, f"{limit} (beyond, one text's RoPE would change the others')"


def fingerprint(model: PreTrainedModel) -> str:
    """A short hash of 16 values of every weight, rounded to bf16, so that it is the same in every precision."""
    samples = {}
    for key, parameter in weights_of(model):
        samples[key] = key.encode() + sample_of(parameter.detach()).cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(b"".join(samples[key] for key in sorted(samples))).hexdigest()[:16]


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """16 values of a tensor at even distances, in bf16; of a divided one on every rank, nothing else is gathered."""
    step = max(1, tensor.numel() // 16)
    if not isinstance(tensor, DTensor):
        return tensor.flatten()[::step][:16].to(torch.bfloat16).contiguous()
    own, mesh = tensor.to_local(), tensor.device_mesh
    wanted = torch.arange(0, tensor.numel(), step, device=own.device)[:16]
    is_own, index = torch.ones_like(wanted, dtype=torch.bool), []
    for dim, places in enumerate(torch.unravel_index(wanted, tensor.shape)):
        held = indices_held(tensor, dim)
        place_of = torch.full((tensor.shape[dim],), -1, device=own.device)
        place_of[held] = torch.arange(len(held), device=own.device)
        index.append(place_of[places])
        is_own &= index[-1] >= 0
    bits = torch.zeros_like(wanted, dtype=torch.int32)  # added up, because a sum of numbers would lose the sign of -0
    bits[is_own] = own[tuple(each[is_own] for each in index)].to(torch.bfloat16).view(torch.int16).int()
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(bits, group=mesh.get_group(dim))
    return bits.to(torch.int16).view(torch.bfloat16)


def indices_held(tensor: DTensor, dim: int) -> torch.Tensor:
    """Which indices of a dimension a rank's part has, in its order: those of a vector divided as the dimension is."""

    def placed(placement: Placement) -> Placement:
        if getattr(placement, "dim", None) != dim:
            return Replicate()
        return Shard(0) if placement.is_shard() else _StridedShard(0, split_factor=placement.split_factor)

    indices = torch.arange(tensor.shape[dim], device=tensor.to_local().device)
    placements = [placed(each) for each in tensor.placements]
    return distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local()
