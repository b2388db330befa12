"""What test_random_models.py starts on one process and on two ranks: random models, and what they compute."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from eagle_train import distributed
from eagle_train.inference import Engine, SamplingParams
from eagle_train.ops.attention import packed_attention
from evals.bench import random_models
from evals.bench.random_models import RandomDraftOptions, ShapesConfig
from tests.support.tiny import SIZES

LLAMA = {"model_type": "llama", **SIZES, "initializer_range": 0.1}
EXPERTS = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "experts": EXPERTS | {"model_type": "mixtral"},  # whose gate and up are one tensor, cut in two places
}
SEED, WINDOW, LENGTH = 5, 3, 12
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]


def main(out: Path) -> None:
    """What a rank does; the first writes."""
    world = distributed.start("cpu", shard_size=None)
    found = {name: computed(config, world) for name, config in CONFIGS.items()}
    if world.is_main:
        torch.save(found, out)
    distributed.leave()


@patch.object(random_models, "_BLOCK", 100)  # less than any matrix
def computed(config: dict[str, Any], world: distributed.World) -> dict[str, Any]:
    """Logits, greedy answers without and with the draft, the draft, and the share of the weights that a rank has."""
    options = RandomDraftOptions(window=WINDOW, sink=True)
    target, draft = random_models.random_models(ShapesConfig(config, None, "float32"), options, "cpu", SEED, world)
    weights = list(target.model.parameters())
    own = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in weights)
    positions = torch.arange(LENGTH)[None]
    with CommDebugMode() as sums:
        hidden = target.hidden_states(positions, positions, packed_attention([[LENGTH]]))
    found = {
        "share": own / sum(each.numel() for each in weights),
        "sums": sums.get_total_counts(),
        "logits": target.lm_head(hidden),
        "draft": draft,
    }
    divided = {} if world.size == 1 else {"divide_draft": True, "divide_lm_head": True}
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    for name, given in (("plain", None), ("drafted", draft)):
        outputs = Engine(target, given, "chain3", **divided).generate(PROMPTS, params)
        found[name] = [each.token_ids for each in outputs]
    return found
