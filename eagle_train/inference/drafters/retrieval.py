"""Drafts out of an index of texts that `eagle-datastore` made, without a model (REST; He et al., 2023)."""

from typing import Any

from eagle_train.drafts import Draft
from eagle_train.errors import check
from eagle_train.inference.drafters.drafter import RowText
from eagle_train.inference.drafters.early import checked_early
from eagle_train.inference.drafters.text_drafter import TextDrafter, TextTree
from eagle_train.inference.lookup.datastore import Datastore
from eagle_train.models.loading import TargetConfig, load_tokenizer
from eagle_train.models.target import Target


class Retrieval(TextDrafter):
    """Drafts what most often follows where the index holds the longest end of a text.

    `max_match`, `least_match`: tokens of that end, at most and at least; shorter ones draft nothing. `max_hits`: places
    that are read. `depth`: the most drafted tokens one after the other. It keeps nothing of a request.
    """

    timeout_s = None  # a lookup takes well below a millisecond

    def __init__(
        self, store: Datastore, max_match: int = 16, least_match: int = 2, max_hits: int = 64, depth: int = 10
    ):
        self.store, self.max_match, self.least_match = store, max_match, least_match
        self.max_hits, self.depth = max_hits, depth

    def draft(self, text: RowText, most: int) -> TextTree:
        answer = text.answer[-self.max_match :]
        before = len(text.prompt) - (self.max_match - len(answer))
        end = text.prompt[max(0, before) :] + answer
        found = self.store.continuations(end, self.max_match, self.least_match, self.max_hits, self.depth, most)
        return TextTree(found.tokens, found.parents)


def _check_retrieval(target: TargetConfig, draft: str | None, **options: Any) -> None:
    _made(load_tokenizer(target), draft is not None, **options)


@checked_early(_check_retrieval)
def make_retrieval(target: Target, draft: Draft | None, **options: Any) -> Retrieval:
    """The drafter of conf/drafter/retrieval.yaml. `options`: its keys; `datastore` is the index's directory.

    Raises UserError for values that cannot be, for what is no index, for one of another tokenizer, and for a draft,
    which would not be read.
    """
    return _made(target.tokenizer, draft is not None, **options)


def _made(tokenizer: Any, has_draft: bool, datastore: str, **options: Any) -> Retrieval:
    check(not has_draft, "drafter=retrieval: reads no draft; leave draft= out")
    vocabulary = None if tokenizer is None else tokenizer.get_vocab()  # without one, ids are trusted
    store = Datastore.open(datastore, vocabulary, "drafter.datastore")
    drafter = Retrieval(store, **options)
    limits = {"max_match": store.header.order, "least_match": drafter.max_match, "max_hits": None, "depth": None}
    for name, most in limits.items():
        value = getattr(drafter, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        sound = whole and value >= 1 and (most is None or value <= most)
        right = "at least 1" if most is None else f"from 1 to {most}"
        check(sound, f"drafter.{name}={value}: must be a whole number, {right}")
    return drafter
