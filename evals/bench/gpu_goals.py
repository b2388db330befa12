"""What a day with a GPU is to show at Llama 3.1 8B's shapes on an H100, and what the parts of launch/gpu_day.sh found.

Knows nothing of how anything was measured.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Found = Mapping[str, Any]
LONGEST = 2048  # tokens of context, of goals for short ones


@dataclass(frozen=True)
class Goal:
    """`wanted`: at most, or at least where `at_least`. `parts`: that measure it, the best of which counts. `values`: of
    what a part wrote, none where it was not measured."""

    name: str
    unit: str
    wanted: float
    parts: tuple[str, ...]
    values: Callable[[Found], Iterable[float | None]]
    at_least: bool = False

    def judged(self, results: Mapping[str, Found]) -> dict[str, Any]:
        """`found` and `part`, None where nothing was measured; `reached`, likewise; `off`: the share of `wanted` by
        which it was missed."""
        known = [part for part in self.parts if part in results]
        values = [(value, part) for part in known for value in self.values(results[part]) if value is not None]
        best = (max if self.at_least else min)(values, default=(None, None))
        found, part = best
        told = {"goal": self.name, "unit": self.unit, "wanted": self.wanted, "at_least": self.at_least}
        if found is None:
            return {**told, "found": None, "part": None, "reached": None, "off": None}
        missed = (self.wanted - found if self.at_least else found - self.wanted) / self.wanted
        return {**told, "found": found, "part": part, "reached": missed <= 0, "off": max(0.0, missed)}


def _micro_batch_ms(found: Found) -> Iterator[float]:
    config = found["config"]
    yield 1e3 * found["ours"]["step_s"] * config["row_tokens"] * config["micro_batch_rows"] / config["tokens_per_step"]


def _of(rows: Iterable[Found], decoding: str, batch: int) -> list[Found]:
    ours = [row for row in rows if (row["decoding"], row["batch_size"]) == (decoding, batch)]
    return [row for row in ours if row["context_length"] <= LONGEST]


def _step_ms(batch: int) -> Callable[[Found], list[float]]:
    """Of plain decoding: between two tokens."""
    return lambda found: [1e3 * row["ttit_p50_s"] for row in _of(found["rows"], "plain", batch)]


def _round_ms(found: Found) -> list[float]:
    """Of chain 3, without waits around its stages where it was profiled."""
    alone = [row["undisturbed_ms"] for row in _of(found.get("profiles", []), "chain3", 1)]
    return alone or [row["round_ms"] for row in _of(found["breakdown"], "chain3", 1)]


def _drafting_ms(found: Found) -> list[float]:
    return [row["stages_ms"]["drafting"] for row in _of(found["breakdown"], "chain3", 1)]


def _idle(found: Found) -> list[float | None]:
    shares = [row["busy_undisturbed"] for row in _of(found.get("profiles", []), "chain3", 1)]
    return [None if share is None else 100 * (1 - share) for share in shares]


_ONE = ("plain", "compiled")
GOALS = (
    Goal("training, a micro-batch of 8,192 tokens", "ms", 320, ("step",), _micro_batch_ms),
    Goal("training, share of the FLOP/s", "%", 55, ("step",), lambda each: [each["mfu"] and 100 * each["mfu"]], True),
    Goal("training", "tokens/s", 25_000, ("step",), lambda each: [each["ours"]["tokens_per_s"]], True),
    Goal("training, target in FP8", "tokens/s", 34_000, ("fp8",), lambda each: [each["ours"]["tokens_per_s"]], True),
    Goal("batch 1, a step of plain decoding", "ms", 6.5, _ONE, _step_ms(1)),
    Goal("batch 1, a round of chain 3", "ms", 9, _ONE, _round_ms),
    Goal("batch 1, the drafts of chain 3", "ms", 2.7, _ONE, _drafting_ms),
    Goal("batch 64, a step of plain decoding", "ms", 14, ("batches",), _step_ms(64)),
    Goal("batch 1, chain 3: the GPU idle", "%", 6, _ONE, _idle),
)
PARTS = tuple(dict.fromkeys(part for goal in GOALS for part in goal.parts))


def text(rows: Iterable[Found]) -> str:
    """`Goal.judged` of each goal, as lines to read."""
    lines = []
    for row in rows:
        wanted = f"at {'least' if row['at_least'] else 'most'} {row['wanted']:,g} {row['unit']}"
        if row["reached"] is None:
            lines.append(f"{'not measured':<14}{row['goal']}: {wanted}")
            continue
        off = "" if row["reached"] else f", missed by {row['off']:.0%}"
        state = "reached" if row["reached"] else "missed"
        found = f"{_number(row['found'])} {row['unit']} (part {row['part']})"
        lines.append(f"{state:<14}{row['goal']}: {found}, {wanted}{off}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
