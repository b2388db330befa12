"""The report of an experiment: tables of TPC, gains and speed-ups.

Knows nothing of engines or models.
"""

from collections.abc import Mapping

from eagle_train.artifacts.markdown import code, plain
from evals.bench.report import Found, contexts_beside, document, made_on, number, sampled, sampling, table
from evals.bench.statistics import interval_of
from evals.bench.study import part_title


def markdown(found: Found) -> str:
    """report.md."""
    sections = {f"Experiment {found['config']['study']['name']}": setting(found)}
    for part in found["parts"]:
        sections[part_title(part)] = "\n\n".join([runs_table(found, part), *part_tables(found, part), along(part)])
    if found["speedups"] is not None:
        sections["Speed-up over plain decoding"] = "\n\n".join([speed_note(found), speed_table(found["speedups"])])
    return document(sections | {"Made on": made_on(found)})


def setting(found: Found) -> str:
    """What was asked, in words."""
    config = found["config"]
    study = config["study"]
    asked = "all questions" if config["limit"] is None else f"{config['limit']} questions"
    time = (
        " At equal time a variant makes as many steps as take the reference's time, by the ratio of the times of a "
        "step, which were measured in turn; and just as many where the interval of that ratio contains 1."
    )
    drafts = (
        code(" ".join(study["base"]))
        if config["draft"]["path"] is None
        else f"the draft {code(config['draft']['path'])}"
    )
    return (
        f"All variants: {drafts}. Reference: {plain(study['reference'])}."
        f"{time if 'time' in study['equal'] else ''} TPC (tokens committed in decoding, by calls of the target) over "
        f"{asked} of {code(config['questions'])}, {config['max_tokens']} tokens an answer at most; {sampling(config)} "
        "unless a variant says otherwise. "
        "Intervals are of 95 %, by bootstrap over questions and over seeds; with few seeds they say little of other "
        "seeds."
    )


def runs_table(found: Found, part: Found) -> str:
    """What each variant is and how long it was trained."""
    rows = []
    for name, one in part["variants"].items():
        said = " ".join([plain(name), *map(code, of_variant(found["config"]["study"], name))])
        step = step_time(found["timings"][name]) if name in found["timings"] else ""
        tokens = "" if one["tokens"] is None else f"{one['tokens'] / 1e6:.2f}"
        rows.append([said, f"{one['parameters'] / 1e6:.1f}", step, str(one["steps"]), tokens, str(len(one["seeds"]))])
    return table(["variant", "M parameters", "step time (95 %)", "steps", "M tokens", "seeds"], rows)


def of_variant(study: Found, name: str) -> list[str]:
    """What makes a variant: its overrides of eagle-train, and how it decodes."""
    decoding = study["decoding"].get(name)
    if decoding is None:
        return list(study["variants"][name])
    keys = [*sampled(decoding), "alignment"]
    if decoding["temperature"] > 0:
        keys = ["temperature", *sampled(decoding), "drafting", "alignment"]
    own = [f"{key}={decoding[key]}" for key in keys]
    return [*study["variants"][name], *own, f"quant={decoding['quant']['scheme']} ({decoding['quant']['scope']})"]


def part_tables(found: Found, part: Found) -> list[str]:
    """TPC, and its gain over the reference and over the first tree, where there are others."""
    return [text for text in (tpc_table(part), gains_table(found, part), trees_table(part)) if text]


def tpc_table(part: Found) -> str:
    """TPC by variant and tree."""
    return _by_tree(
        part, f"TPC, {part_title(part)}", {name: one["tpc"] for name, one in part["variants"].items()}, signed=False
    )


def gains_table(found: Found, part: Found) -> str:
    """TPC above the reference's, by variant and tree."""
    reference = found["config"]["study"]["reference"]
    gains = {name: one["gain"] for name, one in part["variants"].items() if name != reference}
    return _by_tree(part, f"TPC above {plain(reference)}, {part_title(part)}", gains, signed=True) if gains else ""


def trees_table(part: Found) -> str:
    """TPC above the same draft's with the first tree."""
    gains = {name: one["gain_over_first_tree"] for name, one in part["variants"].items()}
    first, *others = next(iter(gains.values()))
    return _by_tree(part, f"TPC above {plain(first)}, {part_title(part)}", gains, signed=True) if others else ""


def along(part: Found) -> str:
    """TPC and acceptance by context, with the first tree."""
    tree = next(iter(next(iter(part["variants"].values()))["tpc"]))
    rows = {name: one["by_context"][tree] for name, one in part["variants"].items()}
    return f"With {plain(tree)}, all seeds together:\n\n{contexts_beside(rows)}"


def _by_tree(part: Found, title: str, figures: Mapping[str, Mapping[str, Found]], signed: bool) -> str:
    trees = list(next(iter(part["variants"].values()))["tpc"])
    sign = "+" if signed else ""
    rows = [
        [
            plain(name),
            *(_figure(one[tree], sign) for tree in trees),
        ]
        for name, one in figures.items()
    ]
    return table([title, *map(plain, trees)], rows)


def _figure(found: Found, sign: str) -> str:
    interval = interval_of(found)
    spread = "" if interval is None else f" ({' to '.join(f'{end:{sign}.2f}' for end in interval)})"
    return f"{found['tpc']:{sign}.3f}{spread}"


def speed_note(found: Found) -> str:
    """What the speed-ups are of."""
    config = found["config"]
    part = {"steps": max(config["study"]["steps"]), "equal": config["study"]["equal"][0]}
    seed = "" if config["draft"]["path"] is not None else f", seed {config['seeds'][0]}"
    return (
        f"Single prompts, {config['timed_questions']} questions, plain decoding and all drafts that sample alike in "
        f"turn; {part_title(part)}{seed}."
    )


def speed_table(speedups: Mapping[str, Mapping[str, Found]]) -> str:
    """Speed-up by variant and tree."""
    trees = list(next(iter(speedups.values())))
    rows = [[plain(name), *(_speedup(one[tree]) for tree in trees)] for name, one in speedups.items()]
    return table(["speed-up", *map(plain, trees)], rows)


def _speedup(found: Found | None) -> str:
    if found is None:
        return ""  # its timing could not be right
    spread = "" if found["interval"] is None else " ({:.2f} to {:.2f})".format(*found["interval"])
    return number(found["speedup"]) + spread


def step_time(found: Found) -> str:
    """A variant's step time as a multiple of the reference's."""
    spread = "" if found["interval"] is None else " ({:.2f} to {:.2f})".format(*found["interval"])
    return f"{found['ratio']:.2f}{spread}"
