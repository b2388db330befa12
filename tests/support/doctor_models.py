"""How the files in tests/support/doctor were made: a target that copies letters, and drafts for it, healthy and not.

    python -m tests.support.doctor_models     # takes minutes

A question is letters, and the answer repeats them; with the template's variable `shout`, each letter is replaced by the
next one of the alphabet. Both need attention and positions, so that no convention of a draft can be wrong unseen. The
weights are committed, as they take minutes to train.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_train.artifacts.format import save_draft
from eagle_train.drafts import Draft, Head, Lesson, TargetStates, planned_config
from eagle_train.drafts.kind import Rows
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from tests.support.tiny import CHARACTERS, tiny_tokenizer

PLACE = Path(__file__).parent / "doctor"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 32  # letters of a question
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ('b:' if shout else 'a:') + m['content'] + '</s>' }}"
    "{% else %}{{ 'u:' + m['content'] + ';' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'b:' if shout else 'a:' }}{% endif %}"
)
DRAFTS = {
    "eagle": {"kind": "eagle", "num_layers": 1, "first_token": "skip"},
    "eagle3": {"kind": "eagle3", "layers": [1, 2], "vocab_size": 40, "steps": 3},
    "mtp": {"kind": "mtp", "steps": 3},
}
COUNT = 4  # the target's layers
Text = tuple[str, str]  # a question and its answer


def question(rng: random.Random, longest: int = LONGEST) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, longest)))


def answer(asked: str, shout: bool = False) -> str:
    """What the target says."""
    return "".join(LETTERS[(LETTERS.index(letter) + shout) % 26] for letter in asked)


def copied(rng: random.Random) -> tuple[Text, bool]:
    asked = question(rng)
    return (asked, answer(asked)), False


def short(rng: random.Random) -> tuple[Text, bool]:
    asked = question(rng, 8)
    return (asked, answer(asked)), False


def written_by_others(rng: random.Random) -> tuple[Text, bool]:
    """An answer that is not the target's: the letters in the alphabet's order."""
    asked = question(rng)
    return (asked, "".join(sorted(asked))), False


def either(rng: random.Random) -> tuple[Text, bool]:
    asked, shout = question(rng), rng.random() < 0.4
    return (asked, answer(asked, shout)), shout


def batch(rng: random.Random, drawn: Callable[[random.Random], tuple[Text, bool]], count: int) -> tuple:
    """Packed rows of a document each: tokens int64 [count, T], bool [count, T] where the next token is the answer's,
    and the documents' lengths, padding the last."""
    ids = {character: place + 3 for place, character in enumerate(CHARACTERS)}
    documents = []
    for _ in range(count):
        (asked, said), shout = drawn(rng)
        prompt = [ids[character] for character in f"u:{asked};{'b' if shout else 'a'}:"]
        documents.append((prompt, [ids[character] for character in said] + [2]))
    longest = max(len(prompt) + len(said) for prompt, said in documents)
    tokens, learnt = torch.zeros(count, longest, dtype=torch.long), torch.zeros(count, longest, dtype=torch.bool)
    for row, (prompt, said) in enumerate(documents):
        end = len(prompt) + len(said)
        tokens[row, :end] = torch.tensor(prompt + said)
        learnt[row, len(prompt) - 1 : end - 1] = True
    ends = [len(prompt) + len(said) for prompt, said in documents]
    return tokens, learnt, [[end, longest - end] if end < longest else [end] for end in ends]


def make_target(steps: int = 1500) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3 + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=COUNT,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model, rng = LlamaForCausalLM(config), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        most = min(LONGEST, 6 + step // 30)

        def drawn(rng: random.Random, most: int = most) -> tuple[Text, bool]:
            asked, shout = question(rng, most), rng.random() < 0.4
            return (asked, answer(asked, shout)), shout

        tokens, learnt, _ = batch(rng, drawn, 32)
        logits = model(input_ids=tokens).logits[learnt]
        loss = F.cross_entropy(logits, tokens.roll(-1, 1)[learnt])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print("target", step + 1, round(loss.item(), 4), flush=True)
    model.bfloat16().save_pretrained(PLACE / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(PLACE / "target")


def as_it_is(states: TargetStates) -> TargetStates:
    return states


def one_early(states: TargetStates) -> TargetStates:
    """The token's own hidden state in place of the one before."""
    return TargetStates(states.hidden.roll(-1, 1), states.layers)


def before_norm(states: TargetStates) -> TargetStates:
    """Hidden states before the target's final norm."""
    return TargetStates(states.layers[COUNT - 1], states.layers)


def make_draft(
    target: Target, settings: dict, drawn: Callable, steps: int, fed: Callable = as_it_is, lr: float = 3e-3
) -> Draft:
    """`fed`: what the draft is given in place of the target's states."""
    shape = planned_config(target.config, settings)
    if shape.vocab_size:
        ids = [place + 3 for place, character in enumerate(CHARACTERS) if character in LETTERS]
        shape.vocabulary = sorted({2, *ids, *range(3, 3 + shape.vocab_size - 1 - len(ids))})
        assert len(shape.vocabulary) == shape.vocab_size
    draft, rng, passes = shape.module().init_weights(0, target.lm_head), random.Random(1), shape.passes(2)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=max(steps, 2), pct_start=0.1)
    head = Head(draft, target.lm_head)
    for step in range(steps):
        tokens, learnt, lengths = batch(rng, drawn, 24)
        positions = torch.tensor([[place for length in row for place in range(length)] for row in lengths])
        layers = tuple({*shape.target_layers, *((COUNT - 1,) if fed is before_norm else ())})
        states = TargetStates.split(target.own_states(tokens, positions, lengths, layers), layers)
        slots = [(learnt & (positions >= 1 + depth)).flatten().nonzero().squeeze(1) for depth in range(passes)]
        found = draft.unrolled(draft, Rows(target.embed(tokens), fed(states), positions, lengths, target.embed), passes)
        sums = draft.losses(found, slots, states.hidden, head, Lesson(ce_weight=1.0), 1 / len(slots[0]))
        optimizer.zero_grad()
        sums.loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            share = sums.agree.item() / len(slots[0])
            print(settings["kind"], step + 1, round(sums.loss.item(), 4), round(share, 3), flush=True)
    return draft.requires_grad_(False)


def make_questions(path: Path, drawn: Callable, count: int, seed: int) -> None:
    rng, lines = random.Random(seed), []
    for _ in range(count):
        (asked, said), _ = drawn(rng)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    wanted = sys.argv[1:]
    if not wanted or "target" in wanted:
        make_target()
    target = load_target(TargetConfig(str(PLACE / "target"), dtype="float32"), "cpu")
    eagle = DRAFTS["eagle"]
    jobs: dict[str, tuple] = {name: (settings, copied, 900) for name, settings in DRAFTS.items()}
    jobs |= {"few_steps": (eagle, copied, 25), "short_texts": (eagle, short, 900)}
    jobs |= {"others_texts": (eagle, written_by_others, 900)}
    jobs |= {"own_states": (eagle, copied, 300, one_early), "before_norm": (eagle, copied, 900, before_norm)}
    for name, (settings, drawn, steps, *fed) in jobs.items():
        if not wanted or name in wanted:
            draft = make_draft(target, settings, drawn, steps, *fed)
            save_draft(draft, PLACE / name, target.identity, {"steps": steps})
    make_questions(PLACE / "questions.jsonl", copied, 24, 7)
    make_questions(PLACE / "others.jsonl", written_by_others, 24, 7)


if __name__ == "__main__":
    main()
