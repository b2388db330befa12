"""What every kind of draft has: its config, its module, and what training, export and engine ask of both.

A kind is a file beside this one, with a `DraftConfig` and a `Draft` of its own, and one for its layouts. It says what
it wants of the target, what it is fed and learns from, and which engines load it. It knows nothing of paging, batches
of requests, ranks or files. DESIGN section 3.3.

Shapes: B rows, T tokens of a packed row, H hidden, W the width of a draft's states, S of the target's states that it
gets, R slots that are learnt from.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from eagle_train.drafts.layouts import Layout
from eagle_train.drafts.losses import Lesson, LossSums
from eagle_train.drafts.rope import as_served, check_keys, check_lengths, check_rope, check_rotary
from eagle_train.errors import UserError, check
from eagle_train.models.layers import Attention, rule_of_layer
from eagle_train.models.shapes import heads_of, widest
from eagle_train.models.target import LMHead, TargetEnds
from eagle_train.ops.rule import Attend
from eagle_train.settings import build

if TYPE_CHECKING:
    from eagle_train.drafts.head import Head

INIT_STD = 0.02


class TargetStates(NamedTuple):
    """What the target computed at every token: `hidden` [B, T, H], which its LM head reads, and the outputs [B, T, H]
    of the `layers` that a draft wants, by number, 0 the first. `fault`: why states of a document could not be read and
    are 0; nothing may be learnt from them."""

    hidden: torch.Tensor
    layers: Mapping[int, torch.Tensor]
    fault: UserError | None = None

    @classmethod
    def split(cls, states: torch.Tensor, layers: Sequence[int]) -> "TargetStates":
        """Of `Target.states(layers)`: [B, T, H * (1 + layers)], views."""
        hidden, *others = states.chunk(1 + len(layers), dim=-1)
        return cls(hidden, dict(zip(layers, others, strict=True)))

    def joined(self, layers: Sequence[int]) -> torch.Tensor:
        """The inverse of `split`."""
        return torch.cat((self.hidden, *(self.layers[layer] for layer in layers)), dim=-1) if layers else self.hidden


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows that a draft is unrolled on: `embeddings` [B, T, H] of the tokens, the target's `states` there,
    `positions` int64 [B, T] within documents, `lengths` of each row's documents. `embed`: of any tokens, int64 [..] to
    [.., H], in the embeddings' dtype; None where the draft's kind feeds no others than the rows' own. `noise` is added
    to what slots are fed of the target's states."""

    embeddings: torch.Tensor
    states: TargetStates
    positions: torch.Tensor
    lengths: list[list[int]]
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    noise: Callable[[torch.Tensor], torch.Tensor] = lambda states: states


class InTarget(NamedTuple):
    """Where a target's own checkpoint holds a draft: `names` of its tensors there, by ours, all with one of `prefixes`,
    and `shared`: copies of what is the target's, each with what it is a copy of."""

    prefixes: tuple[str, ...]
    names: Mapping[str, str]
    shared: Mapping[str, str]


