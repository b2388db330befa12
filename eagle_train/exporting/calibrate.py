"""A draft in few bits whose rounding knows what its layers are given: their inputs' second moments on a user's text.

The frozen target runs on packed rows as in training, the draft on its hidden states, and then on its own, as in
drafting from the second step on. Knows nothing of files, templates or rounding. DESIGN section 3.1.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from eagle_train.config import check
from eagle_train.corpus.stream import TENSORS, Batch
from eagle_train.models.draft import Draft, shift_hidden
from eagle_train.models.quantised import Quant, linears, quantised
from eagle_train.models.target import Target
from eagle_train.ops.attention import Rule, packed_attention
from eagle_train.progress import progress

TOKENS = 65_536
OWN_STEPS = 2  # on the draft's own hidden states: a chain of three begins with one on the target's


@torch.no_grad()
def calibrated(draft: Draft, target: Target, batches: Iterable[Batch], quant: Quant, tokens: int = TOKENS) -> Draft:
    """`quantised`, rounded by the second moments of each module's inputs over `tokens` supervised slots of `batches`.

    The batches are those of `corpus.stream.Stream`, whose end, where they have one, may come before. The draft lies
    where `draft` does, which is left alone. Raises UserError as `quantised` does, and for less than one token.
    """
    check(tokens >= 1, f"tokens={tokens}: must be at least 1")
    if quant.scheme == "none":
        return draft
    runs = copy.deepcopy(draft).to(target.device, torch.float32)
    moments = Moments(runs, quant.scope)
    bar, seen = progress(tokens, "calibration token"), 0
    for batch in batches:
        run(runs, target, batch, moments)
        seen += int(batch.supervised.sum())
        bar.update(min(seen, tokens))
        if seen >= tokens:
            break
    bar.close()
    moments.close()
    return quantised(runs, quant, moments.sums).to(draft.fc.weight.device)


def run(draft: Draft, target: Target, batch: Batch, moments: "Moments") -> None:
    """The draft on a batch: on the target's hidden states, then on its own, as many steps as a chain has.

    Every step sees the keys and values of the first, as a chain does up to its root; what it has of its own, the last
    slot or two, is left out.
    """
    batch = replace(batch, **{name: getattr(batch, name).to(target.device) for name in TENSORS})
    packed, first = packed_attention(batch.lengths), {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        return packed(layer, q, *first.setdefault(layer, (k, v)), rule)

    moments.counted = batch.supervised.flatten()
    hidden = target.hidden_states(batch.tokens, batch.positions, packed).float()
    embeddings = target.embed(batch.tokens).float()
    for _ in range(1 + OWN_STEPS):
        previous = shift_hidden(hidden, batch.positions, draft.config.first_token)
        hidden = draft(embeddings, previous, batch.positions, attend)


class Moments:
    """X^T X, fp32 [K, K], of the inputs X of each linear module of a scope, by its name.

    Slots that `counted`, bool [B * T], says count; those of an expert are those that its router sent there.
    """

    def __init__(self, draft: Draft, scope: str):
        modules = linears(draft, scope)
        sizes = {name: module.in_features for name, module in modules.items()}
        self.sums = {name: draft.fc.weight.new_zeros(size, size) for name, size in sizes.items()}
        self.counted = torch.zeros(0, dtype=torch.bool)
        self.experts: dict[str, torch.Tensor] = {}  # that each slot was sent to, by the mixture's name
        self.hooks = [module.register_forward_pre_hook(partial(self.add, name)) for name, module in modules.items()]
        for name, module in draft.named_modules():
            if name.endswith(".router"):
                self.hooks.append(module.register_forward_hook(partial(self.route, name.removesuffix(".router"))))

    def add(self, name: str, module: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        mixture, of_expert, rest = name.partition(".experts.")
        counted = self.counted
        if of_expert:
            counted = counted[self.experts[mixture] == int(rest.split(".")[0])]
        rows = arguments[0].flatten(0, -2)[counted]
        self.sums[name].addmm_(rows.t(), rows)

    def route(self, mixture: str, module: nn.Module, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> None:
        self.experts[mixture] = scores.argmax(-1)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
