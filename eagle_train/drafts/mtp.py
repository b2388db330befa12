"""MTP: the multi-token-prediction modules of DeepSeek-V3, one that is used for every step or several in a chain.

DeepSeek-AI, 2024 (arXiv 2412.19437), section 2.2. A Llama block behind a projection of two norms side by side: of the
token's embedding, and of the hidden state before it. It proposes with the target's LM head, behind a norm of its own.
In pass 1 hidden states are the target's; in pass k, and in drafting, they are what the module of the pass before gave
at the slot before. DESIGN section 3.3.

Of several modules pass k is module k's, which attends to keys and values of its own at all slots before. It has none
at a document's first k - 1 slots, where the module before has no state. Passes beyond the last module are that one's
own chains.

Its states are two halves: what the LM head reads, after that norm, and what a chain's next slot is fed, before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from eagle_train.drafts.kind import InTarget, Rows, shift_hidden
from eagle_train.drafts.layouts import Refused
from eagle_train.drafts.steps import LogitsDraft, StepsConfig
from eagle_train.drafts.unroll import unroll
from eagle_train.errors import check
from eagle_train.models.layers import Layer, RMSNorm, Rotary
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.linear import Linear
from eagle_train.ops.rule import Attend

__all__ = ["MtpConfig", "MtpDraft"]

_ENGINES = ("vllm", "sglang", "trtllm", "speculators")
_NO_CLASS = "loads MTP modules of certain families alone, none of which computes what this draft does"
_MOST_MODULES = 8  # slots that the last one does not have are fewer than a block of the cache has (ops/rule.py)
# What is not in the block, by its name in DeepSeek-V3's checkpoints.
_THEIRS = {"fc": "eh_proj", "norm": "shared_head.norm"}


@dataclass
class MtpConfig(StepsConfig):
    """The shape and conventions of an MTP draft; see `DraftConfig`, and `StepsConfig` for what it learns from.

    `modules`: blocks, each with all that stands around it. Pass k, and level k of a tree, is module k's; the last one's
    are all further ones.
    """

    kind: ClassVar[str] = "mtp"
    title: ClassVar[str] = "An MTP module"
    layouts: ClassVar = dict.fromkeys(_ENGINES, Refused(_NO_CLASS))

    steps: int = 3  # passes it learns from, each after the first on its own states; at least as many as modules
    modules: int = 1  # in a chain, pass k and level k of a tree the k-th's, and the last one's all further ones

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.num_layers == 1, f"draft.num_layers={self.num_layers}: must be 1, an MTP module is one block")
        check(1 <= self.modules <= _MOST_MODULES, f"draft.modules={self.modules}: must be from 1 to {_MOST_MODULES}")
        check(
            self.steps >= self.modules,
            f"draft.steps={self.steps}: must be at least draft.modules, {self.modules}: each module learns in a pass",
        )

    def titled(self) -> str:
        return self.title if self.modules == 1 else f"A chain of {self.modules} MTP modules"

    def first_slot_of(self, layer: int) -> int:
        return self.first_slot + layer

    @property
    def cached_layers(self) -> int:
        return self.modules

    @property
    def whole_passes(self) -> int:
        return self.modules

    def seen(self, context: int) -> float:
        return self.modules * super().seen(context)

    def layer_products(self, passes: int, recomputed: bool) -> float:
        return super().layer_products(passes, recomputed) / self.modules  # a pass runs one of the blocks

    def kept_beside_layers(self, itemsize: int) -> tuple[int, int]:
        # In each pass: what three norms read, in fp32; what fc reads, and the states, two halves each.
        return (3 * 4 + 4 * itemsize) * self.hidden_size, 0

    def fc_products(self, passes: int) -> int:
        return 3 * passes  # norms before it have gradients in pass 1 too

    def described(self) -> str:
        return super().described() if self.modules == 1 else f"{self.titled()} that proposes"

    def conventions(self) -> dict[str, str]:
        chain = {
            "modules": f"{self.modules}: module k makes the k-th token ahead, with hidden states of module k-1 at the "
            "token before, and has keys and values of its own at all tokens but the first k-1; further tokens are the "
            "last module's"
        }
        return {
            **(chain if self.modules > 1 else {}),
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


class AroundBlock(nn.Module):
    """What a module has around its block: `enorm`, `hnorm`, `fc` (embedding first) and `norm`."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.fc = Linear(2 * width, width, bias=False)
        self.norm = RMSNorm(width, eps)


class MtpDraft(LogitsDraft):
    """`enorm`, `hnorm`, `fc` (embedding first), a Llama block and a norm; the blocks of all modules are `layers`, and
    `further` has the rest of those after the first. NaN until initialised or loaded."""

    config: MtpConfig

    def __init__(self, config: MtpConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.fc = Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.modules))
        self.norm = RMSNorm(width, eps)
        self.further = nn.ModuleList(AroundBlock(config) for _ in range(config.modules - 1))
        self.rotary = Rotary(config)
        self.begin(config)

    def in_target(self, layers: int) -> InTarget:
        """The first of the modules that follow the target's layers, as DeepSeek-V3's checkpoint has them."""
        places = [f"model.layers.{layers + number}." for number in range(self.config.modules)]
        names = {}
        for name in self.state_dict():
            module, _, part = name.rpartition(".")
            number, inside = _place_of(module)
            names[name] = f"{places[number]}{_THEIRS.get(inside, inside)}.{part}"
        copies = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "LM head"}
        shared = {f"{place}{copy}": what for place in places for copy, what in copies.items()}
        return InTarget(tuple(places), names, shared)

    def forward(
        self,
        token_embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        module: int = 0,
    ) -> torch.Tensor:
        """As of `Draft`. `module`: which one, 0 the first."""
        own: Any = self.further[module - 1] if module else self
        both = torch.cat((own.enorm(token_embeddings), own.hnorm(hidden)), dim=-1)
        x = self.layers[module](own.fc(both), self.rotary(positions), attend, wanted)
        return torch.cat((own.norm(x), x), dim=-1)

    def fed(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., self.config.hidden_size :]

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., : self.config.hidden_size]

    def unrolled(self, forward: Callable[..., torch.Tensor], rows: Rows, passes: int) -> list[torch.Tensor]:
        previous, states = rows.noise(shift_hidden(rows.states.hidden, rows.positions)), list[torch.Tensor]()
        within, before = packed_attention(rows.lengths), min(passes, self.config.modules) - 1
        for module in range(before):
            states.append(forward(rows.embeddings, previous, rows.positions, within, module=module))
            previous = self.fed(states[-1]).roll(1, dims=1)
        last = partial(forward, module=before) if before > 0 else forward
        given = rows.embeddings, previous, rows.positions, rows.lengths, passes - before
        return [*states, *unroll(last, *given, fed=self.fed)]


def _place_of(name: str) -> tuple[int, str]:
    """Of a part by our name: its module's number, 0 the first, and its name within that."""
    place, _, rest = name.partition(".")
    if place not in ("layers", "further"):
        return 0, name
    number, _, inside = rest.partition(".")
    return int(number) + (place == "further"), inside
