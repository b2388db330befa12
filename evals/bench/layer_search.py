"""Which layers of a target draft well for it: sets of layers are judged on texts, better ones searched step by step.

A set is judged by how often its first draft is the text's own token, and by the weights that it reads for a draft: both
give the speed of the best chain, over plain decoding, if time goes by weights that are read. Knows nothing of engines.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from eagle_train.models.forward import layers_of
from eagle_train.models.target import Target
from eagle_train.ops.attention import merge, packed_attention, partial_attention, with_sinks
from eagle_train.ops.rule import Rule, additive_mask
from eagle_train.progress import progress

Pair = tuple[torch.Tensor, torch.Tensor]
Text = tuple[list[int], list[int]]
"""A prompt and its answer, of two tokens at least."""


class Found(NamedTuple):
    """A set of layers. `agreement`: the share of right first drafts; `cost`: what share of the weights of a target call
    a draft reads, of a divided target on one rank; `speedup`: expected of a chain of `chain` drafts."""

    layers: tuple[int, ...]
    agreement: float
    cost: float
    chain: int
    speedup: float


class Judge:
    """Tries sets of layers on texts, each alone."""

    def __init__(self, target: Target, texts: list[Text], depth: int):
        """`depth`: of the longest chain."""
        self.target, self.texts, self.depth, self.stages = target, texts, depth, target.stages()
        layers = layers_of(target.model, target.config.num_hidden_layers)
        assert layers is not None  # `stages` has refused the family
        head = target.lm_head.weight.numel()
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
        self._costs, self._head = [size / (sum(sizes) + head) for size in sizes], head / (sum(sizes) + head)
        self._pairs = [self._committed(prompt + answer) for prompt, answer in texts]

    def __call__(self, layers: tuple[int, ...]) -> Found:
        right = total = 0
        for (prompt, answer), pairs in zip(self.texts, self._pairs, strict=True):
            drafted = self._drafts(prompt + answer, layers, pairs)[len(prompt) : -1]
            wanted = torch.tensor(answer[1:], device=drafted.device)
            right, total = right + int((drafted == wanted).sum()), total + len(wanted)
        share, cost = right / total, self._head + sum(self._costs[layer] for layer in layers)
        speedups = [sum(share**d for d in range(k + 1)) / (1 + k * cost) for k in range(1, self.depth + 1)]
        best = max(range(self.depth), key=speedups.__getitem__)
        return Found(layers, share, cost, best + 1, speedups[best])

    def _committed(self, text: list[int]) -> dict[int, Pair]:
        """The whole target's keys and values of a text, by layer."""
        pairs, whole = dict[int, Pair](), packed_attention([[len(text)]])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            pairs[layer] = k.clone(), v.clone()
            return whole(layer, q, k, v, rule)

        self.target.hidden_states(*self._inputs(text), attend)
        return pairs

    def _drafts(self, text: list[int], layers: tuple[int, ...], pairs: dict[int, Pair]) -> torch.Tensor:
        """int64 [T]: what these layers draft behind each token: they see the target's own keys and values of the tokens
        before it, as in decoding, and what they make of the token itself."""
        tokens, positions = self._inputs(text)
        query, key = positions[0].unsqueeze(1), positions[0].unsqueeze(0)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            before = additive_mask((key < query) & rule.sees(query, key))[None, None]
            own = additive_mask(key == query)[None, None]
            parts = partial_attention(q, *pairs[layer], before, rule), partial_attention(q, k, v, own, rule)
            return with_sinks(*merge(*parts), rule)

        states, _ = self.stages.part(lambda: self.target.hidden_states(tokens, positions, attend), layers)
        return self.target.lm_head(states)[0].argmax(-1)

    def _inputs(self, text: list[int]) -> Pair:
        tokens = torch.tensor([text], device=self.target.device)
        return tokens, torch.arange(len(text), device=tokens.device)[None]


def search(judge: Callable[[tuple[int, ...]], Found], count: int) -> list[Found]:
    """All sets of `count` layers that were tried, the best one first: beginnings, then steps of one layer."""
    tried = {layers: judge(layers) for layers in (tuple(range(n)) for n in range(1, max(count, 2)))}
    while True:
        best = max(tried.values(), key=lambda each: each.speedup)
        near = [tuple(sorted(set(best.layers) ^ {layer})) for layer in range(count)]
        new = [layers for layers in near if layers and layers not in tried]
        if not new:
            return sorted(tried.values(), key=lambda each: -each.speedup)
        bar = progress(len(new), "set of layers")
        for done, layers in enumerate(new, 1):
            tried[layers] = judge(layers)
            bar.update(done)
        bar.close()
