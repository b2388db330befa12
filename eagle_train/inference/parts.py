"""Builds the parts of an engine from a target, a draft and options. Internal: users build an `Engine`."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle_train.artifacts.format import check_sizes, load_draft, read_artifact
from eagle_train.drafts import Draft
from eagle_train.drafts.rope import check_rotary
from eagle_train.errors import OptionError, check, shown
from eagle_train.hardware import current, resolve_device
from eagle_train.inference.cache.block_memory import BlockMemory
from eagle_train.inference.cache.block_pool import BlockPool, blocks_for
from eagle_train.inference.cache.prefix_cache import PrefixCache
from eagle_train.inference.compiling import compile_rounds
from eagle_train.inference.decode.adaptive import Adaptive
from eagle_train.inference.decode.calibration import calibrated, warm_up
from eagle_train.inference.decode.dispatcher import Dispatcher, ReplacedPlans
from eagle_train.inference.decode.graphs import check_graphs
from eagle_train.inference.decode.recording import record_rounds
from eagle_train.inference.decode.rounds import RoundInputs
from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.sampling import Verified
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.drafter import Drafter, TreePlan
from eagle_train.inference.drafters.drafters import Drafters
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parallel.cost import measured_speeds
from eagle_train.inference.parallel.divided_draft import check_divides, division
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.parallel.vocabulary import DividedHead
from eagle_train.inference.requests.prefiller import LocalPrefiller
from eagle_train.inference.requests.requests import Requests
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.inference.runner import Runner
from eagle_train.models.checkpoint_quantisation import quantization_config_of
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.patches import optimize_for_decoding
from eagle_train.models.target import Target
from eagle_train.ops.graphs import CudaGraphs, Record
from eagle_train.ops.linear import keep_fp16_copy

AnyTarget = str | Path | TargetConfig | Target
AnyDraft = str | Path | Draft | Drafter | Mapping[str, str | Path | Draft | Drafter] | None
Acceptance = Callable[[RoundInputs, AnyTree, Verified], Verified]


@dataclass
class Parts:
    """`requests` tokenises and detokenises, `scheduler` picks the requests of a round, `runner` computes it,
    `prefiller` prefills prompts, `memory` holds the caches; `plain`: the plan without drafts. `adaptive` chooses trees;
    None: by batch size alone."""

    config: EngineConfig
    target: Target
    dispatcher: Dispatcher
    requests: Requests
    memory: BlockMemory
    scheduler: Scheduler
    runner: Runner
    prefiller: LocalPrefiller
    plain: TreePlan
    adaptive: Adaptive | None


def build_parts(
    target: AnyTarget,
    draft: AnyDraft,
    tree: Any,
    device: str,
    config: EngineConfig,
    acceptance: Acceptance | None,
    decodes: bool = True,
) -> Parts:
    """Arguments as for `Engine`. `decodes`: False: it prefills alone, and nothing is made for rounds. Raises UserError
    if they do not fit together, before loading where possible."""
    _check(target, draft, device)
    if not decodes:
        config = replace(config, graphs=False, compile=False, compile_sampling=False, gate=False)
    device = resolve_device(device) if device == "auto" else device
    check_graphs(config.graphs, target.device if isinstance(target, Target) else device)
    if not isinstance(target, Target):
        given = target if isinstance(target, TargetConfig) else TargetConfig(str(target))
        for each in draft.values() if isinstance(draft, Mapping) else [draft]:
            if isinstance(each, str | Path):
                check_sizes(read_artifact(each).target, given, f"draft={each}")
        with current(torch.device(device)):  # what is loaded is checked by a forward
            target = load_target(given, device)
    check_graphs(config.graphs, target.device, target.together, target.is_offloaded)
    with current(target.device):
        return _of_loaded(target, draft, tree, config, acceptance, decodes)


def _of_loaded(
    target: Target, draft: AnyDraft, tree: Any, config: EngineConfig, acceptance: Acceptance | None, decodes: bool
) -> Parts:
    """As `build_parts`."""
    drafters = _drafters(target, draft, config.draft_lm_head)
    target.join_products()
    optimize_for_decoding(target.model, target.dtype, [target.lm_head.weight])
    check_rotary(target.config)
    tree = tree if drafters else chain(0)
    runner = Runner(target, drafters, config, acceptance)
    levels = runner.drafters.levels
    dispatcher = tree if isinstance(tree, Dispatcher) else Dispatcher(tree, target.device, levels)
    plans = [plan for _, plan in dispatcher.plans([size for size, _ in dispatcher.table])]
    runner.drafters.expect(plans, config.drafting)
    if runner.drafters.have_plans:
        dispatcher = ReplacedPlans(dispatcher, runner.drafters.plan)
    ahead = dispatcher.deepest + 1  # slots that a round may write after the committed ones
    divide(runner.ranks, target, runner.drafters.only, config)
    _compile(runner, dispatcher, config)
    memory = BlockMemory(runner.stores, BlockPool(0), runner.ranks, config.kv_tokens)
    if _uses_graphs(config.graphs, target, runner.drafters):
        record(runner, memory, dispatcher, partial(CudaGraphs, target.device))
    elif decodes and _has_own_kernels(target):
        memory.reserve_least()
        warm_up(runner, dispatcher)
    adaptive, plain = None, TreePlan(chain(0).to(target.device))
    if runner.drafters.by_name and (dispatcher.auto or config.gate):
        memory.reserve_least()
        adaptive = calibrated(runner, dispatcher, plain)
    caching = filter(runner.drafters.caching, runner.drafters.by_name)
    prefixes = PrefixCache(memory, config.host_kv_tokens, caching) if config.prefix_cache else None
    scheduler = Scheduler(memory.pool, config.max_batch_size, ahead, prefixes)
    requests = Requests(target)
    prefiller = LocalPrefiller(runner, requests, scheduler.register)
    return Parts(config, target, dispatcher, requests, memory, scheduler, runner, prefiller, plain, adaptive)


def _drafters(target: Target, draft: AnyDraft, lm_head: str) -> dict[str, Drafter]:
    """What drafts, by name, with an LM head as `EngineConfig.draft_lm_head` says. Raises UserError."""
    given = draft if isinstance(draft, Mapping) else {"" if draft is None else _name_of(draft): draft}
    return {name: _drafter(target, each, lm_head) for name, each in given.items() if each is not None}


def _name_of(draft: Any) -> str:
    """By what an engine's only drafter is called: the name of its class in small letters."""
    return type(draft).__name__.lower() if isinstance(draft, Drafter) else "eagle"


