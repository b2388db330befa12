"""corpus/arrow_files.py: rows of Arrow's formats are what was put in, without invented nulls."""

import json
import pickle
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from eagle_train.corpus.arrow_files import Arrow
from eagle_train.corpus.rows import ArrowRow, parse
from eagle_train.corpus.source import DataConfig, check_found, open_source
from eagle_train.errors import UserError


def tool(name: str, **properties: object) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
OTHER_CALL = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ROWS = [
    {
        "messages": [
            {"role": "user", "content": "rain?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "no", "tool_call_id": "c1"},
        ],
        "tools": [tool("weather", city={"type": "string"}), tool("add", a={"type": "integer"}, b={"enum": [1, None]})],
        "weight": 1.0,
    },
    {
        "messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "tool_calls": [OTHER_CALL]}],
        "tools": [],
        "weight": None,
    },
    {"messages": [{"role": "user", "content": "hi"}], "tools": None, "weight": 2.0},
]
SCHEMA = pa.Table.from_pylist(ROWS).schema


def save_parquet(path: Path) -> str:
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path / "rows.parquet")
    return str(path / "rows.parquet")


def save_hub(path: Path) -> str:
    save_parquet(path)
    return str(path)


def save_to_disk(path: Path) -> str:
    datasets.Dataset(pa.Table.from_pylist(ROWS)).save_to_disk(path / "saved")
    return str(path / "saved")


def save_stream(path: Path) -> str:
    with pa.OSFile(str(path / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(ROWS))
    return str(path / "rows.arrow")


def save_file(path: Path) -> str:
    with pa.OSFile(str(path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(ROWS))
    return str(path / "rows.arrow")


SAVES = (save_parquet, save_hub, save_to_disk, save_stream, save_file)


def read(path: str, **options: str) -> list[dict]:
    return [parse(*placed) for placed in open_source(DataConfig(path, **options)).rows()]


@pytest.mark.parametrize("save", SAVES)
def test_nulls_that_arrow_invents_within_a_column_are_left_out(tmp_path, save):
    """Those that were in the data stay: in lists, and a row's own columns."""
    raw = pa.Table.from_pylist(ROWS).to_pylist()
    assert raw[0]["messages"][0]["tool_calls"] is None  # so this is what a template would see
    assert "a" in raw[0]["tools"][0]["function"]["parameters"]["properties"]
    assert read(save(tmp_path)) == ROWS


def test_a_rows_own_nulls_stay_where_a_column_is_json_or_a_map(tmp_path):
    """`datasets` writes a list of objects that differ as JSON; read as text it would be no list of messages."""
    rows = [{"messages": [{"role": "user", "content": None, "n": [1, {"x": None}]}, {"role": "b"}], "n": 5}]
    features = datasets.Features({"messages": datasets.List(datasets.Json()), "n": datasets.Value("int64")})
    made = datasets.Dataset.from_list(rows, features=features)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    assert read(str(tmp_path / "a.parquet")) == rows
    assert read(str(tmp_path / "saved")) == rows
    arguments = pa.array([[("a", None), ("b", 2)]], pa.map_(pa.string(), pa.int64()))
    pyarrow.parquet.write_table(
        pa.table({"m": pa.array([[{"a": 1}, None]]), "arguments": arguments}), tmp_path / "b.parquet"
    )
    assert read(str(tmp_path / "b.parquet")) == [{"m": [{"a": 1}, None], "arguments": {"a": None, "b": 2}}]


def test_what_json_lines_say_is_what_they_are(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"tools": [{"default": None}], "n": None}) + "\n")
    assert read(str(tmp_path / "a.jsonl")) == [{"tools": [{"default": None}], "n": None}]


def numbered(start: int, stop: int) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"id": i, "messages": [{"role": "user"}]} for i in range(start, stop)])


def test_rows_of_a_saved_data_set_from_any_number_on(tmp_path):
    numbered(0, 700).select(range(699, -1, -1)).save_to_disk(tmp_path / "d", num_shards=3)
    source = open_source(DataConfig(str(tmp_path / "d")))
    assert isinstance(source, Arrow)
    told = [(place, parse(place, row)["id"]) for place, row in source.rows()]
    assert [number for _, number in told] == list(range(699, -1, -1))
    assert told[0][0].endswith("data-00000-of-00003.arrow: row 1")
    for start in (0, 1, 233, 234, 256, 500, 699, 700):
        assert [(place, parse(place, row)["id"]) for place, row in source.rows(start)] == told[start:]


