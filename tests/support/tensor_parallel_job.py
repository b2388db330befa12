"""What test_tensor_parallel.py starts on several ranks: engines whose target is divided between them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from eagle_train import distributed
from eagle_train.artifacts.format import load_draft
from eagle_train.drafts import Draft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import LMHead, Target
from tests.support.graph_recorder import recorded
from tests.support.inside import drafter_of, inside, pool_of, runner_of
from tests.support.reference_answers import LENGTH, PROMPTS
from tests.support.tiny import tiny_draft


def params_of(count: int) -> list[SamplingParams]:
    """Of every kind, and rows that end early."""
    return [
        SamplingParams(
            temperature=float(i != 2), top_p=0.9 if i % 2 else 1.0, seed=i, max_tokens=LENGTH - 3 * i, ignore_eos=True
        )
        for i in range(count)
    ]


def draft_of(case: dict, target: Target, directory: Path, rank: int) -> Draft:
    """The family's own, or one that is another on every rank."""
    return tiny_draft(target, seed=rank) if case.get("drafts_differ") else load_draft(directory, target.identity)


def fall_short(engine: Engine, rank: int) -> None:
    """Memory is another on each rank, and at first there is none on the last: all refuse what that has no room for."""

    def none(*_: int) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    inside(engine).memory.affordable = lambda: 6 + 4 * rank
    if rank == runner_of(engine).ranks.size - 1:
        runner_of(engine).cache.grown = none
    with pytest.raises(UserError, match="no memory for the keys and values"):
        engine.generate(PROMPTS[:1])
    vars(runner_of(engine).cache).pop("grown", None)


def random_answers(engine: Engine) -> list[list[int]]:
    """Of requests without a seed."""
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=None, n=2)
    outputs = engine.generate(PROMPTS[:1], params)
    engine.add(PROMPTS[0], replace(params, n=1))
    updates = [engine.step()]
    while engine.has_unfinished:
        updates.append(engine.step())
    return [*(output.token_ids for output in outputs), updates[-1][0].output.token_ids]


def outcome(case: dict, target: Target, directory: Path, rank: int = 0) -> dict:
    """What an engine answers, in how many rounds, and of how many rows it computed the logits."""
    target.compiled_forwards.clear()  # another case's may be by another compiler
    with patch.object(torch, "compile", partial(torch.compile, backend=case["backend"])):
        engine = Engine(target, draft_of(case, target, directory, rank), **case["engine"])
    if case["recorded"]:
        recorded(engine)
    if case["short"]:
        fall_short(engine, rank)
    own, seen = target.lm_head, []

    class Noting(LMHead):
        def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(len(hidden))
            return super().__call__(hidden).roll(rank * case["logits_differ"], -1)  # the first rank's are right

    target.lm_head = Noting(**vars(own))
    count = case["count"]
    greedy = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    params = params_of(count) if case["sampled"] else [greedy] * count
    if case["changed"]:
        changes = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {5: 1.5}, "min_p": 0.02}
        params[1:] = [replace(each, logprobs=row, **changes) for row, each in enumerate(params[1:])]
        params[-1] = replace(params[-1], min_tokens=4, stop_token_ids=tuple(range(20)))
    if case["guided"]:
        params[::2] = [replace(each, grammar={"regex": "[a-f]{2,9}(xy|z)?"}) for each in params[::2]]
    outputs = engine.generate(PROMPTS[:count], params)
    target.lm_head = own
    pool, graphs = pool_of(engine), runner_of(engine).graphs
    parts = [] if graphs is None else [graphs.drafting, graphs.validation, graphs.ends]
    return {
        "replays": [part.record.replays for part in parts],
        "tokens": [output.token_ids for output in outputs],
        "rounds": [output.rounds for output in outputs],
        "logprobs": [output.logprobs for output in outputs],
        "random": random_answers(engine) if case["changed"] else [],
        "rows": seen,
        "compiled": bool(target.compiled_forwards),  # the forward was made
        "free": pool.available == pool.total,
        "blocks": pool.total,
        "heads": runner_of(engine).cache.layers[0][0].shape[1],
        "draft_heads": drafter_of(engine).cache.layers[0][0].shape[1],
        "draft_size": sum(weight.numel() for weight in drafter_of(engine).draft.parameters() if weight.ndim > 1),
    }


def main(root: Path, cases: list[dict]) -> None:
    """`cases`: {"family": ..., "count": ..., "engine": {...}} and what else `outcome` reads."""
    world = distributed.start("cpu", shard_size=None, group=True)
    targets, found = {}, []
    for case in cases:
        family = case["family"]
        if family not in targets:
            targets[family] = load_target(TargetConfig(str(root / family)), "cpu", "tensor", world)
        found.append(outcome(case, targets[family], root / f"{family}-draft", world.rank))
    (root / f"found-{world.size}-{world.rank}.json").write_text(json.dumps(found))
    distributed.leave()
