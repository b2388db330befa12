"""eagle-doctor: is a draft healthy, and if not, why?

The target answers prompts with the draft; the same texts are run through the training graph, as the draft was trained
and as its files are read. What differs, and what a change of a convention gains, names the cause.

    eagle-doctor draft=DIR target=DIR data.path=FILE.jsonl
    eagle-doctor draft=EXPORT trained=RUN target=DIR data.path=FILE.jsonl
    torchrun --nproc-per-node 8 -m eagle_train.doctor draft=DIR target=DIR data.path=FILE.jsonl

Started by torchrun on several processes, these hold the target together (tensor parallel).

The exit status is 0 for a healthy draft, 1 where a problem was found, and 2 for a mistake in what was given, or where
nothing was found but vLLM failed: then the other checks are reported first.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eagle_train import distributed
from eagle_train.cli import command
from eagle_train.corpus.source import check_found, tell_bundled
from eagle_train.diagnosis import DoctorConfig, examine
from eagle_train.diagnosis.report import summary, write_diagnosis
from eagle_train.distributed import CommonError
from eagle_train.hardware import resolve_device
from eagle_train.one_writer import beside, one_writer
from eagle_train.results import prepared
from eagle_train.settings import build
from eagle_train.training.assembly import today


@command("doctor")
def main(values: DictConfig) -> None:
    distributed.run(lambda: job(values))


def job(values: DictConfig) -> int:
    """One rank's part; returns its exit status. All ranks examine, the first alone writes and tells."""
    config = build(DoctorConfig, values, "")
    check_found(config.data)
    world = distributed.start(resolve_device(config.device), shard_size=None)
    config.data.date = world.agreed(config.data.date or today())  # else each rank renders by its own clock
    if world.is_main:
        tell_bundled(config.data.path or "", config.target.path, "data.path")
    out = Path(config.out)
    with one_writer(out, beside(out), world):
        world.by_main(lambda: prepared(config.out))
        found = examine(config, world)
        if world.is_main:
            given: Any = OmegaConf.to_container(values, resolve=True)
            write_diagnosis(out, found, given)
            print(summary(found), f"written to {out}: report.md, results.json", sep="\n")
    if found.failed is not None and not found.findings:  # what was found may be why
        raise CommonError(found.failed)
    return 0 if found.is_healthy else 1


if __name__ == "__main__":
    main()
