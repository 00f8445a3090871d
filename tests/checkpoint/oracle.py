"""The compressed-tensors library, asked what it makes of stored tensors and what it would store itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors")

import compressed_tensors
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

VERSION = str(compressed_tensors.__version__)


def validate(config: Mapping[str, Any]) -> QuantizationConfig:
    """The library's reading of a ``quantization_config``; it raises on any field that it does not know."""
    return QuantizationConfig.model_validate(dict(config))


def only_group(config: Mapping[str, Any]) -> QuantizationScheme:
    (group,) = validate(config).config_groups.values()
    return group


def decompress(module: str, stored: Mapping[str, torch.Tensor], group: QuantizationScheme) -> torch.Tensor:
    """The weight that the library sees in the stored tensors of ``module``."""
    compressor = BaseCompressor.get_value_from_registry(group.format)
    return compressor.decompress(local(module, stored), group)["weight"]


def compress(
    module: str, weight: torch.Tensor, group: QuantizationScheme, **parameters: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What the library stores for ``weight`` with the given scales."""
    compressor = BaseCompressor.get_value_from_registry(group.format)
    stored = compressor.compress({"weight": weight, **parameters}, group)
    return {f"{module}.{name}": tensor.data for name, tensor in stored.items()}


def local(module: str, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{module}."): tensor.clone() for name, tensor in stored.items()}
