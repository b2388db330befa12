"""How figures are shown: the summary on the terminal, report.md and the plot. Knows nothing of engines or models.

`found` is what an evaluation puts into results.json, see `mt_bench.measured`.
"""

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eagle_train.artifacts import markdown as md
from eagle_train.artifacts.markdown import code, plain
from eagle_train.results import write_bytes

Found = Mapping[str, Any]

# Below or above these a figure is worth a sentence in the diagnosis. They are rules of thumb, not measurements.
LOW_DEPTH_1 = 0.7
SERVING_GAP = 0.02
POLICY_GAP = 0.05
FEATURE_DROP = 0.05
DRAFTING_SHARE = 0.5
REPEATED = 0.1

LONGEST_NAME = 60  # characters of a category in a table

ENDS = {
    "stop": "at a stop",
    "length": "at max_tokens",
    "context": "at the end of the target's context",
    "overflow": "where the target computed NaN",
}
TERMS = (
    "TPC: tokens committed in decoding, by calls of the target. TTFT: time to the first token. TTIT: time between one "
    "token and the next; tokens of one round come together, so that p50 may be far below the mean."
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown texts; the first column is text, the others numbers."""
    return md.table(header, rows, rule="---:")


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def change(value: float, digits: int = 1) -> str:
    """A difference as a share, with its sign; nothing is neither more nor less."""
    text = f"{100 * value:+.{digits}f}"
    return f"{text[1:] if float(text) == 0 else text} %"


def several(count: int, of: str, ending: str = "s") -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count:,} {of}" + ("" if count == 1 else ending)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def summary(found: Found) -> str:
    """A few lines for the terminal."""
    setting = f"{found['tree']}, {sampling(found['config'])}, {several(found['prompts'], 'prompt')}"
    lines = [
        f"TPC {found['tpc']:.2f} ({setting}; repeated 8-grams {percent(found['repeated_8grams'])})",
        f"acceptance by depth {' '.join(number(share) for share in found['acceptance_per_depth'])}",
        f"speed-up over plain decoding {found['speedup']:.2f} (median of batches {found['speedup_batch_median']:.2f})",
        f"TTFT {ms(found['ttft_s'])} (plain {ms(found['plain_ttft_s'])})",
        f"TTIT {ms(found['ttit_s'])}, p50 {ms(found['ttit_p50_s'])}, p99 {ms(found['ttit_p99_s'])} "
        f"(plain {ms(found['plain_ttit_s'])})",
    ]
    if found["differing_answers"] is not None:
        lines.append(f"answers that differ from plain decoding's: {found['differing_answers']} of {found['prompts']}")
    return "\n".join(lines)


def markdown(found: Found) -> str:
    """report.md: what was measured, in tables, and what it says about the draft."""
    config = found["config"]
    quant = "" if found["quant"] == "none" else f", {found['quant']}"
    setting = (
        f"{subject(found)}{quant}; {found['tree']}; {sampling(config)}; batches of "
        f"{found['batch_size']}; {several(found['questions'], 'question')} of {code(config['questions'])}, "
        f"{several(found['prompts'], 'prompt')}."
    )
    sections = {
        f"TPC {found['tpc']:.2f}, {found['speedup']:.2f} times as fast as plain decoding": setting,
        "Headline": headline(found),
        "By category and turn": by_category_and_turn(found["per_category_and_turn"]),
        "Acceptance by depth": by_depth(found),
        "Time by stage": by_stage(found),
        "What it says about the draft": "\n".join(f"- {finding}" for finding in diagnosis(found)),
        "Made on": made_on(found),
    }
    parts = [f"{'##' if place else '#'} {title}\n\n{text}" for place, (title, text) in enumerate(sections.items())]
    return "\n\n".join(parts) + "\n"


def subject(found: Found) -> str:
    """What was measured, and where."""
    target, draft = code(found["target"]), code(found["config"]["draft"]["path"])
    return f"Target {target}, {found['dtype']} on {found['device']}; draft {draft}"


def sampling(config: Found) -> str:
    """How tokens are chosen, in a few words."""
    if config["temperature"] == 0:
        return "temperature 0"
    parts = [f"temperature {config['temperature']:g}", f"top-p {config['top_p']:g}"]
    parts += [f"top-k {config['top_k']}"] if config["top_k"] else []
    drafting = config.get("drafting", "greedy")
    return ", ".join(parts if drafting == "greedy" else [*parts, f"{drafting.replace('_', ' ')} drafts"])


def headline(found: Found) -> str:
    rows = [["tokens per call (TPC)", number(found["tpc"]), "1.00"]]
    for name, key in (("TTIT", "ttit"), ("TTFT", "ttft")):
        for kind, suffix in (("mean", "s"), ("p50", "p50_s"), ("p99", "p99_s")):
            column = f"{key}_{suffix}"
            rows.append([f"{name}, {kind}", ms(found[column]), ms(found[f"plain_{column}"])])
    rows += [
        ["speed-up, of the mean TTIT", number(found["speedup"]), "1.00"],
        ["speed-up, median of the batches'", number(found["speedup_batch_median"]), "1.00"],
    ]
    differing, repeated = found["differing_answers"], percent(found["repeated_8grams"])
    ends = ", ".join(f"{count} {ENDS.get(end, end)}" for end, count in sorted(found["finish_reasons"].items()))
    notes = [
        TERMS,
        f"{found['tokens']:,} tokens decoded in {found['calls']:,} target calls, the prefill's token and call not "
        f"counted; {found['mean_answer_tokens']:.1f} tokens an answer. Answers ended: {ends}.",
        f"Repeated 8-grams in the answers: {repeated}. A target that repeats itself makes TPC cheap.",
    ]
    if differing is not None:
        notes.append(f"Answers whose tokens differ from plain decoding's: {differing} of {found['prompts']}.")
    return "\n\n".join([table(["", "speculative", "plain"], rows), *notes])


def by_category_and_turn(groups: Sequence[Found]) -> str:
    """A row a category and one for all prompts; a column a turn and one for all."""
    turns = list(dict.fromkeys(group["turn"] for group in groups))
    turns = turns if len(turns) > 2 else [None]  # with one turn, all turns are that one
    rows, counted = [], {}
    categories = list(dict.fromkeys(group["category"] for group in groups))
    total = "all prompts" if "all" in categories else "all"
    for category in categories:
        of_turn = {group["turn"]: group for group in groups if group["category"] == category}
        every = of_turn[None]
        shares = " ".join(number(share) for share in every["acceptance_per_depth"])
        values = [number(of_turn[turn]["tpc"]) for turn in turns]
        name = total if category is None else plain(category, LONGEST_NAME)
        rows.append([name, str(every["prompts"]), *values, shares])
        counted[category] = every["prompts"]
    names = ["TPC" if turn is None else f"TPC, turn {turn}" for turn in turns]
    text = table(["category", "prompts", *names, "acceptance by depth"], rows)
    without = counted.pop(None) - sum(counted.values())
    return text + (f"\n\n{without} of the prompts have no category." if counted and without > 0 else "")


def by_depth(found: Found) -> str:
    """Trees of several depths have other rounds at each, of which none can be said to follow on the depth before."""
    shares, given = found["acceptance_per_depth"], found["acceptance_after_depth_before"]
    header, rows = ["depth", "accepted, of rounds that draft to this depth"], [[percent(share)] for share in shares]
    if given is not None:
        header.append("of rounds that accepted the depth before")
        rows = [[*row, percent(share)] for row, share in zip(rows, given, strict=True)]
    rows = [[str(depth), *row] for depth, row in enumerate(rows, 1)]
    return f"{table(header, rows)}\n\n![Acceptance by depth](acceptance.png)"


def by_stage(found: Found) -> str:
    stages, plain = found["stage_ms_per_round"], found["plain_stage_ms_per_round"]
    rows = [[stage, number(value, 3), number(plain.get(stage), 3)] for stage, value in stages.items()]
    rows.append(["all of a round", number(sum(stages.values()), 3), number(sum(plain.values()), 3)])
    prefill = [number(found[key], 3) for key in ("prefill_ms_per_batch", "plain_prefill_ms_per_batch")]
    text = table(["stage, ms a round", "speculative", "plain"], [*rows, ["prefill, ms a batch", *prefill]])
    apart = "\n\nOf a batch of its own, in which the GPU is waited for around each stage; TTIT is of rounds left alone."
    return text + (apart if found["device"] != "cpu" else "")


def diagnosis(found: Found) -> list[str]:
    """What the figures say about the draft, in sentences; where nothing stands out, just that."""
    check, shares, findings = found["train_serve_check"], found["acceptance_per_depth"], []
    served, trained = check["depth_1_served"], check["depth_1_as_trained"]
    own, reference = check["agreement_on_own_answers"], check["agreement_on_reference_answers"]
    if trained is None:
        findings.append(
            "Train/serve check: left out, as the root has more children at one batch size than at another, or drafts "
            "are drawn; try batch_size=1, or one tree for all, and drafting=greedy."
        )
    else:
        agree = abs(served - trained) <= SERVING_GAP
        said = "Both ways agree." if agree else "They disagree: look for positions, norms or hidden states that differ."
        findings.append(
            f"Train/serve check: the target took the first drafted token in {percent(served)} of the rounds; run over "
            f"the same tokens as in training, the draft proposes it in {percent(trained)}. {said}"
        )
    policy = f"Draft and target choose the same next token at {percent(own)} of the tokens of the target's own answers"
    if reference is None:
        findings.append(f"{policy}.")
    else:
        findings.append(f"{policy}, and at {percent(reference)} of those of the file's answers.")
    if reference is not None and reference - own > POLICY_GAP:
        findings.append("The draft knows the file's text better than the target's: train it on the target's answers.")
    if shares[0] < LOW_DEPTH_1:
        tokens = found["draft_training"].get("tokens")
        seen = f"; its artifact says it was trained on {tokens:,} tokens" if tokens else ""
        findings.append(
            f"Depth 1 is drafted from the target's own hidden states, so {percent(shares[0])} is what the draft itself "
            f"has learnt{seen}. Train it longer, on conversations like these under the same chat template."
        )
    second = (found["acceptance_after_depth_before"] or [])[1:2]
    if second and second[0] is not None and shares[0] - second[0] > FEATURE_DROP:
        findings.append(
            f"From depth 2 on the draft reads its own hidden states, and acceptance falls from {percent(shares[0])} to "
            f"{percent(second[0])}: its features drift. Train it on its own features too."
        )
    return findings + cost_findings(found) + answer_findings(found)


def cost_findings(found: Found) -> list[str]:
    """Why time falls behind tokens per call."""
    stages = found["stage_ms_per_round"]
    share = stages["drafting"] / sum(stages.values())
    findings = []
    if found["speedup"] < 1:
        findings.append("Speculation makes this target slower here: a round costs more than the tokens it saves.")
    if share > DRAFTING_SHARE:
        findings.append(f"Drafting is {percent(share)} of a round: a shorter chain or fewer layers may be faster.")
    return findings


def answer_findings(found: Found) -> list[str]:
    """What makes the figures themselves doubtful."""
    findings = []
    if found["repeated_8grams"] > REPEATED:
        findings.append("The target repeats itself, so this TPC says little about text that does not.")
    if found["differing_answers"]:
        cause = "which fp32 should not bring about" if found["dtype"] == "float32" else f"rounding in {found['dtype']}"
        findings.append(f"{found['differing_answers']} answers differ from plain decoding's: {cause}.")
    if found["finish_reasons"].get("context"):
        findings.append(f"{found['finish_reasons']['context']} answers were cut short by the target's context.")
    if found["finish_reasons"].get("overflow"):
        findings.append(f"{found['finish_reasons']['overflow']} answers ended because the target computed NaN.")
    return findings


def made_on(found: Found) -> str:
    rows = {**found["provenance"], "seed": found["config"].get("seed")}
    rows["load_average"] = " ".join(map(str, rows["load_average"]))
    told = [[name.replace("_", " "), plain(str(value))] for name, value in rows.items() if value is not None]
    return md.table(["", ""], told)


def plot_acceptance(found: Found, path: Path) -> None:
    """Acceptance by depth as a PNG, whole or not there."""
    figure, picture = figure_of(found["acceptance_per_depth"], found["acceptance_after_depth_before"]), BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_bytes(path, picture.getvalue())


def figure_of(shares: Sequence[float], given: Sequence[float | None] | None) -> Figure:
    """Acceptance by depth, of all rounds and, where it is known, of those that accepted the depth before."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    depths = range(1, len(shares) + 1)
    hollow = {"markersize": 9, "markerfacecolor": "none"}  # around the other's mark where both are the same
    given = given if len(shares) > 1 else None  # before depth 1 there is no other
    for values, style, look, name in (
        (shares, "o-", {}, "of rounds that draft to this depth"),
        (given or [], "s--", hollow, "of rounds that accepted the depth before"),
    ):
        heights = [float("nan") if value is None else value for value in values]
        if heights:
            axes.plot(depths, heights, style, label=name, clip_on=False, **look)
    axes.set(xlabel="depth in the tree", ylabel="share accepted", ylim=(0, 1), xlim=(0.7, len(shares) + 0.3))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # Outside the axes, one name a line: no curve runs through it, and it is as wide as the picture at most.
    figure.legend(frameon=False, loc="outside upper left", fontsize="small", ncols=1)
    return figure
