"""How long a device takes to find the most likely token, by its kernel and by logits. Knows nothing of reports."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from eagle_train.models.head import LMHead
from eagle_train.ops import head_argmax
from eagle_train.ops.kernels import plain
from evals.bench.device_times import seconds_of


def most_likely(weight: torch.Tensor, rows: Iterable[int], repeats: int) -> list[dict[str, Any]]:
    """After few hidden states, by an LM head's weight [V, H] and the kernel of ops/head_argmax.py, where the device has
    one: ms, by logits too, and 10^9 bytes of weight a second."""
    head, device, found = LMHead(weight), weight.device, []
    for count in rows:
        x = torch.randn(count, weight.shape[1], device=device).to(weight.dtype)
        if not head_argmax.supports(x, weight):
            continue
        seconds = seconds_of(partial(head_argmax.head_argmax, x, weight), device.type, repeats)
        with plain("linear"):
            by_logits = seconds_of(partial(head.most_likely, x, 1), device.type, repeats)
        rate = weight.nbytes / seconds / 1e9
        found.append({"rows": count, "ms": 1e3 * seconds, "by_logits_ms": 1e3 * by_logits, "gb_per_s": rate})
    return found
