"""The estimates of training/cost against real models and steps: parameters, FLOPs, memory; and the command's report."""

import dataclasses
import json
import re
import weakref
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from eagle_train import cache, hardware, train
from eagle_train.cli import compose
from eagle_train.drafts import (
    Draft,
    Eagle3Config,
    EagleConfig,
    EagleDraft,
    Head,
    Lesson,
    MedusaConfig,
    MtpConfig,
    PeagleConfig,
    TargetStates,
    losses,
    shift_hidden,
)
from eagle_train.drafts.kind import Rows
from eagle_train.drafts.losses import distillation_loss
from eagle_train.drafts.unroll import unroll
from eagle_train.models.loading import TargetConfig
from eagle_train.ops import attention
from eagle_train.ops.attention import packed_attention
from eagle_train.settings import CONF_DIR
from eagle_train.training import parallelize
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost import estimate, memory, report
from eagle_train.training.cost.estimate import GIB, ClusterConfig, PlannedRun, estimate_cost
from eagle_train.training.cost.flops import flops_of
from eagle_train.training.cost.offline import Offline
from eagle_train.training.cost.target_shape import TargetShape
from eagle_train.training.optimizer import OptimConfig, Optimizer
from eagle_train.training.parallelize import recomputed
from eagle_train.training.placement import chosen
from eagle_train.training.train_config import TrainConfig, accumulation
from evals.bench import training_steps as bench
from tests.support import memory_job
from tests.support.command_line import call, chats, save_target, write_jsonl
from tests.support.pages import ROOT
from tests.support.presets import shapes_of
from tests.support.processes import start_ranks
from tests.support.tiny import GROUPED_FLOPS, OTHERS, SIZES, tiny_model, tiny_target

WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_attention_heads": 4, "head_dim": 64}
TOKENS = 32


def step(target, draft) -> torch.Tensor:
    """One micro-batch's loss, every token supervised."""
    tokens = torch.arange(TOKENS)[None] % target.identity.vocab_size
    positions, attend = torch.arange(TOKENS)[None], packed_attention([[TOKENS]])
    hidden = target.hidden_states(tokens, positions, attend)
    predicted = draft(target.embed(tokens), shift_hidden(hidden, positions), positions, attend)
    return distillation_loss(predicted.flatten(0, 1), hidden.flatten(0, 1), target.lm_head).loss


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "llama4"])
def test_a_steps_flops_are_those_that_torch_counts(family):
    """torch does not count the CPU's flash kernel; Gemma 2's attention, which has soft caps, is in plain products."""
    whole = {"attention_chunk_size": TOKENS} if family == "llama4" else {}  # chunks are attended in squares too
    target = tiny_target(family, **WIDE, **whole)
    config = EagleConfig.from_target(target.config)
    draft = EagleDraft(config).init_weights(0)
    with FlopCounterMode(display=False, custom_mapping=GROUPED_FLOPS) as counter:
        step(target, draft).backward()
    shape = TargetShape.of(target.config)
    said = flops_of(shape, config, draft, 0, recomputed=False)
    if family == "gemma2":  # it attends in squares, of which the plan says half
        said["target"] = flops_of(shape, config, draft, 2 * TOKENS, recomputed=False)["target"]
    assert TOKENS * sum(said.values()) == pytest.approx(counter.get_total_flops(), rel=2e-3)


