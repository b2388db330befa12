"""What a round reads, and what a GPU holds: against sums by hand over a small shape."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_train.drafts import DraftConfig, EagleConfig, planned_config
from eagle_train.errors import OptionError
from eagle_train.inference import EngineConfig
from eagle_train.models.draft_quantisation import SCHEMES
from eagle_train.models.head import LMHead, quantised
from eagle_train.training.cost.estimate import ClusterConfig
from eagle_train.training.cost.target_shape import TargetShape
from evals.bench import decoding_plan
from evals.bench.decoding_plan import DecodingPlan, Reading
from evals.bench.random_models import ShapesConfig
from tests.support.random_models_job import EXPERTS, LLAMA

LAYER = 4 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48)  # bytes in fp32 of q, k and v, o, gate, up and down
HEAD = 4 * 96 * 32
DRAFT = 4 * 64 * 32 + 3 * LAYER  # fc and three layers
KV = 4 * 2 * 2 * 8  # of a token in a layer
BATCH, CONTEXT = 2, 10
COPIES = "draft's copies of LM heads"


def plan_of(gpus: int = 1, config: dict[str, Any] = LLAMA, draft: Any = None, **options) -> Any:
    """`draft`: its settings, or its config. `options`: of the engine, and `memory_tb_s` and `sum_us`."""
    cluster = ClusterConfig(**{key: options.pop(key) for key in ("memory_tb_s", "sum_us") if key in options})
    target = ShapesConfig(config, None, "float32").target
    shape = draft if isinstance(draft, DraftConfig) else EagleConfig.from_target(target, **draft or {})
    return DecodingPlan(target, shape, torch.float32, gpus, cluster, EngineConfig(**options))


def test_one_gpu_reads_all():
    plan = plan_of(memory_tb_s=1e-6)
    assert plan.validation(BATCH, CONTEXT) == Reading(3 * LAYER, HEAD, BATCH * CONTEXT * 3 * KV, 0)
    assert plan.validation(BATCH, CONTEXT, nodes=4) == plan.validation(BATCH, CONTEXT)
    drafting = plan.drafting(BATCH, CONTEXT, depth=2)
    assert drafting == Reading(2 * DRAFT, 2 * HEAD, 2 * BATCH * CONTEXT * 3 * KV, 0)
    assert plan.drafting(BATCH, CONTEXT, depth=0) == Reading(0, 0, 0, 0)
    assert drafting.seconds(plan.speeds) == (2 * DRAFT + 2 * HEAD + 2 * BATCH * CONTEXT * 3 * KV) / 1e6
    windowed = plan_of(draft={"window": 4}).drafting(BATCH, CONTEXT, depth=2)
    assert windowed.kv == 2 * BATCH * 4 * 3 * KV
    assert plan_of(draft={"vocab_size": 24}).drafting(BATCH, CONTEXT, 1).lm_head == HEAD / 4


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_drafts_are_proposed_with_the_lm_head_that_the_engine_keeps_for_them(kind):
    """Its bytes are those of what is made of it; the validation reads the target's own."""
    wide = LLAMA | {"hidden_size": 128, "head_dim": 8}
    plain, plan = plan_of(config=wide), plan_of(config=wide, draft_lm_head=kind)
    made = quantised(LMHead(torch.randn(96, 128)), SCHEMES[kind])
    kept = made.num_bytes if kind == "int4" else 96 * (128 + 4)  # a CPU widens FP8
    assert kept < plain.head_bytes / 3
    drafting = plan.drafting(BATCH, CONTEXT, depth=2)
    assert drafting == replace(plain.drafting(BATCH, CONTEXT, depth=2), lm_head=2 * kept)
    assert plan.validation(BATCH, CONTEXT) == plain.validation(BATCH, CONTEXT)
    assert plan.memory(BATCH, 20, "chain2") == {**plain.memory(BATCH, 20, "chain2"), COPIES: kept}
    assert plan_of(2, config=wide, draft_lm_head=kind, divide_draft=True).drafting(1, 1, 1).lm_head == kept / 2


