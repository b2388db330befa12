"""What each of the inference's optimisations is worth: on against off, one at a time, time and tokens per call.

Both sides of a switch answer the same batches in turn within one run, so that whatever else the machine does hits both
alike. Paper section 3. Knows nothing of how an optimisation works.

    python -m evals.switches draft=DIR batch_sizes=[1,16] out=DIR
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.config import build, check, command, provenance, resolve_device, write_json, write_text
from eagle_train.inference import Engine, Output, SamplingParams
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.models.artifact import load_draft
from eagle_train.models.quantised import Quant, quantised
from eagle_train.models.target import TargetConfig, load_target
from eagle_train.ops import attention, linear
from eagle_train.progress import progress
from eagle_train.training.metrics import redact
from evals import figures
from evals.contenders import serve
from evals.figures import Together
from evals.latency import median_ratio, take_turns
from evals.mt_bench import Artifact, prepared
from evals.prompts import Asked, Prompts
from evals.report import made_on, number, table

GREEDY, SAMPLED, SHARED = "temperature 0", "temperature 1", "temperature 0, shared beginnings, asked again"


@contextmanager
def plain_attention() -> Iterator[None]:
    """Prefix and tree are attended by the plain twin instead of the device's kernel."""
    with patch.object(attention, "flash_partial", attention.plain_partial):
        yield


@contextmanager
def plain_linear() -> Iterator[None]:
    """Products of few rows as those of many."""
    with patch.object(linear, "FEW_ROWS", range(0)):
        yield


@dataclass(frozen=True)
class Side:
    """How an engine is made: what its `Engine` is given, its draft's quantisation and alignment, and a patch."""

    speculation: bool = True
    options: Mapping[str, Any] | None = None
    quant: str = "none"
    alignment: str | None = None
    within: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Switch:
    """`what` it turns on, with the paper's section; `off` and `on`; and under which load it shows."""

    what: str
    off: Side = Side()
    on: Side = Side()
    load: str = GREEDY


SWITCHES = {
    "speculation": Switch("drafts at all", off=Side(speculation=False)),
    "greedy_drafting": Switch(
        "greedy instead of multinomial drafts (3.2)", off=Side(options={"drafting": "multinomial"}), load=SAMPLED
    ),
    "compiled_forwards": Switch("forwards compiled", on=Side(options={"compile": True})),
    "compiled_sampling": Switch(
        "forwards and verification compiled (3.2)", on=Side(options={"compile": True}), load=SAMPLED
    ),
    "last_alignment": Switch(
        "the draft's cache aligned by the last token alone (3.4)",
        off=Side(alignment="accepted"),
        on=Side(alignment="last"),
    ),
    "persistent_kv": Switch("prompts' beginnings kept (3.4)", on=Side(options={"prefix_cache": True}), load=SHARED),
    "int4_draft": Switch("the draft's feed-forward in INT4 (3.4)", on=Side(quant="int4")),
    "fp8_draft": Switch("the draft's feed-forward in FP8 (3.4)", on=Side(quant="fp8")),
    "attention_kernel": Switch("the device's attention kernel (3.1)", off=Side(within=plain_attention)),
    "linear_of_few_rows": Switch("products for a tree's few rows", off=Side(within=plain_linear)),
}


