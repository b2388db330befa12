"""eagle-datastore: an index of texts in which continuations of a context are looked up, for drafts without a model.

The data's rows are rendered with the target's chat template, or are plain text, and become the target's tokens.

    eagle-datastore target=DIR data=messages data.path=FILE.jsonl out=INDEX
    eagle-datastore target=DIR data=text 'data.path=SOURCES/**/*.py' out=INDEX

Tokens, disk and memory are estimated and logged first; a disk that has not the room is told then. The index is built
shard by shard in OUT.partial and appears at OUT whole. The same command continues an interrupted build behind its last
shard. It serves every target with the same tokenizer.
"""

from omegaconf import DictConfig

from eagle_train import distributed
from eagle_train.cli import command
from eagle_train.results import in_words
from eagle_train.retrieval import DatastoreConfig, build_datastore
from eagle_train.settings import build


@command("datastore")
def main(values: DictConfig) -> None:
    distributed.check_alone("eagle-datastore")
    config = build(DatastoreConfig, values, "")
    built = build_datastore(config)
    shards = "1 shard" if built.shards == 1 else f"{built.shards} shards"
    print(
        f"{config.out}: {built.tokens:,} tokens of {built.documents:,} documents in {shards}, "
        f"{in_words(built.disk_bytes)}; {built.left_out} rows left out"
    )


if __name__ == "__main__":
    main()
