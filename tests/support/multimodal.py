"""Tiny random multimodal checkpoints, each a vision tower and a projector beside a language model."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support.tiny import OTHERS, SIZES

TEXT = {key: value for key, value in SIZES.items() if not key.endswith("_token_id")} | {"tie_word_embeddings": False}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_VISION = {
    **{"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
# The config's class; what its text model, its vision tower and it itself are beside TEXT and VISION.
FAMILIES: dict[str, tuple[str, dict, dict, dict]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {"rope_parameters": MROPE},
        QWEN_VISION | {"fullatt_block_indexes": [0]},
        TOKENS,
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {"rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        TOKENS,
    ),
    "mistral3": (
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": 8},
        VISION | {"model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 8},
        {"image_token_index": 90},
    ),
    "llava": (
        "LlavaConfig",
        {"model_type": "llama"},
        VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 1},
        {"image_token_index": 90},
    ),
    "gemma3": (
        "Gemma3Config",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        VISION | {"num_hidden_layers": 1},
        {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
    ),
    "gemma4": (
        "Gemma4Config",
        OTHERS["gemma4"][1],
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        {"image_token_id": 90, "audio_config": None},
    ),
}


def multimodal_config(family: str, **text: Any) -> Any:
    """A tiny config; `text`: changes of its text model's."""
    name, own_text, vision, whole = FAMILIES[family]
    values = {"text_config": TEXT | own_text | text, "vision_config": vision, "tie_word_embeddings": False} | whole
    return getattr(transformers, name)(**values)


def multimodal_model(family: str, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A random model, every weight of which matters."""
    model = transformers.AutoModelForImageTextToText.from_config(multimodal_config(family, **text))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()
