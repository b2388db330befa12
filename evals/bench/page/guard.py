"""Whether figures became better or worse between two results of the same evaluation and config, or differ by chance.

A difference is called one of the code only where hardware is the same, no other work ran beside times, and an interval
excludes chance. DESIGN section 3.8.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from evals.bench.page.cautions import SPARE_LOAD, other_work, prompts_of
from evals.bench.page.figure import Figure
from evals.bench.page.figures import answer_sums, figures_of
from evals.bench.page.gather import UNREADABLE, Source
from evals.bench.statistics import FEWEST, RESAMPLES

BETTER, WORSE, NOISE, UNKNOWN = "better", "worse", "noise", "cannot tell"
MOST_DRIFT = 0.05  # of plain decoding's time between two runs, beyond which other times than ratios are not compared
HARDWARE = ("cpu", "instructions", "cores", "threads", "gpu")
LIBRARIES = ("python", "torch", "transformers", "vllm")  # by which a figure may change while the code does not
COLUMNS = ("tokens", "calls", "decode_s", "plain_tokens", "plain_decode_s")  # of answers.jsonl, in this order
# Figures as functions of these columns' sums [..., 5].
OF_ANSWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "TPC": lambda sums: sums[..., 0] / sums[..., 1],
    "TTIT, ms": lambda sums: 1e3 * sums[..., 2] / sums[..., 0],
    "speed-up": lambda sums: sums[..., 4] / sums[..., 3] * sums[..., 0] / sums[..., 2],
}


@dataclass(frozen=True)
class Judged:
    """A figure in both results, what is said of the difference, and why."""

    evaluation: str
    old: Figure
    new: Figure
    verdict: str
    why: str


def judge(old: Source, new: Source) -> list[Judged]:
    """Every figure that both have."""
    before = {(figure.of, figure.name): figure for figure in figures_of(old)}
    found = []
    for figure in figures_of(new):
        if (was := before.get((figure.of, figure.name))) is not None:
            found.append(Judged(new.evaluation, was, figure, *_verdict(old, new, was, figure)))
    return found


def missing(source: Source, other: Source) -> list[str]:
    """The figures that the other result of a pair lacks, or has no value for: a line for all that are of the same."""
    there, names = {(figure.of, figure.name) for figure in figures_of(other)}, dict[str, list[str]]()
    for figure in figures_of(source):
        if (figure.of, figure.name) not in there:
            names.setdefault(figure.of, []).append(figure.name)
    return [f"{source.evaluation}, {of}: {'; '.join(own)}" for of, own in names.items()]


def _verdict(old: Source, new: Source, was: Figure, now: Figure) -> tuple[str, str]:
    if was.value == now.value:
        return NOISE, "the same value"
    if reason := _elsewhere(old, new, was, now):
        return UNKNOWN, reason
    kind, why = _by_interval(old, new, was, now)
    return kind, "; ".join([why, *(_beside_the_code(old, new, now) if kind in (BETTER, WORSE) else [])])


def _beside_the_code(old: Source, new: Source, figure: Figure) -> list[str]:
    """What else changed that a figure follows from: the draft, and libraries."""
    before, after = (_drafts(each, figure) for each in (old, new))
    pairs = {key: (old.provenance.get(key), new.provenance.get(key)) for key in LIBRARIES}
    said = ["another draft"] if before != after else []
    return said + [f"{key} {was}, now {now}" for key, (was, now) in pairs.items() if was != now]


def _drafts(source: Source, figure: Figure) -> list[Any]:
    """The fingerprints of the drafts that a figure is of: the result's, and its own drafter's."""
    drafters = source.found.get("drafters")
    rows = [each for each in drafters if isinstance(each, Mapping)] if isinstance(drafters, list) else []
    own = [each.get("draft_source") for each in rows if figure.of.startswith(f"{each.get('name')}, ")]
    return [source.found.get("draft_source"), *own]


def _elsewhere(old: Source, new: Source, was: Figure, now: Figure) -> str:
    """Why a difference need not be the code's; empty where it is."""
    if not old.provenance or not new.provenance or "" in (old.provenance.get("cpu"), new.provenance.get("cpu")):
        return "hardware was not written"
    changed = [key for key in HARDWARE if old.provenance.get(key) != new.provenance.get(key)]
    if changed:
        said = (f"{key} {old.provenance.get(key)}, now {new.provenance.get(key)}" for key in changed)
        return f"other hardware: {'; '.join(said)}"
    if reason := _of_other_inputs(old, new):
        return reason
    loads = [other_work(each) for each in (old, new)]
    if now.is_time and max(loads) > SPARE_LOAD:
        return f"other work on the machine: {loads[0]:.1f} other processes, now {loads[1]:.1f}"
    ranks = [each.found.get("ranks", 1) for each in (old, new)]
    if now.is_time and ranks[0] != ranks[1]:
        return f"ranks that hold the target together: {ranks[0]}, now {ranks[1]}"
    drift = _drift(was, now)
    if abs(drift) > MOST_DRIFT and not now.is_ratio:
        return f"plain decoding's own changed by {100 * drift:+.0f} %: the machine, or code that both share"
    return ""


