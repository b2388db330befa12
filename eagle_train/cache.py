"""eagle-cache: the target's hidden states of a run's data, written once, from which eagle-train trains without it.

It is given what eagle-train is given: the target, the data, the draft, and the run's rows and steps. The run then is
the same command with target=cached.

    eagle-cache target=DIR data=messages data.path=FILE.jsonl out=CACHE
    eagle-train target=cached target.path=CACHE data=messages data.path=FILE.jsonl

What it takes on disk is measured and logged first; plan=true ends there. States are written shard by shard into
OUT.partial, and appear at OUT whole. The same command goes on with an interrupted cache. verify=true reads a cache
again. Started by torchrun, each process writes what it would train on.
"""

from omegaconf import DictConfig

from eagle_train import distributed
from eagle_train.caching import build_cache, verify_cache
from eagle_train.caching.build import summary
from eagle_train.caching.options import Run
from eagle_train.cli import command
from eagle_train.hardware import resolve_device


@command("cache")
def main(values: DictConfig) -> None:
    distributed.run(lambda: job(values))


def job(values: DictConfig) -> int:
    """One rank's part; returns its exit status."""
    run = Run.of(values, distributed.place()[1])
    if run.cache.verify:
        distributed.check_alone("eagle-cache with verify=true")
        print(verify_cache(run))
        return 0
    minutes, group = run.parallel.timeout_minutes, run.parallel.needs_group
    world = distributed.start(resolve_device(run.cache.device), timeout_minutes=minutes, group=group)
    built = build_cache(run, world)
    if world.is_main:
        print(summary(built, run.cache.out))
    return 0


if __name__ == "__main__":
    main()
