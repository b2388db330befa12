"""Tiny random targets of several families, and drafts for them, on which tests run in milliseconds."""

from functools import cache
from typing import TypeVar

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from eagle_train.drafts import (
    Draft,
    Eagle3Config,
    Eagle3Draft,
    EagleConfig,
    EagleDraft,
    Head,
    Lesson,
    MedusaConfig,
    MedusaDraft,
    MtpConfig,
    MtpDraft,
    PeagleConfig,
    PeagleDraft,
    TargetStates,
    shift_hidden,
)
from eagle_train.drafts.kind import Rows
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from tests.support.kept import kept

D = TypeVar("D", bound=Draft)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What torch's FlopCounterMode does not know yet.
GROUPED_FLOPS = {torch.ops.aten._grouped_mm: lambda x, matrices, *_, **__: 2 * x[0] * x[1] * matrices[2]}
# Windows and chunks are shorter than the tests' sequences, and where layer types take turns each is there.
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    # tied, a random Gemma 2 repeats one token
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "sliding_window": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "floor_scale": 4,  # from this position on, queries of layers without rotary positions are scaled
            "attn_scale": 0.5,
        },
    ),
    "cohere2": ("Cohere2Config", {"num_hidden_layers": 4, "sliding_window": 8}),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 5.0, 9.0],
}
GEMMA_4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100000.0},
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
# What tests of every family do not run.
OTHERS = {
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 48, "rope_parameters": LONGROPE}),
    "dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 3,
        },
    ),
    # wider heads in some layers, and layers that are given the keys and values of others
    "gemma4": (
        "Gemma4TextConfig",
        {
            **{"num_hidden_layers": 6, "num_kv_shared_layers": 2, "global_head_dim": 16, "sliding_window": 8},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "rope_parameters": GEMMA_4_ROPE},
            **{"layer_types": ["sliding_attention", "full_attention"] * 3, "tie_word_embeddings": False},
        },
    ),
    # a state beside attention: convolutions, linear attention, its gated norms, and a mixer in the layers that attend
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "minimax": ("MiniMaxConfig", {"num_local_experts": 2, "block_size": 8}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "mlp_only_layers": [0, 1, 2],
        },
    ),
    "falcon_h1": ("FalconH1Config", {"mamba_d_ssm": 32, **MAMBA}),
}
LAYERED = ("deepseek_v3", "gemma4")  # whose keys and values are not of one shape
STATEFUL = ("lfm2", "minimax", "qwen3_next", "falcon_h1")
CHARACTERS = "".join(map(chr, range(33, 126)))  # one token each, behind the three special ones
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tiny_model(family: str = "llama", seed: int = 0, std: float = 0.2, **changes) -> PreTrainedModel:
    """A random model whose matrices, norms, biases and sinks all matter. `changes`: of the config."""
    config_class, own = (FAMILIES | OTHERS)[family]
    config = getattr(transformers, config_class)(**SIZES | own | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(std * noise)
            else:
                parameter.add_(std * noise)
    return model.eval()


def tiny_target(family: str = "llama", tokenizer=None, dtype: torch.dtype = torch.float32, **changes) -> Target:
    return Target(tiny_model(family, **changes).to(dtype), tokenizer, name=f"tiny-{family}")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each printable character, and a chat template."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_draft(target: Target, seed: int = 0, num_layers: int = 2, **overrides) -> Draft:
    """A random draft in which every layer matters, unlike in a fresh one."""
    return randomised(EagleDraft(EagleConfig.from_target(target.config, num_layers=num_layers, **overrides)), seed)


def randomised(draft: D, seed: int) -> D:
    """With random parameters of which all matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else 1 + 0.2 * noise)
    return draft.requires_grad_(False)


def tiny_eagle3(target: Target, seed: int = 0, **overrides) -> Eagle3Draft:
    """The same of EAGLE-3; of a target with three layers it fuses the first two's outputs unless told."""
    shape = Eagle3Config.from_target(target.config, **{"layers": [1, 2]} | overrides)
    return randomised(Eagle3Draft(shape), seed)


def tiny_medusa(target: Target, seed: int = 0, **overrides) -> MedusaDraft:
    """The same of Medusa heads."""
    return randomised(MedusaDraft(MedusaConfig.from_target(target.config, **overrides)), seed)


def tiny_mtp(target: Target, seed: int = 0, **overrides) -> MtpDraft:
    """The same of an MTP module."""
    return randomised(MtpDraft(MtpConfig.from_target(target.config, **overrides)), seed)


def tiny_peagle(target: Target, seed: int = 0, **overrides) -> PeagleDraft:
    """The same of P-EAGLE, with two layers unless told."""
    shape = PeagleConfig.from_target(target.config, **{"layers": [1, 2], "num_layers": 2} | overrides)
    return randomised(PeagleDraft(shape), seed)


@kept
def trained_draft(target: Target, steps: int = 150, **overrides) -> Draft:
    """A draft that agrees with the target now and then: a moment's training on random tokens, mended by DESIGN 3.2."""
    draft = EagleDraft(EagleConfig.from_target(target.config, **{"num_layers": 1} | overrides)).init_weights(0)
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(16).expand(32, -1)
    attend = packed_attention([[16]] * 32)
    for _ in range(steps):
        tokens = torch.randint(target.identity.vocab_size, (32, 16), generator=generator)
        hidden = target.hidden_states(tokens, positions, attend)
        previous = shift_hidden(hidden, positions)
        predicted = draft(target.embed(tokens), previous, positions, attend)
        logits, wanted = target.lm_head(predicted), target.lm_head(hidden).softmax(-1)
        loss = F.smooth_l1_loss(predicted, hidden) + F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.requires_grad_(False)


@kept
def trained_eagle3(target: Target, steps: int = 150, **overrides) -> Eagle3Draft:
    """The same of EAGLE-3, by its own losses."""
    shape = Eagle3Config.from_target(target.config, **{"layers": [1], "steps": 3} | overrides)
    return _trained(Eagle3Draft(shape), target, steps)


@kept
def trained_medusa(target: Target, steps: int = 150, temperature: float = 0.0, **overrides) -> MedusaDraft:
    """The same of Medusa heads, on texts that the target wrote: of random ones nobody knows the second next token."""
    draft = MedusaDraft(MedusaConfig.from_target(target.config, **overrides))
    return _trained(draft, target, steps, _written(target, temperature))


@kept
def trained_mtp(target: Target, steps: int = 150, **overrides) -> MtpDraft:
    """The same of an MTP module, by its own losses."""
    return _trained(MtpDraft(MtpConfig.from_target(target.config, **overrides)), target, steps)


@kept
def trained_peagle(target: Target, steps: int = 150, **overrides) -> PeagleDraft:
    """The same of P-EAGLE, on texts that the target wrote, as Medusa heads."""
    small = {"layers": [1], "steps": 5, "num_layers": 1}
    draft = PeagleDraft(PeagleConfig.from_target(target.config, **small | overrides))
    return _trained(draft, target, steps, _written(target, 0.0))


def _trained(draft: D, target: Target, steps: int, texts: torch.Tensor | None = None) -> D:
    """With weights of a moment's training by its own losses. `texts`: int64 [texts, 16]; None: random tokens."""
    shape, generator = draft.config, torch.Generator().manual_seed(0)
    draft.init_weights(0, target.lm_head)
    optimizer, head = torch.optim.Adam(draft.parameters(), lr=5e-3), Head(draft, target.lm_head)
    lengths, positions = [[16]] * 32, torch.arange(16).expand(32, -1)
    slots = [(positions >= 1 + step).flatten().nonzero().squeeze(1) for step in range(shape.passes(1))]
    for _ in range(steps):
        tokens = torch.randint(target.identity.vocab_size, (32, 16), generator=generator)
        if texts is not None:
            tokens = texts[torch.randint(len(texts), (32,), generator=generator)]
        states = TargetStates.split(
            target.own_states(tokens, positions, lengths, shape.target_layers), shape.target_layers
        )
        rows = Rows(target.embed(tokens), states, positions, lengths, target.embed)
        passes = draft.unrolled(draft, rows, len(slots))
        optimizer.zero_grad()
        draft.losses(passes, slots, states.hidden, head, Lesson(), 1 / len(slots[0])).loss.backward()
        optimizer.step()
    return draft.requires_grad_(False)


@torch.no_grad()
def _written(target: Target, temperature: float, count: int = 256) -> torch.Tensor:
    """Texts int64 [count, 16] that the target writes behind two random tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(target.identity.vocab_size, (count, 2), generator=generator)
    while (length := tokens.shape[1]) < 16:
        positions = torch.arange(length).expand(count, -1)
        logits = target.lm_head(target.own_states(tokens, positions, [[length]] * count)[:, -1])
        drawn = logits.argmax(-1, keepdim=True)
        if temperature > 0:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn), 1)
    return tokens


@cache
def shared_target(family: str = "llama") -> Target:
    """A family's target, made once; nobody may change it."""
    return tiny_target(family)


@cache
def repeating_target(share: float = 0.1) -> Target:
    """One whose next token depends mostly on the last, so that its answers repeat themselves; nobody may change it.
    `share`: of what its layers add that is left."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(share)
            layer.mlp.down_proj.weight.mul_(share)
    return Target(model, name="tiny-llama")


def random_tokens(*lengths: int, vocabulary: int = SIZES["vocab_size"], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def continued(target: Target, prompt: list[int], length: int, **how) -> list[int]:
    """What `transformers.generate` goes on with at temperature 0, with its own attention and cache. `how`: more of its
    arguments."""
    target.model.set_attn_implementation("eager")
    tokens = torch.tensor([prompt])
    given = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None} | how
    out = target.model.generate(tokens, attention_mask=torch.ones_like(tokens), **given)
    target.model.set_attn_implementation("eagle_train")
    return out[0, len(prompt) :].tolist()
