"""A drafter without a model: n-gram lookup, in a request's own text or in all requests' texts. DESIGN section 3.5."""

from typing import Any

from eagle_train.drafts import Draft
from eagle_train.errors import OptionError, check, within
from eagle_train.inference.decode.row_trees import OpenTree
from eagle_train.inference.decode.tree import MAX_NODES
from eagle_train.inference.drafters.drafter import Needs, RowText
from eagle_train.inference.drafters.early import checked_early
from eagle_train.inference.drafters.text_drafter import TextDrafter
from eagle_train.inference.lookup.ngrams import NgramOptions, NgramPools
from eagle_train.models.target import Target


class Ngram(TextDrafter):
    """Proposes what followed the text's last tokens where they stood before: a chain of up to `max_draft_len` tokens,
    in place of the engine's tree."""

    timeout_s = None  # a draft takes microseconds

    def __init__(self, options: NgramOptions):
        """Raises OptionError."""
        length = options.max_draft_len
        check(length < MAX_NODES, f"max_draft_len={length}: must be below {MAX_NODES}", OptionError)
        self.pools = NgramPools(options)
        self._texts: dict[int, RowText] = {}  # the engine's lists, which grow
        self.needs = Needs(texts=True, by_row=True, checks=False, tree=OpenTree(length + 1, length))

    def draft(self, text: RowText, most: int) -> list[int]:
        self._texts[text.key] = text
        self.pools.follow(*text)
        return self.pools.draft(text.key, most)

    def leave(self, key: int) -> None:
        if (text := self._texts.pop(key, None)) is not None:
            self.pools.follow(*text)  # what the last round brought, which nothing was drafted after
        self.pools.leave(key)


@checked_early()
@within("drafter")
def make_ngram(target: Target, draft: Draft | None, **options: Any) -> Ngram:
    """The drafter of conf/drafter/ngram.yaml. `options`: of NgramOptions. Raises UserError."""
    check(draft is None, "draft: drafter=ngram has no model; leave draft= out")
    return Ngram(NgramOptions(**options))
