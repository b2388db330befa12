"""From a composed config to a trainer: its target, data, draft, backend and look-ahead.

What cannot be trained is refused as early as possible, most of it before a weight is loaded. Knows nothing of logs,
signals or how a run ends. DESIGN section 3.10.
"""

import dataclasses
import datetime
import json
import logging
import random
import shlex
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts.format import check_sizes, load_draft, read_artifact
from eagle_train.artifacts.layouts import unserved
from eagle_train.artifacts.of_target import check_in_target, load_in_target
from eagle_train.corpus.preview import check_data, check_same_data
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig, absent, check_found, check_variables, pin
from eagle_train.corpus.stream import Stream, heldout_batches
from eagle_train.distributed import ALONE, World
from eagle_train.drafts import Draft, DraftConfig, kind_named, planned_config, saved_config
from eagle_train.errors import check, within
from eagle_train.hardware import resolve_device, warn_of_emulation
from eagle_train.models.cached_target import CachedTarget, check_cached, check_holds, check_reaches, load_cached
from eagle_train.models.checkpoint_quantisation import quantization_config_of
from eagle_train.models.family import skeleton
from eagle_train.models.loading import (
    DTYPES,
    TargetConfig,
    check_placement,
    check_target,
    load_config,
    load_target,
    load_tokenizer,
    training_dtype,
)
from eagle_train.models.patches import rounded_to_fp8
from eagle_train.models.shapes import context_of
from eagle_train.models.state_files import read_header
from eagle_train.models.stops import load_stop_ids
from eagle_train.models.target import Target, TargetEnds
from eagle_train.ops.compiled import try_compiler
from eagle_train.settings import build
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.checkpoint.format import checkpoints, newest_config
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.cost.estimate import GIB, ClusterConfig, PlannedRun
from eagle_train.training.idle import tell_idle
from eagle_train.training.lookahead import Lookahead
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.parallelize import prepare
from eagle_train.training.placement import chosen
from eagle_train.training.resume import check_same_draft, check_state
from eagle_train.training.target_pass import can_compile, succeeds, target_states, to_device
from eagle_train.training.train_config import OF_TARGET, TrainConfig, accumulation, rows_of_run
from eagle_train.training.trainer import Trainer

_LOG = logging.getLogger(__name__)
_UNSEEN = "the first rows were not looked at, and the run may refuse them"  # by a plan
_INIT_FROM, _TARGET_QUANT, _POSITIONS = "train.init_from", "train.target_quant", "max_position_embeddings"


