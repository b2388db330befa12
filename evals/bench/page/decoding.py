"""Blocks of evaluations that decode with several drafters or trees: latency, comparison, one draft, serving."""

from evals.bench.page.blocks import Block, Table
from evals.bench.page.decoding_blocks import (
    Row,
    acceptance,
    acceptance_of,
    along_context,
    by_context,
    by_stage,
    decodings,
    drafts,
    filled,
    over_time,
    speed_map,
    speedups,
    tpc_against_ttit,
)
from evals.bench.page.figures import tree_and_drafter
from evals.bench.page.gather import Source
from evals.bench.page.shown import spread

_TIMES = ("ttft_s", "ttit_s", "ttit_p50_s", "ttit_p99_s")


def mt_bench(source: Source) -> list[Block]:
    """One draft: figures, acceptance by depth, time by stage."""
    found, name = source.found, tree_and_drafter(source)
    drafted = {**found, "decoding": name}
    plain = {**{key: found[f"plain_{key}"] for key in _TIMES}, "decoding": "plain", "tpc": 1.0, "speedup": 1.0}
    stages = {"plain": found["plain_stage_ms_per_round"], name: found["stage_ms_per_round"]}
    groups = [row for row in found["per_category_and_turn"] if row["category"] is not None and row["turn"] is None]
    blocks: list[Block] = [decodings(f"Batch size {found['batch_size']}", [plain, drafted])]
    blocks += acceptance_of([drafted])
    blocks.append(by_stage(stages))
    if groups:
        rows = [
            [row["category"], f"{row['prompts']:,}"]
            + [spread(row.get(key), row.get(f"{key}_interval")) for key in ("tpc", "speedup")]
            for row in groups
        ]
        blocks.append(filled("By category", ["category", "prompts", "TPC", "speed-up"], rows))
    return [*blocks, *along_context({name: found.get("by_context", [])})]


def latency(source: Source) -> list[Block]:
    """Every batch size and context: times, TPC against TTIT, acceptance, a map of speed-ups, time by stage."""
    rows = source.found["rows"]
    cells = list(dict.fromkeys((row["batch_size"], row["context_length"], row["arrivals"]) for row in rows))
    of = {cell: [row for row in rows if _cell(row) == cell] for cell in cells}
    blocks: list[Block] = [decodings(cell_name(cell), of[cell]) for cell in cells]
    first = of[cells[0]]
    blocks.append(tpc_against_ttit(first, cell_name(cells[0])))
    blocks += acceptance_of(first)
    blocks += by_context([row for row in rows if drafts(row)])
    blocks += speed_map({cell_name(cell): of[cell] for cell in cells})
    for cell in cells:
        if cell[2] == "poisson":
            blocks.append(over_time(of[cell], cell_name(cell)))
    own = [each for each in source.found["breakdown"] if (each["batch_size"], each["context_length"]) == cells[0][:2]]
    blocks.append(by_stage({each["decoding"]: each["stages_ms"] for each in own}))
    return blocks


def compare(source: Source) -> list[Block]:
    """Drafters beside one another: speed-ups with intervals at each batch size."""
    rows = source.found["rows"]
    cells = list(dict.fromkeys((row["task"], row["batch_size"]) for row in rows))
    of = {f"{task}, batch size {size}": [row for row in rows if (row["task"], row["batch_size"]) == (task, size)]
          for task, size in cells}  # fmt: skip
    blocks: list[Block] = []
    for name, own in of.items():
        blocks += [decodings(name, own), *speedups(own, name)]
    first = next(iter(of))
    blocks.append(tpc_against_ttit(of[first], first))
    blocks += acceptance_of(of[first])
    blocks += along_context({row["decoding"]: row.get("by_context", []) for row in of[first] if drafts(row)})
    blocks += speed_map(of)
    stages = {row["decoding"]: row["stage_ms_per_round"] for row in of[first]}
    blocks.append(by_stage({name: each for name, each in stages.items() if each}))
    return blocks


def serving(source: Source) -> list[Block]:
    """This engine beside vLLM, with the same draft."""
    both = {name: source.found[name] for name in ("eagle_train", "vllm")}
    rows = [
        [name, spread(each["tpc"], None, 3), spread(each["acceptance_length"], None, 3), f"{each['drafts']:,}"]
        for name, each in both.items()
    ]
    caption = f"{source.found['prompts']} prompts, of which {source.found['equal_answers']} have equal answers"
    return [
        Table(caption, ["engine", "TPC", "acceptance length", "drafts"], rows),
        acceptance({name: each["acceptance_per_depth"] for name, each in both.items()}),
        *along_context({"eagle_train": source.found.get("by_context", [])}),
    ]


def _cell(row: Row) -> tuple[int, int | None, str]:
    return row["batch_size"], row["context_length"], row["arrivals"]


def cell_name(cell: tuple[int, int | None, str]) -> str:
    """`batch size 8, context 256`."""
    size, context, arrivals = cell
    said = [f"batch size {size}", *([f"context {context}"] if context else [])]
    return ", ".join(said + (["random arrivals"] if arrivals == "poisson" else []))
