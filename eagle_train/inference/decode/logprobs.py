"""Log-probabilities of generated tokens: those of the target's own logits, whatever was changed of them to sample.

Only the nodes on the accepted path are computed, for the rows that ask, and one tensor of them is copied to the host.
Knows nothing of requests or models.

Shapes: A active rows, J of them that ask, R rows that this rank samples, N tree nodes, P nodes of a path, K the most
alternatives that a row asks for, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_train.inference.decode.sampling import at_least_float32
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.ops.transfer import HostCopy, to_device


class TokenLogprobs(NamedTuple):
    """A generated token's log-probability, and `top`: the most likely tokens there, the likeliest first, each with its
    own. Natural logarithms of the target's distribution without temperature, penalties, biases and grammar."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobRows:
    """Which of a batch's rows ask for log-probabilities, and of how many alternatives."""

    def __init__(self, counts: Sequence[int | None]):
        """`counts`: of the A rows; None for a row that does not ask."""
        self.counts = list(counts)
        self._most = max(count for count in counts if count is not None)

    @classmethod
    def of(cls, counts: Sequence[int | None]) -> "LogprobRows | None":
        """None where no row asks."""
        return None if all(count is None for count in counts) else cls(counts)

    def compute(self, logits: torch.Tensor, path: torch.Tensor, tokens: torch.Tensor, ranks: Ranks) -> "LogprobCopy":
        """Of the tokens int64 [A, P] that follow the nodes `path` int64 [A, P].

        logits [R, N, V]: the target's, of this rank's rows. Without a wait for the device; all ranks must call it.
        """
        own_rows = ranks.own_rows(len(self.counts))
        asking = [own for own, row in enumerate(own_rows) if self.counts[row] is not None]
        at = to_device(asking, logits.device, torch.long)
        path, tokens = ranks.own(path), ranks.own(tokens)
        chosen = at_least_float32(logits[at[:, None], path[at]])  # [J, P, V]
        chosen = chosen.clamp(max=torch.finfo(chosen.dtype).max).log_softmax(-1)
        index = _ordered(chosen).topk(self._most, dim=-1).indices
        value = chosen.gather(-1, index)
        own = chosen.gather(-1, tokens[at][:, :, None])
        # As integers, so that the ranks exchange one tensor: [J, P, 1 + 2 K]
        columns = torch.cat((_as_bits(own), index, _as_bits(value)), -1)
        width = columns.shape[1:]
        everyone = columns.new_zeros(len(own_rows), *width).index_copy(0, at, columns).flatten(1)
        (everyone,) = ranks.all(len(self.counts), everyone)
        return LogprobCopy(self.counts, everyone.view(-1, *width))


class LogprobCopy:
    """Log-probabilities whose copy from the device to the host is under way."""

    def __init__(self, counts: list[int | None], columns: torch.Tensor):
        """`columns` int64 [A, P, 1 + 2 K]: of `LogprobRows.compute`."""
        self._counts, self._arriving = counts, HostCopy(columns)

    def of(self, tokens: Sequence[Sequence[int]]) -> list[list[TokenLogprobs] | None]:
        """Of each row's tokens, at most P of them; None for a row that did not ask. Waits for the copy."""
        columns = self._arriving.wait()
        most = columns.shape[-1] // 2
        own, index, values = columns.split((1, most, most), -1)
        own, values = _as_numbers(own).squeeze(-1), _as_numbers(values)
        found: list[list[TokenLogprobs] | None] = []
        for row, count in enumerate(self._counts):
            if count is None:
                found.append(None)
                continue
            tops = zip(index[row, :, :count].tolist(), values[row, :, :count].tolist(), strict=True)
            alike = zip(tokens[row], own[row].tolist(), tops, strict=False)  # the path may be longer
            found.append([TokenLogprobs(token, number, list(zip(*top, strict=True))) for token, number, top in alike])
        return found


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """int64 [..., V]: greater where a value is, or among equals the token's id lower. With `topk` of the values, which
    of the equals come first would depend on how many are asked for, and so on other rows."""
    bits = (values.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 is 0.0
    as_integers = bits ^ ((bits >> 31) & torch.iinfo(torch.int32).max)
    return (as_integers.long() << 32) - torch.arange(values.shape[-1], device=values.device)


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    """Floats as float64's bits, int64."""
    return values.double().contiguous().view(torch.int64)


def _as_numbers(bits: torch.Tensor) -> torch.Tensor:
    """The floats of `_as_bits`, float64."""
    return bits.contiguous().view(torch.float64)
