"""Chat templates of today's families, rewritten by their meaning (tests/support/templates), what is right of each, and
a twin that renders them without the code under test. Run as a script, it writes docs/templates.md.
"""

import json
import sys
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
DAY = "2026-07-31"
IM = ("<|im_start|>", "<|im_end|>")
# Of each template: the tokenizer's EOS, the stops of generation_config.json, the other special tokens.
FAMILIES = {
    "llama31": (
        "<|eot_id|>",
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        ["<|start_header_id|>", "<|end_header_id|>"],
    ),
    "qwen3": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "<think>", "</think>"]),
    "gpt_oss": (
        "<|return|>",
        ["<|return|>", "<|endoftext|>", "<|call|>"],
        ["<|start|>", "<|end|>", "<|channel|>", "<|message|>"],
    ),
    "gemma3": ("<eos>", ["<eos>", "<end_of_turn>"], ["<start_of_turn>"]),
    "mistral": ("</s>", ["</s>"], ["[INST]", "[/INST]", "[TOOL_CALLS]"]),
    "phi3": ("<|endoftext|>", ["<|endoftext|>", "<|end|>", "<|assistant|>"], ["<|user|>", "<|system|>"]),
    "glm45": (
        "<|endoftext|>",
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
        ["[gMASK]", "<sop>", "<|assistant|>", "<|system|>"],
    ),
    "deepseek_r1": ("<|end_of_sentence|>", ["<|end_of_sentence|>"], ["<|User|>", "<|Assistant|>"]),
    "gemma4": (
        "<eos>",
        ["<eos>", "<turn|>", "<|tool_response>"],
        [
            "<|turn>",
            "<|channel>",
            "<channel|>",
            "<|tool>",
            "<tool|>",
            "<|tool_call>",
            "<tool_call|>",
            "<tool_response|>",
        ],
    ),
    "command_r7b": (
        "<|END_OF_TURN_TOKEN|>",
        ["<|END_OF_TURN_TOKEN|>"],
        [
            "<|START_OF_TURN_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_RESPONSE|>",
        ],
    ),
    "apertus": ("<|assistant_end|>", ["<|assistant_end|>", "<|tools_suffix|>"], ["<|assistant_start|>"]),
    "chatml": ("<|im_end|>", ["<|im_end|>"], ["<|im_start|>"]),
    "parts": ("<|im_end|>", ["<|im_end|>"], ["<|im_start|>"]),
    "no_prompt": ("<|im_end|>", ["<|im_end|>"], ["<|im_start|>"]),
    "marked": ("<|im_end|>", ["<|im_end|>"], ["<|im_start|>"]),
    "marked_content": ("<|im_end|>", ["<|im_end|>"], ["<|im_start|>"]),
}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "get", "arguments": {"x": 1}}}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def said(content: str, **fields: Any) -> dict:
    return {"role": "assistant", "content": content, **fields}


CONVERSATIONS = {
    "one turn": {"messages": [user("q1"), said("a1")]},
    "several": {"messages": [user("q1"), said("a1"), user("q2"), said("a2")]},
    "system": {"messages": [{"role": "system", "content": "s0"}, user("q1"), said("a1")]},
    "reasoning": {
        "messages": [user("q1"), said("a1", reasoning_content="r1"), user("q2"), said("a2", reasoning_content="r2")]
    },
    "tools": {
        "messages": [user("q1"), said("", tool_calls=[CALL]), {"role": "tool", "content": "42"}, said("a1")],
        "tools": TOOLS,
    },
}
NO_REASONING, NO_CALLS = (
    "refused: leaves out the reasoning",
    "refused: the call of get in turn 2 is not in the rendering",
)
THINKS = "refused: generation prompt ends in '<think>"
ENDED = "refused: what the model writes there is unknown; leave reasoning out of the data"


def plain(end: str, reasoning: Any = NO_REASONING, tools: Any = NO_CALLS) -> dict[str, Any]:
    one, two = [f"a1{end}"], [f"a1{end}", f"a2{end}"]
    return {"one turn": one, "several": two, "system": one, "reasoning": reasoning, "tools": tools}


