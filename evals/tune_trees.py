"""Which tree pays at which batch size: measured, and written down as the dispatcher's table. Paper section 3.4.

The target answers the questions once; the draft is unrolled over its answers, which ranks the answer's next token among
the draft's proposals at every depth. From these ranks come the shares by (depth, child rank), the pruned trees N_i, and
the TPC of any tree, without decoding again: exactly that with draft.alignment=accepted, and about that with `last`.
Rounds of each tree are then timed at each batch size, in turn with plain ones. Knows nothing of training or reports.

    python -m evals.tune_trees draft=DIR questions=FILE.jsonl batch_sizes=[1,4,16] out=DIR
"""

import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from omegaconf import DictConfig

from eagle_train.artifacts.format import read_artifact
from eagle_train.cli import command
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.graphs import check_graphs
from eagle_train.inference.decode.tree import MAX_NODES, Tree, chain, full, pruned
from eagle_train.inference.requests.readable import chats
from eagle_train.models.draft import Draft, Head, shift_hidden
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.quantised import Quant
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.progress import progress
from eagle_train.results import prepared, provenance, write_json, write_text
from eagle_train.settings import build
from eagle_train.training.unroll import unroll
from evals.figures import NO_DECODING
from evals.mt_bench import Artifact, Run, ask, check_fit, drafter_of
from evals.questions import read_questions

Ranks = torch.Tensor
"""int64 [roots, depth]: of the token that followed, `depth` after each root of an answer; `children` where it is not
among so many proposals, or where the answer has ended."""

AT_ONCE: dict[str, Any] = {"overlap": False, "prefill_tokens": None}
"""A step is then one round from its beginning to its end: no text is left to read, and no other tree's round to wait
for."""


