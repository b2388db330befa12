"""What test_every_drafter.py starts on several ranks: drafters of each kind, with a target that is divided or not."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from eagle_train import distributed
from eagle_train.inference import SamplingParams
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from tests.support.drafters import KINDS, LENGTH, PROMPTS, WHOLE
from tests.support.reference_answers import token_ids

OF_ITS_OWN = ["layer_skip", "tree=auto"]  # where each rank has the whole target, engines are those of one process
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


def outcomes(target: Target, kinds: Iterable[str] = KINDS) -> dict[str, list[dict]]:
    """By kind what is answered at temperature 0 and at others, and in how many rounds."""
    drawn = [replace(GREEDY, temperature=float(i != 2), seed=i, max_tokens=LENGTH - i) for i in range(len(PROMPTS))]
    drawn[3] = replace(drawn[3], repetition_penalty=1.3, logit_bias={5: 1.5}, min_p=0.02)
    drawn[4] = replace(drawn[4], grammar={"regex": "[a-f]{2,9}(xy|z)?"})
    found = {}
    for name in kinds:
        engine, cases = KINDS[name].engine(target, [prompt * 3 for prompt in PROMPTS]), []
        for params in ([GREEDY] * len(PROMPTS), drawn):
            outputs = engine.generate(PROMPTS, params)
            cases.append({"tokens": token_ids(outputs), "rounds": [output.rounds for output in outputs]})
        found[name] = cases
    return found


def main(directory: Path) -> None:
    """`directory`: of the target; each rank writes there what it found."""
    world = distributed.start("cpu", shard_size=None, group=True)
    own, divided = (load_target(TargetConfig(str(directory)), "cpu", how, world) for how in ("replicated", "tensor"))
    WHOLE[id(divided)] = own
    found = {"replicated": outcomes(own, OF_ITS_OWN), "tensor": outcomes(divided)}
    (directory / f"found-{world.rank}.json").write_text(json.dumps(found))
    distributed.leave()
