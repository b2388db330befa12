"""The losses of a fixed short run, kept in tests/training/golden_losses.json: what they are now, and how they are
written anew after a change that is meant to alter them:

python -m tests.support.golden
"""

import json
import tempfile
from pathlib import Path

import torch

from tests.support.command_line import chats, write_jsonl
from tests.support.trainers import make_trainer, run_training

FILE = Path(__file__).parents[1] / "training" / "golden_losses.json"
STEPS = 40
NAMES = ("loss", "l1", "ce")


def losses(**train) -> dict[str, list[float]]:
    """Each of NAMES by step, of a run in fp32 with one thread. `train`: settings that are to be others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums are taken in one order
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for seed, (name, count) in enumerate({"train": 60, "heldout": 12}.items()):
            write_jsonl(home / f"{name}.jsonl", chats(count, seed))
        records = run_training(make_trainer(home / "run", home, steps=STEPS, **train))
    torch.set_num_threads(threads)
    return {name: [record[name] for record in records if name in record] for name in NAMES}


if __name__ == "__main__":
    rounded = {name: [float(f"{value:.7g}") for value in values] for name, values in losses().items()}
    FILE.write_text(json.dumps({"steps": STEPS, **rounded}, indent=1) + "\n")
    print(f"written to {FILE}")
