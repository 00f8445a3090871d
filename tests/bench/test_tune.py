"""Which configurations are timed: nothing here runs them."""

from __future__ import annotations

import pytest
import torch

from halfbyte.bench.kernels.request import ROWS, SHAPES
from halfbyte.bench.kernels.tune import Subject, candidates, subjects
from halfbyte.kernels.hopper import w4a8_codes, w4a8_fp8_scales_codes, w4a8_int8_codes, w4a16

FORMATS = {
    "w4a8_linear": w4a8_codes.block_format(128, True, False),
    "w4a16_linear": w4a16.block_format(128, torch.bfloat16, False, torch.bfloat16),
    "w4a8_fp8_scales_linear": w4a8_fp8_scales_codes.FORMAT,
    "w4a8_int8_linear": w4a8_int8_codes.block_format(128),
}
OTHER_SHAPES = ((1024, 4096), (2048, 8192), (6144, 4096), (10240, 8192), (14336, 4096), (36864, 4096))


def test_all_have_a_format() -> None:
    assert set(subjects()) == set(FORMATS)


@pytest.mark.parametrize(("op", "subject"), subjects().items(), ids=list(subjects()))
def test_what_a_table_chooses_can_be_measured_again(op: str, subject: Subject) -> None:
    fmt = FORMATS[op]
    for n, k in (*SHAPES, *OTHER_SHAPES):
        for tokens in (*ROWS, 32):
            found = candidates(subject, tokens, n, k, fmt)
            assert subject.table.choose(tokens, n, k, fmt) in found, (tokens, n, k)
            assert all(config.tokens < 2 * tokens or config.tokens <= 8 for config in found)
