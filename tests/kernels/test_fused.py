"""What the fused kernels mean, as torch says it on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from halfbyte.formats.activations import dequantize_activations, quantize_activations
from halfbyte.kernels.fused import GATES, gated, gated_quantize, quantize, rms_norm, rms_norm_quantize
from halfbyte.kernels.quantized_inputs import FP8_TOKEN, INT8_TOKEN, QuantizedInputs, sum_group
from halfbyte.schemes import PRESETS

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows(count: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_quantized(
    found: QuantizedInputs, x: torch.Tensor, group: int | None, factors: torch.Tensor | None = None
) -> None:
    """group: none for INT8. factors: by which rows are multiplied after they have been quantized."""
    codes, scales = quantize_activations(x, INT8_TOKEN if group is None else FP8_TOKEN)
    assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales, scales if factors is None else scales * factors)
    tokens, columns = x.shape
    if group is None:
        assert found.sums.dtype == torch.int32
        assert found.sums.tolist() == [[sum(row)] for row in codes.tolist()]
        return
    assert found.sums.shape == (tokens, -(-columns // group))
    assert found.sums.stride(0) % 4 == 0
    for index in range(found.sums.shape[1]):
        values = codes[:, index * group : (index + 1) * group].double().sum(-1)
        assert torch.equal(found.sums[:, index].double(), values)


@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (4, 200), (5, 576)])
def test_sums_are_of_the_codes(shape: tuple[int, int], group: int) -> None:
    assert_quantized(quantize(rows(*shape, torch.bfloat16), group), rows(*shape, torch.bfloat16), group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_that_of_llama(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(576, EPS).to(dtype)
    torch.nn.init.normal_(norm.weight, 1, 0.1)
    x, residual = rows(5, 576, dtype), rows(5, 576, dtype, seed=1)
    with torch.no_grad():
        normed, total = rms_norm(x, None, norm.weight, EPS)
        assert torch.equal(normed, norm(x))
        assert total is x
        normed, total = rms_norm(x, residual, norm.weight, EPS)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, norm(x + residual))
        inputs, total = rms_norm_quantize(x, residual, norm.weight, EPS, 64)
        assert torch.equal(total, x + residual)
        values = total.float()
        inverse_rms = (values.square().mean(-1, keepdim=True) + EPS).rsqrt()
        assert_quantized(inputs, values * norm.weight.float(), 64, inverse_rms)
        half_a_step = normed.float().abs() / 16 + inputs.scales * 2.0**-10
        found = dequantize_activations(inputs.codes, inputs.scales)
        assert ((found - normed.float()).abs() <= half_a_step * (1 + 2.0**-3)).all()
        inputs, total = rms_norm_quantize(x, residual, norm.weight, EPS, None)
        assert_quantized(inputs, values * norm.weight.float(), None, inverse_rms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(GATES))
def test_gates_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    gate, up = rows(7, 640, dtype).mul(3).chunk(2, dim=-1)
    want = ACT2FN[name](gate) * up
    assert torch.equal(gated(gate, up, GATES[name]), want)
    assert_quantized(gated_quantize(gate, up, GATES[name], 128), want, 128)
    assert_quantized(gated_quantize(gate, up, GATES[name], None), want, None)


def test_a_token_that_is_not_finite_stays_alone() -> None:
    x = rows(6, 128, torch.bfloat16)
    x[2, 5], x[4, 7] = torch.nan, torch.inf
    found, clean = quantize(x, 64), quantize(rows(6, 128, torch.bfloat16), 64)
    others = [0, 1, 3, 5]
    assert found.scales[[2, 4]].isnan().all()
    assert torch.equal(found.sums[others], clean.sums[others])
    values = dequantize_activations(found.codes, found.scales)
    assert torch.equal(values[others], dequantize_activations(clean.codes, clean.scales)[others])


@pytest.mark.parametrize(
    ("scheme", "group"),
    [("w4a8", 128), ("fp8", 128), ("mxfp4", 32), ("nvfp4", 128), ("w4a8-int8", None), ("w8a8-int8", None)],
)
def test_the_group_that_sums_are_over(scheme: str, group: int | None) -> None:
    assert sum_group(PRESETS[scheme]) == group


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)], ids=str)
def test_dtypes_without_a_kernel_run_in_torch(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight = rows(5, 576, dtypes[0]), rows(1, 576, dtypes[1], seed=1)[0]
    want, _ = rms_norm(x, None, weight, EPS)
    found, _ = rms_norm(x.cuda(), None, weight.cuda(), EPS)
    # In fp32 576 squares may be added in another order and the root be off by two units; where the normed values are
    # rounded to fewer bits, that may turn a rounding.
    tolerance = max(16 * torch.finfo(torch.float32).eps, 2 * torch.finfo(x.dtype).eps)
    torch.testing.assert_close(found.cpu(), want, rtol=tolerance, atol=0)
    if x.dtype == torch.float64:
        torch.testing.assert_close(gated(x.cuda(), x.cuda(), "silu").cpu(), gated(x, x, "silu"))
