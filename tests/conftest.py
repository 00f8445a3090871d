from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests for Hopper run on one and are skipped elsewhere."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0"))
