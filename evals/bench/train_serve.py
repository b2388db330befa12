"""The train/serve check: the draft is run over finished answers as in training, and compared with what was served.

The first drafted token of a round follows from the target's own hidden states, so one packed forward over prompt and
answer must propose what the engine proposed there. Where it does not, the two differ in positions, norms or hidden
states. On the file's own answers, the same forward shows how far these are from what the target writes.
Knows nothing of reports.
"""

from collections.abc import Iterable

import torch

from eagle_train.drafts import Draft, Head, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.inference import Engine, Output, Tree
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from evals.bench.answering import Run
from evals.bench.statistics import acceptance
from evals.bench.trees import dispatched, may_decline

Tokens = list[int]


@torch.inference_mode()
def proposals(
    target: Target, draft: Draft, prompt: Tokens, answer: Tokens, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Proposals after each of an answer's m tokens but the last: the draft's k best [m - 1, k], the target's best."""
    tokens = torch.tensor([prompt + answer], device=target.device)
    positions = torch.arange(tokens.shape[1], device=target.device)[None]
    lengths, layers = [[tokens.shape[1]]], draft.config.target_layers
    states = TargetStates.split(target.states(layers)(tokens, positions, packed_attention(lengths)), layers)
    (drafted,) = draft.unrolled(draft, Rows(target.embed(tokens), states, positions, lengths), passes=1)
    slots = slice(len(prompt), -1)
    head = Head(draft, target.lm_head)
    drafts = head.tokens(head.lm_head(draft.read(drafted[0, slots])).topk(k).indices)
    return drafts, target.lm_head(states.hidden[0, slots]).argmax(-1)


def served_as_trained(
    target: Target, draft: Draft, served: Iterable[tuple[Tokens, Output]], k: int
) -> tuple[float, float]:
    """Two shares over these (prompt, output), of which at least one must have a round.

    First, the rounds whose first token is among the draft's k best. With k the number of the root's children that is
    what the engine counts as accepted at depth 1: at any temperature the target commits a drafted token exactly when it
    accepts it. Second, the `agreement` over all tokens.
    """
    held, agreed = [], []
    for prompt, output in served:
        if output.rounds:
            drafted, best = proposals(target, draft, prompt, output.token_ids, k)
            starts = torch.tensor([0, *output.rounds[:-1]], device=best.device).cumsum(0)
            followed = torch.tensor(output.token_ids[1:], device=best.device)
            held.append((drafted[starts] == followed[starts].unsqueeze(1)).any(1))
            agreed.append(drafted[:, 0] == best)
    return _share(held), _share(agreed)


def agreement(target: Target, draft: Draft, texts: Iterable[tuple[Tokens, Tokens]]) -> float | None:
    """Share of the tokens of these (prompt, answer) after which draft and target propose the same; None without any."""
    agreed = []
    for prompt, answer in texts:
        if len(answer) > 1:
            drafted, best = proposals(target, draft, prompt, answer, 1)
            agreed.append(drafted[:, 0] == best)
    return _share(agreed) if agreed else None


def _share(hits: list[torch.Tensor]) -> float:
    return torch.cat(hits).double().mean().item()


def train_serve_check(run: Run, batch_size: int) -> dict[str, float | None]:
    """Acceptance at depth 1 as served and as in training; agreement on the target's own answers and on the file's.

    As in training: None where the root's children may be more in one round than in another, since an answer does not
    show which of its rounds had how many; where drafts may be other than the most likely tokens; and where the answers
    are lossy, as drafts were accepted then that the target would not have chosen. As served: None without a draft.
    """
    engine = run.engine
    target, draft = engine.target, run.draft
    children = _root_children(engine, batch_size)
    served = [(answer.prompt, answer.output) for answer in run.answers]
    depth_1, own = served_as_trained(target, draft, served, children or 1)
    is_exact = engine.config.drafting == "greedy" and not any(answer.output.is_lossy for answer in run.answers)
    references = []
    for answer in run.answers:
        if answer.question.reference:
            tokens = target.tokenizer(answer.question.reference, add_special_tokens=False)["input_ids"]
            references.append((answer.prompt, tokens[: target.max_positions - len(answer.prompt)]))
    return {
        "depth_1_served": next(iter(acceptance(run.answers)), None),
        "depth_1_as_trained": depth_1 if children is not None and is_exact else None,
        "agreement_on_own_answers": own,
        "agreement_on_reference_answers": agreement(target, draft, references),
    }


def _root_children(engine: Engine, batch_size: int) -> int | None:
    """How many children the root has in every round of batches of up to this size; None where that is not said."""
    trees = [tree for tree, _ in dispatched(engine.dispatcher, batch_size)]
    counts = {tree.fanout[0] for tree in trees if isinstance(tree, Tree)}
    are_static = all(isinstance(tree, Tree) for tree in trees)
    return counts.pop() if are_static and len(counts) == 1 and not may_decline(engine) else None
