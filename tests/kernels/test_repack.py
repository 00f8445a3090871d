"""From a file's words to a kernel's own form and back: not a bit may change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.formats.int4_words import WORD_ORDERS
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.hopper_int4 import HopperW4A8, HopperW4A16
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.kernels.triton_linear import TritonW4A8, TritonW4A16
from halfbyte.schemes import PRESETS
from tests.kernels.cases import random_weight
from tests.kernels.triton.linear_cases import int4

ROWS = 208  # like 576 inputs, they fill no whole blocks of 64 x 128
KERNELS: dict[str, tuple[Kernel, str]] = {
    kernel.name: (kernel, scheme)
    for kernel, scheme in (
        (HopperW4A8(), "w4a8"),
        (HopperW4A8Fp8Scales(), "w4a8"),
        (HopperW4A16(), "w4a16"),
        (TritonW4A8(), "w4a8"),
        (TritonW4A16(), "w4a16"),
    )
}


# Groups (none: per channel) and symmetry, with the number of inputs.
CUTS = ((64, True, 576), (32, False, 576), (None, True, 576), (128, True, 640))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("order", WORD_ORDERS)
@pytest.mark.parametrize("name", KERNELS)
def test_words_of_a_file_come_back(name: str, order: str, device: str) -> None:
    kernel, preset = KERNELS[name]
    pack, unpack = WORD_ORDERS[order]
    for group, symmetric, columns in CUTS[3:] if kernel.name == "hopper-w4a8-fp8-scales" else CUTS:
        scheme = replace(PRESETS[preset], weights=int4(group, symmetric))
        q = random_weight(scheme, ROWS, columns)
        generator = torch.Generator().manual_seed(1)
        codes = torch.randint(-8, 8, q.codes.shape, generator=generator).to(torch.int8)
        words = pack(codes).to(device)
        problem = LinearProblem(scheme, *codes.shape, torch.device(device), torch.bfloat16)
        weight = QuantizedTensor(
            q.format,
            unpack(words, columns),
            q.scales.to(device),
            None if q.zero_points is None else q.zero_points.to(device),
        )
        found = kernel.restore(kernel.prepare(weight, problem))
        assert torch.equal(pack(found.codes), words), (group, symmetric)
        assert torch.equal(found.scales, weight.scales), (group, symmetric)
        assert (found.zero_points is None) == (weight.zero_points is None)
        if found.zero_points is not None:
            assert torch.equal(found.zero_points, weight.zero_points)
