"""Drafters that read each request's tokens on the host: a subclass says what may follow one text. DESIGN section 3.5.

The batch, trees that differ by row, mistakes and lateness are handled here. Knows nothing of caches or models.

Shapes: A active rows, N nodes of the largest tree.
"""

import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from eagle_train.errors import UserError, check, one_line, shown
from eagle_train.inference.decode.row_trees import RowChains, RowTrees
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Needs, RowText
from eagle_train.inference.requests.sampling_params import is_whole
from eagle_train.ops.transfer import to_device

_MOST_LATE = 3  # late calls that may run at once; while so many do, a drafter is not asked


class TextTree(NamedTuple):
    """Drafted tokens as a tree. Node 0 is the text's last token; `tokens[i]` is node i + 1, and `parents[i]`, from 0 to
    i, the node that it follows."""

    tokens: list[int]
    parents: list[int]


class TextDrafter(Drafter):
    """A drafter on the host. A subclass defines `draft`; one that keeps something of a request also `leave`.

    A mistake, an exception or a `draft` that takes longer than `timeout_s` concerns its request alone, which then goes
    on without drafts. So do all that are drafted for while three late calls still run. `timeout_s` None: `draft` is
    trusted, and runs in the engine's own thread.
    """

    needs = Needs(texts=True, by_row=True, checks=False)
    timeout_s: float | None = 1.0

    def draft(self, text: RowText, most: int) -> list[int] | TextTree:
        """What may follow a text: a list of token ids, one after the other, or a tree. Empty where nothing is known.

        At most `most` tokens are used, the first ones."""
        raise NotImplementedError

    def propose(self, round: DraftRound) -> Drafted:
        """The drafts of all rows, padded to the largest."""
        assert round.texts is not None
        tree, device = round.plan.tree, round.pending.tokens.device
        found, faults = self._drafts(round.texts, tree.num_nodes - 1, tree.max_depth, round.vocab_size)
        nodes = 1 + max(len(each.tokens) for each in found)
        rows = [each.tokens + [0] * (nodes - 1 - len(each.tokens)) for each in found]
        tokens = to_device(rows, device, torch.long) if nodes > 1 else round.pending.last[:, :0]
        trees: RowTrees
        if all(each.parents == list(range(len(each.parents))) for each in found):
            trees = RowChains(to_device([len(each.tokens) for each in found], device, torch.long), nodes)
        else:
            trees = RowTrees.of([[0, *each.parents] for each in found], tree.max_depth, device)
        return Drafted(torch.cat((round.pending.last, tokens), 1), trees=trees, faults=faults)

    def _drafts(
        self, texts: list[RowText], most: int, deepest: int, vocab_size: int
    ) -> tuple[list[TextTree], dict[int, str]]:
        """Each row's draft, and the rows that have none for a fault, with its reason."""
        found, faults = [TextTree([], [])] * len(texts), dict[int, str]()
        for row, text in enumerate(texts):
            try:
                found[row] = _checked(self._call(partial(self.draft, text, most)), most, deepest, vocab_size)
            except Exception as error:  # whatever a user's code raises
                faults[row] = one_line(error)
        return found, faults

    def _call(self, work: Callable[[], list[int] | TextTree]) -> list[int] | TextTree:
        if self.timeout_s is None:
            return work()
        if not hasattr(self, "_worker"):
            self._worker = _Worker()
        return self._worker.call(work, self.timeout_s)


class _Worker:
    """Runs calls one after the other in a thread of its own; a call that is late is abandoned with its thread, which
    ends when the call does."""

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []
        self._thread, self._calls = _started()

    def call(self, work: Callable[[], Any], timeout_s: float) -> Any:
        """Raises what `work` raises, and UserError where it takes longer, or too many late calls still run."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        check(len(self._late) < _MOST_LATE, f"{_MOST_LATE} late calls still run, and it is not asked while they do")
        answer: SimpleQueue = SimpleQueue()
        self._calls.put((work, answer))
        try:
            result, error = answer.get(timeout=timeout_s)
        except Empty:
            self._calls.put(None)
            self._late.append(self._thread)
            self._thread, self._calls = _started()
            raise UserError(f"it took longer than {timeout_s:g} seconds") from None
        if error is not None:
            raise error
        return result


def _started() -> tuple[threading.Thread, SimpleQueue]:
    """A new thread and the queue of its calls, which None ends. It is a daemon: one that hangs does not keep the
    process alive."""
    calls: SimpleQueue = SimpleQueue()

    def run() -> None:
        for work, answer in iter(calls.get, None):
            try:
                answer.put((work(), None))
            except Exception as error:  # handed to the caller
                answer.put((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, calls


def _checked(draft: list[int] | TextTree, most: int, deepest: int, vocab_size: int) -> TextTree:
    """The first `most` nodes of what `draft` returned. Raises UserError where it is no tree of the target's tokens, or
    has more than `deepest` levels."""
    if isinstance(draft, list):
        draft = TextTree(draft, list(range(len(draft))))
    if not isinstance(draft, TextTree):
        raise UserError(f"it drafted {shown(draft)}; it must be a list of token ids or a TextTree")
    tokens, parents = list(draft.tokens)[:most], list(draft.parents)[:most]
    check(len(draft.tokens) == len(draft.parents), f"{len(draft.tokens)} tokens with {len(draft.parents)} parents")
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not (is_whole(token, 0) and token < vocab_size):  # no `check`: most of the time would go into its messages
            raise UserError(f"it drafted the token {shown(token)}; tokens must be from 0 to {vocab_size - 1}")
        if not (is_whole(parent, 0) and parent <= node):
            raise UserError(f"node {node + 1} has the parent {shown(parent)}; it must be a node from 0 to {node}")
    if len(tokens) > deepest:  # fewer cannot be too deep
        depth = [0]
        for parent in parents:
            depth.append(depth[parent] + 1)
        check(max(depth) <= deepest, f"it drafted {max(depth)} levels; its tree has {deepest} (Needs.tree)")
    return TextTree(tokens, parents)
