"""Queries, keys and values at random, and rules of every kind, for tests of attention."""

import torch

from eagle_train.ops.rule import Rule

HEADS, WIDTH = 4, 8
SCALE = 0.4
SINKS = torch.tensor([-1.0, 0.0, 1.5, 3.0])
RULES = {
    "plain": Rule(SCALE),
    "window": Rule(SCALE, window=3),
    "chunk": Rule(SCALE, chunk=4),
    "softcap": Rule(SCALE, softcap=1.5),
    "sinks": Rule(SCALE, sinks=SINKS),
    "skip first": Rule(SCALE, skip_first=True),
    "skip first, chunk": Rule(SCALE, chunk=4, skip_first=True),
    "skip three": Rule(SCALE, skip_first=3),
    "skip three, window": Rule(SCALE, window=4, skip_first=3),
    "all": Rule(SCALE, window=5, chunk=4, softcap=2.0, sinks=SINKS),
}


def random_qkv(batch=2, kv_heads=2, queries=3, keys=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, HEADS, queries, WIDTH), (batch, kv_heads, keys, WIDTH), (batch, kv_heads, keys, WIDTH)
    return [(2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
