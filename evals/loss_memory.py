"""Peak extra memory of the distillation loss, forward and backward, on the CPU, on Linux. DESIGN section 3.2.

The inputs are made first; the growth of the process's peak after that is the loss's own: its chunk buffers and both
gradients. It is compared with both models' whole logits in fp32. Knows nothing of models or data.

    python -m evals.loss_memory [rows=8192] [vocab=128256] [hidden=512] [dtype=auto] [limit_gb=1.5] [seed=0]
        [out=outputs/loss_memory.json]
"""

import sys
import time
from dataclasses import asdict, dataclass

import torch

from eagle_train.distributed import check_alone
from eagle_train.drafts.losses import default_chunk_rows, distillation_loss
from eagle_train.errors import UserError, check, report
from eagle_train.hardware import low_precision, warn_of_emulation
from eagle_train.models.target import LMHead
from eagle_train.results import prepared_file, write_json
from evals.bench.evaluation import origin
from evals.bench.memory import options, peak_bytes, resident_bytes

DTYPES = {"auto": low_precision("cpu"), "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Config:
    """`limit_gb`: the bound, in 10^9 bytes. `dtype`: `auto` is bf16 where this CPU computes in it, else fp32."""

    rows: int = 8192
    vocab: int = 128_256
    hidden: int = 512
    dtype: str = "auto"
    limit_gb: float = 1.5
    seed: int = 0
    out: str = "outputs/loss_memory.json"

    def __post_init__(self) -> None:
        for field in ("rows", "vocab", "hidden"):
            check(getattr(self, field) >= 1, f"{field}={getattr(self, field)}: must be at least 1")
        check(self.dtype in DTYPES, f"dtype={self.dtype}: must be one of {', '.join(DTYPES)}")


def measure(config: Config) -> tuple[int, float]:
    """The loss's extra bytes, from the memory before it to the process's peak (so never too few); and seconds."""
    torch.manual_seed(config.seed)
    dtype = DTYPES[config.dtype]
    head = LMHead(torch.empty(config.vocab, config.hidden, dtype=dtype).normal_(std=0.1))
    target = torch.empty(config.rows, config.hidden, dtype=dtype).normal_()
    draft = torch.empty(config.rows, config.hidden, dtype=dtype).normal_().requires_grad_()
    before = resident_bytes()
    started = time.perf_counter()
    distillation_loss(draft, target, head, scale=1 / config.rows).loss.backward()
    return peak_bytes() - before, time.perf_counter() - started


def main() -> int:
    check_alone("evals.loss_memory")
    config = options(Config, __doc__)
    out = prepared_file(config.out)
    dtype = DTYPES[config.dtype]
    warn_of_emulation("dtype", dtype, "cpu")
    shape = f"{config.rows:,} rows of width {config.hidden:,}, a vocabulary of {config.vocab:,}"
    print(f"measuring {shape}, in {str(dtype).removeprefix('torch.')}", flush=True)
    extra, seconds = measure(config)
    results = {
        "extra_gb": round(extra / 1e9, 3),
        "limit_gb": config.limit_gb,
        "naive_logits_gb": round(2 * config.rows * config.vocab * 4 / 1e9, 3),
        "seconds": round(seconds, 1),
        "chunk_rows": default_chunk_rows(config.vocab, "cpu"),
        "dtype": str(dtype).removeprefix("torch."),
        "config": asdict(config),
        **origin("loss_memory"),
    }
    write_json(out, results)
    print(f"the loss took {extra / 1e9:.3f} GB at most, in {seconds:.1f} s; asked: below {config.limit_gb:g} GB")
    print(f"the two models' whole logits in fp32 would take {results['naive_logits_gb']:.3f} GB")
    print(f"written to {config.out}")
    return 0 if extra < config.limit_gb * 1e9 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(report(error))
