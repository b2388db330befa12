"""A drafter on the device with a cache of its own and no model: a drafter of anyone's own, for tests."""

import torch

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Needs, Outcome, Pending
from eagle_train.models.shapes import KVShape


class PromptLookup(Drafter):
    """Keeps a sequence's tokens in its cache, and finds the last place where the last two tokens stood before."""

    needs = Needs(waits=False)

    def __init__(self) -> None:
        self.cache = PagedKV({0: KVShape(1, 1, 1)}, blocks=0, dtype=torch.int64, device="cpu")
        self.caches = [self.cache]

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
    ) -> None:
        self.cache.memory[0][0, prefix.slots(positions)] = tokens[:, :, None, None]

    def propose(self, round: DraftRound) -> Drafted:
        pending, prefix = round.pending, round.prefix
        positions = round.draft_prefix.positions(pending.tokens.shape[1])
        self.cache.memory[0][0, round.draft_prefix.slots(positions)] = pending.tokens[:, :, None, None]
        places = torch.arange(prefix.longest + 1)[None]
        last = prefix.lengths[:, None].clamp(min=1)  # where the pending token is; rows that are not there have none
        text = self.cache.memory[0][0, prefix.slots(places.expand(len(last), -1)), 0, 0]
        alike = (text == pending.last) & (text.roll(1, 1) == text.gather(1, last - 1)) & (places > 0) & (places < last)
        found = (alike * places).amax(1, keepdim=True)
        tree = round.plan.tree
        there = found + 1 + torch.arange(tree.max_depth) % (last - found)  # over and over where the text ends
        # Siblings are the same token: nothing says that they must differ.
        return Drafted(torch.cat((pending.last, text.gather(1, there)), 1)[:, tree.depth])

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        return outcome.pending


class Unread(PromptLookup):
    """Cannot read a text with this token."""

    def __init__(self, token: int):
        super().__init__()
        self.token = token

    def prefill(self, prefix, tokens, positions, hidden, before, counts):
        if (tokens == self.token).any():
            raise ValueError("cannot read this")
        super().prefill(prefix, tokens, positions, hidden, before, counts)
