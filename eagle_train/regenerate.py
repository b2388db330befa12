"""eagle-regenerate: the target's own answers to the prompts of a data set, as training data for a draft.

Every assistant message is written anew, after the answers already given; the other messages stay. The bundled engine
answers, or any OpenAI-compatible server. An answer is kept in fields (content, reasoning_content, tool_calls) that the
target's chat template renders back to what it wrote; one that cannot be is left out. A tool call ends a conversation,
for its result is unknown, and so does an answer that was cut at max_tokens.

    eagle-regenerate target=DIR data=messages data.path=FILE.jsonl out=ANSWERS.jsonl temperature=0.7
    eagle-regenerate server.url=http://HOST:8000/v1 server.model=NAME data=sharegpt data.path=FILE.jsonl

Rows are written in the data's order as they are finished, so an interrupted run continues after its last row. Rows that
are left out, those that a server did not answer among them, are named in OUT.left_out and are not asked again by the
same command; with retry_left_out=true they are, and rows that are answered then are added at the end of OUT.

Started by torchrun on several processes, these hold the target together (tensor parallel).
"""

from pathlib import Path

from omegaconf import DictConfig

from eagle_train import distributed
from eagle_train.cli import command
from eagle_train.hardware import resolve_device
from eagle_train.one_writer import beside, one_writer
from eagle_train.regeneration import RegenerateConfig, regenerate
from eagle_train.settings import build


@command("regenerate")
def main(values: DictConfig) -> None:
    distributed.run(lambda: job(values))


def job(values: DictConfig) -> int:
    """One rank's part; returns its exit status."""
    config = build(RegenerateConfig, values, "")
    if config.server.url:
        distributed.check_alone("with server.url, eagle-regenerate")
        world = distributed.ALONE
    else:
        world = distributed.start(resolve_device(config.device), shard_size=None)
    out = Path(config.out)
    with one_writer(out, beside(out), world):
        regenerate(config, world)
    return 0


if __name__ == "__main__":
    main()
