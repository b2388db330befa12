"""corpus/stream.py: every document is packed as one of its own, counted, and resumed bit for bit."""

import copy
import io
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_train.config import UserError
from eagle_train.corpus.chat import ChatRenderer
from eagle_train.corpus.source import DataConfig, open_source
from eagle_train.corpus.stream import Batch, Stream, heldout_batches, shuffled

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a> {% generation %}{{ m['content'] + ' <e>' }}"
    "{% endgeneration %}{% else %}<u> {{ m['content'] }}{% endif %} {% endfor %}"
)
WORDS = 4000
START, ASSISTANT, END = 1, 2, 3  # the tokens of <u>, <a>, <e>; word i is token i + 4


def make_renderer(supervise: str = "assistant") -> ChatRenderer:
    """One token a word, the words being numbers, so that tests can say what a document's tokens are."""
    vocabulary = ["<pad>", "<u>", "<a>", "<e>", *map(str, range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    return ChatRenderer(fast, supervise)


def chat(prompt: list[int], answer: list[int]) -> dict:
    turns = (("user", prompt), ("assistant", answer))
    return {"messages": [{"role": role, "content": " ".join(map(str, words))} for role, words in turns]}


def tokens_of(row: dict) -> list[int]:
    """A chat's tokens, written down without the code under test."""
    prompt, answer = ([int(word) + 4 for word in turn["content"].split()] for turn in row["messages"])
    return [START, *prompt, ASSISTANT, *answer, END]


def make_rows(num_rows: int, longest: int = 12, seed: int = 0) -> list[dict]:
    """Chats of 1 to `longest` words a turn; each begins with its own number."""
    rng = random.Random(seed)
    words = [[rng.randrange(WORDS) for _ in range(rng.randint(0, longest))] for _ in range(2 * num_rows)]
    return [chat([i, *words[2 * i]], [i, *words[2 * i + 1]]) for i in range(num_rows)]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def same(a: Batch, b: Batch) -> bool:
    tensors = ((a.tokens, b.tokens), (a.positions, b.positions), (a.supervised, b.supervised))
    return a.lengths == b.lengths and all(torch.equal(x, y) for x, y in tensors)


def segments(batches: list[Batch]) -> list[tuple[list[int], list[int], list[bool]]]:
    """(tokens, positions, supervised) of every segment, padding included."""
    out = []
    for batch in batches:
        for tokens, positions, supervised, lengths in zip(
            batch.tokens, batch.positions, batch.supervised, batch.lengths, strict=True
        ):
            assert sum(lengths) == len(tokens)
            parts = (tensor.split(lengths) for tensor in (tokens, positions, supervised))
            out += [tuple(part.tolist() for part in segment) for segment in zip(*parts, strict=True)]
    return out


def plain_segments(rows: list[dict], size: int, long_documents: str) -> list[tuple[list[int], list[int], list[bool]]]:
    """The plain twin: each document, or piece of one, by itself."""
    out = []
    for row in rows:
        tokens = tokens_of(row)
        first = tokens.index(ASSISTANT) + 1
        if len(tokens) > size and long_documents == "drop":
            continue
        for begin in range(0, len(tokens), size):
            n = len(tokens[begin : begin + size])
            supervised = [j >= 1 and j + 1 < n and begin + j + 1 >= first for j in range(n)]
            if any(supervised):
                out.append((tokens[begin : begin + n], list(range(n)), supervised))
    return out


@pytest.mark.parametrize("long_documents", ["split", "drop"])
def test_packing_equals_the_plain_twin(tmp_path, long_documents):
    rows = make_rows(150, longest=20)
    path = write_jsonl(tmp_path / "heldout.jsonl", rows)
    config = DataConfig(path="x.jsonl", heldout=path, row_tokens=24, long_documents=long_documents)
    batches = heldout_batches(config, make_renderer(), 4)
    packed = segments(batches)
    documents = [segment for segment in packed if segment[0][0] != 0]
    padding = [segment for segment in packed if segment[0][0] == 0]
    expected = plain_segments(rows, 24, long_documents)
    assert sorted(documents) == sorted(expected)
    assert all(not any(tokens) and not any(supervised) for tokens, _, supervised in padding)
    assert all(positions == list(range(len(tokens))) for tokens, positions, _ in padding)
    assert [len(batch.lengths) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert all(batch.tokens.dtype == batch.positions.dtype == torch.int64 for batch in batches)
    assert all(batch.supervised.dtype == torch.bool for batch in batches)


def test_no_token_is_lost(tmp_path):
    """What goes in comes out, to the token, however it is split, save for tails too short to have a slot to supervise:
    those are counted as skipped."""
    rows = [row for row in make_rows(200, longest=30) if len(tokens_of(row)) % 16 not in (1, 2)]
    path = write_jsonl(tmp_path / "heldout.jsonl", rows)
    config = DataConfig(path="x.jsonl", heldout=path, row_tokens=16, supervise="all")
    out = Counter(
        token for tokens, _, _ in segments(heldout_batches(config, make_renderer("all"), 4)) for token in tokens
    )
    del out[0]
    assert out == Counter(token for row in rows for token in tokens_of(row))


@pytest.mark.parametrize("long_documents", ["split", "drop"])
def test_counts(tmp_path, long_documents):
    short, long = chat([1], [2, 3]), chat([1, 2, 3], [*range(20)])  # 6 and 26 tokens
    long_prompt, mute = chat([*range(20)], [1]), {"messages": [{"role": "user", "content": "1 2 3"}]}
    path = write_jsonl(tmp_path / "train.jsonl", [short, long, long_prompt, mute, short, short])
    config = DataConfig(path=path, row_tokens=12, long_documents=long_documents, shuffle_window=0)
    stream = Stream(config, make_renderer(), 1)
    while stream.epoch == 0:
        batch = next(stream)
        assert batch.tokens.shape == (1, 12)
    # One epoch, and the one document of the next that it took to learn that the first was over.
    assert (stream.epoch, stream.counts["documents"]) == (1, 6 + stream.drawn)
    if long_documents == "split":
        # The first piece of the long prompt, the mute document, and the long answer's tail of two tokens.
        assert (stream.counts["split"], stream.counts["dropped"], stream.counts["skipped"]) == (2, 0, 3)
    else:
        assert (stream.counts["split"], stream.counts["dropped"], stream.counts["skipped"]) == (0, 2, 1)


def test_tokens_and_padding_are_those_of_the_batches(tmp_path):
    config = DataConfig(path=write_jsonl(tmp_path / "train.jsonl", make_rows(60)), row_tokens=32)
    stream = Stream(config, make_renderer(), 1)
    packed = segments([next(stream) for _ in range(30)])
    in_batches = [
        sum(len(tokens) for tokens, _, _ in packed if (tokens[0] == 0) == padding) for padding in (False, True)
    ]
    waiting = sum(sum(row.lengths) for row in stream.ready), sum(row.room for row in stream.ready)
    assert [stream.counts["tokens"] - waiting[0], stream.counts["padding"] - waiting[1]] == in_batches
    assert in_batches[1] < 0.1 * in_batches[0]


@pytest.mark.parametrize("window", [0, 1, 7, 100])
def test_shuffling_permutes_within_windows(tmp_path, window):
    rows = make_rows(45)
    config = DataConfig(path=write_jsonl(tmp_path / "train.jsonl", rows), shuffle_window=window, seed=3)
    source = open_source(config)
    epochs = [[row for _, row in shuffled(source, config, epoch, 0)] for epoch in (0, 1)]
    size = max(window, 1)
    for order in epochs:
        for begin in range(0, len(rows), size):
            key = str
            assert sorted(order[begin : begin + size], key=key) == sorted(rows[begin : begin + size], key=key)
    assert (epochs[0] == rows) == (size == 1)
    assert (epochs[0] == epochs[1]) == (size == 1)
    for start in (0, 1, 6, 7, 44, 45):
        assert [row for _, row in shuffled(source, config, 0, start)] == epochs[0][start:]


def test_another_seed_is_another_order(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(100))
    streams = [Stream(DataConfig(path, row_tokens=64, seed=seed), make_renderer(), 2) for seed in (0, 0, 1)]
    first, again, other = (next(stream) for stream in streams)
    assert same(first, again)
    assert not same(first, other)


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("window", [0, 16])
def test_resume_is_exact_at_any_batch(tmp_path, window):
    # Documents of up to two rows' length, so that rows wait in the state for their batch.
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(40, longest=40))
    config = DataConfig(path, row_tokens=40, shuffle_window=window)
    stream = Stream(config, make_renderer(), 2)
    states, batches = [], []
    for _ in range(60):
        states.append(saved_and_loaded(stream.state_dict()))
        batches.append(next(stream))
    counts = dict(stream.counts)
    assert stream.epoch >= 2
    for at in (0, *random.Random(0).sample(range(60), 8)):
        resumed = Stream(config, make_renderer(), 2)
        next(resumed)
        resumed.load_state_dict(states[at])
        assert all(same(one, other) for one, other in zip(islice(resumed, 60 - at), batches[at:], strict=True))
        assert resumed.counts == counts


def test_a_state_in_memory_stays_what_it_was(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", make_rows(40, longest=40))
    stream = Stream(DataConfig(path, row_tokens=40), make_renderer(), 1)
    while not stream.ready:
        next(stream)
    state = stream.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(20):
        next(stream)
    stream.load_state_dict(state)
    for _ in range(20):
        next(stream)
    assert str(state) == str(kept)


def test_resume_with_another_micro_batch_gives_the_same_rows(tmp_path):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(70)), row_tokens=40)
    stream = Stream(config, make_renderer(), 3)
    next(stream)
    state = stream.state_dict()
    resumed = Stream(config, make_renderer(), 1)
    resumed.load_state_dict(state)
    expected = [row for batch in islice(stream, 4) for row in batch.tokens.tolist()]
    assert [batch.tokens[0].tolist() for batch in islice(resumed, 12)] == expected


def test_resume_renders_nothing_that_was_drawn_before(tmp_path):
    rows = make_rows(90)
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", rows), row_tokens=40, shuffle_window=8)
    stream = Stream(config, make_renderer(), 1)
    while stream.drawn < 70:
        next(stream)
    renderer = make_renderer()
    resumed = Stream(config, renderer, 1)
    resumed.load_state_dict(stream.state_dict())
    resumed.packer.renderer = lambda messages: rendered.append(messages) or renderer(messages)
    rendered: list = []
    next(resumed)
    assert len(rendered) == resumed.drawn - stream.drawn


@pytest.mark.parametrize(
    ("key", "value"), [("row_tokens", 41), ("seed", 1), ("columns", {"messages": "messages"}), ("supervise", "all")]
)
def test_state_of_another_config_is_refused(tmp_path, key, value):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(70)), row_tokens=40)
    state = Stream(config, make_renderer(), 1).state_dict()
    with pytest.raises(UserError, match=rf"data\.{key} is .*resume with the same data"):
        Stream(replace(config, **{key: value}), make_renderer(), 1).load_state_dict(state)