@dataclass
class Config:
    """conf/commands/tune_trees.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    quant: Quant
    draft: Artifact
    questions: str
    out: str
    limit: int | None
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    batch_sizes: list[int]
    depth: int
    children: int
    nodes: list[int]
    full: list[list[int]]
    rounds: int
    compile: bool
    graphs: bool
    device: str
    threads: int | None

    def __post_init__(self) -> None:
        for key in ("depth", "children", "rounds"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: must be at least 1")
        check(self.max_tokens >= 2, f"max_tokens={self.max_tokens}: must be at least 2, for there to be decoding")
        for key in ("batch_sizes", "nodes"):
            sizes = getattr(self, key)
            check(bool(sizes) and min(sizes) >= 1, f"{key}={sizes}: must be numbers from 1 on")
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
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")
        depths = [*range(self.depth + 1), *(depth for depth, _ in self.full), *(min(n, self.depth) for n in self.nodes)]
        self.tokens = 2 * (self.rounds + 1 + sum(depth + 1 for depth in depths))  # that `round_seconds` may take
        self.params = SamplingParams(self.temperature, self.top_p, self.top_k, self.max_tokens, self.seed)


@dataclass(frozen=True)
class Candidate:
    """A tree to be tried. `tpc`: what it makes of the answers."""

    name: str
    tree: Tree
    tpc: float


@command("tune_trees")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device = resolve_device(config.device)
    check_graphs(config.graphs, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    questions = read_questions(config.questions, config.limit)
    about = read_artifact(config.draft.path)
    target = load_target(config.target, device, reads=chats)
    check(
        config.tokens < target.max_positions,
        f"rounds={config.rounds}: with these trees they may take {config.tokens} tokens, and the context of "
        f"{target.name} holds {target.context}",
    )
    out = prepared(config.out)
    drafter = drafter_of(target, config.draft, config.quant)
    largest = max(config.batch_sizes)
    options = {"max_batch_size": largest, "compile": config.compile, "graphs": config.graphs, **AT_ONCE}
    plain = Run(Engine(target, **options))
    check_fit(plain.engine, questions, config.max_tokens)
    bar = progress(-(-len(questions) // largest), "batch")
    for number, start in enumerate(range(0, len(questions), largest), 1):
        plain.batches += ask(plain.engine, questions[start : start + largest], config.params)
        bar.update(number)
    bar.close()
    answers = [(answer.prompt, answer.output.token_ids) for answer in plain.answers]
    check(any(len(tokens) > 1 for _, tokens in answers), NO_DECODING)
    ranks = [ranks_of(target, drafter.draft, *answer, config.depth, config.children) for answer in answers]
    shares = acceptance(ranks, config.depth, config.children)
    tried = candidates(config, shares, ranks)
    drafting = Engine(target, drafter, two_chains(config.depth), **options)
    seconds = round_seconds(plain.engine, drafting, tried, [prompt for prompt, _ in answers], config)
    found = {
        "acceptance": shares,
        "table": table(tried, seconds),
        "trees": [{"name": each.name, "parents": list(each.tree.parents), "tpc": each.tpc} for each in tried],
        "round_s": {size: dict(zip([each.name for each in tried], row, strict=True)) for size, row in seconds.items()},
        "answers": len(answers),
        "draft_source": about.source,
        "config": asdict(config),
        "provenance": provenance(),
    }
    write_text(out / "table.yaml", table_yaml(tried, seconds, config))
    write_json(out / "tune_trees.json", found)
    print(text(tried, seconds))
    print("batch N: how many times as fast as plain decoding; *: the fastest, which the table has")
    print(f"written to {out}: table.yaml (tree={out / 'table.yaml'}), tune_trees.json")


@torch.inference_mode()
def ranks_of(target: Target, draft: Draft, prompt: list[int], answer: list[int], depth: int, children: int) -> Ranks:
    """The ranks of an answer; its roots are all its tokens but the last."""
    tokens = torch.tensor([prompt + answer], device=target.device)
    length = tokens.shape[1]
    positions = torch.arange(length, device=target.device)[None]
    hidden = target.hidden_states(tokens, positions, packed_attention([[length]]))
    previous = shift_hidden(hidden, positions)
    states = unroll(draft, target.embed(tokens), previous, positions, [[length]], depth)
    head, roots = Head(draft, target.lm_head), len(answer) - 1
    ranks = torch.full((roots, depth), children, dtype=torch.int64)
    for below, state in enumerate(states[: max(roots, 0)]):
        slots = slice(len(prompt) + below, -1)  # the slot `below` after each root reads the token there
        proposed = head.tokens(head.lm_head(state[0, slots]).topk(children).indices)
        hit = proposed == tokens[0, slots.start + 1 :].unsqueeze(1)
        rank = torch.where(hit.any(1), hit.to(torch.uint8).argmax(1), children)
        ranks[: roots - below, below] = rank.cpu()
    return ranks


def acceptance(ranks: Iterable[Ranks], depth: int, children: int) -> list[list[float]]:
    """[d][r]: the share of nodes at depth d on the answers' own paths that go on to their child of rank r."""
    everything = torch.cat(list(ranks))
    held = torch.ones(len(everything), dtype=torch.bool)
    shares = []
    for d in range(depth):
        here = everything[held, d]
        shares.append([(here == rank).double().mean().item() if len(here) else 0.0 for rank in range(children)])
        held &= everything[:, d] < children
    return shares


def tpc_of(tree: Tree, ranks: Iterable[Ranks]) -> float:
    """Tokens per call over the answers: each round's tree follows the answer as deep as it holds it."""
    children = tree.children.tolist()
    tokens = calls = 0
    for answer in ranks:
        paths, root = answer.tolist(), 0
        while root < len(paths):
            node, deep = 0, 0
            while deep < min(tree.max_depth, len(paths) - root):
                rank = paths[root][deep]
                node = children[node][rank] if rank < len(children[node]) else -1
                if node < 0:
                    break
                deep += 1
            root += min(deep + 1, len(paths) - root)
            calls += 1
        tokens += len(paths)
    return tokens / calls if calls else 1.0


def candidates(config: Config, shares: list[list[float]], ranks: list[Ranks]) -> list[Candidate]:
    """No speculation, chains, full trees and pruned trees; a tree that came up before is left out."""
    named = [("plain", chain(0)), *((f"chain{length}", chain(length)) for length in range(1, config.depth + 1))]
    named += [(f"d{depth}_bf{branching}", full(depth, branching)) for depth, branching in config.full]
    named += [(f"n{nodes}", pruned(nodes, shares)) for nodes in config.nodes]
    kept: dict[Tree, str] = {}
    for name, tree in named:
        kept.setdefault(tree, name)
    return [Candidate(name, tree, tpc_of(tree, ranks)) for tree, name in kept.items()]


