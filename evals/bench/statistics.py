"""Statistics of answers: tokens per call, acceptance, latency, intervals. Sums are taken before they are divided.

Knows nothing of how answers are made or shown. DESIGN section 3.8; paper section 2.2.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest
from math import ceil, comb
from statistics import fmean, median
from typing import Any

import torch

from eagle_train.errors import UserError, check
from eagle_train.inference import Output
from evals.bench.questions import Question

NGRAM = 8  # repeated sequences of so many tokens are counted
LOOP = 16  # tokens: shorter answers are not called loops
RESAMPLES = 2000  # of the questions or batches, for a bootstrap interval
FEWEST = 6  # questions, or batches of them: a bootstrap over fewer has far less than the 95 % that it tells
TOLERANCE = 0.05  # of a speed-up without an interval: what it may exceed tokens per call by


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one turn (from 1) of a question. `prompt`: the token ids it was given."""

    question: Question
    turn: int
    prompt: list[int]
    output: Output


AnswerBatch = list[Answer]
"""Answers that were decoded together."""


def tpc(answers: Iterable[Answer]) -> float | None:
    """Tokens committed in decoding ÷ target calls in decoding; None without a call."""
    stats = [answer.output.stats for answer in answers]
    calls = sum(s.calls for s in stats)
    return sum(s.tokens for s in stats) / calls if calls else None


def no_decoding(max_tokens: int) -> str:
    """What to tell where nothing was decoded. `max_tokens`: of the answers."""
    told = "no answer has a second token, so no decoding was measured"
    return f"max_tokens={max_tokens}: {told}; raise it, or ask other questions"


def decoded_tpc(answers: Iterable[Answer], max_tokens: int) -> float:
    """As `tpc`. Raises UserError where nothing was decoded; `max_tokens`: as for `no_decoding`."""
    found = tpc(answers)
    if found is None:
        raise UserError(no_decoding(max_tokens))
    return found


def acceptance(answers: Iterable[Answer]) -> list[float]:
    """Share of the rounds with a node at depth 1, 2, ... in which the target accepted down to that depth."""
    stats = [answer.output.stats for answer in answers]
    accepted = map(sum, zip_longest(*(s.accepted_per_depth for s in stats), fillvalue=0))
    drafted = map(sum, zip_longest(*(s.drafted_per_depth for s in stats), fillvalue=0))
    return [hits / rounds for hits, rounds in zip(accepted, drafted, strict=True)]


def intervals(answers: Iterable[Answer]) -> list[float]:
    """Seconds between one token and the next, for every token of decoding."""
    return [seconds for answer in answers for seconds in answer.output.stats.intervals_s]


def round_waits(answers: Iterable[Answer]) -> list[float]:
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


def looping(texts: Iterable[Sequence[int]]) -> float:
    """Share of the texts that end in a loop, see `ends_in_loop`; 0 for no texts."""
    ends = list(map(ends_in_loop, texts))
    return fmean(ends) if ends else 0.0