def test_lm_heads_of_the_drafts_own_are_proposed_with():
    """Of an EAGLE-3 draft: counted once, in few bits too; for its own tokens those of the target's are copied."""
    target = ShapesConfig(LLAMA, None, "float32").target
    own = {"kind": "eagle3", "layers": [1, 2], "vocab_size": 48}
    plans = [plan_of(draft=planned_config(target, own), draft_lm_head=kind) for kind in ("target", "fp8")]
    plain, few = (plan.drafting(1, CONTEXT, depth=1) for plan in plans)
    whole = sum(each.numel() for each in plans[0].module.parameters() if each.ndim >= 2)
    assert (plain.lm_head, plain.weights + plain.lm_head) == (HEAD / 2, 4 * whole)
    assert (few.lm_head, few.weights) == (48 * 36, plain.weights)
    assert [plan.memory(1, 20, "chain1")[COPIES] for plan in plans] == [HEAD / 2, HEAD / 2 + 48 * 36]


def test_modules_in_a_chain_are_read_one_after_the_other():
    """Three: by a chain of one, too, as all read what is pending; and a chain of four reads the last one twice."""
    target = ShapesConfig(LLAMA, None, "float32").target
    plan = plan_of(draft=planned_config(target, {"kind": "mtp", "modules": 3}))
    one = 4 * 64 * 32 + LAYER
    for depth, forwards in ((1, 3), (3, 3), (4, 4)):
        expected = Reading(forwards * one, depth * HEAD, forwards * BATCH * CONTEXT * KV, 0)
        assert plan.drafting(BATCH, CONTEXT, depth) == expected
    memory, tokens = plan.memory(BATCH, 20, "chain2"), 2 * 3 * 16
    assert memory["draft's weights"] == 3 * (one + 4 * 5 * 32)
    assert memory["draft's keys and values"] == tokens * 3 * KV + tokens / 16 * 2 * 4 * 32


def test_of_modules_in_a_chain_a_forward_waits_for_one_alone():
    """Divided over two GPUs: three sums of each module, and one of the LM head for each level; it pays where these take
    less than reading half of a module and the LM head."""
    target = ShapesConfig(LLAMA, None, "float32").target
    shape = planned_config(target, {"kind": "mtp", "modules": 3})
    for depth, sums in ((1, 3 * 3 + 1), (4, 4 * 3 + 4)):
        assert plan_of(2, draft=shape, divide_draft=True).drafting(BATCH, CONTEXT, depth).sums == sums + 1
    of_draft = (HEAD + 4 * 64 * 32 + LAYER + 4 * 5 * 32) / 2 / 4  # us, a byte takes one
    assert plan_of(2, draft=shape, memory_tb_s=1e-6, sum_us=of_draft - 1).division.draft
    assert not plan_of(2, draft=shape, memory_tb_s=1e-6, sum_us=of_draft + 1).division.draft


def test_layers_of_a_quantised_target_are_read_as_they_are_kept():
    shape = ShapesConfig(
        LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, None, "float32"
    )
    plan = DecodingPlan(shape.target, shape.draft, torch.float32, 1, ClusterConfig(), EngineConfig())
    assert plan.validation(1, CONTEXT).weights == 3 * LAYER / 4 * 4.25 / 8
    assert plan.validation(1, CONTEXT).lm_head == HEAD


@pytest.mark.parametrize(("divided", "parts", "sums"), [(False, 1, (8, 1)), (True, 2, (9, 2 * 8 + 1))])
def test_two_gpus_read_a_part(divided, parts, sums):
    """They meet for the embedding, for both halves of each layer, and for what was drawn; and, divided, for the head,
    and in a forward of the draft for fc and both halves of each layer."""
    plan = plan_of(2, divide_draft=divided, divide_lm_head=divided)
    cached = BATCH * CONTEXT * 3 * KV
    assert plan.validation(BATCH, CONTEXT) == Reading(3 * LAYER / 2, HEAD / parts, cached / 2, sums[0])
    drafting = plan.drafting(BATCH, CONTEXT, depth=2)
    assert drafting == Reading(2 * DRAFT / parts, 2 * HEAD / parts, 2 * cached / parts, sums[1])
    sum_s = sums[1] * 20e-6
    assert drafting.seconds(plan.speeds) == pytest.approx(drafting.bytes / 3e12 + sum_s)


