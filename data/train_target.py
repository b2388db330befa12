"""Trains the bundled target: a small Llama that writes functions of Python's standard library. DESIGN section 4.

Reads the output of `stdlib_chat.py`; trains the tokenizer, then the model (Muon for matrices, AdamW for the rest, bf16
autocast where the CPU supports it) for a given time; then trains against repetition in its own answers; writes a
Hugging Face directory with a card. Run once; its output is committed. Knows nothing of drafts.

    python data/train_target.py outputs/stdlib_chat outputs/tiny_target --minutes 28 --refine 5:14 3:20 3.5:16
"""

import argparse
import copy
import json
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from eagle_train.hardware import low_precision
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models.target import Target
from eagle_train.ops.attention import causal_matmul
from eagle_train.training.muon import Muon

VOCAB_SIZE = 4096
MAX_TOKENS = 1024  # of a document; longer ones are dropped and counted
BATCH_TOKENS = 8192
TESTS_UNTIL = 0.4  # up to this share of the run, functions of the test suite are mixed in
ANSWERS, ANSWER_TOKENS = 32, 96  # how many own answers a refinement step penalises, and their length
REPEAT = 6  # a token that completes this many tokens for a second time in an answer counts as repetition
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
# Words, digits in threes, punctuation; an indentation is one token and its last space belongs to the next word.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "<|begin|>"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% elif message['role'] in ('user', 'system') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}<|end|>"
    "{% else %}{{ raise_exception('role must be system, user or assistant, not ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def read_messages(path: Path) -> list[list[dict]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the chat's special tokens and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def attention(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, scaling: float, **_: object
) -> tuple[torch.Tensor, None]:
    """The model's attention. Batches are padded on the right, so a causal mask is enough."""
    return causal_matmul(q, k, v, scaling).transpose(1, 2), None


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    AttentionInterface.register("causal", attention)
    config = LlamaConfig(
        attn_implementation="causal",
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def render(tokenizer: PreTrainedTokenizerFast, conversations: list[list[dict]]) -> list[torch.Tensor]:
    """Conversations as int64 tokens [n]; prints how many were dropped because they exceed MAX_TOKENS."""
    ids = tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True)["input_ids"]
    kept = [torch.tensor(document) for document in ids if len(document) <= MAX_TOKENS]
    print(f"{len(kept)} documents, {sum(map(len, kept)) / 1e6:.2f} M tokens; {len(ids) - len(kept)} too long")
    return kept


