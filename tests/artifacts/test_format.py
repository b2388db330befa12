"""The draft on disk: written whole or not at all, read back to the bit, and refused wherever it is not what it says."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train.artifacts import format
from eagle_train.artifacts.format import load_draft, read_artifact, save_draft
from eagle_train.drafts import Draft, EagleDraft
from eagle_train.errors import UserError
from tests.support.tiny import shared_target, tiny_draft, tiny_model

WEIGHT = "layers.1.mlp.up_proj.weight"
IDENTITY = shared_target().identity


@pytest.fixture(scope="module")
def draft() -> Draft:
    return tiny_draft(shared_target(), rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})


@pytest.fixture
def saved(draft, tmp_path) -> Path:
    return save_draft(draft, tmp_path / "draft", IDENTITY, {"steps": 7})


def refused(directory: Path, *words: str, identity=IDENTITY) -> None:
    with pytest.raises(UserError) as error:
        load_draft(directory, identity)
    assert "\n" not in str(error.value)
    for word in (str(directory), *words):
        assert word in str(error.value)


def edit_tensors(directory: Path, **changes) -> None:
    """Replace tensors; None takes one away."""
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, directory / "model.safetensors")


def edit_config(directory: Path, **changes) -> None:
    """Replace entries of what it says of the draft; None takes one away."""
    values = json.loads((directory / "config.json").read_text())["eagle_train"] | changes
    about = {key: x for key, x in values.items() if x is not None}
    (directory / "config.json").write_text(json.dumps({"eagle_train": about}))


# --- round trip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(draft, tmp_path, dtype):
    loaded = load_draft(save_draft(draft, tmp_path / "new" / "draft", IDENTITY, dtype=dtype), IDENTITY)
    assert loaded.config == draft.config
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.float32
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float()), name


BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    "overrides",
    [
        {"norms": "full"},
        {"ffn": "moe", "num_experts": 2},
        {"irope": True, "attention_chunk": 8},
        {"fc_bias": True},
        {"window": 9, "sink": True},
        BIASES,
    ],
)
def test_every_kind_of_draft_is_rebuilt_from_its_config(tmp_path, overrides):
    draft = tiny_draft(shared_target(), **overrides)
    loaded = load_draft(save_draft(draft, tmp_path / "draft", IDENTITY, dtype=torch.float32))
    assert loaded.config == draft.config
    torch.testing.assert_close(loaded.state_dict(), draft.state_dict(), rtol=0, atol=0)


def test_the_embedding_scale_is_folded(tmp_path):
    draft = tiny_draft(shared_target(), embedding_scale=4.0)
    save_draft(draft, tmp_path / "draft", shared_target().identity, dtype=torch.float32)
    loaded = load_draft(tmp_path / "draft")
    assert loaded.config.embedding_scale == 1.0
    assert torch.equal(loaded.fc.weight, draft.folded().fc.weight)
    assert draft.config.embedding_scale == 4.0, "the draft that was given stays as it is"


def test_others_may_read_it(saved):
    assert saved.stat().st_mode & 0o777 == 0o755
    assert (saved / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_config_tells_what_the_tensors_do_not(saved, draft):
    values = json.loads((saved / "config.json").read_text())["eagle_train"]
    assert (values["layout"], values["version"], values["dtype"]) == ("native", format.VERSION, "bfloat16")
    assert values["target"]["fingerprint"] == IDENTITY.fingerprint
    assert values["training"] == {"steps": 7}
    assert set(values["conventions"]) >= {"input", "first_slot", "hidden", "norms", "rope", "position_of_slot"}
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    other = replace(draft.config, norms="full", first_token="skip")
    differing = {key for key, text in other.conventions().items() if text != values["conventions"][key]}
    assert differing == {"norms", "first_slot"}


# --- what is refused at loading


def test_missing_tensor(saved):
    edit_tensors(saved, **{WEIGHT: None})
    refused(saved, WEIGHT, "missing")


def test_extra_tensor(saved):
    edit_tensors(saved, **{"layers.2.mlp.up_proj.weight": torch.zeros(2)})
    refused(saved, "layers.2.mlp.up_proj.weight", "not part of this draft")


def test_wrong_shape(saved):
    edit_tensors(saved, **{WEIGHT: torch.zeros(32, 48)})
    refused(saved, WEIGHT, "(32, 48)", "(48, 32)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite(saved, value):
    tensor = load_file(saved / "model.safetensors")[WEIGHT]
    tensor[-1, -1] = value
    edit_tensors(saved, **{WEIGHT: tensor})
    refused(saved, WEIGHT, "not finite")


@pytest.mark.parametrize("length", [0, 100, 5000])
def test_truncated_weights(saved, length):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refused(saved, "model.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(saved, name):
    (saved / name).unlink()
    refused(saved, name)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe"])
def test_config_that_is_no_mapping(saved, content):
    (saved / "config.json").write_bytes(content)
    refused(saved, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"layout": "other"},
        {"nosuch": 2},
        {"target": None},
        {"target": {}},
        {"target": "x"},
        {"draft": None},
        {"draft": {}},
        {"draft": 5},
    ],
    ids=str,
)
def test_config_of_another_kind(saved, changes):
    edit_config(saved, **changes)
    refused(saved, "config.json" if "target" not in changes else "target")


def test_a_draft_of_others_is_told_how_it_is_read(saved):
    config = json.loads((saved / "config.json").read_text())
    del config["eagle_train"]
    (saved / "config.json").write_text(json.dumps(config))
    refused(saved, f"; eagle-export checkpoint={saved} target=PATH layout=native out=DIR reads a draft that others")


def test_other_target(saved):
    refused(saved, "fingerprint", identity=replace(IDENTITY, fingerprint="0" * 16))
    refused(saved, "vocab_size 96", "(97)", identity=replace(IDENTITY, vocab_size=97))
    load_draft(saved, replace(IDENTITY, name="moved elsewhere"))
    load_draft(saved)


# --- what is refused at saving


@pytest.mark.parametrize("before", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("what", ["write_tensors", "write_json"])
def test_full_disk_leaves_nothing_half_written(draft, tmp_path, monkeypatch, what, before):
    directory = tmp_path / "draft"
    if before:
        save_draft(draft, directory, IDENTITY, {"steps": 1})
    kept = sorted(tmp_path.rglob("*"))

    def full(path_or_tensors, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(format, what, full)
    with pytest.raises(UserError, match=r"out=.*No space left on device"):
        save_draft(draft, directory, IDENTITY, {"steps": 2})
    assert sorted(tmp_path.rglob("*")) == kept
    if before:
        assert read_artifact(directory).training == {"steps": 1}


def test_replaces_a_draft_but_nothing_else(draft, saved, tmp_path):
    save_draft(draft, saved, IDENTITY, {"steps": 8})
    assert read_artifact(saved).training == {"steps": 8}
    empty = tmp_path / "empty"
    empty.mkdir()
    save_draft(draft, empty, IDENTITY)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("important")
    with pytest.raises(UserError, match="holds no draft"):
        save_draft(draft, other, IDENTITY)
    assert (other / "thesis.txt").read_text() == "important"


def test_what_cannot_be_replaced_is_still_there(draft, saved, tmp_path, monkeypatch):
    """A mount point that cannot be moved, and a name that is gone between the two moves."""
    save_draft(draft, saved, IDENTITY, {"steps": 1})
    rename = os.rename
    for last in (1, 2):
        moves = []

        def failing(source, place, moves=moves, last=last):
            moves.append(place)
            if len(moves) == last:
                raise OSError(16, "Device or resource busy")
            rename(source, place)

        monkeypatch.setattr(format.os, "rename", failing)
        with pytest.raises(UserError, match=r"^out=.*: cannot be written: .*busy"):
            save_draft(draft, saved, IDENTITY, {"steps": 8})
        monkeypatch.setattr(format.os, "rename", rename)
        assert read_artifact(saved).training == {"steps": 1}
        assert [path for path in saved.parent.iterdir() if path.name.startswith(".")] == []


def test_a_link_leads_where_it_led(draft, saved, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    save_draft(draft, tmp_path / "link", IDENTITY, {"steps": 8})
    assert (tmp_path / "link").is_symlink()
    assert read_artifact(saved).training == {"steps": 8}


def test_never_replaces_a_target(draft, tmp_path):
    """A target's directory has a config.json too."""
    tiny_model("llama").save_pretrained(tmp_path / "target")
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="holds no draft"):
        save_draft(draft, tmp_path / "target", IDENTITY)
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before


def test_place_that_cannot_be_a_directory(draft, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="out="):
            save_draft(draft, place, IDENTITY)


def test_weights_that_were_never_initialised_are_not_saved(draft, tmp_path):
    with pytest.raises(UserError, match="not finite"):
        save_draft(EagleDraft(draft.config), tmp_path / "draft", IDENTITY)
    assert not list(tmp_path.iterdir())
