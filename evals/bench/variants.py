"""The inference's optimisations as switches: an engine variant with each of them, and one without. Paper section 3.

Knows nothing of statistics.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle_train.inference import Engine, Output, Update
from eagle_train.inference.cache.prefix import BLOCK
from evals.bench import workloads
from evals.bench.answering import serve
from evals.bench.requests import TimedRequest
from evals.bench.workloads import GROUPS, Serve, Workload, WorkloadConfig, serve_static

NO_SWITCH = (
    "Of the paper's optimisations these have no row here: CUDA graphs (3.4) without a GPU; disaggregated prefill (3.3) "
    "and sampling divided over ranks (3.2) on a GPU; rounds without a wait of the host (3.3) and grammar masks applied "
    "on the device (3.4), which every GPU has; the first token's fusion with its own hidden state and iRoPE (3.4), "
    "which need drafts trained so (`evals.experiments`); and paged keys and values (3.4), without which there "
    "is no engine. Disaggregated prefill runs in a second process with as many threads again. Divided sampling has two "
    "processes on both sides, which share the target. First tokens reported after their first round are no mode of the "
    "engine: the side without it has them as early, and their times are moved to the end of that round, so only TTFT "
    "means something in that row."
)


@dataclass(kw_only=True)
class SwitchesConfig(WorkloadConfig):
    """The keys of conf/commands/switches.yaml that say how engines are made."""

    tree: Any
    table: str
    chunk_tokens: int


Options = Callable[[SwitchesConfig, int], Mapping[str, Any]]
"""Fields of `EngineConfig`, and `tree`, that replace the config's; from the config and the batch size."""


def given(**options: Any) -> Options:
    """The same options always."""
    return lambda config, size: options


AS_GIVEN = given()
BRANCHING = "n8"  # a chain is attended to as any text is, by another attention than trees


@dataclass(frozen=True)
class Variant:
    """How an engine is made and given requests.

    `drafts`: whether it has a draft. `quant`: the draft's quantisation. `alignment`: the draft's, None for the
    config's. `serve`: how requests arrive, None as the workload says. `remote_prefill`: a second process reads the
    prompts.
    """

    drafts: bool = True
    options: Options = AS_GIVEN
    quant: str = "none"
    alignment: str | None = None
    serve: Serve | None = None
    remote_prefill: bool = False


def serve_reporting_late(engine: Engine, requests: Sequence[TimedRequest]) -> list[Output]:
    """As `serve`, but a first token counts as reported with the tokens of the round after it, when that has ended."""

    def move_times(updates: list[Update]) -> None:
        now = time.perf_counter()
        for request in (update.request for update in updates):
            if len(request.rounds) <= 1:
                request.stats.ttft_s = now - request.arrival
                request.stats.intervals_s = [0.0] * request.stats.tokens

    return serve(engine, requests, on_step=move_times)


@dataclass(frozen=True)
class Switch:
    """An optimisation, `what`, with the paper's section, and the variants without and with it.

    `workload` and `figure`: what it is for. `device`: the only one that has it, None: any. `ranks`: processes that
    hold the target together; a job of one process starts them on the CPU. `alone`: only a job of one process has it.
    """

    what: str
    off: Variant = Variant()
    on: Variant = Variant()
    workload: Workload = workloads.GREEDY
    figure: str = "ttit"
    device: str | None = None
    ranks: int = 1
    alone: bool = False

    def lack(self, device: str, processes: int) -> str | None:
        """What the switch needs and a job of so many processes on a device does not have; None where it has all."""
        if self.alone and processes > 1:
            return "one process"
        started = processes > 1 and self.ranks > 1  # those that it would start on the CPU are there, on any device
        if self.device in (None, device) or started:
            return None
        return "a GPU" if self.device == "cuda" else "device=cpu"


def one_batch(config: SwitchesConfig, size: int) -> int:
    """Tokens of a batch of prompts of `shared_tokens` and their answers, and a block for each."""
    return size * (config.shared_tokens + config.max_tokens + BLOCK)


