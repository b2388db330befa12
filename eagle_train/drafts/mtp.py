"""MTP: the multi-token-prediction module of DeepSeek-V3, one that is used for every step.

DeepSeek-AI, 2024 (arXiv 2412.19437), section 2.2. A Llama block behind a projection of two norms side by side: of the
token's embedding, and of the hidden state before it. It proposes with the target's LM head, behind a norm of its own.
In pass 1 hidden states are the target's; in pass k, and in drafting, they are what the module itself gave at the slot
before. DESIGN section 3.3.

Its states are two halves: what the LM head reads, after that norm, and what a chain's next slot is fed, before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from eagle_train.drafts.kind import InTarget, Rows, shift_hidden
from eagle_train.drafts.layouts import Refused
from eagle_train.drafts.steps import LogitsDraft, StepsConfig
from eagle_train.drafts.unroll import unroll
from eagle_train.errors import check
from eagle_train.models.layers import Layer, RMSNorm, Rotary
from eagle_train.ops.linear import Linear
from eagle_train.ops.rule import Attend

__all__ = ["MtpConfig", "MtpDraft"]

_ENGINES = ("vllm", "sglang", "trtllm", "speculators")
_NO_CLASS = "loads MTP modules of certain families alone, none of which computes what this draft does"
# What is not in the block, by its name in DeepSeek-V3's checkpoints.
_THEIRS = {"fc": "eh_proj", "norm": "shared_head.norm"}


@dataclass
class MtpConfig(StepsConfig):
    """The shape and conventions of an MTP draft; see `DraftConfig`, and `StepsConfig` for what it learns from."""

    kind: ClassVar[str] = "mtp"
    title: ClassVar[str] = "An MTP module"
    layouts: ClassVar = dict.fromkeys(_ENGINES, Refused(_NO_CLASS))

    steps: int = 3  # passes it learns from, each after the first on its own states
    modules: int = 1  # one, used for every step, as engines run it; chained ones are not there yet

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.num_layers == 1, f"draft.num_layers={self.num_layers}: must be 1, an MTP module is one block")
        check(
            self.modules == 1,
            f"draft.modules={self.modules}: must be 1, a module that is used for every step; chained modules, each "
            "with keys and values of its own for every token, are not supported",
        )

    def kept_beside_layers(self, itemsize: int) -> tuple[int, int]:
        # In each pass: what three norms read, in fp32; what fc reads, and the states, two halves each.
        return (3 * 4 + 4 * itemsize) * self.hidden_size, 0

    def fc_products(self, passes: int) -> int:
        return 3 * passes  # norms before it have gradients in pass 1 too

    def conventions(self) -> dict[str, str]:
        return {
            "input": "fc(concatenate(norm of the embedding of token t_j (enorm), norm of the hidden state at j-1 "
            "(hnorm))): embedding first",
            "hidden": "the target's, after its final norm; in a chain, the draft's own output before its final norm",
            "norms": "enorm and hnorm before fc, both of the block's own, and a final norm before the LM head",
            "lm_head_and_embedding": "the target's"
            + ("" if self.vocabulary is None else "; the draft proposes the tokens of draft.vocabulary only"),
            **super().conventions(),
        }

    def module(self) -> "MtpDraft":
        return MtpDraft(self)


class MtpDraft(LogitsDraft):
    """`enorm`, `hnorm`, `fc` (embedding first), a Llama block and a norm. NaN until initialised or loaded."""

    config: MtpConfig

    def __init__(self, config: MtpConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.fc = Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Layer(config, 0)])
        self.norm = RMSNorm(width, eps)
        self.rotary = Rotary(config)
        self.begin(config)

    def in_target(self, layers: int) -> InTarget:
        """The first of the modules that follow the target's layers, as DeepSeek-V3's checkpoint has them."""
        place, names = f"model.layers.{layers}.", {}
        for name in self.state_dict():
            module, _, part = name.rpartition(".")
            names[name] = f"{place}{_THEIRS.get(module, module.removeprefix('layers.0.'))}.{part}"
        shared = {f"{place}embed_tokens.weight": "embedding", f"{place}shared_head.head.weight": "LM head"}
        return InTarget(place, names, shared)

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        both = torch.cat((self.enorm(token_embeddings), self.hnorm(hidden)), dim=-1)
        (block,) = self.layers
        x = block(self.fc(both), self.rotary(positions), attend, wanted)
        return torch.cat((self.norm(x), x), dim=-1)

    def fed(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., self.config.hidden_size :]

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., : self.config.hidden_size]

    def unrolled(self, forward: Callable[..., torch.Tensor], rows: Rows, passes: int) -> list[torch.Tensor]:
        previous = rows.noise(shift_hidden(rows.states.hidden, rows.positions))
        return unroll(forward, rows.embeddings, previous, rows.positions, rows.lengths, passes, fed=self.fed)
