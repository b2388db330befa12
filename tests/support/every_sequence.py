"""Every sequence of a few tokens, asked of an engine by the random numbers that stand for it.

With one number for each token, drawing inverts the cumulative distribution: a sequence comes out for the numbers in a
box, whose sides are its tokens' probabilities. So an engine has the target's joint distribution, exactly, if the
numbers at both ends of each sequence's box give that sequence. The boxes are those of transformers in float64.
"""

from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import torch

from eagle_train.inference import Engine, Output, SamplingParams, runner
from eagle_train.inference.decode import sampling
from eagle_train.models.target import Target
from tests.support.tiny import random_tokens, tiny_model

VOCABULARY, LENGTH = 5, 4
PROMPT = list(range(VOCABULARY)) + random_tokens(16, vocabulary=VOCABULARY)[0]  # each token has a successor
ENDS = (1e-4, 1 - 1e-4)  # of a box's sides
ROWS = 1024  # requests in a batch
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
Change = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""p float64 [V] from the logits after an answer so far."""


def enumerated_target() -> Target:
    """In float64, so that no rounding decides between two tokens."""
    return Target(tiny_model(std=0.4, **SIZES).double())


def histories(length: int) -> torch.Tensor:
    """int64 [V^length, length]: all sequences."""
    axes = torch.meshgrid(*[torch.arange(VOCABULARY)] * length, indexing="ij")
    return torch.stack(axes, -1).flatten(0, -2)


@cache
def boxes(change: Change) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [V^LENGTH, LENGTH] each: where the number of each token of a sequence begins and ends."""
    model, answers = tiny_model(std=0.4, **SIZES).double(), histories(LENGTH - 1)
    with torch.no_grad():
        logits = model(torch.cat((torch.tensor(PROMPT).expand(len(answers), -1), answers), 1)).logits
    sides = []
    for place in range(LENGTH):
        each = VOCABULARY ** (LENGTH - 1 - place)  # sequences that begin alike
        rows = zip(logits[::each, len(PROMPT) - 1 + place], answers[::each, :place].tolist(), strict=True)
        p = torch.stack([change(row, answer) for row, answer in rows])
        ends = p.cumsum(-1)
        sides.append(torch.stack((ends - p, ends)).flatten(1).repeat_interleave(each, 1))
    begin, end = torch.stack(sides, -1)
    return begin, end


def check_every_sequence(engine: Engine, change: Change, **params) -> list[Output]:
    """The engine gives each sequence for the numbers at the ends of its box. Returns the outputs. `params`: of each
    request, which mean what `change` does."""
    begin, end = boxes(change)
    assert abs(float((end - begin).prod(-1).sum()) - 1) < 1e-12
    outputs = []
    for share in ENDS:
        numbers = torch.cat((begin + share * (end - begin), torch.full((len(begin), 99), 0.5)), 1).double()
        possible = ((end - begin) > 0).all(-1).nonzero()[:, 0]
        with patch.object(sampling, "uniform", _told(numbers)), patch.object(runner, "uniform", _told(numbers)):
            for rows in possible.split(ROWS):
                asked = [
                    SamplingParams(1.0, max_tokens=LENGTH, seed=seed, ignore_eos=True, **params)
                    for seed in rows.tolist()
                ]
                found = engine.generate([PROMPT] * len(rows), asked)
                assert [output.token_ids for output in found] == histories(LENGTH)[rows].tolist()
                outputs += found
    return outputs


def _told(numbers: torch.Tensor) -> Callable:
    """In place of `sampling.uniform`: by seed, the number of each token's place."""

    def uniform(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        assert count == 1, "drafts are not drawn"
        seeds, positions = torch.broadcast_tensors(seeds, positions)
        return numbers[seeds, positions - len(PROMPT) + 1].unsqueeze(-1)

    return uniform
