"""An index of texts for drafts that are looked up: what `eagle-datastore` does.

- `options`: the settings of a build
- `documents`: the data's rows in their order, rendered and tokenised
- `size`: how many tokens they hold, by a sample, and the room that an index of them needs
- `build`: a build from start to end; an interrupted one is resumed

The index itself, how it is written and read, is `eagle_train/inference/lookup/`.
"""

from eagle_train.retrieval.build import build_datastore
from eagle_train.retrieval.options import DatastoreConfig

__all__ = ["DatastoreConfig", "build_datastore"]
