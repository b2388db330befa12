"""Which tree pays: the acceptance of a draft on answers, the trees it makes likely, and their tokens per call.

The draft is unrolled over the target's answers, which ranks the answer's next token among the draft's proposals at
every depth. From these ranks come the shares by (depth, child rank), the pruned trees, and the TPC of any tree without
decoding again: exact with draft.alignment=accepted, approximate with `last`. Knows nothing of time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eagle_train.drafts import Draft, Head, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.inference import Tree, chain, full, pruned
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from evals.bench.contexts import counted, rows_of
from evals.bench.statistics import Answer

Ranks = torch.Tensor
"""int64 [roots, depth]: the rank of the answer's token, `depth` after each root, among the draft's proposals;
`children` where it is not among so many, or where the answer has ended."""


@dataclass(frozen=True)
class Candidate:
    """A tree to be tried. `tpc`: its tokens per call on the answers."""

    name: str
    tree: Tree
    tpc: float

    def about(self, answers: Iterable[Answer], ranks: Iterable[Ranks], limit: int) -> dict[str, Any]:
        """For results.json, with acceptance by context on the answers, each with its ranks. `limit`: as of
        `contexts.by_context`."""
        rounds = (
            (answer.question.line, len(answer.prompt) + 1 + root, kept, self.tree.max_depth, accepted)
            for answer, own in zip(answers, ranks, strict=True)
            for root, kept, accepted in rounds_of(self.tree, own)
        )
        found = {"name": self.name, "parents": list(self.tree.parents), "tpc": self.tpc}
        return found | {"by_context": rows_of([counted(rounds, limit)])}


@torch.inference_mode()
def ranks_of(target: Target, draft: Draft, prompt: list[int], answer: list[int], depth: int, children: int) -> Ranks:
    """The ranks of an answer; its roots are all its tokens but the last."""
    tokens = torch.tensor([prompt + answer], device=target.device)
    length = tokens.shape[1]
    positions = torch.arange(length, device=target.device)[None]
    layers = draft.config.target_layers
    of_target = TargetStates.split(target.states(layers)(tokens, positions, packed_attention([[length]])), layers)
    rows = Rows(target.embed(tokens), of_target, positions, [[length]], target.embed)
    states = draft.unrolled(draft, rows, depth)
    roots = len(answer) - 1
    ranks = torch.full((roots, depth), children, dtype=torch.int64)
    for below, state in enumerate(states[: max(roots, 0)]):
        slots = slice(len(prompt) + below, -1)  # the slot `below` after each root reads the token there
        head = Head(draft, target.lm_head, below)
        proposed = head.tokens(head.lm_head(draft.read(state[0, slots])).topk(children).indices)
        hit = proposed == tokens[0, slots.start + 1 :].unsqueeze(1)
        rank = torch.where(hit.any(1), hit.to(torch.uint8).argmax(1), children)
        ranks[: roots - below, below] = rank.cpu()
    return ranks


def acceptance(ranks: Iterable[Ranks], depth: int, children: int) -> list[list[float]]:
    """[d][r]: the share of nodes at depth d on the answers' paths whose next token is their child of rank r."""
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
    rounds = [kept for answer in ranks for _, kept, _ in rounds_of(tree, answer)]
    return sum(rounds) / len(rounds) if rounds else 1.0


def rounds_of(tree: Tree, answer: Ranks) -> Iterator[tuple[int, int, int]]:
    """The rounds of one answer: of each its root, how many tokens it commits, and how many drafts are accepted."""
    children, paths, root = tree.children.tolist(), answer.tolist(), 0
    while root < len(paths):
        node, deep = 0, 0
        while deep < min(tree.max_depth, len(paths) - root):
            rank = paths[root][deep]
            node = children[node][rank] if rank < len(children[node]) else -1
            if node < 0:
                break
            deep += 1
        kept = min(deep + 1, len(paths) - root)
        yield root, kept, deep
        root += kept


def candidates(
    depth: int, branchings: list[list[int]], nodes: list[int], shares: list[list[float]], ranks: list[Ranks]
) -> list[Candidate]:
    """No speculation, chains up to a depth, full trees of [depth, branching] and pruned trees of so many nodes; no tree
    twice."""
    named = [("plain", chain(0)), *((f"chain{length}", chain(length)) for length in range(1, depth + 1))]
    named += [(f"d{depth}_bf{branching}", full(depth, branching)) for depth, branching in branchings]
    named += [(f"n{count}", pruned(count, shares)) for count in nodes]
    kept: dict[Tree, str] = {}
    for name, tree in named:
        kept.setdefault(tree, name)
    return [Candidate(name, tree, tpc_of(tree, ranks)) for tree, name in kept.items()]
