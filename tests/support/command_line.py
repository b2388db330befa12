"""Commands called in this process, what they are given on disk (a tiny target, chat data), and a disk that is full."""

import json
import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra

from tests.support.tiny import tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ';' }}{% endgeneration %}{% else %}{{ m['content'] + ';' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def call(main: Callable[[], None], *arguments: str) -> int:
    """The exit status of a command with these arguments; an exception that a shell would show as a traceback rises.

    Where nothing names `hydra.mode`, Hydra does not compose the whole config once more to read it: 0.13 s of 0.31 s.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not any(each.startswith("-") or "hydra" in each for each in arguments):
            patch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # what it returns where the config has none
        patch.setattr(sys, "argv", ["command", *arguments])
        patch.setenv("HYDRA_FULL_ERROR", "1")  # commands set it themselves, and it must not stay
        patch.delenv("HYDRA_FULL_ERROR")
        try:
            main()
        except SystemExit as end:
            return end.code or 0
    return 0


def save_target(directory: Path, template: str = TEMPLATE, **changes) -> Path:
    """A tiny Llama with its tokenizer, as on the hub. `changes`: `tiny_model`'s.

    Call it in a fixture: transformers' progress bar would be in the output that a test captures."""
    tiny_model(**changes).save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def chats(count: int, seed: int = 0) -> list[dict]:
    """Conversations of a question and an answer: letters that go on in the alphabet's order."""
    rng = random.Random(seed)

    def letters() -> str:
        start, length = rng.randrange(26), rng.randint(2, 9)
        return "".join(chr(97 + (start + i) % 26) for i in range(length))

    turns = [("user", "assistant") * rng.randint(1, 2) for _ in range(count)]
    return [{"messages": [{"role": role, "content": letters()} for role in roles]} for roles in turns]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def disk_for(num_bytes: int) -> Iterator[None]:
    """A disk that refuses a file's bytes beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


TIMES = ("tokens_per_s", "data_wait")


def train_arguments(root: Path, *overrides: str) -> list[str]:
    """Arguments of eagle-train; what is overridden twice has the last value."""
    return [
        f"target={root}/target",
        "data=messages",
        f"data.path={root}/train.jsonl",
        f"data.heldout={root}/heldout.jsonl",
        "data.row_tokens=32",
        "optim.tokens_per_step=128",
        "optim.lr=1e-3",
        "train.micro_batch_rows=2",
        "train.steps=2",
        "draft.num_layers=1",
        "draft.embedding_scale=null",
        "device=cpu",
        "target.dtype=float32",
        *overrides,
    ]


def metrics_without_times(run: Path) -> list[dict]:
    """Its records, times left out."""
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in read_jsonl(run / "metrics.jsonl")
    ]
