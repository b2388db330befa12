"""Llama 4's experts, each on the tokens that chose it. Knows nothing of training or inference.

transformers runs every expert on every token, most of them on zeros: with 16 experts that multiplies seven times as
much for the whole model, with 128 more than twenty times. Here the host does not even ask how many chose whom, in bf16
on Hopper and newer GPUs; elsewhere torch's own grouped product does. models/patches.py has transformers build these
classes, and turns the routing on.
"""

import torch
from torch.nn.functional import grouped_mm
from transformers import Llama4TextConfig
from transformers.activations import ACT2FN
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from eagle_train.ops.grouped import by_expert


class RoutedMoe(Llama4TextMoe):
    """`Llama4TextMoe` with the same parameters and the same results."""

    routed = False

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, H] to [B * T, H], and the router's logits [B * T, E]."""
        if not self.routed:
            return super().forward(hidden_states)
        rows = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(rows)
        return self.shared_expert(rows) + self.experts(rows, scores), logits


class RoutedExperts(Llama4TextExperts):
    """`Llama4TextExperts` that may be told the scores."""

    def __init__(self, config: Llama4TextConfig):
        super().__init__(config)
        self.num_chosen, self.activation = config.num_experts_per_tok, config.hidden_act

    def forward(self, hidden: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [N, H]; scores [N, E], 0 where a token did not choose an expert. Returns [N, H]."""
        if scores is None:
            return super().forward(hidden)
        run = torch.ops.eagle_train.routed_experts if torch.compiler.is_compiling() else _routed_experts
        return run(hidden, scores, self.gate_up_proj, self.down_proj, self.num_chosen, self.activation)


def _routed_experts(
    hidden: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: int, activation: str
) -> torch.Tensor:
    """hidden [N, H] and scores [N, E] with the experts' matrices [E, H, 2I] and [E, I, H] to [N, H]."""
    best, experts = scores.topk(chosen, dim=-1)
    order, ends = by_expert(experts.flatten(), scores.shape[1])
    rows = order // chosen
    scaled = hidden[rows] * best.flatten()[order].unsqueeze(1)
    gate, up = grouped_mm(scaled, gate_up, offs=ends).chunk(2, -1)
    out = grouped_mm(up * ACT2FN[activation](gate), down, offs=ends)
    return torch.zeros_like(hidden).index_add_(0, rows, out)


# To torch.compile one operation: it takes a CPU's grouped products for bf16's alone.
torch.library.define(
    "eagle_train::routed_experts",
    "(Tensor hidden, Tensor scores, Tensor gate_up, Tensor down, int chosen, str activation) -> Tensor",
)
torch.library.impl("eagle_train::routed_experts", "CompositeExplicitAutograd")(_routed_experts)
torch.library.register_fake("eagle_train::routed_experts")(lambda hidden, *_: torch.empty_like(hidden))
