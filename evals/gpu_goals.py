"""What fell short in a day with a GPU: what the parts of launch/gpu_day.sh wrote, against goals for an H100.

python -m evals.gpu_goals [results=outputs/gpu_day] [out=outputs/gpu_day/goals.json]
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.distributed import check_alone
from eagle_train.errors import UserError, report
from eagle_train.results import prepared_file, write_json
from evals.bench.evaluation import origin
from evals.bench.gpu_goals import GOALS, PARTS, text
from evals.bench.memory import options


@dataclass
class Config:
    """`results`: the directory `OUT` of launch/gpu_day.sh. Parts that wrote nothing there were not measured."""

    results: str = "outputs/gpu_day"
    out: str = "outputs/gpu_day/goals.json"


def written(folder: Path) -> dict[str, Any]:
    """What parts wrote, by their names: NAME.json, or NAME/results.json."""
    found = {}
    for name in PARTS:
        path = next((path for path in (folder / f"{name}.json", folder / name / "results.json") if path.exists()), None)
        if path is not None:
            found[name] = json.loads(path.read_text("utf-8"))
    return found


def main() -> int:
    check_alone("evals.gpu_goals")
    config = options(Config, __doc__)
    out = prepared_file(config.out)
    rows = [goal.judged(written(Path(config.results))) for goal in GOALS]
    write_json(out, {"goals": rows, **origin("gpu_goals")})
    print("goals of Llama 3.1 8B's shapes on an H100:")
    print(text(rows))
    print(f"written to {config.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(report(error))
