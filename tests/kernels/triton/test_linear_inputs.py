"""Inputs that the quantizing kernels do not take."""

from __future__ import annotations

import pytest
import torch
import triton

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.triton.linear_inputs import quantize_fp8_per_group


@pytest.mark.parametrize("columns", [1, 127, 200])
def test_groups_must_be_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    message = rf"^quantize_fp8_per_group takes rows of a multiple of 128 values, not of {columns}$"
    with pytest.raises(HalfbyteError, match=message):
        quantize_fp8_per_group(torch.ones(2, columns))
