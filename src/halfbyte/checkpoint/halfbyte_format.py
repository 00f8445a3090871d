"""What compressed-tensors cannot say: QoQ's two-level weights, stored in halfbyte's own form.

The tensors are those of an asymmetric ``pack-quantized`` weight, but with integer group scales, and one more for
the channel scales. docs/formats.md gives every byte.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halfbyte.checkpoint.packed_weight import (
    check_stored,
    pack_weight,
    packed_entries,
    stored_shape,
    unpack_weight,
)
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.schemes import Scheme


def stored_entries(module: str, scheme: Scheme, shape: tuple[int, int], model_dtype: str) -> list[Entry]:
    """What is stored for the two-level weight ``[out, in]`` of ``module``; no tensor is in ``model_dtype``."""
    fmt = scheme.weights
    return [
        *packed_entries(module, fmt, shape),
        Entry(f"{module}.weight_scale", "I8", fmt.scale_shape(shape)),
        Entry(f"{module}.weight_channel_scale", "F32", (shape[0], 1)),
    ]


def encode(module: str, scheme: Scheme, q: QuantizedTensor, model_dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of :func:`stored_entries`. Errors: ``q`` is not of ``scheme``."""
    if q.format != scheme.weights or q.zero_points is None or q.outer_scales is None:
        raise HalfbyteError(f"{module}: quantized as {q.format}, but its scheme says {scheme.weights}")
    return {
        **pack_weight(module, q.format, q.codes, q.zero_points),
        f"{module}.weight_scale": q.scales,
        f"{module}.weight_channel_scale": q.outer_scales,
    }


def decode(module: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """The weight of ``module`` from its stored tensors. Errors: missing tensors, another dtype or shape."""
    shape = stored_shape(module, tensors)
    check_stored(module, stored_entries(module, scheme, shape, ""), tensors)
    codes, zero_points = unpack_weight(module, scheme.weights, tensors)
    scales, outer = tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_channel_scale"]
    return QuantizedTensor(
        scheme.weights,
        codes,
        scales.reshape(scheme.weights.scale_shape(shape)),
        zero_points,
        outer.reshape(shape[0], 1),
    )
