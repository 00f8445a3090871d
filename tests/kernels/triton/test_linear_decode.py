"""The PTX that decodes codes, run here by the manual's definitions, on every unit that there is."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch

from halfbyte.kernels.triton import linear_decode
from halfbyte.kernels.triton.linear_layout import encode_magnitude

BYTES = np.arange(256, dtype=np.uint8)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool = np.stack([*np.moveaxis(_bytes(a), -1, 0), *np.moveaxis(_bytes(b), -1, 0)], -1)
    picks = [int(selector.flat[0]) >> 4 * place & 7 for place in range(4)]
    return np.ascontiguousarray(pool[..., picks]).view(np.uint32)[..., 0]


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words)[..., None].view(np.uint8)


def _add_floats(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


# PTX ISA 9.0, section 9.7: on 32-bit registers all arithmetic is modulo 2^32. lop3's 0xea is (a & b) | c.
INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a,
    "shr.b32": lambda a, b: a >> b,
    "sub.u32": lambda a, b: a - b,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "lop3.b32": lambda a, b, c, table: (a & b) | c,
    "prmt.b32": _permute,
    "add.rn.f32": _add_floats,
}


def execute(assembly: str, *inputs: np.ndarray, outputs: int = 2) -> list[np.ndarray]:
    """The output registers, uint32 like the inputs, which come after them in ``$0, $1, ...``."""
    registers = {f"${outputs + number}": value for number, value in enumerate(inputs)}

    def value(operand: str) -> np.ndarray:
        if operand in registers:
            return registers[operand]
        number = int(operand.removeprefix("0f"), 16) if operand.startswith("0f") else int(operand, 0)
        return np.full_like(inputs[0], number)

    for line in assembly.strip("{}\n").splitlines():
        name, rest = line.rstrip(";").split(maxsplit=1)
        if name == ".reg":
            continue
        target, *operands = re.split(r",\s*", rest)
        assert name != "lop3.b32" or operands[-1] == "0xea"
        registers[target] = INSTRUCTIONS[name](*map(value, operands))
    return [registers[f"${number}"] for number in range(outputs)]


def words(units: np.ndarray) -> np.ndarray:
    """Units of one dtype, in 32-bit words, each next to others of which no bit is the same."""
    count = 4 // units.dtype.itemsize
    places = [units if place % 2 == 0 else ~units for place in range(count)]
    return np.ascontiguousarray(np.stack(places, -1)).view(np.uint32)[:, 0]


def as_floats(registers: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The first unit of every register."""
    return torch.from_numpy(registers.copy()).view(dtype).view(len(registers), -1)[:, 0].float()


def test_words_become_floats() -> None:
    units = np.arange(1 << 16, dtype=np.uint16)
    for assembly, dtype, base in (
        (linear_decode.WORDS_TO_BF16, torch.bfloat16, 128),
        (linear_decode.WORDS_TO_FP16, torch.float16, 1024),
    ):
        found = execute(assembly.value, words(units), outputs=4)
        for part, registers in enumerate(found):
            want = base + (torch.arange(1 << 16) >> 4 * part & 15)
            assert torch.equal(as_floats(registers, dtype), want.float())


def test_magnitudes_become_e4m3() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)
    nibbles = encode_magnitude(codes)
    low, high = torch.cartesian_prod(torch.arange(16), torch.arange(16)).T
    units = (nibbles[low] | nibbles[high] << 4).numpy()
    found = execute(linear_decode.MAGNITUDES_TO_E4M3.value, words(units))
    for registers, picked in zip(found, (low, high), strict=True):
        assert torch.equal(as_floats(registers, torch.float8_e4m3fn) * 512, codes[picked].float())


def test_offsets_minus_zeros_become_e4m3_and_int8() -> None:
    units, zeros = np.meshgrid(BYTES, BYTES[:16])
    units, zeros = units.ravel(), zeros.ravel()
    # The neighbours' zeros are others, so a borrow would show.
    zero_words = np.ascontiguousarray(np.stack([zeros, 15 - zeros] * 2, -1)).view(np.uint32)[:, 0]
    want = [torch.from_numpy(part.astype(np.float32) - zeros) for part in (units & 15, units >> 4)]
    for assembly, dtype, factor in (
        (linear_decode.OFFSETS_TO_E4M3, torch.float8_e4m3fn, 512),
        (linear_decode.OFFSETS_TO_INT8, torch.int8, 1),
    ):
        found = execute(assembly.value, words(units), zero_words)
        for registers, expected in zip(found, want, strict=True):
            assert torch.equal(as_floats(registers, dtype) * factor, expected)


def test_int8_becomes_floats() -> None:
    want = torch.arange(256, dtype=torch.uint8).view(torch.int8).float()
    (fp16, _) = execute(linear_decode.INT8_TO_FP16.value, words(BYTES))
    assert torch.equal(as_floats(fp16, torch.float16) - 1152, want)
    (bf16, _) = execute(linear_decode.INT8_TO_BF16.value, words(BYTES))
    assert torch.equal(as_floats(bf16, torch.bfloat16), want)


def test_every_place_of_a_register_is_decoded_alike() -> None:
    rng = np.random.default_rng(0)
    units, zeros = (rng.integers(0, top, (64, 4), dtype=np.uint8) for top in (256, 16))
    packed = [np.ascontiguousarray(each).view(np.uint32)[:, 0] for each in (units, zeros)]
    low, high = execute(linear_decode.OFFSETS_TO_INT8.value, *packed)
    assert np.array_equal(_bytes(low).view(np.int8), (units & 15).astype(np.int8) - zeros.astype(np.int8))
    assert np.array_equal(_bytes(high).view(np.int8), (units >> 4).astype(np.int8) - zeros.astype(np.int8))
    codes = units.view(np.int8)
    for assembly, dtype, base in (
        (linear_decode.INT8_TO_BF16, torch.bfloat16, 0),
        (linear_decode.INT8_TO_FP16, torch.float16, 1152),
    ):
        found = np.stack(execute(assembly.value, packed[0]), -1)
        numbers = torch.from_numpy(found).view(dtype).float() - base
        assert torch.equal(numbers, torch.from_numpy(codes.astype(np.float32)))
