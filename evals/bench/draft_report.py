"""The report on a draft: the summary on the terminal, the tables of report.md, and answers.jsonl. Knows nothing of
engines or models.

`found` is what evals/mt_bench.py writes to results.json.
"""

from collections.abc import Callable, Sequence

from eagle_train.artifacts.markdown import code, plain
from eagle_train.results import json_text
from evals.bench.diagnosis import diagnosis
from evals.bench.questions import Question
from evals.bench.report import (
    BY_DEPTH,
    TERMS,
    Found,
    contexts,
    depths,
    document,
    made_on,
    marked,
    ms,
    number,
    of_suite,
    percent,
    sampling,
    several,
    subject,
    table,
    warnings,
    with_interval,
)
from evals.bench.statistics import Answer

LONGEST_NAME = 60  # characters of a category in a table

BRACKETS = "In brackets: 95 % intervals, by bootstrap: of TPC over the questions, of speed-ups over the batches."
CONTEXT = (
    "The context of a round: the tokens before it, prompt and answer so far. The questions of one bucket need not be "
    "those of the next, unless `context_lengths` asks the same ones at each."
)
ENDS = {
    "stop": "at a stop",
    "length": "at max_tokens",
    "context": "at the end of the target's context",
    "overflow": "where the target computed NaN",
}


def summary(found: Found) -> str:
    """A few lines for the terminal."""
    setting = f"{found['tree']}, {sampling(found['config'])}, {several(found['prompts'], 'prompt')}"
    lines = [
        f"TPC {found['tpc']:.2f} ({setting}; repeated 8-grams {percent(found['repeated_8grams'])})",
        f"acceptance by depth {depths(found['acceptance_per_depth'])}",
        f"speed-up over plain decoding {found['speedup']:.2f} (median of batches {found['speedup_batch_median']:.2f})",
        f"TTFT {ms(found['ttft_s'])} (plain {ms(found['plain_ttft_s'])})",
        f"TTIT {ms(found['ttit_s'])}, p50 {ms(found['ttit_p50_s'])}, p99 {ms(found['ttit_p99_s'])} "
        f"(plain {ms(found['plain_ttit_s'])})",
    ]
    if found["differing_answers"] is not None:
        lines.append(
            f"answers that differ from plain decoding's: {found['differing_answers']:,} of {found['prompts']:,}"
        )
    return "\n".join([*lines, *warnings(found)])


def markdown(found: Found) -> str:
    """report.md: what was measured, in tables, and a diagnosis of the draft."""
    config = found["config"]
    quant = "" if found["quant"] in (None, "none") else f", {found['quant']}"
    setting = (
        f"{subject(found)}{quant}; {found['tree']}; {sampling(config)}; batches of "
        f"{found['batch_size']}; {several(found['questions'], 'question')} of {code(found['asked'])}, "
        f"{several(found['prompts'], 'prompt')}."
    )
    setting += f" {several(found['too_long'], 'more question')} too long." if found["too_long"] else ""
    setting += f"\n\n{of_suite(found['suite'])}" if found["suite"] else ""
    sections = {
        marked(f"TPC {found['tpc']:.2f}, {found['speedup']:.2f} times as fast as plain decoding", found): setting,
        "Headline": headline(found),
        "By category and turn": f"{by_category_and_turn(found['per_category_and_turn'])}\n\n{BRACKETS}",
        "Acceptance by depth": by_depth(found),
        "By context": f"{contexts(found['by_context'])}\n\n{CONTEXT}",
        "Time by stage": by_stage(found),
    }
    if findings := diagnosis(found):
        sections["What it says about the draft"] = "\n".join(f"- {finding}" for finding in findings)
    return document({**sections, "Made on": made_on(found)})


def headline(found: Found) -> str:
    """Speculative against plain decoding."""
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
    ends = ", ".join(f"{count:,} {ENDS.get(end, end)}" for end, count in sorted(found["finish_reasons"].items()))
    notes = [
        TERMS,
        f"{found['tokens']:,} tokens decoded in {found['calls']:,} target calls, the prefill's token and call not "
        f"counted; {found['mean_answer_tokens']:.1f} tokens an answer. Answers ended: {ends}.",
        f"Repeated 8-grams in the answers: {repeated}. A target that repeats itself makes TPC cheap.",
    ]
    if differing is not None:
        notes.append(f"Answers whose tokens differ from plain decoding's: {differing:,} of {found['prompts']:,}.")
    return "\n\n".join([table(["", "speculative", "plain"], rows), *notes])


