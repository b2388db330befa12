"""Published figures to stand beside ours: the paper's tables, and what peers publish. Each with target and machine.

"The paper" is *Efficient Speculative Decoding for Llama at Scale* (Meta, 2025); of its figures 1, 4, 8 and 9 only what
its text gives as a number is here, as the rest are pictures. Knows nothing of our results.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from evals.bench.page.blocks import Table

CAVEAT = "published ones are of other targets on other machines"
SPEC_BENCH_ON = "Vicuna 7B, A100"


@dataclass(frozen=True)
class Published:
    """A figure: whose drafts, of which target and on what, with how many drafted tokens (None: not said, or no single
    number), and where it stands."""

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
    Published("SpecBundle EAGLE-3, prefill counted", "Llama 3.1 8B, HumanEval, H200", 7, 4.91, "SpecForge"),
    Published("SpecBundle EAGLE-3", "a target of 70B, MT-Bench", 3, 2.96, "SpecForge"),
    Published("EAGLE-3, temperature 1", "Qwen3 8B, MT-Bench, blocks of 7", 7, 2.66, "DSpark's paper"),
    Published("DFlash, temperature 1", "Qwen3 8B, MT-Bench, blocks of 7", 7, 3.11, "DSpark's paper"),
    Published("DSpark, temperature 1", "Qwen3 8B, MT-Bench, blocks of 7", 7, 3.72, "DSpark's paper"),
    Published("EAGLE-3, tree of 60 nodes", "Llama 3.1 8B, MT-Bench", 60, 6.13, "EAGLE-3's paper"),
    Published("EAGLE-3, tree of 60 nodes, temperature 1", "Llama 3.1 8B, MT-Bench", 60, 4.24, "EAGLE-3's paper"),
)
# Speed-up over all of Spec-Bench and over its MT-Bench, and mean accepted tokens, at batch size 1.
SPEC_BENCH = (
    ("EAGLE-2", 2.36, 2.84, 4.34),
    ("EAGLE-1", 2.10, 2.45, 3.58),
    ("Medusa", 1.71, 1.97, 2.31),
    ("prompt lookup", 1.66, 1.60, 1.75),
    ("draft model", 1.52, 1.66, 2.28),
    ("REST (retrieval)", 1.48, 1.63, 1.82),
    ("Lookahead", 1.34, 1.47, 1.64),
)
SPEEDUP = (
    *(
        Published(what, f"{SPEC_BENCH_ON}, all of Spec-Bench", None, value, "Spec-Bench")
        for what, value, *_ in SPEC_BENCH
    ),
    Published("EAGLE in vLLM, TTIT", "Llama 3.1 8B, MT-Bench, batch size 1", 3, 1.65, "vLLM: 7.07 to 4.29 ms"),
    Published("SpecBundle EAGLE-3", "Llama 3.1 8B, H200, MT-Bench, batch size 1", 3, 2.18, "SpecForge"),
    Published("SpecBundle EAGLE-3, chain of 7", "Llama 3.1 8B, H200, MT-Bench, batch size 1", 7, 2.39, "SpecForge"),
    Published("SGLang, chain of 3", "Llama 3.1 8B, H100, batch size 1", 3, 2.36, "SGLang"),
    Published("EAGLE-4", "a target of 27B", None, 3.42, "EAGLE-4"),
)
SPEEDUP_OF_BATCHES = (
    Published("SGLang, chain of 3", "Llama 3.1 8B, H100, batch size 8", 3, 1.62, "SGLang"),
    Published("SGLang, chain of 3", "Llama 3.1 8B, H100, batch size 32", 3, 1.32, "SGLang"),
    Published("SGLang, chain of 3", "Llama 3.1 8B, H100, batch size 64", 3, 1.38, "SGLang"),
    Published("EAGLE-4", "a target of 27B, batch size 8", None, 2.09, "EAGLE-4"),
    Published("EAGLE-4", "a target of 27B, batch size 64", None, 1.39, "EAGLE-4"),
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
    Published("AutoModel EAGLE-3, tokens/s a GPU, about", "8B, 8 x A100", None, 7000.0, "AutoModel"),
    Published("TorchSpec DFlash, samples/s", "Qwen3 8B, 4 x H100", None, 15.0, "TorchSpec"),
    Published("AutoModel, its fused loss, ms", "8,192 tokens, 32k vocabulary, A100", None, 2.00, "AutoModel"),
    Published("AutoModel, its fused loss, GB", "8,192 tokens, 32k vocabulary, A100", None, 1.05, "AutoModel"),
    Published("speculators, its fused loss, GB", "8,192 tokens, 152k vocabulary", None, 2.3, "speculators"),
)


def beside(title: str, ours: Iterable[tuple[str, str, float]], published: Iterable[Published]) -> Table:
    """Our figures (what, target, value) and then published ones, which the caption marks as such."""
    rows = [[what, target, f"{value:,.2f}", "this report"] for what, target, value in ours]
    rows += [[each.what, each.target, f"{each.value:,.2f}", each.source] for each in published]
    return Table(f"{title} ({CAVEAT})", ["what", "target and machine", "value", "where from"], rows, texts=True)


def of_drafted(drafted: int | None) -> list[Published]:
    """Published TPC with so many drafted tokens."""
    return [each for each in TPC if each.drafted == drafted]


def spec_bench() -> Table:
    """Drafters on Spec-Bench, as it counts."""
    header = ["drafter", "speed-up", "speed-up on MT-Bench", "mean accepted tokens"]
    rows = [[name, *(f"{value:.2f}" for value in values)] for name, *values in SPEC_BENCH]
    return Table(f"Spec-Bench's own figures ({SPEC_BENCH_ON}, batch size 1; another target and machine)", header, rows)


def quantised() -> Table:
    """The paper's table 2."""
    header = ["target", *(f"{name}, {of}" for of in ("TPC", "relative latency") for name in ("bf16", "FP8", "INT4"))]
    rows = [[name, *(f"{value:.2f}" for value in (*tpc, *latency))] for name, tpc, latency in QUANTISED]
    return Table("The paper's table 2 (other targets, other machines)", header, rows)
