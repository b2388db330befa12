"""The frozen target: a Hugging Face causal LM of its own class, whole or divided over ranks. DESIGN 3.4.

It hands out hidden states (the output of the final norm), the embedding and the LM head, and knows nothing of drafts,
losses or caches. Attention comes from outside, see models/forward.py.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import align_module_device
from transformers import PreTrainedModel

from eagle_train.errors import UserError, check, foreign, shown
from eagle_train.models.family import check_family
from eagle_train.models.forward import LayerOutputs, Reaches, hidden_states, layers_of
from eagle_train.models.head import LMHead, lm_head_of
from eagle_train.models.patches import Undo, join_products, round_to_fp8, shared_inputs, use_stages
from eagle_train.models.probe import TOKENS, Layers, probe
from eagle_train.models.shapes import context_of, rope_limit
from eagle_train.models.stages import Stages
from eagle_train.models.weights import check_loaded, fingerprint, full_tensor
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.compiled import Compiled, Forward
from eagle_train.ops.rule import Attend


@dataclass
class Identity:
    """What a draft remembers of its target, so that it is never run with another."""

    name: str
    fingerprint: str
    hidden_size: int
    vocab_size: int
    num_layers: int


class TargetEnds:
    """What a draft is trained with of a target beside its hidden states: embedding and LM head, and which target it
    is."""

    tokenizer: Any
    name: str
    identity: Identity
    lm_head: LMHead
    embedding: torch.Tensor

    @property
    def config(self) -> Any:
        """The text model's Hugging Face config."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings [B, T, H] of int64 tokens [B, T]."""
        return F.embedding(tokens, self.embedding)

    def embedding_scale(self) -> float:
        """The power of two that makes token embeddings about as large as hidden states (root mean squares)."""
        raise NotImplementedError


