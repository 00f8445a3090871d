"""Rows of inputs that broke quantizers, and what must become of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.spec import ActivationFormat

FP8 = ActivationFormat("e4m3", "token")
INT8 = ActivationFormat("int8", "token")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def normal_rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hostile_rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal, all zeros, -0, one 448, one NaN, one -Inf, tiny, subnormal, largest, halves of codes, and again."""
    x = normal_rows(rows, columns, torch.float32, seed)
    spot = columns // 3
    limits = torch.finfo(dtype)
    for row in range(rows):
        line = x[row]
        kind = row % 10
        if kind == 1:
            line.zero_()
        elif kind == 2:
            line.fill_(-0.0)
        elif kind == 3:
            line.mul_(0.01)[spot] = 448
        elif kind == 4:
            line[spot] = torch.nan
        elif kind == 5:
            line[spot] = -torch.inf
        elif kind == 6:
            line.mul_(1e-30)
        elif kind == 7:
            line.mul_(limits.smallest_normal / 4)
        elif kind == 8:
            line.mul_(0.1 * limits.max).clamp_(limits.min, limits.max)[spot] = limits.max
        elif kind == 9:
            # With the scale 1, nine sixteenths lie halfway between two codes.
            line.copy_((line * 16).round() / 16)[spot] = 448
    return x.to(dtype)


def assert_fp8(x: torch.Tensor, results: tuple[torch.Tensor, ...], group_size: int) -> None:
    """The results of an FP8 op are the codes and scales of ``x`` by definition, and sums of those codes."""
    codes, scales, sums = results
    assert_codes(x, codes, scales, FP8)
    assert_sums(codes, sums, group_size)


def assert_int8(x: torch.Tensor, results: tuple[torch.Tensor, ...]) -> None:
    """The results of an INT8 op are the codes and scales of ``x`` by definition, and each row's sum of codes."""
    codes, scales, sums = results
    assert_codes(x, codes, scales, INT8)
    assert_row_sums(codes, sums)


def assert_row_sums(codes: torch.Tensor, sums: torch.Tensor) -> None:
    """``sums`` are those of each token's INT8 codes, exact."""
    assert_same(sums, codes.sum(-1, keepdim=True, dtype=torch.int32))


def assert_sums(codes: torch.Tensor, sums: torch.Tensor, group_size: int) -> None:
    """``sums`` are those of the groups of each token's codes, in fp32, each token's where 16 bytes begin."""
    rows, columns = codes.shape
    values = F.pad(codes.double(), (0, -columns % group_size)).unflatten(-1, (-1, group_size))
    assert sums.shape == (rows, -(-columns // group_size))
    assert sums.dtype == torch.float32
    assert sums.stride(0) % 4 == 0
    wrong = (sums - values.sum(-1)).abs() > values.abs().sum(-1) * 2.0**-20
    assert not wrong.any()
    assert torch.equal(sums.isnan(), values.isnan().any(-1))


def assert_codes(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fmt: ActivationFormat) -> None:
    """Bit for bit, where they are no NaN."""
    want_codes, want_scales = quantize_activations(x, fmt)
    assert_same(scales, want_scales)
    assert_same(codes, want_codes)


def assert_same(found: torch.Tensor, want: torch.Tensor) -> None:
    """One dtype, shape and bits, but for the bits of NaN."""
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    missing = want.float().isnan()
    assert torch.equal(found.float().isnan(), missing)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    wrong = (found.view(bits) != want.view(bits)) & ~missing
    assert not wrong.any(), f"{int(wrong.sum())} of {want.numel()} values differ"
