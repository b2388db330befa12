"""Engines that choose whether to draft, and engines that do not, on the same requests: tokens a second of each.

Acceptance is simulated, so that outputs mean nothing, and every round is computed. Knows nothing of reports.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eagle_train.inference import Engine, SimulatedAcceptance
from eagle_train.inference.decode.rounds import RoundInputs
from eagle_train.inference.decode.sampling import Verified
from evals.bench.answering import rotated, serve
from evals.bench.requests import TimedRequest
from evals.bench.session import Session

LOADS = {"noise": 0, "half": 2, "good": 1}
"""Each load's name, and of how many requests one has good drafts; 0: none has."""
PLAIN = "plain"
DEPTH = 7  # of the longest chain of tree=auto


class OfGoodRequests(SimulatedAcceptance):
    """Simulated acceptance of requests with odd seeds; nothing is accepted of others."""

    def __call__(self, inputs: RoundInputs, verified: Verified) -> Verified:
        found = super().__call__(inputs, verified)
        return Verified(found.node * (inputs.seeds % 2), found.next_token)


def seeded(batch: list[TimedRequest], one_in: int) -> list[TimedRequest]:
    """The batch with seeds that are odd for one in so many requests, for none with 0."""
    own = enumerate(batch)
    return [
        replace(each, params=replace(each.params, seed=2 * place + (one_in > 0 and place % one_in == 0)))
        for place, each in own
    ]


def rates(
    session: Session[Any], choices: Mapping[str, Mapping[str, Any]], size: int, batches: Sequence[list[TimedRequest]]
) -> dict[str, list[float]]:
    """Tokens a second of each choice in each batch, the first `settle` of the session's config left out. `choices`: the
    options of their engines, by name; PLAIN has no drafter."""
    config = session.config
    longest = max(len(each.prompt) + each.params.max_tokens for batch in batches for each in batch)
    shares = [config.acceptance**depth for depth in range(1, DEPTH + 1)]

    def engine(name: str, options: Mapping[str, Any]) -> Engine:
        drafter = None if name == PLAIN else session.drafter()
        # Plain decoding too: to simulate takes a part of every round.
        acceptance = OfGoodRequests(shares)
        return session.engine(drafter, acceptance=acceptance, max_batch_size=size, longest=longest, **options)

    engines = {name: engine(name, options) for name, options in choices.items()}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for count, batch in enumerate(batches):
        for name in rotated(list(engines), count):
            started = time.perf_counter()
            tokens = sum(len(output.token_ids) for output in serve(engines[name], batch))
            found[name].append(tokens / (time.perf_counter() - started))
    return {name: each[config.settle :] for name, each in found.items()}