@dataclass
class Config:
    """conf/switches.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    draft: Artifact
    tree: str
    switches: list[str] | None
    batch_sizes: list[int]
    questions: str
    shared_tokens: int
    repeats: int
    out: str
    max_tokens: int
    seed: int
    device: str
    threads: int | None

    def __post_init__(self) -> None:
        for name in self.switches or []:
            check(name in SWITCHES, f"switches: {name} is none of {', '.join(SWITCHES)}")
        for key in ("repeats", "shared_tokens"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: must be at least 1")
        check(self.max_tokens >= 2, f"max_tokens={self.max_tokens}: must be at least 2, for there to be decoding")
        sizes = self.batch_sizes
        check(bool(sizes) and min(sizes) >= 1, f"batch_sizes={sizes}: must be numbers from 1 on")
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")


class Bench:
    """The models, and the engine of each side."""

    def __init__(self, config: Config, device: str):
        self.config, self.target = config, load_target(config.target, device)
        self.draft = load_draft(config.draft.path, self.target.identity)

    def engine(self, side: Side, batch_size: int) -> Engine:
        drafter = None
        if side.speculation:
            draft = quantised(copy.deepcopy(self.draft), Quant(side.quant))
            drafter = Eagle(draft, self.target, side.alignment or self.config.draft.alignment)
        return Engine(self.target, drafter, self.config.tree, max_batch_size=batch_size, **(side.options or {}))

    def batches(self, load: str, size: int) -> list[list[Asked]]:
        """What both sides are asked. Shared beginnings are asked first by the warm-up."""
        params = SamplingParams(float(load == SAMPLED), max_tokens=self.config.max_tokens, seed=self.config.seed)
        prompts = Prompts(Engine(self.target), self.config.questions, params)
        if load != SHARED:
            return prompts.batches(self.config.repeats, size, None)
        stem = prompts.batches(1, 1, self.config.shared_tokens)[0][0].prompt
        (batch,) = prompts.batches(1, size, None)
        return [[replace(each, prompt=stem + each.prompt) for each in batch]] * self.config.repeats


@command("switches")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device = resolve_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    out = prepared(Path(str(config.out)))
    bench = Bench(config, device)
    found = {
        "rows": measured(bench),
        "tree": config.tree,
        "target": bench.target.name,
        "dtype": str(bench.target.dtype).removeprefix("torch."),
        "device": bench.target.device.type,
        "config": redact(OmegaConf.to_container(values)),
        "provenance": provenance(),
    }
    write_text(out / "report.md", markdown(found))
    write_json(out / "results.json", found)
    print(comparison(found["rows"]))
    print(f"written to {out}: report.md, results.json")


def measured(bench: Bench) -> list[dict[str, Any]]:
    """A row for each batch size and switch."""
    config = bench.config
    cells = [(size, name) for size in config.batch_sizes for name in config.switches or SWITCHES]
    rows, bar = [], progress(len(cells), "switch")
    for count, (size, name) in enumerate(cells, 1):
        switch = SWITCHES[name]
        sides = {key: partial(answer, side, bench.engine(side, size)) for key, side in sides_of(switch)}
        answered = take_turns(sides, bench.batches(switch.load, size))
        rows.append({"switch": name, "batch_size": size, "load": switch.load, **compared(answered)})
        bar.update(count)
    bar.close()
    return rows


def sides_of(switch: Switch) -> list[tuple[str, Side]]:
    return [("off", switch.off), ("on", switch.on)]


def answer(side: Side, engine: Engine, asked: Sequence[Asked]) -> list[Output]:
    if side.within is None:
        return serve(engine, asked)
    with side.within():
        return serve(engine, asked)


def compared(answered: dict[str, list[Together]]) -> dict[str, Any]:
    """Each side's figures in seconds, and off's times over on's, the median of the batches."""
    found: dict[str, Any] = {}
    means: dict[str, dict[str, list[float]]] = {}
    for side, batches in answered.items():
        answers = list(chain.from_iterable(batches))
        found |= {f"{side}_tpc": figures.tpc(answers), f"{side}_prompts": len(answers)}
        means[side] = {
            "ttit": [statistics.fmean(figures.intervals(batch)) for batch in batches],
            "ttft": [statistics.fmean(each.output.stats.ttft_s for each in batch) for batch in batches],
        }
        found |= {f"{side}_{key}_s": statistics.median(each) for key, each in means[side].items()}
    for key in ("ttit", "ttft"):
        found[f"{key}_speedup"] = median_ratio(means["off"][key], means["on"][key])
    return found


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row each; speed-ups are off's time over on's."""
    header = ["switched on", "load", "batch", "TPC off", "TPC on", "TTIT off, ms", "TTIT on, ms", "TTIT", "TTFT"]
    lines = [
        [
            SWITCHES[row["switch"]].what,
            row["load"],
            str(row["batch_size"]),
            number(row["off_tpc"]),
            number(row["on_tpc"]),
            number(row["off_ttit_s"] * 1e3),
            number(row["on_ttit_s"] * 1e3),
            f"{row['ttit_speedup']:.2f}×",
            f"{row['ttft_speedup']:.2f}×",
        ]
        for row in rows
    ]
    return table(header, lines)


def markdown(found: Mapping[str, Any]) -> str:
    """report.md."""
    config = found["config"]
    setting = (
        f"Target `{found['target']}`, {found['dtype']} on {found['device']}; draft `{config['draft']['path']}`; "
        f"{found['tree']}; prompts of `{config['questions']}`, {config['repeats']} batches, answers of at most "
        f"{config['max_tokens']} tokens."
    )
    note = "The last two columns: the time without it over the time with it, medians over the batches, taken in turn."
    parts = [
        "# What each optimisation is worth",
        setting,
        comparison(found["rows"]),
        note,
        "## Made on",
        made_on(found),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
