"""Hidden states of documents in packed rows, and of the same documents alone."""

import torch

from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from tests.support.tiny import random_tokens


def packed_and_alone(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states of documents in packed rows, and of each on its own."""
    lengths = [[11, 1, 8], [20]]
    documents = random_tokens(*[length for row in lengths for length in row])
    tokens = torch.tensor([token for document in documents for token in document]).view(2, 20)
    positions = torch.tensor([[i for length in row for i in range(length)] for row in lengths])
    alone = [
        target.hidden_states(torch.tensor([d]), torch.arange(len(d))[None], packed_attention([[len(d)]]))
        for d in documents
    ]
    return target.hidden_states(tokens, positions, packed_attention(lengths)), torch.cat(alone, 1).view(2, 20, -1)
