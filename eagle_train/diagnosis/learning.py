"""What a draft has learnt, and from which texts: enough or not, of the target's own or others', in short ones alone.

Asked of a draft whose conventions are right: else its figures say nothing of its training. Knows nothing of files or
engines.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from eagle_train.diagnosis.causes import Finding, NotChecked
from eagle_train.diagnosis.measure import FEWEST, Interval, Measured, between, interval, measured, too_few, unexplained
from eagle_train.diagnosis.texts import Part
from eagle_train.drafts import Draft
from eagle_train.models.target import Target

# Thresholds, each with the reason for it.
POLICY_GAP = 0.05  # the target's own greedy answers are the easier text: healthy drafts agree with it more often there
CONTEXT_DROP = 0.15  # along an answer acceptance drifts by less, as far as neither the target's certainty nor a table
# explains it
LEAST_OVER_TABLE = 0.05  # a table of token pairs knows nothing of the text before, which a draft reads
MOST_OF_TABLE = 0.9  # where the table is right as often as this, a good draft has no room to be better
MOST_DRIFT = 0.5  # slots whose first token is right are the easier ones, so the second is right more often there
_FEW = 24  # slots below which nothing is said
_SHORTEST = 16  # tokens: the first length at which acceptance is divided


@dataclass(frozen=True)
class Learnt:
    """Findings, what could not be checked, and figures for results.json."""

    findings: list[Finding]
    not_checked: list[NotChecked]
    figures: dict[str, Any]


def off_policy(
    target: Target,
    draft: Draft,
    own: Measured,
    given: Sequence[Part],
    depth: int,
    seed: int,
    refused: str | None = None,
) -> Learnt:
    """Whether the draft agrees with the target more often on the file's answers than on the target's own, also where
    the target is as sure of its choice. `refused`: why an answer of the file's is not among those `given`."""
    if not given:
        reason = "the data have no answers after these prompts; give conversations with the training data's answers"
        if refused is not None:
            reason = f"none of the data's answers after these prompts can be learnt from: {refused}"
        return Learnt([], [NotChecked("off-policy data", reason)], {})
    on_file = measured(target, draft, given, depth)
    gap = between(on_file.first, on_file.owner, own.first, own.owner, seed)
    figures = {"agreement_on_own_answers": own.agreement, "agreement_on_given_answers": on_file.agreement}
    beyond = unexplained(on_file, own, seed)
    if (few := too_few(gap.prompts)) is not None:
        also = "" if refused is None else f"; not asked was {refused}"
        return Learnt([], [NotChecked("off-policy data", few + also)], figures)
    if gap.low <= POLICY_GAP:
        return Learnt([], [], figures)
    if beyond is None:
        return Learnt([], [NotChecked("off-policy data", "too few tokens of which the target is as sure")], figures)
    if beyond.low <= POLICY_GAP:
        return Learnt([], [], figures)
    said = (
        f"Draft and target choose the same next token at {on_file.agreement:.1%} of the tokens of the file's answers, "
        f"and at {own.agreement:.1%} of those of the target's own ({_in_points(gap)})."
    )
    return Learnt([Finding("off_policy", said, on_file.tokens - own.tokens)], [], figures)


def context(target: Target, draft: Draft, parts: Sequence[Part], own: Measured, depth: int, seed: int) -> Learnt:
    """Whether acceptance falls beyond some length of the text, and whether a window brings it back. A table of token
    pairs knows no length: what it loses there the text explains."""
    falls = []
    over_table = replace(own, first=own.first - _table_at_slots(parts))
    for length in _lengths(own):
        short = own.position < length
        if (drop := _fall(own, short, seed)) is not None and (beyond := _fall(over_table, short, seed)) is not None:
            falls.append((min(drop.low, beyond.low), length, drop, short))
    figures: dict[str, Any] = {"agreement_by_length": _by_length(own)}
    if not falls:
        reason = f"too few tokens, or tokens of fewer than {FEWEST} prompts, on either side of every length"
        if int(own.position.max()) <= _SHORTEST:
            reason = f"no text is longer than {_SHORTEST} tokens"
        return Learnt([], [NotChecked("long contexts", reason)], figures)
    low, length, drop, short = max(falls, key=lambda each: each[0])
    if low <= CONTEXT_DROP:
        return Learnt([], [], figures)
    before, behind = own.first[short].mean().item(), own.first[~short].mean().item()
    said = (
        f"Acceptance at depth 1 falls from {before:.2f} below {length} tokens to {behind:.2f} above; where the target "
        f"is as sure of its choice, by {drop.mean:.2f} ({_in_points(drop)})."
    )
    if draft.config.attention_width and draft.config.window is None and draft.config.takes_window:
        windowed = measured(target, draft.attending(window=length), parts, depth)
        far = windowed.first[windowed.position >= length].mean().item()
        figures["agreement_above_with_window"] = far
        said += f" With a window of {length} it is {far:.2f} there."
    return Learnt([Finding("context", said, own.taken[short].mean().item() - own.tokens)], [], figures)


def _fall(found: Measured, short: torch.Tensor, seed: int) -> Interval | None:
    """How much more often the first token is right at the slots `short` than at the others, where the target is as sure
    of its choice; None where too few can be compared."""
    gain = unexplained(found.where(~short), found.where(short), seed)
    return None if gain is None else Interval(-gain.mean, -gain.high, -gain.low, gain.prompts)


