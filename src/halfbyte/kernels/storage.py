"""A quantized weight kept at its stored size, read back some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from halfbyte.formats.packing import pack_int32, pack_nibbles, unpack_int32
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.kernels.nibbles import nibbles

# fp32 values worked on at a time: what two cores keep in their second-level caches.
_CHUNK = 1 << 18


def compact(q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """A weight ``[out, in]`` as ``codes`` (packed below 8 bits), ``scales``, ``zeros`` and ``outer``."""
    named = {"codes": _pack(q), "scales": q.scales, "zeros": q.zero_points, "outer": q.outer_scales}
    return {name: tensor.contiguous() for name, tensor in named.items() if tensor is not None}


def expand(tensors: Mapping[str, torch.Tensor], fmt: TensorFormat, in_features: int) -> QuantizedTensor:
    """The inverse of :func:`compact`."""
    return QuantizedTensor(
        fmt,
        unpack_codes(tensors["codes"], fmt, in_features),
        tensors["scales"],
        tensors.get("zeros"),
        tensors.get("outer"),
    )


def strips(
    tensors: Mapping[str, torch.Tensor], fmt: TensorFormat, in_features: int
) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
    """The weight in horizontal strips that fit the cache: rows, and the tensors of those rows."""
    codes = tensors["codes"]
    step = max(1, _CHUNK // max(in_features, 1))
    tall = fmt.block_shape[0] if fmt.block_shape else 1
    step = -(-step // tall) * tall
    for start in range(0, codes.shape[0], step):
        rows = slice(start, min(start + step, codes.shape[0]))
        yield (
            rows,
            {
                name: tensor[rows] if name == "codes" else _scales_of(tensor, rows, tall)
                for name, tensor in tensors.items()
            },
        )


def _scales_of(tensor: torch.Tensor, rows: slice, tall: int) -> torch.Tensor:
    """Scales that belong to ``rows``; one of the whole tensor belongs to all of them."""
    if tensor.shape[0] == 1:
        return tensor
    return tensor[rows.start // tall : -(-rows.stop // tall)]


def _pack(q: QuantizedTensor) -> torch.Tensor:
    if q.format.is_integer and q.format.bits < 8:
        return pack_int32(q.codes, q.format.bits)
    if q.format.element == "e2m1" and q.codes.shape[-1] % 2 == 0:
        return pack_nibbles(q.codes)
    return q.codes


def unpack_codes(codes: torch.Tensor, fmt: TensorFormat, in_features: int) -> torch.Tensor:
    """Codes as ``QuantizedTensor`` holds them, from their compact form."""
    if fmt.element == "int4":
        return nibbles(codes, in_features).view(torch.int8).sub_(8)
    if fmt.is_integer and fmt.bits < 8:
        return unpack_int32(codes, fmt.bits, in_features)
    if fmt.element == "e2m1" and codes.shape[-1] != in_features:
        return nibbles(codes, in_features)
    return codes
