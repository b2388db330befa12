"""A tiny random Llama with a byte tokenizer that answers in nonsense, a draft that guesses, and questions for them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle_train.artifacts.format import save_draft
from eagle_train.drafts import Draft, Eagle3Config, Eagle3Draft, EagleConfig, EagleDraft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target

CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<' + m['role'][0] + '>' + m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a line.", "And one more."]},
    {"question_id": 82, "category": "writing", "turns": ["Name a colour.", "Why that one?"]},
    {"question_id": 101, "category": "maths", "turns": ["1 + 1?", "And twice that?"]},
]


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


def make_home(directory: Path, width: int = 32, num_layers: int = 2) -> Path:
    """A directory with a target, a draft for it and a question file. `width`: of hidden states; `num_layers`: the
    target's."""
    torch.manual_seed(0)
    tokenizer = bytes_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2 / num_layers,  # so that more layers add no more
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        torch.nn.init.normal_(matrix, std=0.5)  # more than the layers add, so that a draft can guess
    model.save_pretrained(directory / "target")
    tokenizer.save_pretrained(directory / "target")
    target = load_target(TargetConfig(str(directory / "target")), "cpu")
    save_draft(guessing_draft(target), directory / "draft", target.identity, {"tokens": 12345}, torch.float32)
    write_rows(directory / "questions.jsonl", ROWS)
    return directory


def guessing_draft(target: Target) -> Draft:
    """A draft that passes on the token's embedding, right where the target's layers add little, with a bit of all else.

    The bit of hidden state and attention changes some of its guesses, so that nothing in its input can be wrong unseen.
    """
    draft = EagleDraft(EagleConfig.from_target(target.config)).init_weights(0)
    one = torch.eye(target.config.hidden_size)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat((one, 0.15 * one), dim=1))
        for layer in draft.layers:
            layer.self_attn.o_proj.weight.normal_(std=0.05)
    return draft


def guessing_eagle3(target: Target, config: type[Eagle3Config] = Eagle3Config, **kind: Any) -> Eagle3Draft:
    """An EAGLE-3 draft, or a P-EAGLE one, that does the same: layer 0, with as many heads of keys as of queries,
    attends to its own token and passes on the embedding, beside what it is fed."""
    shape = config.from_target(target.config, num_kv_heads=target.config.num_attention_heads, **kind)
    draft = shape.module().init_weights(0, target.lm_head)
    first, one = draft.layers[0].self_attn, torch.eye(target.config.hidden_size)
    with torch.no_grad():
        for weight, share in ((first.q_proj.weight, 2.0), (first.k_proj.weight, 2.0), (first.v_proj.weight, 3.0)):
            weight[:, : len(one)] = share * one
        first.o_proj.weight.add_(one)
    return draft.requires_grad_(False)


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def arguments(home: Path, *overrides: str) -> list[str]:
    paths = [f"target.path={home}/target", f"draft.path={home}/draft", f"questions={home}/questions.jsonl"]
    return [*paths, "max_tokens=12", *overrides]
