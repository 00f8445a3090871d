"""Codes and zero points of one weight as the tensors that lie on disk, whatever the scales beside them are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halfbyte.checkpoint.dtypes import STORED_NAMES
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing import pack_int32, packed_words, unpack_int32
from halfbyte.formats.spec import TensorFormat

DENSE_BITS = (2, 4, 8)
"""Widths whose packed order every version of compressed-tensors agrees on (0.19 changed the others)."""


def packed_entries(module: str, fmt: TensorFormat, shape: tuple[int, int]) -> list[Entry]:
    """``weight_packed``, ``weight_zero_point`` (asymmetric only) and ``weight_shape`` of an integer weight.

    Errors: a width whose order on disk is ambiguous.
    """
    if fmt.bits not in DENSE_BITS:
        raise HalfbyteError(
            f"{module}: packed {fmt.bits}-bit weights differ between versions of compressed-tensors; "
            "accepted: 2, 4 and 8 bits"
        )
    rows, columns = shape
    groups = fmt.scale_shape(shape)[-1]
    entries = [Entry(f"{module}.weight_packed", "I32", (rows, packed_words(columns, fmt.bits)))]
    if not fmt.symmetric:
        entries.append(Entry(f"{module}.weight_zero_point", "I32", (packed_words(rows, fmt.bits), groups)))
    return [*entries, Entry(f"{module}.weight_shape", "I64", (2,))]


def pack_weight(
    module: str, fmt: TensorFormat, codes: torch.Tensor, zero_points: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The tensors of :func:`packed_entries` from int8 ``codes`` ``[out, in]`` and ``zero_points``."""
    tensors = {f"{module}.weight_packed": pack_int32(codes, fmt.bits)}
    if zero_points is not None:
        tensors[f"{module}.weight_zero_point"] = pack_int32(zero_points, fmt.bits, dim=0)
    tensors[f"{module}.weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64)
    return tensors


def unpack_weight(
    module: str, fmt: TensorFormat, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int8 codes ``[out, in]`` and zero points from checked tensors of :func:`packed_entries`."""
    rows, columns = stored_shape(module, tensors)
    codes = unpack_int32(tensors[f"{module}.weight_packed"], fmt.bits, columns)
    if fmt.symmetric:
        return codes, None
    return codes, unpack_int32(tensors[f"{module}.weight_zero_point"], fmt.bits, rows, dim=0)


def stored_shape(module: str, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """``(out, in)`` from ``weight_shape``. Errors: two positive integers are not what it holds."""
    name = f"{module}.weight_shape"
    if name not in tensors:
        raise HalfbyteError(f"{module}: {name} is missing beside weight_packed")
    values = tensors[name].tolist()
    if tensors[name].is_floating_point() or tensors[name].shape != (2,) or min(values) <= 0:
        raise HalfbyteError(f"{name} must hold out_features and in_features, found {values}")
    return values[0], values[1]


def check_stored(module: str, entries: Sequence[Entry], tensors: Mapping[str, torch.Tensor]) -> None:
    """Hold stored tensors of ``module`` against what its scheme calls for.

    Errors: missing tensors, with the names that are there instead; another dtype or shape. Shapes may differ in
    axes of length one, because tools disagree on those of scales.
    """
    if missing := [entry.name for entry in entries if entry.name not in tensors]:
        known = {entry.name for entry in entries}
        extra = [name for name in tensors if name.startswith(f"{module}.") and name not in known]
        found = f"; found instead: {', '.join(extra)}" if extra else ""
        raise HalfbyteError(f"{module}: missing {', '.join(missing)}{found}")
    for entry in entries:
        tensor = tensors[entry.name]
        squeezed = [size for size in tensor.shape if size != 1]
        if STORED_NAMES.get(tensor.dtype) != entry.dtype or squeezed != [
            size for size in entry.shape if size != 1
        ]:
            raise HalfbyteError(
                f"{entry.name}: is {STORED_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}, "
                f"its scheme calls for {entry.dtype} {list(entry.shape)}"
            )
