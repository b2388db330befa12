"""Chats whose words are numbers, a token each, and their renderer: so a test can write down a document's tokens."""

import os
import random
import signal
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_train.corpus.render import ChatRenderer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a> {% generation %}{{ m['content'] + ' <e>' }}"
    "{% endgeneration %}{% else %}<u> {{ m['content'] }}{% endif %} {% endfor %}"
)
WORDS = 4000
START, ASSISTANT, END = 1, 2, 3  # the tokens of <u>, <a>, <e>; word i is token i + 4
LAST = 11  # the token before an answer, as long as nothing follows it
DIVIDING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a> {{ '7 ' if loop.last }}{{ m['content'] }} <e> "
    "{% else %}<u> {{ m['content'] }} {% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)


def make_renderer(supervise: str = "assistant", template: str = TEMPLATE) -> ChatRenderer:
    """One token a word, the words being numbers, so that tests can say what a document's tokens are."""
    vocabulary = ["<pad>", "<u>", "<a>", "<e>", *map(str, range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    return ChatRenderer(fast, supervise, [END] if template == DIVIDING else [])


def chat(prompt: list[int], answer: list[int]) -> dict:
    turns = (("user", prompt), ("assistant", answer))
    return {"messages": [{"role": role, "content": " ".join(map(str, words))} for role, words in turns]}


def tokens_of(row: dict) -> list[int]:
    """A chat's tokens, written down without the code under test."""
    prompt, answer = ([int(word) + 4 for word in turn["content"].split()] for turn in row["messages"])
    return [START, *prompt, ASSISTANT, *answer, END]


def make_rows(num_rows: int, longest: int = 12, seed: int = 0) -> list[dict]:
    """Chats of 1 to `longest` words a turn; each begins with its own number."""
    rng = random.Random(seed)
    words = [[rng.randrange(WORDS) for _ in range(rng.randint(0, longest))] for _ in range(2 * num_rows)]
    return [chat([i, *words[2 * i]], [i, *words[2 * i + 1]]) for i in range(num_rows)]


def die_while_writing(rows: list) -> None:
    """What a worker does that is killed when a part of its result is written."""
    results = sys._getframe(1).f_locals["result_queue"]
    with results._wlock:
        os.write(results._writer.fileno(), b"\0\0")
        os.kill(os.getpid(), signal.SIGKILL)
