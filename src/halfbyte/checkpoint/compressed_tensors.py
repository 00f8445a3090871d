"""Quantized weights as compressed-tensors stores them; docs/formats.md gives every byte.

Source: the compressors of https://github.com/vllm-project/compressed-tensors, version 0.17.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from halfbyte.checkpoint.config_groups import FLOAT_SCALES, storage_format
from halfbyte.checkpoint.packed_weight import (
    check_stored,
    pack_weight,
    packed_entries,
    stored_shape,
    unpack_weight,
)
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing import pack_int32, pack_nibbles, unpack_nibbles
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.schemes import Scheme

SCALE_DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32", "e8m0": "U8", "e4m3": "F8_E4M3"}
_SCALE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_PLAIN_DTYPES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}


def stored_entries(module: str, scheme: Scheme, shape: tuple[int, int], model_dtype: str) -> list[Entry]:
    """What is stored for the weight ``[out, in]`` of ``module``; ``model_dtype``: ``bf16``, ``f16`` or ``f32``.

    Errors: a scheme that compressed-tensors cannot say, or that does not divide ``shape``.
    """
    packed = "pack" in storage_format(scheme)
    return _entries(module, scheme.weights.with_scale(model_dtype), shape, packed)


def encode(module: str, scheme: Scheme, q: QuantizedTensor, model_dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of :func:`stored_entries`, from ``q`` of shape ``[out, in]``.

    Errors: ``q`` is not of ``scheme`` with scales in ``model_dtype``.
    """
    fmt = q.format
    if fmt != scheme.weights.with_scale(model_dtype):
        raise HalfbyteError(
            f"{module}: quantized as {fmt}, but its scheme {scheme.name} says {scheme.weights}"
        )
    rows, columns = q.shape
    scales = q.scales.reshape(1) if fmt.granularity == "tensor" else q.scales
    tensors = {f"{module}.weight_scale": scales}
    if "pack" not in storage_format(scheme):
        tensors[f"{module}.weight"] = q.codes
        if q.zero_points is not None:
            tensors[f"{module}.weight_zero_point"] = q.zero_points
    elif fmt.is_integer:
        tensors |= pack_weight(module, fmt, q.codes, q.zero_points)
    else:
        tensors[f"{module}.weight_packed"] = pack_nibbles(q.codes)
        if q.outer_scales is not None:
            tensors[f"{module}.weight_global_scale"] = q.outer_scales.reciprocal().reshape(1)
    return {
        entry.name: tensors[entry.name]
        for entry in stored_entries(module, scheme, (rows, columns), model_dtype)
    }


