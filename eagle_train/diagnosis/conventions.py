"""Ablations: one convention of the draft is changed at a time, and a change that gains tokens shows which one is wrong.

A healthy draft loses by each change, or gains nothing. Knows nothing of files, engines or reports.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from eagle_train.diagnosis.causes import Finding
from eagle_train.diagnosis.fed_variants import fed_variants
from eagle_train.diagnosis.measure import Measured, difference, measured
from eagle_train.diagnosis.own_variants import own_variants
from eagle_train.diagnosis.texts import Part
from eagle_train.drafts import Draft
from eagle_train.models.target import Target

LEAST_GAIN = 0.1
"""Of the accepted tokens, and as many tokens a slot: the least that a change must gain to be told. Healthy drafts gain
nothing by any change; the interval alone would be exceeded once in a few hundred changes."""


def least_gain(base: Measured) -> float:
    """The least that a change must gain to be told, in tokens a slot. `base`: the draft without it."""
    return max(LEAST_GAIN, LEAST_GAIN * base.tokens)


def gained(
    target: Target, draft: Draft, parts: Sequence[Part], base: Measured, depth: int, seed: int
) -> tuple[Finding | None, list[dict[str, Any]]]:
    """The finding of the change that gains the most, where one gains more than `LEAST_GAIN`, and what each change
    gains, for results.json. A second wrong convention shows when the first is right."""
    least, good, rows = least_gain(base), [], []
    for variant in chain(fed_variants(target, draft), own_variants(target, draft)):  # one copy of the draft at a time
        cause, change = variant.cause, variant.said
        found = measured(target, variant.draft, parts, depth, variant.change)
        gain = difference(found, base, seed)
        rows.append({"cause": cause, "change": change, "tokens": found.tokens, "gain": gain.mean, "gain_low": gain.low})
        if gain.low > 0 and gain.mean > least and found.agreement >= variant.least:
            good.append((gain, found.tokens, cause, change))
    if not good:
        return None, rows
    gain, tokens, cause, change = max(good, key=lambda each: each[0].mean)
    said = (
        f"With {change}, {tokens:.2f} tokens of a chain are accepted in place of {base.tokens:.2f} "
        f"(99 % interval of the gain: {gain.low:.2f} to {gain.high:.2f})."
    )
    return Finding(cause, said, gain.mean), rows
