"""The draft: its slots' alignment, its layers against transformers' own, its conventions and its names."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaModel,
    Qwen2Config,
    Qwen2Model,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from eagle_train.drafts import Draft, EagleConfig, EagleDraft, Head, shift_hidden
from eagle_train.errors import UserError
from eagle_train.models.fused import fuse_products
from eagle_train.models.layers import rotate
from eagle_train.ops import grouped, kernels
from eagle_train.ops.attention import packed_attention
from tests.support.graph_recorder import no_values
from tests.support.tiny import random_tokens, shared_target, tiny_draft, tiny_target

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 2.0],
    "long_factor": [3.0, 4.0],
    "original_max_position_embeddings": 64,
    "factor": 2.0,
}
PARTIAL = {"default": ROPES["default"] | {"partial_rotary_factor": 0.5}, "longrope": LONGROPE}


def llama_config(**changes) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=96, max_position_embeddings=128, **sizes | changes)


def inputs(length: int = 12, rows: int = 1, width: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embeddings, hidden = torch.randn(2, rows, length, width, generator=generator)
    return embeddings, hidden, torch.arange(length).expand(rows, -1)


def run(draft: Draft, embeddings, hidden, positions) -> torch.Tensor:
    rows, length = positions.shape
    return draft(embeddings, hidden, positions, packed_attention([[length]] * rows))


@pytest.mark.parametrize("vocabulary", [None, [2, 3, 50, 95]])
def test_the_head_knows_the_drafts_tokens(vocabulary):
    target = shared_target("gemma2")  # whose head has a cap
    size = None if vocabulary is None else len(vocabulary)
    head = Head(tiny_draft(target, vocab_size=size, vocabulary=vocabulary), target.lm_head)
    known = torch.tensor(vocabulary or range(96))
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    logits = head.lm_head(hidden)
    torch.testing.assert_close(logits, target.lm_head(hidden)[:, known])
    assert torch.equal(head.tokens(torch.arange(len(known))), known)
    whole = head.spread(logits.softmax(-1))
    torch.testing.assert_close(whole[:, known], logits.softmax(-1))
    assert whole.shape == (5, 96)
    assert whole.sum(-1).tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 0}, r"^draft\.vocab_size=0: must be null or at least 1$"),
        ({"vocab_size": 97}, r"^draft\.vocab_size=97: must be at most the target's, 96$"),
        ({"vocab_size": 3, "vocabulary": [1, 2]}, r"^draft\.vocabulary: must be 3 different token ids in ascending"),
        ({"vocab_size": 2, "vocabulary": [2, 1]}, r"^draft\.vocabulary: must be 2 different token ids in ascending"),
        ({"vocab_size": 2, "vocabulary": [5, 96]}, r"^draft\.vocabulary: must be token ids of the target, below 96$"),
    ],
)
def test_vocabularies_that_are_none(values, message):
    with pytest.raises(UserError, match=message):
        tiny_draft(shared_target(), **values)


@pytest.mark.parametrize("eps", [0.0, -1e-5])
def test_a_norm_divides_by_no_zero_and_takes_no_root_below_it(eps):
    with pytest.raises(UserError, match=rf"^draft\.rms_norm_eps={eps}: must be above 0$"):
        tiny_draft(shared_target(), rms_norm_eps=eps)


def test_a_head_of_unknown_tokens_is_refused():
    with pytest.raises(UserError, match=r"^draft\.vocab_size=9: give draft\.vocabulary, the tokens$"):
        Head(tiny_draft(shared_target(), vocab_size=9), shared_target().lm_head)


@pytest.mark.parametrize("fc_bias", [False, True])
def test_the_embedding_scale_is_folded_exactly(fc_bias):
    draft = tiny_draft(shared_target(), embedding_scale=8.0, fc_bias=fc_bias)
    plain = tiny_draft(shared_target(), fc_bias=fc_bias)
    embeddings, hidden, positions = inputs()
    out = run(draft, embeddings, hidden, positions)
    assert torch.equal(run(plain, 8 * embeddings, hidden, positions), out)
    torch.testing.assert_close(run(draft.folded(), embeddings, hidden, positions), out)
    assert (draft.config.embedding_scale, draft.folded().config.embedding_scale) == (8.0, 1.0)
    assert torch.equal(draft.folded().fc.weight[:, :32], 8 * draft.fc.weight[:, :32])
    with pytest.raises(UserError, match=r"embedding_scale=3.0: must be a power of two"):
        tiny_draft(shared_target(), embedding_scale=3.0)


# --- alignment, DESIGN 3.1


def test_slots_are_paired_with_the_token_before():
    """Two documents in the first row, one in the second."""
    hidden = torch.arange(1.0, 11.0).view(2, 5, 1).expand(-1, -1, 3)
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    wanted = [[1.0, 1.0, 2.0, 4.0, 4.0], [6.0, 6.0, 7.0, 8.0, 9.0]]
    assert shift_hidden(hidden, positions)[..., 0].tolist() == wanted


@pytest.mark.parametrize(
    "overrides", [{}, {"norms": "full"}, {"ffn": "moe", "num_experts": 3}, {"irope": True, "attention_chunk": 4}]
)
def test_packed_documents_start_anew(overrides):
    draft = tiny_draft(shared_target(), **overrides)
    embeddings, hidden, _ = inputs(12)
    positions = torch.tensor([[*range(5), *range(1), *range(6)]])
    lengths = [5, 1, 6]
    g = shift_hidden(hidden, positions)
    packed = draft(embeddings, g, positions, packed_attention([lengths]))
    alone = []
    for e, h in zip(embeddings.split(lengths, 1), hidden.split(lengths, 1), strict=True):
        here = torch.arange(e.shape[1])[None]
        alone.append(run(draft, e, shift_hidden(h, here), here))
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overrides", [{}, {"ffn": "moe"}, {"irope": True, "attention_chunk": 5}])
def test_no_slot_sees_a_later_one(overrides):
    draft = tiny_draft(shared_target(), **overrides)
    embeddings, hidden, positions = inputs()
    before = run(draft, embeddings, hidden, positions)
    embeddings[:, 7:], hidden[:, 7:] = 5.0, -5.0
    after = run(draft, embeddings, hidden, positions)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.isclose(after[:, 7:], before[:, 7:]).all(-1).any()


def test_embedding_comes_first_and_hidden_second():
    draft = tiny_draft(shared_target())
    embeddings, hidden, positions = inputs()
    seen = []
    draft.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(draft, embeddings, hidden, positions)
    assert torch.equal(seen[0], torch.cat((embeddings, hidden), -1))


def test_the_bias_is_added_to_what_is_fused():
    draft, plain = tiny_draft(shared_target(), fc_bias=True), tiny_draft(shared_target())
    plain.load_state_dict(draft.state_dict(), strict=False)
    embeddings, hidden, positions = inputs()
    plain.fc.register_forward_hook(lambda _, __, out: out + draft.fc.bias)
    assert draft.fc.bias.abs().min() > 0.1
    torch.testing.assert_close(run(draft, embeddings, hidden, positions), run(plain, embeddings, hidden, positions))


# --- the layers against transformers' own


def twin(draft: Draft, config: LlamaConfig) -> LlamaModel:
    """transformers' LlamaModel with the draft's layers; what eagle1 leaves out is left out."""
    model = LlamaModel(config).eval()
    for own, theirs in zip(draft.layers, model.layers, strict=True):
        if isinstance(own.input_layernorm, nn.Identity):
            theirs.input_layernorm = nn.Identity()
        theirs.load_state_dict(own.state_dict())
    if draft.config.norms == "full":
        model.norm.load_state_dict(draft.norm.state_dict())
    else:
        model.norm = nn.Identity()
    return model


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("norms", ["full", "eagle1"])
def test_dense_draft_is_a_llama_behind_fc(norms, rope):
    config = llama_config(num_hidden_layers=3, rope_parameters=ROPES[rope], rms_norm_eps=1e-5)
    draft = EagleDraft(EagleConfig.from_target(config, num_layers=3, norms=norms)).init_weights(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        embeddings, hidden, positions = inputs(rows=2)
        positions = positions + torch.tensor([[0], [70]])
        fused = draft.fc(torch.cat((embeddings, hidden), -1))
        wanted = twin(draft, config)(inputs_embeds=fused, position_ids=positions, use_cache=False).last_hidden_state
        torch.testing.assert_close(run(draft, embeddings, hidden, positions), wanted, rtol=1e-4, atol=1e-4)


def test_a_draft_with_biases_is_a_qwen2_behind_fc():
    """Whose attention has biases on queries, keys and values alone; all other biases are Llama's."""
    same = {"num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    qwen2 = Qwen2Config(**llama_config(**same).to_diff_dict() | {"model_type": "qwen2"})
    every = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True)
    for theirs, flags in (
        (Qwen2Model(qwen2), {"qkv_bias": True}),
        (LlamaModel(llama_config(**same, attention_bias=True, mlp_bias=True)), every),
    ):
        draft = EagleDraft(EagleConfig.from_target(llama_config(**same), num_layers=2, **flags)).init_weights(0)
        theirs.norm = theirs.layers[0].input_layernorm = nn.Identity()
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
            for own, layer in zip(draft.layers, theirs.layers, strict=True):
                layer.load_state_dict(own.state_dict())
            embeddings, hidden, positions = inputs(rows=2)
            fused = draft.fc(torch.cat((embeddings, hidden), -1))
            wanted = theirs.eval()(inputs_embeds=fused, position_ids=positions, use_cache=False).last_hidden_state
            torch.testing.assert_close(run(draft, embeddings, hidden, positions), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_settings_are_the_targets(rope):
    config = llama_config(rope_parameters=ROPES[rope])
    positions = torch.tensor([[0, 1, 5, 64, 127]])
    cos, sin = EagleDraft(EagleConfig.from_target(config)).rotary(positions)
    wanted_cos, wanted_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(sin.shape[-1] // 2)
    torch.testing.assert_close(cos.squeeze(1), wanted_cos)
    torch.testing.assert_close(sin.squeeze(1), wanted_sin * signs)


def test_longrope_is_the_targets_within_its_context():
    target = tiny_target("phi3")
    positions = torch.tensor([[0, 5, target.max_positions - 1]])
    cos, sin = EagleDraft(EagleConfig.from_target(target.config)).rotary(positions)
    wanted_cos, wanted_sin = target.model.model.rotary_emb(torch.zeros(1), positions)
    torch.testing.assert_close(cos.squeeze(1), wanted_cos)
    torch.testing.assert_close(sin.squeeze(1).abs(), wanted_sin.abs())


@pytest.mark.parametrize("rope", PARTIAL)
def test_part_of_a_head_may_turn(rope):
    """The first half of a head is rotated as a head of half the width would be; the rest keeps its place."""
    draft = EagleDraft(EagleConfig.from_target(llama_config(rope_parameters=PARTIAL[rope])))
    cos, sin = draft.rotary(torch.tensor([[3, 7]]))
    x = torch.randn(1, 4, 2, 8)
    turned = rotate(x, (cos, sin))
    assert cos.shape[-1] == 4
    torch.testing.assert_close(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4], (cos, sin)))
    assert not torch.allclose(turned[..., :4], x[..., :4])


