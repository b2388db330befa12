"""The top of the report: the verdict in a few figures, and a row for each result."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from evals.bench.page.blocks import Block, Headline, Notes, Page, Table
from evals.bench.page.cautions import is_looping, is_lossy, is_simulated
from evals.bench.page.figure import Figure
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import Source
from evals.bench.page.sections import readable, sections_of
from evals.bench.page.shown import hardware, spread

# Where the verdict is taken from, the first that is there: a comparison has the most drafters and intervals.
JUDGED = ("compare", "latency", "mt_bench", "experiments")
TERMS = (
    "TPC: tokens committed in decoding, divided by calls of the target in decoding.",
    "Speed-up: plain decoding's mean time between tokens, divided by that with drafts, on the same prompts in turn.",
    "TTIT: time between one token and the next. TTFT: time to the first token.",
    "Intervals in brackets are of 95 %.",
    "The largest of several speed-ups owes some of it to chance, which its interval does not count: measure it again.",
    "Published figures are of other targets on other machines: they show the order of magnitude, and rank nothing.",
)


def page_of(sources: Sequence[Source], title: str = "Report") -> Page:
    """The report on these results."""
    sources = [readable(each) for each in sources]
    labels = labels_of([each.name for each in sources])
    verdict, headlines = _verdict(sources, labels)
    rows = [_row(each, labels[each.name]) for each in sources]
    blocks: list[Block] = [Table("Results on this page", _HEADER, rows, texts=True)]
    return Page(title, verdict, headlines, [*blocks, Notes("How to read it", TERMS)], sections_of(sources))


_HEADER = ["result", "evaluation", "best by speed-up", "TPC", "speed-up (95 %)", "hardware"]
# What a best speed-up is marked with. None of these is the verdict's.
_MARKS = (("LOSSY", is_lossy), ("simulated", is_simulated), ("loops", is_looping))


def _row(source: Source, label: str) -> list[str]:
    figures = figures_of(source)
    best, tpc = _best(figures, least=True), ""
    if best is not None:
        tpc = next((spread(each.value, None) for each in figures if (each.of, each.name) == (best.of, "TPC")), "")
    of = "" if best is None else " ".join([best.of, *(f"({mark})" for mark, marked in _MARKS if marked(source))])
    speed = "" if best is None else spread(best.value, best.interval)
    return [label, source.evaluation, of, tpc, speed, hardware(source)]


def labels_of(names: Sequence[str]) -> dict[str, str]:
    """Each name with the last two parts of its path, or as many more as no other name ends in."""
    labels, different = {}, set(names)
    for name in different:
        lengths = range(2, 1 + max(2, len(Path(name.partition(": ")[0]).parts)))
        ends = ((_end(name, length), [_end(each, length) for each in different]) for length in lengths)
        labels[name] = next((end for end, all_ends in ends if all_ends.count(end) == 1), name)
    return labels


def _end(name: str, length: int) -> str:
    """The last parts of a path, and the key behind it."""
    path, colon, key = name.partition(": ")
    return "/".join(Path(path).parts[-length:]) + colon + key


def _best(figures: Sequence[Figure], least: bool) -> Figure | None:
    """The largest speed-up at the least batch size, or at the largest one."""
    speeds = [each for each in figures if each.name == "speed-up" and each.batch_size is not None]
    if not speeds:
        return None
    sizes = [each.batch_size for each in speeds if each.batch_size is not None]
    size = min(sizes) if least else max(sizes)
    return max((each for each in speeds if each.batch_size == size), key=lambda each: each.value)


def judged(sources: Sequence[Source]) -> Source | None:
    """The result that the verdict is of: of the first kind that measured a speed-up the newest, or the first where none
    has a date; never one whose acceptance is simulated or lossy, or whose answers loop."""
    real = [each for each in sources if not any(marked(each) for _, marked in _MARKS)]
    for evaluation in JUDGED:
        own = [each for each in real if each.evaluation == evaluation and _best(figures_of(each), least=True)]
        if own:
            return max(own, key=lambda each: each.found.get("date") or "")
    return None


def _verdict(sources: Sequence[Source], labels: Mapping[str, str]) -> tuple[str, list[Headline]]:
    source = judged(sources)
    best = None if source is None else _best(figures_of(source), least=True)
    if source is None or best is None:
        return "No result here measures a speed-up with real acceptance and answers that do not loop.", []
    figures = figures_of(source)
    headlines = [Headline(spread(best.value, None), f"times as fast{_between(best)}", best.of)]
    headlines += [Headline(spread(e.value, e.interval), "tokens per call", e.of) for e in figures
                  if (e.of, e.name) == (best.of, "TPC")]  # fmt: skip
    headlines += [Headline(f"{e.value:.2f} ms", "between tokens", e.of) for e in figures
                  if (e.of, e.name) == (best.of, "TTIT, ms")]  # fmt: skip
    large = _best(figures, least=False)
    if large is not None and large.batch_size != best.batch_size:
        headlines.append(Headline(spread(large.value, None), f"times as fast{_between(large)}", large.of))
    return f"{_sentence(best)} From {labels[source.name]}, on {hardware(source) or 'unnamed hardware'}.", headlines


def _between(figure: Figure) -> str:
    return "" if figure.interval is None else f" ({figure.interval[0]:.2f} to {figure.interval[1]:.2f})"


def _sentence(best: Figure) -> str:
    if best.interval is None:
        return f"The largest speed-up is that of {best.of}; it has no interval."
    if best.interval[0] > 1:
        return f"The largest speed-up is that of {best.of}, and its interval lies above 1."
    if best.interval[1] < 1:
        return f"No drafter is faster than plain decoding: the best, {best.of}, is slower."
    return f"No drafter is shown to be faster than plain decoding: the interval of the best, {best.of}, contains 1."