def _of_other_inputs(old: Source, new: Source) -> str:
    """Which other target or questions there were at the same places, as far as both results tell; empty where none."""
    targets = [each.found.get("target_source") for each in (old, new)]
    if None not in targets and targets[0] != targets[1]:
        return f"another target at the same place: weights {targets[0]}, now {targets[1]}"
    prompts = [Counter(str(row.get("prompt")) for row in each.answers) for each in (old, new)]
    if any(not each or "None" in each for each in prompts) or prompts[0] == prompts[1]:
        return ""
    shared, (before, after) = (prompts[0] & prompts[1]).total(), (each.total() for each in prompts)
    return f"other questions at the same place: {shared} of {before} prompts are among {after} now"


def _drift(was: Figure, now: Figure) -> float:
    """By which share plain decoding's own time changed; 0 where there is none."""
    return now.control / was.control - 1 if now.control and was.control else 0.0


def _by_interval(old: Source, new: Source, was: Figure, now: Figure) -> tuple[str, str]:
    if now.is_count:
        return _signed(now.value - was.value, now.value - was.value, now), "a count"
    alone = not now.is_time or now.batch_size == 1  # else questions of a batch have their rounds' times in common
    columns = _columns(old, new) if now.name in OF_ANSWERS and alone else None
    if columns is not None:
        low, high = paired_interval(*columns, OF_ANSWERS[now.name])
        if not isfinite(low) or not isfinite(high):  # no time passed in some draws
            return UNKNOWN, "no interval"
        said = f"difference {low:+.3f} to {high:+.3f}, paired by question"
    elif was.interval is None or now.interval is None:
        return UNKNOWN, "no interval"
    elif (asked := min(_questions(old), _questions(new))) < FEWEST:
        return UNKNOWN, f"of {asked} questions, and an interval needs {FEWEST}"
    else:
        low, high = now.interval[0] - was.interval[1], now.interval[1] - was.interval[0]
        said = "intervals overlap" if low <= 0 <= high else "intervals do not overlap"
    more = abs(_drift(was, now)) * max(was.value, now.value) if now.is_time else 0.0
    within = low - more <= 0 <= high + more and not low <= 0 <= high
    beyond = "; plain decoding's own changed by as much" if within else ""
    return _signed(low - more, high + more, now), said + beyond


def _questions(source: Source) -> float:
    """Of how many questions a result's figures are, as far as it says; infinite where it does not."""
    found = source.found.get("questions")
    own = found if isinstance(found, int) else prompts_of(source)
    return inf if own is None else own


def _columns(old: Source, new: Source) -> tuple[Tensor, Tensor] | None:
    """`paired_columns`; None too for answers that another version wrote."""
    try:
        return paired_columns(old.answers, new.answers)
    except UNREADABLE:
        return None


def _signed(low: float, high: float, figure: Figure) -> str:
    if low <= 0 <= high:
        return NOISE
    return BETTER if (low > 0) == figure.more_is_better else WORSE


def paired_columns(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor] | None:
    """COLUMNS of the same questions in both, float64 [questions, 5] each, those left out that one of them did not
    decode; None where prompts differ or were not kept, or where fewer than `FEWEST` are left."""
    asked = [sorted((row.get("line", 0), str(row["question_id"]), row["turn"]) for row in rows) for rows in (old, new)]
    before, after = (answer_sums(rows, COLUMNS) for rows in (old, new))
    if before is None or after is None or asked[0] != asked[1]:
        return None
    both = torch.tensor([[before[line], after[line]] for line in before], dtype=torch.float64)
    both = both[(both[:, :, [COLUMNS.index("calls"), COLUMNS.index("plain_tokens")]] > 0).all(2).all(1)]
    return None if len(both) < FEWEST else (both[:, 0], both[:, 1])


def paired_interval(old: Tensor, new: Tensor, figure: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The 95 % bootstrap interval of a figure's difference, new less old, the same questions drawn for both."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(old), (RESAMPLES, len(old)), generator=generator)
    change = figure(new[drawn].sum(1)) - figure(old[drawn].sum(1))
    low, high = change.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
