"""The frozen target: a Hugging Face causal LM of its own class, whole or divided over ranks. DESIGN 3.4.

It hands out hidden states (the output of the final norm), the embedding and the LM head, and knows nothing of drafts,
losses or caches. Attention comes from outside: whoever calls passes `attend`, which transformers carries as a keyword
to the attention function registered here.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import align_module_device
from transformers import AttentionInterface, PreTrainedModel

from eagle_train.config import check
from eagle_train.models.experts import route_experts
from eagle_train.models.weights import fingerprint, refuse_unloaded, whole
from eagle_train.ops.attention import Attend, Rule, lengths_of, packed_attention
from eagle_train.ops.compiled import Compiled
from eagle_train.ops.linear import linear, use_fast_linear
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
    heads. LM head and embedding are whole on every rank, however the rest is divided. `template_kwargs`: the chat
    template's own variables, beside the messages.
    """

    model: PreTrainedModel
    tokenizer: Any = None
    name: str = "target"
    together: Any = None
    template_kwargs: dict[str, Any] | None = None
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


def gathered(own: torch.Tensor, group: Any) -> torch.Tensor:
    """The ranks' tensors of one shape, one after the other."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own.contiguous(), group=group)
    return torch.cat(everyone)


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
