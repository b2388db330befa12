"""What each option of the training is worth at equal time: tokens per call of drafts trained as long as the base's.

A variant's step is timed against the base's, each in its own process, in turn; by their ratio it gets fewer or more
steps, or as many where noise may explain the difference. It is trained by eagle-train, and its draft answers held-out
questions. Results are files, so that variants can be run one at a time. Paper section 2.3; DESIGN section 3.8.

    python -m evals.ablations only=[base,unroll2] steps=280
    python -m evals.ablations "+variants.wider=['draft.intermediate_size=1536']" only=[base,wider]
"""

from dataclasses import asdict
from functools import partial
from typing import Any

from omegaconf import DictConfig

from eagle_train.artifacts.markdown import aligned, code, plain
from eagle_train.cli import compose
from eagle_train.hardware import resolve_device
from eagle_train.inference import Requests
from eagle_train.inference.requests.readable import chats
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.results import prepared, provenance
from eagle_train.settings import build
from evals.bench.ablation_runs import (
    BASE,
    DEPTH,
    AblationConfig,
    cost,
    finished,
    once,
    run,
    run_of,
    summed,
    timing_of,
)
from evals.bench.evaluation import evaluation_alone
from evals.bench.questions import read_questions
from evals.bench.report import document, made_on, table, write_report
from evals.bench.requests import check_fit

Found = dict[str, Any]
COLUMNS = [
    "variant",
    "M parameters",
    "step time (95 %)",
    "steps",
    "seeds",
    "TPC",
    "gain (95 %)",
    "acceptance by depth",
]


@evaluation_alone("ablations")
def main(values: DictConfig) -> None:
    config = build(AblationConfig, values, "")
    chosen = config.only or list(config.variants)
    composed = {name: compose("train", config.overrides(name)) for name in [BASE, *chosen]}  # raises for mistakes
    questions = read_questions(config.questions, config.limit)
    out = prepared(config.out)
    given = build(TargetConfig, composed[BASE].target, "target")
    target = load_target(given, resolve_device(config.device), reads=chats)
    longest = check_fit(Requests(target), questions, config.max_tokens)
    for seed in config.seeds:
        for name in chosen:
            print(f"{name}, seed {seed}", flush=True)
            once(out / f"step-{name}.json", timing_of(config, name), partial(cost, config, name))
            asked = run_of(config, name, seed)
            assert asked is not None  # the variant was timed
            once(out / f"{name}-{seed}.json", asked, partial(run, asked, target, questions, config, longest))
    runs = {name: done for name in config.variants if (done := finished(config, name))}
    found = {
        "variants": {name: summed(config, name, runs) for name in runs},
        "config": asdict(config),
        "provenance": provenance(),
    }
    write_report(out, found, markdown(found))
    print(aligned(comparison(found["variants"])))
    print(f"written to {out}: report.md, results.json")


def comparison(variants: Found) -> str:
    """A row per variant."""
    rows = []
    for name, one in variants.items():
        above = one["gain"]
        rows.append(
            [
                " ".join([plain(name), *map(code, one["overrides"])]),
                f"{one['parameters'] / 1e6:.1f}",
                step_time(one["step_time"]),
                str(one["steps"]),
                str(len(one["tpc_by_seed"])),
                f"{one['tpc']:.3f}",
                f"{above['tpc']:+.3f} ({above['low']:+.3f} to {above['high']:+.3f})" if above else "",
                " ".join(f"{share:.2f}" for share in one["acceptance_per_depth"]),
            ]
        )
    return table(COLUMNS, rows)


def markdown(found: Found) -> str:
    """report.md."""
    config = found["config"]
    asked = "all questions" if config["limit"] is None else f"{config['limit']} questions"
    base = code(" ".join(config["base"]))
    setting = (
        f"Base {base}, {config['steps']} steps; a variant has as many steps as take that time, and just as many where "
        "the interval of its step time contains 1. Step time: as a multiple of the base's. TPC (tokens committed in "
        f"decoding, by calls of the target) of a chain of {DEPTH} at temperature 0 over {asked} of "
        f"{code(config['questions'])}, {config['max_tokens']} tokens an answer at most. Gain: TPC above the base's; "
        "its interval is that of other questions, not of other seeds."
    )
    text = "\n\n".join([setting, comparison(found["variants"])])
    return document({"Ablations at equal time": text, "Made on": made_on(found)})


def step_time(found: Found) -> str:
    """A variant's step time as a multiple of the base's."""
    spread = "" if found["interval"] is None else " ({:.2f} to {:.2f})".format(*found["interval"])
    return f"{found['ratio']:.2f}{spread}"


if __name__ == "__main__":
    main()
