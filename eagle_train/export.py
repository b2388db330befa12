"""eagle-export: a trained draft becomes the directory that is distributed, in the layout and precision of an engine.

Started by torchrun on several processes, these hold the target together (tensor parallel).

The draft is a training checkpoint, an artifact that was exported before, or one that others trained
(EAGLE-1, EAGLE-3, P-EAGLE, Medusa). DESIGN sections 3.9, 3.10.
"""

from pathlib import Path

from omegaconf import DictConfig

from eagle_train import distributed
from eagle_train.artifacts.convert import ExportConfig, Source, check_convertible, convert
from eagle_train.artifacts.foreign import load_foreign
from eagle_train.artifacts.format import (
    CONFIG,
    KEY,
    check_replaceable,
    check_sizes,
    check_target,
    load_draft,
    read_artifact,
    read_config,
)
from eagle_train.artifacts.hub import push
from eagle_train.cli import command
from eagle_train.corpus.source import DataConfig, check_found, check_variables
from eagle_train.distributed import World
from eagle_train.errors import UserError
from eagle_train.hardware import resolve_device
from eagle_train.inference.requests.readable import texts
from eagle_train.models.loading import load_target
from eagle_train.models.target import Target
from eagle_train.one_writer import beside, one_writer
from eagle_train.settings import build
from eagle_train.training.assembly import today
from eagle_train.training.trained_draft import draft_directory, trained_draft

FIELD = "checkpoint"


@command("export")
def main(values: DictConfig) -> None:
    distributed.run(lambda: job(values))


def job(values: DictConfig) -> int:
    """One rank's part; returns its exit status. All ranks of a divided target calibrate, the first alone writes."""
    config = build(ExportConfig, values, "")
    check_replaceable(Path(config.out))
    data = None
    if config.rounding != "nearest":
        data = build(DataConfig, config.data, "data")
        check_variables(None if config.target is None else config.target.template_kwargs, data)
        check_found(data)
    path = draft_directory(config.checkpoint, FIELD)
    source = _own(path)
    if source is not None:  # what cannot be is told before the target is loaded
        check_convertible(source, config)
        if config.target is not None:
            check_sizes(source.about.target, config.target, f"{FIELD}={path}")
    if config.target is None:
        distributed.check_alone("without target, eagle-export")
    world = distributed.start(resolve_device(config.device), shard_size=None)
    if data is not None:
        data.date = world.agreed(data.date or today())  # else each rank renders by its own clock
    with one_writer(Path(config.out), beside(Path(config.out)), world):
        _export(config, path, source, data, world)
        if config.push_to and world.is_main:
            print(f"pushed to {push(Path(config.out), config.push_to, config.push_private)}")
    return 0


def _export(config: ExportConfig, path: Path, source: Source | None, data: DataConfig | None, world: World) -> None:
    """Write the artifact of the draft in the directory `path`. `source`: None for a draft that others trained."""
    target = None
    if config.target is not None:
        reads, placement = None if data is None else texts, "tensor" if world.size > 1 else "replicated"
        target = load_target(config.target, resolve_device(config.device), placement, world, reads)
    source = source or _of_others(path, config.checkpoint, target)
    if target is not None:
        check_target(source.about.target, target.identity, f"{FIELD}={path}")
    told = convert(source, config, target, data, writes=world.is_main)
    if told:
        print(*told, sep="\n")


def _own(path: Path) -> Source | None:
    """The draft of a run, or of an artifact; None for a draft that others trained."""
    if not (path / CONFIG).is_file():
        return trained_draft(path)
    if KEY in read_config(path, FIELD):
        return Source(load_draft(path, field=FIELD), read_artifact(path, FIELD), path)
    return None


def _of_others(path: Path, name: str, target: Target | None) -> Source:
    """A draft that others trained, given as `name`, which does not say its target. Raises UserError without one."""
    if target is None:
        raise UserError(
            f"{FIELD}={path}: neither a run nor an export of eagle_train; for a draft that others trained, give "
            "target=PATH too; a whole model is a target and no draft"
        )
    return Source.of(load_foreign(path, target), target.identity, {"imported": name}, path)


if __name__ == "__main__":
    main()
