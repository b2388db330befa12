"""How long the distillation loss takes, forward and backward, and what memory: by one kernel and by torch's products.

Of a micro-batch's supervised rows, whose logits are made in chunks; a chunk of more rows takes more memory. On a CPU,
which has no such kernel, only torch's. Knows nothing of models or data. DESIGN section 3.2.

    python -m evals.loss_times [rows=8192] [vocab=128256] [hidden=4096] [dtype=bfloat16] [device=auto]
        [chunks=[256,1024,2048]] [kinds=[ce,lk]] [repeats=5] [seed=0] [out=outputs/loss_times.json]
"""

import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from eagle_train.distributed import check_alone
from eagle_train.drafts.losses import LOGITS_LOSSES, distillation_loss, is_fused_loss
from eagle_train.errors import UserError, check, report
from eagle_train.hardware import resolve_device
from eagle_train.models.head import LMHead
from eagle_train.models.loading import DTYPES
from eagle_train.ops.kernels import plain
from eagle_train.results import in_words, prepared_file, write_json
from evals.bench.config import check_least, check_sizes
from evals.bench.device_times import seconds_of
from evals.bench.evaluation import origin
from evals.bench.memory import options

WAYS: dict[str, tuple[str, ...]] = {"fused": (), "plain": ("loss",)}  # the kernels that each leaves out


@dataclass
class Config:
    """The defaults are a micro-batch of Llama 3.1 8B. Raises UserError for values that cannot be."""

    rows: int = 8192
    vocab: int = 128_256
    hidden: int = 4096
    dtype: str = "bfloat16"
    device: str = "auto"
    chunks: list[int] = field(default_factory=lambda: [256, 1024, 2048])
    kinds: list[str] = field(default_factory=lambda: ["ce", "lk"])
    repeats: int = 5
    seed: int = 0
    out: str = "outputs/loss_times.json"

    def __post_init__(self) -> None:
        check_least(self, 1, "rows", "vocab", "hidden", "repeats")
        check_sizes("chunks", self.chunks)
        known = [name for name in DTYPES if name != "auto"]
        check(self.dtype in known, f"dtype={self.dtype}: must be one of {', '.join(known)}")
        for kind in self.kinds:
            check(kind in LOGITS_LOSSES, f"kinds={self.kinds}: must be of {', '.join(LOGITS_LOSSES)}")


def measure(config: Config, device: str) -> list[dict[str, Any]]:
    """A row for each loss, way and chunk: `ms`, and on a GPU `bytes`, the most beside the inputs."""
    torch.manual_seed(config.seed)
    dtype = DTYPES[config.dtype]
    head = LMHead(torch.randn(config.vocab, config.hidden, device=device).mul_(0.1).to(dtype))
    target, draft = (torch.randn(config.rows, config.hidden, device=device).to(dtype) for _ in range(2))
    draft.requires_grad_()
    found = []
    for kind in config.kinds:
        for way, without in WAYS.items():
            with plain(*without):
                if way == "fused" and not is_fused_loss(head(target[:1]), kind):
                    continue
                for chunk in config.chunks:
                    step = partial(_step, draft, target, head, kind, chunk)
                    ms = 1e3 * seconds_of(step, device, config.repeats)
                    most = _most(step, draft) if device == "cuda" else None
                    found.append({"loss": kind, "way": way, "chunk_rows": chunk, "ms": ms, "bytes": most})
    return found


def _step(draft: torch.Tensor, target: torch.Tensor, head: LMHead, kind: str, chunk: int) -> None:
    draft.grad = None
    distillation_loss(draft, target, head, logits_loss=kind, scale=1 / len(draft), chunk_rows=chunk).loss.backward()


def _most(step: Any, draft: torch.Tensor) -> int:
    draft.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def text(rows: list[dict[str, Any]]) -> str:
    """For the terminal."""
    lines = []
    for row in rows:
        most = "" if row["bytes"] is None else f"{in_words(row['bytes']):>12} at most"
        lines.append(f"{row['loss']:<6}{row['way']:<7}{row['chunk_rows']:>6} rows a chunk {row['ms']:9.1f} ms{most}")
    return "\n".join(lines)


def main() -> int:
    check_alone("evals.loss_times")
    config = options(Config, __doc__)
    out, device = prepared_file(config.out), resolve_device(config.device)
    rows = measure(config, device)
    write_json(out, {"rows": rows, "device": device, "config": asdict(config), **origin("loss_times")})
    print(text(rows))
    print(f"written to {config.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(report(error))
