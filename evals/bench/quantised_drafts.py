"""Quantised drafts beside one another: their names, the bytes they hold, and the time of their drafting.

Knows nothing of how weights are rounded.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_train.artifacts.format import read_artifact
from eagle_train.artifacts.markdown import plain
from eagle_train.drafts import Draft
from eagle_train.errors import check
from eagle_train.inference import SamplingParams
from eagle_train.models.draft_quantisation import SCHEMES, Quant, misfit
from evals.bench.answering import Run
from evals.bench.questions import Question
from evals.bench.report import BY_DEPTH, change, depths, number, table
from evals.bench.stage_clock import StageClock

LABELS = {"none": "as it is", "fp8": "FP8", "int4": "INT4"}
COLUMNS = ["draft", "TPC", "change", BY_DEPTH, "drafting, ms a round", "relative", "feed-forward, MB"]


@dataclass
class TimedRun(Run):
    """A run with the drafting of each batch of questions: seconds, and rounds that drafted. On a GPU each stage is
    waited for: no other time of the run is reported."""

    drafting: list[tuple[float, int]] = field(default_factory=list)

    def ask(self, questions: Sequence[Question], params: SamplingParams) -> None:
        """As `Run.ask`."""
        clock = StageClock(self.engine)
        with clock.running(forwards=False):
            super().ask(questions, params)
        self.drafting.append((clock.seconds["drafting"], clock.runs["drafting"]))


def unfit(draft: Draft, scope: str) -> dict[str, str]:
    """The schemes that have no product for the draft's shapes, each with the reason. Raises UserError if none has."""
    reasons = {scheme: misfit(draft, Quant(scheme, scope)) for scheme in SCHEMES}
    found = {scheme: reason for scheme, reason in reasons.items() if reason is not None}
    check(len(found) < len(SCHEMES), f"scope={scope}: {' '.join(found.values())}; no scheme fits this draft")
    return found


def export_names(exports: Sequence[str], source: str, draft: str) -> dict[str, str]:
    """The directories of exports by how they were rounded, and by the directory besides where several were rounded
    alike. Raises UserError for an export of another draft."""
    abouts = {path: read_artifact(path) for path in exports}
    for path, about in abouts.items():
        same = about.source == source
        check(same, f"also={path}: made from a draft of fingerprint {about.source}, and draft={draft} is {source}")
        check(about.quant.scheme != "none", f"also={path}: is not quantised; the draft itself is measured anyway")
    names = {path: f"{about.quant}, {about.rounding}" for path, about in abouts.items()}
    alike = Counter(names.values())
    return {name if alike[name] == 1 else f"{name}, {path}": path for path, name in names.items()}


def feed_forward_bytes(draft: Draft) -> int:
    """What the feed-forward parts hold in memory, as they run here."""
    parts = [layer.get_submodule("mlp") for layer in draft.layers]
    tensors = [tensor for mlp in parts for tensor in (*mlp.parameters(), *mlp.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def comparison(schemes: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per scheme."""
    rows = [
        [
            LABELS.get(scheme) or plain(scheme),
            number(found["tpc"], 3),
            change(found["tpc_change"]) + _ends(found["tpc_change_interval"], change),
            depths(found["acceptance_per_depth"]),
            number(found["draft_latency_ms"]),
            number(found["relative_draft_latency"]) + _ends(found["relative_draft_latency_interval"], number),
            number(found["feed_forward_bytes"] / 1e6),
        ]
        for scheme, found in schemes.items()
    ]
    return table(COLUMNS, rows)


def _ends(interval: Sequence[float] | None, told: Callable[[float], str]) -> str:
    return "" if interval is None else f" ({' to '.join(map(told, interval))})"
