"""A drafter of one's own, in one file: what followed the last place where the last two tokens stood before.

eagle-generate drafter=examples/own_drafter.yaml drafter.least=2 tree=chain4 prompt='What is `len`?'

A text's tokens are searched anew in each round, which is simple, and fast enough for prompts of a few thousand.
"""

from eagle_train.drafts import Draft
from eagle_train.errors import check
from eagle_train.inference import RowText, TextDrafter
from eagle_train.models.target import Target


class LastPlace(TextDrafter):
    def __init__(self, least: int):
        check(least > 0, f"drafter.least={least}: must be above 0")
        self.least = least

    def draft(self, text: RowText, most: int) -> list[int]:
        tokens = text.prompt + text.answer
        wanted = tokens[-self.least :]
        for place in range(len(tokens) - self.least - 1, -1, -1):
            if tokens[place : place + self.least] == wanted:
                return tokens[place + self.least :][:most]
        return []


def make_last_place(target: Target, draft: Draft | None, least: int = 2) -> LastPlace:
    """The drafter of own_drafter.yaml. `target` and `draft` are always given; this one needs neither."""
    return LastPlace(least)
