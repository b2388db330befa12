"""EAGLE: a fusion of token and hidden state, then a few Llama layers, on the target's own features. DESIGN section 3.3.

One definition for training and inference; it never knows which, because `attend` comes from outside. It has no
embedding and no LM head: both are the target's. It learns the target's hidden states and logits at once.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from eagle_train.drafts.eagle_layouts import LAYOUTS
from eagle_train.drafts.head import Head
from eagle_train.drafts.kind import Draft, DraftConfig, Rows, shift_hidden
from eagle_train.drafts.losses import Lesson, LossSums, distillation_loss
from eagle_train.drafts.unroll import unroll
from eagle_train.errors import check
from eagle_train.models.layers import Layer, RMSNorm, Rotary
from eagle_train.models.target import TargetEnds
from eagle_train.ops.linear import Linear
from eagle_train.ops.rule import Attend

__all__ = ["EagleConfig", "EagleDraft"]

NOPE_EVERY = 4  # iRoPE as in Llama 4: every fourth layer has no rotary positions


@dataclass
class EagleConfig(DraftConfig):
    """The shape and conventions of an EAGLE draft; see `DraftConfig`.

    `norms`: eagle1 has no norm before layer 0 and none at the end, which is what vLLM and SGLang load; full has both.
    `fc_bias`: `fc` has a bias, as EAGLE-1's first checkpoints have; `qkv_bias`, `o_bias` and `mlp_bias`: so have
    queries, keys and values (as Qwen2's layers), the attention's output, and the three matrices of a dense
    feed-forward. `embedding_scale` multiplies the token embeddings, which are often far smaller than the hidden states
    beside them, before `fc`; in an artifact it is folded into `fc`. `irope`: layers attend within chunks of
    `attention_chunk` positions, every fourth (and the last) sees everything and has no rotary positions. With
    `vocab_size` it learns the distribution among these tokens, and its LM head is so much smaller.
    """

    kind: ClassVar[str] = "eagle"
    title: ClassVar[str] = "An EAGLE draft"
    layouts: ClassVar = LAYOUTS
    may_differ: ClassVar[tuple[str, ...]] = (*DraftConfig.may_differ, "embedding_scale")

    num_layers: int = 3
    norms: str = "eagle1"  # eagle1 | full: no norm before layer 0 and at the end, or both
    ffn: str = "dense"  # dense | moe
    num_experts: int = 16  # of ffn=moe
    fc_bias: bool = False  # a bias on what fuses embedding and hidden state, as EAGLE-1's first checkpoints have
    qkv_bias: bool = False  # on queries, keys and values, as Qwen2's layers have
    o_bias: bool = False  # on the attention's output
    mlp_bias: bool = False  # on the three matrices of a dense feed-forward
    embedding_scale: float = 1.0  # of embeddings, a power of two; null: what makes them as large as hidden states
    irope: bool = False  # chunks of attention_chunk positions; every fourth layer and the last: all, without RoPE
    attention_chunk: int = 8192  # positions of a chunk, with irope

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_experts", "attention_chunk"):
            check(getattr(self, name) >= 1, f"draft.{name}={getattr(self, name)}: must be at least 1")
        is_power = self.embedding_scale > 0 and math.frexp(self.embedding_scale)[0] == 0.5
        check(
            is_power, f"draft.embedding_scale={self.embedding_scale}: must be a power of two, so that folding is exact"
        )
        one = self.window is None or self.takes_window
        check(one, f"draft.window={self.window}: not with draft.irope=true, whose layers attend to chunks; give one")
        self.check_choice("norms", "eagle1", "full")
        self.check_choice("ffn", "dense", "moe")
        dense = not self.mlp_bias or self.ffn == "dense"
        check(dense, f"draft.mlp_bias=true: needs draft.ffn=dense, and it is {self.ffn}")

    @classmethod
    def completed(cls, settings: dict[str, Any], target: TargetEnds) -> dict[str, Any]:
        if settings.get("embedding_scale", 1.0) is None:
            return settings | {"embedding_scale": target.embedding_scale()}
        return settings

    @property
    def idle(self) -> Mapping[str, str]:
        chunked = any(self.rope_of_layer(layer)[1] is not None for layer in range(self.num_layers))
        found = {} if chunked else {"attention_chunk": "no layer attends to chunks, which is draft.irope's"}
        return found if self.ffn == "moe" else found | {"num_experts": "draft.ffn=dense has no experts"}

    @property
    def takes_window(self) -> bool:
        return not self.irope

    def rope_of_layer(self, layer: int) -> tuple[bool, int | None]:
        if not self.irope:
            return True, None
        if (layer + 1) % NOPE_EVERY == 0 or layer == self.num_layers - 1:
            return False, None
        return True, self.attention_chunk

    def kept_by_layer(self, itemsize: int) -> int:
        dense = super().kept_by_layer(itemsize)
        if self.ffn == "dense":
            return dense
        # Of the expert that a token chose as much as of the shared one, and what it reads.
        return dense + itemsize * (self.hidden_size + 4 * self.intermediate_size)

    def conventions(self) -> dict[str, str]:
        norms = {
            "eagle1": "layer 0 has no input norm; there is no final norm",
            "full": "every layer has an input norm; a final norm ends the draft",
        }
        return {
            "input": "fc(concatenate(embedding of token t_j, hidden state h_{j-1})): embedding first",
            "hidden": "the target's, after its final norm; in a chain, the draft's own output",
            "norms": norms[self.norms],
            "lm_head_and_embedding": "the target's"
            + ("" if self.vocabulary is None else "; the draft proposes the tokens of draft.vocabulary only"),
            **super().conventions(),
        }

    def module(self) -> "EagleDraft":
        return EagleDraft(self)


class EagleDraft(Draft):
    """`fc` (embedding first, hidden state second) and M layers. Parameters are NaN until initialised or loaded."""

    config: EagleConfig

    def __init__(self, config: EagleConfig):
        super().__init__()
        width = config.hidden_size
        self.fc = Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps) if config.norms == "full" else nn.Identity()
        self.rotary = Rotary(config)
        self.begin(config)

    def folded(self) -> "EagleDraft":
        """The same draft with an embedding scale of 1, as serving engines load it."""
        return self.rescaled(1.0)

    @torch.no_grad()
    def rescaled(self, embedding_scale: float) -> "EagleDraft":
        """The same draft with another embedding scale; exact, for powers of two."""
        draft = copy.deepcopy(self)
        if embedding_scale != self.config.embedding_scale:
            draft.config = replace(self.config, embedding_scale=embedding_scale)
            draft.fc.weight[:, : self.config.hidden_size] *= self.config.embedding_scale / embedding_scale
        return draft

    def fitted(self, shape: DraftConfig) -> Draft:
        assert isinstance(shape, EagleConfig)
        return self.rescaled(shape.embedding_scale).attending(first_token=shape.first_token, window=shape.window)

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predicted hidden states [B, T, H], W = H, for slots of (token embedding, previous hidden state)."""
        rotary, scale = self.rotary(positions), self.config.embedding_scale
        token_embeddings = token_embeddings if scale == 1.0 else token_embeddings * scale
        x = self.fc(torch.cat((token_embeddings, hidden), dim=-1))
        *before, last = self.layers
        for layer in before:
            x = layer(x, rotary, attend)
        return self.norm(last(x, rotary, attend, wanted))

    def unrolled(self, forward: Callable[..., torch.Tensor], rows: Rows, passes: int) -> list[torch.Tensor]:
        previous = rows.noise(shift_hidden(rows.states.hidden, rows.positions))
        return unroll(forward, rows.embeddings, previous, rows.positions, rows.lengths, passes)

    def losses(
        self,
        states: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        head: Head,
        lesson: Lesson,
        scale: float,
    ) -> LossSums:
        """The mean over the passes of smooth L1 on hidden states and a loss on logits. DESIGN section 3.2."""
        wanted = hidden.flatten(0, 1)
        sums = [
            distillation_loss(
                predicted.flatten(0, 1).index_select(0, own),
                wanted.index_select(0, own),
                head.lm_head,
                l1_weight=lesson.l1_weight,
                ce_weight=lesson.ce_weight,
                logits_loss=lesson.logits_loss,
                scale=scale / len(states),
                run_parallel=lesson.run_parallel,
            )
            for predicted, own in zip(states, slots, strict=True)
        ]
        return replace(sums[0], loss=torch.stack([each.loss for each in sums]).sum())
