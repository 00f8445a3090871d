"""What the bit patterns of stored numbers mean, from the format definitions, with numpy alone.

Written apart from ``formats/`` on purpose: an audit that shared its code would share its mistakes.
Sources: OCP 8-bit floating point specification rev. 1.0 (E4M3, E5M2); OCP microscaling formats specification
v1.0 (E2M1, E8M0).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

NAN_BYTES_E4M3 = (0x7F, 0xFF)
E8M0_NAN = 0xFF
_E8M0_BIAS = 127


def _minifloat(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Value of every code of a sign-exponent-mantissa format without special codes, float64."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    bias = (1 << (exponent_bits - 1)) - 1
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    normal = exponent > 0
    significand = mantissa / (1 << mantissa_bits) + normal
    magnitude = significand * 2.0 ** (np.where(normal, exponent, 1) - bias)
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    return sign * magnitude


@lru_cache(maxsize=8)
def float_table(element: str) -> np.ndarray:
    """float32 value of each code of ``e4m3`` (256), ``e5m2`` (256), ``e8m0`` (256) or ``e2m1`` (16 entries)."""
    if element == "e8m0":
        values = 2.0 ** (np.arange(256) - _E8M0_BIAS)
        values[E8M0_NAN] = np.nan
    elif element == "e2m1":
        values = _minifloat(2, 1)
    elif element == "e4m3":
        values = _minifloat(4, 3)
        values[list(NAN_BYTES_E4M3)] = np.nan
    elif element == "e5m2":
        values = _minifloat(5, 2)
        for sign, first in ((1.0, 0x7C), (-1.0, 0xFC)):
            values[first] = sign * np.inf
            values[first + 1 : first + 4] = np.nan
    else:
        raise ValueError(f"no table for {element!r}")
    return values.astype(np.float32)


def bf16_to_float(words: np.ndarray) -> np.ndarray:
    """float32 values of bf16 bit patterns (uint16)."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


STORED_ELEMENTS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "F8_E8M0": "e8m0"}
"""safetensors dtype -> element of :func:`float_table`."""

_PLAIN = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "|u1",
}  # fmt: skip


def as_array(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Values of the bytes ``raw`` (flat uint8) of a stored dtype: integers as they are, floats as float32.

    float64 keeps its width. Codes of 8-bit floats become the values that they stand for.
    Errors: a dtype whose values do not fill whole bytes.
    """
    if dtype == "BF16":
        return bf16_to_float(raw.view("<u2"))
    if dtype in STORED_ELEMENTS:
        return float_table(STORED_ELEMENTS[dtype])[raw]
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype in _PLAIN:
        return raw.view(_PLAIN[dtype])
    raise ValueError(f"values of dtype {dtype} are not read")


def unpack_words(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Codes 0..2**bits-1 (uint8 ``[rows, size]``) of int32 ``words`` ``[rows, n]``, first code in the lowest bits.

    Each word holds ``32 // bits`` codes; bits above them and codes beyond ``size`` are padding.
    """
    rows = words.shape[0]
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8).reshape(rows, -1)[:, :size]
    if bits == 4:
        packed = np.ascontiguousarray(words).view(np.uint8).reshape(rows, -1)
        return unpack_nibbles(packed)[:, :size]
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    fields = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(rows, -1)[:, :size]


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes 0..15 (uint8 ``[rows, 2n]``) of bytes ``[rows, n]``: the even column is the low nibble."""
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, 0::2])
    np.right_shift(packed, 4, out=codes[:, 1::2])
    return codes


def padding_is_zero(words: np.ndarray, bits: int, size: int) -> bool:
    """Whether every padding bit of packed ``words`` ``[rows, n]`` of ``size`` codes a row is zero."""
    per_word = 32 // bits
    unsigned = words.view(np.uint32)
    if spare := 32 - per_word * bits:
        mask = np.uint32(((1 << spare) - 1) << (per_word * bits))
        if (unsigned & mask).any():
            return False
    used = size - (unsigned.shape[1] - 1) * per_word
    if used >= per_word:
        return True
    return not (unsigned[:, -1] >> np.uint32(used * bits)).any()
