"""What each of the inference's optimisations is worth: on against off, one at a time, time and tokens per call.

Both variants of a switch (evals/bench/variants.py) answer the same batches in turn within one run. Paper section 3.
Knows nothing of how an optimisation works.

    python -m evals.tune_trees draft=DIR
    python -m evals.switches draft=DIR batch_sizes=[1,8] out=DIR
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from eagle_train.artifacts.format import read_artifact
from eagle_train.artifacts.markdown import aligned, code
from eagle_train.distributed import place
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Dispatcher
from eagle_train.progress import progress
from eagle_train.settings import build
from evals.bench.config import check_sizes
from evals.bench.evaluation import evaluation
from evals.bench.report import TERMS, document, made_on, number, several, subject, table, warnings
from evals.bench.session import Session
from evals.bench.switching import FIGURES, answer_both, check_switch, compared, verdict
from evals.bench.trees import check_tree, tree_names
from evals.bench.variants import NO_SWITCH, PLACEBO, SWITCHES, SwitchesConfig

COLUMNS = ["switched on", "load", "batch", "TPC off", "TPC on", "its figure", "on, ms", *FIGURES.values(), "with it"]
NOTE = """\
- Both sides of a row answer the same batches in turn. TTIT, TTFT and longest wait are ratios: the time without the
  optimisation divided by the time with it, the median over the batches. Above 1 it is faster with it.
- `its figure` is the time that the optimisation is for. Its ratio is in bold, with the 95 % interval of the median
  (order statistics) from 6 batches on; `on, ms` is that time with the optimisation, the median over the batches.
- `with it` says whether that time is shorter or longer: where the interval lies beyond 1, and beyond the interval of
  the same figure in the batch size's first row, both of whose sides are alike. Otherwise, or where there is no
  interval, the row is not told from noise. Intervals are of other batches, not of other runs.
- Batches have prompts of their own, as far as there are enough, except where the load asks the same again. Where a
  prompt comes late, the TTFT is its own."""


@dataclass(kw_only=True)
class Config(SwitchesConfig):
    """conf/commands/switches.yaml, which says what each key is. Raises UserError for values that cannot be."""

    switches: list[str] | None
    batch_sizes: list[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.switches or []:
            check(name in SWITCHES, f"switches: {name} is none of {', '.join(SWITCHES)}")
            check(self.lack(name) is None, f"switches: {name} needs {self.lack(name)}; name others")
        check_sizes("batch_sizes", self.batch_sizes)
        check_tree(self.tree, max(self.batch_sizes))
        names = {name for _, name in self.cells}
        some = f"must name some that show at batch_sizes={self.batch_sizes}, or be null"
        check(len(names) > 0, f"switches={self.switches}: {some}")
        for name in names:
            check_switch(self, name)

    def lack(self, name: str) -> str | None:
        """What the switch needs and this job does not have; None where it has all."""
        aligned = "last" in (SWITCHES[name].on.alignment, SWITCHES[name].off.alignment)
        if aligned and self.draft.path is not None and read_artifact(self.draft.path).draft.levels is not None:
            return "a draft that reads tokens again"
        return SWITCHES[name].lack(resolve_device(self.device), place()[1])

    @property
    def cells(self) -> list[tuple[int, str]]:
        """Batch sizes and switches, each with each that shows something there, after the placebo."""
        names = self.switches
        if names is None:
            names = [name for name in SWITCHES if self.lack(name) is None]
        cells = []
        for size in self.batch_sizes:
            there = [name for name in names if size >= SWITCHES[name].workload.least_size]
            cells += [(size, name) for name in dict.fromkeys([PLACEBO, *there]) if there]
        return cells


@evaluation("switches")
def main(values: DictConfig) -> None:
    session = Session(build(Config, values, ""))
    cells = session.config.cells
    for size, name in cells:  # a prompt that does not fit is an error before anything is measured
        SWITCHES[name].workload.batches(session, size)
    tree = tree_names(Dispatcher(session.config.tree), max(session.config.batch_sizes))
    for rows in measured(session):  # each is written at once: a later one may fail
        found = {"rows": rows, "left": len(cells) - len(rows), "tree": tree, **session.about()}
        session.report(found, markdown(found))
    session.say(aligned(comparison(rows)), *warnings(found), f"written to {session.out}: report.md, results.json")


def measured(session: Session[Config]) -> Iterator[list[dict[str, Any]]]:
    """A row for each batch size and switch: after each those so far."""
    cells = session.config.cells
    rows, bar = [], progress(len(cells), "switch")
    for count, (size, name) in enumerate(cells, 1):
        workload, figure = SWITCHES[name].workload, SWITCHES[name].figure
        answered = answer_both(session, name, size)
        found = compared(answered, session.config.max_tokens, workload.newcomers, workload.asks_again)
        rows.append({"switch": name, "batch_size": size, "load": workload.text, "figure": figure, **found})
        bar.update(count)
        yield rows
    bar.close()


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row each: TPC, the figure that the switch is for, the ratio of each time, and whether noise may explain it."""
    noise = {row["batch_size"]: row for row in rows if row["switch"] == PLACEBO}
    return table(COLUMNS, [columns(row, noise[row["batch_size"]]) for row in rows])


def columns(row: Mapping[str, Any], placebo: Mapping[str, Any]) -> list[str]:
    """A row of the table. `placebo`: the first row of its batch size."""
    own = row["figure"]
    interval = row[f"{own}_speedup_interval"]
    ratios = {key: f"{row[f'{key}_speedup']:.2f}×" for key in FIGURES}
    ratios[own] = f"**{ratios[own]}**" + ("" if interval is None else " ({:.2f} to {:.2f})".format(*interval))
    return [
        SWITCHES[row["switch"]].what,
        row["load"],
        str(row["batch_size"]),
        *(number(row[f"{side}_tpc"]) for side in ("off", "on")),
        FIGURES[own],
        number(row[f"on_{own}_s"] * 1e3),
        *ratios.values(),
        "" if row is placebo else verdict(interval, placebo[f"{own}_speedup_interval"]),
    ]


def markdown(found: Mapping[str, Any]) -> str:
    """report.md."""
    config = found["config"]
    setting = (
        f"{subject(found)}; {found['tree']}; prompts of {code(config['questions'])}, "
        f"{several(config['repeats'], 'batch', 'es')}, answers of at most {config['max_tokens']} tokens."
    )
    left = [f"Rows still to come: {found['left']}."] if found["left"] else []
    text = "\n\n".join([setting, comparison(found["rows"]), *left, TERMS, NOTE, NO_SWITCH])
    return document({"What each optimisation is worth": text, "Made on": made_on(found)})


if __name__ == "__main__":
    main()