@pytest.mark.parametrize("context", [7, 64])
@pytest.mark.parametrize(
    ("settings", "sees"),
    [
        ({}, lambda query, key: True),
        ({"window": 9}, lambda query, key: query - key < 9),
        ({"window": 100}, lambda query, key: True),
        ({"irope": True, "attention_chunk": 16}, lambda query, key: query // 16 == key // 16),
    ],
    ids=["all", "window", "a long window", "chunks"],
)
def test_a_plan_knows_what_a_token_attends_to(settings, sees, context):
    """But for half of a token in each layer: of its own no more than a half is counted."""
    config = EagleConfig.from_target(tiny_target().config, num_layers=2, **settings)
    causal = [(query, key) for query in range(context) for key in range(query + 1)]
    local = sum(sees(query, key) for query, key in causal) / context
    last = len(causal) / context if "irope" in settings else local  # iRoPE's last layer sees everything
    assert 0 < local + last - config.seen(context) <= 1


def test_a_window_is_in_a_plans_flops():
    target = tiny_target(**WIDE)
    shape, found = TargetShape.of(target.config), []
    for window in (None, 16):
        config = EagleConfig.from_target(target.config, window=window)
        found.append(flops_of(shape, config, EagleDraft(config), 64, recomputed=False))
    saved = found[0]["draft"] - found[1]["draft"]
    assert saved == pytest.approx(3 * 3 * 4 * (32 - (16 - 2)) * config.attention_width)
    assert found[0]["target"] == found[1]["target"]


def test_an_unrolled_steps_flops_are_those_that_torch_counts():
    """With documents of two tokens, where attention is negligible."""
    target, lengths = tiny_target(**WIDE), [[2] * (TOKENS // 2)]
    config = EagleConfig.from_target(target.config)
    draft = EagleDraft(config).init_weights(0)
    tokens = torch.arange(TOKENS)[None]
    positions = tokens % 2
    with FlopCounterMode(display=False) as counter:
        hidden = target.hidden_states(tokens, positions, packed_attention(lengths))
        previous = shift_hidden(hidden, positions)
        passes = unroll(draft, target.embed(tokens), previous, positions, lengths, 3)
        losses = [distillation_loss(x.flatten(0, 1), hidden.flatten(0, 1), target.lm_head).loss for x in passes]
        torch.stack(losses).sum().backward()
    said = flops_of(TargetShape.of(target.config), config, draft, 0, recomputed=False, unroll=3)
    assert TOKENS * sum(said.values()) == pytest.approx(counter.get_total_flops(), rel=5e-3)


def rows_for(target, draft: Draft, lengths: list[list[int]], dtype: torch.dtype = torch.float32) -> Rows:
    """Rows for a draft, the target's states computed."""
    tokens = torch.arange(TOKENS)[None] % target.identity.vocab_size
    positions = torch.cat([torch.arange(length) for length in lengths[0]])[None]
    layers = draft.config.target_layers
    states = TargetStates.split(target.own_states(tokens, positions, lengths, layers).to(dtype), layers)
    return Rows(target.embed(tokens).to(dtype), states, positions, lengths, lambda each: target.embed(each).to(dtype))


FEW = {"vocab_size": 512, "vocabulary": list(range(512))}
OF_STEPS = {"layers": [1, 2], "steps": 3}


@pytest.mark.parametrize(
    ("kind", "settings", "way"),
    [
        (Eagle3Config, OF_STEPS | FEW | {"num_layers": 2}, "kept"),
        (MtpConfig, {"steps": 3, **FEW}, "kept"),
        (MtpConfig, {"steps": 4, "modules": 3}, "kept"),
        (PeagleConfig, OF_STEPS | FEW | {"num_layers": 2}, "kept"),
        *[(MedusaConfig, {"heads": 3}, way) for way in ("kept", "recomputed")],
        *[(MedusaConfig, {"heads": 2, "num_layers": 3, **FEW}, way) for way in ("kept", "recomputed")],
        (MedusaConfig, {"heads": 3, "own_head": True, **FEW}, "kept"),
    ],
)
def test_another_kinds_steps_flops_are_those_that_torch_counts(kind, settings, way):
    """With documents of two tokens; every slot learns in every pass."""
    target = tiny_target(**WIDE)
    draft = kind.from_target(target.config, **settings).module().init_weights(0)
    for layer in draft.layers if way == "recomputed" else ():
        layer.forward = recomputed(layer.forward)
    count = draft.config.passes(1)
    with FlopCounterMode(display=False) as counter:
        rows = rows_for(target, draft, [[2] * (TOKENS // 2)])
        slots, head = [torch.arange(TOKENS)] * count, Head(draft, target.lm_head)
        passes = draft.unrolled(draft, rows, count)
        draft.losses(passes, slots, rows.states.hidden, head, Lesson(), 1.0).loss.backward()
    said = flops_of(TargetShape.of(target.config), draft.config, draft, 0, way == "recomputed", unroll=count)
    assert TOKENS * sum(said.values()) == pytest.approx(counter.get_total_flops(), rel=5e-3)


def test_a_pass_of_a_chain_attends_as_that_of_one_module():
    target = tiny_target(**WIDE).config
    drafts = [MtpConfig.from_target(target, steps=3, modules=modules) for modules in (1, 3)]
    shape, given = TargetShape.of(target), {"context": 4096, "recomputed": False, "unroll": 3}
    one, three = (flops_of(shape, each, each.module(), **given) for each in drafts)
    assert three == pytest.approx(one)


def test_lm_heads_of_ones_own_have_gradients_until_the_backward_pass():
    shape = TargetShape.of(tiny_target(**WIDE).config)
    plain, own = (MedusaConfig.from_target(tiny_target(**WIDE).config, heads=3, own_head=own) for own in (False, True))
    states, more = (memory.loss_memory(shape, each, TOKENS, torch.bfloat16, 3)[0] for each in (plain, own))
    assert more - states == (2 + 3 * 4) * shape.vocabulary * shape.hidden


class NormAsOnGpu(torch.autograd.Function):
    """Keeps what it reads, in fp32; a CPU's keeps what it gives, too."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x.float())
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Eagle3Config, OF_STEPS),
        (Eagle3Config, OF_STEPS | {"num_layers": 3, "norm_output": True}),
        (Eagle3Config, OF_STEPS | {"fc_norm": True}),
        (MtpConfig, {"steps": 3}),
        (MtpConfig, {"steps": 3, "modules": 3}),
        (PeagleConfig, OF_STEPS),
        (PeagleConfig, OF_STEPS | {"num_layers": 2, "norm_before_fc": True}),
        (MedusaConfig, {}),
        (MedusaConfig, {"heads": 3, "num_layers": 3}),
    ],
    ids=[
        *("eagle3", "eagle3, three layers", "eagle3, fc_norm", "mtp", "mtp, chained"),
        *("peagle", "peagle, norm before fc", "medusa", "medusa, three blocks"),
    ],
)
def test_another_kinds_activations_are_what_the_backward_pass_keeps(kind, settings, monkeypatch):
    """With norms that keep as little as a GPU's, and the states themselves, which the losses read."""
    monkeypatch.setattr("eagle_train.models.layers.rms_norm", NormAsOnGpu.apply)
    target = tiny_target(**WIDE)
    draft = kind.from_target(target.config, **settings).module().init_weights(0)
    config, count = draft.config, draft.config.passes(1)
    weights = {shape for parameter in draft.parameters() for shape in (parameter.shape, parameter.shape[::-1])}
    kept, rows = {}, rows_for(target, draft, [[TOKENS]], torch.bfloat16)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape not in weights:  # nor autocast's copies of them
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", dtype=torch.bfloat16):
        states = draft.unrolled(draft, rows, count)
    kept |= {x.untyped_storage().data_ptr(): (x.untyped_storage().nbytes(), x) for x in states}
    measured = sum(size for size, _ in kept.values())
    said = TOKENS * memory.activations(config, torch.bfloat16, recomputed=False, unroll=count)[0]
    assert said == pytest.approx(measured, rel=0.05)


def test_a_layer_that_runs_all_passes_at_once_is_recomputed_for_all_of_them():
    target = tiny_target(**WIDE)
    kinds = [kind.from_target(target.config, **OF_STEPS, num_layers=1) for kind in (Eagle3Config, PeagleConfig)]
    one, all_of_them = (memory.activations(each, torch.bfloat16, recomputed=True, unroll=3)[1] for each in kinds)
    assert all_of_them == 3 * one == 3 * kinds[0].kept_by_layer(2)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "llama4"])
def test_a_targets_parameters_are_counted_and_of_its_experts_those_at_work(family):
    model = tiny_model(family)
    shape = TargetShape.of(model.config)
    assert shape.parameters == model.num_parameters()
    idle = 0
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim >= 2:
            experts, chosen = model.config.num_local_experts, model.config.num_experts_per_tok
            idle += parameter.numel() * (experts - chosen) / experts
    ends = 2 * model.config.vocab_size * model.config.hidden_size
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    assert shape.active == pytest.approx(model.num_parameters() - ends - vectors - idle, abs=1)
    assert (idle > 0) == (family != "llama")


@pytest.mark.parametrize(
    ("config", "values", "chosen"),
    [
        (
            "Gemma4TextConfig",
            OTHERS["gemma4"][1] | {"enable_moe_block": True, "moe_intermediate_size": 48},
            "top_k_experts",
        ),
        ("HunYuanMoEV1Config", {}, "moe_topk"),
    ],
)
def test_experts_at_work_are_counted_whatever_the_family_calls_them(config, values, chosen):
    def active(number: int | list[int]) -> int:
        experts = {"num_experts": 4, chosen: number}
        return TargetShape.of(getattr(transformers, config)(**SIZES | values | experts)).active

    assert active(4) > active(2) > active(1)
    if chosen == "moe_topk":
        assert active([2, 2, 2]) == active(2)


@pytest.mark.parametrize("settings", [{}, {"ffn": "moe", "num_experts": 3}], ids=["dense", "experts"])
@pytest.mark.parametrize("passes", [1, 3])
def test_activations_are_what_the_backward_pass_keeps(passes, settings):
    target = tiny_target(**WIDE)
    config = EagleConfig.from_target(target.config, **settings)
    draft = EagleDraft(config).init_weights(0)
    weights = {shape for parameter in draft.parameters() for shape in (parameter.shape, parameter.shape[::-1])}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        is_stack = tensor.ndim == 3 and tensor.shape[0] == config.num_experts  # of experts, which `draft_state` counts
        if tensor.shape not in weights and not is_stack:  # nor autocast's copies of them
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    tokens, positions = torch.arange(TOKENS)[None], torch.arange(TOKENS)[None]
    embeddings, hidden = target.embed(tokens).bfloat16(), torch.randn(1, TOKENS, WIDE["hidden_size"]).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", dtype=torch.bfloat16):
        unroll(draft, embeddings, hidden, positions, [[TOKENS]], passes)
    measured = sum(size for size, _ in kept.values())
    said = TOKENS * memory.activations(config, torch.bfloat16, recomputed=False, unroll=passes)[0]
    assert said == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_drafts_state_is_what_its_optimiser_holds(name):
    draft = EagleDraft(EagleConfig.from_target(tiny_target(**WIDE).config, fc_bias=True)).init_weights(0)
    config = OptimConfig(name=name)
    optimizer = Optimizer(draft, config)
    for parameter in draft.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    held = [state for part in optimizer.parts for state in part.state.values()]
    states = sum(value.nbytes for state in held for value in state.values() if value.numel() > 1)
    measured = states + sum(parameter.nbytes + parameter.grad.nbytes for parameter in draft.parameters())
    said, host = memory.draft_state(draft, config, ParallelConfig(), 1, torch.float32)
    assert (said, host) == (measured, 0)


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_grouped_products_read_of_experts_is_kept_for_the_backward_pass(recomputed):
    config = EagleConfig.from_target(tiny_target(**WIDE).config, num_layers=2, ffn="moe", num_experts=3)
    draft = EagleDraft(config).init_weights(0)
    experts = {id(x) for name, x in draft.named_parameters() if ".experts." in name}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 3 and tensor.shape[0] == config.num_experts and id(tensor) not in experts:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.nbytes, tensor)
        return tensor

    embeddings, hidden = torch.randn(2, 1, TOKENS, WIDE["hidden_size"])
    if recomputed:
        draft.layers[0].forward = lambda *_: embeddings  # one layer's stacks exist at once
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        draft(embeddings, hidden, torch.arange(TOKENS)[None], packed_attention([[TOKENS]]))
    optim, dense = OptimConfig(), 16 * draft.num_parameters
    said, _ = memory.draft_state(draft, optim, ParallelConfig(activation_checkpointing=recomputed), 1, torch.float32)
    assert sum(size for size, _ in kept.values()) == said - dense
    low, _ = memory.draft_state(draft, optim, ParallelConfig(), 1, torch.bfloat16)
    assert low == 18 * draft.num_parameters  # autocast's copy of the others, and the stacks


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def in_fp32(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of `func`, with products of bf16 computed in fp32 and rounded, which leaves as many bytes: a CPU
    that emulates bf16 takes ten to twenty times as long for them."""
    product = func.overloadpacket
    if product not in (*bench.PRODUCTS, FLASH, FLASH_BACKWARD) or args[0].dtype != torch.bfloat16:
        return func(*args, **kwargs)
    wide = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
    result = product(*wide, **{key: value for key, value in kwargs.items() if key != "out"})
    if "out" in kwargs:
        return kwargs["out"].copy_(result)
    if product is FLASH:
        return result[0].bfloat16(), result[1]  # the second, log-sum-exp, is fp32
    return tree_map(torch.Tensor.bfloat16, result)


class Held(TorchDispatchMode):
    """Counts the bytes of all live tensors, as a GPU's allocator does: now, and the maximum so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = in_fp32(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, storage._cdata)

    def gone(self, name: int) -> None:
        self.now -= self.sizes.pop(name)


STEP = {"vocab": 4096, "hidden": 256, "intermediate": 768, "heads": 4, "kv_heads": 2, "layers": 4, "draft_layers": 2}
ROWS = {"row_tokens": 512, "micro_batch_rows": 2, "tokens_per_step": 2048, "rounds": 1, "steps": 1}


@pytest.mark.parametrize(
    ("low", "recomputed", "unroll", "quant"),
    [
        (False, False, 1, "none"),
        (True, False, 1, "none"),
        (True, True, 1, "none"),
        (False, False, 7, "none"),
        (True, True, 2, "none"),
        (True, False, 1, "fp8"),
    ],
)
@pytest.mark.filterwarnings("ignore:train.target_quant=fp8")
def test_a_real_steps_memory_is_the_plans(tmp_path, monkeypatch, low, recomputed, unroll, quant):
    """Within 5 %, by part: the weights, what remains after a step, and the peak. Where a CPU has its own code path
    (two threads, small blocks, attention in products) the GPU's is used."""
    monkeypatch.setattr(hardware, "_cpu_computes_bf16", lambda: low)
    monkeypatch.setattr(attention, "MATMUL_LENGTH", 0)
    monkeypatch.setattr(losses, "_MAX_WORKERS", 1)
    monkeypatch.setattr(losses, "_BLOCK_LOGITS", 2**40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # Chunks of logits are a CPU's, without the fused kernel.
    monkeypatch.setattr(estimate, "loss_memory", partial(memory.loss_memory, device="cpu"))
    others = {"tflops": None, "compile": False, "naive": False, "target_quant": quant}
    rows = ROWS | ({"tokens_per_step": 1024} if unroll > 2 else {})  # of one micro-batch: each pass takes a second
    config = bench.StepConfig(out="", device="cpu", seed=0, **others, **STEP, **rows)
    words = " ".join(f"w{i}" for i in range(config.row_tokens))  # a document fills a row
    write_jsonl(tmp_path / "documents.jsonl", [{"text": words}] * 50)
    monkeypatch.setattr(bench, "TrainConfig", partial(TrainConfig, unroll=unroll))
    with Held() as held:
        ours = bench.Ours(config, str(tmp_path), "cpu")
        for layer in ours.draft.layers if recomputed else ():
            layer.forward = parallelize.recomputed(layer.forward)
        ours.run(1)
        kept = held.now
        held.most = 0
        ours.run(1)
    dtype, train_config = ours.target.dtype, ours.trainer.config
    assert dtype == (torch.bfloat16 if low else torch.float32)
    parallel, optim = ParallelConfig(activation_checkpointing=recomputed), ours.trainer.optim
    shape = TargetShape.of(ours.target.config)
    given = (ours.draft.config, train_config, optim, parallel, ClusterConfig(), config.row_tokens, 1, dtype)
    said = estimate_cost(shape, *given).memory
    weights = sum(tensor.nbytes for tensor in (*ours.target.model.parameters(), *ours.target.model.buffers()))
    assert said["target's weights"] == pytest.approx(weights, rel=1e-3)
    size = ours.draft.num_parameters
    transient = 4 * size + (2 * size if low else 0)  # gradients, and the weights in the step's dtype
    assert said["draft's weights, gradients and optimiser"] - transient == pytest.approx(kept - weights, rel=0.02)
    assert sum(said.values()) - said["CUDA"] == pytest.approx(held.most, rel=0.05)


@pytest.mark.ranks
def test_what_fsdp2_gathers_of_a_draft_is_the_plans(tmp_path):
    """Real steps of two ranks, within 5 %: of one micro-batch, and of two, between which gradients are not sharded."""
    cases = [{"layers": layers, "micro_batches": count} for layers in (1, 4) for count in (1, 2)]
    cases += [case | {"reshard_after_forward": False} for case in cases if case["layers"] > 1]
    assert_planned(tmp_path, 2, cases)


@pytest.mark.ranks
def test_what_fsdp2_holds_of_a_draft_that_two_nodes_have_each_is_the_plans(tmp_path):
    shard = {"layers": 4, "draft_shard_size": 2}
    cases = [shard | {"micro_batches": 1}, shard | {"micro_batches": 2, "reshard_after_forward": False}]
    assert_planned(tmp_path, 4, cases)


def assert_planned(tmp_path: Path, ranks: int, cases: list[dict[str, Any]]) -> None:
    """What real steps hold, within 5 %."""
    start_ranks(ranks, "memory_job", tmp_path / "found.json", cases)
    for case, measured in zip(cases, json.loads((tmp_path / "found.json").read_text()), strict=True):
        draft = EagleDraft(EagleConfig.from_target(tiny_model(**memory_job.WIDE).config, num_layers=case["layers"]))
        settings = {name: value for name, value in case.items() if name not in ("layers", "micro_batches")}
        given = draft, OptimConfig(), ParallelConfig("fsdp2", **settings), ranks, torch.bfloat16
        said, _ = memory.draft_state(*given, accumulated=case["micro_batches"] > 1)
        assert said == pytest.approx(measured, rel=0.05), case


def test_what_is_divided_shrinks_and_what_is_offloaded_moves():
    draft = EagleDraft(EagleConfig.from_target(tiny_target().config))
    optim, size = OptimConfig(), draft.num_parameters

    def state(**settings) -> tuple[float, float]:
        return memory.draft_state(draft, optim, ParallelConfig(**settings), 4, torch.bfloat16)

    assert state(backend="ddp") == (22 * size, 0)
    gathered = memory.fsdp_gathered(draft, torch.bfloat16)
    assert state(backend="fsdp2") == (16 * size / 4 + gathered, 0)
    assert state(backend="fsdp2", offload_optimizer=True) == (4 * size / 4 + gathered, 12 * size / 4)
    accumulated = memory.draft_state(draft, optim, ParallelConfig("fsdp2"), 4, torch.bfloat16, accumulated=True)
    assert accumulated == (12 * size / 4 + 4 * size + gathered, 0)
    assert state(backend="deepspeed", zero={"stage": 1}) == (12 * size / 4 + 6 * size, 0)
    assert state(backend="deepspeed", zero={"stage": 2}) == (16 * size / 4 + 2 * size, 0)
    beside = 2 * 1000 + 2 * size  # its bucket, and all gathered
    assert state(backend="deepspeed", zero={"stage": 3, "reduce_bucket_size": 1000}) == (18 * size / 4 + beside, 0)
    shape = TargetShape.of(tiny_target().config)
    whole = memory.target_weights(shape, ParallelConfig(), 4, torch.bfloat16)
    assert whole == 2 * shape.parameters
    ends = 2 * shape.vocabulary * shape.hidden
    tensor = memory.target_weights(shape, ParallelConfig(target="tensor", target_shard_size=2), 4, torch.bfloat16)
    assert tensor == 2 * (shape.parameters / 2 + ends)


def test_the_command_says_what_a_run_costs_without_reading_a_weight(tmp_path, capsys):
    target = save_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    data = write_jsonl(tmp_path / "train.jsonl", chats(20))
    given = ("plan=true", f"target={target}", "data=messages", f"data.path={data}", "data.row_tokens=64")
    assert call(train.main, *given, f"out={tmp_path / 'out'}", "optim.tokens_per_step=1024", "train.steps=10") == 0
    said, told = capsys.readouterr()
    assert "note: layout=vllm,sglang,trtllm: each has no slot for the first token" in told
    config = json.loads((target / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    for part in (
        "GFLOP a token",
        "target",
        "draft",
        "memory on each of 1 GPUs",
        "10 steps of 1,024 tokens",
        " s of GPUs",
    ):
        assert part in said
    assert "does not fit" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], ["the draft is divided over each 8 of 16 GPUs, and gathered once a step"]),
        (["parallel.draft_shard_size=world"], ["the draft is divided over all 16 GPUs, and gathered once a step"]),
        (
            ["parallel.target=fsdp2", "parallel.reshard_after_forward=true", "parallel.draft_shard_size=4"],
            [
                "the target is divided over each 8 of 16 GPUs",
                "the draft is divided over each 4 of 16 GPUs, and gathered for each forward and each backward pass",
            ],
        ),
        (["cluster.gpus_per_node=5"], ["the draft is divided over all 16 GPUs, and gathered once a step"]),
    ],
)
def test_a_plan_says_what_is_divided_over_which_gpus(tmp_path, capsys, overrides, lines):
    given = ("plan=true", f"target={save_target(tmp_path / 'target')}", "data=messages", "data.path=none.jsonl")
    more = ("data.row_tokens=64", "optim.tokens_per_step=16384", "cluster.gpus=16", "parallel=fsdp2")
    assert call(train.main, *given, *more, *overrides) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "divided" in line] == lines


def test_a_plan_divides_a_draft_over_all_nodes_where_one_has_too_little_memory():
    """And gathers it anew for its backward pass before that."""
    shapes = shapes_of("llama3_1_8b")
    given = TargetConfig("hub/id"), None, shapes.draft, TrainConfig(steps=1, micro_batch_rows=1), OptimConfig()
    chosen_for = {}
    for gib in (80, 13.4, 13.0, 12.5, 4):
        run = PlannedRun(*given, ClusterConfig(memory_gib=gib), 2048, 64, torch.bfloat16)
        run.__dict__["_shape"] = dataclasses.replace(LLAMA_8B, parameters=2 * 10**9)
        made = chosen(ParallelConfig("fsdp2"), 64, 8, run.fits)
        chosen_for[gib] = (made.draft_shard_size, made.reshard_after_forward)
    assert chosen_for == {80: (8, False), 13.4: (8, True), 13.0: (64, False), 12.5: (64, True), 4: (64, True)}


PRESETS = {  # of each: its target (conf/shapes), that one's parameters in billions, and on how many GPUs it is to fit
    "paper_llama3_1_8b": ("llama3_1_8b", 8.03, 8),
    "paper_llama3_3_70b": ("llama3_3_70b", 70.6, 8),
    "paper_llama4_scout": ("llama4_scout", 108, 8),
    "paper_llama4_maverick": ("llama4_maverick", 401, 8),
    "qwen3_8b": ("qwen3_8b", 8.19, 8),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_its_target_on_the_gpus_it_names(tmp_path, capsys, name):
    shapes, billions, gpus = PRESETS[name]
    shapes_of(shapes).target.save_pretrained(tmp_path)
    given = (f"experiment={name}", f"target.path={tmp_path}", "data.path=none.jsonl", f"cluster.gpus={gpus}")
    assert call(train.main, "plan=true", *given) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"target: ([\d.]+) B", said)[1]) == pytest.approx(billions, rel=5e-3)
    assert "48,000 steps of 2,097,152 tokens" in said
    assert "does not fit" not in said


def test_the_guides_memory_of_passes_is_the_plans(tmp_path, capsys):
    shapes_of("llama3_1_8b").target.save_pretrained(tmp_path)
    given = ["plan=true", "experiment=paper_llama3_1_8b", f"target.path={tmp_path}", "data.path=none.jsonl"]
    guide = (ROOT / "docs/training.md").read_text("utf-8").partition("| on each GPU, GiB |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([^`]+)`.*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)(: does not fit)? \|$", guide, re.MULTILINE)
    assert len(rows) == 5
    for overrides, *figures, too_large in rows:
        assert call(train.main, *given, "cluster.gpus=8", *overrides.split()) == 0
        said = capsys.readouterr().out
        parts = ("draft's activations", "hidden states and the loss", "all, at most")
        assert [re.search(rf"{part} +([\d.]+) GiB", said)[1] for part in parts] == figures, overrides
        assert bool(too_large) == ("does not fit" in said)


def test_every_experiment_is_tested_or_the_quickstart():
    assert {path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")} == {*PRESETS, "quickstart"}
    shapes = {path.stem for path in (CONF_DIR / "shapes").glob("*.yaml")}
    assert shapes == {"base", "tiny", *(name for name, _, _ in PRESETS.values())}


@pytest.mark.parametrize("name", PRESETS)
def test_random_weights_of_a_presets_shape_have_its_draft(name):
    shapes = shapes_of(PRESETS[name][0])
    assert shapes.experiment == name
    said = {key: value for key, value in compose("train", [f"experiment={name}"]).draft.items() if value is not None}
    assert {key: getattr(shapes.draft, key) for key in said} == said
    assert shapes.draft.num_layers == 3


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        ({}, "parallel.target=fsdp2"),
        ({"target": "fsdp2", "backend": "fsdp2"}, "more GPUs"),
    ],
)
def test_a_target_that_is_too_large_is_told_with_the_way_out(settings, tried):
    target = tiny_target()
    train_config, cluster = TrainConfig(steps=1, micro_batch_rows=1), ClusterConfig(memory_gib=1.001)
    shape = TargetShape(8 * 10**9, 7 * 10**9, 10**6, 3, 32, 96, 32, 48, False)
    parallel = ParallelConfig(**settings)
    draft = EagleConfig.from_target(target.config)
    cost = estimate_cost(shape, draft, train_config, OptimConfig(), parallel, cluster, 64, 2)
    changes = report.advice(cost, parallel, train_config, cluster)
    assert any(tried in change for change in changes)
    said = report.text(cost, train_config, OptimConfig(), cluster, changes)
    assert "does not fit" in said
    roomy = ClusterConfig(memory_gib=80)
    assert report.advice(cost, parallel, train_config, roomy) == []


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        (
            {"draft_shard_size": 8, "reshard_after_forward": False},
            {"parallel.draft_shard_size=world", "parallel.reshard_after_forward=true"},
        ),
        ({"draft_shard_size": 64, "reshard_after_forward": True}, set()),
    ],
)
def test_a_draft_that_is_too_large_is_told_how_it_may_be_divided_further(settings, tried):
    train_config, cluster = TrainConfig(steps=1, micro_batch_rows=1), ClusterConfig(memory_gib=3)
    shape = TargetShape(10**8, 10**8, 10**6, 3, 4096, 96, 4096, 48, False)
    parallel = ParallelConfig("fsdp2", **settings)
    cost = estimate_cost(shape, shapes_of("llama3_1_8b").draft, train_config, OptimConfig(), parallel, cluster, 64, 64)
    changes = " ".join(report.advice(cost, parallel, train_config, cluster))
    ways = ("parallel.draft_shard_size=world", "parallel.reshard_after_forward=true")
    assert changes
    assert {way for way in ways if way in changes} == tried


