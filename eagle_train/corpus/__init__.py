"""Text to packed rows of tokens. Modules in the order in which data flow:

- `source`: the config of the data, and opening it; `file_formats`, `json_files`, `arrow_files`,
  `plain_files`: reading rows of files
- `rows`: a row as it was read, with its place; `columns`: which columns each format reads
- `conversations`: a row of any format as messages in OpenAI's form; `channels`: those of Harmony
- `template`: the target's chat template; `turns`: the prompt and the model's text of each of the assistant's turns,
  with `answer_starts` (where the model begins), `reasoning` (its tags), `content_checks` and `round_trip` (no part of a
  conversation is lost)
- `tokens`: text to tokens as server and model produce them; `render`: a row to documents, tokens with a mask
- `feed`: documents in the order of a job's draws; `stream`: packed, resumable batches
- `preview`: the first rows, checked and printed; `answer_parser`: a target's output back into a message

Knows nothing of models or training.
"""

from eagle_train.corpus.conversations import Conversation
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig, SourceConfig, open_source
from eagle_train.corpus.stream import Batch, Stream
from eagle_train.corpus.template import ChatTemplate
from eagle_train.corpus.tokens import Document

__all__ = [
    "Batch",
    "ChatRenderer",
    "ChatTemplate",
    "Conversation",
    "DataConfig",
    "Document",
    "SourceConfig",
    "Stream",
    "open_source",
]
