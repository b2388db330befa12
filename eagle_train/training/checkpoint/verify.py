"""Whether a checkpoint is complete and undamaged, checked by all ranks together. Knows nothing of what is in the files.

DESIGN section 3.11.
"""

from pathlib import Path

from eagle_train.distributed import ALONE, World
from eagle_train.errors import check, one_line
from eagle_train.training.checkpoint.format import FORMAT, MANIFEST, Checkpoint, fingerprint, read_manifest


def open_checkpoint(path: Path | str, world: World = ALONE) -> Checkpoint:
    """Verify and open one checkpoint, `DIR/step-XXXXXXXX`. All ranks call it.

    Raises UserError if it is missing, damaged, or of another format.
    """
    path = Path(path)
    flaw = find_flaw(path, world)
    check(flaw is None, f"checkpoint {path}: {flaw}; give a directory step-XXXXXXXX that `save` has finished")
    return Checkpoint.load(path)


def find_flaw(path: Path, world: World = ALONE) -> str | None:
    """What is wrong with the checkpoint at `path`, or None. All ranks call it; rank r reads every size-th file."""
    return next((flaw for flaw in world.exchange(_flaw_of_files(path, world)) if flaw is not None), None)


def _flaw_of_files(path: Path, world: World) -> str | None:
    """What is wrong with this rank's share of the files, or None."""
    try:
        manifest = read_manifest(path)
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        for name, expected in sorted(manifest["files"].items())[world.rank :: world.size]:
            if fingerprint(path / name) != expected:
                return f"{name} is not what was written (its size or sha256 differs)"
    except OSError as error:
        return one_line(error)
    except (ValueError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None
