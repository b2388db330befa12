"""What a device can do at most: its speed of copies, of products of a target's shapes, and of starting operations; and
a GPU's speed of finding a draft's most likely token.

Whatever reads weights cannot be faster than a copy, whatever multiplies no faster than these products, and a forward
of N operations takes at least N launches. Knows nothing of training or decoding. DESIGN section 3.8.

    python -m evals.ceilings shapes=llama3_1_8b device=cuda out=FILE.json
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.models.loading import DTYPES, default_dtype
from eagle_train.ops import few_rows
from eagle_train.results import prepared_file, write_json
from eagle_train.settings import build
from evals.bench.config import check_least, check_sizes
from evals.bench.device_times import seconds_of
from evals.bench.evaluation import evaluation_alone, origin
from evals.bench.head_times import most_likely
from evals.bench.random_models import ShapesConfig

SMALL = 64  # numbers of an operation that is all launch
LAUNCHES = 200


@dataclass(kw_only=True)
class Config:
    """conf/commands/ceilings.yaml, which says what each key is. Raises UserError for values that cannot be."""

    out: str
    device: str
    shapes: ShapesConfig
    rows: list[int]
    copied_mb: int
    repeats: int
    target: Any = None  # these three come with every file of conf/shapes
    questions: Any = None
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        check_least(self, 1, "copied_mb", "repeats")
        check_sizes("rows", self.rows)
        for key in ("target", "questions"):
            check(getattr(self, key) is None, f"{key}: leave it out; what is multiplied is random, and no text is read")
        check(self.ignore_eos, "ignore_eos=false: leave it out; nothing is generated here")


@evaluation_alone("ceilings")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device, out = resolve_device(config.device), prepared_file(config.out)
    dtype = DTYPES[config.shapes.dtype] or default_dtype(device)
    head = torch.randn(matrices(config.shapes.target)["LM head"], device=device).to(dtype)
    found: dict[str, Any] = {
        "copy_gb_per_s": copy_rate(device, config.copied_mb * 2**20, config.repeats),
        "launch_us": launch_seconds(device, config.repeats) * 1e6,
        "products": products(config, dtype, device),
        "most_likely": most_likely(head, config.rows, config.repeats),
        "dtype": str(dtype).removeprefix("torch."),
        "config": asdict(config),
        **origin(),
    }
    write_json(out, found)
    print(text(found))
    print(f"written to {config.out}")


def copy_rate(device: str, size: int, repeats: int) -> float:
    """10^9 bytes a second, read and written, of a copy of `size` bytes."""
    source = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: copied.copy_(source), device, repeats) / 1e9


def launch_seconds(device: str, repeats: int) -> float:
    """Of one of many small operations in a row."""
    x = torch.zeros(SMALL, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    return seconds_of(launches, device, repeats) / LAUNCHES


def products(config: Config, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Each of the target's matrices with each number of rows: ms, TFLOP/s, and 10^9 bytes of weight a second; and the
    ms of our own kernel in its fastest way, where it is the faster one (ops/few_rows.py)."""
    found = []
    for name, (outputs, inputs) in matrices(config.shapes.target).items():
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        for rows in config.rows:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            seconds = seconds_of(partial(_product, x, weight), device, config.repeats)
            rates: dict[str, Any] = {
                "tflops": 2 * rows * outputs * inputs / seconds / 1e12,
                "gb_per_s": weight.nbytes / seconds / 1e9,
            }
            own = few_rows.fastest(x, weight)
            if own is not None:
                taken = seconds_of(partial(few_rows.product, x, weight, way=own), device, config.repeats)
                rates |= {"own_way": own._asdict(), "own_ms": 1e3 * taken}
            found.append({"matrix": name, "rows": rows, "shape": [outputs, inputs], "ms": 1e3 * seconds, **rates})
    return found


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


def matrices(shape: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a dense layer's matrices, those side by side as one, and of the LM head."""
    width, inner = shape.hidden_size, shape.intermediate_size
    head = getattr(shape, "head_dim", None) or width // shape.num_attention_heads
    queries, keys = shape.num_attention_heads * head, shape.num_key_value_heads * head
    return {
        "qkv": (queries + 2 * keys, width),
        "o": (width, queries),
        "gate and up": (2 * inner, width),
        "down": (width, inner),
        "LM head": (shape.vocab_size, width),
    }


def text(found: dict[str, Any]) -> str:
    """For the terminal."""
    lines = [f"copy {found['copy_gb_per_s']:,.0f} GB/s, a small operation {found['launch_us']:.1f} us"]
    for one in found["products"]:
        rates = f"{one['ms']:9.3f} ms {one['tflops']:7.1f} TFLOP/s {one['gb_per_s']:7,.0f} GB/s of weight"
        rates += f", own kernel {one['own_ms']:.3f} ms" if "own_ms" in one else ""
        lines.append(f"{one['matrix']:<12}{one['rows']:>6} rows {rates}")
    for one in found["most_likely"]:
        rates = f"{one['ms']:9.3f} ms, by logits {one['by_logits_ms']:.3f} ms {one['gb_per_s']:7,.0f} GB/s of weight"
        lines.append(f"{'likeliest':<12}{one['rows']:>6} rows {rates}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
