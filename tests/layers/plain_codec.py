"""The plainest codec: codes and scales stored as they are, under names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.layers.linear import QuantLinear
from halfbyte.schemes import Scheme


@dataclass(frozen=True)
class PlainCodec:
    format: TensorFormat

    def decode(self, stored: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        return QuantizedTensor(
            self.format,
            stored["weight"],
            stored["weight_scale"],
            stored.get("weight_zero_point"),
            stored.get("weight_outer_scale"),
        )

    def encode(self, q: QuantizedTensor) -> Mapping[str, torch.Tensor]:
        return {**_named(q), "weight_shape": torch.zeros(2, dtype=torch.int64)}

    def input_scale(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        scale = stored.get("input_scale")
        return None if scale is None else scale.float()


def _named(q: QuantizedTensor) -> dict[str, torch.Tensor]:
    parts = {
        "weight": q.codes,
        "weight_scale": q.scales,
        "weight_zero_point": q.zero_points,
        "weight_outer_scale": q.outer_scales,
    }
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def quant_linear(
    scheme: Scheme,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **extra: torch.Tensor,
) -> tuple[QuantLinear, QuantizedTensor]:
    """A layer on ``weight`` that was created, loaded and repacked for inputs of ``dtype``, and its weight."""
    q = quantize(weight, scheme.weights)
    layer = QuantLinear(
        scheme,
        weight.shape[1],
        weight.shape[0],
        stored={
            **{name: tensor.clone() for name, tensor in _named(q).items()},
            "weight_shape": torch.tensor(weight.shape),
            **extra,
        },
        codec=PlainCodec(scheme.weights),
        bias=None if bias is None else torch.nn.Parameter(bias),
        name="model.proj",
    )
    layer.repack(dtype)
    return layer, q
