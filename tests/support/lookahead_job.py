"""What test_lookahead.py starts on several ranks: lookahead decoding with a target that the ranks divide."""

import json
from pathlib import Path

from eagle_train import distributed
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.drafters.lookahead import Lookahead, LookaheadOptions
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, token_ids

SMALL = LookaheadOptions(4, 4, 3)


def outcomes(target: Target) -> list[dict]:
    """What it answers at temperature 0 and at others, and in how many rounds."""
    drawn = [SamplingParams(float(i != 2), seed=i, max_tokens=LENGTH - i, ignore_eos=True) for i in range(len(PROMPTS))]
    cases = []
    for params in (GREEDY, drawn):
        outputs = Engine(target, Lookahead(SMALL), "chain3", max_batch_size=3).generate(PROMPTS, params)
        cases.append({"tokens": token_ids(outputs), "rounds": [output.rounds for output in outputs]})
    return cases


def main(directory: Path) -> None:
    """`directory`: of the target; each rank writes there what it found."""
    world = distributed.start("cpu", shard_size=None, group=True)
    target = load_target(TargetConfig(str(directory)), "cpu", "tensor", world)
    (directory / f"found-{world.rank}.json").write_text(json.dumps(outcomes(target)))
    distributed.leave()
