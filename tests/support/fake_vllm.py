"""A program in vLLM's place."""

import json
import sys
from pathlib import Path

GOOD = {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 4, "accepted_tokens_per_pos": [3, 1, 0]}
GOOD |= {"token_ids": [[5] * 6, [7] * 4]}


def interpreter(directory: Path, answering: str) -> Path:
    """A program that seems to have vLLM, and runs `answering` on its `job`."""
    path = directory / "python"
    importing = 'if sys.argv[1] == "-c":\n    print("a warning\\n0.32.0")\n    sys.exit()\n'
    lines = f"#!{sys.executable}\nimport json, sys\n{importing}job = json.load(open(sys.argv[2]))\n{answering}\n"
    path.write_text(lines)
    path.chmod(0o755)
    return path


def giving(answer: dict | str) -> str:
    """Code that writes this answer."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return f"open(job['answer'], 'w').write({text!r})"