def _drafter(target: Target, draft: Any, lm_head: str) -> Drafter:
    """As `_drafters`, of one."""
    if isinstance(draft, str | Path):
        draft = load_draft(draft, target.identity)
    drafter: Drafter = drafter_of(copy.deepcopy(draft), target) if isinstance(draft, Draft) else draft
    if isinstance(drafter, Eagle):
        drafter.use_lm_head(lm_head)
    elif lm_head != "target":
        raise OptionError(f"draft_lm_head={lm_head}: {type(drafter).__name__} is no EAGLE drafter of ours; use target")
    return drafter


def _uses_graphs(graphs: bool | None, target: Target, drafters: Drafters) -> bool:
    """Whether CUDA graphs are recorded: as `graphs` says; None: where nothing is known to prevent it.

    That is on a GPU, for a target that is whole on it; of one that is divided no recording was tried on several GPUs
    yet. Weights that a library quantised and experts prevent it, in the target and in what drafts by a recording: some
    implementations synchronise, to count the tokens of each expert, say.
    """
    if graphs is not None:
        return graphs
    only = drafters.only if drafters.recordable else None
    models = [target.model, *(() if only is None else only.models)]
    is_whole = target.together is None and not target.is_offloaded
    return target.device.type == "cuda" and is_whole and not any(map(_may_wait, models))


def _has_own_kernels(target: Target) -> bool:
    """Whether rounds may have kernels compiled and timed. An offloaded target's take longer for its weights to come."""
    return target.device.type == "cuda" and not target.is_offloaded