def drift(own: Measured, depth: int, seed: int) -> Learnt:
    """Whether the second token of a chain, which the draft proposes from its own states, is right much less often than
    the first, which it proposes from the target's. Slots count behind which another is counted: a text's last has no
    second token."""
    if depth < 2:
        return Learnt([], [NotChecked("a chain's second token", "chains of one token were drafted")], {})
    follows = (own.owner[1:] == own.owner[:-1]) & (own.position[1:] == own.position[:-1] + 1)
    asked = (own.first > 0) & F.pad(follows, (0, 1))
    right = own.taken[asked] >= 2
    if len(right) < _FEW:
        return Learnt([], [NotChecked("a chain's second token", "too few tokens")], {})
    second = interval(right.double(), own.owner[asked], seed)
    figures = {"acceptance_of_second_after_first": second.mean}
    if (few := too_few(second.prompts)) is not None:
        return Learnt([], [NotChecked("a chain's second token", few)], figures)
    if second.high >= MOST_DRIFT * own.agreement:
        return Learnt([], [], figures)
    said = (
        f"The first token of a chain is right at {own.agreement:.1%} of the slots; where it is, the second is right at "
        f"{second.mean:.1%} (99 % interval {second.low:.2f} to {second.high:.2f})."
    )
    return Learnt([Finding("drift", said)], [], figures)


def undertrained(
    own: Measured, parts: Sequence[Part], reads_token: bool, training: dict[str, Any], seed: int
) -> Learnt:
    """Whether the draft is hardly better than a table of which token follows which in the other prompts' texts.
    `reads_token`: whether it knows the token that it goes on from, as the table does; Medusa heads do not, and need not
    be better by as much."""
    hit = _table_at_slots(parts)
    over = interval(own.first - hit, own.owner, seed)
    figures = {"agreement": own.agreement, "agreement_of_table": hit.mean().item()}
    if (reason := repeated(parts)) is not None:
        return Learnt([], [NotChecked("training", reason)], figures)
    if over.low > (LEAST_OVER_TABLE if reads_token else 0):
        return Learnt([], [], figures)
    steps, tokens = training.get("steps"), training.get("tokens")
    seen = [f"{steps:,} steps" if steps else "", f"{tokens:,} tokens" if tokens else ""]
    told = f" Its artifact says {', '.join(filter(None, seen))}." if any(seen) else ""
    said = (
        f"It proposes the target's next token at {own.agreement:.1%} of the tokens; a table of which token follows "
        f"which in the other texts is right at {hit.mean().item():.1%}.{told}"
    )
    return Learnt([Finding("undertrained", said)], [], figures)


def repeated(parts: Sequence[Part]) -> str | None:
    """Why these texts tell no good draft from another; None where they may. Answers that are loops are all alike: what
    continues a loop is no better a draft elsewhere."""
    share = _table_at_slots(parts).mean().item()
    if share <= MOST_OF_TABLE:
        return None
    return f"a table of token pairs is right at {share:.1%} of the tokens: texts repeat themselves; give other data"


def _table_at_slots(parts: Sequence[Part]) -> torch.Tensor:
    """fp64 [slots]: `table_hits` at the slots that `measured` counts."""
    counted = torch.cat([each.counted[0] & (each.positions[0] >= 1) for each in parts]).cpu()
    return table_hits(parts)[counted].double()


def table_hits(parts: Sequence[Part]) -> torch.Tensor:
    """bool [slots of all parts]: whether the target's choice is what most often follows the slot's token in the texts
    of the other prompts, or the most frequent token where none has it."""
    pairs: dict[int, Counter[int]] = defaultdict(Counter)
    texts = [text for part in parts for text in part.texts]
    for text in texts:
        for token, after in pairwise(text.tokens):
            pairs[token][after] += 1
    frequent = Counter(token for text in texts for token in text.answer)
    usual = frequent.most_common(1)[0][0]
    hit: list[bool] = []
    for part in parts:
        best = iter(part.best[0].tolist())
        for text in part.texts:
            own = Counter(pairwise(text.tokens))
            for token in text.tokens:
                others = {after: count - own[token, after] for after, count in pairs[token].items()}
                likely = max(others, key=lambda after: (others[after], -after), default=usual)
                known = others.get(likely, 0) > 0
                hit.append((likely if known else usual) == next(best))
    return torch.tensor(hit)


def _lengths(own: Measured) -> list[int]:
    """Lengths at which acceptance is divided: powers of two and the halves between."""
    longest, found, length = int(own.position.max()), [], _SHORTEST
    while length <= longest:
        found += [length, length * 3 // 2]
        length *= 2
    return found


def _by_length(own: Measured) -> dict[str, float]:
    """Acceptance at depth 1 by the position of the token that is proposed from: the names are the ranges."""
    edges, found = [0, *(each for each in _lengths(own) if (each & (each - 1)) == 0)], {}
    for low, high in zip(edges, [*edges[1:], int(own.position.max()) + 1], strict=True):
        inside = (own.position >= low) & (own.position < high)
        if inside.any():
            found[f"{low} to {high - 1}"] = own.first[inside].mean().item()
    return found


def _in_points(gap: Interval) -> str:
    return f"99 % interval of the difference: {gap.low:.2f} to {gap.high:.2f}"
