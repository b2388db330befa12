"""Medusa heads as TensorRT-LLM loads them: the files of Medusa's own repository (FasterDecoding/Medusa)."""

import re
from typing import TYPE_CHECKING, Any

import torch

from eagle_train.drafts.layouts import Layout, Shapes, Tensors, first_of
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.target import Identity

if TYPE_CHECKING:
    from eagle_train.drafts.medusa import MedusaConfig

HEADS_FILE = "medusa_lm_head.safetensors"
BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
_OUR_BLOCK = re.compile(r"layers\.(\d+)\.mlp\.(\d+)\.(weight|bias)")


def is_block(name: str) -> bool:
    """Whether it is a tensor of a Medusa head's block, by its name in either layout. Training begins with zeros there,
    and with normal numbers in every other kind's matrices."""
    return bool(BLOCK.fullmatch(name) or _OUR_BLOCK.fullmatch(name))


class _Medusa(Layout):
    """Head i, from 0 on: `i.j.linear` for each of its blocks, and `i.B.weight`, B their number: its LM head, which is
    the target's where the draft has none of its own."""

    weights = HEADS_FILE
    reads_hub = False
    serves = """\
```bash
python examples/medusa/convert_checkpoint.py --model_dir {target} --medusa_model_dir {here} \\
    --num_medusa_heads {levels} --num_medusa_layers {blocks} --output_dir converted
trtllm-build --checkpoint_dir converted --speculative_decoding_mode medusa --output_dir engine
```

This is for TensorRT-LLM's TensorRT backend and for targets of Llama's layers, and runs in a clone of TensorRT-LLM, of a
release up to 1.2."""

    def repeats(self, draft: "MedusaConfig") -> str | None:
        return None if draft.own_head else "LM head"

    def refusal(self, draft: "MedusaConfig", quant: Quant) -> str | None:
        return first_of(
            {
                "proposes from the target's whole vocabulary, and this draft has a part of it (draft.vocab_size)": bool(
                    draft.vocab_size
                ),
                "reads no weights in compressed-tensors' formats (quant)": quant.scheme != "none",
            }
        )

    def config(self, draft: "MedusaConfig", quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        return {
            "medusa_num_heads": draft.heads,
            "medusa_num_layers": draft.num_layers,
            "base_model_name_or_path": target.name,
            "hidden_size": draft.hidden_size,
            "vocab_size": target.vocab_size,
            "torch_dtype": dtype,
        }

    def tensors(
        self, draft: "MedusaConfig", tensors: Tensors, repeated: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            block = _OUR_BLOCK.fullmatch(name)
            own = f"{block[1]}.{block[2]}.linear.{block[3]}" if block else None
            found[own or f"{name.split('.')[1]}.{draft.num_layers}.weight"] = tensor
        if not draft.own_head:
            assert repeated is not None
            head = repeated.detach().to("cpu", next(iter(tensors.values())).dtype)
            found |= {f"{i}.{draft.num_layers}.weight": head.clone() for i in range(draft.heads)}
        return found

    def ours(self, draft: "MedusaConfig", tensors: Tensors) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            head = LM_HEAD.fullmatch(name)
            if head is None:
                found[BLOCK.sub(r"layers.\1.mlp.\2.\3", name)] = tensor
            elif draft.own_head:
                found[f"lm_head.{head[1]}.weight"] = tensor
        return found

    def shapes(self, draft: "MedusaConfig", target: Identity) -> Shapes:
        width, found = draft.hidden_size, dict[str, tuple[int, ...]]()
        for head in range(draft.heads):
            for block in range(draft.num_layers):
                found[f"{head}.{block}.linear.weight"] = (width, width)
                found[f"{head}.{block}.linear.bias"] = (width,)
            found[f"{head}.{draft.num_layers}.weight"] = (target.vocab_size, width)
        return found


LAYOUTS: dict[str, Layout] = {"trtllm": _Medusa()}
