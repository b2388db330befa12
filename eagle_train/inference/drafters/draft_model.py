"""A smaller model drafts for the target: any causal LM with the same tokenizer. DESIGN section 3.5.

Its keys and values lie in the engine's blocks, at the target's positions, as an EAGLE draft's do. Knows nothing of
validation or requests.

Shapes: A active rows, T tokens, Q nodes of a level that have children, H the draft model's width, V the target's
vocabulary, V' the tokens that both models know.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from eagle_train.drafts import Draft
from eagle_train.errors import UserError, check
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.drafters.drafter import (
    MAX_PENDING,
    Drafted,
    DraftRound,
    Level,
    Needs,
    Outcome,
    Pending,
    TreePlan,
)
from eagle_train.inference.drafters.early import checked_early
from eagle_train.inference.drafters.growing import FirstTokens, Growing, Nodes, keep_drafted
from eagle_train.inference.drafters.same_tokenizer import check_same_tokenizer, known_tokens
from eagle_train.models.loading import TargetConfig, load_config, load_target, load_tokenizer
from eagle_train.models.patches import optimize_for_decoding
from eagle_train.models.target import Target
from eagle_train.ops.compiled import Compiled, Forward
from eagle_train.ops.rule import Attend


class DraftModel(Growing[Nodes]):
    """Proposes with a smaller causal LM, `model`, that has the target's tokenizer.

    Its vocabulary may be padded to another size than the target's: padded ids are never proposed, and ids that it has
    no embedding for are read as its last one. Its context may be shorter than the target's: where a text goes beyond
    it, positions stay at its last one, so that drafts are of no use there, and answers are the target's as everywhere.

    It must be whole, and on the target's device; of a target that ranks hold together, each rank has all of it. It is
    used as it is, and must not be changed while the drafter is in use; on a CPU it gets fp16 copies of its weights, as
    an engine's target does. Raises UserError for another tokenizer. Two models without tokenizers are taken to have the
    same.
    """

    def __init__(self, model: Target, target: Target):
        place = f"drafter.path={model.name}"
        check(model.together is None, f"{place}: it is divided over ranks; each must hold the whole draft model")
        check(model.device == target.device, f"{place}: it is on {model.device}; it must be on {target.device}")
        count = min(model.identity.vocab_size, target.identity.vocab_size, _known(model, target, place))
        self.model = model
        self.models = [model.model]
        # Of an offloaded model Accelerate fetches weights within a forward.
        self.needs = Needs(grows=True, waits=model.is_offloaded, checks=False)
        self.head = FirstTokens(model.lm_head, count, target.identity.vocab_size)
        self._embeds_less = len(model.embedding) < target.identity.vocab_size
        model.join_products()
        optimize_for_decoding(model.model, model.dtype, [self.head.lm_head.weight])
        layers = model.kv_layers
        self.cache = PagedKV(layers.kv_shapes, 0, model.dtype, model.device, layers.given)
        self.caches = [self.cache]
        self.compiled: Forward | None = None  # `forward`

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the model's LM head reads [A, T, H] at int64 tokens and positions [A, T], within what it knows."""
        if self._embeds_less:
            tokens = tokens.clamp(max=len(self.model.embedding) - 1)
        positions = positions.clamp(max=self.model.max_positions - 1)
        return self.model.hidden_states(tokens, positions, attend)

    def run_forward(self, *given: Any) -> torch.Tensor:
        """`forward`, compiled where it was."""
        return (self.compiled or self.forward)(*given)

    def compile(self, sizes: Iterable[tuple[int, TreePlan]]) -> list[Callable[[], None]]:
        forward = self.compiled = Compiled(self.forward, self.model.device)
        shapes, sizes = set[tuple[int, int]](), list(sizes)
        catches_up = any(plan.tree.num_nodes == 1 for _, plan in sizes)
        for rows, plan in sizes:
            shapes |= {(rows, 1), (rows, 2)}  # the pending token, and a leaf that was accepted before it
            shapes |= {(rows, MAX_PENDING)} if catches_up else set()
            shapes |= {(rows, len(level.parents)) for level in plan.levels[1:]}
            if isinstance(plan.tree, DynamicTree):
                shapes.add((rows, plan.tree.top_k))
        return [partial(self._prepare, forward, *shape) for shape in sorted(shapes)]

    def _prepare(self, forward: Compiled, rows: int, length: int) -> None:
        """Compile for tokens [rows, length]."""
        tokens = torch.zeros(rows, length, dtype=torch.long, device=self.model.device)
        forward.prepare(tokens, tokens)

    def prefill(
        self,
        prefix: Prefix,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        counts: list[int],
    ) -> None:
        self.forward(tokens, positions, self.cache.extend(prefix, positions))

    def propose(self, round: DraftRound) -> Drafted:
        states = self.read(round.draft_prefix, round.pending)
        nodes = Nodes(self.cache, round.plan, round.prefix)
        return self.grow(round.plan, states, round.pending.last, nodes, round.choice)

    def read(self, prefix: Prefix, pending: Pending) -> torch.Tensor:
        """Read the pending tokens. Returns the states at the last one [A, 1, H]."""
        count = pending.tokens.shape[1]
        positions = prefix.positions(count)
        states = self.run_forward(pending.tokens, positions, self.cache.extend(prefix, positions))
        return states if count == 1 else states.take_along_dim(pending.end.unsqueeze(2), dim=1)

    def level_states(self, tokens: torch.Tensor, above: torch.Tensor, level: Level, nodes: Nodes) -> torch.Tensor:
        return self.run_forward(tokens, *nodes.next_level(len(tokens), level))

    def rewind(self, round: DraftRound, drafted: Drafted, outcome: Outcome) -> Pending:
        return keep_drafted(self.cache, round, drafted, outcome)


