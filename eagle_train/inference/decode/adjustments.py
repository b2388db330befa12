"""What requests change of the target's logits before they are sampled: biases, penalties, and a least length.

Each node of a draft tree has its own tokens before it: the prompt, the answer so far, and the drafted tokens on the
node's path. So what is sampled after a node is what plain decoding would sample there. DESIGN section 3.7. Knows trees
and token counts; nothing of models, temperatures or requests.

Shapes: A active rows, J of them that are adjusted, R rows that this rank samples, N tree nodes, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.sampling import at_least_float32
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.ops.transfer import to_device


@dataclass(frozen=True)
class Adjustment:
    """What one request changes, in this order. Off: no bias, penalties 1, 0 and 0, and `min_tokens` 0."""

    bias: Mapping[int, float]  # by token id; added
    repetition: float  # of tokens in prompt or answer: positive logits are divided by it, others multiplied
    presence: float  # subtracted for tokens that are in the answer
    frequency: float  # subtracted once for each time that a token is in the answer
    min_tokens: int  # as long as the answer has fewer tokens, `stop_token_ids` are forbidden
    stop_token_ids: frozenset[int]

    @property
    def has_penalties(self) -> bool:
        """Whether it counts tokens."""
        return (self.repetition, self.presence, self.frequency) != (1, 0, 0)

    def counts_tokens(self, num_generated: int) -> bool:
        """Whether what it changes depends on the answer so far, of `num_generated` tokens."""
        return self.has_penalties or num_generated < self.min_tokens

    def is_on(self, num_generated: int) -> bool:
        """Whether it changes anything after so many tokens or some token later."""
        return bool(self.bias) or self.counts_tokens(num_generated)


@dataclass(frozen=True)
class AdjustedText:
    """A row that is adjusted. `answer` is the request's own list, which grows from round to round."""

    adjustment: Adjustment
    prompt: list[int]
    answer: list[int]


