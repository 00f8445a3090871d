from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.audit.expected import ChannelScales, ExpectedWeight, Factors
from halfbyte.audit.moved import moved_bias, moved_weight
from halfbyte.audit.source import SourceWeight
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.models.layout import ModuleInfo, Role, WeightSource
from tests.checkpoint.files import write_checkpoint

NAME = "model.layers.0.mlp.gate"
INFO = ModuleInfo(NAME, Role.ROUTER, 600, 16, WeightSource(f"{NAME}.weight"))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCALES = torch.logspace(-2, 2, 16)


def _checkpoint(path: Path, tensor: torch.Tensor, name: str = f"{NAME}.weight") -> Checkpoint:
    write_checkpoint(path, {"model.safetensors": {name: tensor}})
    return Checkpoint.open(path)


def _exact(values: torch.Tensor) -> ChannelScales:
    return ChannelScales(values.numpy(), np.zeros(len(values), np.float32))


def _neighbour(tensor: torch.Tensor, at: tuple[int, ...]) -> torch.Tensor:
    found = tensor.clone()
    found.view(torch.int16 if found.element_size() == 2 else torch.int32)[at] += 4
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("moves", [1, 2])
def test_a_weight_is_rounded_once_for_each_move(dtype: torch.dtype, moves: int, tmp_path: Path) -> None:
    weight = torch.randn(600, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    source = _checkpoint(tmp_path / "source", weight)
    factors, written = Factors.ones(INFO.shape), weight
    for _ in range(moves):
        factors = factors.read(_exact(SCALES), 16, 1)
        written = (written.float() * SCALES).to(dtype)
    expected = ExpectedWeight(SourceWeight(source, INFO), factors)
    assert moved_weight(_checkpoint(tmp_path / "written", written), INFO, expected) is None
    off = _checkpoint(tmp_path / "off", _neighbour(written, (550, 3)))
    text = moved_weight(off, INFO, expected)
    if dtype is torch.float32:  # whose neighbours are nearer than products in another order
        assert text is None
    else:
        assert text is not None
        assert text.startswith(f"row 550, column 3 of {NAME} is ")


def test_without_a_move_nothing_may_differ(tmp_path: Path) -> None:
    weight = torch.ones(600, 16)
    expected = ExpectedWeight(
        SourceWeight(_checkpoint(tmp_path / "a", weight), INFO), Factors.ones(INFO.shape)
    )
    assert moved_weight(_checkpoint(tmp_path / "b", weight), INFO, expected) is None
    assert moved_weight(_checkpoint(tmp_path / "c", _neighbour(weight, (0, 1))), INFO, expected) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_differs(value: float, tmp_path: Path) -> None:
    weight = torch.ones(600, 16)
    factors = replace(Factors.ones(INFO.shape), moves=1)
    expected = ExpectedWeight(SourceWeight(_checkpoint(tmp_path / "a", weight), INFO), factors)
    weight[599, 15] = value
    assert moved_weight(_checkpoint(tmp_path / "b", weight), INFO, expected) is not None


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_only_the_rows_of_a_bias_that_were_divided_may_differ(dtype: torch.dtype, tmp_path: Path) -> None:
    bias = torch.randn(16, generator=torch.Generator().manual_seed(1)).to(dtype)
    source = _checkpoint(tmp_path / "source", bias, "b.bias")
    rows = torch.arange(8, 16)
    scales = torch.linspace(2, 9, 8)
    factors = Factors.ones((16, 1)).put_out(_exact(scales), rows.numpy())
    written = bias.clone()
    written[rows] = (written[rows].float() / scales).to(dtype)
    assert moved_bias(_checkpoint(tmp_path / "ok", written, "b.bias"), source, "b.bias", factors) is None
    for at in (2, 12):
        off = _checkpoint(tmp_path / str(at), _neighbour(written, (at,)), "b.bias")
        text = moved_bias(off, source, "b.bias", factors)
        assert text is not None
        assert text.startswith(f"element {at} is ")