def test_state_of_other_data_is_refused(tmp_path):
    config = DataConfig(write_jsonl(tmp_path / "train.jsonl", make_rows(70)), heldout="a.jsonl")
    state = Stream(config, make_renderer(), 1).state_dict()
    Stream(replace(config, heldout="b.jsonl"), make_renderer(), 1).load_state_dict(state)
    other = write_jsonl(tmp_path / "other.jsonl", make_rows(70))
    with pytest.raises(UserError, match=r"data\.path is .*other.jsonl"):
        Stream(replace(config, path=other), make_renderer(), 1).load_state_dict(state)
    write_jsonl(tmp_path / "train.jsonl", make_rows(71))
    with pytest.raises(UserError, match=r"data\.path \(names and sizes"):
        Stream(config, make_renderer(), 1).load_state_dict(state)


def test_a_row_that_cannot_be_rendered_is_named(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [*make_rows(2), {"messages": []}])
    with pytest.raises(UserError, match=r"train\.jsonl:3: the row has no turns"):
        list(Stream(DataConfig(path, shuffle_window=0), make_renderer(), 1))


def test_data_without_anything_to_learn_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "mute.jsonl", [{"messages": [{"role": "user", "content": "1 2 3"}]}] * 5)
    with pytest.raises(UserError, match=r"no supervised token: .*'skipped': 5"):
        next(Stream(DataConfig(path), make_renderer(), 1))
    with pytest.raises(UserError, match=r"data\.heldout is .*no supervised token"):
        heldout_batches(DataConfig("x", heldout=path), make_renderer(), 1)


def test_no_heldout_no_batches():
    assert heldout_batches(DataConfig("x"), make_renderer(), 1) == []