def _may_wait(model: torch.nn.Module) -> bool:
    """Whether a model may have the host wait for its device: it is quantised, or has experts."""
    is_quantised = isinstance(model, PreTrainedModel) and quantization_config_of(model.config) is not None
    return is_quantised or any(name.endswith("experts") for name, _ in model.named_modules())


def divide(ranks: Ranks, target: Target, drafter: Drafter | None, config: EngineConfig) -> None:
    """Divide the LM head and an EAGLE draft over the ranks of a divided target, as the config says; None: where that is
    faster by the speeds that the first rank measures. Raises OptionError for a draft that cannot be divided."""
    if ranks.group is None:
        return
    draft, proposing = None, 0
    if isinstance(drafter, Eagle):
        draft, proposing = drafter.draft, sum(head.lm_head.num_bytes for head in drafter.heads)
        check_divides(config.divide_draft, draft, ranks.size)
    weight, speeds = target.lm_head.weight, None
    wanted = config.divide_lm_head, config.divide_draft
    if None in wanted:
        speeds = measured_speeds(ranks, weight.shape[1], weight.dtype)
    divided = division(draft, target.lm_head.num_bytes, proposing, ranks.size, *wanted, speeds)
    if divided.lm_head:
        ranks.divided_head = DividedHead(target.lm_head, ranks)
        keep_fp16_copy(ranks.divided_head.part.weight)
    if divided.draft and isinstance(drafter, Eagle):
        drafter.divide(ranks)


def record(runner: Runner, memory: BlockMemory, dispatcher: Dispatcher, recorder: Callable[[], Record]) -> None:
    """Record all rounds. Before, the cache gets its memory for good: a full batch of whole contexts, or what there is.

    `recorder`: as for `Graphs`. Raises UserError where memory runs out, or where a round has the host wait.
    """
    # As a sequence may have: its context, a round in flight and the next one, and the block that admission keeps free.
    each = blocks_for(runner.target.max_positions + 2 * (dispatcher.deepest + 1)) + 1
    memory.reserve(runner.config.max_batch_size * each)
    record_rounds(runner, dispatcher, memory.pool.total, recorder, Requests(runner.target).stop_masks)


def _compile(runner: Runner, dispatcher: Dispatcher, config: EngineConfig) -> None:
    """Compile for batch sizes 1, 2 and the maximum, and for both sizes at each change of tree; where a batch may go
    without drafts, for its one token too."""
    most = config.max_batch_size
    ends = {1, 2, most, *(size + n for size, _ in dispatcher.table for n in (0, 1))}
    sizes = [(rows, dispatcher.dispatch(rows)) for rows in sorted(ends) if rows <= most]
    if runner.drafters.varies or config.gate or dispatcher.auto:
        root = TreePlan(chain(0).to(runner.target.device))
        sizes += [(rows, root) for rows in (1, 2) if rows <= most]
    compile_rounds(runner, sizes, most * dispatcher.largest.num_nodes)


def _check(target: Any, draft: Any, device: Any) -> None:
    check(
        isinstance(target, str | Path | TargetConfig | Target),
        f"target={shown(target)}: must be a directory, a hub id, a TargetConfig or a Target",
    )
    kind, _, number = str(device).partition(":")
    right = device == "auto" or (kind in ("cpu", "cuda") and (number.isdigit() or not number))
    check(right, f"device={shown(device)}: must be auto, cpu, cuda or cuda:N")
    there = kind != "cuda" or isinstance(target, Target) or int(number or 0) < torch.cuda.device_count()
    check(there, f"device={device}: no such GPU is visible; use device=cpu")
    wanted = "must be None, an artifact's directory, a Draft or a Drafter"
    if isinstance(draft, Mapping):
        named = bool(draft) and all(isinstance(name, str) and name not in ("", "none") for name in draft)
        check(named, f"draft={shown(list(draft))}: must be drafters by name; none is no name for one")
    for each in draft.values() if isinstance(draft, Mapping) else [draft]:
        check(each is None or isinstance(each, str | Path | Draft | Drafter), f"draft={shown(each)}: {wanted}")
