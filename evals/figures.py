"""From answers to figures: tokens per call, acceptance, latency. Sums are always taken before they are divided.

Knows nothing of how answers come about, nor of how figures are shown. DESIGN section 3.8; paper section 2.2.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest
from math import comb
from typing import Any

import torch

from eagle_train.errors import check
from eagle_train.inference import Output
from evals.questions import Question

NGRAM = 8  # tokens of the stretches whose repetition is counted
NO_DECODING = "no answer has a second token, so no decoding was measured; raise max_tokens, or ask other questions"


@dataclass(frozen=True)
class Answer:
    """What an engine said to one turn (from 1) of a question. `prompt`: the token ids it was given."""

    question: Question
    turn: int
    prompt: list[int]
    output: Output


Together = list[Answer]
"""Answers that were decoded together."""


def tpc(answers: Iterable[Answer]) -> float | None:
    """Tokens committed in decoding ÷ target calls in decoding; None without a call."""
    stats = [answer.output.stats for answer in answers]
    calls = sum(s.calls for s in stats)
    return sum(s.tokens for s in stats) / calls if calls else None


def acceptance(answers: Iterable[Answer]) -> list[float]:
    """Share of the rounds with a node at depth 1, 2, ... in which the target accepted down to that depth."""
    stats = [answer.output.stats for answer in answers]
    accepted = map(sum, zip_longest(*(s.accepted_per_depth for s in stats), fillvalue=0))
    drafted = map(sum, zip_longest(*(s.drafted_per_depth for s in stats), fillvalue=0))
    return [hits / rounds for hits, rounds in zip(accepted, drafted, strict=True)]


def intervals(answers: Iterable[Answer]) -> list[float]:
    """Seconds between one token and the next, for every token of decoding."""
    return [seconds for answer in answers for seconds in answer.output.stats.intervals_s]


def waits(answers: Iterable[Answer]) -> list[float]:
    """Seconds from one round's tokens to the next one's, for every round of decoding."""
    found = []
    for output in (answer.output for answer in answers):
        ends = list(accumulate(output.rounds))
        found += [sum(output.stats.intervals_s[a:b]) for a, b in pairwise([0, *ends])]
    return found


def repeated_ngrams(texts: Iterable[Sequence[int]], n: int = NGRAM) -> float:
    """Share of the texts' n-grams that occurred earlier in the same text; 0 where all texts are shorter than n."""
    repeated = total = 0
    for tokens in texts:
        ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(ngrams)
        repeated += len(ngrams) - len(set(ngrams))
    return repeated / total if total else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated."""
    return torch.tensor(values, dtype=torch.float64).quantile(share).item()


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Two of the values, between which the median of all that might have been measured lies with at least 95 %
    confidence, whatever they are distributed as (the sign test's interval). None for fewer than 6.
    """
    ordered, count, left_out = sorted(values), len(values), 0
    while 40 * sum(comb(count, k) for k in range(left_out + 1)) <= 2**count:
        left_out += 1
    return (ordered[left_out - 1], ordered[-left_out]) if left_out else None


def num_rounds(batches: Iterable[Together]) -> int:
    """Rounds of decoding; a batch has as many as its longest answer."""
    return sum(max(answer.output.stats.calls for answer in batch) for batch in batches)


def times(answers: Iterable[Answer]) -> dict[str, float]:
    """Means and percentiles of the time to the first token and of those between tokens, in seconds."""
    answers = list(answers)
    found = {}
    for key, values in (("ttft", [answer.output.stats.ttft_s for answer in answers]), ("ttit", intervals(answers))):
        found[f"{key}_s"] = statistics.fmean(values)
        found |= {f"{key}_p{share}_s": percentile(values, share / 100) for share in (50, 99)}
    return found


def latency(batches: list[Together]) -> dict[str, Any]:
    """`times`, and the rounds that they were taken over."""
    return {**times(chain.from_iterable(batches)), "rounds": num_rounds(batches)}


def conditional(shares: Sequence[float]) -> list[float | None]:
    """Acceptance at each depth among the rounds that accepted the depth before, from shares of the same rounds; None
    where there were none."""
    return [share / before if before else None for before, share in zip([1.0, *shares], shares, strict=False)]


