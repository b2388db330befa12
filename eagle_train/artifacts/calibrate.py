"""Calibrated quantisation: a draft rounded with error feedback (GPTQ), by its layers' input moments on a user's text.

The frozen target runs on packed rows, and the draft on its hidden states, as in training. Knows nothing of files,
templates or rounding. DESIGN section 3.1.

Two variants were tried and were slower, not better: layer after layer, each on the outputs of the rounded layers before
it; and the draft's own hidden states as further inputs, which it reads from the second step of a chain on. FP8 gains
little: most of its error comes from the activations, which are rounded in every call.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from eagle_train.corpus.stream import TENSORS, Batch
from eagle_train.drafts import Draft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.errors import check
from eagle_train.models.draft_quantisation import Quant, modules_to_quantise, quantise_draft
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.progress import progress

TOKENS = 65_536


@torch.no_grad()
def calibrated(draft: Draft, target: Target, batches: Iterable[Batch], quant: Quant, tokens: int = TOKENS) -> Draft:
    """The quantised draft, rounded by the second moments of each module's inputs over `tokens` supervised slots.

    `batches` are those of `corpus.stream.Stream`; if they end earlier, fewer slots are used. `draft` is not changed,
    and the result is on its device. Raises UserError as `quantise_draft` does, and for `tokens` below 1.
    """
    check(tokens >= 1, f"tokens={tokens}: must be at least 1")
    if quant.scheme == "none":
        return draft
    moved = copy.deepcopy(draft).to(target.device)
    moments = Moments(copy.deepcopy(moved).float(), quant)
    bar = progress(tokens, "calibration token")
    for batch in batches:
        moments.add_batch(batch, target)
        bar.update(min(moments.slots, tokens))
        if moments.slots >= tokens:
            break
    bar.close()
    return quantise_draft(moved, quant, moments.sums).to(next(draft.parameters()).device)


class Moments:
    """`sums`: X^T X, fp32 [K, K], of the inputs X of each linear module that is to be quantised, by its name.

    `slots`: how many supervised slots were added; an expert gets those that its router sends to it. The draft (fp32, on
    the target's device) gets forward hooks and is not to be used for anything else.
    """

    def __init__(self, draft: Draft, quant: Quant):
        self.draft, self.slots = draft, 0
        self.supervised: torch.Tensor  # bool [B, T], of the current batch
        self.experts: dict[str, torch.Tensor] = {}  # by the MoE layer's name: each slot's expert, int64 [B * T]
        self.sums: dict[str, torch.Tensor] = {}
        for name, module in modules_to_quantise(draft, quant).items():
            self.sums[name] = module.weight.new_zeros(module.in_features, module.in_features)
            module.register_forward_pre_hook(partial(self._add_inputs, name))
        for name, module in draft.named_modules():
            if name.endswith(".router"):
                module.register_forward_hook(partial(self._route, name.removesuffix(".router")))

    def add_batch(self, batch: Batch, target: Target) -> None:
        """Run the draft on a batch, with the target's hidden states."""
        batch = replace(batch, **{name: getattr(batch, name).to(target.device) for name in TENSORS})
        self.supervised = batch.supervised
        self.slots += int(self.supervised.sum())
        attend = packed_attention(batch.lengths)
        layers = self.draft.config.target_layers
        states = TargetStates.split(target.states(layers)(batch.tokens, batch.positions, attend).float(), layers)
        rows = Rows(target.embed(batch.tokens).float(), states, batch.positions, batch.lengths)
        self.draft.unrolled(self.draft, rows, passes=self.draft.config.whole_passes)

    def _add_inputs(self, name: str, module: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        moe, is_expert, rest = name.partition(".experts.")
        inputs, supervised = arguments[0], self.supervised.flatten()
        if is_expert:  # its inputs are the slots that the router sent to it, in their order
            supervised = supervised[self.experts[moe] == int(rest.split(".")[0])]
        if inputs.ndim == 3:  # P-EAGLE's fc reads what mask slots are fed behind the rows' slots
            inputs = inputs[:, : self.supervised.shape[1]]
        rows = inputs.flatten(0, -2)[supervised]  # [n, K]
        self.sums[name].addmm_(rows.t(), rows)

    def _route(self, moe: str, module: nn.Module, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> None:
        self.experts[moe] = scores.argmax(-1)