def batches(documents: list[torch.Tensor], rng: random.Random) -> Iterator[torch.Tensor]:
    """One epoch of batches int64 [B, T]: documents of similar length together, padded on the right with -100."""
    order = rng.sample(documents, len(documents))
    ready = []
    for start in range(0, len(order), 2048):
        batch: list[torch.Tensor] = []
        for document in sorted(order[start : start + 2048], key=len):
            if (len(batch) + 1) * len(document) > BATCH_TOKENS:
                ready.append(batch)
                batch = []
            batch.append(document)
        if len(batch) < 4 and ready:  # a batch of one would be compiled separately
            ready[-1] += batch
        else:
            ready.append(batch)
    for batch in rng.sample(ready, len(ready)):
        yield torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy of a batch. The padding is on the right, so the causal mask is enough."""
    hidden = model.model(input_ids=batch.clamp(min=0), use_cache=False).last_hidden_state
    logits = F.linear(hidden[:, :-1].flatten(0, 1), model.lm_head.weight)
    return F.cross_entropy(logits.float(), batch[:, 1:].flatten(), ignore_index=-100)


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def autocast() -> torch.autocast:
    dtype = low_precision("cpu")
    return torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)


def learning_rate(progress: float) -> float:
    """Share of the peak: a short warm-up, a plateau, then a linear decay to 0."""
    return min(1.0, progress / 0.01, max(0.0, (1 - progress) / 0.6))


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, documents: list[torch.Tensor]) -> float:
    """Mean loss per token, in nats, over whole documents (questions included)."""
    total = tokens = 0
    for batch in batches(documents, random.Random(0)):
        count = int((batch[:, 1:] >= 0).sum())
        with autocast():
            total += loss_of(model, batch).item() * count
        tokens += count
    return total / tokens


def train(model: LlamaForCausalLM, pools: dict[str, list[torch.Tensor]], minutes: float, out: Path) -> dict:
    """Train in place for `minutes`; returns figures for the card."""
    compiled = torch.compile(loss_of, dynamic=True)
    with autocast():  # compiled before the clock starts
        compiled(model, torch.randint(0, VOCAB_SIZE, (16, 256))).backward()
    groups = optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in groups]
    rng = random.Random(0)
    start = time.monotonic()
    steps = tokens = 0
    epoch: Iterator[torch.Tensor] = iter(())
    mixed = True
    while (progress := (time.monotonic() - start) / 60 / minutes) < 1:
        if mixed and progress > TESTS_UNTIL:
            mixed, epoch = False, iter(())
        batch = next(epoch, None)
        if batch is None:
            epoch = batches(pools["train"] + (pools["tests"] if mixed else []), rng)
            continue
        for optimizer, peak in zip(groups, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * learning_rate(progress)
            optimizer.zero_grad()
        with autocast():
            loss = compiled(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in groups:
            optimizer.step()
        steps += 1
        tokens += int((batch >= 0).sum())
        if steps % 20 == 0:
            print(f"{progress:6.1%}  step {steps}  {tokens / 1e6:.2f} M tokens  loss {loss.item():.3f}", flush=True)
        if steps % 200 == 0:
            print(f"held-out loss {heldout_loss(model, pools['heldout']):.3f}", flush=True)
            model.save_pretrained(out)
    return {"minutes": minutes, "steps": steps, "tokens": tokens}


def own_answers(model: LlamaForCausalLM, prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with the model's greedy answers, int64 [B, T], -100 after the end; and repetition, bool [B, T].

    A token is a repetition if it completes REPEAT tokens that occurred earlier in the answer.
    """
    engine = Engine(Target(copy.deepcopy(model)), max_batch_size=len(prompts))
    outputs = engine.generate([prompt.tolist() for prompt in prompts], SamplingParams(max_tokens=ANSWER_TOKENS))
    texts, repeats = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer, seen, flags = output.token_ids, set(), [False] * len(prompt)
        for end in range(1, len(answer) + 1):
            run = tuple(answer[max(0, end - REPEAT) : end])
            flags.append(len(run) == REPEAT and run in seen)
            seen.add(run)
        texts.append(torch.cat((prompt, torch.tensor(answer))))
        repeats.append(torch.tensor(flags))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(texts, batch_first=True, padding_value=-100), pad(repeats, batch_first=True, padding_value=False)


