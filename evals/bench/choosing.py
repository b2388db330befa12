"""Engines that choose whether to draft, and engines that do not, on the same requests: tokens a second of each.

They take turns of some rounds, so that other load on the machine affects all alike: it comes and goes within seconds.
Where acceptance is simulated, outputs mean nothing, and every round is computed. Knows nothing of reports.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from eagle_train.inference import Engine, SimulatedAcceptance
from eagle_train.inference import Sequence as Request
from eagle_train.inference.decode.rounds import RoundInputs
from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.sampling import Verified
from evals.bench.answering import rotated
from evals.bench.requests import TimedRequest
from evals.bench.session import Session

OWN = "own"
LOADS = {"noise": 0, "half": 2, "good": 1, OWN: 1}
"""Each load's name, and of how many requests one has good drafts; 0: none has. With OWN acceptance is the draft's."""
PLAIN = "plain"
DEPTH = 7  # of the longest chain of tree=auto
ROUNDS = 32  # plain ones, as whose tokens an engine's turn has: the first behind another engine's finds the processor's
# caches cold, and those that accept much have few in a turn
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it fill the numbers from 0 to 1 evenly, however many there are


class OfGoodRequests(SimulatedAcceptance):
    """Simulated acceptance of requests with odd seeds; nothing is accepted of others."""

    def __call__(self, inputs: RoundInputs, tree: AnyTree, verified: Verified) -> Verified:
        found = super().__call__(inputs, tree, verified)
        return Verified(found.node * (inputs.seeds % 2), found.next_token)


def spread(batch: Sequence[TimedRequest], one_in: int) -> list[TimedRequest]:
    """The batch with seeds that are odd for one in so many requests, for none with 0, and with answers of a quarter to
    the whole of their length: where all end at once, prompts of those that follow are read together, which is cheaper
    than in service. All lengths differ, as two of one length would end together without drafts and seldom with them."""
    made = []
    for place, each in enumerate(batch):
        seed = 2 * place + (one_in > 0 and place % one_in == 0)
        share = 0.25 + 0.75 * (place * _GOLDEN % 1)  # of every second request too these fill the range evenly
        most = max(2, round(share * each.params.max_tokens))
        made.append(replace(each, params=replace(each.params, seed=seed, max_tokens=most)))
    return made


def rates(
    session: Session[Any],
    choices: Mapping[str, Mapping[str, Any]],
    size: int,
    load: str,
    batches: Sequence[list[TimedRequest]],
) -> dict[str, list[float]]:
    """Tokens a second of each choice in each batch, the first `settle` of the session's config left out. `choices`: the
    options of their engines, by name; PLAIN has no drafter. `load`: one of LOADS."""
    config = session.config
    longest = max(len(each.prompt) + each.params.max_tokens for batch in batches for each in batch)
    shares = [config.acceptance**depth for depth in range(1, DEPTH + 1)]

    def engine(name: str, options: Mapping[str, Any]) -> Engine:
        drafter = None if name == PLAIN else session.chosen_drafter()
        # Plain decoding too: to simulate takes a part of every round.
        acceptance = None if load == OWN else OfGoodRequests(shares)
        return session.engine(drafter, acceptance=acceptance, max_batch_size=size, longest=longest, **options)

    engines = {name: engine(name, options) for name, options in choices.items()}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for count, batch in enumerate(batches):
        own = {name: engines[name] for name in rotated(list(engines), count)}
        for name, rate in raced(own, spread(batch, LOADS[load])).items():
            found[name].append(rate)
    return {name: each[config.settle :] for name, each in found.items()}


def raced(engines: Mapping[str, Engine], batch: Sequence[TimedRequest]) -> dict[str, float]:
    """Tokens a second of each engine, from the arrival of the requests, all at once, to the last one's end. The engines
    take turns in this order, of as many tokens as some plain rounds of a full batch have, so that they end together.
    What a GPU has still to do at the end of a turn belongs to it."""
    took = dict.fromkeys(engines, 0.0)
    added: dict[str, list[Request]] = {name: [] for name in engines}
    going, quota = list(engines), 0
    while going:
        quota += ROUNDS * min(len(batch), *(engine.config.max_batch_size for engine in engines.values()))
        for name in going:
            engine, started = engines[name], time.perf_counter()
            added[name] = added[name] or [engine.add(each.prompt, each.params) for each in batch]
            while engine.has_unfinished and sum(len(each.generated) for each in added[name]) < quota:
                engine.step()
            if engine.target.device.type == "cuda":
                torch.cuda.synchronize(engine.target.device)
            took[name] += time.perf_counter() - started
        going = [name for name in going if engines[name].has_unfinished]
    made = {name: [engine.output(each) for each in added[name]] for name, engine in engines.items()}
    return {name: sum(len(output.token_ids) for output in outputs) / took[name] for name, outputs in made.items()}
