"""Layers to hold kernels to: a weight in each scheme, inputs, and the problem that they pose."""

from __future__ import annotations

from dataclasses import replace

import torch

from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.problem import LinearProblem
from halfbyte.schemes import PRESETS, Scheme


def settled(name: str, scale: str = "bf16") -> Scheme:
    """The preset ``name`` with its scale dtype settled."""
    scheme = PRESETS[name]
    return replace(scheme, weights=scheme.weights.with_scale(scale))


def random_weight(scheme: Scheme, rows: int, columns: int, seed: int = 0) -> QuantizedTensor:
    """A weight with an all-zero group, a huge channel and a tiny one."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    weight[0, : min(32, columns)] = 0
    weight[rows // 2] *= 1000
    weight[rows - 1] *= 1e-6
    return quantize(weight, scheme.weights)


def random_inputs(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x[:, 0] *= 50
    return x.to(dtype)


def problem_for(scheme: Scheme, q: QuantizedTensor, dtype: torch.dtype) -> LinearProblem:
    return LinearProblem(scheme, q.shape[0], q.shape[1], torch.device("cpu"), dtype)


def magnitude(x: torch.Tensor, exact_weight: torch.Tensor) -> torch.Tensor:
    """What rounding is measured against: the sum of the products' magnitudes, float64 ``[M, out]``."""
    return x.double().abs() @ exact_weight.abs().T