@pytest.mark.parametrize(("rows", "fewer"), [(8, 4), (9, 3), (5, 1), (2, 1)])
def test_the_rows_that_are_advised_make_a_whole_number_of_micro_batches(rows, fewer):
    train_config, cluster = TrainConfig(steps=1, micro_batch_rows=rows), ClusterConfig(memory_gib=2)
    optim, shape = OptimConfig(tokens_per_step=rows * 2**14), TargetShape(10**6, 10**6, 10**5, 3, 32, 96, 32, 48, False)
    draft, parallel = shapes_of("llama3_1_8b").draft, ParallelConfig("fsdp2", draft_shard_size=64)
    cost = estimate_cost(shape, draft, train_config, optim, parallel, cluster, 2**14, 64)
    (advised,) = (each for each in report.advice(cost, parallel, train_config, cluster) if "micro_batch_rows" in each)
    assert advised.startswith(f"train.micro_batch_rows={fewer} ")
    assert accumulation(optim, TrainConfig(steps=1, micro_batch_rows=fewer), 2**14) == rows // fewer


LLAMA_8B = TargetShape(8 * 10**9, 7 * 10**9, 2 * 10**8, 32, 4096, 128256, 4096, 14336, False)


def planned_memory(shape: TargetShape, **loaded) -> tuple[float, float]:
    """GiB of the target's weights on a GPU, and of all that is offloaded to host memory."""
    draft = shapes_of("llama3_1_8b").draft
    train, cluster = TrainConfig(steps=1, micro_batch_rows=1), ClusterConfig(memory_gib=80)
    given = draft, train, OptimConfig(), ParallelConfig(), cluster, 2048, 1
    cost = estimate_cost(shape, *given, loaded=TargetConfig("hub/id", **loaded))
    return cost.memory["target's weights"] / GIB, cost.host / GIB