def assemble(config: DictConfig, parallel: ParallelConfig, world: World = ALONE) -> Trainer:
    """A rank's trainer, at step 0, from the composed config of eagle-train. All ranks call it.

    Sets the seeds of Python and torch. Raises UserError for a config that cannot be trained.
    """
    train = build(TrainConfig, config.train, "train")
    optim = build(OptimConfig, config.optim, "optim")
    data = build(DataConfig, config.data, "data")
    target_config = build(TargetConfig, config.target, "target")
    hf_config, device = load_config(target_config), resolve_device(config.device)
    check_job(train, optim, parallel, data, target_config, hf_config, world.size, config.device)
    if not target_config.cached:  # what a cache was computed in is in its header
        target_config = training_dtype(target_config, device, world)
    settings: Any = OmegaConf.to_container(config.draft)
    planned = planned_config(hf_config, settings)  # raises where the draft cannot be made
    check_lesson(train, planned)
    check_drafted(target_config, planned)
    known = (target_config, hf_config, planned, train, optim)
    parallel, world = divided(parallel, world, device, *known, data.row_tokens)
    check_placement(target_config, hf_config, parallel.target, world.shard_size)
    check(str(config.out) != "", "out is empty: give out=DIR")
    out = Path(str(config.out))
    check(
        train.resume or not checkpoints(out),
        f"out={out} holds checkpoints: name another directory, remove them, or give train.resume=true",
    )
    check_found(data)
    earlier = world.exchange(newest_config(out) if world.is_main and train.resume else None)[0]  # of this very run
    own_length = config.draft.get(_POSITIONS) is None
    if earlier is None:
        check_start(train, planned, target_config, hf_config)
    else:
        _check_earlier(planned, settings, *earlier, own_length)
    sound = isinstance(config.seed, int) and 0 <= config.seed < 2**63
    check(sound, f"seed={config.seed}: must be a whole number, 0 or more and below 2**63")
    random.seed(config.seed)
    torch.manual_seed(config.seed)

    date = data.date or _day_of(out, train.resume, target_config)
    data.date = config.data.date = world.exchange(date)[0]  # the same on all ranks
    for key, commit in pin(data, _known(out, train.resume, target_config), world).items():
        OmegaConf.update(config, key, commit, force_add=True)
    renderer = renderer_of(target_config, data, hf_config)
    for note in world.by_each(lambda: check_data(data, renderer)):
        if world.is_main:
            warnings.warn(note, stacklevel=1)
    check_same_data(data, world)
    stream = Stream(data, renderer, train.micro_batch_rows, world)
    if earlier is not None:
        path, _ = earlier
        world.by_main(lambda: check_state(train, stream, path))
    heldout = world.by_each(lambda: heldout_batches(data, renderer, train.micro_batch_rows, train.eval_batches))

    store = CheckpointStore(out, world)
    store.check_shared()
    target = _loaded(target_config, device, parallel, world)
    shape = _draft_shape(config.draft, target)  # raises before rows are drawn
    if train.target_quant == "fp8" and isinstance(target, Target):
        round_target(target, world)
    if earlier is not None:  # the run's own weights follow, and what it started from may be gone
        draft = _as_before(shape, *earlier, own_length).module()
    elif train.init_from not in (None, OF_TARGET):
        draft = _given_draft(str(train.init_from), shape, target, own_length)
    else:
        if shape.vocab_size:
            shape.vocabulary = stream.frequent_tokens(shape.vocab_size)
        draft = _begun(shape, config.seed, train, target, target_config.path)
    draft = draft.to(device)
    if isinstance(target, CachedTarget):
        for batch in heldout:  # else the run would end at its first measurement
            target.check_has(batch.tokens, batch.supervised, batch.lengths)
    rows = train.micro_batch_rows, data.row_tokens
    parallel, compiled = with_compiled_target(parallel, target, *rows, draft.config.target_layers)
    backend = prepare(draft, optim, parallel, world, target.dtype)
    micro_batches = accumulation(optim, train, data.row_tokens, world.size)
    ahead = look_ahead(stream, target, draft.config, train, micro_batches, world, compiled)
    if world.is_main:
        tell_unserved(planned)  # when nothing more is refused
        tell_idle(train, optim, data, planned)
    return Trainer(train, optim, target, draft, backend, ahead, heldout, store)


def _loaded(config: TargetConfig, device: str, parallel: ParallelConfig, world: World) -> TargetEnds:
    """The target, or what a cache of its states holds of it. Raises UserError."""
    return load_cached(config, device) if config.cached else load_target(config, device, parallel.target, world)


def tell_unserved(draft: DraftConfig) -> None:
    """Log which serving engines cannot run what is about to be trained, and what to give for them."""
    for line in unserved(draft):
        _LOG.info("note: %s", line)


def round_target(target: Target, world: World = ALONE) -> None:
    """Let the target's layers multiply in FP8 (`Target.round_to_fp8`), and log what that changes.

    Warns where the device has no FP8 products. Raises UserError.
    """
    modules, error = target.round_to_fp8()
    if world.is_main:
        warn_of_emulation(_TARGET_QUANT, torch.float8_e4m3fn, target.device)
        _LOG.info(
            "%s=fp8: %d modules of the target; hidden states differ by %.1f %%", _TARGET_QUANT, modules, 100 * error
        )


def divided(
    parallel: ParallelConfig,
    world: World,
    device: str,
    target: TargetConfig,
    hf_config: Any,
    draft: DraftConfig,
    train: TrainConfig,
    optim: OptimConfig,
    row_tokens: int,
) -> tuple[ParallelConfig, World]:
    """`parallel` with its choices made (`chosen`), by the memory of the smallest GPU, and the ranks that hold weights
    together. A CPU's memory is taken to suffice. `target`: its dtype is no auto, but for a cache's. All ranks call it.
    Raises UserError.
    """

    def fits(each: ParallelConfig) -> bool:
        return device == "cpu" or run.fits(each)

    if device != "cpu":
        own = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        cluster = ClusterConfig(memory_gib=min(world.exchange(own)) / GIB)
        dtype = cached_dtype(target) or DTYPES[target.dtype]
        assert dtype is not None
        run = PlannedRun(target, hf_config, draft, train, optim, cluster, row_tokens, world.size, dtype)
    parallel = chosen(parallel, world.size, world.node, fits)
    return parallel, world.divided(parallel.target_shard_size_of(world.size), parallel.draft_shard_size_of(world.size))


