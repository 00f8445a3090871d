from __future__ import annotations

import torch

from halfbyte.algorithms.rtn import rtn
from halfbyte.formats.quantize import dequantize
from tests.formats.hostile import FORMATS


def test_every_weight_is_within_half_a_step() -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    q = rtn(weight, FORMATS["w4a8"])
    step = q.scales.float().repeat_interleave(128, -1)
    error = (dequantize(q) - weight).abs()
    # Half a step, and what rounding a scale to bf16 takes from the 7.5 steps that it should cover.
    assert (error <= step * (0.5 + 7.5 * 2**-8)).all()
