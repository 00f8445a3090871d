"""INT4 weights as QServe's kernels read them from files (OmniServe, SGLang); docs/formats.md gives every byte.

Two levels: ``w = (code * s2_scales + s2_zeros) * s1_scales``, whose inner part the kernel computes in bytes, so modulo
256. Per channel: ``w = code * s1_scales - s1_szeros``. Codes are 0..15. Tensors name the offsets differently than
:class:`QuantizedTensor`: what is not exactly ``(code - zero_point) * scale`` is read in another exact form or refused.
Source: OmniServe at 02b2925, w4a8_linear.py and its two GEMM kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from halfbyte.checkpoint.packed_weight import check_stored
from halfbyte.checkpoint.qserve_config import GROUP_SIZE
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing_qserve import (
    pack_qserve,
    pack_qserve_groups,
    unpack_qserve,
    unpack_qserve_groups,
)
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import LARGEST_SCALE
from halfbyte.formats.spec import TensorFormat
from halfbyte.schemes import Scheme

logger = logging.getLogger(__name__)

TILE = 32
"""Rows and columns come in whole tiles of this size."""
_SIGNED = 8  # QuantizedTensor's codes and zero points are smaller than the files' by this
_LARGEST_CODE = 15
_LARGEST_TWO_LEVEL_SCALE = 16  # of halfbyte's kernels, and of every writer that keeps to [-119, 119]
_INT8 = TensorFormat("int8", "channel", scale="f16")


def stored_entries(module: str, scheme: Scheme, shape: tuple[int, int], model_dtype: str) -> list[Entry]:
    """What is stored for the weight ``[out, in]`` of ``module``; no tensor is in ``model_dtype``.

    Errors: ``out`` or ``in`` that is no multiple of 32; groups of another size than 128.
    """
    rows, columns = shape
    if rows % TILE or columns % TILE:
        raise HalfbyteError(
            f"{module}: QServe packs tiles of {TILE} x {TILE}, and a weight of {rows} x {columns} has no whole ones"
        )
    entries = [
        Entry(f"{module}.qweight", "I8", (rows, columns // 2)),
        Entry(f"{module}.s1_scales", "F16", (rows,)),
    ]
    if scheme.weights.outer is None:
        return [*entries, Entry(f"{module}.s1_szeros", "F16", (rows,))]
    if scheme.weights.group_size != GROUP_SIZE or columns % GROUP_SIZE:
        raise HalfbyteError(
            f"{module}: groups of {scheme.weights.group_size} in {columns} inputs; QServe's are of {GROUP_SIZE}; "
            "accepted: inputs that they divide, or group_size -1"
        )
    groups = (columns // GROUP_SIZE, rows)
    return [
        *entries,
        Entry(f"{module}.s2_scales", "I8", groups),
        Entry(f"{module}.s2_zeros", "I8", groups),
    ]


def encode(module: str, scheme: Scheme, q: QuantizedTensor, model_dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of :func:`stored_entries`.

    Errors: ``q`` is not of ``scheme``; scales that fp16 does not hold, or whose products with zero points it does not.
    """
    if q.format != scheme.weights or q.format.element != "int4" or q.zero_points is None:
        raise HalfbyteError(f"{module}: is held as {q.format}, which QServe's form cannot store")
    stored_entries(module, scheme, (q.shape[0], q.shape[1]), model_dtype)
    tensors = {f"{module}.qweight": pack_qserve(q.codes + _SIGNED)}
    zeros = q.zero_points.to(torch.int32) + _SIGNED
    if q.outer_scales is None:
        scales = q.scales.reshape(-1)
        # Where scales were chosen they saturate; then weights were cut off.
        _refuse(
            f"{module}.s1_scales", scales >= LARGEST_SCALE["f16"], scales, "is the largest fp16, or beyond it"
        )
        products = (zeros.reshape(-1) * scales.float()).half()
        why = "is a scale whose product with its zero point fp16 does not hold"
        _refuse(f"{module}.s1_szeros", ~products.isfinite(), scales, why)
        return {**tensors, f"{module}.s1_scales": scales, f"{module}.s1_szeros": products}
    outer = q.outer_scales.reshape(-1)
    stored = outer.half()
    # Equal, not close: codes were chosen for the scale that is stored.
    _refuse(f"{module}.s1_scales", stored.float() != outer, outer, "is no fp16 number")
    return {
        **tensors,
        f"{module}.s1_scales": stored,
        f"{module}.s2_scales": pack_qserve_groups(q.scales),
        # Down to -240: to int8 modulo 256, as the kernel adds it.
        f"{module}.s2_zeros": pack_qserve_groups((-zeros * q.scales).to(torch.int8)),
    }


