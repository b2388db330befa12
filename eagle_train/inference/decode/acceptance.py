"""How far drafts are accepted: counts that forget, of a request and of all, and what they promise. DESIGN section 3.5.

Knows nothing of tensors, trees or time.
"""

import math
from itertools import accumulate
from operator import mul

_PRIOR = 0.7  # a draft is accepted so often where the one above it is, as long as nothing is known
_MOST = 0.98  # what is believed of a draft, at most
_TRUST = 12.0  # drafts that count as much as what is believed before,
_LEAST_TRUST = 2.0  # and where requests differ much
_TRUST_OF_SEEN = 6.0  # drafts that count as much as what was seen before a doubt
_FORGOTTEN = 1 / 8  # of the way back to the prior: how far a doubt moves what is believed


class Acceptance:
    """How often a draft at depth 1, 2, ... was accepted where the one above it was, in the last rounds.

    `memory`: about so many rounds count. `before`: what is believed as long as little was seen: that of all requests.
    Without it a depth is believed to be as the one above it; with it, half as far from the others' as the one above.
    """

    def __init__(self, memory: float, before: "Acceptance | None" = None):
        self._keep, self._before = 1 - 1 / memory, before
        self._trust = _TRUST  # of each request in these, those of all
        self._rates: list[float] = []  # those of all requests, as long as they stand
        self._doubted: list[float] = []  # what is believed since the last doubt, by depth
        self._accepted: list[float] = []
        self._tried: list[float] = []  # rounds that drafted so deep, and accepted what is above

    @property
    def rounds(self) -> float:
        """The number of rounds with drafts that count."""
        return self._tried[0] if self._tried else 0.0

    @property
    def seen(self) -> float:
        """The share of drafts at depth 1 that were accepted, of those that count; there must be some."""
        return self._accepted[0] / self._tried[0]

    @property
    def novelty(self) -> float:
        """From 1, where nothing was seen, to 0: the weight of what is believed."""
        return self._trusts / (self.rounds + self._trusts)

    @property
    def _trusts(self) -> float:
        """Drafts that count as much as what is believed before."""
        return self._before._trust if self._before else _TRUST

    def add(self, depth: int, accepted: int) -> None:
        """A round whose drafts were `depth` deep, and accepted down to `accepted`."""
        self._rates = []
        missing = [0.0] * (depth - len(self._tried))
        self._tried += missing
        self._accepted += missing
        for place in range(min(depth, accepted + 1)):
            self._tried[place] = self._tried[place] * self._keep + 1
            self._accepted[place] = self._accepted[place] * self._keep + (place < accepted)

    def trust_by(self, variance: float) -> None:
        """Of all requests: the share at depth 1 has this variance over them. They are then believed to be as a Beta
        distribution of that mean and variance has them, which counts for so many drafts of a request."""
        mean = self.rates(1)[0]
        self._trust = min(_TRUST, max(_LEAST_TRUST, mean * (1 - mean) / max(variance, 1e-9) - 1))

    def doubt(self) -> None:
        """Let what is seen next count for more. What was seen is still what is believed, almost."""
        self._doubted = [rate + _FORGOTTEN * (_PRIOR - rate) for rate in self.rates(len(self._tried))]
        self._rates = []
        self._tried, self._accepted = ([x / 4 for x in counts] for counts in (self._tried, self._accepted))

    def rates(self, depth: int) -> list[float]:
        """The share of drafts at depth 1 to `depth` that will be accepted where the one above is."""
        if len(self._rates) >= depth:
            return self._rates[:depth]
        believed = self._before.rates(depth) if self._before else []
        rates: list[float] = []
        for place in range(depth):
            before, trust = rates[-1] if rates else _PRIOR, self._trusts
            if place < len(self._doubted):
                before, trust = self._doubted[place], _TRUST_OF_SEEN
            if believed:
                # A request whose drafts are worse than others' at one depth has worse ones below it, but not as far.
                own = rates[-1] / believed[place - 1] if rates else 1.0
                before = min(_MOST, believed[place] * math.sqrt(own))
            seen = place < len(self._tried)
            hits, tried = (self._accepted[place], self._tried[place]) if seen else (0.0, 0.0)
            rates.append((hits + trust * before) / (tried + trust))
        if not believed:
            self._rates = rates
        return rates[:]

    def shares(self, depth: int) -> list[float]:
        """The share of rounds in which a draft at depth 1 to `depth` will be accepted."""
        return list(accumulate(self.rates(depth), mul))
