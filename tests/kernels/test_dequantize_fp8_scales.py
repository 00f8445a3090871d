from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.vllm_scales import settle, vllm_dequantize
from halfbyte.kernels.dequantize_fp8_scales import DequantizeFp8Scales
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.quantized_inputs import FP8_TOKEN
from halfbyte.kernels.reference import exact_weight
from halfbyte.schemes import Scheme
from tests.kernels.cases import magnitude, problem_for, random_inputs, random_weight, settled

KERNEL = DequantizeFp8Scales()
SCHEME = settled("w4a8").aimed_at("vllm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_the_weight_is_what_vllm_makes_of_it(rows: int, dtype: torch.dtype) -> None:
    q = random_weight(SCHEME, 2100, 256)  # more rows than a strip has
    q = replace(q, scales=settle(q.scales))
    x, bias = random_inputs(rows, 256, dtype), torch.linspace(-1, 1, 2100).to(dtype)
    codes, scales = quantize_activations(x, FP8_TOKEN)
    inputs, weight = codes.double() * scales.double(), vllm_dequantize(q).double()
    want = inputs @ weight.T + bias.double()
    prepared = KERNEL.prepare(q, problem_for(SCHEME, q, dtype))
    y = KERNEL.run(x, prepared, bias)
    assert (y.shape, y.dtype) == ((rows, 2100), dtype)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    assert ((y.double() - want).abs() <= magnitude(inputs, weight) * 2.0**-18 + want.abs() * unit).all()
    if rows:  # rounding products does change the weight
        exact = inputs @ exact_weight(q).T + bias.double()
        assert (want - exact).norm() > 0.005 * want.norm()
    back = KERNEL.restore(prepared)
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scales, q.scales)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (settled("w4a8"), "must be rounded for vLLM"),
        (replace(settled("w4a16"), target="vllm"), "inputs must be E4M3"),
        (replace(SCHEME, weights=SCHEME.weights.with_group_size(64)), "groups of 128"),
        (replace(SCHEME, weights=replace(SCHEME.weights, symmetric=False)), "symmetric INT4"),
        (settled("w4a8", "f16").aimed_at("vllm"), "bf16 scales"),
    ],
)
def test_what_it_does_not_take(scheme: Scheme, reason: str) -> None:
    problem = LinearProblem(scheme, 64, 256, torch.device("cpu"), torch.bfloat16)
    able, why = KERNEL.can_implement(problem)
    assert not able
    assert reason in why
