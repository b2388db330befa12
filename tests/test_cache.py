"""eagle-cache and target=cached: training from the target's states on disk is training with the target."""

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from eagle_train import cache, datastore, export, generate, train
from eagle_train.artifacts.format import read_artifact
from eagle_train.caching import build, size, walk
from eagle_train.caching.options import Run
from eagle_train.cli import compose
from eagle_train.corpus import feed
from eagle_train.distributed import World
from eagle_train.errors import UserError
from eagle_train.models import state_files
from eagle_train.models.cached_target import load_cached
from eagle_train.models.loading import TargetConfig
from eagle_train.models.state_files import Layout, decoded, encoded, key_of
from eagle_train.training import assembly, evaluate
from eagle_train.training.target_pass import unread
from tests.support.command_line import (
    call,
    chats,
    metrics_without_times,
    save_target,
    train_arguments,
    write_jsonl,
)
from tests.support.multimodal import multimodal_config
from tests.support.processes import start_ranks

STEPS = 14  # with which the run is in its second epoch
SMALL_SHARD = 2**14
KINDS = {
    "eagle": ("draft=eagle", "draft.num_layers=1", "draft.embedding_scale=null"),
    "eagle3": ("draft=eagle3", "draft.layers=[1,2]", "draft.steps=2"),
}
FEWER = "data.heldout=null"
KILLED = """
import os, signal
from eagle_train import cache
from eagle_train.caching import build, writer

save, saved_before = writer.write_tensors, []
build.MIB = {size}

def killed(*given):
    saved_before.append(1)
    if len(saved_before) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(*given)

writer.write_tensors = killed
cache.main()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory with a target and chats, of which the last are twice there."""
    root = tmp_path_factory.mktemp("cache")
    save_target(root / "target")
    rows = chats(60)
    write_jsonl(root / "train.jsonl", [*rows, *rows[-5:]])
    write_jsonl(root / "heldout.jsonl", chats(12, seed=1))
    write_jsonl(root / "other.jsonl", chats(60, seed=2))
    return root


def words(root: Path, kind: str = "eagle", *overrides: str) -> list[str]:
    """A run's words, for eagle-cache and eagle-train alike."""
    usual = [each for each in train_arguments(root, f"train.steps={STEPS}") if not each.startswith("draft.")]
    return [*usual, *KINDS[kind], *overrides]


def run_cache(root: Path, out: Path, kind: str = "eagle", *overrides: str) -> int:
    return call(cache.main, *words(root, kind, f"out={out}", *overrides))


def run_train(root: Path, out: Path, kind: str = "eagle", *overrides: str) -> int:
    return call(train.main, *words(root, kind, f"out={out}", *overrides))


def from_cache(path: Path, *overrides: str) -> list[str]:
    """Overrides of a run that trains from a cache."""
    return ["target=cached", f"target.path={path}", "target.dtype=auto", *overrides]


def draft_of(run: Path) -> dict[str, torch.Tensor]:
    (path,) = run.glob(f"step-*{STEPS}")
    return load_file(path / "draft.safetensors")


def assert_equal(one: Path, other: Path) -> None:
    """The same losses and gradients in each step, the same held-out figures, the same weights, to the bit."""
    records = metrics_without_times(one)
    assert len(records) == STEPS
    assert "heldout_loss" in records[-1] or "heldout_ce" in records[-1]
    assert records == metrics_without_times(other)
    theirs = draft_of(other)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in draft_of(one).items())


def assert_near(one: Path, other: Path) -> None:
    """The same losses, up to rounding."""
    ours, theirs = ([record["loss"] for record in metrics_without_times(run)] for run in (one, other))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.fixture(scope="module")
def caches(root) -> dict[str, Path]:
    """A cache for each kind."""
    for kind in KINDS:
        assert run_cache(root, root / f"cache-{kind}", kind) == 0
    return {kind: root / f"cache-{kind}" for kind in KINDS}


