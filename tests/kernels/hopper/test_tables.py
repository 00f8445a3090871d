"""The tables of configurations, for all formats of blocks that there are."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from halfbyte.kernels.hopper import w4a8_codes, w4a8_config, w4a8_fp8_scales_codes, w4a16, w4a16_config
from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.config import Table, fitted
from halfbyte.kernels.hopper.w4a8_fp8_scales_config import TABLE as FP8_SCALES

GROUPS = (32, 64, 128)
W4A8 = [w4a8_codes.block_format(*cut) for cut in product(GROUPS, (True, False), (True, False))]
W4A16 = [
    (w4a16.block_format(group, scale, zeros, dtype), dtype)
    for group, scale, zeros, dtype in product(
        GROUPS,
        (torch.bfloat16, torch.float16, torch.float32),
        (True, False),
        (torch.bfloat16, torch.float16),
    )
]
TABLES: dict[str, tuple[Table, list[BlockFormat]]] = {
    "w4a8 fp32": (w4a8_config.FP32, W4A8),
    "w4a8 fp16": (w4a8_config.FP16, W4A8),
    "w4a8 fp8 scales": (FP8_SCALES, [w4a8_fp8_scales_codes.FORMAT]),
    **{
        f"w4a16 {name}": (table, [fmt for fmt, dtype in W4A16 if w4a16_config.table_for(fmt, dtype) is table])
        for name, table in (("exact", w4a16_config.EXACT), ("rounded", w4a16_config.ROUNDED))
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_chosen_for_something(name: str) -> None:
    table, formats = TABLES[name]
    tokens, features, inputs = (sorted({row[axis] for row in table.rows}) for axis in range(3))
    chosen = {
        next(
            number
            for number, row in enumerate(table.rows)
            if all(size <= most for size, most in zip(shape, row, strict=False)) and fitted(row[3], fmt)
        )
        for fmt in formats
        for shape in product(tokens, features, inputs)
    }
    assert [row for number, row in enumerate(table.rows) if number not in chosen] == []