def unlikelihood(model: LlamaForCausalLM, batch: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
    """-log(1 - p), summed over the repeated tokens and divided by their number, or by 64 if they are fewer.

    Sequence-level unlikelihood: Welleck et al., arXiv 1908.04319.
    """
    hidden = model.model(input_ids=batch.clamp(min=0), use_cache=False).last_hidden_state
    rows = repeats[:, 1:]
    logits = F.linear(hidden[:, :-1][rows], model.lm_head.weight).float()
    p = logits.softmax(-1).gather(-1, batch[:, 1:][rows].unsqueeze(-1))
    return -torch.log1p(-p.clamp(max=1 - 1e-6)).sum() / max(64, int(rows.sum()))


def refine(
    model: LlamaForCausalLM, documents: list[torch.Tensor], assistant: int, minutes: float, divisor: float
) -> tuple[int, int]:
    """Train on for `minutes`, from the learning rates divided by `divisor` down to 0, also against repetition.

    Returns the numbers of steps and tokens.
    """
    groups = optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] / divisor for optimizer in groups]
    rng = random.Random(1)
    start = time.monotonic()
    steps = tokens = 0
    epoch: Iterator[torch.Tensor] = iter(())
    while (progress := (time.monotonic() - start) / 60 / minutes) < 1:
        batch = next(epoch, None)
        if batch is None:
            epoch = batches(documents, rng)
            continue
        for optimizer, peak in zip(groups, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * (1 - progress)
            optimizer.zero_grad()
        with autocast():
            loss = loss_of(model, batch)
            loss.backward()
        asked = [text[: text.tolist().index(assistant) + 1] for text in rng.sample(documents, ANSWERS)]
        answers, repeats = own_answers(model, asked)
        with autocast():
            unlikelihood(model, answers, repeats).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in groups:
            optimizer.step()
        steps += 1
        tokens += int((batch >= 0).sum())
        repeated = repeats.sum() / (ANSWERS * ANSWER_TOKENS)
        print(f"{progress:6.1%}  step {steps}  loss {loss.item():.3f}  repeated {repeated:.1%}", flush=True)
    return steps, tokens


def write_card(out: Path, facts: dict) -> None:
    text = f"""# The bundled target

A Llama of {facts["parameters"] / 1e6:.1f} M parameters ({facts["layers"]} layers x 256) that answers questions about
Python's standard library with code. It stands in for a real target where none can be downloaded; it is good for
nothing else.

| | |
|---|---|
| trained on | functions of Python {facts["python"]}'s standard library as chat, with the first line of their \
docstrings, without comments, annotations, and prose in strings ({facts["train"]} documents); \
in the first {TESTS_UNTIL:.0%} of the run also its test suite's ({facts["tests"]} documents) |
| held out | {facts["heldout"]} functions, chosen by a hash of their names |
| for | {facts["minutes"]:.0f} minutes on two CPU cores: {facts["steps"]} steps, {facts["tokens"] / 1e6:.1f} M tokens |
| then | {facts["refine"]} (minutes:divisor of the learning rates), {facts["refine_steps"]} steps, \
{facts["refine_tokens"] / 1e6:.1f} M tokens, in which it also unlearned repetition: in its own greedy answers, tokens \
that complete {REPEAT} tokens for a second time (unlikelihood, arXiv 1908.04319) |
| weights | {facts["blend"]:.0%} those of the last refinement, the rest those of the one before |
| held-out loss | {facts["heldout_loss"]:.3f} nats per token, questions included |
| tokenizer | byte-level BPE of {VOCAB_SIZE} tokens, trained on the same text |
| optimiser | Muon (lr 0.02) for matrices, AdamW (lr 4e-3) for the rest, bf16 autocast, linear decay |
| made by | `python data/stdlib_chat.py outputs/stdlib_chat` and `python data/train_target.py outputs/stdlib_chat \
data/tiny_target --minutes {facts["minutes"]:.0f} --refine {facts["refine"]} --blend {facts["blend"]:g}`; its answers, \
`answers.jsonl.gz`, by `eagle-regenerate`, of up to {ANSWER_TOKENS} tokens |
| with | Python {facts["python"]}, torch {torch.__version__} |
| licence of the text | Python's (PSF-2.0) |
"""
    (out / "README.md").write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the bundled target on a CPU; data/tiny_target/README.md has its figures."
    )
    parser.add_argument("chat", type=Path, help="the directory stdlib_chat.py wrote")
    parser.add_argument("out", type=Path, help="the directory to write the target to")
    parser.add_argument("--minutes", type=float, default=28.0, help="of the first run (%(default)g)")
    refinement = "of each refinement, and the divisor of its learning rates (%(default)s)"
    parser.add_argument(
        "--refine", nargs="+", default=["5:14", "3:20", "3.5:16"], metavar="MINUTES:DIVISOR", help=refinement
    )
    parser.add_argument(
        "--blend", type=float, default=0.7, help="the share of the last refinement's weights (%(default)g)"
    )
    args = parser.parse_args()
    refinements = [tuple(map(float, each.split(":"))) for each in args.refine]
    torch.manual_seed(0)
    conversations = {split: read_messages(args.chat / f"{split}.jsonl") for split in ("train", "tests", "heldout")}
    sample = conversations["train"] + conversations["tests"][::4]
    tokenizer = train_tokenizer(message["content"] for messages in sample for message in messages)
    tokenizer.save_pretrained(args.out)
    pools = {split: render(tokenizer, rows) for split, rows in conversations.items()}
    model = build_model(tokenizer)
    facts = train(model, pools, args.minutes, args.out)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    facts |= {"refine": " ".join(args.refine), "refine_steps": 0, "refine_tokens": 0, "blend": args.blend}
    for minutes, divisor in refinements:
        before = copy.deepcopy(model)
        steps, tokens = refine(model, pools["train"], assistant, minutes, divisor)
        facts["refine_steps"] += steps
        facts["refine_tokens"] += tokens
    with torch.no_grad():
        for last, earlier in zip(model.parameters(), before.parameters(), strict=True):
            last.lerp_(earlier, 1 - args.blend)
    facts |= {split: len(documents) for split, documents in pools.items()}
    facts |= {"parameters": model.num_parameters(), "layers": model.config.num_hidden_layers}
    facts |= {"heldout_loss": heldout_loss(model, pools["heldout"]), "python": platform.python_version()}
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(args.out)
    write_card(args.out, facts)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