@pytest.fixture(scope="module")
def online(root) -> dict[str, Path]:
    """A run of each kind with the target."""
    for kind in KINDS:
        assert run_train(root, root / f"online-{kind}", kind) == 0
    return {kind: root / f"online-{kind}" for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_a_cache_is_the_run_with_the_target_to_the_bit(root, caches, online, tmp_path, kind):
    assert run_train(root, tmp_path / "run", kind, *from_cache(caches[kind])) == 0
    assert_equal(tmp_path / "run", online[kind])


def test_what_is_exported_is_an_online_runs_draft_for_the_real_target(root, caches, online, tmp_path, capsys):
    assert run_train(root, tmp_path / "run", "eagle", *from_cache(caches["eagle"])) == 0
    for name, run in (("offline", tmp_path / "run"), ("online", online["eagle"])):
        assert call(export.main, f"checkpoint={run}", f"out={tmp_path / name}", "device=cpu") == 0
    one, other = (read_artifact(tmp_path / name, "draft") for name in ("offline", "online"))
    assert one.target == other.target
    assert one.target.num_layers == 3
    capsys.readouterr()
    given = (f"target={root / 'target'}", f"draft={tmp_path / 'offline'}", "prompt=abc", "max_tokens=3", "chat=false")
    assert call(generate.main, *given, "device=cpu") == 0


def test_a_run_goes_on_online_or_from_a_cache(root, caches, online, tmp_path):
    first = [each.replace(f"train.steps={STEPS}", "train.steps=6") for each in words(root, "eagle")]
    assert call(train.main, *first, *from_cache(caches["eagle"]), f"out={tmp_path / 'run'}") == 0
    assert run_train(root, tmp_path / "run", "eagle") == 0
    assert metrics_without_times(tmp_path / "run")[-1] == metrics_without_times(online["eagle"])[-1]


@pytest.mark.parametrize("precision", ["target", "bf16"])
def test_bf16_of_a_bf16_target_is_exact(root, tmp_path, precision):
    low = ("target.dtype=bfloat16", f"precision={precision}")
    assert run_cache(root, tmp_path / "cache", "eagle", *low) == 0
    assert json.loads((tmp_path / "cache" / "cache.json").read_text())["dtype"] == "bfloat16"
    assert run_train(root, tmp_path / "online", "eagle", low[0]) == 0
    assert run_train(root, tmp_path / "offline", "eagle", *from_cache(tmp_path / "cache")) == 0
    assert_equal(tmp_path / "offline", tmp_path / "online")


def test_fp8_is_near_and_trains(root, caches, online, tmp_path):
    assert run_cache(root, tmp_path / "cache", "eagle3", "precision=fp8", "shard_mib=1") == 0
    assert run_train(root, tmp_path / "run", "eagle3", *from_cache(tmp_path / "cache")) == 0
    ours, theirs = (metrics_without_times(run) for run in (tmp_path / "run", online["eagle3"]))
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02)
        assert one["loss"] != other["loss"]
    small, large = (path / "0000-00000.safetensors" for path in (tmp_path / "cache", caches["eagle3"]))
    assert small.stat().st_size < 0.4 * large.stat().st_size


def test_a_rounded_targets_states_are_for_runs_with_a_rounded_target(root, online, tmp_path, capsys):
    rounded = "train.target_quant=fp8"
    assert run_cache(root, tmp_path / "cache", "eagle", rounded) == 0
    assert run_train(root, tmp_path / "online", "eagle", rounded) == 0
    assert run_train(root, tmp_path / "offline", "eagle", *from_cache(tmp_path / "cache", rounded)) == 0
    assert_equal(tmp_path / "offline", tmp_path / "online")
    assert metrics_without_times(tmp_path / "online") != metrics_without_times(online["eagle"])
    assert call(cache.main, *words(root, "eagle", rounded, f"out={tmp_path / 'cache'}", "verify=true")) == 0
    assert run_train(root, tmp_path / "run", "eagle", *from_cache(tmp_path / "cache")) == 2
    assert "was written with fp8; give the same" in capsys.readouterr().err