def stages(seconds: Mapping[str, float], entered: Mapping[str, int], batches: int) -> dict[str, Any]:
    """An engine's stages in milliseconds per round, the prefill per batch, drafting also per round that drafts.

    `seconds` and `entered`: of each stage, all rounds together, and how often it was.
    """
    each = {name: spent * 1e3 / entered["validation"] for name, spent in seconds.items() if name != "prefill"}
    found = {"stage_ms_per_round": each, "prefill_ms_per_batch": seconds["prefill"] * 1e3 / batches}
    if "drafting" in each:
        found["draft_latency_ms"] = seconds["drafting"] * 1e3 / entered["drafting"]
    return found


def tokens_per_s(batch: Together, arrivals: Sequence[float]) -> float:
    """Tokens of answers, the first ones included, by the time from the start to the last one's end.

    `arrivals`: when each was asked for, in seconds after the start.
    """
    stats = [answer.output.stats for answer in batch]
    ends = [at + each.ttft_s + sum(each.intervals_s) for at, each in zip(arrivals, stats, strict=True)]
    return sum(len(answer.output.token_ids) for answer in batch) / max(ends)


def counts(answers: list[Answer], max_tokens: int) -> dict[str, Any]:
    """How much was asked and answered. An answer that the context cut short ended for the reason `context`."""
    lengths = [len(answer.output.token_ids) for answer in answers]
    reasons = [answer.output.finish_reason for answer in answers]
    reasons = ["context" if r == "length" and n < max_tokens else r for r, n in zip(reasons, lengths, strict=True)]
    return {
        "questions": len({answer.question.line for answer in answers}),
        "prompts": len(answers),
        "tokens": sum(answer.output.stats.tokens for answer in answers),
        "calls": sum(answer.output.stats.calls for answer in answers),
        "mean_answer_tokens": statistics.fmean(lengths),
        "finish_reasons": dict(Counter(reasons)),
    }


def groups(answers: list[Answer]) -> list[dict[str, Any]]:
    """TPC and acceptance for each category, each turn, and each turn of a category; None stands for all of them."""
    categories = sorted({answer.question.category for answer in answers} - {None})
    turns = sorted({answer.turn for answer in answers})
    figures = []
    for category in [*categories, None]:
        for turn in [*turns, None]:
            among = [a for a in answers if category in (None, a.question.category) and turn in (None, a.turn)]
            measured = {"prompts": len(among), "tpc": tpc(among), "acceptance_per_depth": acceptance(among)}
            figures.append({"category": category, "turn": turn, **measured})
    return figures


def compare(plain: list[Together], speculative: list[Together]) -> dict[str, Any]:
    """Speculative against plain decoding of the same prompts in the same batches.

    `speedup` is the ratio of the mean times between tokens over everything; `speedup_batch_median` the median of that
    ratio over the batches, which a disturbance of a few batches leaves alone. Raises UserError without decoding.
    """
    times = [[intervals(batch) for batch in pair] for pair in zip(plain, speculative, strict=True)]
    ratios = [statistics.fmean(before) / statistics.fmean(after) for before, after in times if before and after]
    check(len(ratios) > 0, NO_DECODING)
    before, after = (statistics.fmean(chain.from_iterable(side)) for side in zip(*times, strict=True))
    pairs = [pair for batches in zip(plain, speculative, strict=True) for pair in zip(*batches, strict=True)]
    return {
        "speedup": before / after,
        "speedup_batch_median": statistics.median(ratios),
        "differing_answers": sum(a.output.token_ids != b.output.token_ids for a, b in pairs),
    }


def check_timing(results: Mapping[str, Any]) -> None:
    """Raise UserError where the speed-up of single prompts exceeds tokens per call: a draft makes no target call
    faster. DESIGN 3.8.

    In a batch it may: who accepts much is done early, and what is left is a smaller and faster batch. Nor does it bind
    the median of batches that accept more than others.
    """
    check(
        results["speedup"] <= results["tpc"],
        f"speed-up {results['speedup']:.3f} exceeds {results['tpc']:.3f} tokens per call, so the timing cannot be "
        "right and no result was written; run again with more questions on a quieter machine",
    )