class Adjustments:
    """The adjustments of a batch's rows, with what the device knows of their tokens."""

    def __init__(self, rows: Sequence[AdjustedText | None], vocab_size: int, device: torch.device | str):
        """`rows`: of the A rows; None for a row whose logits stay as they are."""
        self._texts = [text for text in rows if text is not None]
        # by row: its place among the J rows
        self._place = {row: place for place, row in enumerate(row for row, text in enumerate(rows) if text is not None)}
        self._num_rows, self._device = len(rows), device
        self._size = (len(self._texts), vocab_size)
        given = [text.adjustment for text in self._texts]
        self._least = to_device([each.min_tokens for each in given], device, torch.long)  # [J]
        self._has_penalties = any(each.has_penalties for each in given)
        self._repeats = any(each.repetition != 1 for each in given)
        # float32 [3, J, 1, 1]
        penalties = [[each.repetition for each in given], [each.presence for each in given]]
        penalties.append([each.frequency for each in given])
        self._penalties = to_device(penalties, device, torch.float32)[:, :, None, None]
        self._bias = self._table([each.bias for each in given])  # float32 [J, V] or None
        stops = [dict.fromkeys(each.stop_token_ids, 1.0) if each.min_tokens else {} for each in given]
        self._stops = self._table(stops)  # float32 [J, V] or None: 1 for tokens that `min_tokens` forbids
        self._in_prompt: torch.Tensor | None = None  # float32 [J, V]: how often the prompt has a token
        self._counts: torch.Tensor | None = None  # the same of the answer, as far as it is counted
        self._num_counted = [0] * len(self._texts)

    def now(self) -> "Adjustments | None":
        """This, with all of the answers counted; None where no row is changed any more."""
        if not any(text.adjustment.is_on(len(text.answer)) for text in self._texts):
            return None
        if self._has_penalties:
            self._count_new()
        return self

    def apply(self, logits: torch.Tensor, tokens: torch.Tensor, tree: AnyTree, ranks: Ranks) -> torch.Tensor:
        """The logits [R, N, V] of this rank's rows, adjusted: float32 (float64 for float64), others as they were.

        tokens int64 [A, N]: the trees'. To be called after `now`, with the answers as they were then.
        """
        own_rows = enumerate(ranks.own_rows(self._num_rows))
        pairs = [(own, self._place[row]) for own, row in own_rows if row in self._place]
        if not pairs:
            return logits
        own, places = to_device(list(zip(*pairs, strict=True)), self._device, torch.long)
        logits = at_least_float32(logits)
        chosen = logits[own]  # [J, N, V] from here on, J being those of this rank
        tree = tree.rows(lambda x: ranks.own(x)[own])
        if self._bias is not None:
            chosen = chosen + self._bias[places][:, None]
        if self._has_penalties:
            chosen = self._penalised(chosen, places, ranks.own(tokens)[own], tree)
        if self._stops is not None:
            lengths = to_device([len(text.answer) for text in self._texts], self._device, torch.long)
            early = (lengths[places][:, None] + tree.depth) < self._least[places][:, None]  # [J, N]
            chosen = chosen.masked_fill(early[:, :, None] & (self._stops[places] > 0)[:, None], -torch.inf)
        return logits.index_copy(0, own, chosen)

    def _penalised(
        self, chosen: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, tree: AnyTree
    ) -> torch.Tensor:
        """chosen [J, N, V] after the penalties of `places` int64 [J]; tokens int64 [J, N]: the trees'."""
        assert self._counts is not None
        repetition, presence, frequency = (each.to(chosen.dtype) for each in self._penalties[:, places])
        counts = self._counts[places][:, None] + _on_paths(tokens, tree, chosen.shape[-1])
        there = counts > 0
        if self._repeats:
            assert self._in_prompt is not None
            known = there | (self._in_prompt[places] > 0)[:, None]
            chosen = torch.where(known, torch.where(chosen < 0, chosen * repetition, chosen / repetition), chosen)
        return chosen - presence * there - frequency * counts

    def _table(self, rows: Sequence[Mapping[int, float]]) -> torch.Tensor | None:
        """float32 [J, V] on the device, 0 where a row has no entry; None where none has any."""
        if not any(rows):
            return None
        values = np.array([value for row in rows for value in row.values()], dtype=np.float32)
        return self._added(None, [list(row) for row in rows], values)

    def _added(
        self, table: torch.Tensor | None, tokens: Sequence[Sequence[int]], values: NDArray[np.float32]
    ) -> torch.Tensor:
        """float32 [J, V]: `table`, in place, or zeros, plus `values` at each row's tokens."""
        if table is None:
            table = torch.zeros(self._size, device=self._device)
        if len(values) > 0:  # as arrays: a prompt has thousands of tokens, and is counted whenever the rows change
            places = np.repeat(np.arange(len(tokens)), [len(row) for row in tokens])
            flat = np.fromiter(chain.from_iterable(tokens), np.int64, len(values))
            index = to_device(np.stack((places, flat)), self._device)
            table.index_put_((index[0], index[1]), to_device(values, self._device), accumulate=True)
        return table

    def _count_new(self) -> None:
        """Count the tokens that are not counted yet."""
        if self._in_prompt is None and self._repeats:
            self._in_prompt = self._counted(None, [text.prompt for text in self._texts])
        new = [text.answer[done:] for text, done in zip(self._texts, self._num_counted, strict=True)]
        self._counts = self._counted(self._counts, new)
        self._num_counted = [len(text.answer) for text in self._texts]

    def _counted(self, table: torch.Tensor | None, texts: list[list[int]]) -> torch.Tensor:
        """float32 [J, V]: `table`, in place, or zeros, plus the tokens of each row's text."""
        return self._added(table, texts, np.ones(sum(map(len, texts)), np.float32))


def _on_paths(tokens: torch.Tensor, tree: AnyTree, vocab_size: int) -> torch.Tensor:
    """float32 [J, N, V]: how often a token is on the path to a node, the root left out: it is in the answer already.

    tokens int64 [J, N].
    """
    counts = torch.zeros(*tokens.shape, vocab_size, device=tokens.device)
    if tree.num_nodes == 1:
        return counts
    below = tokens[:, None, 1:].expand(-1, tree.num_nodes, -1)  # [J, N, N - 1]
    return counts.scatter_add_(2, below, tree.ancestors[..., 1:].float().expand_as(below))
