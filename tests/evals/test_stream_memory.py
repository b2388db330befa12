"""evals/stream_memory.py: it reads every document, and reports how much the memory grew."""

import json
import mmap
import re

from eagle_train.corpus import stream as stream_module
from evals import stream_memory
from tests.support.command_line import call, chats, write_jsonl

TARGET = "tokenizer=data/tiny_target"


def test_made_up_chats_are_read_to_the_end(tmp_path):
    assert call(stream_memory.main, "megabytes=1", TARGET, f"out={tmp_path}/found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bytes"] >= 10**6
    assert found["documents"] <= found["counts"]["documents"] < found["documents"] + 100  # the last batch's may be more
    assert found["grown_mb"] < 20
    assert found["evaluation"] == "stream_memory"
    assert 5 < len(found["held_mb"]) <= stream_memory.MARKS


def test_a_stream_that_keeps_its_rows_is_detected(tmp_path, monkeypatch, capsys):
    path, kept, pack = write_jsonl(tmp_path / "chats.jsonl", chats(2000)), [], stream_module.Packer.pack

    def keeping(self, document):
        kept.append(mmap.mmap(-1, 50_000))  # memory of its own: what earlier tests freed would not show
        kept[-1].write(b"x" * 50_000)
        return pack(self, document)

    monkeypatch.setattr(stream_module.Packer, "pack", keeping)
    arguments = [TARGET, f"data.path={path}", f"out={tmp_path}/found.json"]
    assert call(stream_memory.main, *arguments) == 1
    assert re.search(r"it grew by \d\d\.\d MB at most; asked: below 20", capsys.readouterr().out)
