"""The target's own answers to the prompts of a data set, as training data: what `eagle-regenerate` does.

- `options`: the settings of a run
- `dialogue`: a row of the data, whose assistant messages are written anew turn by turn
- `by_engine`, `by_server`: who answers: the bundled engine, or an OpenAI-compatible server
- `row_log`: the output file, which an interrupted run continues
- `outcome`: writes and counts finished rows
- `run`: reads rows, has them answered, writes them

Each row is written in the data's order as it is finished. Knows nothing of training.
"""

from eagle_train.regeneration.options import RegenerateConfig, ServerConfig
from eagle_train.regeneration.run import regenerate

__all__ = ["RegenerateConfig", "ServerConfig", "regenerate"]
