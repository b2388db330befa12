"""Has torch.compile make what an engine's rounds use, before the first request. Paper section 3.2, DESIGN section 3.9.

Knows nothing of requests.
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch

from eagle_train.errors import OptionError
from eagle_train.inference.decode.verification import Verification
from eagle_train.inference.drafters.drafter import TreePlan
from eagle_train.inference.runner import Runner
from eagle_train.progress import progress


@torch.inference_mode()
def compile_rounds(runner: Runner, sizes: list[tuple[int, TreePlan]], most: int) -> None:
    """Compile as the config says for pairs of batch size and plan; a round has at most `most` tokens.

    Raises UserError if torch.compile fails.
    """
    config, target, drafters = runner.config, runner.target, runner.drafters
    jobs: list[Callable[[], None]] = []
    if config.compile:
        jobs += drafters.compile(sizes)
        runner.compiled = compiled = target.compiled(drafters.layers)
        for rows, plan in sizes:
            tokens = torch.zeros(rows, plan.tree.num_nodes, dtype=torch.long, device=target.device)
            jobs.append(partial(compiled.prepare, tokens, tokens))
    # On a CPU compiling the few operations of verification gains nothing.
    is_gpu = target.device.type == "cuda"
    if config.compile and is_gpu if config.compile_sampling is None else config.compile_sampling:
        own = [(runner.ranks.rows_per_rank(rows), plan) for rows, plan in sizes]
        jobs.append(partial(compile_verification, runner, own))
    if not jobs:
        return
    runner.compiled_rows = most
    bar = progress(len(jobs), "compiled shape")
    with runner.resources(most):
        for done, job in enumerate(jobs, 1):
            job()
            bar.update(done)
    bar.close()


def compile_verification(runner: Runner, sizes: list[tuple[int, TreePlan]]) -> None:
    """Compile verification. If that fails, raise if `compile_sampling` is set, else warn and run it eagerly."""
    try:
        for job in runner.verification.compile(sizes, runner.target.lm_head.weight):
            job()
    except OptionError as error:
        if runner.config.compile_sampling:
            raise
        warnings.warn(f"{error}; rounds above temperature 0 are verified without", stacklevel=2)
        runner.verification = Verification(runner.config.drafting)
