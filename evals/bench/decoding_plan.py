"""What a round of decoding takes at least, by what each GPU reads of its memory and by the sums over the GPUs; and the
memory that an engine needs. Known from shapes alone, before a weight is made.

A floor: kernels' starts, products that are bound by arithmetic, the prefill and the host take longer. Knows nothing of
how the figures are shown. DESIGN section 3.8.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from eagle_train.drafts import Draft, DraftConfig
from eagle_train.inference import Dispatcher, EngineConfig, PlanTree
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.parallel.cost import Speeds
from eagle_train.inference.parallel.divided_draft import Division, check_divides, collectives, divided_bytes, division
from eagle_train.models.draft_quantisation import scheme_of_lm_head
from eagle_train.models.loading import check_placement
from eagle_train.models.shapes import heads_of
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost.estimate import ClusterConfig
from eagle_train.training.cost.memory import target_weights
from eagle_train.training.cost.target_shape import TargetShape
from evals.bench.random_models import AS_TARGET
from evals.bench.requests import room_for


@dataclass(frozen=True)
class Reading:
    """Bytes that each GPU reads, and how often all wait for each other."""

    weights: float
    lm_head: float
    kv: float
    sums: int

    def __add__(self, other: "Reading") -> "Reading":
        pairs = self.kv + other.kv, self.sums + other.sums
        return Reading(self.weights + other.weights, self.lm_head + other.lm_head, *pairs)

    @property
    def bytes(self) -> float:
        return self.weights + self.lm_head + self.kv

    def seconds(self, speeds: Speeds) -> float:
        """The least that it takes."""
        return self.bytes / speeds.bytes_per_s + self.sums * speeds.collective_s


@dataclass(frozen=True)
class PlannedRound:
    """Of a batch of `batch_size` rows with contexts of `context` tokens: a step of plain decoding, and a round with a
    tree. `tokens`: of an answer, that a round brings on average; None: not told."""

    batch_size: int
    context: int
    tree: str
    plain: Reading
    drafting: Reading
    validation: Reading
    tokens: float | None


@dataclass(frozen=True)
class DecodingPlan:
    """A target of this Hugging Face config and a draft on `gpus` GPUs, all in `dtype`; `options`: its engine's."""

    target: Any
    draft: DraftConfig
    dtype: torch.dtype
    gpus: int
    cluster: ClusterConfig
    options: EngineConfig

    def __post_init__(self) -> None:
        """Raises UserError where so many GPUs cannot hold the target together."""
        check_placement(AS_TARGET, self.target, "tensor" if self.gpus > 1 else "replicated", self.gpus)

    @cached_property
    def shape(self) -> TargetShape:
        """Counted once. Raises UserError for a config that is no target's."""
        return TargetShape.of(self.target, place="shapes.config")

    @cached_property
    def module(self) -> Draft:
        """The draft, without memory for its weights."""
        with torch.device("meta"):
            return self.draft.module().to(self.dtype)

    @property
    def speeds(self) -> Speeds:
        """The cluster's."""
        return Speeds(self.cluster.memory_tb_s * 1e12, self.cluster.sum_us * 1e-6)

    @property
    def head_bytes(self) -> int:
        """Of the target's LM head."""
        return self.shape.vocabulary * self.shape.hidden * self.dtype.itemsize

    @cached_property
    def proposing_bytes(self) -> int:
        """Of the LM heads that the draft proposes with, as the engine has them. Raises OptionError for few bits that
        have no product for so many inputs."""
        return self._proposing_heads * (self._few_bits or self._tokens_bytes)

    @property
    def _proposing_heads(self) -> int:
        return max(1, self.draft.own_heads)

    @property
    def _tokens_bytes(self) -> int:
        """Of an LM head for the draft's tokens."""
        return (self.draft.vocab_size or self.shape.vocabulary) * self.shape.hidden * self.dtype.itemsize

    @property
    def _few_bits(self) -> int:
        """Bytes of its copy in few bits; 0 where there is none."""
        kind = self.options.draft_lm_head
        if kind == "target":
            return 0
        tokens, inputs = self.draft.vocab_size or self.shape.vocabulary, self.shape.hidden
        return scheme_of_lm_head(kind, inputs).gpu_bytes(tokens, inputs)

    @cached_property
    def division(self) -> Division:
        """What the engine divides over the GPUs. Raises OptionError for a draft that cannot be."""
        if self.gpus == 1:
            return Division(False, False)
        check_divides(self.options.divide_draft, self.module, self.gpus)
        wanted = self.options.divide_lm_head, self.options.divide_draft
        return division(self.module, self.head_bytes, self.proposing_bytes, self.gpus, *wanted, self.speeds)

    @property
    def whole_and_divided(self) -> dict[str, tuple[Reading, Reading]]:
        """What the engine compares: the LM head, and a forward of the draft with it, whole and divided."""
        draft, proposing, waits = divided_bytes(self.module), self.proposing_bytes, 1 + collectives(self.module)

        def pair(weights: float, head: int, sums: int) -> tuple[Reading, Reading]:
            return Reading(weights, head, 0, 0), Reading(weights / self.gpus, head / self.gpus, 0, sums)

        of_draft = pair(draft, proposing, waits)
        return {
            "the LM head of validation": pair(0, self.head_bytes, 1),
            "a forward of the draft with its LM head": of_draft,
        }

    def validation(self, batch_size: int, context: int, nodes: int = 1) -> Reading:
        """The target's forward over so many nodes a row; of plain decoding one."""
        text, layers = self.target.get_text_config(), self.shape.layers
        kv = sum(self._kv(text, layer) * _seen(text, layer, context) for layer in range(layers))
        several, divided = self.gpus > 1, self.division.lm_head
        return Reading(
            self.shape.read_by(batch_size * nodes) * self.shape.bytes_of(self.dtype) / self.gpus,
            self.head_bytes / (self.gpus if divided else 1),
            batch_size * kv / self.gpus,
            several * (2 * layers + 2) + divided,  # embedding, both halves of each layer, the drawn tokens
        )

    def drafting(self, batch_size: int, context: int, depth: int) -> Reading:
        """All forwards of the draft for a tree of this depth."""
        draft, divided, several = self.draft, self.division.draft, self.gpus > 1
        if depth == 0:
            return Reading(0, 0, 0, 0)
        proposals = 1 if draft.at_once or draft.in_one_pass else depth
        forwards = max(proposals, draft.whole_passes)  # each of several modules reads what is pending
        parts = self.gpus if divided else 1
        of_layers = 1 if draft.at_once else parts
        return Reading(
            forwards * self._read_of_draft(batch_size) / of_layers,
            proposals * self.proposing_bytes / parts,
            forwards * batch_size * self._draft_kv(context) / of_layers,
            divided * (forwards * collectives(self.module) + proposals) + several,  # and the first rank's drafts to all
        )

    def rounds(
        self, batch_sizes: list[int], contexts: list[int], trees: list[str], acceptance: list[float] | None
    ) -> Iterator[PlannedRound]:
        """Of all these."""
        for batch_size in batch_sizes:
            for context in contexts:
                for name in trees:
                    tree: PlanTree = Dispatcher(name).dispatch(batch_size).tree
                    tokens = None if acceptance is None else 1 + sum(acceptance[: tree.max_depth])
                    drafting = self.drafting(batch_size, context, tree.max_depth)
                    validation = self.validation(batch_size, context, tree.num_nodes)
                    plain = self.validation(batch_size, context)
                    yield PlannedRound(batch_size, context, name, plain, drafting, validation, tokens)

    def memory(self, batch_size: int, longest: int, tree: str) -> dict[str, float]:
        """Bytes of each GPU that an engine takes for a full batch of texts of `longest` tokens, by part; activations
        left out."""
        size = self.gpus
        parallel = ParallelConfig() if size == 1 else ParallelConfig(target="tensor")
        tokens = self.options.kv_tokens or room_for(batch_size, longest, tree)
        text, of_layers = self.target.get_text_config(), size if self.division.draft and not self.draft.at_once else 1
        kv = sum(self._kv(text, layer) for layer in range(self.shape.layers)) / size
        return {
            "target's weights": target_weights(self.shape, parallel, size, self.dtype),
            "draft's weights": sum(each.numel() for each in self.module.parameters()) * self.dtype.itemsize / of_layers,
            "target's keys and values": tokens * kv,
            "draft's copies of LM heads": self._copied_bytes,
            "draft's keys and values": tokens * self.draft.cached_layers * self._draft_kv_of_token / of_layers
            + tokens * self._draft_states_of_token,
        }

    @property
    def _copied_bytes(self) -> float:
        """Of copies of LM heads: for the draft's tokens where it does not know all, and in few bits."""
        of_tokens = self._tokens_bytes if self.draft.vocab_size else 0
        return self._proposing_heads * (of_tokens + self._few_bits / (self.gpus if self.division.draft else 1))

    def _kv(self, text: Any, layer: int) -> int:
        """Bytes of a token's keys and values in a layer of the target."""
        heads = heads_of(text, layer)
        return 2 * heads.keys * heads.width * self.dtype.itemsize

    @property
    def _draft_kv_of_token(self) -> int:
        """Bytes in a layer; 0 where none attends."""
        draft = self.draft
        return 2 * draft.num_kv_heads * draft.head_dim * self.dtype.itemsize if draft.attention_width else 0

    @property
    def _draft_states_of_token(self) -> float:
        """Bytes of what modules in a chain keep for each block, a token's share."""
        return (self.draft.whole_passes - 1) * self.draft.hidden_size * self.dtype.itemsize / BLOCK

    def _draft_kv(self, context: int) -> float:
        """Bytes of a row's keys and values that a forward reads."""
        layers = range(self.draft.num_layers)
        limits = [self.draft.window or self.draft.rope_of_layer(layer)[1] for layer in layers]
        return self._draft_kv_of_token * sum(min(context, limit or context) for limit in limits)

    def _read_of_draft(self, tokens: int) -> float:
        """Bytes of matrices that a forward of so many tokens reads, without LM heads; each token goes through one of a
        layer's experts."""
        inside = self.module.named_parameters()
        matrices = [(name, each) for name, each in inside if each.ndim >= 2 and not name.startswith("lm_head")]
        routed = sum(each.numel() for name, each in matrices if ".experts" in name)
        share = 1 - (1 - 1 / getattr(self.draft, "num_experts", 1)) ** tokens
        read = sum(each.numel() for _, each in matrices) - routed * (1 - share)
        return read * self.dtype.itemsize / self.draft.whole_passes  # of several modules a forward runs one


def _seen(text: Any, layer: int, context: int) -> int:
    """Keys of a row that a layer of the target reads."""
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    limits = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    limit = getattr(text, limits.get(kinds[layer], ""), None)
    return min(context, limit or context)