def test_a_draft_in_bf16_turns_as_in_fp32():
    draft, positions = tiny_draft(shared_target()), torch.tensor([[3, 1001, 100_003]])
    wanted = draft.rotary(positions)
    for found, angle in zip(copy.deepcopy(draft).to(torch.bfloat16).rotary(positions), wanted, strict=True):
        assert torch.equal(found, angle)


def test_unknown_rotary_positions():
    with pytest.raises(UserError, match=r"draft.rope_parameters.rope_type=spiral: must be one of default, "):
        EagleDraft(EagleConfig(32, 48, 4, 2, 8, 128, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}))


def test_mixture_is_llama_4s():
    draft = tiny_draft(shared_target(), ffn="moe", num_experts=3)
    mlp = draft.layers[0].mlp
    config = Llama4TextConfig(hidden_size=32, intermediate_size=48, num_local_experts=3, num_experts_per_tok=1)
    theirs = Llama4TextMoe(config)
    with torch.no_grad():
        theirs.router.weight.copy_(mlp.router.weight)
        gate_up = [torch.cat((expert.gate_proj.weight, expert.up_proj.weight)).T for expert in mlp.experts]
        theirs.experts.gate_up_proj.copy_(torch.stack(gate_up))
        theirs.experts.down_proj.copy_(torch.stack([expert.down_proj.weight.T for expert in mlp.experts]))
        theirs.shared_expert.load_state_dict(mlp.shared_expert.state_dict())
        x = inputs()[0]
        wanted, _ = theirs(x)
    assert mlp.router(x).argmax(-1).unique().numel() == 3, "each expert must be used"
    torch.testing.assert_close(mlp(x).view(-1, 32), wanted.view(-1, 32), rtol=1e-5, atol=1e-5)


