"""Files of tensors: their contents, and who may read them."""

import os

import pytest
import torch
from safetensors import safe_open

from eagle_train.ops.tensor_files import write_tensors
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