def decode(module: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """The weight of ``module`` from its stored tensors (full names).

    Two levels whose zeros are no multiples (0 to 15) of their scales come as INT8 per channel, which says the same
    numbers exactly with a byte a weight.
    Errors, each with the tensor: missing ones, another dtype or shape; scales that are negative or not finite; values
    of level one outside of INT8; ``s1_szeros`` that are not zero point times scale, rounded to fp16.
    """
    name = f"{module}.qweight"
    found = tensors.get(name)
    if found is not None and found.dim() != 2:
        raise HalfbyteError(f"{name}: is {list(found.shape)}; accepted: two dimensions")
    shape = (0, 0) if found is None else (found.shape[0], found.shape[1] * 2)
    check_stored(module, stored_entries(module, scheme, shape, ""), tensors)
    scales = tensors[f"{module}.s1_scales"].reshape(-1)
    _refuse(
        f"{module}.s1_scales",
        ~(scales.isfinite() & (scales >= 0)),
        scales,
        "is no scale; accepted: finite, not negative",
    )
    codes = unpack_qserve(tensors[name])
    if scheme.weights.outer is None:
        zeros = _zero_points(module, scales, tensors[f"{module}.s1_szeros"].reshape(-1))
        fmt = replace(scheme.weights, scale="f16")
        return QuantizedTensor(fmt, _signed(codes), scales.reshape(-1, 1), _signed(zeros).reshape(-1, 1))
    return _two_levels(module, scheme.weights, codes, scales, tensors)


def _zero_points(module: str, scales: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Zero points 0..15 (uint8) ``[out]`` of which ``products`` are the products with ``scales``, rounded to fp16."""
    zeros = (products.float() / scales.float()).round()
    zeros = torch.where(scales == 0, 0.0, zeros).nan_to_num(nan=-1.0)
    again = (zeros * scales.float()).half()
    wrong = (zeros < 0) | (zeros > _LARGEST_CODE) | (again != products)
    _refuse(
        f"{module}.s1_szeros",
        wrong,
        products,
        "is no whole zero point times s1_scales; accepted: one of 0 to 15, rounded to fp16",
    )
    return zeros.to(torch.uint8)


def _two_levels(
    module: str,
    fmt: TensorFormat,
    codes: torch.Tensor,
    channels: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
) -> QuantizedTensor:
    """codes: uint8 ``[out, in]``. channels: fp16 ``[out]``."""
    scales, offsets = (
        unpack_qserve_groups(tensors[f"{module}.{leaf}"].contiguous()).to(torch.int32)
        for leaf in ("s2_scales", "s2_zeros")
    )
    _refuse(f"{module}.s2_scales", scales < 0, scales, "is negative; accepted: 0 to 127")
    groups = codes.unflatten(-1, (-1, GROUP_SIZE))
    low, high = (bound.to(torch.int32) * scales for bound in (groups.amin(-1), groups.amax(-1)))
    # A zero below -128 is stored as itself plus 256: the one of both with which the group stays in INT8.
    wrapped = (high + offsets > 127) & (low + offsets - 256 >= -128)
    offsets = torch.where(wrapped, offsets - 256, offsets)
    low, high = low + offsets, high + offsets
    outside = (low < -128) | (high > 127)
    _refuse(
        f"{module}.s2_zeros",
        outside,
        torch.where(low < -128, low, high),
        "is a value of level one; accepted: those of INT8",
    )
    zeros = torch.div(-offsets, scales.clamp(min=1), rounding_mode="floor")
    plain = (scales >= 1) & (scales <= _LARGEST_TWO_LEVEL_SCALE) & (zeros * scales == -offsets)
    if bool((plain & (zeros >= 0) & (zeros <= _LARGEST_CODE)).all()):
        fmt = replace(fmt, outer_dtype="f16")
        return QuantizedTensor(
            fmt, _signed(codes), scales.to(torch.int8), _signed(zeros), channels.float().reshape(-1, 1)
        )
    logger.info(
        "%s: its zeros are no multiples of its scales, so it is held as INT8: a byte a weight", module
    )
    values = groups.to(torch.int16) * scales.to(torch.int16).unsqueeze(-1)
    values += offsets.to(torch.int16).unsqueeze(-1)
    return QuantizedTensor(_INT8, values.to(torch.int8).flatten(-2), channels.reshape(-1, 1))


def _signed(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.int8) - _SIGNED


def _refuse(name: str, wrong: torch.Tensor, values: torch.Tensor, why: str) -> None:
    """Raises if any element is ``wrong``, with the tensor, the place ``[out]`` or ``[out, group]`` and the value."""
    if not wrong.any():
        return
    place = [int(index) for index in wrong.nonzero()[0]]
    where = f"row {place[0]}" + (f", group {place[1]}" if len(place) > 1 else "")
    raise HalfbyteError(f"{name}: {where}: {values[tuple(place)].item():g} {why}")
