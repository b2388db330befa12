"""Published figures to stand beside ours: the paper's tables, and what peers publish. Each with target and machine.

"The paper" is *Efficient Speculative Decoding for Llama at Scale* (Meta, 2025); of its figures 1, 4, 8 and 9 only what
its text gives as a number is here, as the rest are pictures. Knows nothing of our results.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from evals.bench.page.blocks import Table

CAVEAT = "published ones are of other targets on other machines"
SPEC_BENCH = "Vicuna 7B, A100, all of Spec-Bench, batch size 1"


@dataclass(frozen=True)
class Published:
    """A figure: whose drafts, of which target and on what, with how many drafted tokens, and where it stands."""

    what: str
    target: str
    drafted: int | None
    value: float
    source: str


TPC = (
    Published("EAGLE, 3 layers", "Llama 3.1 8B, MT-Bench", 3, 2.78, "paper, table 1"),
    Published("EAGLE, 3 layers", "Llama 3.3 70B, MT-Bench", 3, 2.94, "paper, table 1"),
    Published("EAGLE, 3 layers", "Llama 4 Scout, MT-Bench", 3, 2.87, "paper, table 1"),
    Published("EAGLE, 3 layers", "Llama 4 Maverick, MT-Bench", 3, 2.75, "paper, table 1"),
    Published("EAGLE, 2 layers", "Llama 4 Scout, MT-Bench", 3, 2.80, "paper, figure 3b"),
    Published("EAGLE in vLLM", "Llama 3.1 8B, MT-Bench", 3, 2.29, "paper, table 1"),
    Published("EAGLE in vLLM", "Llama 3.1 8B, MT-Bench", 5, 2.44, "paper, table 1"),
    Published("EAGLE in vLLM", "Llama 3.1 8B, MT-Bench", 7, 2.47, "paper, table 1"),
    Published("EAGLE-3 in vLLM", "Llama 3.1 8B, MT-Bench", 3, 2.80, "paper, table 1"),
    Published("EAGLE-3 in vLLM", "Llama 3.1 8B, MT-Bench", 5, 3.32, "paper, table 1"),
    Published("EAGLE-3 in vLLM", "Llama 3.1 8B, MT-Bench", 7, 3.57, "paper, table 1"),
    Published("EAGLE-3 in vLLM", "Llama 3.3 70B, MT-Bench", 3, 2.64, "paper, table 1"),
    Published("SpecBundle EAGLE-3, prefill counted", "Llama 3.1 8B, MT-Bench, H200", 3, 2.93, "SpecForge"),
    Published("SpecBundle EAGLE-3, prefill counted", "Llama 3.1 8B, MT-Bench, H200", 5, 3.55, "SpecForge"),
    Published("SpecBundle EAGLE-3, prefill counted", "Llama 3.1 8B, MT-Bench, H200", 7, 3.91, "SpecForge"),
)
SPEEDUP = (
    Published("EAGLE-2", SPEC_BENCH, None, 2.36, "Spec-Bench"),
    Published("EAGLE-1", SPEC_BENCH, None, 2.10, "Spec-Bench"),
    Published("Medusa", SPEC_BENCH, None, 1.71, "Spec-Bench"),
    Published("prompt lookup", SPEC_BENCH, None, 1.66, "Spec-Bench"),
    Published("draft model", SPEC_BENCH, None, 1.52, "Spec-Bench"),
    Published("REST (retrieval)", SPEC_BENCH, None, 1.48, "Spec-Bench"),
    Published("Lookahead", SPEC_BENCH, None, 1.34, "Spec-Bench"),
    Published("EAGLE in vLLM, TTIT", "Llama 3.1 8B, MT-Bench, batch size 1", 3, 1.65, "vLLM: 7.07 to 4.29 ms"),
    Published("SpecBundle EAGLE-3", "Llama 3.1 8B, H200, MT-Bench, batch size 1", 3, 2.18, "SpecForge"),
    Published("EAGLE, large batches, least", "Llama models, H100s", 3, 1.4, "paper, abstract"),
    Published("EAGLE, large batches, most", "Llama models, H100s", 3, 2.0, "paper, abstract"),
)
# TPC and drafting latency of bf16, FP8 and INT4 feed-forwards, latency relative to bf16's.
QUANTISED = (
    ("Llama 3.1 8B", (2.79, 2.79, 2.76), (1.00, 0.93, 0.96)),
    ("Llama 3.3 70B", (2.95, 2.95, 2.96), (1.00, 0.89, 0.83)),
    ("Llama 4 Scout", (2.86, 2.86, 2.87), (1.00, 0.89, 0.87)),
    ("Llama 4 Maverick", (2.81, 2.79, 2.78), (1.00, 0.93, 0.92)),
)
STEP = (
    Published("AutoModel EAGLE-1, s for 8 x 512 tokens", "12 x 512, 32k vocabulary, AVX2", None, 4.75, "measured"),
    Published("AutoModel EAGLE-1, s for 8 x 512 tokens", "12 x 512, 4k vocabulary, AVX2", None, 1.95, "measured"),
    Published("SpecForge Domino, MFU in %", "8 x H200", None, 44.0, "SpecForge"),
)


def beside(title: str, ours: Iterable[tuple[str, str, float]], published: Iterable[Published]) -> Table:
    """Our figures (what, target, value) and then published ones, which the caption marks as such."""
    rows = [[what, target, f"{value:.2f}", "this report"] for what, target, value in ours]
    rows += [[each.what, each.target, f"{each.value:.2f}", each.source] for each in published]
    return Table(f"{title} ({CAVEAT})", ["what", "target and machine", "value", "where from"], rows, texts=True)


def of_drafted(drafted: int | None) -> list[Published]:
    """Published TPC with chains of so many tokens."""
    return [each for each in TPC if each.drafted == drafted]


def quantised() -> Table:
    """The paper's table 2."""
    header = ["target", *(f"{name}, {of}" for of in ("TPC", "relative latency") for name in ("bf16", "FP8", "INT4"))]
    rows = [[name, *(f"{value:.2f}" for value in (*tpc, *latency))] for name, tpc, latency in QUANTISED]
    return Table("The paper's table 2 (other targets, other machines)", header, rows)
