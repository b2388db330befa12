"""The inference's optimisations as switches: an engine with each of them, and one without. Paper section 3.

Knows nothing of figures.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from eagle_train.inference import Engine
from eagle_train.inference.cache import paged_kv
from eagle_train.inference.cache.paged_kv import Masks
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests.sequence import Update
from eagle_train.ops import attention, flash, linear
from eagle_train.ops.attention import Rule, partial_attention, with_sinks
from eagle_train.ops.threads import threads_for
from evals import loads
from evals.loads import GROUPS, Load, LoadConfig, Serve, serve_in_turn

NO_SWITCH = (
    "Of the paper's optimisations these have no row here: CUDA graphs (3.4) without a GPU; disaggregated prefill (3.3) "
    "and sampling divided over ranks (3.2) on a GPU; rounds without a wait of the host (3.3) and grammar masks applied "
    "on the device (3.4), which every GPU has; the first token's fusion with its own hidden state and iRoPE (3.4), "
    "which need drafts that were trained so (`evals.ablations`); and paged keys and values (3.4), without which there "
    "is no engine. Disaggregated prefill runs in a second process with as many threads again. Divided sampling has two "
    "processes on both sides, which share the target. First tokens told after their first round are no mode of the "
    "engine: the side without it has them as early, and their times are moved to the end of that round, so only TTFT "
    "means something in that row."
)


@dataclass
class SideConfig(LoadConfig):
    """The keys of conf/commands/switches.yaml that say how engines are made."""

    tree: Any
    table: str
    prefill_tokens: int


Options = Callable[[SideConfig, int], Mapping[str, Any]]
"""What `Engine` is given, from the config and the batch size."""


def given(**options: Any) -> Options:
    """The same options always."""
    return lambda config, size: options


AS_IT_IS = given()
BRANCHING = given(tree="n8")  # a chain is read as any text is, by another attention than trees


@dataclass(frozen=True)
class Side:
    """How an engine is made and asked.

    `drafts`: whether it has a draft, whose quantisation is `quant` and whose `alignment`, where it is not None, takes
    the place of the config's. `change`: made to the engine. `within`: a patch while it answers. `serve`: where requests
    do not come as the load says. `apart`: a process of its own reads the prompts.
    """

    drafts: bool = True
    options: Options = AS_IT_IS
    quant: str = "none"
    alignment: str | None = None
    change: Callable[[Engine], None] | None = None
    within: Callable[[], AbstractContextManager] = nullcontext
    serve: Serve | None = None
    apart: bool = False


@contextmanager
def plain_attention() -> Iterator[None]:
    """Prefix and tree are attended by the plain twin instead of the device's kernel."""
    with (
        patch.object(attention, "flash_partial", attention.plain_partial),
        patch.object(flash, "serves", lambda *_: False),
    ):
        yield


@contextmanager
def whole_mask() -> Iterator[None]:
    """Prefix and tree are attended as one, under an explicit mask."""
    with patch.object(paged_kv, "over_both", over_one):
        yield


def over_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    masks: Masks,
) -> torch.Tensor:
    """The twin of `paged_kv.over_both`, with a mask [A, 1, T, S + nodes] that is made once for all layers."""
    key = ("whole", *rule.reach)
    if key not in masks.made:
        parts = (masks.prefix.mask(rule), keys.shape[2]), (masks.suffix(rule), k.shape[2])
        shapes = [(part, (len(q), 1, q.shape[2], width)) for part, width in parts]
        whole = [torch.zeros(shape, device=q.device) if part is None else part.expand(shape) for part, shape in shapes]
        masks.made[key] = torch.cat(whole, dim=3)
    keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
    return with_sinks(*partial_attention(q, keys, values, masks.made[key], rule), rule)


@contextmanager
def plain_linear() -> Iterator[None]:
    """A CPU's products as torch has them."""
    with patch.object(linear, "linear_on_cpu", F.linear):
        yield


def compile_verification(engine: Engine) -> None:
    """Alone, for the batches of one engine."""
    sizes = [(size, engine.dispatcher.dispatch(size)) for size in {1, engine.max_batch_size}]
    engine.compiled_rows = max(size * plan.tree.num_nodes for size, plan in sizes)
    with torch.inference_mode(), threads_for(engine.compiled_rows, engine.elements):
        for job in engine.compile_sampling(sizes):
            job()


