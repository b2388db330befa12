"""The target drafts for itself with some of its layers, behind which its final norm and LM head stand. DESIGN 3.5.

It has no weights and no cache of its own: committed tokens' keys and values are the target's, and what the first layers
compute at drafted nodes is handed to the validation, which goes on from there. Knows nothing of requests.

Shapes: A active rows, Q nodes of a level that have children, n nodes that have children, H hidden.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from yaml import YAMLError

from eagle_train.drafts import Draft
from eagle_train.errors import UserError, check, one_line, shown
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.drafters.drafter import Computed, Drafted, DraftRound, Level, Needs, TreePlan
from eagle_train.inference.drafters.early import checked_early
from eagle_train.inference.drafters.growing import FirstTokens, Growing, Nodes
from eagle_train.models.loading import TargetConfig, load_config
from eagle_train.models.target import Target
from eagle_train.ops.rule import Attend


class _NodesWithRoot(Nodes):
    """The root is one of the nodes: it is not in the target's cache before validation. `states`: by level, what the
    first layers computed."""

    def __init__(self, cache: PagedKV, plan: TreePlan, prefix: Prefix):
        self.suffix = None if plan.tree.is_chain else Suffix()  # as the validation has it
        self.states: list[torch.Tensor] = []
        self.prefix, self._cache, self._depth, self._grows = prefix, cache, 0, False

    def next_level(self, active: int, level: Level) -> tuple[torch.Tensor, Attend]:
        before = self.prefix.advanced(self._depth)
        self._depth += 1
        positions = before.positions(1).expand(active, len(level.parents))
        if self.suffix is None:
            return positions, self._cache.extend(before, positions)
        ancestors = F.pad(self.ancestors if self._grows else level.ancestors, (1, 0), value=True)
        return positions, self._cache.tree(self.prefix, self.suffix, positions, ancestors)

    def dynamic(self) -> "_NodesWithRoot":
        self._grows = True
        return self


class LayerSkip(Growing[_NodesWithRoot]):
    """Proposes with some of the target's own layers.

    `layers`: how many of the first ones, or their numbers in ascending order, 0 the first. Of those that are 0, 1, ...
    without a gap, states, keys and values of a static tree's nodes are not computed again by the validation, if it runs
    kernel by kernel on a target that is whole, without other drafters. Drafting itself is neither compiled nor
    recorded. The layers' classes are changed (`patches.use_stages`); the target computes the same. Raises UserError for
    layers that are none, and for a family whose forward cannot be run in parts.
    """

    needs = Needs(grows=True, checks=False)

    def __init__(self, target: Target, layers: int | Sequence[int]):
        self.layers = _checked_layers(layers, target.config.num_hidden_layers)
        self.target, self.stages = target, target.stages()
        size = target.identity.vocab_size
        self.head = FirstTokens(target.lm_head, size, size)
        self.shared = next((i for i, layer in enumerate(self.layers) if layer != i), len(self.layers))

    def propose(self, round: DraftRound) -> Drafted:
        plan, pending = round.plan, round.pending
        if plan.tree.num_nodes == 1:
            return Drafted(pending.last)
        assert round.target_cache is not None, "it may wait, so that it is not recorded"
        nodes = _NodesWithRoot(round.target_cache, plan, round.prefix)
        is_dynamic = isinstance(plan.tree, DynamicTree)
        level = _root_level(pending.last.device) if is_dynamic else plan.levels[0]
        root = self.level_states(pending.last, pending.hidden, level, nodes)
        drafted = self.grow(plan, root, pending.last, nodes, round.choice)
        if self.shared == 0 or is_dynamic:  # the nodes that a dynamic tree keeps are not those that were computed
            return drafted
        computed = Computed(self.stages, self.shared, torch.cat(nodes.states, 1), nodes.suffix)
        return drafted._replace(computed=computed)

    def level_states(
        self, tokens: torch.Tensor, above: torch.Tensor, level: Level, nodes: _NodesWithRoot
    ) -> torch.Tensor:
        positions, attend = nodes.next_level(len(tokens), level)
        last = self.shared - 1
        states, kept = self.stages.part(
            lambda: self.target.hidden_states(tokens, positions, attend), self.layers, keep=last
        )
        nodes.states += [] if kept is None else [kept]
        return states


def _root_level(device: torch.device) -> Level:
    """The level of the root alone, which sees no other node."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return Level([0], zero, None, None, torch.zeros(1, 0, dtype=torch.bool, device=device), None, 1, slice(0, 0))


def _checked_layers(layers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The layers' numbers. Raises UserError."""
    right = f"must be how many of the first layers, 1 to {count}, or a list of layers from 0 to {count - 1}, ascending"
    said = f"drafter.layers={shown(layers)}: {right}"
    if isinstance(layers, int):
        check(not isinstance(layers, bool) and 0 < layers <= count, said)
        return tuple(range(layers))
    check(isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0, said)
    check(all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < count for x in layers), said)
    check(sorted(set(layers)) == list(layers), said)
    return tuple(layers)


def _check_layer_skip(target: TargetConfig, draft: str | None, layers: Any) -> None:
    _checked_layers(_given_layers(draft is not None, layers), load_config(target).get_text_config().num_hidden_layers)


@checked_early(_check_layer_skip)
def make_layer_skip(target: Target, draft: Draft | None, layers: Any) -> LayerSkip:
    """The drafter of conf/drafter/layer_skip.yaml. `layers`: as for `LayerSkip`, or a YAML with a list `layers`, as
    evals.layer_skip writes it. Raises UserError."""
    return LayerSkip(target, _given_layers(draft is not None, layers))


def _given_layers(has_draft: bool, layers: Any) -> Any:
    """`layers`, those of the YAML where it names one. Raises UserError."""
    check(not has_draft, "draft: drafter=layer_skip drafts with the target's own layers; leave draft= out")
    return _read_layers(layers) if isinstance(layers, str) else layers


def _read_layers(path: str) -> Any:
    """`layers` of a YAML. Raises UserError."""
    check(Path(path).is_file(), f"drafter.layers={path}: no such file; give a number, a list, or a YAML with `layers`")
    try:
        found: Any = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise UserError(f"drafter.layers={path}: cannot be read: {error.strerror}") from error
    except (YAMLError, ValueError) as error:
        raise UserError(f"drafter.layers={path}: no YAML: {one_line(error)}") from error
    check(isinstance(found, dict) and "layers" in found, f"drafter.layers={path}: must have the key `layers`, a list")
    return found["layers"]
