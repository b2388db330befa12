"""What each of the inference's optimisations is worth: on against off, one at a time, time and tokens per call.

Both sides of a switch answer the same batches in turn within one run, so that whatever else the machine does hits both
alike. Paper section 3. Knows nothing of how an optimisation works.

    python -m evals.tune_trees draft=DIR
    python -m evals.switches draft=DIR batch_sizes=[1,8] out=DIR
"""

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts.format import load_draft, read_artifact
from eagle_train.artifacts.markdown import aligned, code
from eagle_train.cli import command
from eagle_train.distributed import ALONE, World
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, Output
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.parallel.disaggregated import DecodeEngine, Line
from eagle_train.inference.requests.readable import chats
from eagle_train.models.loading import TargetConfig, load_config, load_target
from eagle_train.models.quantised import Quant, quantised
from eagle_train.models.shapes import heads_of
from eagle_train.progress import progress
from eagle_train.results import prepared, provenance, redact, write_json, write_text
from eagle_train.settings import build
from evals import figures
from evals.apart import beside, prefill_process
from evals.figures import Together
from evals.latency import take_turns
from evals.mt_bench import Artifact, check_tree, labels
from evals.prompts import Asked
from evals.questions import read_questions
from evals.report import TERMS, made_on, number, several, subject, table
from evals.sides import NO_SWITCH, PLACEBO, SWITCHES, Side, SideConfig, Switch

FIGURES = {"ttit": "TTIT", "ttft": "TTFT", "wait": "longest wait"}
"""The times, by the names they have in the report: means between tokens and to the first token, and the longest time
that anyone who decodes waits for a round's tokens."""


NOTE = """\
- Both sides of a row answer the same batches in turn. TTIT, TTFT and longest wait are ratios: the time without the
  optimisation divided by the time with it, the median over the batches. Above 1 it is faster with it.
- `its figure` is the time that the optimisation is for. Its ratio is in bold, with the 95 % interval of the median
  (order statistics) from 6 batches on; `on, ms` is that time with the optimisation, the median over the batches.
- `with it` says whether that time is shorter or longer: where the interval lies beyond 1, and beyond the interval of
  the same figure in the batch size's first row, both of whose sides are alike. Otherwise, or where there is no
  interval, the row is not told from noise. Intervals are of other batches, not of other runs.
- Batches have prompts of their own, except where the load asks the same again. Where a prompt comes late, the TTFT is
  its own."""


@dataclass
class Config(SideConfig):
    """conf/commands/switches.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    draft: Artifact
    switches: list[str] | None
    batch_sizes: list[int]
    out: str
    device: str
    threads: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.switches or []:
            check(name in SWITCHES, f"switches: {name} is none of {', '.join(SWITCHES)}")
            place = SWITCHES[name].device
            check(
                self.shows(name), f"switches: {name} needs {'a GPU' if place == 'cuda' else 'device=cpu'}; name others"
            )
        sizes = self.batch_sizes
        check(bool(sizes) and min(sizes) >= 1, f"batch_sizes={sizes}: must be numbers from 1 on")
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")
        check_tree(self.tree, max(sizes))
        names = {name for _, name in self.cells}
        check(len(names) > 0, f"switches={self.switches}: must name some that show at batch_sizes={sizes}, or be null")
        if "tree_dispatcher" in names:
            found = Path(self.table).is_file()
            check(found, f"table={self.table}: no such file; python -m evals.tune_trees writes one for tree_dispatcher")
            Dispatcher({"table": self.table})
        known = "guided_speculation" not in names or find_spec("xgrammar") is not None
        check(known, "switches: guided_speculation needs xgrammar; pip install 'eagle-train[guided]', or name others")
        ranks = max((SWITCHES[name].ranks for name in names), default=1)
        heads = heads_of(load_config(self.target).get_text_config()).keys
        check(
            heads % ranks == 0,
            f"switches: divided_sampling: {heads} key/value heads cannot be divided between {ranks} processes; "
            "name others",
        )

    def shows(self, name: str) -> bool:
        """Whether there is such a switch on this device."""
        return SWITCHES[name].device in (None, resolve_device(self.device))

    @property
    def cells(self) -> list[tuple[int, str]]:
        """Batch sizes and switches, each with each that shows there, behind the placebo."""
        names = self.switches
        if names is None:
            names = [name for name in SWITCHES if self.shows(name)]
        cells = []
        for size in self.batch_sizes:
            there = [name for name in names if size >= SWITCHES[name].load.least]
            cells += [(size, name) for name in dict.fromkeys([PLACEBO, *there]) if there]
        return cells


class Bench:
    """The models, from which the engine of each side is made, and what they are asked.

    `world`: of the ranks that hold the target together, all of which are asked the same.
    """

    def __init__(self, config: Config, device: str, world: World = ALONE):
        placement = "replicated" if world is ALONE else "tensor"
        self.config, self.target = config, load_target(config.target, device, placement, world, reads=chats)
        self.draft = load_draft(config.draft.path, self.target.identity)

    def check_loads(self) -> None:
        """Raise UserError for a prompt that does not fit, before anything is measured."""
        for size, name in self.config.cells:
            SWITCHES[name].load.batches(self.config, self.target, size)

    def engine(self, side: Side, switch: Switch, size: int, lines: list[Line] | None = None) -> Engine:
        """`lines`: to who reads the prompts of a side that has them read apart."""
        config, drafter = self.config, None
        if side.drafts:
            draft = quantised(copy.deepcopy(self.draft), Quant(side.quant))
            drafter = Eagle(draft, self.target, side.alignment or config.draft.alignment)
        options = {"tree": config.tree, "max_batch_size": size + switch.load.beside, **side.options(config, size)}
        make = partial(DecodeEngine, lines=lines) if side.apart else Engine
        engine = make(self.target, drafter, **options)
        if side.change is not None:
            side.change(engine)
        return engine

    def answered(self, name: str, size: int) -> dict[str, list[Together]]:
        """Both sides' answers to all batches."""
        switch = SWITCHES[name]
        if switch.ranks > 1 and self.target.together is None:
            with beside(answer_along, self.config, name, size) as world:
                return Bench(self.config, "cpu", world).answered(name, size)
        sides = {"off": switch.off, "on": switch.on}
        batches = switch.load.batches(self.config, self.target, size)
        apart = any(side.apart for side in sides.values())
        with prefill_process(self.config.target, self.config.draft.path) if apart else nullcontext() as lines:
            engines = {key: self.engine(side, switch, size, lines) for key, side in sides.items()}
            serving = {key: partial(answer, side, switch, engines[key]) for key, side in sides.items()}
            return take_turns(serving, batches, switch.load.warm_up)