class SamplingAll(Ranks):
    """Each rank samples the whole batch, and none needs to hear of it."""

    def own(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all(self, batch: int, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return own


def sample_everywhere(engine: Engine) -> None:
    """Whole batches on every rank."""
    engine.ranks = SamplingAll(engine.ranks.group)


def tell_after_round(engine: Engine) -> None:
    """A first token is told when the round that follows its sampling has ended, with that round's tokens."""
    step = engine.step

    def late() -> list[Update]:
        updates = step()
        now = time.perf_counter()
        for request in (update.request for update in updates):
            if len(request.rounds) <= 1:
                request.stats.ttft_s = now - request.arrival
                request.stats.intervals_s = [0.0] * request.stats.tokens
        return updates

    engine.step = late


@dataclass(frozen=True)
class Switch:
    """`what` it turns on, with the paper's section; `off` and `on`; the load and the figure it is for; the only device
    it is there for, None: any."""

    what: str
    off: Side = Side()
    on: Side = Side()
    load: Load = loads.GREEDY
    figure: str = "ttit"
    device: str | None = None
    ranks: int = 1


def one_batch(config: SideConfig, size: int) -> int:
    """Tokens of a batch of `shared_tokens` and answers, each with a block's room."""
    return size * (config.shared_tokens + config.max_tokens + paged_kv.BLOCK)


PLACEBO = "placebo"  # in every run
SWITCHES = {
    PLACEBO: Switch("nothing: both sides are alike, and what they differ in is noise"),
    "speculation": Switch("drafts at all", off=Side(drafts=False)),
    "tree_dispatcher": Switch(
        "a tree for each batch size (3.4)",
        on=Side(options=lambda config, _: {"tree": {"table": config.table}}),
        load=loads.ARRIVALS,
    ),
    "greedy_drafting": Switch(
        "greedy instead of multinomial drafts (3.2)",
        off=Side(options=given(drafting="multinomial")),
        load=loads.SAMPLED,
    ),
    "compiled_forwards": Switch("forwards compiled", on=Side(options=given(compile=True))),
    "cuda_graphs": Switch(
        "drafting and validation as CUDA graphs (3.4)", on=Side(options=given(graphs=True)), device="cuda"
    ),
    "compiled_sampling": Switch(
        "verification compiled (3.2)", on=Side(change=compile_verification), load=loads.SAMPLED
    ),
    "last_alignment": Switch(
        "the draft's cache aligned by the last token alone (3.4)",
        off=Side(alignment="accepted"),
        on=Side(alignment="last"),
    ),
    "int4_draft": Switch("the draft's feed-forward in INT4 (3.4)", on=Side(quant="int4")),
    "fp8_draft": Switch("the draft's feed-forward in FP8 (3.4)", on=Side(quant="fp8")),
    "split_attention": Switch(
        "prefix and tree attended apart, with tree n8 (3.1)",
        off=Side(options=BRANCHING, within=whole_mask),
        on=Side(options=BRANCHING),
        load=loads.LONG,
    ),
    "attention_kernel": Switch("the device's attention kernel (3.4)", off=Side(within=plain_attention)),
    "fast_linear": Switch("a CPU's products for decoding", off=Side(within=plain_linear), device="cpu"),
    "guided_speculation": Switch("drafts under a grammar (3.4)", off=Side(drafts=False), load=loads.GUIDED),
    "first_token": Switch(
        "first tokens told before their first round (3.3)", off=Side(change=tell_after_round), figure="ttft"
    ),
    "overlap": Switch(
        "rounds begun before the one before is known (3.3)",
        off=Side(options=given(overlap=False)),
        on=Side(options=given(overlap=True)),
    ),
    "persistent_kv": Switch(
        "prompts' beginnings kept (3.4)",
        on=Side(options=given(prefix_cache=True)),
        load=loads.SHARED,
        figure="ttft",
    ),
    "host_kv": Switch(
        "what the store has no room for kept in host memory (3.4)",
        off=Side(options=given(prefix_cache=True)),
        on=Side(
            options=lambda config, size: {"prefix_cache": True, "host_kv_tokens": GROUPS * one_batch(config, size)}
        ),
        load=loads.EVICTED,
        figure="ttft",
    ),
    "chunked_prefill": Switch(
        "prompts read in chunks between rounds",
        off=Side(options=given(prefill_tokens=None)),
        on=Side(options=lambda config, _: {"prefill_tokens": config.prefill_tokens}),
        load=loads.LATECOMER,
        figure="wait",
    ),
    "continuous_batching": Switch(
        "requests join those under way", off=Side(serve=serve_in_turn), load=loads.ARRIVALS, figure="ttft"
    ),
    "disaggregated_prefill": Switch(
        "prompts read by another process (3.3)",
        on=Side(apart=True),
        load=loads.ARRIVALS,
        figure="wait",
        device="cpu",
    ),
    "divided_sampling": Switch(
        "a batch's sampling divided over the ranks of a divided target (3.2)",
        off=Side(change=sample_everywhere),
        load=replace(loads.SAMPLED, least=2),
        device="cpu",
        ranks=2,
    ),
}
