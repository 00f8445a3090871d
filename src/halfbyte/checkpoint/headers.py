"""Headers of safetensors files: what lies where, checked before a byte of data is read. No torch here."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError

DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of one value of every dtype that safetensors files name."""

# The reference implementation refuses longer headers; so a corrupt length never makes us allocate.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: ``dtype`` in safetensors spelling, ``offset`` in bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors of a safetensors file in the order of their bytes, and its metadata.

    Errors: all that the format forbids (https://github.com/huggingface/safetensors#format), named: a file
    shorter or longer than its header says, overlapping or missing byte ranges, a byte range that does not
    fit dtype and shape, keys that occur twice, unknown dtypes, a header that is no JSON object.
    """
    raw, data_start, file_size = _read_raw(path)
    header = parse_json(raw, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HalfbyteError(f"{path}: __metadata__ of the header must map names to strings")
    tensors = [_tensor_info(path, name, entry, data_start) for name, entry in header.items()]
    # Empty tensors share their offset with a neighbour, so they sort before it.
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_coverage(path, tensors, data_start, file_size)
    return {info.name: info for info in tensors}, metadata


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in ``raw``, which was read from ``path``.

    Errors: text that is no JSON object, or any object in it that names a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise HalfbyteError(f"{path}: {twice!r} occurs twice in one JSON object")
        return found

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        if b"\\u" in raw:  # an escape may spell half a character, which no file or terminal can hold
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise HalfbyteError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise HalfbyteError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor, or none when its values do not fill whole bytes."""
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    return bits // 8 if bits % 8 == 0 else None


def _read_raw(path: Path) -> tuple[bytes, int, int]:
    """The header's JSON, where the data starts, and the size of the file, all in bytes."""
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or length < 2:
                raise HalfbyteError(f"{path}: not a safetensors file ({file_size} bytes, header of {length})")
            if length > MAX_HEADER_BYTES:
                raise HalfbyteError(
                    f"{path}: header length {length} is beyond the {MAX_HEADER_BYTES} bytes that safetensors "
                    "allows; the file is damaged or no safetensors file"
                )
            if 8 + length > file_size:
                raise HalfbyteError(
                    f"{path}: truncated, its header ends at byte {8 + length} but the file has {file_size}"
                )
            raw = file.read(length)
    except OSError as error:
        raise HalfbyteError(f"{path}: cannot be read ({error.strerror})") from None
    return raw, 8 + length, file_size


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise HalfbyteError(f"{path}: tensor {name!r} needs dtype, shape and two data_offsets") from None
    if (
        not isinstance(shape, list)
        or {*map(type, shape), type(begin), type(end)} != {int}
        or min([*shape, begin, end]) < 0
    ):
        raise HalfbyteError(
            f"{path}: shape and data_offsets of tensor {name!r} must be non-negative integers"
        )
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HalfbyteError(
            f"{path}: dtype {dtype!r} of tensor {name!r} is not known; known: {', '.join(DTYPE_BITS)}"
        )
    if end - begin != tensor_nbytes(dtype, tuple(shape)):
        raise HalfbyteError(
            f"{path}: tensor {name!r} of dtype {dtype} and shape {shape} does not fit its byte range "
            f"[{begin}, {end})"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _check_coverage(path: Path, tensors: list[TensorInfo], data_start: int, file_size: int) -> None:
    position = data_start
    for info in tensors:
        if info.offset != position:
            what = "overlaps the tensor before it" if info.offset < position else "leaves a hole before it"
            raise HalfbyteError(
                f"{path}: tensor {info.name!r} {what} (starts at byte {info.offset}, expected {position})"
            )
        position += info.nbytes
    if position != file_size:
        what = "truncated" if position > file_size else "longer than its header says"
        raise HalfbyteError(
            f"{path}: {what}, the tensors end at byte {position} but the file has {file_size}"
        )