def test_the_split_of_a_saved_data_set_is_the_configs(tmp_path):
    datasets.DatasetDict(train=numbered(0, 3), test=numbered(3, 5)).save_to_disk(tmp_path / "d")
    path = str(tmp_path / "d")
    assert [row["id"] for row in read(path)] == [0, 1, 2]
    assert [row["id"] for row in read(path, split="test")] == [3, 4]
    identities = {open_source(DataConfig(path, split=split)).identity() for split in ("train", "test")}
    assert len(identities) == 2
    with pytest.raises(
        UserError, match=r"data\.path is .*/d, which has no split 'dev'; data\.split must be one of train, test"
    ):
        check_found(DataConfig(path, split="dev"))
    alone = str(tmp_path / "d" / "train")
    assert [row["id"] for row in read(alone)] == [0, 1, 2]
    with pytest.raises(UserError, match=r"one data set without splits.*; data\.split is 'test'"):
        check_found(DataConfig(alone, split="test"))
    with pytest.raises(UserError, match=r"data\.heldout is .*/d, which has no split 'dev'"):
        check_found(DataConfig("x/y", heldout=path, split="dev"))


def test_a_saved_data_set_that_is_not_whole_is_one_line(tmp_path):
    numbered(0, 300).save_to_disk(tmp_path / "d")
    (shard,) = (tmp_path / "d").glob("*.arrow")
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"^{shard}: not Arrow, or incomplete"):
        read(str(tmp_path / "d"))
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(UserError, match=rf"^{shard}: is a Git LFS pointer instead of the data: .* git lfs pull$"):
        check_found(DataConfig(str(tmp_path / "d")))
    shard.unlink()
    with pytest.raises(UserError, match=rf"{shard} is missing: is it complete"):
        check_found(DataConfig(str(tmp_path / "d")))
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state\.json: cannot be read"):
        check_found(DataConfig(str(tmp_path / "d")))


def test_a_directory_whose_files_are_of_several_kinds_is_refused(tmp_path):
    """`datasets` would read those of one kind and say nothing of the others."""
    save_parquet(tmp_path)
    shutil.copy(tmp_path / "rows.parquet", tmp_path / "more.parquet")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "LICENSE").write_text("free")
    with pytest.raises(UserError, match=r"files of several kinds: Parquet \(2\), JSON \(1\); give a glob"):
        open_source(DataConfig(str(tmp_path)))
    (tmp_path / "train.jsonl").write_text("version https://git-lfs.github.com/spec/v1\n")
    for file in tmp_path.glob("*.parquet"):
        file.unlink()
    with pytest.raises(UserError, match=r"train\.jsonl: is a Git LFS pointer"):
        open_source(DataConfig(str(tmp_path)))


def test_zstandard_in_a_directory_is_told_how_it_is_read(tmp_path):
    (tmp_path / "train.jsonl.zst").write_bytes(pa.Codec("zstd").compress(b'{"a": 1}\n', asbytes=True))
    with pytest.raises(UserError, match=rf"train\.jsonl\.zst is read only through a glob: give {tmp_path}/\*\.zst"):
        open_source(DataConfig(str(tmp_path)))
    assert read(f"{tmp_path}/*.zst") == [{"a": 1}]


def test_a_reader_that_fails_in_its_own_way_is_one_line(monkeypatch, tmp_path):
    def deep(*_: object, **__: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(datasets, "load_dataset", deep)
    with pytest.raises(UserError, match=r"data\.path is .*no data set: maximum recursion depth"):
        open_source(DataConfig(str(tmp_path)))


def test_a_row_that_python_cannot_have_is_malformed():
    """In the process that uses it, or in another."""
    batch = pa.record_batch({"messages": pa.array([b"\xff"], pa.binary()).view(pa.string())})
    row = ArrowRow(batch, 0)
    for sent in (row, pickle.loads(pickle.dumps(row))):
        with pytest.raises(UserError, match=r"^x: row 1: cannot be read: 'utf-8' codec can't decode byte 0xff"):
            parse("x: row 1", sent)
