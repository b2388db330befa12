"""Our engine against the training graph: for each round that was served, how many drafts should have been taken.

The chain of a round follows from committed tokens and the target's states alone, so that one packed forward over prompt
and answer must have as many tokens accepted as the engine had. DESIGN sections 3.1, 3.8.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle_train.diagnosis.measure import hits
from eagle_train.diagnosis.texts import Part, Text
from eagle_train.drafts import Draft, Head
from eagle_train.inference import Engine, EngineConfig, Output, SamplingParams
from eagle_train.inference.drafters.drafter import Drafter
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.inference.requests.admission import room_for
from eagle_train.models.target import Target

_MOST_ROUNDS = {torch.float32: 0.02}
_MOST_IN_16_BITS = 0.06
"""Shares of rounds that may differ: where two tokens are about as likely, rounding decides. The engine computes in the
target's dtype, and the training graph here in fp32. In bf16 two of 192 rounds differed, in fp32 none of a thousand."""


@dataclass(frozen=True)
class Round:
    """A round of an answer: its question's number, the position of its pending token, and how many drafts were taken,
    as served and in the training graph."""

    number: int
    position: int
    served: int
    trained: int


def answers(
    target: Target, draft: Draft, prompts: Sequence[list[int]], depth: int, max_tokens: int, batch_size: int
) -> list[Output]:
    """The target's own greedy answers, decoded with the draft, whose module stays as it is."""
    levels = min(depth, draft.config.levels or depth)
    drafter = drafter_of(copy.deepcopy(draft), target)
    engine = engine_for(prompts, max_tokens, target, drafter, levels, batch_size)
    return engine.generate(list(prompts), SamplingParams(0.0, max_tokens=max_tokens))


def engine_for(
    prompts: Sequence[list[int]], max_tokens: int, target: Target, drafter: Drafter, depth: int, batch_size: int
) -> Engine:
    """An engine for answers of so many tokens to these prompts, with room for a batch of them: on a GPU, others have
    the rest. Without graphs, which take longer to record than they would save."""
    rows = min(batch_size, len(prompts))
    room = room_for(rows, max(map(len, prompts)) + max_tokens, depth)
    config = EngineConfig(max_batch_size=rows, kv_tokens=room, prefill_tokens=None, graphs=False)
    return Engine(target, drafter, f"chain{depth}", config)


@torch.no_grad()
def rounds(target: Target, draft: Draft, parts: Sequence[Part], outputs: dict[int, Output], depth: int) -> list[Round]:
    """The rounds of these outputs, by their questions' numbers, but for each answer's last one, which its end may cut.
    `parts`: of the same answers."""
    head, found = Head(draft, target.lm_head), []
    depth = min(depth, draft.config.levels or depth)
    for part in parts:
        written = part.tokens.roll(-1, 1)  # in sixteen bits a packed forward may choose another token than the engine
        right = [each[0].cpu() for each in hits(draft, head, part, written, depth)]
        for text, start in zip(part.texts, part.starts, strict=True):
            found += _rounds_of(text, start, outputs[text.number], right)
    return found


def _rounds_of(text: Text, start: int, output: Output, right: list[torch.Tensor]) -> list[Round]:
    """`start`: where the text begins in the part's row. The first token is the prefill's, and pending in round 1."""
    found, position = [], len(text.prompt)
    for committed in output.rounds[:-1]:
        taken, slot = 0, start + position
        while taken < len(right) and bool(right[taken][slot + taken]):
            taken += 1
        found.append(Round(text.number, position, committed - 1, taken))
        position += committed
    return found


def differing(found: Sequence[Round]) -> list[Round]:
    """The rounds in which engine and training graph disagree."""
    return [each for each in found if each.served != each.trained]


def is_rounding(wrong: int, every: int, dtype: torch.dtype) -> bool:
    """Whether rounding explains that so many rounds of all differ, where the engine computes in `dtype`."""
    return wrong <= _MOST_ROUNDS.get(dtype, _MOST_IN_16_BITS) * every