def test_what_is_offloaded_waits_in_the_hosts_memory():
    whole = 2 * 8e9 / GIB
    assert planned_memory(LLAMA_8B) == pytest.approx((whole, 0))
    assert planned_memory(LLAMA_8B, offload=True) == pytest.approx((whole, 0))  # it fits
    assert planned_memory(LLAMA_8B, offload=True, device_gib=4) == pytest.approx((4, whole - 4))
    large = dataclasses.replace(LLAMA_8B, parameters=70 * 10**9)
    on_gpu, waiting = planned_memory(large, offload=True)
    assert 0 < on_gpu < 74
    assert on_gpu + waiting == pytest.approx(2 * 70e9 / GIB)


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, 8.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.25),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": None}}}, 8.25),
    ],
)
def test_a_quantised_targets_layers_take_less(quantisation, bits):
    config = tiny_model("llama").config
    if quantisation:
        config.quantization_config = quantisation
    assert TargetShape.of(config).bits == bits
    ends = 2 * 128256 * 4096
    expected = (2 * ends + (bits or 16) / 8 * (8e9 - ends)) / GIB
    assert planned_memory(dataclasses.replace(LLAMA_8B, bits=bits))[0] == pytest.approx(expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_a_target_in_fp8_takes_the_memory_that_is_planned(family):
    target = tiny_target(family, dtype=torch.bfloat16)
    shape = TargetShape.of(target.model.config)
    for in_fp8 in (False, True):
        if in_fp8:
            target.round_to_fp8()
        held = [*target.model.parameters(), *target.model.buffers()]
        own = sum(tensor.nbytes for tensor in held if tensor.ndim >= 2)
        vectors = sum(weight.numel() for weight in target.model.parameters() if weight.ndim < 2)
        planned = memory.target_weights(shape, ParallelConfig(), 1, torch.bfloat16, in_fp8)
        assert own + 2 * vectors == planned


def planned_in_fp8(capsys, target: Path, *overrides: str) -> tuple[str, float, float]:
    """A plan's text, the target's weights in GiB, and tokens a second."""
    given = ("plan=true", f"target={target}", "data=messages", "data.path=none.jsonl", "cluster.gpus=1", *overrides)
    assert call(train.main, *given) == 0
    said = capsys.readouterr().out
    weights, speed = (re.search(pattern, said)[1] for pattern in (r"target's weights +([\d.]+)", r"([\d,]+) tokens/s"))
    return said, float(weights), float(speed.replace(",", ""))


def test_a_plan_counts_fp8s_memory_and_speed(tmp_path, capsys):
    """An 8B target's layers have 6.98 B weights in linear modules, and half of their FLOPs take no time."""
    shapes_of("llama3_1_8b").target.save_pretrained(tmp_path)
    given = ("data.row_tokens=2048", "train.micro_batch_rows=1", "optim.tokens_per_step=131072")
    _, whole, slow = planned_in_fp8(capsys, tmp_path, *given)
    said, rounded, fast = planned_in_fp8(capsys, tmp_path, *given, "train.target_quant=fp8")
    numbers = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    assert whole - rounded == pytest.approx((numbers - 4 * rows) / GIB, abs=0.011)
    per_token = float(re.search(r"  all +([\d.]+)\n\nmemory", said)[1]) * 1e9
    assert slow / fast == pytest.approx((per_token - numbers) / per_token, rel=1e-3)
    assert 1.2 < fast / slow < 2
    loading = float(re.search(r"loading the target, beyond these +([\d.]+)", said)[1])
    assert loading == 0  # the draft's optimiser is larger than what the target loses


def test_a_plan_knows_that_a_target_is_loaded_before_it_is_rounded():
    shape = dataclasses.replace(LLAMA_8B, rounded=7 * 10**9, rounded_rows=10**6)
    draft = dataclasses.replace(shapes_of("llama3_1_8b").draft, num_layers=1, intermediate_size=64)
    train_config = TrainConfig(steps=1, micro_batch_rows=1, target_quant="fp8")
    given = OptimConfig(), ParallelConfig(), ClusterConfig(), 64, 1
    cost = estimate_cost(shape, draft, train_config, *given)
    assert cost.memory["target's weights"] == 9e9 + 4e6
    assert sum(cost.memory.values()) == max(16e9 + estimate._CUDA_GIB * GIB, sum(cost.memory.values()))
    assert cost.memory["loading the target, beyond these"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised already; use train.target_quant=none"),
        (
            {"hidden_size": 40, "intermediate_size": 24},
            "has a linear module whose inputs and outputs are multiples of 16; use train.target_quant=none",
        ),
    ],
)
def test_a_target_that_cannot_be_rounded_is_refused_by_its_config(tmp_path, capsys, changes, message):
    config = tmp_path / "config.json"
    tiny_model().config.save_pretrained(tmp_path)
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    given = ("plan=true", f"target={tmp_path}", "data=messages", "data.path=none.jsonl", "data.row_tokens=64")
    assert call(train.main, *given, "train.target_quant=fp8") == 2
    assert capsys.readouterr().err.strip().endswith(message)