PLACEBO = "placebo"  # in every run
SWITCHES = {
    PLACEBO: Switch("nothing: both sides are alike, and their difference is noise"),
    "speculation": Switch("drafts at all", off=Variant(drafts=False)),
    "tree_dispatcher": Switch(
        "a tree for each batch size (3.4)",
        on=Variant(options=lambda config, _: {"tree": {"table": config.table}}),
        workload=workloads.ARRIVALS,
    ),
    "greedy_drafting": Switch(
        "greedy instead of multinomial drafts (3.2)",
        off=Variant(options=given(drafting="multinomial")),
        on=Variant(options=given(drafting="greedy")),
        workload=workloads.SAMPLED,
    ),
    "compiled_forwards": Switch(
        "forwards compiled", off=Variant(options=given(compile=False)), on=Variant(options=given(compile=True))
    ),
    "cuda_graphs": Switch(
        "rounds as CUDA graphs (3.4)",
        off=Variant(options=given(graphs=False)),
        on=Variant(options=given(graphs=True)),
        device="cuda",
        alone=True,
    ),
    "compiled_sampling": Switch(
        "verification compiled (3.2)",
        off=Variant(options=given(compile_sampling=False)),
        on=Variant(options=given(compile_sampling=True)),
        workload=workloads.SAMPLED,
    ),
    "last_alignment": Switch(
        "the draft's cache aligned by the last token alone (3.4)",
        off=Variant(alignment="accepted"),
        on=Variant(alignment="last"),
    ),
    "int4_draft": Switch("the draft's feed-forward in INT4 (3.4)", on=Variant(quant="int4")),
    "fp8_draft": Switch("the draft's feed-forward in FP8 (3.4)", on=Variant(quant="fp8")),
    "int4_lm_head": Switch("drafting with an LM head in INT4", on=Variant(options=given(draft_lm_head="int4"))),
    "fp8_lm_head": Switch("drafting with an LM head in FP8", on=Variant(options=given(draft_lm_head="fp8"))),
    "split_attention": Switch(
        "prefix and tree attended apart, with tree n8 (3.1)",
        off=Variant(options=given(tree=BRANCHING, tree_attention="joint")),
        on=Variant(options=given(tree=BRANCHING, tree_attention="split")),
        workload=workloads.LONG,
    ),
    "attention_kernel": Switch(
        "the device's attention kernel (3.4)",
        off=Variant(options=given(attention="plain")),
        on=Variant(options=given(attention="auto")),
    ),
    "fast_linear": Switch(
        "a CPU's products for decoding",
        off=Variant(options=given(linear="plain")),
        on=Variant(options=given(linear="auto")),
        device="cpu",
    ),
    "argmax_kernel": Switch(
        "a GPU's kernel for the most likely token of greedy drafts",
        off=Variant(options=given(linear="plain")),
        on=Variant(options=given(linear="auto")),
        device="cuda",
    ),
    "guided_speculation": Switch("drafts under a grammar (3.4)", off=Variant(drafts=False), workload=workloads.GUIDED),
    "first_token": Switch(
        "first tokens reported before their first round (3.3)", off=Variant(serve=serve_reporting_late), figure="ttft"
    ),
    "overlap": Switch(
        "rounds started before the results of the previous one (3.3)",
        off=Variant(options=given(overlap=False)),
        on=Variant(options=given(overlap=True)),
    ),
    "persistent_kv": Switch(
        "prompts' beginnings cached (3.4)",
        off=Variant(options=given(prefix_cache=False, host_kv_tokens=0)),
        on=Variant(options=given(prefix_cache=True)),
        workload=workloads.SHARED,
        figure="ttft",
    ),
    "host_kv": Switch(
        "evicted blocks kept in host memory (3.4)",
        off=Variant(options=given(prefix_cache=True, host_kv_tokens=0)),
        on=Variant(
            options=lambda config, size: {"prefix_cache": True, "host_kv_tokens": GROUPS * one_batch(config, size)}
        ),
        workload=workloads.EVICTED,
        figure="ttft",
    ),
    "chunked_prefill": Switch(
        "prompts read in chunks between rounds",
        off=Variant(options=given(prefill_tokens=None)),
        on=Variant(options=lambda config, _: {"prefill_tokens": config.chunk_tokens}),
        workload=workloads.LATECOMER,
        figure="wait",
    ),
    "continuous_batching": Switch(
        "requests join those in flight", off=Variant(serve=serve_static), workload=workloads.ARRIVALS, figure="ttft"
    ),
    "disaggregated_prefill": Switch(
        "prompts read by another process (3.3)",
        on=Variant(remote_prefill=True),
        workload=workloads.ARRIVALS,
        figure="wait",
        device="cpu",
        alone=True,
    ),
    "divided_sampling": Switch(
        "a batch's sampling divided over the ranks of a divided target (3.2)",
        off=Variant(options=given(divide_sampling=False)),
        on=Variant(options=given(divide_sampling=True)),
        workload=replace(workloads.SAMPLED, least_size=2),
        device="cpu",
        ranks=2,
    ),
}