def answer_along(world: World, config: Config, name: str, size: int) -> None:
    """What a second rank does while the first one measures."""
    Bench(config, "cpu", world).answered(name, size)


@command("switches")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device = resolve_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # Whatever can be wrong is told before the target is loaded.
    source = read_artifact(config.draft.path).source
    read_questions(config.questions)
    out = prepared(config.out)
    bench = Bench(config, device)
    bench.check_loads()
    about = {
        "draft_source": source,
        "tree": labels(Dispatcher(config.tree), max(config.batch_sizes)),
        "target": bench.target.name,
        "dtype": str(bench.target.dtype).removeprefix("torch."),
        "device": bench.target.device.type,
        "config": redact(OmegaConf.to_container(values)),
    }
    for rows in measured(bench):  # each is written when it is there: a later one may fail
        found = {"rows": rows, "left": len(config.cells) - len(rows), **about, "provenance": provenance()}
        write_text(out / "report.md", markdown(found))
        write_json(out / "results.json", found)
    print(aligned(comparison(rows)))
    print(f"written to {out}: report.md, results.json")


def measured(bench: Bench) -> Iterator[list[dict[str, Any]]]:
    """A row for each batch size and switch: after each those so far."""
    cells = bench.config.cells
    rows, bar = [], progress(len(cells), "switch")
    for count, (size, name) in enumerate(cells, 1):
        switch = SWITCHES[name]
        found = compared(bench.answered(name, size), switch.load.newcomers)
        rows.append({"switch": name, "batch_size": size, "load": switch.load.text, "figure": switch.figure, **found})
        bar.update(count)
        yield rows
    bar.close()


def answer(side: Side, switch: Switch, engine: Engine, asked: Sequence[Asked]) -> list[Output]:
    with side.within():
        return (side.serve or switch.load.serve)(engine, asked)


def compared(answered: dict[str, list[Together]], newcomers: int = 0) -> dict[str, Any]:
    """Each side's TPC and times in seconds, medians of the batches, and off's times over on's, the median as well, with
    its 95 % interval, None of fewer than 6 batches.

    `newcomers`: see evals/loads.py.
    """
    found: dict[str, Any] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for side, batches in answered.items():
        answers = list(chain.from_iterable(batches))
        found |= {f"{side}_tpc": figures.tpc(answers), f"{side}_prompts": len(answers)}
        check(all(map(figures.intervals, batches)), f"in a batch {figures.NO_DECODING}")
        times[side] = {
            "ttit": [statistics.fmean(figures.intervals(batch)) for batch in batches],
            "ttft": [statistics.fmean(each.output.stats.ttft_s for each in batch[-newcomers:]) for batch in batches],
            "wait": [max(figures.waits(batch)) for batch in batches],
        }
        found |= {f"{side}_{key}_s": statistics.median(each) for key, each in times[side].items()}
    for key in FIGURES:
        ratios = [off / on for off, on in zip(times["off"][key], times["on"][key], strict=True)]
        found[f"{key}_speedup"] = statistics.median(ratios)
        found[f"{key}_speedup_interval"] = figures.median_interval(ratios)
    return found


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row each: TPC, the figure that shows what the switch is worth, how many times shorter each time is, and whether
    noise may be all of that."""
    header = ["switched on", "load", "batch", "TPC off", "TPC on", "its figure", "on, ms", *FIGURES.values(), "with it"]
    noise = {row["batch_size"]: row for row in rows if row["switch"] == PLACEBO}
    return table(header, [line(row, noise[row["batch_size"]]) for row in rows])


def line(row: Mapping[str, Any], placebo: Mapping[str, Any]) -> list[str]:
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


def verdict(interval: Sequence[float] | None, noise: Sequence[float] | None) -> str:
    """What a ratio's interval says of its figure; `noise`: that of two sides that are alike, which need not hold 1."""
    if interval is None or noise is None:
        return "not told from noise"
    if interval[0] > max(1, noise[1]):
        return "shorter"
    return "longer" if interval[1] < min(1, noise[0]) else "not told from noise"


def markdown(found: Mapping[str, Any]) -> str:
    """report.md."""
    config = found["config"]
    setting = (
        f"{subject(found)}; {found['tree']}; prompts of {code(config['questions'])}, "
        f"{several(config['repeats'], 'batch', 'es')}, answers of at most {config['max_tokens']} tokens."
    )
    parts = [
        "# What each optimisation is worth",
        setting,
        comparison(found["rows"]),
        *([f"Rows still to come: {found['left']}."] if found["left"] else []),
        TERMS,
        NOTE,
        NO_SWITCH,
        "## Made on",
        made_on(found),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