def test_a_target_that_is_too_large_in_fp8_too_is_divided_without():
    shape = dataclasses.replace(LLAMA_8B, parameters=100 * 10**9, rounded=90 * 10**9, rounded_rows=10**7)
    draft = shapes_of("llama3_1_8b").draft
    train_config = TrainConfig(steps=1, micro_batch_rows=1, target_quant="fp8")
    parallel, cluster = ParallelConfig(), ClusterConfig()
    cost = estimate_cost(shape, draft, train_config, OptimConfig(), parallel, cluster, 64, 1)
    changes = report.advice(cost, parallel, train_config, cluster)
    assert "parallel.target=fsdp2, or tensor within a node with train.target_quant=none, on more GPUs" in changes


needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.gpus=4"], "parallel=single: 4 processes"),
        (
            ["cluster.gpus=4", "parallel=fsdp2", "parallel.target=fsdp2", "parallel.target_shard_size=3"],
            "parallel.target_shard_size=3",
        ),
        (["cluster.mfu=0"], "cluster.mfu=0"),
        (["cluster.memory_gib=-1"], "cluster.memory_gib=-1"),
        (["optim.tokens_per_step=1000"], "optim.tokens_per_step=1000"),
        (["target=nowhere/at/all"], "no such directory"),
        (["parallel=fsdp2", "parallel.target=fsdp2", "target.offload=true"], "target.offload=true: not with"),
        (
            ["train.target_quant=fp8", "parallel=fsdp2", "parallel.target=tensor"],
            "train.target_quant=fp8: not with parallel.target=tensor",
        ),
        (["data.row_tokens=256"], "data.row_tokens=256: must be at most the context, 128"),
        (["parallel.target=tensor", "cluster.gpus=4", "parallel=fsdp2"], "2 key/value heads cannot be divided"),
        (["parallel=deepspeed_zero2", "parallel.zero.stage=0"], "parallel.zero.stage=0: must be 1, 2 or 3"),
        (["parallel=deepspeed_zero2", "parallel.zero.stage=7"], "parallel.zero.stage=7: must be 1, 2 or 3"),
        (
            ["parallel=deepspeed_zero3", "+parallel.zero.offload_param.device=cpu"],
            "parallel.zero.offload_param: not here",
        ),
        pytest.param(
            ["parallel=deepspeed_zero2", "+parallel.zero.overlap_com=true"],
            "parallel.zero.overlap_com=true: Extra inputs are not permitted",
            marks=needs_deepspeed,
        ),
        pytest.param(
            ["parallel=deepspeed_zero2", "+parallel.zero.reduce_bucket_size=-1"],
            "parallel.zero.reduce_bucket_size=-1: Input should be greater than 0",
            marks=needs_deepspeed,
        ),
    ],
)
def test_a_plan_for_a_job_that_could_not_start_is_refused(tmp_path, capsys, overrides, message):
    target = save_target(tmp_path / "target")
    capsys.readouterr()  # DeepSpeed speaks when it is first imported
    given = (f"target={target}", "data=messages", "data.path=none.jsonl", "data.row_tokens=64")
    assert call(train.main, "plan=true", *given, *overrides) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(("target", "draft", "disk"), [(5, 1, 0.5), (1, 5, 2), (1, 1, 1.85), (3, 1, 3.5), (2, 1, 2.6)])