def with_compiled_target(
    parallel: ParallelConfig, target: TargetEnds, rows: int, tokens: int, layers: tuple[int, ...]
) -> tuple[ParallelConfig, bool]:
    """Compile the target's forward of [rows, tokens], with the outputs of `layers`, where it is whole on a rank.
    Returns whether it was, and `parallel` with `compile` true or false, which is for the draft's layers. Raises
    UserError.

    DeepSpeed puts hooks into a module, and its layers are compiled only for who asks for it.
    """
    wanted, device = parallel.compile, target.device
    whole = parallel.target == "replicated" and not isinstance(target, CachedTarget)
    of_draft = wanted is not None or parallel.backend != "deepspeed"
    with within("parallel"):
        if whole:
            works = compiled = can_compile(cast(Target, target), rows, tokens, wanted, layers)
        else:  # the draft alone, at its first step: a compiler that fails there would end a run that has begun
            works, compiled = of_draft and succeeds(partial(try_compiler, device), device, wanted), False
    return dataclasses.replace(parallel, compile=works and of_draft), compiled


def look_ahead(
    stream: Stream,
    target: TargetEnds,
    draft: DraftConfig,
    train: TrainConfig,
    accumulation: int,
    world: World = ALONE,
    compiled: bool = False,
) -> Lookahead:
    """What hands out the stream's batches with the states that the draft wants of the target, `accumulation`
    micro-batches a step. `compiled`: the target's forward was, see `can_compile`.
    """
    first_slot, passes = draft.first_slot, draft.passes(train.unroll)
    return Lookahead(
        stream,
        accumulation,
        lambda batch: to_device(batch, target.device, first_slot, passes),
        lambda batch: target_states(target, batch, draft.target_layers, compiled),
        target.device,
        beside=world.shard_size == 1,
        reads=isinstance(target, CachedTarget),
    )


def _day_of(out: Path, resume: bool, target: TargetConfig) -> str:
    """The day on which the run in `out` began if it is resumed, else that of a cache of the target's states, whose
    documents have it, else today."""
    composed = out / "config.yaml"
    before = OmegaConf.load(composed) if resume and composed.is_file() else None
    earlier = before and OmegaConf.select(before, "data.date")
    if not earlier and target.cached:
        earlier = read_header(Path(target.path), f"target.path={target.path}").made_of["data.date"]
    return str(earlier or today())


def _known(out: Path, resume: bool, target: TargetConfig) -> Callable[[str], Any] | None:
    """What the run in `out` began with, by key, if it is resumed, else what a cache of the target's states was made of;
    None where there is neither."""
    composed = out / "config.yaml"
    if resume and composed.is_file():
        return partial(OmegaConf.select, OmegaConf.load(composed))
    if target.cached:
        return partial(made_with, read_header(Path(target.path), f"target.path={target.path}").made_of)
    return None


def made_with(made_of: dict[str, Any], key: str) -> Any:
    """The revision of the data set with this key, in what a cache says that it is made of."""
    *_, name, last = key.split(".")
    of_mix = (made_of.get("data.mix") or {}).get(name, {})
    return of_mix.get(last) if key.startswith("data.mix.") else made_of.get(key)


def today() -> str:
    return str(datetime.date.today())


def check_planned_data(target: TargetConfig, data: DataConfig, hf_config: Any, elsewhere: bool) -> list[str]:
    """`check_data` for `plan=true`, without the hub's data and a tokenizer that are not on this machine; what is here
    is looked at. `elsewhere`: the job is for other machines, and so may its files be.

    Returns warnings. Raises UserError for files that are missing, and where the first rows cannot be trained on.
    """
    missing = absent(data, None if elsewhere else "cluster.gpus=N plans for machines that have it")
    if load_tokenizer(target) is None:
        return [f"target.path is {target.path}; its tokenizer is not here; {_UNSEEN}"]
    notes = [f"{told}; {_UNSEEN}" for told in missing.values()]
    return [*notes, *check_data(data, renderer_of(target, data, hf_config), missing)]