def mixture_step(rows: int, low: bool, **draft) -> list[torch.Tensor]:
    """What a mixture makes of so many rows, and the gradients of all that it learns from."""
    mlp = tiny_draft(shared_target(), ffn="moe", num_experts=5, **draft).requires_grad_().layers[0].mlp
    x = torch.randn(1, rows, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        out = mlp(x)
    out.float().square().sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in mlp.parameters())]


@pytest.mark.parametrize(("low", "tolerance"), [(False, 1e-5), (True, 2e-2)])
@pytest.mark.parametrize("rows", [2, 40])
def test_experts_that_learn_together_learn_what_each_learns_alone(rows, low, tolerance):
    """With two rows most experts have none; their gradients are zeros, not missing."""
    with no_values():
        together = mixture_step(rows, low)
    with kernels.plain("experts"):
        alone = mixture_step(rows, low)
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_experts_without_a_grouped_product_learn_one_by_one(monkeypatch):
    """In fp64, and where their weights are not here before they are called."""
    monkeypatch.setattr(grouped, "swiglu", lambda *_: pytest.fail("grouped"))
    mlp = tiny_draft(shared_target(), ffn="moe", num_experts=3).double().requires_grad_().layers[0].mlp
    mlp(torch.randn(1, 4, 32, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad.dtype == torch.float64 for parameter in mlp.parameters())
    mlp.float()
    weights = {expert: expert.gate_proj.weight for expert in mlp.experts}

    def come(module, _):
        module.gate_proj.weight = weights[module]

    for expert in mlp.experts:
        expert.gate_proj.weight = nn.Parameter(torch.empty(0))
        expert.register_forward_pre_hook(come)
    mlp(torch.randn(1, 4, 32)).sum().backward()


def test_irope_layers():
    """Five layers: chunked with RoPE, but the fourth and the last see everything and know no positions."""
    draft = tiny_draft(shared_target(), num_layers=5, irope=True, attention_chunk=4)
    embeddings, hidden, positions = inputs()
    calls = []

    def attend(layer, q, k, v, rule):
        calls.append((layer, q, rule.chunk))
        return packed_attention([[12]])(layer, q, k, v, rule)

    draft(embeddings, hidden, positions, attend)
    assert [chunk for _, _, chunk in calls] == [4, 4, 4, None, None]
    for index, has_positions in enumerate([True, True, True, False, False]):
        attention, states = draft.layers[index].self_attn, []
        attention.q_proj.register_forward_hook(lambda _, __, out, states=states: states.append(out))
        attention(embeddings, draft.rotary(positions), attend)
        plain = states[0].unflatten(-1, (-1, 8)).transpose(1, 2)
        assert torch.equal(calls[-1][1], plain) != has_positions


@torch.inference_mode()
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kind", [{}, {"num_layers": 1, "norms": "full"}, {"ffn": "moe", "num_experts": 3}], ids=str)
def test_what_is_wanted_is_as_if_all_were(kind, is_fused):
    """Also nothing; and the attention is given the keys and values of all slots whatever is wanted."""
    draft = tiny_draft(shared_target(), **kind)
    draft, given, kept = fuse_products(draft) if is_fused else draft, inputs(rows=2), []

    def attend(layer, q, k, v, rule):
        kept.append(torch.cat((k, v)))
        return packed_attention([[12]] * 2)(layer, q, k, v, rule)

    every = draft(*given, attend)
    for wanted in ([[3], [11]], [[0, 7], [5, 5]], [[], []]):
        wanted = torch.tensor(wanted, dtype=torch.long)
        found = draft(*given, attend, wanted)
        torch.testing.assert_close(found, every[torch.arange(2).unsqueeze(1), wanted], rtol=1e-5, atol=1e-6)
        layers = len(draft.layers)
        torch.testing.assert_close(kept[-layers:], kept[:layers], rtol=0, atol=0)


# --- names, sizes, weights


def names(**overrides) -> set[str]:
    config = EagleConfig.from_target(llama_config(), num_layers=2, **overrides)
    return {name.removeprefix("layers.") for name in EagleDraft(config).state_dict()}


def test_tensor_names():
    block = {f"self_attn.{x}_proj.weight" for x in "qkvo"} | {"post_attention_layernorm.weight"}
    dense = block | {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    eagle1 = {"fc.weight", "1.input_layernorm.weight"} | {f"{i}.{name}" for i in (0, 1) for name in dense}
    assert names(norms="eagle1") == eagle1
    assert names(fc_bias=True) == eagle1 | {"fc.bias"}
    assert names(qkv_bias=True) == eagle1 | {f"{i}.self_attn.{x}_proj.bias" for i in (0, 1) for x in "qkv"}
    assert names(o_bias=True) == eagle1 | {f"{i}.self_attn.o_proj.bias" for i in (0, 1)}
    assert names(mlp_bias=True) == eagle1 | {f"{i}.mlp.{x}_proj.bias" for i in (0, 1) for x in ("gate", "up", "down")}
    assert names(sink=True, window=4) == eagle1 | {f"{i}.self_attn.sinks" for i in (0, 1)}
    assert names(norms="full") == eagle1 | {"0.input_layernorm.weight", "norm.weight"}
    expert = {f"{x}_proj.weight" for x in ("gate", "up", "down")}
    parts = {"router.weight"} | {f"{e}.{x}" for e in ("shared_expert", "experts.0", "experts.1") for x in expert}
    moe = {name for name in eagle1 if ".mlp." not in name} | {f"{i}.mlp.{part}" for i in (0, 1) for part in parts}
    assert names(ffn="moe", num_experts=2) == moe


def test_nothing_is_a_number_until_it_is_initialised():
    config = EagleConfig.from_target(llama_config(), norms="full", ffn="moe", num_experts=2, fc_bias=True)
    draft = EagleDraft(config)
    assert all(parameter.isnan().all() for parameter in draft.parameters())
    assert not any(parameter.isnan().any() for parameter in draft.init_weights(0).parameters())
    again, other = EagleDraft(config).init_weights(0), EagleDraft(config).init_weights(1)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))
    assert not torch.equal(draft.fc.weight, other.fc.weight)
    assert draft.num_parameters == sum(tensor.numel() for tensor in draft.state_dict().values())


