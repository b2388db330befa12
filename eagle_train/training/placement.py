"""Over how many ranks weights are divided, and whether the draft's are kept whole between its passes, where a job's
settings leave it open. Knows nothing of models: what fits is asked.

The most that a job moves between its ranks are the target's weights, in each forward, then the draft's. The links of a
node are several times as fast as those between nodes. So both are divided within a node, and copied to the others,
where the memory of a GPU allows it.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from eagle_train.errors import check
from eagle_train.models.loading import can_copy
from eagle_train.training.backend import ParallelConfig


def chosen(parallel: ParallelConfig, ranks: int, node: int, fits: Callable[[ParallelConfig], bool]) -> ParallelConfig:
    """`parallel` with numbers for `target_shard_size` and `draft_shard_size`, and true or false for
    `reshard_after_forward`, where its target and its backend read them.

    `node`: the ranks of each node, `ranks` where that is not known. What is open is chosen: the first of these that
    `fits`, or the last. In front is a target within a node, then a draft within a node, then one that is kept whole.
    Raises UserError for a number that does not divide the ranks.
    """
    of_target: list[int | None] = [None]
    if parallel.target != "replicated":
        given = parallel.target_shard_size
        # What is open is what transformers can do; what is asked for is refused when the target is loaded.
        of_target = [ranks] if given is None and not can_copy() else [*_sizes("target_shard_size", given, ranks, node)]
    of_draft: list[int | None] = [None]
    reshards: list[bool | None] = [None]
    if parallel.backend == "fsdp2":
        of_draft = [*_sizes("draft_shard_size", parallel.draft_shard_size, ranks, node)]
        resharding = parallel.reshard_after_forward
        reshards = [False, True] if resharding is None else [resharding]
    options = [
        replace(parallel, target_shard_size=target, draft_shard_size=draft, reshard_after_forward=reshard)
        for target, draft, reshard in product(of_target, of_draft, reshards)
    ]
    return next((option for option in options[:-1] if fits(option)), options[-1])


def _sizes(key: str, setting: int | str | None, ranks: int, node: int) -> list[int]:
    """What `parallel.target_shard_size` or `parallel.draft_shard_size` may become, the best first."""
    known = {"node": [node], "world": [ranks], None: [node, ranks] if node < ranks else [ranks]}
    if setting in known:
        return known[setting]
    assert isinstance(setting, int), setting
    check(ranks % setting == 0, f"parallel.{key}={setting}: must divide the number of processes, {ranks}")
    return [setting]
