"""How much memory each rank takes to load a target that the ranks divide, against the whole of it. CPU and Linux only.

A random Llama is written in shards of bf16, loaded in fp32 by ranks that communicate over gloo, and removed. A rank's
anonymous memory is what counts; pages of the checkpoint's files, which the kernel may drop, are reported beside it. On
a CPU the layers that FSDP2 gathers for the check at the start are in the host's memory too. DESIGN section 3.4. Knows
nothing of drafts.

    python -m evals.load_memory [gigabytes=1.5] [ranks=2] [shards=8] [limit=0.75] [seed=0]
        [out=outputs/load_memory.json]
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eagle_train import distributed
from eagle_train.errors import UserError, check, report
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.results import prepared_file, write_json
from evals.bench.evaluation import origin
from evals.bench.memory import options, peak_bytes, resident_bytes, status

RANK = "rank"  # the first argument of what `measure` starts
PLACEMENTS = ("fsdp2", "tensor")
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
VOCABULARY = 4096  # small: embedding and LM head are whole on every rank
LAYER = 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096)  # bytes in bf16
INTERVAL_S = 0.002  # between two samples of the memory
# Large blocks go back to the kernel when they are freed. Otherwise glibc keeps those of gathered layers, of which it
# reuses few (aligned ones), and memory in use could not be told from freed memory.
ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}


@dataclass
class Config:
    """`gigabytes`: of the checkpoint. `limit`: the share of the whole target, as it is loaded, that a rank may take."""

    gigabytes: float = 1.5
    ranks: int = 2
    shards: int = 8
    limit: float = 0.75
    seed: int = 0
    out: str = "outputs/load_memory.json"

    def __post_init__(self) -> None:
        for field, least in (("ranks", 2), ("shards", 1)):
            check(getattr(self, field) >= least, f"{field}={getattr(self, field)}: must be at least {least}")
        check(self.gigabytes * 1e9 >= LAYER, f"gigabytes={self.gigabytes}: must be at least {LAYER / 1e9}, a layer's")


def write_checkpoint(folder: str, config: Config) -> int:
    """A random target in shards; returns its bytes in fp32."""
    torch.manual_seed(config.seed)
    layers = round(config.gigabytes * 1e9 / LAYER)
    shape = LlamaConfig(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=-(-size // config.shards))
    return 2 * size


@contextmanager
def watched(look: Callable[[], int]) -> Iterator[list[int]]:
    """The largest value of `look` while the block ran, in a list of one."""
    most, done = [look()], threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            most[0] = max(most[0], look())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield most
    done.set()
    watcher.join()


def rank_loads(folder: str, placement: str) -> None:
    """One rank's part: load, and write the memory that it took to a file."""
    torch.set_num_threads(1)
    world = distributed.start("cpu", shard_size=None, group=True)
    started, resident = status("RssAnon"), resident_bytes()
    with watched(lambda: status("RssAnon")) as most:
        target = load_target(TargetConfig(folder, dtype="float32"), "cpu", placement, world)
    found = {
        "peak": most[0] - started,
        "kept": status("RssAnon") - started,
        "peak_with_file_pages": peak_bytes() - resident,
        "layers": target.config.num_hidden_layers,
    }
    write_json(Path(folder) / f"{placement}-{world.rank}.json", found)
    distributed.leave()


def measure(folder: str, placement: str, ranks: int) -> list[dict[str, Any]]:
    """The memory of each rank, in bytes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "evals.load_memory", RANK, folder, placement]
    ended = subprocess.run(command, env=os.environ | ALLOCATOR).returncode
    check(ended == 0, f"parallel.target={placement}: the ranks ended with status {ended}; their output is above")
    return [json.loads((Path(folder) / f"{placement}-{rank}.json").read_text()) for rank in range(ranks)]


def main() -> int:
    distributed.check_alone("evals.load_memory")
    config = options(Config, __doc__)
    out = prepared_file(config.out)
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(folder, config)
        found = {placement: measure(folder, placement, config.ranks) for placement in PLACEMENTS}
    shares = {placement: max(rank["peak"] for rank in ranks) / size for placement, ranks in found.items()}
    results = {
        "bytes": size,
        "peak_share": shares,
        "ranks": found,
        "config": asdict(config),
        **origin("load_memory"),
    }
    write_json(out, results)
    for placement, share in shares.items():
        print(f"parallel.target={placement}: a rank held {share:.0%} of {size / 1e9:.2f} GB at most")
    print(f"asked: {config.limit:.0%}; written to {config.out}")
    return 0 if max(shares.values()) <= config.limit else 1


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == [RANK]:
            rank_loads(*sys.argv[2:])
        else:
            sys.exit(main())
    except UserError as error:
        sys.exit(report(error))
