"""corpus/source.py: the config is checked, and rows are read from every kind of data, from any number on."""

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import hydra
import pyarrow as pa
import pyarrow.parquet
import pytest

import eagle_train.cli  # noqa: F401  (gives Hydra the groups' fields)
from eagle_train import train
from eagle_train.corpus import json_files
from eagle_train.corpus.columns import BESIDE, FORMATS
from eagle_train.corpus.conversations import to_messages
from eagle_train.corpus.preview import check_same_data
from eagle_train.corpus.rows import parse
from eagle_train.corpus.source import DataConfig, SourceConfig, check_found, open_source, pin
from eagle_train.distributed import World
from eagle_train.errors import UserError
from eagle_train.fields import fields_of
from eagle_train.settings import CONF_DIR, build
from evals.bench.questions import read_questions
from tests.support.command_line import call, chats, save_target


def make_rows(num_rows: int) -> list[dict]:
    return [{"id": i, "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(num_rows)]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict]) -> str:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return str(path)


def read(path: str, **options: str) -> list[dict]:
    return [parse(*placed) for placed in open_source(DataConfig(path, **options)).rows()]


def test_jsonl_parquet_globs_and_hub_directories_give_the_same_rows(tmp_path):
    rows = make_rows(40)
    assert read(write_jsonl(tmp_path / "all.jsonl", rows)) == rows
    packed = tmp_path / "all.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "all.jsonl").read_bytes()))
    assert read(str(packed)) == rows
    assert read(write_parquet(tmp_path / "all.parquet", rows)) == rows
    write_jsonl(tmp_path / "part-0.jsonl", rows[:15])
    write_jsonl(tmp_path / "part-1.jsonl", rows[15:])
    assert read(str(tmp_path / "part-*.jsonl")) == rows
    write_parquet(tmp_path / "part-0.parquet", rows[:15])
    write_parquet(tmp_path / "part-1.parquet", rows[15:])
    assert read(str(tmp_path / "part-?.parquet")) == rows
    for kind, write in (("jsonl", write_jsonl), ("parquet", write_parquet)):
        (tmp_path / kind).mkdir()
        write(tmp_path / kind / f"train.{kind}", rows)
        write(tmp_path / kind / f"test.{kind}", rows[:3])
        assert read(str(tmp_path / kind)) == rows
        assert read(str(tmp_path / kind), split="test") == rows[:3]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_rows_from_any_number_on(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(json_files, "MARK_ROWS", 4)
    rows = make_rows(30)
    write = write_jsonl if kind == "jsonl" else write_parquet
    suffix = "jsonl" if kind == "jsonl" else "parquet"
    for part, chosen in enumerate((rows[:17], rows[17:])):
        write(tmp_path / f"train-{part}.{suffix}", chosen)
    source = open_source(DataConfig(str(tmp_path) if kind == "hub" else str(tmp_path / f"*.{suffix}")))
    placed = [(place, parse(place, row)) for place, row in source.rows()]
    assert [row for _, row in placed] == rows
    assert len({place for place, _ in placed}) == 30
    for start in (0, 1, 6, 7, 8, 16, 17, 18, 29, 30):
        assert [(place, parse(place, row)) for place, row in source.rows(start)] == placed[start:]


@pytest.mark.parametrize("kind", ["parquet", "hub"])
def test_a_row_of_parquet_travels_alone(tmp_path, kind):
    rows = make_rows(200)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = open_source(DataConfig(str(tmp_path / "rows.parquet") if kind == "parquet" else str(tmp_path)))
    sent = [pickle.dumps(placed) for placed in source.rows()]
    assert [parse(*pickle.loads(placed)) for placed in sent] == rows
    assert max(map(len, sent)) < 300


def test_a_hub_data_sets_values_are_what_its_files_say(tmp_path):
    """Where a column's values are of several types, `datasets` keeps JSON; where it does not know, types may change."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ["b", {"text": 1}], "tool": {"x": 2}}]
    rows = [{"id": 1, "messages": turns}, {"id": 2, "messages": turns[:1]}]
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert read(str(tmp_path)) == rows
    (tmp_path / "train.jsonl").unlink()
    answers = [str(i) if i < 15_000 else f"w{i}" for i in range(20_000)]  # it reads 10,000 at a time
    (tmp_path / "train.csv").write_text("answer\n" + "\n".join(answers))
    assert [str(row["answer"]) for row in read(str(tmp_path))] == answers


def test_a_hub_data_set_whose_shards_do_not_agree_is_one_line(tmp_path):
    write_parquet(tmp_path / "train-0.parquet", make_rows(3))
    write_parquet(tmp_path / "train-1.parquet", [{"text": "a"}])
    with pytest.raises(UserError, match=r"^.*\(train\): cannot be read to its end: Couldn't cast"):
        read(str(tmp_path))


def test_a_hub_name_that_does_not_load_is_the_users(monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'nobody/nothing' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"data\.path is nobody/nothing; .*no data set: Couldn't reach"):
        open_source(DataConfig("nobody/nothing"))


class FakeHub:
    """me/chats and me/more at their newest commit, or at one that is named; what was asked is kept."""

    def __init__(self, monkeypatch):
        self.newest, self.asked, self.read = "a" * 40, [], []
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "dataset_info", self.info)
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def info(self, path: str, revision: str | None) -> Any:
        self.asked.append((path, revision))
        if revision not in (None, "old"):
            raise ValueError("404 Client Error")
        return SimpleNamespace(sha="0" * 40 if revision == "old" else self.newest)

    def load(self, path: str, name: None, split: str, streaming: bool, revision: str | None = None) -> Any:
        self.read.append((path, revision))
        rows = chats(20, seed=int((revision or self.newest)[0], 16))
        return datasets.IterableDataset.from_generator(lambda: iter(rows))


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    return FakeHub(monkeypatch)


def test_a_hub_data_set_is_pinned_to_a_commit(hub, monkeypatch, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", make_rows(2))
    mixed = {
        "one": SourceConfig("me/chats"),
        "two": SourceConfig("me/more", revision="old"),
        "file": SourceConfig(file),
    }
    config = DataConfig(mix=mixed, heldout="me/held")
    keys = ("data.mix.one.revision", "data.mix.two.revision", "data.heldout_revision")
    newest, old = "a" * 40, "0" * 40
    assert pin(config) == dict(zip(keys, (newest, old, newest), strict=True))
    assert hub.asked == [("me/chats", None), ("me/more", "old"), ("me/held", None)]
    assert [mixed[name].revision for name in mixed] == [newest, old, None]
    before = open_source(mixed["one"]).identity()
    open_source(config, "heldout")
    assert hub.read == [("me/chats", newest), ("me/held", newest)]
    mixed["one"].revision = "b" * 40
    assert open_source(mixed["one"]).identity() != before
    # a run that goes on reads what it began with, also where that was said of none
    hub.newest, hub.asked = "c" * 40, []
    for commit in (newest, None):
        again, began = DataConfig("me/chats"), {"data.path": "me/chats", "data.revision": commit}
        assert pin(again, began.get) == {"data.revision": commit}
        assert again.revision == commit
    assert pin(DataConfig("me/chats", revision=newest)) == {"data.revision": newest}
    assert hub.asked == []
    # not where it is given another data set, which has other commits
    began = {"data.path": "me/chats", "data.revision": newest}
    assert pin(DataConfig("me/more"), began.get) == {"data.revision": "c" * 40}
    hub.asked = []
    # what the first rank is told is what all read; the others do not ask
    monkeypatch.setattr(World, "agreed", lambda self, own: ({"data.revision": newest}, None))
    other = DataConfig("me/chats")
    pin(other, None, World(rank=1, size=2))
    assert (other.revision, hub.asked) == (newest, [])


def test_a_revision_that_the_hub_does_not_have_is_the_users(hub, monkeypatch):
    told = r"^data\.path is me/chats; it is no file, and no data set of the hub at revision new: 404"
    with pytest.raises(UserError, match=told):
        pin(DataConfig("me/chats", revision="new"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert pin(DataConfig("me/chats")) == {"data.revision": None}


def test_ranks_that_all_stream_from_the_hub_are_told_how_to_download_it(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(World, "exchange", lambda self, own: [own] * self.size)
    config = DataConfig("me/chats", heldout=write_jsonl(tmp_path / "rows.jsonl", make_rows(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same_data(config, World())
        check_same_data(config, World(1, 2))
    told = "^data.path is me/chats; each of 2 processes reads .*; `hf download --repo-type dataset me/chats --local-dir"
    with pytest.warns(UserWarning, match=told) as warned:
        check_same_data(config, World(0, 2))
    assert len(warned) == 1


def test_a_run_of_a_hub_data_set_goes_on_with_the_rows_it_began_with(hub, tmp_path, capsys):
    common = (f"target={save_target(tmp_path / 'target')}", "target.dtype=float32", "data=messages",
              "data.path=me/chats", "data.row_tokens=64", "draft.num_layers=1", "optim.tokens_per_step=64",
              "train.micro_batch_rows=1", f"out={tmp_path / 'out'}")  # fmt: skip
    assert call(train.main, *common, "train.steps=1") == 0
    assert f"revision: {hub.newest}" in (tmp_path / "out/config.yaml").read_text()
    hub.newest = "b" * 40
    assert call(train.main, *common, "train.steps=2") == 0
    assert {revision for _, revision in hub.read} == {"a" * 40}
    capsys.readouterr()
    assert call(train.main, *common, "train.steps=3", f"data.revision={hub.newest}") == 2
    assert f"data.revision is {hub.newest}, but was {'a' * 40}" in capsys.readouterr().err


def test_jsonl_is_read_line_by_line(tmp_path):
    """A broken line is told with its number, blank lines counted, and only when it is reached."""
    good = json.dumps(make_rows(1)[0])
    (tmp_path / "train.jsonl").write_text(f"{good}\n\n{good}\n{{'messages': []}}\n")
    rows = open_source(DataConfig(str(tmp_path / "train.jsonl"))).rows()
    assert [place.rpartition(":")[2] for place, _ in islice(rows, 2)] == ["1", "3"]
    with pytest.raises(UserError, match=r"train\.jsonl:4: not JSON: Expecting property name"):
        parse(*next(rows))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b"\n \n", "has no rows"),
        (b" [] ", "has no rows"),
        (b"[1]\n", r"jsonl: element 1: a row must be a JSON object, not int$"),
        (b"5\n", r"jsonl:1: a row must be a JSON object, not int$"),
        (b'{"a": "\xff"}\n', r"jsonl:1: not UTF-8: .* position 7: .*; iconv -t UTF-8 converts a file$"),
        (b'{"a": ' + b"[" * 99999 + b"\n", r"jsonl:1: arrays and objects are nested too deeply to be read$"),
        (b'{"a": ' + b"1" * 5000 + b"}\n", r"jsonl:1: holds a number with too many digits$"),
    ],
)
def test_files_that_hold_no_rows_are_refused(tmp_path, content, message):
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(str(tmp_path / "train.jsonl"))


@pytest.mark.parametrize("path", ["a.jsonl", "*.jsonl"])
def test_what_is_no_file_is_told(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("b.jsonl"), make_rows(1))
    Path("a.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(UserError, match=rf"data\.path is {re.escape(path)}; a\.jsonl is a link to a file that is not"):
        open_source(DataConfig(path))
    Path("a.jsonl").unlink()
    os.mkfifo("a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl is a pipe or a device, and data are read more than once"):
        open_source(DataConfig(path))


def test_a_file_in_a_circle_of_links_is_read_once(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", make_rows(3))
    (tmp_path / "self").symlink_to(".")
    assert len(list(open_source(DataConfig(str(tmp_path / "**" / "*.jsonl"))).rows())) == 3


def test_files_of_no_known_kind_are_refused(tmp_path):
    (tmp_path / "train.parquet").write_text("not parquet at all")
    with pytest.raises(UserError, match=r"train\.parquet: not Parquet"):
        open_source(DataConfig(str(tmp_path / "train.parquet")))
    write_jsonl(tmp_path / "train.jsonl", make_rows(1))
    with pytest.raises(UserError, match="there are 1 JSON, 1 Parquet: files must be all JSON"):
        open_source(DataConfig(str(tmp_path / "train.*")))
    write_parquet(tmp_path / "empty.parquet", pa.table({"messages": []}).to_pylist())
    with pytest.raises(UserError, match="has no rows"):
        open_source(DataConfig(str(tmp_path / "empty.parquet")))


def test_how_the_bundled_data_are_made_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = r"; python data/stdlib_chat\.py outputs/stdlib_chat makes it, in a clone of the repository"
    with pytest.raises(UserError, match=told):
        check_found(DataConfig("outputs/stdlib_chat/train.jsonl"))
    with pytest.raises(UserError, match=told):
        read_questions("outputs/stdlib_chat/heldout.jsonl")
    script = CONF_DIR.parent / "data" / "stdlib_chat.py"
    done = subprocess.run([sys.executable, script, "/sys/nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("stdlib_chat.py: error: /sys/nothing: ")


@pytest.mark.parametrize(
    "path", ["train.jsonl", "data/train.parquet", "/nowhere/data", "part-*.jsonl", "a/b/c", "x" * 300 + ".jsonl"]
)
def test_missing_files_are_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data\.path is .*there is no such file"):
        open_source(DataConfig(path))
    with pytest.raises(UserError, match=r"data\.heldout is .*there is no such file"):
        open_source(DataConfig("x", heldout=path), "heldout")
    mixed = DataConfig(mix={"a": SourceConfig(path)})
    with pytest.raises(UserError, match=r"data\.mix\.a\.path is .*there is no such file"):
        open_source(mixed.sources["a"], name="a")
    with pytest.raises(UserError, match=r"data\.mix\.a\.path is .*there is no such file"):
        check_found(mixed)
    with pytest.raises(UserError, match=r"data\.heldout is .*there is no such file"):
        check_found(DataConfig("owner/name", heldout=path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "alpaca"}, r"data\.format is 'alpaca'; it must be one of messages, sharegpt"),
        ({"supervise": "user"}, r"data\.supervise is 'user'"),
        ({"long_documents": "truncate"}, r"data\.long_documents is 'truncate'"),
        ({"columns": {"prompt": "q"}}, r"data\.columns\.prompt is unknown; data\.format=messages reads messages"),
        ({"row_tokens": 2}, r"data\.row_tokens is 2"),
        ({"shuffle_window": -1}, r"data\.shuffle_window is -1"),
        ({"heldout": "a.jsonl"}, r"data\.heldout is data\.path"),
        ({"row_tokens": "many"}, r"data\.row_tokens=many: must be a whole number"),
        ({"unknown": 1}, r"data\.unknown: "),
    ],
)
def test_impossible_configs_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        build(DataConfig, {"path": "a.jsonl", **values}, "data")


def composed(*overrides: str) -> DataConfig:
    with hydra.initialize_config_dir(str(CONF_DIR.resolve()), version_base="1.3"):
        return build(DataConfig, hydra.compose(overrides=[*overrides]).data, "data")


def test_the_yaml_defaults_are_the_dataclass_defaults():
    assert asdict(composed("+data=fields", "data.path=a.jsonl")) == asdict(DataConfig("a.jsonl"))


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF_DIR / "data").glob("*.yaml")))
def test_every_yaml_composes(name):
    config = composed(f"+data={name}", "data.path=a.jsonl")
    assert config.path == "a.jsonl"
    assert config.format in FORMATS, f"conf/data/{name}.yaml: its format must be one of {', '.join(FORMATS)}"
    used = {*FORMATS[config.format], *BESIDE[config.format]}
    assert config.columns.keys() == used, f"conf/data/{name}.yaml: its columns must be {', '.join(sorted(used))}"


def test_every_format_has_a_yaml_and_is_in_help_and_docs():
    """The comment of `SourceConfig.format` is what --help shows."""
    comment = next(field.comment for field in fields_of("data") if field.name == "format")
    assert comment == " | ".join(FORMATS)
    guide = (CONF_DIR.parent / "docs" / "data.md").read_text("utf-8")
    for name in FORMATS:
        assert composed(f"+data={name}", "data.path=a.jsonl").format == name
        assert f"| `data={name}` | " in guide, "the table in docs/data.md"
        assert name in to_messages.__doc__ or name == "text"


def test_a_mixture_is_one_override():
    """README's."""
    config = composed(
        "+data=messages", "data.path=null", "data.mix={a: {path: a.jsonl, weight: 3}, b: {path: b.jsonl}}"
    )
    assert {name: (source.path, source.weight) for name, source in config.mix.items()} == {
        "a": ("a.jsonl", 3.0),
        "b": ("b.jsonl", 1.0),
    }


@pytest.mark.parametrize("text", [b"no gzip", gzip.compress(b'{"messages": []}\n' * 99)[:-9]], ids=["plain", "cut"])
def test_a_broken_gzip_is_one_line(tmp_path, text):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(text)
    with pytest.raises(UserError, match="not gzip, or incomplete"):
        list(open_source(DataConfig(str(path))).rows())


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, kind):
    """Permissions do not bind root, under whom tests may run."""
    path = tmp_path / f"rows.{kind}"
    path.symlink_to("/proc/self/mem")  # a file that can be opened, and not read from its start

    def refused(file: str) -> None:  # pyarrow asks for the size first, which is 0
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", refused)
    with pytest.raises(UserError, match=rf"^{path}: cannot be read: "):
        open_source(DataConfig(str(path)))


def test_a_parquet_file_damaged_behind_its_footer_is_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    write_parquet(path, make_rows(30))  # groups of 7
    second = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[second : second + 40] = b"\xff" * 40
    path.write_bytes(content)
    rows = open_source(DataConfig(str(path))).rows()
    assert len(list(islice(rows, 7))) == 7
    with pytest.raises(UserError, match=rf"^{path}: row group 2 is damaged: "):
        next(rows)


def test_gsm8k_is_a_config_not_code(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    config = composed("+data=gsm8k", f"data.path={path}")
    row = parse(*next(open_source(config).rows()))
    assert to_messages(row, config.format, config.columns) == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "#### 2"},
    ]
    assert composed("+data=gsm8k").path == "openai/gsm8k"


@pytest.mark.parametrize(
    ("key", "value"), [("format", "sharegpt"), ("columns", {"messages": "turns"}), ("name", "main"), ("split", "test")]
)
def test_what_one_data_set_is_like_is_not_said_of_a_mixture(key, value):
    """Unless the held-out data are like it."""
    mix = {"a": SourceConfig("a.jsonl")}
    with pytest.raises(UserError, match=rf"^data\.{key} is .*; with data.mix each data set has its own, data.mix.NAME"):
        DataConfig(mix=mix, **{key: value})
    if key != "columns":
        DataConfig(mix=mix, heldout="b.jsonl", **{key: value})
