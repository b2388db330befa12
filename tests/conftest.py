"""What all tests run under: no network, few threads that sleep while they wait, and `gpu` tests only where one is."""

import os

os.environ["OMP_WAIT_POLICY"] = "passive"  # read when torch is loaded; spinning threads starve each other (DESIGN 5)
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and none is visible"))
