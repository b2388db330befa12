"""The EAGLE draft: a fusion of token and hidden state, then a few Llama layers. DESIGN section 3.3.

One definition for training and inference; it never knows which, because `attend` comes from outside. It has no
embedding and no LM head: both are the target's.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eagle_train.errors import check
from eagle_train.models.draft_config import DraftConfig
from eagle_train.models.layers import Layer, RMSNorm, Rotary
from eagle_train.models.target import LMHead
from eagle_train.ops.linear import Linear
from eagle_train.ops.rule import Attend

__all__ = ["Draft", "DraftConfig", "Head", "shift_hidden"]


INIT_STD = 0.02


class Draft(nn.Module):
    """`fc` (embedding first, hidden state second) and M layers. Parameters are NaN until initialised or loaded."""

    vocabulary: torch.Tensor | None  # int64 [V'], the target's ids of the draft's tokens; None: all

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps) if config.norms == "full" else nn.Identity()
        self.rotary = Rotary(config)
        vocabulary = None if config.vocabulary is None else torch.tensor(config.vocabulary)
        self.register_buffer("vocabulary", vocabulary, persistent=False)  # it is in the config
        for parameter in self.parameters():
            nn.init.constant_(parameter, float("nan"))
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())  # before they are divided

    def init_weights(self, seed: int) -> "Draft":
        """Fresh weights as Llama's: norms 1, a bias 0, the rest normal with INIT_STD. Reproducible on any device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=INIT_STD, generator=generator)
        return self

    def folded(self) -> "Draft":
        """The same draft with an embedding scale of 1, as serving engines load it."""
        return self.rescaled(1.0)

    @torch.no_grad()
    def rescaled(self, embedding_scale: float) -> "Draft":
        """The same draft with another embedding scale; exact, for powers of two."""
        draft = copy.deepcopy(self)
        if embedding_scale != self.config.embedding_scale:
            draft.config = replace(self.config, embedding_scale=embedding_scale)
            draft.fc.weight[:, : self.config.hidden_size] *= self.config.embedding_scale / embedding_scale
        return draft

    def with_first_token(self, first_token: str) -> "Draft":
        """The same weights in a draft whose first token has a slot or none (`DraftConfig.first_token`)."""
        draft = copy.deepcopy(self)
        draft.config = replace(self.config, first_token=first_token)
        for layer in draft.layers:
            assert isinstance(layer, Layer)
            layer.self_attn.rule = replace(layer.self_attn.rule, skip_first=draft.config.first_slot == 1)
        return draft

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predicted hidden states [B, T, H] for slots of (token embedding, previous hidden state), both [B, T, H].

        `positions` [B, T] int64 are the tokens' own (DESIGN section 3.1). With `wanted` int64 [B, N] those of N slots,
        [B, N, H]: the last layer does no more for the others than keep their keys and values.
        """
        rotary, scale = self.rotary(positions), self.config.embedding_scale
        token_embeddings = token_embeddings if scale == 1.0 else token_embeddings * scale
        x = self.fc(torch.cat((token_embeddings, hidden), dim=-1))
        *before, last = self.layers
        for layer in before:
            x = layer(x, rotary, attend)
        return self.norm(last(x, rotary, attend, wanted))


class Head:
    """What the draft proposes with: the target's LM head, or that of the draft's own vocabulary.

    Raises UserError for a draft that says how many tokens it knows, and not which.
    """

    def __init__(self, draft: Draft, lm_head: LMHead):
        size = draft.config.vocab_size
        check(
            size is None or draft.vocabulary is not None, f"draft.vocab_size={size}: give draft.vocabulary, the tokens"
        )
        self.vocabulary, self.size = draft.vocabulary, len(lm_head.weight)
        self.lm_head: Any = lm_head if self.vocabulary is None else lm_head.of(self.vocabulary)

    def tokens(self, indices: torch.Tensor) -> torch.Tensor:
        """The target's ids of columns of `lm_head`."""
        return indices if self.vocabulary is None else self.vocabulary[indices]

    def columns(self, values: torch.Tensor) -> torch.Tensor:
        """Those of the target's columns [..., V] that `lm_head` has [..., V']."""
        return values if self.vocabulary is None else values[..., self.vocabulary]

    def spread(self, distribution: torch.Tensor) -> torch.Tensor:
        """A distribution [..., V'] over the draft's tokens as one over the target's [..., V]."""
        if self.vocabulary is None:
            return distribution
        whole = distribution.new_zeros(*distribution.shape[:-1], self.size)
        return whole.index_copy_(-1, self.vocabulary, distribution)


def shift_hidden(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The hidden state g_j each slot is paired with: the previous token's, DESIGN section 3.1. All [B, T, H].

    Where `positions` is 0 a document begins: its first slot, if the draft has one, gets its own hidden state.
    """
    return torch.where((positions == 0).unsqueeze(-1), hidden, hidden.roll(1, dims=1))