def test_a_draft_that_wants_fewer_layers_reads_a_cache_of_more(root, caches, tmp_path):
    fewer = "draft.layers=[2]"
    assert run_train(root, tmp_path / "online", "eagle3", fewer) == 0
    assert run_train(root, tmp_path / "offline", "eagle3", *from_cache(caches["eagle3"], fewer)) == 0
    assert_equal(tmp_path / "offline", tmp_path / "online")
    assert run_train(root, tmp_path / "eagle", "eagle", *from_cache(caches["eagle3"])) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_fp8s_error_is_bounded(scale):
    """Half of the last of e4m3's three bits, and half of the smallest step below them."""
    states = scale * torch.randn(50, 4, 64, generator=torch.Generator().manual_seed(0))
    states[0] = 0
    layout = Layout(64, 3, "fp8", torch.float32)
    stored, scales = encoded(states, layout)
    assert (stored.dtype, scales.shape) == (torch.float8_e4m3fn, (50, 4))
    error = (decoded(stored, scales, layout) - states).abs()
    assert (error <= states.abs() * 2**-4 + scales.unsqueeze(-1) * 2**-10 + 1e-30).all()
    assert (error[0] == 0).all()


def test_final_states_of_supervised_slots_alone_are_the_same_lesson(root, caches, online, tmp_path):
    assert run_cache(root, tmp_path / "cache", "eagle3", "supervised_only=true") == 0
    assert run_train(root, tmp_path / "run", "eagle3", *from_cache(tmp_path / "cache")) == 0
    assert_equal(tmp_path / "run", online["eagle3"])
    kept, whole = (load_file(path / "0000-00000.safetensors") for path in (tmp_path / "cache", caches["eagle3"]))
    assert len(kept["hidden"]) == int(kept["kept"].sum()) < 0.7 * len(whole["hidden"])
    assert torch.equal(kept["layers"], whole["layers"])
    assert call(cache.main, *words(root, "eagle3", f"out={tmp_path / 'cache'}", "verify=true")) == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_cache_that_was_killed_goes_on_behind_its_last_shard(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "MIB", SMALL_SHARD)
    given, out = ("shard_mib=1",), tmp_path / "cache"
    assert run_cache(root, tmp_path / "whole", "eagle", *given) == 0
    program = KILLED.format(size=SMALL_SHARD)
    ran = subprocess.run([sys.executable, "-c", program, *words(root, "eagle", f"out={out}", *given)])
    assert ran.returncode == -signal.SIGKILL
    assert not out.exists()
    for other, named in (("precision=bf16", "precision=target, not bf16"), ("data.seed=7", "data.seed=0, not 7")):
        assert run_cache(root, out, "eagle", *given, other) == 2
        assert f"out={out}: was begun with {named}; give another directory, or remove" in capsys.readouterr().err
    begun = contents(tmp_path / "cache.partial")
    assert len([name for name in begun if name.startswith("0000-")]) == 3
    assert run_cache(root, out, "eagle", *given) == 0
    assert "goes on after 3 finished shards" in capsys.readouterr().err
    assert contents(out) == contents(tmp_path / "whole")
    assert all(contents(out)[name] == begun[name] for name in begun if name.startswith("0000-"))


def interrupted(whole: Path) -> None:
    """Let a cache be one that was interrupted behind its last shard."""
    partial = whole.with_name(f"{whole.name}.partial")
    whole.rename(partial)
    header = json.loads((partial / "cache.json").read_text())
    (partial / "made_of.json").write_text(json.dumps(header["made_of"]))
    for name in ("cache.json", "index.safetensors"):
        (partial / name).unlink()


def test_an_interrupted_cache_computes_nothing_twice(root, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "MIB", SMALL_SHARD)
    assert run_cache(root, tmp_path / "cache") == 0
    interrupted(tmp_path / "cache")
    computed = []
    monkeypatch.setattr(build, "target_states", lambda *given: pytest.fail("held-out rows are there"))
    monkeypatch.setattr(assembly, "target_states", lambda *given: pytest.fail("all rows are there"))
    states = build.ShardWriter.parts_of
    monkeypatch.setattr(build.ShardWriter, "parts_of", lambda *given: computed.append(1) or states(*given))
    assert run_cache(root, tmp_path / "cache") == 0
    assert computed == []