def responded(answer: str) -> str:
    return f"<|START_RESPONSE|>{answer}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"


# What the assistant's turns are to be or why the row is refused. An int before them: in how many documents, if not one.
RIGHT: dict[str, dict[str, Any]] = {
    "llama31": plain("<|eot_id|>", tools=['{"name": "get", "parameters": {"x": 1}}<|eot_id|>', "a1<|eot_id|>"]),
    "qwen3": {
        "one turn": ["<think>\n\n</think>\n\na1<|im_end|>"],
        "several": [2, "<think>\n\n</think>\n\na1<|im_end|>", "<think>\n\n</think>\n\na2<|im_end|>"],
        "system": ["<think>\n\n</think>\n\na1<|im_end|>"],
        "reasoning": [2, "<think>\nr1\n</think>\n\na1<|im_end|>", "<think>\nr2\n</think>\n\na2<|im_end|>"],
        "tools": [
            2,
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\na1<|im_end|>",
        ],
    },
    "gpt_oss": {
        "one turn": ["<|channel|>final<|message|>a1<|return|>"],
        "several": [2, "<|channel|>final<|message|>a1<|return|>", "<|channel|>final<|message|>a2<|return|>"],
        "system": ["<|channel|>final<|message|>a1<|return|>"],
        "reasoning": [
            2,
            "<|channel|>analysis<|message|>r1<|end|><|start|>assistant<|channel|>final<|message|>a1<|return|>",
            "<|channel|>analysis<|message|>r2<|end|><|start|>assistant<|channel|>final<|message|>a2<|return|>",
        ],
        "tools": [
            ' to=functions.get<|channel|>commentary json<|message|>{"x": 1}<|call|>',
            "<|channel|>final<|message|>a1<|return|>",
        ],
    },
    "gemma3": plain("<end_of_turn>"),
    "mistral": {
        "one turn": [" a1</s>"],
        "several": [" a1</s>", " a2</s>"],
        "system": [" a1</s>"],
        "reasoning": NO_REASONING,
        "tools": ['[TOOL_CALLS] [{"name": "get", "arguments": {"x": 1}}]</s>', " a1</s>"],
    },
    "phi3": plain("<|end|>"),
    "glm45": {
        "one turn": ["\n<think></think>\na1<|user|>"],
        "several": ["\n<think></think>\na1<|user|>", "\n<think></think>\na2<|user|>"],
        "system": ["\n<think></think>\na1<|user|>"],
        "reasoning": [2, "\n<think>r1</think>\na1<|user|>", "\n<think>r2</think>\na2<|user|>"],
        "tools": [
            "\n<think></think>\n<tool_call>get\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
            "<|observation|>",
            "\n<think></think>\na1<|user|>",
        ],
    },
    "deepseek_r1": {
        "one turn": THINKS,
        "several": THINKS,
        "system": THINKS,
        "reasoning": [2, "r1\n</think>\n\na1<|end_of_sentence|>", "r2\n</think>\n\na2<|end_of_sentence|>"],
        "tools": THINKS,
    },
    "gemma4": {
        "one turn": ["a1<turn|>"],
        "several": [2, "a1<turn|>", "a2<turn|>"],
        "system": ["a1<turn|>"],
        "reasoning": ENDED,
        "tools": [2, '<|tool_call>call:get{"x": 1}<tool_call|><|tool_response>', "a1<turn|>"],
    },
    "command_r7b": {
        "one turn": [responded("a1")],
        "several": [2, responded("a1"), responded("a2")],
        "system": [responded("a1")],
        "reasoning": ENDED,
        "tools": [
            2,
            '<|START_ACTION|>[{"tool_name": "get", "parameters": {"x": 1}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
            responded("a1"),
        ],
    },
    "apertus": plain(
        "<|assistant_end|>", tools=['<|tools_prefix|>[{"get": {"x": 1}}]<|tools_suffix|>', "a1<|assistant_end|>"]
    ),
    "chatml": plain("<|im_end|>"),
    "parts": plain("<|im_end|>"),
    "no_prompt": plain("<|im_end|>"),
    "marked": plain("<|im_end|>"),
    "marked_content": plain(""),
}


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@cache
def alphabet(merges: int) -> str:
    """A byte-level BPE with so many merges, as JSON; white space and words merge with what is beside them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(["user assistant\n\n\n\nhello world  \n\n a1 q1 <think>\n\n"] * 3, trainer)
    return tokenizer.to_str()


def pieces_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes them, whose characters that are no piece are bytes. `prepend`: a normalizer
    puts a space before a text and behind special tokens (Llama 2); `first`: before a text alone; `always`: as
    `prepend`, by the pre-tokenizer; `none`: nowhere (Gemma); `unigram`: another model (T5)."""
    words = ["▁", "▁▁", "▁a", "▁hello", "hello", "he", "ll", *map(chr, range(33, 127))]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "▁"), ("▁", "a"), ("h", "e"), ("l", "l")]
    bpe = models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    scores = [(piece, float(len(piece)) - 9) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True) if kind == "unigram" else bpe)
    if kind in ("prepend", "none"):
        steps = [normalizers.Prepend("▁")] if kind == "prepend" else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if kind == "first" else "always"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind == "unigram")
    ends = [] if kind == "none" else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tokenizer_of(name: str, merges: int = 0, template: str | None = None) -> PreTrainedTokenizerFast:
    """A family's tokenizer: a token for each byte (and some merges), its special tokens, its template."""
    eos, stops, others = FAMILIES[name]
    backend = Tokenizer.from_str(alphabet(merges))
    special = dict.fromkeys(["<s>", eos, *stops, *others])
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    fast.chat_template = template or source(name)
    return fast