def test_a_cache_is_faster_from_the_epoch_that_is_said(target, draft, disk):
    """Its making is a forward, written meanwhile; then each epoch is the draft's, read meanwhile."""
    first = Offline(8, target, draft, disk).first_epoch
    faster = [max(target, disk) + n * max(draft, disk) < n * (target + draft) for n in range(1, 200)]
    assert faster.index(True) + 1 == first
    assert all(faster[first - 1 :])


def test_a_disk_that_is_slower_than_the_target_is_said():
    slow = Offline(2**20, 1.0, 1.0, 2.5)
    assert slow.first_epoch is None
    assert "1,024 KiB a token, 976.6 GiB a million; reading them takes longer" in slow.advice("at 5 GiB/s")
    assert "which takes 2.5 times as long as the draft" in slow.reading("at 5 GiB/s")


@pytest.mark.parametrize(("overrides", "kib"), [((), 8), (("draft=eagle3",), 32)])
def test_a_plan_says_what_the_targets_states_would_take(tmp_path, capsys, overrides, kib):
    shapes_of("llama3_1_8b").target.save_pretrained(tmp_path)
    given = ["plan=true", f"target.path={tmp_path}", "target=hf", "data=messages", "data.path=none.jsonl"]
    assert call(train.main, *given, "cluster.gpus=16", "parallel=ddp", *overrides) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert f"{kib} KiB a token, {kib * 2**10 * 1e6 / GIB:.1f} GiB a million; " in said
    assert said.endswith(" epochs on, at 5 GiB/s on each of 2 nodes")
    assert call(train.main, *given, "cluster.gpus=16", "parallel=ddp", *overrides, "cluster.disk_gib_s=0.001") == 0
    assert "reading them takes longer than the target" in capsys.readouterr().out


