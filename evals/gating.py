"""What choosing by measured acceptance and cost brings: engine.gate and tree=auto against the best fixed choice.

Loads: drafts that are never accepted, that are good, and that are good for every second request, which is simulated,
so that outputs mean nothing, and every round is computed; and the drafter's own acceptance, which is all there is of a
drafter that may propose fewer drafts than the tree has. All choices answer the same batches, in turns of some rounds.
Paper section 3.4, DESIGN section 3.5.

    python -m evals.gating draft=DIR batch_sizes=[1,8] out=DIR
    python -m evals.gating drafter=ngram batch_sizes=[1,8] out=DIR
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from omegaconf import DictConfig

from eagle_train.artifacts.markdown import aligned
from eagle_train.errors import check
from eagle_train.inference import Dispatcher
from eagle_train.inference.drafters import drafter_name
from eagle_train.progress import progress
from eagle_train.settings import build
from evals.bench.choosing import DEPTH, LOADS, OWN, PLAIN, rates
from evals.bench.config import DrafterConfig, check_decodes, check_least, check_sizes
from evals.bench.evaluation import evaluation
from evals.bench.report import document, made_on, number, sampling, subject, table
from evals.bench.requests import PromptSource
from evals.bench.session import Session
from evals.bench.statistics import median_interval
from evals.bench.trees import check_tree

GATE, AUTO = "gate", "auto"
_TOLD = {"noise": "none", "half": "every second request", "good": "all", OWN: "as accepted"}  # who has good drafts


@dataclass(kw_only=True)
class Config(DrafterConfig):
    """conf/commands/gating.yaml, which says what each key is. Raises UserError for values that cannot be."""

    tree: Any
    others: list[str]
    acceptance: float
    batch_sizes: list[int]
    repeats: int
    settle: int
    per_row: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "repeats", "per_row")
        check_least(self, 0, "settle")
        check_decodes(self.max_tokens)
        check(self.min_tokens == 0, f"min_tokens={self.min_tokens}: no answer ends early here; leave it out")
        check_sizes("batch_sizes", self.batch_sizes)
        check(0 < self.acceptance < 1, f"acceptance={self.acceptance}: must be between 0 and 1")
        for tree in (self.tree, *self.others):
            check_tree(tree, max(self.batch_sizes))
            check(1 <= Dispatcher(tree).deepest <= DEPTH, f"tree={tree}: must be from 1 to {DEPTH} deep")
        self.check_draft()
        self.params = replace(self.params, ignore_eos=True)

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """The options of each choice's engine, by its name."""
        fixed = {str(tree): {"tree": tree} for tree in (self.tree, *self.others)}
        return {PLAIN: {}, **fixed, GATE: {"tree": self.tree, "gate": True}, AUTO: {"tree": "auto"}}

    @property
    def loads(self) -> list[str]:
        """Acceptance is simulated of a trained draft alone, which proposes as many drafts as the tree has."""
        return list(LOADS) if self.is_eagle else [OWN]


@evaluation("gating")
def main(values: DictConfig) -> None:
    session = Session(build(Config, values, ""))
    config = session.config
    source = PromptSource(session.requests, session.questions, config.params)
    cells = [(size, load) for size in config.batch_sizes for load in config.loads]
    rows, bar = list[dict[str, Any]](), progress(len(cells), "load")
    for done, (size, load) in enumerate(cells, 1):
        asked = source.batches(config.settle + config.repeats, size * config.per_row, None)
        found = rates(session, config.choices, size, load, asked)
        rows.append({"batch_size": size, "load": load, **compared(found, config)})
        name = drafter_name(config.spec)
        told = {"rows": rows, "left": len(cells) - done, "drafter": name, **session.about()}
        session.report(told, markdown(told))
        bar.update(done)
    bar.close()
    session.say(aligned(comparison(rows)), f"written to {session.out}: report.md, results.json")


def compared(found: Mapping[str, list[float]], config: Config) -> dict[str, Any]:
    """Of gate and auto: the share of the best fixed choice's tokens a second, the median over batches, and its
    interval. The gate's fixed choices are no drafts and its own tree."""
    fixed = {name: median(each) for name, each in found.items() if name not in (GATE, AUTO)}
    row: dict[str, Any] = {"tokens_per_s": {name: median(each) for name, each in found.items()}}
    for name, known in ((GATE, [PLAIN, str(config.tree)]), (AUTO, list(fixed))):
        best = max(known, key=fixed.__getitem__)
        shares = [own / other for own, other in zip(found[name], found[best], strict=True)]
        row[name] = {"best": best, "share": median(shares), "interval": median_interval(shares)}
    return row


def comparison(rows: list[dict[str, Any]]) -> str:
    """A row for each batch size and load."""
    names = list(rows[0]["tokens_per_s"])
    header = ["batch", "good drafts", *(f"{name}, tokens/s" for name in names), "gate / best", "auto / best"]
    return table(header, [_columns(row) for row in rows])


def _columns(row: dict[str, Any]) -> list[str]:
    shares = []
    for name in (GATE, AUTO):
        interval = row[name]["interval"]
        told = "" if interval is None else " ({:.3f} to {:.3f})".format(*interval)
        shares.append(f"{row[name]['share']:.3f} of {row[name]['best']}{told}")
    told = _TOLD[row["load"]]
    return [str(row["batch_size"]), told, *(number(each, 1) for each in row["tokens_per_s"].values()), *shares]


def markdown(found: Mapping[str, Any]) -> str:
    """report.md."""
    config = found["config"]
    said = (
        f"{subject(found)}; {sampling(config)}. Drafts of a good request are accepted with {config['acceptance']} "
        "where the one above was; of others never. As accepted: nothing is simulated. "
        f"Medians of {config['repeats']} batches of {config['per_row']} requests for each row, which take the places "
        f"of those that end, after {config['settle']} more batches; answers of up to {config['max_tokens']} tokens, "
        "reading prompts included; the engines take turns of some rounds. `gate / best`: with engine.gate, against "
        "the faster of no drafts and its own tree; `auto / best`: tree=auto against the fastest of all fixed ones."
    )
    left = [f"Rows still to come: {found['left']}."] if found["left"] else []
    text = "\n\n".join([said, comparison(found["rows"]), *left])
    return document({"Choosing against fixed choices": text, "Made on": made_on(found)})


if __name__ == "__main__":
    main()