@dataclass
class DraftConfig:
    """What the configs of all kinds have: the draft's shape and conventions, saved with its weights.

    Sizes default to the target's, see `from_target`. `first_token`: self_fusion pairs the first token with its own
    hidden state; with skip it has no slot, as in EAGLE, vLLM and SGLang: the draft begins at (t_1, h_0), and what lies
    at position 0 is never seen. `vocab_size`: how many of the target's tokens the draft can propose, `vocabulary`
    which, ascending; None is all. `window`: each layer attends to the last so many positions, its own included; None:
    to all. `sink`: each head has a learnt logit that takes part in its softmax and has no value, as gpt-oss's, so that
    a query need not attend to what says nothing.
    """

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""  # of a kind; see `titled`
    layouts: ClassVar[Mapping[str, Layout]] = {}  # of serving engines, by name
    # Settings of `train` that the kind does not read, with what to give in their place.
    unread: ClassVar[Mapping[str, str]] = {}
    # Fields in which a draft that training starts from may differ (`Draft.fitted`).
    may_differ: ClassVar[tuple[str, ...]] = ("first_token", "vocabulary", "window")
    # Whether it drafts all levels at once, from what the target's LM head reads: it then has no attention and no cache.
    at_once: ClassVar[bool] = False
    # Whether it drafts all levels in one forward, by slots that stand for tokens which are not known yet.
    in_one_pass: ClassVar[bool] = False
    # Whether it is fed what the target's LM head reads, at every slot; else its loss alone reads that, where it is
    # supervised.
    fed_hidden: ClassVar[bool] = True

    hidden_size: int
    intermediate_size: int  # null, here and below: the target's
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    num_layers: int
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    rms_norm_eps: float = 1e-5
    first_token: str = "self_fusion"  # self_fusion | skip: its own hidden state, or no slot, as serving engines have it
    vocab_size: int | None = None  # the most frequent tokens of the data, which alone the draft can propose; null: all
    vocabulary: list[int] | None = None
    window: int | None = None  # positions that each layer attends to, the last ones, its own included; null: all
    sink: bool = False  # a learnt logit per head in the softmax, without a value: what a query attends to nothing with

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "num_layers")
        for name in sizes:
            check(getattr(self, name) >= 1, f"draft.{name}={getattr(self, name)}: must be at least 1")
        size, tokens = self.vocab_size, self.vocabulary
        check(size is None or size >= 1, f"draft.vocab_size={size}: must be null or at least 1")
        whole = tokens is None or (len(tokens) == size and tokens == sorted(set(tokens)))
        check(whole, f"draft.vocabulary: must be {size} different token ids in ascending order")
        check(self.rms_norm_eps > 0, f"draft.rms_norm_eps={self.rms_norm_eps}: must be above 0")
        check_keys(self.rope_parameters)
        if not self.at_once:  # without attention nothing turns
            check_rope(self.rope_parameters, self.head_dim)
        self.check_choice("first_token", "self_fusion", "skip")
        check(self.window is None or self.window >= 1, f"draft.window={self.window}: must be null or at least 1")
        even = self.head_dim % 2 == 0
        check(even, f"draft.head_dim={self.head_dim}: must be even, for rotary positions")
        heads = f"draft.num_heads={self.num_heads}, draft.num_kv_heads={self.num_kv_heads}"
        check(self.num_heads % self.num_kv_heads == 0, f"{heads}: the second must divide the first")

    def check_choice(self, name: str, *allowed: str) -> None:
        """Raise UserError unless the field `name` has one of these values."""
        check(getattr(self, name) in allowed, f"draft.{name}={getattr(self, name)}: must be {' or '.join(allowed)}")

    @classmethod
    def from_target(cls, target_config: Any, **overrides: Any) -> Any:
        """The draft for a target with this Hugging Face config; an override that is None is left to the target. A
        vocabulary of all its tokens is its own, which engines load without a map."""
        text = target_config.get_text_config()
        rope = check_rotary(target_config)
        inner = overrides.get("intermediate_size") or widest(getattr(text, "intermediate_size", None))
        check(
            inner is not None,
            f"target of type {text.model_type}: its config has no intermediate_size; give draft.intermediate_size",
        )
        width = overrides.get("hidden_size") or text.hidden_size
        check(width == text.hidden_size, f"draft.hidden_size={width}: must be the target's, {text.hidden_size}")
        size = overrides.get("vocab_size") or 0
        check(size <= text.vocab_size, f"draft.vocab_size={size}: must be at most the target's, {text.vocab_size}")
        known = all(0 <= token < text.vocab_size for token in overrides.get("vocabulary") or [])
        check(known, f"draft.vocabulary: must be token ids of the target, below {text.vocab_size}")
        long, wanted = text.max_position_embeddings, overrides.get("max_position_embeddings")
        reaches = wanted is None or wanted >= long
        check(reaches, f"draft.max_position_embeddings={wanted}: must be at least the target's, {long}")
        heads = heads_of(text)
        sizes = {
            "hidden_size": text.hidden_size,
            "intermediate_size": inner,
            "num_heads": heads.queries,
            "num_kv_heads": heads.keys,
            "head_dim": heads.width,
            "max_position_embeddings": long,
            "rope_parameters": rope,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-5,
        }
        given = {key: value for key, value in overrides.items() if value is not None}
        if own := given.get("rope_parameters"):
            check_keys(own)
            check_lengths(own)
            check_rope(own, head_dim := given.get("head_dim", heads.width))
            given["rope_parameters"] = as_served(own, head_dim)
        if size == text.vocab_size:
            given = {key: value for key, value in given.items() if key not in ("vocab_size", "vocabulary")}
        return build(cls, sizes | cls.of_target(text, given) | given, "draft")

    @classmethod
    def of_target(cls, text: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """What else a kind takes from the target's text config; `given`: what the user gave."""
        return {}

    @classmethod
    def completed(cls, settings: dict[str, Any], target: TargetEnds) -> dict[str, Any]:
        """The settings with what only the loaded target tells."""
        return settings

    @property
    def idle(self) -> Mapping[str, str]:
        """Settings that change nothing beside its others, with the reason."""
        return {}

    @property
    def first_slot(self) -> int:
        """Where the draft begins in a document."""
        return 1 if self.first_token == "skip" else 0

    def first_slot_of(self, layer: int) -> int:
        """The first slot of a document whose keys and values the layer's other slots see."""
        return self.first_slot

    @property
    def cached_layers(self) -> int:
        """Layers with keys and values of their own: those that a forward runs, or of several modules, one of which a
        forward runs."""
        return self.num_layers

    @property
    def whole_passes(self) -> int:
        """The fewest passes in which all parameters take part."""
        return 1

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs it wants beside what the LM head reads, ascending."""
        return ()

    @property
    def takes_window(self) -> bool:
        """Whether its layers may be given a window (`attending`)."""
        return True

    @property
    def levels(self) -> int | None:
        """The most levels below a token that it can draft; None: any number."""
        return None

    @property
    def fc_inputs(self) -> int:
        """Columns of `fc`."""
        return 2 * self.hidden_size

    @property
    def attention_width(self) -> int:
        """Numbers of a token's queries in a layer; 0: no layer attends."""
        return self.num_heads * self.head_dim

    def kept_by_layer(self, itemsize: int) -> int:
        """Bytes that a token leaves for the backward pass in a layer, in each pass. `itemsize`: of the dtype that is
        computed in.

        The inputs of its two norms, in fp32, and their outputs; queries, keys, values, the attention's output and the
        same as rows; the gate before and after its activation, the other half, and their product. Of each query head,
        the log-sum-exp of its scores in fp32: no scores are kept, in no pass.
        """
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        exact = 4 * (2 * self.hidden_size + self.num_heads)
        return exact + itemsize * (2 * self.hidden_size + 3 * heads + 2 * kv + 4 * self.intermediate_size)

    def kept_beside_layers(self, itemsize: int) -> tuple[int, int]:
        """Bytes that a token leaves for the backward pass beside those of plain layers: in each pass, and once.
        `itemsize`: of the dtype that is computed in."""
        return 2 * itemsize * self.hidden_size, 0

    def passes_at_once(self, passes: int) -> int:
        """How many of its passes a layer runs in one call, and so keeps at once where it is recomputed."""
        return 1

    @property
    def own_heads(self) -> int:
        """How many LM heads of its own it learns."""
        return 0

    @property
    def head_products(self) -> int:
        """Products of LM heads with a supervised slot's states in a pass: the target's, the draft's, gradients."""
        return 4 if self.own_heads else 3

    def loss_bytes(self, itemsize: int) -> int:
        """Bytes for each number of a supervised slot's states that the loss of a pass keeps: fp32 copies and a
        gradient. `itemsize`: of the dtype that is computed in."""
        return itemsize + 4 * 4

    def passes(self, unroll: int) -> int:
        """Passes that it learns from, where `train.unroll` is `unroll`."""
        return unroll

    def fc_products(self, passes: int) -> int:
        """How often `fc` is multiplied with in a step, in units of a token's product."""
        return 3 * passes - 1

    def layer_products(self, passes: int, recomputed: bool) -> float:
        """How often all layers' matrices are multiplied with in a step, in units of a token's products. `recomputed`:
        layers run again in the backward pass."""
        return passes * (4 if recomputed else 3)

    def rope_of_layer(self, layer: int) -> tuple[bool, int | None]:
        """Whether the layer has rotary positions, and the chunk it attends within."""
        return True, None

    def seen(self, context: int) -> float:
        """To how many tokens one attends, the sum over the layers, on average over a row of `context` tokens."""
        chunks = [self.rope_of_layer(layer)[1] for layer in range(self.num_layers)]
        reaches = [min(context, self.window or context, chunk or context) for chunk in chunks]
        # A window slides: all but its first tokens see as many. In a chunk one sees half of it, as of a whole row.
        return sum(reach / 2 if self.window is None else reach - reach**2 / (2 * context) for reach in reaches)

    def described(self) -> str:
        """What it is, in words that begin a sentence."""
        layers = "one layer" if self.num_layers == 1 else f"{self.num_layers} layers"
        return f"{self.titled()} of {layers} that proposes"

    def titled(self) -> str:
        """What it is, for a model card's title."""
        return self.title

    def conventions(self) -> dict[str, str]:
        """What an implementation needs to know to run the draft, beside its tensors."""
        first = {
            "self_fusion": "t_0 is paired with its own hidden state",
            "skip": "t_0 has none: it begins at (t_1, h_0)",
        }
        attention = {
            "window": f"each layer attends to the last {self.window} positions, its own included",
            "sink": "self_attn.sinks: a logit for each head that takes part in its softmax and has no value",
        }
        return {
            **{name: said for name, said in attention.items() if getattr(self, name)},
            "first_slot": first[self.first_token],
            "rope": "halves convention, as Hugging Face's Llama, on the first partial_rotary_factor of each head",
            "position_of_slot": "the position of its token t_j, so the draft's cache is as long as the target's",
        }

    def module(self) -> "Draft":
        """The draft of this config, its parameters NaN."""
        raise NotImplementedError

    def saved(self) -> dict[str, Any]:
        """What a file keeps: the fields, and the kind; see `saved_config`."""
        return {"kind": self.kind, **asdict(self)}


class Draft(nn.Module):
    """A draft: layers that propose from a token and what it is fed of the target. No embedding, that is the target's.

    A kind defines `forward`, one proposal step, given `attend`; and what of its states [.., W] is read by the LM head
    and what is fed to a chain's next slot.
    """

    config: DraftConfig
    layers: nn.ModuleList
    vocabulary: torch.Tensor | None  # int64 [V'], the target's ids of the draft's tokens; None: all
    num_parameters: int  # before they are divided

    def begin(self, config: DraftConfig) -> None:
        """To be called by a kind when its parameters are there."""
        self.config = config
        vocabulary = None if config.vocabulary is None else torch.tensor(config.vocabulary)
        self.register_buffer("vocabulary", vocabulary, persistent=False)  # it is in the config
        for parameter in self.parameters():
            nn.init.constant_(parameter, float("nan"))
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())

    def init_weights(self, seed: int, lm_head: LMHead | None = None) -> Any:
        """Fresh weights as Llama's: norms 1, biases and sinks 0, the rest normal with INIT_STD. Reproducible on any
        device.

        `lm_head`: the target's, from which a head of the draft's own begins.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "sinks")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=INIT_STD, generator=generator)
        return self

    def folded(self) -> Any:
        """The same draft as serving engines load it."""
        return copy.deepcopy(self)

    def attending(self, **changes: Any) -> Any:
        """The same weights in a draft that sees other keys: with another `first_token` or `window`
        (`DraftConfig`)."""
        draft = copy.deepcopy(self)
        draft.config = replace(self.config, **changes)
        for module in draft.modules():
            if isinstance(module, Attention):
                module.rule = rule_of_layer(draft.config, module.layer)
        return draft

    def fitted(self, shape: DraftConfig) -> "Draft":
        """The same weights in a draft of the config `shape`, which differs in `may_differ` alone; the vocabulary
        stays."""
        return self.attending(first_token=shape.first_token, window=shape.window)

    def in_target(self, layers: int) -> InTarget | None:
        """Where checkpoints of targets with so many layers hold such a draft; None: targets have none."""
        return None

    def own_head(self, level: int = 0) -> LMHead | None:
        """The draft's own LM head, that of a level where each has one; None: it proposes with the target's."""
        return None

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [B, T, W] at slots of (token embedding, what it is fed), both [B, T, H].

        `positions` [B, T] int64 are the tokens' own (DESIGN section 3.1). With `wanted` int64 [B, N] those of N slots,
        [B, N, W]: the last layer does no more for the others than keep their keys and values.
        """
        raise NotImplementedError

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """What a slot is fed [.., H] of the target's states [.., S], as `TargetStates.joined` has them."""
        return states

    def fed(self, states: torch.Tensor) -> torch.Tensor:
        """What a chain's next slot is fed [.., H] of the draft's own states [.., W]."""
        return states

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """What the LM head reads [.., H] of the draft's states [.., W]."""
        return states

    def logits(self, states: torch.Tensor, head: "Head", level: int = 0) -> torch.Tensor:
        """Logits [.., V'] of the draft's states [.., W] in pass `level`, with its weights wherever a backend has
        them."""
        return head.lm_head(self.read(states))

    def unrolled(self, forward: Callable[..., torch.Tensor], rows: Rows, passes: int) -> list[torch.Tensor]:
        """States [B, T, W] of each pass over packed rows: those of pass k, counted from 0, at slot j are what a chain
        has there at depth k. No more than `DraftConfig.levels`. `forward`: this draft's, as a backend wraps it."""
        raise NotImplementedError

    def losses(
        self,
        states: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        head: "Head",
        lesson: Lesson,
        scale: float,
    ) -> LossSums:
        """What is learnt from: the loss over all passes, multiplied by `scale`, and the other sums of the first pass.

        `states` [B, T, W] of each pass, `slots` int64 [R] of each: the places of supervised slots in [B * T]; `hidden`
        [B, T, H]: the target's. The host waits for nothing that a device computes.
        """
        raise NotImplementedError


def shift_hidden(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The hidden state g_j each slot is paired with: the previous token's, DESIGN section 3.1. All [B, T, H].

    Where `positions` is 0 a document begins: its first slot, if the draft has one, gets its own hidden state.
    """
    return torch.where((positions == 0).unsqueeze(-1), hidden, hidden.roll(1, dims=1))
