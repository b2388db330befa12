"""How a diagnosis is told: a few lines for the terminal, report.md and results.json.

Knows nothing of how it was made.
"""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle_train.artifacts.markdown import code, plain, table
from eagle_train.diagnosis.causes import Finding
from eagle_train.diagnosis.run import Diagnosis
from eagle_train.results import provenance, redact, write_json, write_text

_MOST_LINES = 24
_MOST_CHANGES = 12  # of the ablations, in the report
_LITTLE = 0.5  # acceptance at depth 1 below which a healthy draft is said to have room


def write_diagnosis(out: Path, found: Diagnosis, config: Any) -> None:
    """report.md and results.json in `out`, each whole or not there. `config`: as it was composed."""
    write_json(
        out / "results.json",
        {
            "evaluation": "doctor",  # by which evals.report knows it
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "healthy": found.is_healthy,
            "verdict": verdict(found),
            "problems": [{**asdict(each), "title": each.title, "remedy": each.remedy} for each in found.findings],
            "not_checked": [asdict(each) for each in found.not_checked],
            **found.figures,
            "config": redact(config),
            "provenance": provenance(),
        },
    )
    write_text(out / "report.md", report(found, str(config["draft"]["path"])))


def summary(found: Diagnosis) -> str:
    """For the terminal, at most 24 lines."""
    lines = [verdict(found), *_worth(found)]
    for number, finding in enumerate(found.findings, 1):
        lines += [f"{number}. {finding.title}.{_cost(finding)}", f"   {finding.measured}", f"   do: {finding.remedy}"]
    lines += [f"not checked: {each.check}: {each.reason}" for each in found.not_checked]
    return "\n".join(lines[:_MOST_LINES])


def verdict(found: Diagnosis) -> str:
    if found.is_healthy:
        return "healthy: nothing was found"
    count = len(found.findings)
    if count == 0:
        return "nothing was found, but a check failed"
    return "1 problem" if count == 1 else f"{count} problems, the most serious first"


def report(found: Diagnosis, draft: str) -> str:
    """report.md."""
    parts = [f"# {verdict(found).capitalize()}", f"Draft {code(draft)}. " + " ".join(_worth(found))]
    for number, finding in enumerate(found.findings, 1):
        told = f"{plain(finding.measured)}{_cost(finding)}\n\nWhat to do: {plain(finding.remedy)}."
        parts.append(f"## {number}. {finding.title}\n\n{told}")
    if found.not_checked:
        rows = [[plain(each.check), plain(each.reason)] for each in found.not_checked]
        parts.append("## Not checked\n\n" + table(["", "why"], rows))
    if changes := found.figures.get("changes"):
        parts.append("## What each change of a convention gains\n\n" + _changes(changes))
    return "\n\n".join(parts) + "\n"


def _worth(found: Diagnosis) -> Iterator[str]:
    """What the draft is worth."""
    figures = found.figures
    if "after_every_token" not in figures:
        return
    asked = f"contexts of up to {figures['longest_context']} tokens were asked"
    if figures["tpc"] is not None:
        of = "; ".join(filter(None, ("TPC", _interval(figures["tpc_interval"]))))
        yield f"{figures['tpc']:.2f} tokens per call ({of}) over {figures['prompts']} answers; {asked}."
    else:
        yield f"{asked.capitalize()}."
    of = _interval(figures["after_every_token_interval"])
    depths = ", ".join(f"{each:.2f}" for each in figures["acceptance_per_depth"])
    yield (
        f"1 + drafts accepted after every token: {figures['after_every_token']:.2f}{f' ({of})' if of else ''} over "
        f"{figures['tokens']} tokens; acceptance by depth {depths}."
    )
    if "after_every_token_as_trained" in figures:
        yield f"As trained it has {figures['after_every_token_as_trained']:.2f} after every token."
    same = figures["rounds"] - figures["rounds_that_differ"]
    yield f"Engine and training graph agree in {same} of {figures['rounds']} rounds."
    first = figures["acceptance_per_depth"][0]
    if found.is_healthy and first < _LITTLE:
        yield f"At depth 1 {first:.2f} is little: what is left is longer training, or more layers."


def _interval(bounds: list[float] | None) -> str:
    """Empty where the prompts were too few for one."""
    return "" if bounds is None else f"99 % interval {bounds[0]:.2f} to {bounds[1]:.2f}"


def _cost(finding: Finding) -> str:
    return "" if finding.costs is None else f" It costs {finding.costs:.2f} accepted drafts after every token."


def _changes(rows: list[dict[str, Any]]) -> str:
    best = sorted(rows, key=lambda row: -row["gain"])[:_MOST_CHANGES]
    cells = [[plain(row["change"]), row["cause"], f"{row['tokens']:.2f}", f"{row['gain']:+.2f}"] for row in best]
    return table(["change", "cause", "accepted tokens", "gain"], cells, rule="---:")
