"""eagle-export: a training checkpoint becomes the artifact one gives away. DESIGN sections 3.9, 3.10."""

from pathlib import Path

import torch
from omegaconf import DictConfig

from eagle_train.config import build, check, command
from eagle_train.models.artifact import load_draft, load_tensors, save_draft
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.target import Identity
from eagle_train.training import checkpoint

ENGINES = ("native",)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@command("export")
def main(config: DictConfig) -> None:
    check(config.engine in ENGINES, f"engine={config.engine}: must be {' or '.join(ENGINES)}")
    check(config.dtype in DTYPES, f"dtype={config.dtype}: must be {' or '.join(DTYPES)}")
    out = Path(str(config.out))
    found, draft = trained(Path(str(config.checkpoint)))
    path, identity = found.path, Identity(**found.state["target"])
    training = {"steps": found.step, "tokens": found.state["tokens"], "checkpoint": path.name}
    save_draft(draft, out, identity, training, DTYPES[config.dtype])
    verify(draft, out, identity, DTYPES[config.dtype])
    print(f"{path} -> {out} ({config.engine}, {config.dtype}, for {identity.name})")


def trained(path: Path) -> tuple[checkpoint.Checkpoint, Draft]:
    """A checkpoint, or the newest one of a run's directory, and its draft. Raises UserError where there is none."""
    if not (path / checkpoint.MANIFEST).exists():
        newest = checkpoint.latest(path)
        check(newest is not None, f"checkpoint={path}: no checkpoint there; give the directory of a training run")
        path = newest
    found = checkpoint.load(path)
    draft = Draft(build(DraftConfig, found.config, f"{path}: draft"))
    load_tensors(draft, found.draft(), path)
    return found, draft


def verify(draft: Draft, out: Path, identity: Identity, dtype: torch.dtype) -> None:
    """Read the artifact back: every tensor must be what was trained, rounded to `dtype`."""
    written = load_draft(out, identity).state_dict()
    for name, tensor in draft.folded().state_dict().items():
        assert torch.equal(written[name], tensor.to(dtype).float()), f"{out}: {name} is not what was trained"


if __name__ == "__main__":
    main()