@pytest.mark.ranks
def test_any_number_of_ranks_reads_what_any_wrote(root, caches, online, tmp_path):
    """Two write and one reads, and the reverse; what two ranks read of two is their own run to the bit."""
    two = ("parallel=ddp", "train.micro_batch_rows=1", "train.eval_batches=20")
    start_ranks(2, "cache_job", "cache", words(root, "eagle", *two, f"out={tmp_path / 'two'}"))
    names = json.loads((tmp_path / "two" / "cache.json").read_text())["shards"]
    assert names == ["0000-00000.safetensors", "0001-00000.safetensors"]
    one, other = ({bytes(key) for key in load_file(tmp_path / "two" / name)["keys"].numpy()} for name in names)
    assert not one & other
    assert run_train(root, tmp_path / "one", "eagle", *from_cache(tmp_path / "two")) == 0
    assert_near(tmp_path / "one", online["eagle"])
    runs = {"online": [], "of-two": from_cache(tmp_path / "two"), "of-one": from_cache(caches["eagle"])}
    for name, given in runs.items():
        start_ranks(2, "cache_job", "train", words(root, "eagle", *two, *given, f"out={tmp_path / name}"))
    assert_equal(tmp_path / "of-two", tmp_path / "online")
    assert_near(tmp_path / "of-one", tmp_path / "online")


@pytest.mark.ranks
@pytest.mark.parametrize("command", ["cache", "train"])
def test_ranks_that_compute_in_different_dtypes_are_told_to_name_one(root, tmp_path, command):
    """One node computes in bf16, and the other does not; what one made would not be what the other makes."""
    given = words(root, "eagle", "parallel=ddp", "target.dtype=auto", f"out={tmp_path / 'out'}")
    told = r"error: target.dtype=auto: bfloat16 on \S+, float32 on \S+, by what .*; give target.dtype=float32, which"
    with pytest.raises(AssertionError, match=told):
        start_ranks(2, "cache_job", command, given, (1,))
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_a_cache_that_goes_on_is_read_by_its_first_rank_alone(root, tmp_path):
    """The second one cannot read what is there (cache_job.py), and knows it all the same."""
    given = words(root, "eagle", "parallel=ddp", "train.micro_batch_rows=1", f"out={tmp_path / 'cache'}")
    start_ranks(2, "cache_job", "cache", given)
    whole = contents(tmp_path / "cache")
    interrupted(tmp_path / "cache")
    first, second = (tmp_path / f"cache.partial/{rank:04d}-00000.safetensors" for rank in range(2))
    changed = first.stat().st_mtime_ns
    second.unlink()  # its documents are computed again, by whom they are met
    start_ranks(2, "cache_job", "cache", given)
    assert (tmp_path / "cache" / first.name).stat().st_mtime_ns == changed
    assert contents(tmp_path / "cache") == whole


@pytest.mark.ranks
def test_ranks_that_hold_a_target_together_write_its_states(root, caches, tmp_path, capsys):
    """Also where one of them has no new document in its rows, and the other has."""
    together = ("parallel=ddp", "parallel.target=tensor", "train.micro_batch_rows=1", "train.eval_batches=21")
    start_ranks(2, "cache_job", "cache", words(root, "eagle3", *together, f"out={tmp_path / 'cache'}"))
    header, whole = (json.loads((path / "cache.json").read_text()) for path in (tmp_path / "cache", caches["eagle3"]))
    assert (header["documents"], header["target"]) == (whole["documents"], whole["target"])
    assert len(header["shards"]) == 2
    assert call(cache.main, *words(root, "eagle3", f"out={tmp_path / 'cache'}", "verify=true")) == 0
    assert "86 documents are what was written; 8 were computed again" in capsys.readouterr().out


