"""The page on two results, old and new: each figure better, worse, or within chance."""

from collections.abc import Sequence

from evals.bench.page.blocks import Block, Facts, Headline, Notes, Page, Table
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import Source
from evals.bench.page.guard import BETTER, NOISE, UNKNOWN, WORSE, Judged, judge, missing
from evals.bench.page.pairing import pairs, told
from evals.bench.page.sections import readable
from evals.bench.page.shown import hardware, spread

ORDER = (WORSE, BETTER, UNKNOWN, NOISE)
NO_FIGURES = "evals.{} has no figures that are compared: look at both results."
HOW = (
    "Worse and better: the 95 % interval of the difference excludes zero. It is paired by question where both kept "
    "their answers; else the two intervals must not overlap, which is stricter.",
    "Of twenty figures that did not change, about one is called better or worse as questions are a sample. What a "
    "machine does from run to run comes on top, as far as plain decoding does not show it: measure both again.",
    "Cannot tell: no interval, or another target, other questions or other hardware, or for times other work on the "
    "machine in one of the runs. Such a difference is none of the code.",
    "Times follow the machine's own drift, which plain decoding in the same run shows: intervals are wider by it. "
    "Where its time changed by more than 5 %, TTIT and TTFT are not compared: look at the speed-up, and measure OLD "
    "again.",
)


def comparison(old: Sequence[Source], new: Sequence[Source]) -> tuple[Page, list[Judged], list[str]]:
    """The page, what it says of each figure, the worse ones first, and a line for the figures that NEW has lost."""
    old, new = ([readable(each) for each in sources] for sources in (old, new))
    matched, alone, left = pairs(old, new)
    bare = [f"{now.name}: {NO_FIGURES.format(now.evaluation)}" for was, now in matched if not (_has(was) or _has(now))]
    lost = [f"{line} (not in NEW)" for was, now in matched for line in missing(was, now)]
    added = [f"{line} (not in OLD)" for was, now in matched for line in missing(now, was)]
    of_left = {each.name: _has(each) for each in left}
    unpaired = {name: f"{name}: nothing in NEW is of the same evaluation and config." for name in of_left}
    judged = sorted((each for pair in matched for each in judge(*pair)), key=lambda each: ORDER.index(each.verdict))
    alone = [*lost, *added, *bare, *alone, *unpaired.values()]
    lost += [unpaired[name] for name, has_figures in of_left.items() if has_figures]
    blocks: list[Block] = []
    if judged:
        header = ["figure", "of", "old", "new", "verdict", "why"]
        blocks.append(Table("Figures, old and new", header, [_row(each) for each in judged], texts=True))
    if alone:
        blocks.append(Notes("Not compared", alone))
    if equal := [line for was, now in matched for line in told(was, now)]:
        blocks.append(Notes("Settings that OLD does not know", equal))
    blocks.append(Notes("How to read it", HOW))
    made = [(each.name, f"{hardware(each)}; {each.found.get('date') or 'no date'}") for each in (*old, *new)]
    blocks.append(Facts("Where these were measured", made))
    said = sentence(judged, lost, has_pairs=bool(matched))
    return Page("Old against new", said, headlines(judged), blocks), judged, lost


def _has(source: Source) -> bool:
    return bool(figures_of(source))


def sentence(judged: Sequence[Judged], lost: Sequence[str] = (), has_pairs: bool = False) -> str:
    """What is said of all figures together. `lost`: a line for those that OLD alone has; `has_pairs`: whether results
    of the same evaluation and config are in both."""
    worse = [f"{each.evaluation}, {each.new.of}: {each.new.name}" for each in judged if each.verdict == WORSE]
    if not judged and has_pairs:
        return "Nothing was compared, though results of the same evaluation and config are in both: see Not compared."
    if not judged:
        return "No result of the same evaluation and config is in both."
    said = f"Worse: {'; '.join(worse)}." if worse else "Nothing is shown to be worse."
    return f"{said} Figures of OLD are missing in NEW: see Not compared." if lost else said


def headlines(judged: Sequence[Judged]) -> list[Headline]:
    """How many figures of each verdict."""
    counts = {verdict: sum(each.verdict == verdict for each in judged) for verdict in ORDER}
    return [Headline(str(count), verdict, f"of {len(judged)} figures") for verdict, count in counts.items()]


def _row(each: Judged) -> list[str]:
    old, new = (spread(figure.value, figure.interval, 3) for figure in (each.old, each.new))
    return [each.new.name, f"{each.evaluation}, {each.new.of}", old, new, each.verdict, each.why]