def test_what_is_divided_is_what_the_engine_would_divide():
    """The head where a sum takes less than reading half of it, 6.144 ms; the draft with it where eight sums do."""
    own = DRAFT + 4 * 5 * 32  # and its norms: layer 0 has none before its attention
    of_head, of_draft = HEAD / 2, (HEAD + own) / 2 / 8  # us, a byte takes one
    assert plan_of(2, memory_tb_s=1e-6, sum_us=of_head - 1).division == (True, True)
    assert plan_of(2, memory_tb_s=1e-6, sum_us=of_head + 1).division == (False, True)
    assert plan_of(2, memory_tb_s=1e-6, sum_us=of_draft - 1).division == (False, True)
    assert not plan_of(2, memory_tb_s=1e-6, sum_us=of_draft + 1).division.draft
    assert plan_of(1, divide_draft=True).division == (False, False)
    assert not plan_of(2, draft={"ffn": "moe", "num_experts": 4}).division.draft
    with pytest.raises(OptionError, match="it has experts"):
        assert plan_of(2, draft={"ffn": "moe", "num_experts": 4}, divide_draft=True).division


def test_experts_that_no_token_chooses_are_not_read():
    """Of four a token chooses two, by chance: two tokens leave a quarter of them."""
    plan = plan_of(config=EXPERTS | {"model_type": "mixtral"})
    experts, others = 3 * 4 * 3 * 32 * 48, 3 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 4 * 32)
    assert plan.validation(1, CONTEXT).weights == 4 * (others + experts / 2)
    assert plan.validation(2, CONTEXT).weights == plan.validation(1, CONTEXT, nodes=2).weights
    assert plan.validation(2, CONTEXT).weights == 4 * (others + 0.75 * experts)
    assert TargetShape(1, 100, 1, 1, 1, 1, 1, 1, False).read_by(9) == 100
    plan = plan_of(draft={"ffn": "moe", "num_experts": 4})  # of which a token goes through one, beside a shared one
    routed, router = 3 * 4 * 4 * 3 * 32 * 48, 3 * 4 * 4 * 32
    assert plan.drafting(2, CONTEXT, 1).weights == pytest.approx(DRAFT + router + routed * (1 - 0.75**2))


def test_layers_of_a_target_read_what_they_see():
    text = SimpleNamespace(layer_types=["full_attention", "sliding_attention", "chunked_attention"])
    text.sliding_window, text.attention_chunk_size, text.num_hidden_layers = 4, 6, 3
    assert [decoding_plan._seen(text, layer, CONTEXT) for layer in range(3)] == [CONTEXT, 4, 6]
    text = SimpleNamespace(layer_types=None, sliding_window=4, num_hidden_layers=1)
    assert decoding_plan._seen(text, 0, CONTEXT) == 4
    text.sliding_window = None
    assert decoding_plan._seen(text, 0, CONTEXT) == CONTEXT


def test_memory():
    """Each of two texts of 20 tokens and three more has two blocks of 16, and one is kept free."""
    tokens = 2 * 3 * 16
    plan, norms = plan_of(), 4 * 7 * 32
    memory = plan.memory(BATCH, 20, "chain2")
    assert memory["target's weights"] == 3 * LAYER + 2 * HEAD + norms
    assert memory["draft's weights"] == DRAFT + 4 * 5 * 32
    assert memory["target's keys and values"] == memory["draft's keys and values"] == tokens * 3 * KV
    assert plan_of(kv_tokens=32).memory(BATCH, 20, "chain2")["target's keys and values"] == 32 * 3 * KV
    several = plan_of(2, divide_draft=True).memory(BATCH, 20, "chain2")
    assert several["target's weights"] == (3 * LAYER + 2 * HEAD + norms) / 2 + 2 * HEAD  # as in training
    for part in ("draft's weights", "target's keys and values", "draft's keys and values"):
        assert several[part] == memory[part] / 2
