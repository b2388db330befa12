"""Whether the stream of training data takes more memory the more it reads: the process's memory during one epoch.

Without `data.path` it reads made-up chats, `megabytes` of JSONL. Linux only. Knows nothing of models.

    python -m evals.stream_memory megabytes=100
    python -m evals.stream_memory data=gsm8k data.path=gsm8k_train.jsonl
"""

import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer

from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Stream
from eagle_train.progress import progress
from eagle_train.results import prepared_file, write_json
from eagle_train.settings import build
from evals.bench.config import check_least
from evals.bench.evaluation import evaluation_alone, origin
from evals.bench.memory import resident_bytes

WORDS = ("first", "list", "number", "return", "where", "value", "every", "string", "often", "between", "answer", "a")
LONGEST = 400  # words of a turn; the logarithm of their number is uniform
MARKS = 20  # samples of the memory
MICRO_BATCH_ROWS = 8


@dataclass
class Config:
    """conf/commands/stream_memory.yaml, which says what each key is."""

    out: str
    tokenizer: str
    megabytes: int
    limit_mb: float
    data: dict[str, Any]

    def __post_init__(self) -> None:
        check_least(self, 1, "megabytes")


@evaluation_alone("stream_memory")
def main(values: DictConfig) -> None:
    config = build(Config, OmegaConf.to_container(values, resolve=True), "")
    out = prepared_file(config.out)
    with tempfile.TemporaryDirectory() as folder:
        made_up = Path(folder) / "chats.jsonl"
        if config.data["path"] is None:
            write_chats(made_up, config.megabytes * 10**6, config.data["seed"])
        data = build(DataConfig, config.data | {"path": config.data["path"] or str(made_up)}, "data")
        paths = [Path(source.path) for source in data.sources.values() if source.path is not None]
        size = sum(path.stat().st_size for path in paths if path.is_file())
        found = {"bytes": size, **streamed(data, config.tokenizer)}
    found |= {"limit_mb": config.limit_mb, "config": asdict(config), **origin()}
    write_json(out, found)
    print(f"{size / 1e6:.1f} MB, {found['documents']:,} documents, {found['seconds']:.0f} s; written to {config.out}")
    print("MB during the epoch: " + " ".join(f"{held:.0f}" for held in found["held_mb"]))
    grown = found["grown_mb"]
    print(f"after the first tenth it grew by {grown:.1f} MB at most; asked: below {config.limit_mb:g}")
    sys.exit(grown >= config.limit_mb)


def write_chats(path: Path, size: int, seed: int) -> None:
    """Conversations of one or two questions and answers, `size` bytes of them."""
    rng, written = random.Random(seed), 0
    with path.open("w") as file:
        while written < size:
            roles = ("user", "assistant") * rng.randint(1, 2)
            turns = [{"role": role, "content": " ".join(rng.choices(WORDS, k=turn_length(rng)))} for role in roles]
            written += file.write(json.dumps({"messages": turns}) + "\n")


def turn_length(rng: random.Random) -> int:
    """Words of a turn."""
    return round(LONGEST ** rng.random())


def streamed(data: DataConfig, tokenizer: str) -> dict[str, Any]:
    """An epoch: its documents, its seconds, and the process's megabytes at MARKS places at most."""
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tokenizer), data.supervise)
    count = sum(1 for source in Stream(data, renderer, 1).feed.sources.values() for _ in source.rows())
    stream, started = Stream(data, renderer, MICRO_BATCH_ROWS), time.perf_counter()
    held: list[float] = []
    bar = progress(count, "document", 0)
    while stream.position.drawn < count:
        next(stream)
        if stream.position.drawn >= count * (len(held) + 1) / MARKS:
            held.append(resident_bytes() / 1e6)
            bar.update(min(count, stream.position.drawn), f"{held[-1]:.0f} MB")
    bar.close()
    stream.close()
    return {
        "documents": count,
        "counts": stream.counts,
        "seconds": time.perf_counter() - started,
        "held_mb": held,
        "grown_mb": max(held) - held[len(held) // 10],
    }


if __name__ == "__main__":
    main()
