"""A drafter without a model: suffix lookup, in a request's own text and in earlier answers. DESIGN section 3.5."""

from typing import Any

from eagle_train.drafts import Draft
from eagle_train.errors import OptionError, check, within
from eagle_train.inference.decode.row_trees import OpenTree
from eagle_train.inference.decode.tree import MAX_NODES
from eagle_train.inference.drafters.drafter import Needs, RowText
from eagle_train.inference.drafters.early import checked_early
from eagle_train.inference.drafters.text_drafter import TextDrafter, TextTree
from eagle_train.inference.lookup.suffixes import SuffixLookup, SuffixOptions
from eagle_train.models.target import Target


class Suffix(TextDrafter):
    """Proposes a tree of what followed the longest known end of a text, by frequency: of up to `max_nodes` tokens, in
    place of the engine's tree."""

    timeout_s = None  # a draft takes a tenth of a millisecond

    def __init__(self, options: SuffixOptions):
        """Raises OptionError."""
        nodes = options.max_nodes
        check(nodes < MAX_NODES, f"max_nodes={nodes}: must be below {MAX_NODES}", OptionError)
        self.lookup = SuffixLookup(options)
        self._texts: dict[int, RowText] = {}  # the engine's lists, which grow
        self.needs = Needs(texts=True, by_row=True, checks=False, tree=OpenTree(nodes + 1, options.max_depth))

    def draft(self, text: RowText, most: int) -> TextTree:
        self._texts[text.key] = text
        self.lookup.follow(*text)
        tokens, parents, _ = self.lookup.draft(text.key, most)
        return TextTree(tokens, parents)

    def leave(self, key: int) -> None:
        if (text := self._texts.pop(key, None)) is not None:
            self.lookup.follow(*text)  # what the last round brought, which nothing was drafted after
        self.lookup.leave(key)


@checked_early()
@within("drafter")
def make_suffix(target: Target, draft: Draft | None, **options: Any) -> Suffix:
    """The drafter of conf/drafter/suffix.yaml. `options`: of SuffixOptions. Raises UserError."""
    check(draft is None, "draft: drafter=suffix has no model; leave draft= out")
    return Suffix(SuffixOptions(**options))
