"""FP8 weights as the matrix instruction reads them from shared memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats.quantize import quantize
from halfbyte.kernels.hopper.blocks import INPUTS, ROWS
from halfbyte.kernels.hopper.w8a8_codes import FORMAT, pack_codes, unpack_codes
from halfbyte.kernels.hopper_fp8 import HopperFp8
from halfbyte.kernels.problem import LinearProblem
from halfbyte.schemes import PRESETS

KERNEL = HopperFp8()
FP8 = replace(PRESETS["fp8"], weights=PRESETS["fp8"].weights.with_scale("bf16"))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_codes_come_back(rows64: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows64 * ROWS, blocks * INPUTS), dtype=torch.uint8, generator=generator)
    packed = pack_codes(codes)
    assert packed.shape == (rows64, blocks, FORMAT.nbytes)
    assert torch.equal(unpack_codes(packed), codes)


def test_where_a_code_lies() -> None:
    """As PTX ISA draws the 128-byte swizzle: bits 4 to 6 of the address, times bits 7 to 9."""
    codes = torch.arange(ROWS * INPUTS).view(ROWS, INPUTS)
    place = pack_codes((codes % 251).to(torch.uint8)).flatten()
    for row, column in ((0, 0), (1, 0), (1, 16), (7, 127), (8, 5), (63, 64)):
        address = row * 128 + column
        address ^= (address >> 7 & 7) << 4
        assert place[address] == codes[row, column] % 251


def test_a_weight_comes_back_bit_for_bit() -> None:
    for n, k in ((16, 64), (80, 320), (128, 256)):
        scheme = PRESETS["fp8"]
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
        for scale in ("f32", "bf16"):
            q = quantize(weight, scheme.weights.with_scale(scale))
            problem = LinearProblem(scheme, n, k, torch.device("cpu"), torch.bfloat16)
            of = replace(problem, scheme=replace(scheme, weights=q.format))
            restored = KERNEL.restore(KERNEL.prepare(q, of))
            assert torch.equal(restored.codes.view(torch.uint8), q.codes.view(torch.uint8))
            assert torch.equal(restored.scales, q.scales)


def test_what_it_takes() -> None:
    gpu = torch.device("cuda", 0)
    able = LinearProblem(FP8, 128, 128, gpu, torch.bfloat16)
    assert (
        "multiple of 16 x 64, not 128 x 96"
        in KERNEL.can_implement(LinearProblem(able.scheme, 128, 96, gpu, able.dtype))[1]
    )
    for other in ("w4a8", "fp8_per_tensor", "w8a8-int8"):
        problem = LinearProblem(PRESETS[other], 128, 128, gpu, torch.bfloat16)
        assert KERNEL.can_implement(problem)[1].startswith("weights must be E4M3 with a scale per channel")
