"""Files of tensors: their contents, and who may read them."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eagle_train.ops.tensor_files import tensors_of, write_tensors
from tests.support.sources import sources


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_may_read_a_file(tmp_path, umask, mode):
    path, before = tmp_path / "some.safetensors", os.umask(umask)
    try:
        write_tensors({"one": torch.arange(3)}, path, {"format": "pt"})
        write_tensors({"one": torch.arange(4)}, path, {"format": "pt"})  # in the place of the other
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("one"), torch.arange(4))


def test_the_package_writes_no_other_way():
    writers = [name for name, text in sources().items() if "save_file" in text]
    assert writers == ["eagle_train.ops.tensor_files"]


def test_a_file_that_may_not_be_read_is_not_told_as_missing(tmp_path, monkeypatch):
    write_tensors({"a": torch.ones(2)}, tmp_path / "some.safetensors")
    assert tensors_of(tmp_path / "some.safetensors")["a"].tolist() == [1, 1]

    def refused(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError, match="Permission denied"):
        tensors_of(tmp_path / "some.safetensors")
