"""Ablations: one convention of the draft is changed at a time, and a change that gains tokens shows which one is wrong.

A healthy draft loses by each change, or gains nothing. Knows nothing of files, engines or reports.
"""

from collections.abc import Sequence
from typing import Any

from eagle_train.diagnosis.causes import Finding
from eagle_train.diagnosis.measure import Interval, Measured, difference, measured
from eagle_train.diagnosis.texts import Part
from eagle_train.diagnosis.variants import Variant, variants
from eagle_train.drafts import Draft
from eagle_train.models.target import Target

LEAST_GAIN = 0.1
"""Of the accepted tokens, and as many tokens a slot: the least that a change must gain to be told. Healthy drafts gain
nothing by any change; the interval alone would be exceeded once in a few hundred changes."""


def gained(
    target: Target, draft: Draft, parts: Sequence[Part], base: Measured, depth: int, seed: int
) -> tuple[Finding | None, list[dict[str, Any]]]:
    """The finding of the change that gains the most, where one gains more than `LEAST_GAIN`, and what each change
    gains, for results.json. A second wrong convention shows when the first is right."""
    tried: list[tuple[Variant, Measured, Interval]] = []
    for variant in variants(target, draft):
        found = measured(target, variant.draft, parts, depth, variant.change)
        tried.append((variant, found, difference(found, base, seed)))
    rows = [
        {"cause": each.cause, "change": each.said, "tokens": found.tokens, "gain": gain.mean, "gain_low": gain.low}
        for each, found, gain in tried
    ]
    least = max(LEAST_GAIN, LEAST_GAIN * base.tokens)
    good = [
        (variant, found, gain)
        for variant, found, gain in tried
        if gain.low > 0 and gain.mean > least and found.agreement >= variant.least
    ]
    if not good:
        return None, rows
    variant, found, gain = max(good, key=lambda each: each[2].mean)
    said = (
        f"With {variant.said}, {found.tokens:.2f} tokens of a chain are accepted in place of {base.tokens:.2f} "
        f"(99 % interval of the gain: {gain.low:.2f} to {gain.high:.2f})."
    )
    return Finding(variant.cause, said, gain.mean), rows