def by_category_and_turn(groups: Sequence[Found]) -> str:
    """A row per category and one for all prompts; a column per turn and one for all."""
    turns = list(dict.fromkeys(group["turn"] for group in groups))
    turns = turns if len(turns) > 2 else [None]  # with one turn, all turns are that one
    rows, counted = [], {}
    categories = list(dict.fromkeys(group["category"] for group in groups))
    total = "all prompts" if "all" in categories else "all"
    for category in categories:
        of_turn = {group["turn"]: group for group in groups if group["category"] == category}
        every = of_turn[None]
        values = [with_interval(of_turn[turn]["tpc"], of_turn[turn]["tpc_interval"]) for turn in turns]
        name = total if category is None else plain(category, LONGEST_NAME)
        gain = with_interval(every["speedup"], every["speedup_interval"])
        rows.append([name, f"{every['prompts']:,}", *values, depths(every["acceptance_per_depth"]), gain])
        counted[category] = every["prompts"]
    names = ["TPC" if turn is None else f"TPC, turn {turn}" for turn in turns]
    text = table(["category", "prompts", *names, BY_DEPTH, "speed-up"], rows)
    without = counted.pop(None) - sum(counted.values())
    return text + (f"\n\n{without:,} of the prompts have no category." if counted and without > 0 else "")


def by_depth(found: Found) -> str:
    """With trees of several depths, each depth counts other rounds, so there is no column that compares with the one
    before."""
    shares, given = found["acceptance_per_depth"], found["acceptance_after_depth_before"]
    if not shares:
        return "No round had drafts: they were not expected to pay."
    header, rows = ["depth", "accepted, of rounds that draft to this depth"], [[percent(share)] for share in shares]
    if given is not None:
        header.append("of rounds that accepted the depth before")
        rows = [[*row, percent(share)] for row, share in zip(rows, given, strict=True)]
    rows = [[str(depth), *row] for depth, row in enumerate(rows, 1)]
    return f"{table(header, rows)}\n\n![Acceptance by depth](acceptance.png)"


def by_stage(found: Found) -> str:
    """Milliseconds of each stage in a round."""
    stages, plain = found["stage_ms_per_round"], found["plain_stage_ms_per_round"]
    rows = [[stage, number(value, 3), number(plain.get(stage), 3)] for stage, value in stages.items()]
    rows.append(["all of a round", number(sum(stages.values()), 3), number(sum(plain.values()), 3)])
    prefill = [number(found[key], 3) for key in ("prefill_ms_per_batch", "plain_prefill_ms_per_batch")]
    text = table(["stage, ms a round", "speculative", "plain"], [*rows, ["prefill, ms a batch", *prefill]])
    note = "\n\nOf a separate batch, in which the GPU is waited for around each stage; TTIT is of rounds without waits."
    return text + (note if found["device"] != "cpu" else "")


def answer_rows(plain: list[Answer], answers: list[Answer], prompt_of: Callable[[Question, int], str]) -> str:
    """answers.jsonl: a line per turn. `prompt_of`: what tells a question's turn from those of other texts."""
    rows = [
        {
            "question_id": answer.question.id,
            "line": answer.question.line,  # of the file: by it, turns and contexts of a question are one
            "category": answer.question.category,
            "turn": answer.turn,
            "prompt": prompt_of(answer.question, answer.turn),
            "answer": answer.output.text,
            "tokens": answer.output.stats.tokens,
            "calls": answer.output.stats.calls,
            "decode_s": sum(answer.output.stats.intervals_s),
            "plain_tokens": other.output.stats.tokens,
            "plain_decode_s": sum(other.output.stats.intervals_s),
            "finish_reason": answer.output.finish_reason,
            "same_as_plain": answer.output.token_ids == other.output.token_ids,
        }
        for answer, other in zip(answers, plain, strict=True)
    ]
    return "".join(json_text(row, ensure_ascii=False) + "\n" for row in rows)