def _known(model: Target, target: Target, place: str) -> int:
    """How many tokens the tokenizer of both has. Raises UserError where it is not the same."""
    _check_tokenizers(model.tokenizer, target.tokenizer, target.name, place)
    return target.identity.vocab_size if target.tokenizer is None else known_tokens(target.tokenizer)


def _check_tokenizers(own: Any, targets: Any, target: str, place: str) -> None:
    """Raise UserError unless both are the same one, or None."""
    if own is None and targets is None:
        return
    lacks = "it has no tokenizer" if own is None else f"the target {target} has no tokenizer"
    check(own is not None and targets is not None, f"{place}: {lacks}, and both must have the same one")
    check_same_tokenizer(own, targets, place)


def _check_draft_model(
    target: TargetConfig, draft: str | None, path: str, dtype: str = "auto", trust_remote_code: bool = False
) -> None:
    own = _config_of(draft is not None, path, dtype, trust_remote_code)
    with _told_of_drafter(path):
        load_config(own)
        tokenizer = load_tokenizer(own)
    _check_tokenizers(tokenizer, load_tokenizer(target), target.path, f"drafter.path={path}")


@checked_early(_check_draft_model)
def make_draft_model(
    target: Target, draft: Draft | None, path: str, dtype: str = "auto", trust_remote_code: bool = False
) -> DraftModel:
    """The drafter of conf/drafter/draft_model.yaml. `path`: a directory or a hub id; `dtype` and `trust_remote_code`:
    as of `TargetConfig`. Raises UserError."""
    config = _config_of(draft is not None, path, dtype, trust_remote_code)
    with _told_of_drafter(path):
        return DraftModel(load_target(config, target.device), target)


def _config_of(has_draft: bool, path: str, dtype: str, trust_remote_code: bool) -> TargetConfig:
    check(not has_draft, "draft: drafter=draft_model drafts with drafter.path=; leave draft= out")
    with _told_of_drafter(path):
        return TargetConfig(path, dtype, trust_remote_code)


@contextmanager
def _told_of_drafter(path: str) -> Iterator[None]:
    """A UserError about a target is told of the draft model."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for key in ("path", "dtype", "trust_remote_code"):
            message = message.replace(f"target.{key}", f"drafter.{key}")
        message = message.replace("give the target that it was made for", "give it as draft=, with drafter=eagle")
        raise UserError(message.replace(f"target {path}:", f"drafter.path={path}:")) from error