def test_a_plan_of_a_run_from_a_cache_has_no_target(tmp_path, capsys):
    save_target(tmp_path / "target")
    write_jsonl(tmp_path / "train.jsonl", chats(20))
    data = ["data=messages", f"data.path={tmp_path / 'train.jsonl'}", "data.row_tokens=32", "train.micro_batch_rows=1"]
    data += ["optim.tokens_per_step=64", "train.steps=2", "device=cpu"]
    assert (
        call(cache.main, f"target={tmp_path / 'target'}", "target.dtype=float32", *data, f"out={tmp_path / 'cache'}")
        == 0
    )
    capsys.readouterr()
    given = ["target=cached", f"target.path={tmp_path / 'cache'}", "plan=true", "cluster.gpus=1"]
    assert call(train.main, *given, *data, "cluster.disk_gib_s=1e-6") == 0
    said = capsys.readouterr().out
    flops, memory = said.split("memory on each of")
    assert "no layers" in flops
    assert "  target  " not in flops
    width = SIZES["hidden_size"] * 4
    ends = 2 * SIZES["vocab_size"] * width / 2**10  # embedding and LM head
    assert re.search(rf"  target's weights +{ends:.1f} KiB\n", memory)
    assert f"reading from disk: {width / 2**10:g} KiB a token, 1.0 KiB/s in all, at 1e-06 GiB/s, which takes" in said
    assert f"{1e-6 * GIB / width:,.0f} tokens/s" in said  # the disk's
    assert call(train.main, *given, *data, "draft=eagle3", "draft.layers=[1]") == 2
    assert "holds final hidden states alone" in capsys.readouterr().err
    assert call(train.main, *given, *data, "cluster.disk_gib_s=0") == 2
    assert "cluster.disk_gib_s=0.0: must be above 0" in capsys.readouterr().err