def stop_ids(name: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer.convert_tokens_to_ids(FAMILIES[name][1])


class Unmarked(Extension):
    """{% generation %} as a tag that does nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def refuse(message: str) -> None:
    raise TemplateError(message)


@cache
def compiled(text: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Unmarked, loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda format: date.fromisoformat(DAY).strftime(format),
    }
    return environment.from_string(text)


def rendered(name: str, messages: list[dict], tools: list[dict] | None = None, prompt: bool = False, **given) -> str:
    """The plain twin: what a server would make of the conversation, without the code under test."""
    if name == "parts":
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    messages = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
    known = {"bos_token": "<s>", "eos_token": FAMILIES[name][0], "tools": tools, "add_generation_prompt": prompt}
    return compiled(source(name)).render(messages=messages, **known, **given)


def page() -> str:
    """docs/templates.md: what is learnt of each conversation under each template."""
    lines = [
        "# What is learnt under which chat template",
        "",
        "The text that a draft learns to guess (data.supervise=assistant) of five conversations, under chat templates",
        "of today's families, written anew by their meaning in `tests/support/templates`. Each line is one of the",
        "assistant's turns, from the end of the prompt that a server would be given to the token that ends it; `\\n`",
        "is a line's end. Several documents: the template renders earlier turns in another way, so each turn is learnt",
        "after the prompt that a server would be given for it. `tests/corpus/test_templates.py` holds the code to",
        "this page, and `python -m tests.support.chat_templates` writes it. See the same of your own data with",
        "`eagle-train preview=10`.",
        "",
        "The conversations: *one turn* is q1, a1; *several* q1, a1, q2, a2; *system* has s0 before it; *reasoning* is",
        "several with r1 and r2 as `reasoning_content`; *tools* is q1, a call of get with {x: 1}, its result 42, a1.",
    ]
    for name, right in RIGHT.items():
        lines += ["", f"## {name}", "", "| conversation | documents | learnt |", "|---|---|---|"]
        for conversation, turns in right.items():
            lines.append(f"| {conversation} | {row_of(turns)} |")
    return "\n".join(lines) + "\n"


def row_of(turns: list | str) -> str:
    if isinstance(turns, str):
        return f"0 | {turns.replace('<', '&lt;')}"
    count, texts = documents_of(turns)
    return f"{count} | " + "<br>".join(f"`{text}`".replace("\n", "\\n").replace("|", "\\|") for text in texts)


def documents_of(turns: list) -> tuple[int, list[str]]:
    """In how many documents, and the texts."""
    return (turns[0], turns[1:]) if isinstance(turns[0], int) else (1, turns)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
