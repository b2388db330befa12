"""A draft in few bits whose rounding knows what its layers are given: their inputs' second moments on a user's text.

The frozen target runs on packed rows and the draft on its hidden states, as in training. Knows nothing of files,
templates or rounding. DESIGN section 3.1.

On the bundled target, INT4 in all matrices, the divergence of the draft's distribution from that of the draft as it is
is 0.4 of what rounding to nearest gives. No better, and slower: layers one after another, each given what those before
put out once rounded; the draft's own hidden states besides, which it reads from a chain's second step on.

FP8 has little to gain. There the feed-forward's error (of the draft's states, relative, squared: 1.6e-3 rounded to
nearest, 1.2e-3 so; INT4 1e-2 and 4e-3) is mostly the activations', 1.0e-3, which are rounded in every call: the
weights' own falls from 0.6e-3 to 0.2e-3. Shrinking the weights by what the activations' rounding adds to the moments
changed nothing.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from eagle_train.corpus.stream import TENSORS, Batch
from eagle_train.errors import check
from eagle_train.models.draft import Draft, shift_hidden
from eagle_train.models.draft_quantisation import Quant, modules_to_quantise, quantise_draft
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.progress import progress

TOKENS = 65_536


@torch.no_grad()
def calibrated(draft: Draft, target: Target, batches: Iterable[Batch], quant: Quant, tokens: int = TOKENS) -> Draft:
    """`quantise_draft` by the second moments of each module's inputs over `tokens` supervised slots of `batches`.

    The batches are those of `corpus.stream.Stream`; where they end before, fewer slots are seen. `draft` is left alone,
    and the result lies where it does. Raises UserError as `quantise_draft` does, and for less than one token.
    """
    check(tokens >= 1, f"tokens={tokens}: must be at least 1")
    if quant.scheme == "none":
        return draft
    moved = copy.deepcopy(draft).to(target.device)
    moments = Moments(copy.deepcopy(moved).float(), quant)
    bar = progress(tokens, "calibration token")
    for batch in batches:
        moments.see(batch, target)
        bar.update(min(moments.seen, tokens))
        if moments.seen >= tokens:
            break
    bar.close()
    return quantise_draft(moved, quant, moments.sums).to(draft.fc.weight.device)


class Moments:
    """X^T X, fp32 [K, K], of the inputs X of each linear module that is to be quantised, by its name: `sums`.

    `seen` slots, the supervised ones, have been counted; an expert's are those of them that its router sent there. The
    draft, fp32 and where the target is, is given for good: its modules report what they are given.
    """

    def __init__(self, draft: Draft, quant: Quant):
        self.draft, self.seen = draft, 0
        self.counted: torch.Tensor  # bool [B * T]: the slots of the batch that count
        self.experts: dict[str, torch.Tensor] = {}  # by the mixture's name: which expert each slot was sent to
        self.sums: dict[str, torch.Tensor] = {}
        for name, module in modules_to_quantise(draft, quant).items():
            self.sums[name] = module.weight.new_zeros(module.in_features, module.in_features)
            module.register_forward_pre_hook(partial(self.add, name))
        for name, module in draft.named_modules():
            if name.endswith(".router"):
                module.register_forward_hook(partial(self.route, name.removesuffix(".router")))

    def see(self, batch: Batch, target: Target) -> None:
        """Run the draft on a batch, on the target's hidden states."""
        batch = replace(batch, **{name: getattr(batch, name).to(target.device) for name in TENSORS})
        self.counted = batch.supervised.flatten()
        self.seen += int(self.counted.sum())
        attend = packed_attention(batch.lengths)
        hidden = target.hidden_states(batch.tokens, batch.positions, attend).float()
        previous = shift_hidden(hidden, batch.positions)
        self.draft(target.embed(batch.tokens).float(), previous, batch.positions, attend)

    def add(self, name: str, module: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        mixture, of_expert, rest = name.partition(".experts.")
        counted = self.counted
        if of_expert:
            counted = counted[self.experts[mixture] == int(rest.split(".")[0])]
        rows = arguments[0].flatten(0, -2)[counted]
        self.sums[name].addmm_(rows.t(), rows)

    def route(self, mixture: str, module: nn.Module, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> None:
        self.experts[mixture] = scores.argmax(-1)