def decode(module: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """The weight of ``module`` from its stored tensors (full names).

    Whether integers are packed is told by the tensors: both forms of one scheme exist.
    Errors: missing tensors; a dtype or shape that the scheme does not call for; permuted groups.
    """
    scale_name = f"{module}.weight_scale"
    packed = f"{module}.weight_packed" in tensors
    fmt = _with_stored_scale(scheme.weights, tensors.get(scale_name))
    tensors = _with_plain_exponents(tensors, scale_name, fmt)
    shape = _weight_shape(module, fmt, tensors, packed)
    tensors = _with_packed_zeros(module, fmt, tensors, packed)
    check_stored(module, _entries(module, fmt, shape, packed), tensors)
    _refuse_leftovers(module, fmt, tensors)
    zero_points, outer = None, None
    if not packed:
        codes = tensors[f"{module}.weight"]
        zero_points = None if fmt.symmetric else tensors[f"{module}.weight_zero_point"]
    elif fmt.is_integer:
        codes, zero_points = unpack_weight(module, fmt, tensors)
    else:
        codes = unpack_nibbles(tensors[f"{module}.weight_packed"])
        if fmt.outer is not None:
            outer = tensors[f"{module}.weight_global_scale"].reciprocal().reshape(1, 1)
    scale_shape = fmt.scale_shape(shape)
    if zero_points is not None:
        zero_points = zero_points.reshape(scale_shape)
    return QuantizedTensor(fmt, codes, tensors[scale_name].reshape(scale_shape), zero_points, outer)


def _entries(module: str, fmt: TensorFormat, shape: tuple[int, int], packed: bool) -> list[Entry]:
    rows, columns = shape
    scale_shape = (1,) if fmt.granularity == "tensor" else fmt.scale_shape(shape)
    scale = Entry(f"{module}.weight_scale", SCALE_DTYPES[fmt.scale], scale_shape)
    if packed and fmt.is_integer:
        return [*packed_entries(module, fmt, shape), scale]
    if packed:
        if columns % 2:
            raise HalfbyteError(
                f"{module}: two FP4 codes share a byte, so in_features {columns} must be even"
            )
        codes = Entry(f"{module}.weight_packed", "U8", (rows, columns // 2))
        if fmt.outer is None:
            return [codes, scale]
        return [codes, scale, Entry(f"{module}.weight_global_scale", "F32", (1,))]
    plain = [Entry(f"{module}.weight", "I8" if fmt.is_integer else _PLAIN_DTYPES[fmt.element], shape), scale]
    return plain if fmt.symmetric else [*plain, Entry(f"{module}.weight_zero_point", "I8", scale_shape)]


def _with_stored_scale(fmt: TensorFormat, scales: torch.Tensor | None) -> TensorFormat:
    """Float scales are what the file holds; any other dtype is refused as not being fp32."""
    if fmt.scale not in ("model", *FLOAT_SCALES):
        return fmt
    return replace(fmt, scale="f32" if scales is None else _SCALE_NAMES.get(scales.dtype, "f32"))


def _weight_shape(
    module: str, fmt: TensorFormat, tensors: Mapping[str, torch.Tensor], packed: bool
) -> tuple[int, int]:
    if packed and fmt.is_integer:
        return stored_shape(module, tensors)
    name = f"{module}.weight_packed" if packed else f"{module}.weight"
    if name not in tensors or tensors[name].dim() != 2:
        found = list(tensors[name].shape) if name in tensors else ", ".join(sorted(tensors)) or "nothing"
        raise HalfbyteError(f"{module}: {name} of two dimensions expected, found {found}")
    rows, columns = tensors[name].shape
    return rows, columns * 2 if packed else columns


def _with_plain_exponents(
    tensors: Mapping[str, torch.Tensor], scale_name: str, fmt: TensorFormat
) -> Mapping[str, torch.Tensor]:
    """E8M0 scales are stored as uint8 or as torch's dtype of that name: the same bytes."""
    if fmt.scale == "e8m0" and scale_name in tensors and tensors[scale_name].dtype is torch.float8_e8m0fnu:
        return {**tensors, scale_name: tensors[scale_name].view(torch.uint8)}
    return tensors


def _with_packed_zeros(
    module: str, fmt: TensorFormat, tensors: Mapping[str, torch.Tensor], packed: bool
) -> Mapping[str, torch.Tensor]:
    """Early writers left the zero points of packed weights as int8."""
    name = f"{module}.weight_zero_point"
    if packed and not fmt.symmetric and name in tensors and tensors[name].dtype is torch.int8:
        return {**tensors, name: pack_int32(tensors[name], fmt.bits, dim=0)}
    return tensors


def _refuse_leftovers(module: str, fmt: TensorFormat, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors that would change the meaning of the weight, if they say anything."""
    zero_points = tensors.get(f"{module}.weight_zero_point")
    if fmt.symmetric and zero_points is not None and zero_points.count_nonzero():
        raise HalfbyteError(f"{module}.weight_zero_point: is not zero, but the weight's scheme is symmetric")
    groups = tensors.get(f"{module}.weight_g_idx")
    if groups is None or fmt.group_size is None or (groups < 0).all():
        return
    if not torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // fmt.group_size):
        raise HalfbyteError(
            f"{module}.weight_g_idx: permutes groups (actorder 'group'), which is not readable yet"
        )
