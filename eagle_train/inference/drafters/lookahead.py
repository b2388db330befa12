"""Lookahead decoding: the target makes n-grams beside its answer, and these are drafts (Fu et al., 2024). No model.

A window of guesses at the next tokens is one Jacobi iteration in each round: N - 1 rows of W tokens, N the tokens of an
n-gram. Row r, column c is a guess at the token r + c places behind the pending one, which is the cell at row 0, column
0. A cell sees the committed text, row 0 up to its column, and the cells above it in its column. So row 0 is a chain
behind the root, and what is below it in a column is a chain behind its cell of row 0: the window is a tree, and the
G n-grams that are verified beside it are chains behind the root. One call of the target reads both.

Shapes: A active rows, N nodes of the tree, V vocabulary; W, G and the n-gram's N are `LookaheadOptions`.
"""

import random
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from eagle_train.drafts import Draft
from eagle_train.errors import OptionError, check, shown, within
from eagle_train.inference.decode.tree import MAX_NODES, Tree
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Needs, Outcome, Pending, RowText
from eagle_train.inference.drafters.early import checked_early
from eagle_train.models.target import Target
from eagle_train.ops.transfer import to_device


@dataclass(frozen=True)
class LookaheadOptions:
    """The sizes of window and pool. A round's tree has (window + guesses) * (ngram - 1) nodes. Raises OptionError.

    - `window`: W, the columns of the window.
    - `ngram`: N, the tokens of an n-gram; the window has a row less.
    - `guesses`: G, the most n-grams that are kept for a first token, the newest, and verified in a round. 0: none; then
      drafts are the window's own cells.
    - `pool_from_prompt`: n-grams of prompt and answer are kept too.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    pool_from_prompt: bool = True

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("ngram", 3), ("guesses", 0)):
            value = getattr(self, name)
            right = isinstance(value, int) and not isinstance(value, bool) and value >= least
            check(right, f"{name}={shown(value)}: must be a whole number, at least {least}", OptionError)
        own = self.pool_from_prompt
        check(isinstance(own, bool), f"pool_from_prompt={shown(own)}: must be true or false", OptionError)
        if self.num_nodes > MAX_NODES:
            window, ngram, guesses, nodes = map(shown, (self.window, self.ngram, self.guesses, self.num_nodes))
            told = f"window={window}: with guesses={guesses} and ngram={ngram} the tree has {nodes} nodes"
            raise OptionError(f"{told}; at most {MAX_NODES} are possible", "guesses", "ngram")

    @property
    def num_nodes(self) -> int:
        """Of the tree, the root included."""
        return (self.window + self.guesses) * (self.ngram - 1)


class Lookahead(Drafter):
    """Proposes the window's cells and the newest n-grams that begin with the pending token, in a tree of its own.

    What it keeps of a request, its window and its n-grams, is on the host until `leave`. The window moves up by one row
    in a round, however many tokens were accepted: what it then guesses at lies nearer than it was made for.
    """

    def __init__(self, options: LookaheadOptions):
        self.options = options
        tree, order = _tree_of(options)
        self.needs = Needs(texts=True, logits=True, tree=tree, checks=False)
        self._in_order = itemgetter(*order)
        window, cells = options.window, (options.ngram - 1) * options.window
        self._last_row = [order.index(cell) for cell in range(cells - window, cells)]  # its nodes
        self._requests: dict[int, _Request] = {}

    def __len__(self) -> int:
        """The number of requests of which something is kept."""
        return len(self._requests)

    def propose(self, round: DraftRound) -> Drafted:
        """The same tree for all rows; guesses that a row's pool lacks repeat the pending token."""
        assert round.texts is not None
        rows = [self._in_order(self._drafts(text)) for text in round.texts]
        return Drafted(to_device(rows, round.pending.tokens.device, torch.long))

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        """The Jacobi step: the target's most likely tokens after the window's last row are its next one."""
        assert round.texts is not None
        assert outcome.logits is not None
        newest = outcome.logits[:, self._last_row].argmax(-1).tolist()
        for text, tokens in zip(round.texts, newest, strict=True):
            self._requests[text.key].step(tokens)
        return super().rewind(round, drafted, outcome)

    def leave(self, key: int) -> None:
        self._requests.pop(key, None)

    def _drafts(self, text: RowText) -> list[int]:
        """The window's cells, row by row, and then the guesses."""
        request = self._requests.get(text.key)
        if request is None:
            request = self._requests[text.key] = _Request(self.options, text.prompt)
        request.follow(text)
        return request.cells + request.guesses()


