"""Makes a small causal LM out of a few of a target's layers, for `drafter=draft_model`, trained on its distributions.

The layers, the embedding and the LM head begin as the target's, and learn its distributions (the forward KL divergence)
on chats, best of all with answers that the target wrote itself (eagle-regenerate).

python examples/small_model.py data/tiny_target outputs/small --chats data/tiny_target/answers.jsonl.gz --minutes 8
eagle-generate drafter=draft_model drafter.path=outputs/small tree=chain3 prompt='What is `len`?'
"""

import argparse
import copy
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eagle_train.errors import UserError, check, report
from eagle_train.hardware import resolve_device

BATCH_TOKENS = 2048

parser = argparse.ArgumentParser(description="Make a small draft model out of a target's layers.")
parser.add_argument("target", help="a directory or hub id")
parser.add_argument("out", help="the directory to write the model to")
parser.add_argument("--chats", required=True, help="JSON lines with `messages`")
parser.add_argument("--layers", type=int, nargs="+", help="of the target, 0 the first (first, middle and last)")
parser.add_argument("--minutes", type=float, default=8.0, help="of training (%(default)g)")
parser.add_argument("--lr", type=float, default=1e-3, help="the greatest learning rate (%(default)g)")
parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one")
args = parser.parse_args()

last = AutoConfig.from_pretrained(args.target).num_hidden_layers - 1
layers = args.layers or sorted({0, last // 2, last})
given = f"--layers {' '.join(map(str, layers))}"
in_order = layers == sorted(set(layers)) and layers[0] >= 0 and layers[-1] <= last
try:
    device = resolve_device(args.device)
    check(in_order, f"{given}: must be in rising order, each once, from 0 to {last}, the last layer of {args.target}")
except UserError as error:
    sys.exit(report(error))

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.target)
target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(device).eval().requires_grad_(False)
chats: Any = load_dataset("json", data_files=args.chats, split="train")["messages"]
ids = tokenizer.apply_chat_template(list(chats), tokenize=True, return_dict=True)["input_ids"]
texts = [torch.tensor(text) for text in ids if len(text) <= BATCH_TOKENS]

config = copy.deepcopy(target.config)
config.num_hidden_layers = len(layers)
if getattr(config, "layer_types", None):  # windows, of some families' layers
    config.layer_types = [config.layer_types[layer] for layer in layers]
small = AutoModelForCausalLM.from_config(config).to(device)
names = {f"layers.{layer}.": f"layers.{place}." for place, layer in enumerate(layers)}
kept = {}
for name, weight in target.state_dict().items():
    of = next((each for each in names if each in name), None)
    if of is not None or ".layers." not in name:
        kept[name if of is None else name.replace(of, names[of])] = weight.clone()
small.load_state_dict(kept)


def batches() -> Iterator[torch.Tensor]:
    """Tokens [B, T], texts of similar length together, padded on the right with -1, over and over."""
    while True:
        batch: list[torch.Tensor] = []
        ready = []
        for text in sorted(texts, key=lambda text: (len(text), random.random())):
            if (len(batch) + 1) * len(text) > BATCH_TOKENS:
                ready.append(batch)
                batch = []
            batch.append(text)
        for each in random.sample([*ready, batch], len(ready) + 1):
            yield torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=-1).to(device)


optimizer = torch.optim.AdamW(small.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
started, step = time.monotonic(), 0
for step, batch in enumerate(batches(), 1):
    used = (time.monotonic() - started) / 60 / args.minutes
    optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / 20, max(0.0, 1.0 - used))
    real, tokens = batch[:, 1:] >= 0, batch.clamp(min=0)
    with torch.no_grad():
        wanted = target(tokens, use_cache=False).logits[:, :-1][real].log_softmax(-1)
    found = small(tokens, use_cache=False).logits[:, :-1][real].log_softmax(-1)
    loss = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}, {used:.0%} of the time, {loss.item():.3f} nats a token", flush=True)
    if used >= 1:
        break
small.to(AutoConfig.from_pretrained(args.target).dtype or torch.float32).save_pretrained(args.out)
tokenizer.save_pretrained(args.out)
print(f"{small.num_parameters() / 1e6:.1f} M parameters, {step} steps: {args.out}")
