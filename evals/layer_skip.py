"""Which of the target's layers draft well for it: found, and written as a YAML that `drafter.layers` takes.

The target answers the questions once. All beginnings of its layers are tried on the answers, and then, from the best,
each layer more or less, as long as that is better (evals/bench/layer_search.py).

    python -m evals.layer_skip questions=FILE.jsonl out=DIR
    eagle-generate drafter=layer_skip drafter.layers=DIR/layers.yaml tree=chain3 prompt=TEXT
"""

from dataclasses import asdict, dataclass

import torch
from omegaconf import DictConfig

from eagle_train.errors import check
from eagle_train.results import json_text, redact
from eagle_train.settings import build
from evals.bench.answering import Run, batches_of
from evals.bench.config import SampledConfig, check_decodes, check_least
from evals.bench.evaluation import evaluation, origin
from evals.bench.layer_search import Judge, search
from evals.bench.report import loops
from evals.bench.requests import check_fit
from evals.bench.session import Session
from evals.bench.statistics import looping, no_decoding, token_ids


@dataclass(kw_only=True)
class Config(SampledConfig):
    """conf/commands/layer_skip.yaml, which says what each key is. Raises UserError for values that cannot be."""

    limit: int | None
    batch_size: int
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "batch_size", "depth")
        check_decodes(self.max_tokens)


@evaluation("layer_skip")
@torch.inference_mode()
def main(values: DictConfig) -> None:
    session = Session(build(Config, values, ""))
    config, out = session.config, session.out
    longest = check_fit(session.requests, session.questions, config.max_tokens)
    run = Run(session.engine(max_batch_size=config.batch_size, longest=longest), session.requests)
    for batch in batches_of(session.questions, config.batch_size):
        run.ask(batch, config.params)
    texts = [(answer.prompt, answer.output.token_ids) for answer in run.answers if len(answer.output.token_ids) > 1]
    check(bool(texts), no_decoding(config.max_tokens))
    found = search(Judge(session.target, texts, config.depth), session.target.config.num_hidden_layers)
    session.write(
        "layers.yaml", f"# By python -m evals.layer_skip; for drafter.layers.\nlayers: {list(found[0].layers)}\n"
    )
    tried = [each._asdict() for each in found]
    written = {
        "tried": tried,
        "looping_answers": looping(token_ids(run.answers)),
        "target_source": session.target.identity.fingerprint,
        "config": redact(asdict(config)),
        **origin(),
    }
    session.write("layer_skip.json", json_text(written, indent=2) + "\n")
    best = [
        f"{each.speedup:.2f} times, chain{each.chain}: agreement {each.agreement:.2f}, layers {list(each.layers)}"
        for each in found[:5]
    ]
    session.say(
        *best,
        *loops(written),
        f"written to {out}: layers.yaml (drafter.layers={out / 'layers.yaml'}), layer_skip.json",
    )


if __name__ == "__main__":
    main()