@dataclass
class Target(TargetEnds):
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
    layers: Layers = field(init=False)
    undo: Undo = field(init=False)  # gives the model its own modules again
    has_joint_products: bool = field(init=False, default=False)
    reaches: Reaches = field(init=False)
    rope_limit: int | None = field(init=False)
    identity: Identity = field(init=False)
    lm_head: LMHead = field(init=False)
    embedding: torch.Tensor = field(init=False)
    _outputs: dict[tuple[int, ...], LayerOutputs] = field(init=False, repr=False, default_factory=dict)
    # What `compiled` made, by layers.
    compiled_forwards: dict[tuple[int, ...], Compiled] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.reaches = check_family(type(self.model), self.model.config, f"target {self.name}")
        check_loaded(self.model, self.name)
        self.model.eval().requires_grad_(False)
        self.lm_head = lm_head_of(self.model)
        with align_module_device(self.model.get_input_embeddings()):
            embedding: Any = self.model.get_input_embeddings()
            self.embedding = full_tensor(embedding.weight)
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
    def kv_layers(self) -> Layers:
        """`layers`, for those who keep keys and values. Raises UserError where not every layer attends once."""
        layers, calls = self.config.num_hidden_layers, self.layers.calls
        said = f"target {self.name}: {self.model.config.model_type} can be trained on, not decoded: "
        check(
            max(calls.values()) == 1,
            said + "a layer attends more than once for a token, and needs keys and values for each",
        )
        check(len(calls) == layers, f"{said}attention was seen in {len(calls)} of {layers} layers")
        return self.layers

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the LM head reads: the final norm's output [B, T, H] for int64 tokens and positions [B, T].

        Ranks that compute together must all call it, with the same tokens; `attend` gets the rank's own heads.
        """
        return hidden_states(self.model, tokens, positions, attend, self.reaches, self.rope_limit)

    def states(self, layers: tuple[int, ...] = ()) -> Forward:
        """As `hidden_states`, with the outputs of these layers, 0 the first, behind what the LM head reads: [B, T, S]
        with S = H * (1 + layers). Raises UserError for a layer that is none."""
        if not layers:
            return self.hidden_states
        if layers not in self._outputs:
            self._outputs[layers] = LayerOutputs(self._layers(layers))
        outputs = self._outputs[layers]

        @torch.no_grad()
        def states(tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
            return outputs.beside(lambda: self.hidden_states(tokens, positions, attend))

        return states

    def stages(self) -> Stages:
        """What runs `hidden_states` with some of the layers, or in two parts. The layers' classes are changed, once.

        Raises UserError for a family whose forward in parts, on a few tokens, is not the whole one."""
        family = self.model.config.model_type
        place = f"target {self.name}: layers of this family ({family}) cannot be run in parts"
        check(not self.kv_layers.given, f"{place}: some use the keys and values of others")
        count = self.config.num_hidden_layers
        tokens, whole = self._states_of_few_tokens()
        stages = use_stages(self._layers(tuple(range(count))))
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]

        def forward() -> torch.Tensor:
            return self.hidden_states(tokens, positions, packed_attention([[tokens.shape[1]]]))

        with foreign(place):
            for cut in {1, count // 2, count - 1} - {0}:
                _, middle = stages.part(forward, range(cut), keep=cut - 1)
                found = None if middle is None else stages.part(forward, range(cut, count), entry=middle)[0]
                same = found is not None and torch.allclose(found.float(), whole, rtol=1e-3, atol=1e-3)
                check(same, f"{place}: the states are others than those of the whole forward")
        return stages

    def _layers(self, layers: tuple[int, ...]) -> list[torch.nn.Module]:
        """The modules of these layers. Raises UserError for one that is none."""
        count, family = self.config.num_hidden_layers, self.model.config.model_type
        wrong = [layer for layer in layers if not 0 <= layer < count]
        check(not wrong, f"layers={shown(wrong)}: target {self.name} has the layers 0 to {count - 1}")
        modules = layers_of(self.model, count)
        if modules is None:
            raise UserError(f"target {self.name}: the layers of this family ({family}) cannot be told apart")
        return [modules[layer] for layer in layers]

    def compiled(self, layers: tuple[int, ...] = ()) -> Compiled:
        """`states` by torch.compile, one for all who ask. Once it is compiled, the model must stay as it is."""
        if layers not in self.compiled_forwards:
            self.compiled_forwards[layers] = Compiled(self.states(layers), self.device)
        return self.compiled_forwards[layers]

    def own_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: list[list[int]], layers: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """`states` of packed rows, each document attending to itself, where every rank has rows of its own, as many as
        the others. `lengths`: of each row's documents, which sum to the row's.
        """
        forward = self.states(layers)
        if self.together is None:
            return forward(tokens, positions, packed_attention(lengths))
        lengths = _gathered_lengths(lengths, tokens.shape[1], self.together)
        tokens, positions = (_gathered(x, self.together) for x in (tokens, positions))
        states = forward(tokens, positions, packed_attention(lengths))
        return states.chunk(dist.get_world_size(self.together))[dist.get_rank(self.together)]

    def embedding_scale(self) -> float:
        tokens, hidden = self._states_of_few_tokens()
        ratio = hidden.square().mean() / self.embed(tokens).float().square().mean()
        return 2.0 ** round(math.log2(ratio.item()) / 2)

    def round_to_fp8(self) -> tuple[int, float]:
        """Let the layers' linear modules multiply in FP8 from now on, for training (`patches.round_to_fp8`).

        Returns how many do, and the relative error that hidden states then have, the median over a few tokens. Raises
        UserError for a family whose modules are not only called. For a target that is whole on its device.
        """
        with foreign(f"target {self.name}: {self.model.config.model_type} cannot be rounded to FP8"):
            _, before = self._states_of_few_tokens()
            count = round_to_fp8(self.model, self.undo)
            _, after = self._states_of_few_tokens()
        return count, ((after - before).norm(dim=-1) / before.norm(dim=-1)).median().item()

    def join_products(self) -> None:
        """Let what is given the same tensor in a layer, q, k and v, say, be one product from now on, for decoding. The
        weights stay the model's own, as views of one tensor. Not of a target that is divided or offloaded."""
        if not self.has_joint_products and self.together is None and not self.is_offloaded:
            join_products(shared_inputs(self.model, self._states_of_few_tokens), self.undo)
            self.has_joint_products = True

    def _states_of_few_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [1, T], taken evenly from the vocabulary, and their hidden states [1, T, H], fp32."""
        length = min(TOKENS, self.max_positions)
        tokens = torch.linspace(0, self.identity.vocab_size - 1, length, device=self.device).long()[None]
        positions = torch.arange(length, device=self.device)[None]
        return tokens, self.hidden_states(tokens, positions, packed_attention([[length]])).float()

    def check_states(self) -> None:
        """LMhead(h) must be the model's own logits, see `probe`; what it returns is kept. Raises UserError.

        A few tokens will do: what lies behind windows and chunks was seen in a twin (`check_family`).
        """
        length = min(TOKENS, self.max_positions)
        tokens = torch.arange(length, device=self.device).remainder(self.config.vocab_size)[None]

        def logits_of(tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
            return self.lm_head(self.hidden_states(tokens, positions, attend))

        self.layers, self.undo = probe(self.model, logits_of, tokens, f"target {self.name}")


def _gathered(own: torch.Tensor, group: Any) -> torch.Tensor:
    """The ranks' tensors of one shape, one after the other."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own.contiguous(), group=group)
    return torch.cat(everyone)


def _gathered_lengths(own: list[list[int]], most: int, group: Any) -> list[list[int]]:
    """The ranks' lengths, at most `most` a row, one rank's after the other's. From host to host: the device is not
    waited for."""
    filled = torch.tensor([[*row, *[0] * (most - len(row))] for row in own], dtype=torch.int32)
    return [[length for length in row if length] for row in _gathered(filled, group).tolist()]