def renderer_of(target: TargetConfig, data: DataConfig, hf_config: Any) -> ChatRenderer:
    """The renderer of rows into documents, from the target's files without its weights.

    Raises UserError where the target has no tokenizer or no usable chat template.
    """
    check_variables(target.template_kwargs, data)
    tokenizer = load_tokenizer(target)
    check(tokenizer is not None, f"target.path={target.path}: no tokenizer there, and the data are text")
    stops = load_stop_ids(target, hf_config, tokenizer)
    known = hf_config.get_text_config().vocab_size
    return ChatRenderer(tokenizer, data.supervise, stops, data.template_kwargs, data.date, known)


def check_job(
    train: TrainConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    data: DataConfig,
    target: TargetConfig,
    hf_config: Any,
    ranks: int,
    device: str,
) -> None:
    """Raise UserError, before any weight is loaded, for a job of `ranks` processes that could not start.

    Over how many ranks a target is divided may still be open: `check_placement` is for later. `hf_config`: the target's
    Hugging Face config. `plan=true` is refused for the same reasons.
    """
    parallel.check_job(optim, ranks)
    if parallel.zero.keys() - {"stage"}:  # DeepSpeed's own settings
        from eagle_train.training.deepspeed import check_zero

        check_zero(parallel.zero, device)
    accumulation(optim, train, data.row_tokens, ranks)
    if target.cached:
        header = check_cached(target, train.target_quant, parallel.target)
        check_reaches(header, rows_of_run(optim, train, data.row_tokens), train.length, f"target.path={target.path}")
    else:
        check_target(target, hf_config)
    if train.target_quant != "none" and not target.cached:
        _check_target_quant(train, parallel, target, hf_config)
    longest, context = context_of(hf_config.get_text_config())
    check(data.row_tokens <= longest, f"data.row_tokens={data.row_tokens}: must be at most the context, {context}")


def cached_dtype(target: TargetConfig) -> torch.dtype | None:
    """What a cache's target computed in, which its draft computes in too; None where the target is none."""
    return read_header(Path(target.path), f"target.path={target.path}").computed if target.cached else None


def check_drafted(target: TargetConfig, draft: DraftConfig) -> None:
    """Raise UserError for a cache of hidden states that does not hold what this draft wants of its target."""
    if target.cached:
        place = f"target.path={target.path}"
        header = read_header(Path(target.path), place)
        check_holds(header, draft.target_layers, draft.fed_hidden, draft.kind, place)


def check_lesson(train: TrainConfig, draft: DraftConfig) -> None:
    """Raise UserError for settings of `train` that this kind of draft does not read."""
    defaults = {each.name: each.default for each in dataclasses.fields(TrainConfig)}
    for name, instead in draft.unread.items():
        value = getattr(train, name)
        check(
            value == defaults[name],
            f"train.{name}={value}: draft={draft.kind} does not read it; {instead}, and leave train.{name} at "
            f"{json.dumps(defaults[name])}",
        )


def _check_target_quant(train: TrainConfig, parallel: ParallelConfig, target: TargetConfig, hf_config: Any) -> None:
    """Raise UserError for a target whose layers cannot be rounded when it is loaded."""
    said, place = f"{_TARGET_QUANT}={train.target_quant}", f"target.path={target.path}"
    check(
        parallel.target == "replicated",
        f"{said}: not with parallel.target={parallel.target}; use train.target_quant=none, or "
        "parallel.target=replicated",
    )
    check(not target.offload, f"{said}: not with target.offload=true; use one of them")
    quantised = quantization_config_of(hf_config) is not None
    check(not quantised, f"{said}: {place} is quantised already; use train.target_quant=none")
    check(
        bool(rounded_to_fp8(skeleton(hf_config, target.trust_remote_code, place))),
        f"{said}: no layer of {place} has a linear module whose inputs and outputs are multiples of 16; use "
        "train.target_quant=none",
    )


def _draft_shape(values: DictConfig, target: TargetEnds) -> DraftConfig:
    """The config of the draft that the group `draft` describes."""
    settings: Any = OmegaConf.to_container(values)
    kind = kind_named(settings["kind"], "draft.kind")
    return planned_config(target.config, kind.completed(settings, target))


