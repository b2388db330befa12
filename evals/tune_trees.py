"""Which tree pays at which batch size: measured, and written as the dispatcher's table. Paper section 3.4.

The target answers the questions once. From the answers follow the draft's acceptance, the candidate trees and their
tokens per call (evals/bench/tree_search.py); their rounds are then timed at each batch size in turn with plain ones
(evals/bench/round_times.py).

    python -m evals.tune_trees draft=DIR questions=FILE.jsonl batch_sizes=[1,4,16] out=DIR
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from eagle_train.errors import check, typed
from eagle_train.inference import EngineConfig, full
from eagle_train.inference.decode.tree import MAX_NODES
from eagle_train.models.draft_quantisation import Quant
from eagle_train.progress import progress
from eagle_train.results import json_text
from eagle_train.settings import build
from evals.bench.answering import Run, batches_of
from evals.bench.config import SampledConfig, check_decodes, check_least, check_sizes
from evals.bench.evaluation import evaluation
from evals.bench.report import loops
from evals.bench.requests import check_fit
from evals.bench.round_times import AT_ONCE, TreeInTurn, best_of, round_seconds, two_chains
from evals.bench.session import Session
from evals.bench.statistics import Answer, looping, no_decoding, token_ids
from evals.bench.tree_search import Candidate, acceptance, candidates, ranks_of
from evals.bench.trees import unpaid


@dataclass(kw_only=True)
class Config(SampledConfig):
    """conf/commands/tune_trees.yaml, which says what each key is. Raises UserError for values that cannot be."""

    quant: Quant
    limit: int | None
    batch_sizes: list[int]
    depth: int
    children: int
    nodes: list[int]
    full: list[list[int]]
    rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "depth", "children", "rounds")
        check_decodes(self.max_tokens)
        check_sizes("batch_sizes", self.batch_sizes)
        check_sizes("nodes", self.nodes)
        two_chains(self.depth)  # raises for what is too deep
        most = min(MAX_NODES - 1, sum(self.children**d for d in range(1, self.depth + 1)))
        check(
            max(self.nodes) <= most,
            f"nodes={self.nodes}: depth={self.depth} and children={self.children} make trees of at most {most}",
        )
        for pair in self.full:
            check(len(pair) == 2, f"full={self.full}: must be pairs of depth and branching")
            known = pair[0] <= self.depth and pair[1] <= self.children
            check(known, f"full={self.full}: {pair} goes beyond depth={self.depth} and children={self.children}")
            full(*pair)  # raises for what is no tree
        depths = [*range(self.depth + 1), *(depth for depth, _ in self.full), *(min(n, self.depth) for n in self.nodes)]
        self.tokens = 2 * (self.rounds + 1 + sum(depth + 1 for depth in depths))  # that `round_seconds` may generate


@evaluation("tune_trees")
def main(values: DictConfig) -> None:
    session = Session(build(Config, values, ""))
    config, target, out = session.config, session.target, session.out
    check(
        config.tokens < target.max_positions,
        f"rounds={config.rounds}: with these trees they may take {config.tokens} tokens, and the context of "
        f"{target.name} holds {target.context}",
    )
    longest = check_fit(session.requests, session.questions, config.max_tokens)
    longest = min(longest + 2 * config.tokens, target.max_positions)  # texts are asked again, as far as they came
    options = {"max_batch_size": max(config.batch_sizes), "longest": longest, **AT_ONCE}
    plain = session.engine(**options)
    answers = plain_answers(session, Run(plain, session.requests))
    drafter = session.drafter(config.quant)
    texts = [(answer.prompt, answer.output.token_ids) for answer in answers]
    ranks = [ranks_of(target, drafter.draft, *text, config.depth, config.children) for text in texts]
    shares = acceptance(ranks, config.depth, config.children)
    tried = candidates(config.depth, config.full, config.nodes, shares, ranks)
    trees = TreeInTurn(two_chains(config.depth), target.device, tried)
    engines, prompts = (plain, session.engine(drafter, trees, **options)), [answer.prompt for answer in answers]
    seconds = round_seconds(*engines, trees, tried, prompts, config.batch_sizes, config.rounds, config.tokens)
    found = {
        "acceptance": shares,
        "table": table(tried, seconds),
        "trees": [each.about(answers, ranks, target.max_positions) for each in tried],
        "round_s": {size: dict(zip([each.name for each in tried], row, strict=True)) for size, row in seconds.items()},
        "answers": len(answers),
        "looping_answers": looping(token_ids(answers)),
        **session.about(),
    }
    session.write("table.yaml", table_yaml(tried, seconds, config.options))
    session.write("tune_trees.json", json_text(found, indent=2) + "\n")
    session.say(text(tried, seconds), "batch N: times as fast as plain; *: the table's", *unpaid(found["table"]))
    session.say(*loops(found), f"written to {out}: table.yaml (tree={out / 'table.yaml'}), tune_trees.json")


def plain_answers(session: Session[Config], run: Run) -> list[Answer]:
    """Plain decoding's. Raises UserError where no answer has a second token."""
    config, size = session.config, run.engine.config.max_batch_size
    bar = progress(-(-len(session.questions) // size), "batch")
    for number, batch in enumerate(batches_of(session.questions, size), 1):
        run.ask(batch, config.params)
        bar.update(number)
    bar.close()
    check(any(len(answer.output.token_ids) > 1 for answer in run.answers), no_decoding(config.max_tokens))
    return run.answers


def table(tried: list[Candidate], seconds: dict[int, list[float]]) -> list[dict[str, Any]]:
    """A row per batch size: its best tree, the tree's TPC, and its speed-up over plain decoding."""
    rows = []
    for size, row in seconds.items():
        best = best_of(tried, row)
        speedup = tried[best].tpc * row[0] / row[best]
        rows.append({"batch_size": size, "tree": tried[best].name, "tpc": tried[best].tpc, "speedup": speedup})
    return rows


def table_yaml(tried: list[Candidate], seconds: dict[int, list[float]], options: EngineConfig) -> str:
    """The dispatcher's table: the tree of each largest batch size. `options`: the measured engines'."""
    given = f"engine.compile={typed(options.compile)} engine.graphs={typed(options.graphs)}"
    lines = [f"# Largest batch size: its tree, by python -m evals.tune_trees {given}. A root alone is no speculation."]
    for size, row in seconds.items():
        best = tried[best_of(tried, row)]
        lines.append(f"{size}: {{parents: {list(best.tree.parents)}}} # {best.name}")
    return "\n".join(lines) + "\n"


def text(tried: list[Candidate], seconds: dict[int, list[float]]) -> str:
    """A line per tree: nodes, TPC, and its speed-up over plain decoding at each batch size, the best one marked."""
    lines = [f"{'tree':<10}{'nodes':>6}{'TPC':>7}" + "".join(f"{f'batch {size}':>12}" for size in seconds)]
    for i, each in enumerate(tried):
        line = f"{each.name:<10}{each.tree.num_nodes - 1:>6}{each.tpc:>7.2f}"
        for row in seconds.values():
            line += f"{each.tpc * row[0] / row[i]:>11.2f}{'*' if best_of(tried, row) == i else ' '}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
