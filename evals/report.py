"""All results in one page: tables, plots, what not to conclude; or two results, old and new, figure by figure.

Reads what evaluations and training runs wrote, and measures nothing. DESIGN section 3.8.

    python -m evals.report results=[outputs/latency,outputs/mt_bench] out=outputs/report
    python -m evals.report compare=[OLD,NEW] fail_on_worse=true
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig

from eagle_train.errors import UserError, check, one_line
from eagle_train.results import prepared, write_json, write_text
from eagle_train.settings import build, instantiate
from evals.bench.evaluation import evaluation_alone
from evals.bench.page.blocks import Page
from evals.bench.page.comparison_page import comparison
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import Source, gather
from evals.bench.page.guard import UNKNOWN, WORSE, Judged
from evals.bench.page.overview import page_of
from evals.bench.page.render import html, markdown


@dataclass(kw_only=True)
class Config:
    """conf/commands/report.yaml, which says what each key is. Raises UserError for values that cannot be."""

    results: list[str] | None
    compare: list[str] | None
    fail_on_worse: bool
    out: str
    tracking: Any

    def __post_init__(self) -> None:
        both = self.results is not None and self.compare is not None
        check(not both, f"compare={self.compare}: leave out results; a comparison is of these two alone")
        told = "must be two directories or files, compare=[OLD,NEW]"
        check(self.compare is None or len(self.compare) == 2, f"compare={self.compare}: {told}")
        told = "needs compare=[OLD,NEW]; a report alone calls nothing worse"
        check(not self.fail_on_worse or self.compare is not None, f"fail_on_worse=true: {told}")


@evaluation_alone("report")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    judged, lost = list[Judged](), list[str]()
    if config.compare is None:
        sources = gather(config.results)
        page, figures = page_of(sources), numbers_of(sources)
    else:
        old, new = (gather([place], field="compare") for place in config.compare)
        page, judged, lost = comparison(old, new)
        figures = numbers_of(new)
    write(page, judged, figures, config)
    if config.fail_on_worse:
        changed = [each.verdict for each in judged if each.old.value != each.new.value]
        check(bool(judged), f"fail_on_worse=true: nothing was compared; {config.out}/report.md says why")
        said = f"of {len(changed)} figures that changed none can be told; {config.out}/report.md says why"
        check(not changed or set(changed) != {UNKNOWN}, f"fail_on_worse=true: {said}")
        if any(each.verdict == WORSE for each in judged):
            sys.exit(1)
        more = f", and {len(lost) - 1} more in {config.out}/report.md" if len(lost) > 1 else ""
        check(not lost, f"fail_on_worse=true: figures of OLD are missing in NEW: {lost[0] if lost else ''}{more}")


def numbers_of(sources: Sequence[Source]) -> dict[str, float]:
    """The figures of all results by name, for a tracker."""
    return {f"{s.evaluation}/{each.of}/{each.name}": each.value for s in sources for each in figures_of(s)}


def write(page: Page, judged: Sequence[Judged], figures: dict[str, float], config: Config) -> None:
    """report.html and report.md in `out`, comparison.json of a comparison, and the same to the tracker."""
    out = prepared(config.out)
    text = html(page)
    write_text(out / "report.html", text)
    write_text(out / "report.md", markdown(page))
    if config.compare is not None:
        write_json(out / "comparison.json", [asdict(each) for each in judged])
    given = {"report": config.results or config.compare}
    tracker = instantiate(config.tracking, "tracking", directory=out, config=given)
    tracker.start(resumed=False)
    try:
        tracker.log(0, figures)
        tracker.show("report", text)
        tracker.close()
    except Exception as error:  # a service of others, which raises what it likes
        told = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"the tracker failed: {told}; the report is in {out}") from error
    print(page.verdict)
    print(*(f"{each.value} {each.name} ({each.of})" for each in page.headlines), sep="\n")
    print(f"written to {out}: report.html, report.md" + (", comparison.json" if config.compare is not None else ""))


if __name__ == "__main__":
    main()