def flip(path: Path, tensor: str) -> None:
    """Change a byte in the middle of one of a file's tensors."""
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    first, last = json.loads(content[8:begin])[tensor]["data_offsets"]
    content[begin + (first + last) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("tensor", ["hidden", "layers", "tokens", "keys", "checksums"])
def test_a_flipped_byte_is_found(root, caches, tmp_path, capsys, tensor):
    shutil.copytree(caches["eagle3"], tmp_path / "cache")
    flip(tmp_path / "cache" / "0000-00000.safetensors", tensor)
    assert call(cache.main, *words(root, "eagle3", f"out={tmp_path / 'cache'}", "verify=true")) == 2
    assert f"out={tmp_path / 'cache'}: 0000-00000.safetensors" in (told := capsys.readouterr().err)
    assert "damaged" in told
    if tensor in state_files.STATES:
        assert run_train(root, tmp_path / "run", "eagle3", *from_cache(tmp_path / "cache")) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith(f"error: target.path={tmp_path / 'cache'}: 0000-00000.safetensors is damaged")


def test_verify_finds_another_targets_states(root, caches, tmp_path, capsys):
    assert call(cache.main, *words(root, "eagle", f"out={caches['eagle']}", "verify=true")) == 0
    assert "86 documents are what was written; 8 were computed again" in capsys.readouterr().out
    shutil.copytree(caches["eagle"], tmp_path / "cache")
    shard = tmp_path / "cache" / "0000-00000.safetensors"
    tensors = load_file(shard)
    tensors["hidden"] = tensors["hidden"].roll(1, 0)
    of_each = tensors["hidden"].split(tensors["lengths"].tolist())
    sums = [state_files.checksum_of({"hidden": each.numpy().view(np.uint8)}) for each in of_each]
    assert sums != tensors["checksums"].tolist()
    rewrite(tmp_path / "cache", tensors | {"checksums": torch.tensor(sums)})
    assert call(cache.main, *words(root, "eagle", f"out={tmp_path / 'cache'}", "verify=true")) == 2
    assert "from what the target computes; write the cache again" in capsys.readouterr().err


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A cache of one shard, with other tensors and the index of these."""
    save_file(tensors, folder / "0000-00000.safetensors")
    shard = state_files.Shard(folder / "0000-00000.safetensors", "")
    save_file(state_files.index_of([shard]), folder / "index.safetensors")


def taken(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("given", [(), ("precision=fp8",), ("train.steps=5",), (FEWER, "data.long_documents=drop")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_takes_is_said_before(root, tmp_path, monkeypatch, kind, given):
    told = said(monkeypatch)
    assert run_cache(root, tmp_path / "cache", kind, *given) == 0
    assert told[0].sampled is None
    assert told[0].disk_bytes == pytest.approx(taken(tmp_path / "cache"), rel=0.02)
    header = json.loads((tmp_path / "cache" / "cache.json").read_text())
    assert (told[0].documents, told[0].tokens) == (header["documents"], header["tokens"])


def said(monkeypatch) -> list[size.Size]:
    """What is said of sizes from now on."""
    found, size_of = [], build.size_of
    monkeypatch.setattr(build, "size_of", lambda *given: found.append(size_of(*given)) or found[-1])
    return found


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (False, False)])
def test_one_matrix_for_embedding_and_head_is_counted_once_whoever_says_so(outer, inner):
    config = multimodal_config("gemma3", tie_word_embeddings=inner)
    config.tie_word_embeddings = outer
    model = AutoModelForImageTextToText.from_config(config)
    ends = {each.weight.data_ptr(): each.weight.nbytes for each in (model.get_input_embeddings(), model.lm_head)}
    assert size.bytes_of_ends(config, TargetConfig("x"), 4) == sum(ends.values())


def test_of_much_data_a_sample_is_rendered(root, tmp_path, monkeypatch, capsys):
    """Also where the first rows are unlike the others."""
    few = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]}
    rows = [*[few] * 300, *chats(1500, seed=3)]
    for number, row in enumerate(rows):  # all unlike
        row = json.loads(json.dumps(row))
        row["messages"][0]["content"] = f"{number:05d}" + row["messages"][0]["content"]
        rows[number] = row
    write_jsonl(tmp_path / "many.jsonl", rows)
    monkeypatch.setattr(size, "ALL", 900)
    write_jsonl(tmp_path / "heldout.jsonl", chats(800, seed=4))
    told, given = said(monkeypatch), [f"data.path={tmp_path / 'many.jsonl'}", "train.steps=10000", "data.row_tokens=64"]
    given += [f"data.heldout={tmp_path / 'heldout.jsonl'}", "train.eval_batches=1000"]
    assert run_cache(root, tmp_path / "cache", "eagle", *given, "optim.tokens_per_step=128") == 0
    assert told[0].sampled == 900
    assert told[0].disk_bytes == pytest.approx(taken(tmp_path / "cache"), rel=0.02)
    assert "(by 900 rows, within " in capsys.readouterr().err


def test_ranks_render_a_sample_together(root, tmp_path, monkeypatch):
    """None waits for the first one, and what they find is what one finds."""
    seen, drawn = [], size._drawn
    monkeypatch.setattr(size, "ALL", 20)
    monkeypatch.setattr(size, "_drawn", lambda run, walk: seen.append((run, walk)) or drawn(run, walk))
    assert run_cache(root, tmp_path / "cache", "eagle", "plan=true", "train.steps=10000") == 0
    run, walk = seen[0]
    rows, whole = drawn(run, walk)
    assert (rows, len(whole)) == (65, 20)
    rendered = []
    monkeypatch.setattr(size, "render", lambda *given: rendered.append(1) or feed.render(*given))
    for rank in range(3):
        walk.stream.world = World(rank, 3)
        assert drawn(run, walk) == (65, whole[rank::3])
    assert len(rendered) < 65


def test_a_plan_writes_nothing_and_a_full_disk_is_refused(root, tmp_path, monkeypatch, capsys):
    assert run_cache(root, tmp_path / "cache", "eagle", "plan=true") == 0
    assert "86 documents, " in capsys.readouterr().out
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(size.shutil, "disk_usage", lambda folder: usage(2**20, 2**20 - 2**16, 2**16))
    monkeypatch.setattr(build, "load_target", lambda *given: pytest.fail("it is refused before"))
    assert run_cache(root, tmp_path / "cache") == 2
    assert "and its disk has 64.0 KiB left; give another directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_document_that_is_not_there_is_named(root, caches, tmp_path, capsys):
    other = f"data.path={root / 'other.jsonl'}"
    assert run_train(root, tmp_path / "run", "eagle", *from_cache(caches["eagle"], other)) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: target.path={caches['eagle']}: has no states of a document of ")
    assert "tokens that begins 'u:" in told


def test_held_out_documents_are_looked_for_at_once(root, caches, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(assembly, "look_ahead", lambda *given: pytest.fail("it is refused before"))
    other = f"data.heldout={root / 'other.jsonl'}"
    assert run_train(root, tmp_path / "run", "eagle", *from_cache(caches["eagle"], other)) == 2
    assert "has no states of a document of " in capsys.readouterr().err.splitlines()[-1]


REFUSED = {
    "layers": ("eagle3", "eagle", (), "holds final hidden states alone, counted from 0, and draft=eagle3 wants"),
    "target_quant": ("eagle", "eagle", ("train.target_quant=fp8",), "train.target_quant=fp8: target.path="),
    "dtype": ("eagle", "eagle", ("target.dtype=bfloat16",), "target.dtype=bfloat16: target.path="),
    "divided": ("eagle", "eagle", ("parallel.target=fsdp2",), "parallel.target=fsdp2: target.path="),
    "offload": ("eagle", "eagle", ("target.offload=true",), "target.offload=true: target=cached has no layers"),
    "its own draft": ("eagle", "eagle", ("train.init_from=target",), "train.init_from=target: target.path="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_cache_cannot_give_is_refused(root, caches, tmp_path, capsys, name):
    kind, held, given, told = REFUSED[name]
    assert run_train(root, tmp_path / "run", kind, *from_cache(caches[held], *given)) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert told in line


def test_who_needs_layers_refuses_a_cache(root, caches, tmp_path, capsys):
    place = f"target.path={caches['eagle']}"
    for main, given in (
        (generate.main, [place, "prompt=abc", "device=cpu"]),
        (cache.main, words(root, "eagle", *from_cache(caches["eagle"]), f"out={tmp_path / 'again'}")),
        (train.main, words(root, "eagle", f"target={caches['eagle']}", f"out={tmp_path / 'run'}")),
        (generate.main, ["target=cached", place, "prompt=abc", "device=cpu"]),
        (train.main, words(root, "eagle", *from_cache(root / "none"), f"out={tmp_path / 'run'}")),
    ):
        assert call(main, *given) == 2
    told = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    without = "a cache of hidden states, without the target's layers; give the target"
    assert [without in told[0], "is a cache already" in told[1], without in told[2]] == [True] * 3
    assert "and no layers to run; give the target" in told[3]
    assert "no cache.json there; give a directory that eagle-cache wrote" in told[4]
    given = (f"target.path={caches['eagle']}", "target=cached", "data=messages", f"data.path={root / 'train.jsonl'}")
    assert call(datastore.main, *given, f"out={tmp_path / 'index'}") == 0  # it reads the tokenizer alone


def test_what_a_kind_reads_everywhere_is_kept_everywhere(root, tmp_path, capsys):
    fed = "draft=eagle is fed the final hidden state at every slot"
    assert run_cache(root, tmp_path / "cache", "eagle", "supervised_only=true") == 2
    assert f"supervised_only=true: {fed}" in capsys.readouterr().err
    assert run_cache(root, tmp_path / "cache", "eagle3", "supervised_only=true") == 0
    assert run_train(root, tmp_path / "run", "eagle", *from_cache(tmp_path / "cache")) == 2
    assert f"was written with supervised_only=true, and {fed}" in capsys.readouterr().err


def test_a_run_of_few_steps_is_cached_that_far(root, caches, tmp_path, capsys):
    few, whole = "train.steps=3", json.loads((caches["eagle"] / "cache.json").read_text())
    assert run_cache(root, tmp_path / "cache", "eagle", few) == 0
    assert json.loads((tmp_path / "cache" / "cache.json").read_text())["tokens"] < whole["tokens"] / 2
    assert run_train(root, tmp_path / "run", "eagle", *from_cache(tmp_path / "cache", few)) == 0
    held = json.loads((tmp_path / "cache" / "cache.json").read_text())["rows"]
    assert (held, whole["rows"]) == (3 * 4, STEPS * 4)
    for length, reads in ((f"train.steps={STEPS}", STEPS * 4), ("train.minutes=1", "as many as it has time for")):
        one = [each for each in words(root, "eagle") if not each.startswith("train.steps=")]
        given = (*one, *from_cache(tmp_path / "cache"), f"out={tmp_path / 'longer'}", length)
        for plan in ((), ("plan=true",)):
            assert call(train.main, *given, *plan) == 2
            told = capsys.readouterr().err.splitlines()[-1]
            assert told.startswith(f"error: {length}: target.path={tmp_path / 'cache'} holds the documents of 12 ")
            assert f"this run reads {reads}; run eagle-cache with {length}" in told
    assert not (tmp_path / "longer").exists()


def test_a_runs_other_words_are_taken_and_change_nothing(root, tmp_path):
    run_only = ["seed=3", "tracking=wandb", "profile=true", "cluster.gpus=8"]
    given = [each.replace("target=/", "target.path=/") for each in words(root, "eagle", f"out={tmp_path / 'cache'}")]
    assert Run.of(compose("cache", [*given, *run_only]), 1).draft == Run.of(compose("cache", given), 1).draft


def test_what_was_learnt_before_a_document_that_is_not_there_is_kept(root, tmp_path, capsys):
    """So it is before one that is damaged, which is found in the same place."""
    rows = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
    rows[40] = chats(1, seed=5)[0]
    write_jsonl(tmp_path / "other.jsonl", rows)
    in_order = "data.shuffle_window=0"
    assert run_cache(root, tmp_path / "cache", "eagle", in_order) == 0
    given = from_cache(tmp_path / "cache", in_order, f"data.path={tmp_path / 'other.jsonl'}", "train.save_every=0")
    assert run_train(root, tmp_path / "run", "eagle", *given) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: target.path={tmp_path / 'cache'}: has no states of a document of ")
    done = len(metrics_without_times(tmp_path / "run"))
    assert 0 < done < STEPS
    assert told.endswith(f"; {done} of {STEPS} steps are done and kept")
    assert [each.name for each in (tmp_path / "run").glob("step-*")] == [f"step-{done:08d}"]


def test_what_was_learnt_before_a_measurement_that_cannot_be_made_is_kept(root, caches, tmp_path, monkeypatch, capsys):
    read = evaluate.target_states
    monkeypatch.setattr(evaluate, "target_states", lambda *given: read(*given)._replace(fault=UserError("damaged")))
    given = from_cache(caches["eagle"], "train.save_every=0", "train.eval_every=2")
    assert run_train(root, tmp_path / "run", "eagle", *given) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: damaged; 2 of {STEPS} steps are done and kept"
    assert [each.name for each in (tmp_path / "run").glob("step-*")] == ["step-00000002"]


def test_all_ranks_end_where_one_cannot_read(root, caches):
    """What each of two ranks is told; the votes and the lines of both."""
    target = load_cached(TargetConfig(str(caches["eagle"]), cached=True), "cpu")
    for faults, told in (((None, None), None), ((None, UserError("damaged")), "damaged")):
        for fault in faults:
            world = SimpleNamespace(
                vote=lambda own, faults=faults: lambda: own or any(faults),
                exchange=lambda own, side, faults=faults: [each and str(each) for each in faults],
            )
            assert unread(target, fault, world) == told


def test_a_pass_ends_where_rows_are_filled_late(root, tmp_path, monkeypatch):
    """A row that is open for several passes, because what is behind it fits no open row and fills one."""

    def row(asked: str, said: str) -> dict:
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}

    letters = [chr(ord("0") + number) for number in range(40)]
    write_jsonl(tmp_path / "late.jsonl", [row("x", "y"), *(row(8 * each, 16 * each) for each in letters)])
    given = (f"data.path={tmp_path / 'late.jsonl'}", FEWER, "train.steps=10000")
    drawn, draw = [], walk.Stream.draw
    monkeypatch.setattr(walk.Stream, "draw", lambda *of: drawn.append(1) or draw(*of))
    assert run_cache(root, tmp_path / "cache", "eagle", *given) == 0
    assert json.loads((tmp_path / "cache" / "cache.json").read_text())["documents"] == 41
    assert len(drawn) < 2 * (41 + walk._BEYOND)  # twice: the size is measured so too
    header = json.loads((tmp_path / "cache" / "cache.json").read_text())
    assert header["tokens"] == 8 + 40 * 30
    assert header["rows"] is None  # all of the data, for runs of any length


def test_a_key_is_of_the_tokens_and_where_it_matters_of_what_is_supervised():
    tokens, first, last = torch.arange(9), torch.arange(9) < 4, torch.arange(9) > 4
    keys = [key_of(tokens), key_of(tokens, first), key_of(tokens, last), key_of(tokens[:8]), key_of(tokens.flip(0))]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {state_files.KEY_BYTES}
    assert key_of(tokens.clone(), first.clone()) == keys[1]


def test_keys_that_begin_alike_are_told_apart(tmp_path):
    keys = [bytes([1] * 8 + [last] * 8) for last in (9, 3, 5)] + [bytes(16), bytes([255] * 16)]
    tensors = {"keys": torch.tensor([list(key) for key in keys], dtype=torch.uint8)}
    lengths = torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32)
    tensors |= {"lengths": lengths, "kept": lengths - 1, "checksums": torch.tensor([-5, 4, 3, 2, 1])}
    save_file(tensors, tmp_path / "0000-00000.safetensors")
    shard = state_files.Shard(tmp_path / "0000-00000.safetensors", "")
    save_file(state_files.index_of([shard]), tmp_path / "index.safetensors")
    files = state_files.StateFiles(tmp_path, SimpleNamespace(shards=["0000-00000.safetensors"]), "")
    found = [files.find(key) for key in keys]
    assert found == shard.places(0)
    assert [tuple(place) for place in found[:2]] == [(0, 0, 0, 3, 2, -5), (0, 3, 2, 1, 0, 4)]
    assert files.find(bytes([1] * 8 + [4] * 8)) is None
    assert files.find(bytes([2] * 16)) is None