def test_fresh_weights_are_as_llamas():
    shape = EagleConfig.from_target(llama_config(), norms="full", fc_bias=True, sink=True)
    draft = EagleDraft(shape).init_weights(0)
    for name, parameter in draft.named_parameters():
        if name == "fc.bias" or name.endswith("sinks"):
            assert (parameter == 0).all()
        elif parameter.ndim == 1:
            assert (parameter == 1).all()
        else:
            assert abs(parameter.std() - 0.02) < 0.003
            assert abs(parameter.mean()) < 0.003


def test_sizes_default_to_the_targets():
    config = EagleConfig.from_target(
        llama_config(head_dim=16, rms_norm_eps=1e-4), num_layers=None, intermediate_size=64
    )
    sizes = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim
    assert sizes == (32, 64, 4, 2, 16)
    assert (config.num_layers, config.rms_norm_eps, config.max_position_embeddings) == (3, 1e-4, 128)
    gemma = EagleConfig.from_target(Gemma3TextConfig(num_hidden_layers=6))
    assert gemma.rope_parameters["rope_theta"] == 1_000_000.0, "the full layers' settings, not the sliding ones'"


@pytest.mark.parametrize(
    "override",
    [
        {"num_layers": 0},
        {"norms": "eagle3"},
        {"ffn": "none"},
        {"first_token": "drop"},
        {"num_kv_heads": 3},
        {"num_layer": 3},
        {"num_layers": "three"},
        {"attention_chunk": 0},
        {"hidden_size": 16},
        {"window": 0},
        {"window": 8, "irope": True},
    ],
)
def test_impossible_values_are_refused(override):
    with pytest.raises(UserError, match=f"draft.{next(iter(override))}"):
        EagleConfig.from_target(llama_config(), **override)


def test_target_without_rotary_positions_is_refused():
    with pytest.raises(UserError):
        EagleConfig.from_target(GPT2Config())


def test_gradients_reach_every_weight():
    target = shared_target()
    draft = tiny_draft(target, ffn="moe", num_experts=2, norms="full").requires_grad_()
    tokens = torch.tensor(random_tokens(40))
    embeddings, hidden, positions = target.embed(tokens), inputs(40)[1], torch.arange(40)[None]
    run(draft, embeddings, hidden, positions).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in draft.parameters())
