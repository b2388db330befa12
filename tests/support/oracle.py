"""A drafter that knows the answers, for trees that differ by row and by round."""

from eagle_train.inference.drafters.drafter import RowText
from eagle_train.inference.drafters.text_drafter import TextDrafter, TextTree
from tests.support.reference_answers import PROMPTS


class Oracle(TextDrafter):
    """Drafts the tokens of the answer, from some tokens on a wrong branch first, so that trees differ by row."""

    timeout_s = None

    def __init__(self, truth: list[list[int]], wrong: int = 3):
        """`truth`: the answers to PROMPTS."""
        self.truth, self.wrong, self.seen = truth, wrong, []

    def draft(self, text: RowText, most: int) -> TextTree:
        self.seen.append((text.key, len(text.answer)))
        answer = self.truth[PROMPTS.index(text.prompt)][len(text.answer) :]
        if len(text.answer) % 5 == 4:
            return TextTree([], [])
        right = answer[: most - 1 - len(text.answer) % 2]
        return TextTree([self.wrong, *right], [0, 0, *range(2, len(right) + 1)])