def two_chains(depth: int) -> Tree:
    """Two side by side: with it an engine has room for the deepest candidate, and is compiled for one node and for
    several at once, as any of them may ask."""
    return Tree((-1, 0, *range(2 * depth - 1)))


def round_seconds(
    plain: Engine, drafting: Engine, tried: list[Candidate], asked: list[list[int]], config: Config
) -> dict[int, list[float]]:
    """Each candidate's median time of a round, for each batch size. The trees take turns, round by round; the engines
    are `AT_ONCE`.

    Each has two rounds in its turn, and the second is timed: the first leaves the draft what this tree's rounds leave
    it to read, and not another's. Plain rounds are those of an engine without a draft, which has nothing to keep up to
    date. Its sequences grow more slowly; in each turn the trees' are begun anew where the plain ones stand, so that all
    see contexts of like length. Of a prompt that leaves too little of the context the end is taken.
    """
    seconds: dict[int, list[float]] = {}
    plans = [Dispatcher(each.tree, plain.target.device) for each in tried]
    bar, turns = progress(len(config.batch_sizes) * (config.rounds + 1), "round of each tree"), count(1)
    for size in sorted(config.batch_sizes):
        prompts = [asked[i % len(asked)][config.tokens - plain.target.max_positions :] for i in range(size)]
        params = SamplingParams(max_tokens=config.tokens, ignore_eos=True)
        requests = {plain: [plain.add(prompt, params) for prompt in prompts], drafting: []}
        times: list[list[float]] = [[] for _ in tried]
        for turn in range(config.rounds + 1):
            for request in requests[drafting]:
                drafting.cancel(request)
            texts = [each.prompt + each.generated for each in requests[plain]]
            requests[drafting] = [drafting.add(text, params) for text in texts]
            for engine in (plain, drafting):
                engine.prefill()
            for plan, taken in zip(plans, times, strict=True):
                engine = drafting if plan.deepest else plain
                engine.dispatcher = plan
                engine.step()
                started = time.perf_counter()
                engine.step()
                if turn > 0:  # the first warms up
                    taken.append(time.perf_counter() - started)
            bar.update(next(turns))
        for engine, theirs in requests.items():
            for request in theirs:
                engine.cancel(request)
        seconds[size] = [statistics.median(taken) for taken in times]
    bar.close()
    return seconds


def best_of(tried: list[Candidate], seconds: list[float]) -> int:
    """The candidate with the most tokens a second; among equals the earlier, which is the smaller."""
    return max(range(len(tried)), key=lambda i: tried[i].tpc / seconds[i])


def table(tried: list[Candidate], seconds: dict[int, list[float]]) -> list[dict[str, Any]]:
    """A row for each batch size: its best tree, that tree's TPC, and how much faster than plain decoding it is."""
    rows = []
    for size, row in seconds.items():
        best = best_of(tried, row)
        speedup = tried[best].tpc * row[0] / row[best]
        rows.append({"batch_size": size, "tree": tried[best].name, "tpc": tried[best].tpc, "speedup": speedup})
    return rows


def table_yaml(tried: list[Candidate], seconds: dict[int, list[float]], config: Config) -> str:
    """What the dispatcher reads: the tree of each largest batch size."""
    made = f"python -m evals.tune_trees compile={config.compile} graphs={config.graphs}".lower()
    lines = [f"# Largest batch size: its tree, by {made}. A root alone is no speculation."]
    for size, row in seconds.items():
        best = tried[best_of(tried, row)]
        lines.append(f"{size}: {{parents: {list(best.tree.parents)}}} # {best.name}")
    return "\n".join(lines) + "\n"


def text(tried: list[Candidate], seconds: dict[int, list[float]]) -> str:
    """A line for each tree: nodes, TPC, and its speed-up over plain decoding at each batch size, the best marked."""
    lines = [f"{'tree':<10}{'nodes':>6}{'TPC':>7}" + "".join(f"{f'batch {size}':>12}" for size in seconds)]
    for i, each in enumerate(tried):
        line = f"{each.name:<10}{each.tree.num_nodes - 1:>6}{each.tpc:>7.2f}"
        for row in seconds.values():
            mark = "*" if best_of(tried, row) == i else " "
            line += f"{each.tpc * row[0] / row[i]:>11.2f}{mark}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
