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


def counts(*accepted: int) -> str:
    """Code that answers as vLLM would: 10 rounds, of which so many accepted depth 1, 2, 3, and two tokens an answer."""
    answer = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": sum(accepted)}
    answer |= {"accepted_tokens_per_pos": list(accepted), "token_ids": None}
    return f"answer = {answer!r}\nanswer['token_ids'] = [[4, 5] for _ in job['prompts']]\n" + (
        "json.dump(answer, open(job['answer'], 'w'))"
    )
