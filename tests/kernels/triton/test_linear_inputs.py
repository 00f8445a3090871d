"""Inputs with one scale for all of them, held to halfbyte.formats.activations, and what the quantizers do not take."""

from __future__ import annotations

import pytest
import torch
import triton

from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import ActivationFormat
from halfbyte.kernels.triton.linear_inputs import (
    quantize_by_scale,
    quantize_fp8_per_group,
    quantize_per_tensor,
)
from tests.kernels.triton.rows import DTYPES, assert_codes, assert_same, hostile_rows, normal_rows
from tests.kernels.triton.runners import Runner

FORMATS = {
    torch.float8_e4m3fn: ActivationFormat("e4m3", "tensor"),
    torch.int8: ActivationFormat("int8", "tensor"),
}


def cases(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Rows of every kind; only such as do not count; nothing but zeros; the largest number late in a long row, and late
    in the last of rows that lie apart.
    """
    bad = hostile_rows(20, 640, torch.bfloat16)[[4, 5, 14, 15]]
    late = normal_rows(3, 20000, torch.bfloat16)
    late[1, 19999] = -3e4
    apart = normal_rows(4, 1200, torch.bfloat16)[:, 600:]
    apart[3, 599] = 77
    hostile = [hostile_rows(*shape, dtype, seed) for seed, dtype in enumerate(DTYPES) for shape in shapes]
    # The ninth row has its dtype's largest number, which makes all others small.
    quiet = [x[:8] for x in hostile if x.shape[0] > 8]
    return [*hostile, *quiet, bad, torch.zeros(2, 64), torch.full((3, 1), -2.5), late, apart]


def test_one_scale_for_all_follows_the_definition(run: Runner, shapes: list[tuple[int, int]]) -> None:
    asked = [(x, dtype) for x in cases(shapes) for dtype in FORMATS]
    for (x, dtype), (codes, scale) in zip(
        asked, run([("quantize_per_tensor", call) for call in asked]), strict=True
    ):
        assert_codes(x, codes, scale, FORMATS[dtype])


def test_a_scale_that_is_given_is_used_as_it_is(run: Runner, shapes: list[tuple[int, int]]) -> None:
    found = cases(shapes)
    calls = [("quantize_per_tensor", (x, dtype)) for x in found for dtype in FORMATS]
    results = run(calls)
    again = run(
        [
            ("quantize_by_scale", (x, scale, dtype))
            for (_, (x, dtype)), (_, scale) in zip(calls, results, strict=True)
        ]
    )
    for (codes, _), (same,) in zip(results, again, strict=True):
        assert_same(same, codes)


@pytest.mark.parametrize("columns", [1, 127, 200])
def test_groups_must_be_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    message = rf"^quantize_fp8_per_group takes rows of a multiple of 128 values, not of {columns}$"
    with pytest.raises(HalfbyteError, match=message):
        quantize_fp8_per_group(torch.ones(2, columns))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint8])
def test_codes_of_other_dtypes_are_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    x, name = torch.ones(2, 4), str(dtype).removeprefix("torch.")
    for op, call in (
        ("quantize_per_tensor", lambda: quantize_per_tensor(x, dtype)),
        ("quantize_by_scale", lambda: quantize_by_scale(x, torch.ones(1), dtype)),
    ):
        with pytest.raises(
            HalfbyteError, match=rf"^{op} makes codes in float8_e4m3fn or int8, not in {name}$"
        ):
            call()
