"""What test_every_drafter.py starts on several ranks: drafters of each kind, with a target that is divided or not."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from eagle_train import distributed
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from tests.support.drafters import KINDS, LENGTH, PROMPTS, TOGETHER, WHOLE, with_several
from tests.support.reference_answers import token_ids

OF_ITS_OWN = ["layer_skip", "tree=auto"]  # where each rank has the whole target, engines are those of one process
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


def outcomes(target: Target, kinds: Iterable[str] = KINDS) -> dict[str, dict]:
    """By kind what is answered at temperature 0 and at others, and in how many rounds: of one engine for those of
    TOGETHER, and an engine for each other."""
    texts, found = [prompt * 3 for prompt in PROMPTS], {}
    several = [name for name in kinds if name in TOGETHER]
    engines = {(name,): KINDS[name].engine(target, texts) for name in kinds if name not in TOGETHER}
    engines[(*several,)] = with_several(target, texts, several)
    for names, engine in engines.items():
        found |= answered(engine, names, asked())
    return found


def asked() -> list[SamplingParams]:
    """Of PROMPTS, one each; of every third the temperature is 0."""
    params = [replace(GREEDY, temperature=float(i % 3 < 2), seed=i, max_tokens=LENGTH - i) for i in range(len(PROMPTS))]
    params[3] = replace(params[3], repetition_penalty=1.3, logit_bias={5: 1.5}, min_p=0.02)
    params[4] = replace(params[4], grammar={"regex": "[a-f]{2,9}(xy|z)?"})
    return params


def answered(engine: Engine, names: tuple[str, ...], params: list[SamplingParams]) -> dict[str, dict]:
    """By drafter: what PROMPTS are answered by it."""
    own = [replace(each, drafter=name if name in TOGETHER else None) for name in names for each in params]
    outputs = engine.generate(PROMPTS * len(names), own)
    found = {}
    for place, name in enumerate(names):
        own = outputs[place * len(PROMPTS) :][: len(PROMPTS)]
        found[name] = {"tokens": token_ids(own), "rounds": [output.rounds for output in own]}
    return found


def main(directory: Path) -> None:
    """`directory`: of the target; each rank writes there what it found."""
    world = distributed.start("cpu", shard_size=None, group=True)
    own, divided = (load_target(TargetConfig(str(directory)), "cpu", how, world) for how in ("replicated", "tensor"))
    WHOLE[id(divided)] = own
    found = {"replicated": outcomes(own, OF_ITS_OWN), "tensor": outcomes(divided)}
    (directory / f"found-{world.rank}.json").write_text(json.dumps(found))
    distributed.leave()