def token_ids(answers: Iterable[Answer]) -> Iterator[list[int]]:
    """The answers as texts of tokens."""
    return (answer.output.token_ids for answer in answers)


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the last half of a text is one sequence of tokens again and again, at least twice. Texts of less than
    `LOOP` tokens are too short to tell."""
    half = len(tokens) - len(tokens) // 2
    return len(tokens) >= LOOP and any(
        all(tokens[-i] == tokens[-i - period] for i in range(1, half - period + 1))
        for period in range(1, half // 2 + 1)
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated."""
    return torch.tensor(values, dtype=torch.float64).quantile(share).item()


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median, from the order statistics (the sign test's interval): two of the
    values. It holds for any distribution. None for fewer than 6 values.
    """
    ordered, count, left_out = sorted(values), len(values), 0
    while 40 * sum(comb(count, k) for k in range(left_out + 1)) <= 2**count:
        left_out += 1
    return (ordered[left_out - 1], ordered[-left_out]) if left_out else None


def median_ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median of the ratios by batch, which a disturbance of a few batches does not change."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


Runs = Sequence[Sequence[Sequence[int]]]
"""Of runs with several seeds, [tokens, calls] for each question."""


def tpc_interval(runs: Runs) -> dict[str, float | None]:
    """TPC of the runs together, and its 95 % bootstrap interval over seeds and questions, None for fewer questions than
    `FEWEST`."""
    drawn = _drawn_questions(runs)
    return _with_interval(_tpc_of(runs), _resampled(runs, drawn, seed=1), drawn)


def tpc_gain(ours: Runs, theirs: Runs, same_drafts: bool) -> dict[str, float | None]:
    """TPC above another decoding's, and its 95 % bootstrap interval as of `tpc_interval`, the same questions for both.
    `same_drafts`: a seed's draft is the same in both, so that the same seeds are drawn too."""
    drawn = _drawn_questions(ours)
    spread = _resampled(ours, drawn, seed=1) - _resampled(theirs, drawn, seed=1 if same_drafts else 2)
    return _with_interval(_tpc_of(ours) - _tpc_of(theirs), spread, drawn)


def question_interval(counts: Sequence[Sequence[int]]) -> tuple[float, float] | None:
    """The 95 % bootstrap interval over questions of TPC, from [tokens, calls] of each; None for fewer than `FEWEST`."""
    decoded = [[*each] for each in counts if each[1]]
    if len(decoded) < FEWEST:
        return None
    return _ends(_resampled([decoded], _drawn_questions([decoded]), seed=1))


def change_interval(own: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of one decoding's TPC divided by another's, less 1, from [tokens, calls] of each
    question, the same questions drawn for both; None for fewer than `FEWEST` that both decoded."""
    both = [[*ours, *theirs] for ours, theirs in zip(own, other, strict=True) if ours[1] and theirs[1]]
    if len(both) < FEWEST:
        return None
    tokens, calls, before, before_calls = torch.tensor(both).double()[_drawn_questions([both])].sum(1).unbind(-1)
    return _ends((tokens / calls) / (before / before_calls) - 1)


def _tpc_of(runs: Runs) -> float:
    tokens, calls = torch.tensor(runs).sum((0, 1)).tolist()
    return tokens / calls


def _drawn_questions(runs: Runs) -> torch.Tensor:
    """int64 [RESAMPLES, questions]."""
    count, generator = len(runs[0]), torch.Generator().manual_seed(0)
    return torch.randint(count, (RESAMPLES, count), generator=generator)


def _resampled(runs: Runs, drawn: torch.Tensor, seed: int) -> torch.Tensor:
    """TPC [RESAMPLES] of questions that were drawn, of as many runs, drawn here."""
    counts = torch.tensor(runs).double()
    which = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=torch.Generator().manual_seed(seed))
    by_run = torch.stack([each[drawn].sum(1) for each in counts])  # [runs, RESAMPLES, 2]
    summed = by_run.take_along_dim(which.T.unsqueeze(2), dim=0).sum(0)
    return summed[:, 0] / summed[:, 1]


def _with_interval(tpc: float, spread: torch.Tensor, drawn: torch.Tensor) -> dict[str, float | None]:
    low, high = _ends(spread) if drawn.shape[1] >= FEWEST else (None, None)
    return {"tpc": tpc, "low": low, "high": high}


def interval_of(found: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of what `tpc_interval` or `tpc_gain` gave; None where there is none."""
    return None if found["low"] is None else (found["low"], found["high"])


def _ends(spread: torch.Tensor) -> tuple[float, float]:
    """The ends of the 95 % interval of resampled values."""
    low, high = spread.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def speedup_interval(plain: Sequence[AnswerBatch], other: Sequence[AnswerBatch]) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of `compare`'s `speedup`, over the batches; None for fewer than `FEWEST` with
    decoding. Of single prompts these are the questions. The rows of a batch have their rounds' times in common, so that
    they are drawn together, and so are batches of the same questions: other turns of them, or asked again."""
    sums: dict[frozenset[int], list[float]] = {}
    for pair in zip(plain, other, strict=True):
        own = sums.setdefault(frozenset(answer.question.line for answer in pair[1]), [0.0] * 4)
        for place, batch in enumerate(pair):
            times = intervals(batch)
            own[2 * place] += sum(times)
            own[2 * place + 1] += len(times)
    decoded = [own for own in sums.values() if own[1] and own[3]]
    if len(decoded) < FEWEST:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(decoded), (RESAMPLES, len(decoded)), generator=generator)
    before, tokens, after, own_tokens = torch.tensor(decoded).double()[drawn].sum(1).unbind(-1)
    return _ends((before / tokens) / (after / own_tokens))


def num_rounds(batches: Iterable[AnswerBatch]) -> int:
    """Rounds of decoding; a batch has as many as its longest answer."""
    return sum(max(answer.output.stats.calls for answer in batch) for batch in batches)


def times(answers: Iterable[Answer]) -> dict[str, float]:
    """Means and percentiles of the time to the first token and of those between tokens, in seconds."""
    answers = list(answers)
    found = {}
    for key, values in (("ttft", [answer.output.stats.ttft_s for answer in answers]), ("ttit", intervals(answers))):
        found[f"{key}_s"] = fmean(values)
        found |= {f"{key}_p{share}_s": percentile(values, share / 100) for share in (50, 99)}
    return found


def latency(batches: list[AnswerBatch]) -> dict[str, Any]:
    """`times`, and the rounds that they were taken over."""
    return {**times(chain.from_iterable(batches)), "rounds": num_rounds(batches)}


def conditional(shares: Sequence[float]) -> list[float | None]:
    """Acceptance at each depth among the rounds that accepted the depth before, from shares of the same rounds; None
    where there were none."""
    return [share / before if before else None for before, share in zip([1.0, *shares], shares, strict=False)]


def stages(seconds: Mapping[str, float], runs: Mapping[str, int], batches: int) -> dict[str, Any]:
    """An engine's stages in milliseconds per round, the prefill per batch, drafting also per round that drafts.

    `seconds` and `runs`: of each stage, over all rounds (`Engine.stage_times`).
    """
    each = {name: spent * 1e3 / runs["validation"] for name, spent in seconds.items() if name != "prefill"}
    found = {"stage_ms_per_round": each, "prefill_ms_per_batch": seconds["prefill"] * 1e3 / batches}
    if "drafting" in each:
        found["draft_latency_ms"] = seconds["drafting"] * 1e3 / runs["drafting"]
    return found


def tokens_per_s(batch: AnswerBatch, arrivals: Sequence[float]) -> float:
    """Tokens of answers, the first ones included, divided by the time from the start to the end of the last.

    `arrivals`: when each request arrived, in seconds after the start.
    """
    return sum(len(answer.output.token_ids) for answer in batch) / max(ends_of(batch, arrivals))


def ends_of(batch: AnswerBatch, arrivals: Sequence[float]) -> list[float]:
    """When each answer ended, in seconds after the start. `arrivals`: as of `tokens_per_s`."""
    stats = [answer.output.stats for answer in batch]
    return [at + each.ttft_s + sum(each.intervals_s) for at, each in zip(arrivals, stats, strict=True)]


def ttit_over_time(
    batches: Sequence[AnswerBatch], arrivals: Sequence[Sequence[float]], window: float
) -> list[float | None]:
    """The mean time between one token and the next, in seconds, in each `window` seconds after the start, of the tokens
    that came in it, over all batches; None where none came. Paper figure 1c."""
    sums: dict[int, list[float]] = {}
    for batch, at in zip(batches, arrivals, strict=True):
        for answer, arrival in zip(batch, at, strict=True):
            times = answer.output.stats.intervals_s
            for spent, since in zip(times, accumulate(times), strict=True):
                came = arrival + answer.output.stats.ttft_s + since
                sums.setdefault(ceil(came / window) - 1, []).append(spent)
    return [fmean(sums[place]) if place in sums else None for place in range(max(sums, default=-1) + 1)]


def counts(answers: list[Answer], max_tokens: int) -> dict[str, Any]:
    """Numbers of questions, prompts and tokens, and why answers ended: `context` where the context cut one short."""
    lengths = [len(answer.output.token_ids) for answer in answers]
    reasons = [answer.output.finish_reason for answer in answers]
    reasons = ["context" if r == "length" and n < max_tokens else r for r, n in zip(reasons, lengths, strict=True)]
    return {
        "questions": len({answer.question.line for answer in answers}),
        "prompts": len(answers),
        "tokens": sum(answer.output.stats.tokens for answer in answers),
        "calls": sum(answer.output.stats.calls for answer in answers),
        "mean_answer_tokens": fmean(lengths),
        "finish_reasons": dict(Counter(reasons)),
    }


def distinct_prompts(answers: Iterable[Answer]) -> int:
    """How many different prompts were answered: fewer than there are answers where questions were asked again."""
    return len({tuple(answer.prompt) for answer in answers})


def by_question(answers: Iterable[Answer]) -> list[list[int]]:
    """[tokens, calls] of each question, over its turns, in the order in which questions come first."""
    found: dict[int, list[int]] = {}
    for answer in answers:
        own, stats = found.setdefault(answer.question.line, [0, 0]), answer.output.stats
        own[:] = own[0] + stats.tokens, own[1] + stats.calls
    return [*found.values()]


def groups(answers: Sequence[AnswerBatch], plain: Sequence[AnswerBatch]) -> list[dict[str, Any]]:
    """TPC, acceptance and speed-up by category, by turn, and by turn of a category; None stands for all of them.

    Intervals are of 95 %, by bootstrap: of TPC over the questions, of speed-ups as `speedup_interval`. `plain`: plain
    decoding's answers to the same prompts, in the same batches.
    """
    named = {answer.question.category for answer in chain.from_iterable(answers)}
    categories = sorted(each for each in named if each is not None)
    turns = sorted({answer.turn for answer in chain.from_iterable(answers)})
    found = []
    for category in [*categories, None]:
        for turn in [*turns, None]:
            own, other = (
                [
                    [a for a in batch if category in (None, a.question.category) and turn in (None, a.turn)]
                    for batch in side
                ]
                for side in (answers, plain)
            )
            found.append({"category": category, "turn": turn, **group(own, other)})
    return found


def group(own: Sequence[AnswerBatch], other: Sequence[AnswerBatch]) -> dict[str, Any]:
    """The figures of one of `groups`: of some rows of the batches. `other`: plain decoding's."""
    answers = list(chain.from_iterable(own))
    before, after = intervals(chain.from_iterable(other)), intervals(answers)
    is_decoded = bool(before and after)
    return {
        "prompts": len(answers),
        "tpc": tpc(answers),
        "tpc_interval": question_interval(by_question(answers)),
        "acceptance_per_depth": acceptance(answers),
        "speedup": fmean(before) / fmean(after) if is_decoded else None,
        "speedup_interval": speedup_interval(other, own) if is_decoded else None,
    }


def compare(plain: list[AnswerBatch], speculative: list[AnswerBatch], max_tokens: int) -> dict[str, Any]:
    """Speculative against plain decoding of the same prompts in the same batches.

    `speedup`: the ratio of the mean times between tokens over all answers; `speedup_batch_median`: the median of that
    ratio over the batches, which a disturbance of a few batches does not change. Raises UserError without decoding;
    `max_tokens`: as for `no_decoding`.
    """
    times = [[intervals(batch) for batch in pair] for pair in zip(plain, speculative, strict=True)]
    ratios = [fmean(before) / fmean(after) for before, after in times if before and after]
    check(len(ratios) > 0, no_decoding(max_tokens))
    before, after = (fmean(chain.from_iterable(side)) for side in zip(*times, strict=True))
    pairs = [pair for batches in zip(plain, speculative, strict=True) for pair in zip(*batches, strict=True)]
    return {
        "speedup": before / after,
        "speedup_batch_median": median(ratios),
        "differing_answers": sum(a.output.token_ids != b.output.token_ids for a, b in pairs),
    }


def check_timing(results: Mapping[str, Any]) -> None:
    """Raise UserError where the speed-up of single prompts exceeds tokens per call by more than noise, which is its
    interval, or `TOLERANCE` where it has none: a draft makes no target call faster. DESIGN 3.8.

    In a batch it may exceed it: requests that accept much finish early, and the batch that is left is smaller and
    faster. Nor does the bound hold for the median of batches, some of which accept more than others.
    """
    interval = results.get("speedup_interval")
    least = results["speedup"] / (1 + TOLERANCE) if interval is None else interval[0]
    check(
        least <= results["tpc"],
        f"speed-up {results['speedup']:.3f} exceeds {results['tpc']:.3f} tokens per call, so the timing cannot be "
        "right and is no result; run again with more questions on a quieter machine",
    )