class _Request:
    """A request's window, and its pool of n-grams by their first token."""

    def __init__(self, options: LookaheadOptions, prompt: list[int]):
        self._options, count = options, (options.ngram - 1) * options.window
        # Seeded by the text, so that ranks agree, and the same request has the same rounds again.
        draw = random.Random(zlib.crc32(array("q", prompt)))
        self.cells = draw.choices(prompt, k=count)  # row by row
        self._made_up = options.ngram - 2  # rows that n-grams are made of and that still hold drawn tokens
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}  # what follows the first token, the newest last
        self._tail: list[int] = []  # of the text, what an n-gram that ends later begins with
        self._read = 0  # tokens of the answer

    def follow(self, text: RowText) -> None:
        """Read what is new in the text."""
        self.cells[0] = text.answer[-1]
        size = self._options.ngram
        if self._options.pool_from_prompt and self._options.guesses:
            new = text.answer[self._read :]
            tokens = self._tail + new if self._read else text.prompt + new
            for first in range(len(tokens) - size + 1):
                self._keep(tokens[first], tuple(tokens[first + 1 : first + size]))
            self._tail, self._read = tokens[1 - size :], len(text.answer)

    def guesses(self) -> list[int]:
        """G continuations of the pending token, one behind the other; the pending token where there are fewer."""
        known = self._pool.get(self.cells[0], {})
        tokens = [token for tail in known for token in tail]
        return tokens + [self.cells[0]] * (self._options.guesses * (self._options.ngram - 1) - len(tokens))

    def step(self, newest: list[int]) -> None:
        """The window moves up by a row; its columns with their new tokens are n-grams.

        Row 1 becomes row 0 in the columns where it stands: its first token makes room for the round's pending token.
        """
        window = self._options.window
        if self._made_up:
            self._made_up -= 1
        else:
            for column, token in enumerate(newest):
                self._keep(self.cells[column], (*self.cells[window + column :: window], token))
        self.cells = self.cells[window:] + newest

    def _keep(self, first: int, tail: tuple[int, ...]) -> None:
        """Keep an n-gram as the newest of those that begin with `first`."""
        if not self._options.guesses:
            return
        tails = self._pool.setdefault(first, {})
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self._options.guesses:
            del tails[next(iter(tails))]


def _tree_of(options: LookaheadOptions) -> tuple[Tree, list[int]]:
    """The tree of window and guesses, and by node the place of its token: the window's cells row by row, then the
    guesses' tokens."""
    parents = _parents_of(options)
    below: list[list[int]] = [[] for _ in parents]
    for place, parent in enumerate(parents[1:], start=1):
        below[parent].append(place)
    order = [0]
    for place in order:  # grows meanwhile, level by level
        order += below[place]
    nodes = {place: node for node, place in enumerate(order)}
    # Guesses often begin alike, and with the window's own token.
    return Tree((-1, *(nodes[parents[place]] for place in order[1:])), siblings_repeat=True), order


def _parents_of(options: LookaheadOptions) -> Sequence[int]:
    """The parent of each token, by the places that `_tree_of` says."""
    window, length = options.window, options.ngram - 1
    row = range(-1, window - 1)  # row 0: the cell before
    columns = range((length - 1) * window)  # other rows: the cell above
    cells = length * window
    guesses = [cells + place - 1 if place % length else 0 for place in range(options.guesses * length)]
    return [*row, *columns, *guesses]


@checked_early()
@within("drafter")
def make_lookahead(target: Target, draft: Draft | None, **options: Any) -> Lookahead:
    """The drafter of conf/drafter/lookahead.yaml. `options`: of LookaheadOptions. Raises UserError."""
    check(draft is None, "draft: drafter=lookahead has no model; leave draft= out")
    return Lookahead(LookaheadOptions(**options))