def check_planned_start(train: TrainConfig, draft: DraftConfig, target: TargetConfig, hf_config: Any) -> list[str]:
    """`check_start` for `plan=true`, of what is on this machine. Returns warnings."""
    given = train.init_from
    if given not in (None, OF_TARGET) and not Path(str(given)).exists():
        return [f"{_INIT_FROM} is {given}; it is not here, and the run may refuse it"]
    check_start(train, draft, target, hf_config)
    return []


def check_start(train: TrainConfig, draft: DraftConfig, target: TargetConfig, hf_config: Any) -> None:
    """Raise UserError, before the target is loaded, where `train.init_from` names nothing that a draft for it
    can start from."""
    if train.init_from == OF_TARGET:
        check(
            not target.cached,
            f"{_INIT_FROM}={OF_TARGET}: target.path={target.path} is a cache of hidden states, which holds no draft of "
            "the target's; give a directory that eagle-export wrote, or the target itself",
        )
        check_in_target(draft, hf_config, target.path, f"{_INIT_FROM}={OF_TARGET}")
    elif train.init_from is not None:
        about, place = read_artifact(train.init_from, _INIT_FROM), f"{_INIT_FROM}={train.init_from}"
        check_sizes(about.target, target, place)
        told = f"{place}: is quantised, {about.quant}; give the draft that it was made from"
        check(about.quant.scheme == "none", told)
        own, other = about.draft.kind, draft.kind  # the rest is compared when the target has completed its config
        check(own == other, f"draft={other}: not as {place} has it; give draft={own}")


def _as_before(shape: DraftConfig, path: Path, config: dict[str, Any], own_length: bool) -> DraftConfig:
    """`shape` with what the run found out when it began, of the config in its checkpoint at `path`: the draft's
    vocabulary, and with `own_length` its longest context. Raises UserError where the rest is not as it was."""
    before = saved_config(config, f"{path}: draft")
    if own_length:
        shape = dataclasses.replace(shape, max_position_embeddings=before.max_position_embeddings)
    if shape.vocab_size == before.vocab_size:
        shape.vocabulary = before.vocabulary
    check_same_draft(path, before, shape)
    return shape


def _check_earlier(
    planned: DraftConfig, settings: Mapping[str, Any], path: Path, config: dict[str, Any], own_length: bool
) -> None:
    """Raise UserError, before the target is loaded, as `_as_before` would then. `settings`: of the group `draft`."""
    before, shape = saved_config(config, f"{path}: draft"), dataclasses.replace(planned)
    if "embedding_scale" in settings and settings["embedding_scale"] is None and before.kind == shape.kind:
        shape = dataclasses.replace(shape, **{"embedding_scale": config["embedding_scale"]})  # the target tells it
    _as_before(shape, path, config, own_length)


def _begun(shape: DraftConfig, seed: int, train: TrainConfig, target: TargetEnds, path: str) -> Draft:
    """A draft with fresh weights, or with those that the target's own checkpoint, at `path`, holds of it."""
    draft: Draft = shape.module().init_weights(seed, target.lm_head)
    if train.init_from == OF_TARGET:
        load_in_target(draft, target, path, f"{_INIT_FROM}={OF_TARGET}")
    return draft


def _given_draft(directory: str, shape: DraftConfig, target: TargetEnds, own_length: bool = False) -> Draft:
    """The draft of an artifact, whose config must be the one that the group `draft` describes.

    `own_length`: but for its longest context: an imported draft's angles may depend on one that is not the target's.
    Raises UserError where it is not, saying what to give, or where the draft was made for another target.
    """
    draft = load_draft(directory, target.identity, _INIT_FROM)
    if own_length:
        shape = dataclasses.replace(shape, max_position_embeddings=draft.config.max_position_embeddings)
    ours, theirs = shape.saved(), draft.config.saved()
    names = ours if shape.kind == draft.config.kind else ["kind"]
    other = [name for name in names if name not in shape.may_differ and ours[name] != theirs[name]]
    said, needed = (
        " ".join(_override(name, values[name]) for name in other) for values in (ours, theirs | {_POSITIONS: None})
    )
    check(not other, f"{said}: not as {_INIT_FROM}={directory} has it; give {needed}")
    return draft.fitted(shape)


def _override(name: str, value: Any) -> str:
    """The override that sets a draft's field, as typed in a shell."""
    if name == "kind":
        return f"draft={value}"
    return shlex.quote(f"draft.{name}={json.dumps(value)}".replace('"', ""))
