"""RMSNorm on the GPU, alone, with the residual sum before it and with quantization after it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import halfbyte.kernels.triton.norms  # noqa: F401
from halfbyte.errors import HalfbyteError
from halfbyte.formats.activations import quantize_activations
from tests.kernels.triton.rows import (
    DTYPES,
    FP8,
    INT8,
    assert_row_sums,
    assert_same,
    assert_sums,
    hostile_rows,
    normal_rows,
)
from tests.kernels.triton.runners import Call, Results, Runner

EPS = 1e-5
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ops = torch.ops.halfbyte


def weight_for(x: torch.Tensor) -> torch.Tensor:
    return (1 + 0.1 * normal_rows(1, x.shape[1], torch.float32, seed=3)[0]).to(x.dtype)


def llama_norm(x: torch.Tensor) -> torch.Tensor:
    norm = LlamaRMSNorm(x.shape[1], EPS).to(x.dtype)
    norm.weight.data.copy_(weight_for(x))
    with torch.no_grad():
        return norm(x)


def residual_for(x: torch.Tensor) -> torch.Tensor:
    return normal_rows(*x.shape, x.dtype, seed=4)


def cases(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    return [
        hostile_rows(rows, columns, dtype, seed)
        for seed, dtype in enumerate(DTYPES)
        for rows, columns in shapes
    ]


def assert_normed(normed: torch.Tensor, x: torch.Tensor) -> None:
    """Each value as transformers computes it, but for sums of squares that were added in another order."""
    want = llama_norm(x)
    assert (normed.dtype, normed.shape) == (want.dtype, want.shape)
    assert torch.equal(normed.isnan(), want.isnan())
    kept = ~want.isnan()
    found, want = normed[kept].double(), want[kept].double()
    smallest = torch.finfo(x.dtype).smallest_normal
    # A root that is off by its last bits may turn one rounding, and with it the second one.
    bound = want.abs() * (4 * UNIT[x.dtype] + 2.0**-20) + smallest
    assert ((found - want).abs() <= bound).all()
    if x.dtype != torch.float32 and want.numel() > 200:
        assert (found == want).double().mean() > 0.995


def assert_normed_codes(
    x: torch.Tensor, normed: torch.Tensor, results: tuple[torch.Tensor, ...], group: int | None
) -> None:
    """Codes are those of the row times the weight, bit for bit; the row's RMS is in its scale. So values are half a
    step of E4M3, or with no group of INT8, from the normed ones, and what rounding of those takes.
    """
    codes, scales, sums = results
    weighted = x.float() * weight_for(x).float()
    want_codes, want_scales = quantize_activations(weighted, INT8 if group is None else FP8)
    assert_same(codes, want_codes)
    inverse_rms = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    kept = ~want_scales.isnan()
    assert torch.equal(scales.isnan(), ~kept)
    # The sum of squares may overflow in fp32, where a norm gives zeros.
    small = kept & (x.double().square().sum(-1, keepdim=True) < 1e38)
    want = want_scales.double() * inverse_rms
    assert ((scales.double() - want).abs() <= want * 2.0**-20)[small].all()
    found, want = codes.double() * scales.double(), normed.double()
    of_value, of_scale = (2.0**-6, 0.5) if group is None else (2.0**-4 + 2.0**-6, 2.0**-9)
    bound = want.abs() * of_value + scales.double() * of_scale
    assert ((found - want).abs() <= bound)[kept[:, 0]].all()
    if group is None:
        assert_row_sums(codes, sums)
    else:
        assert_sums(codes, sums, group)


def in_turn(run: Runner, *batches: list[Call]) -> list[Results]:
    results = run([call for batch in batches for call in batch])
    size = len(batches[0])
    return [results[i : i + size] for i in range(0, len(results), size)]


def test_rms_norm_is_that_of_llama(run: Runner, shapes: list[tuple[int, int]]) -> None:
    inputs = [(x, weight_for(x), EPS) for x in cases(shapes)]
    plain, quantized, others, int8 = in_turn(
        run,
        [("rms_norm", each) for each in inputs],
        [("rms_norm_quantize_fp8", (*each, 128)) for each in inputs],
        [("rms_norm_quantize_fp8", (*each, 32)) for each in inputs],
        [("rms_norm_quantize_int8", each) for each in inputs],
    )
    for (x, *_), (normed,), *found in zip(inputs, plain, quantized, others, int8, strict=True):
        assert_normed(normed, x)
        for results, group in zip(found, (128, 32, None), strict=True):
            assert_normed_codes(x, normed, results, group)


def test_residuals_are_added_first(run: Runner, shapes: list[tuple[int, int]]) -> None:
    inputs = [(x, residual_for(x), weight_for(x), EPS) for x in cases(shapes)]
    plain, quantized, others, int8 = in_turn(
        run,
        [("add_rms_norm", each) for each in inputs],
        [("add_rms_norm_quantize_fp8", (*each, 128)) for each in inputs],
        [("add_rms_norm_quantize_fp8", (*each, 64)) for each in inputs],
        [("add_rms_norm_quantize_int8", each) for each in inputs],
    )
    for (x, residual, *_), (normed, hidden), *found in zip(
        inputs, plain, quantized, others, int8, strict=True
    ):
        assert_same(hidden, x + residual)
        assert_normed(normed, x + residual)
        for (*results, also), group in zip(found, (128, 64, None), strict=True):
            assert_same(also, x + residual)
            assert_normed_codes(x + residual, normed, tuple(results), group)


def test_rows_may_lie_apart(run: Runner) -> None:
    wide = normal_rows(5, 1201, torch.bfloat16)
    x, residual = wide[:, :600], wide[:, 600:1200]
    weight = weight_for(x)
    apart, together = run(
        [
            ("add_rms_norm_quantize_fp8", (x, residual, weight, EPS, 32)),
            ("add_rms_norm_quantize_fp8", (x.contiguous(), residual.contiguous(), weight, EPS, 32)),
        ]
    )
    for found, want in zip(apart, together, strict=True):
        assert_same(found, want)


def test_fake_outputs_have_the_shapes() -> None:
    with FakeTensorMode():
        x = torch.empty(9, 400, dtype=torch.float16, device="meta")[:, :200]
        weight = torch.empty(200, dtype=torch.float16, device="meta")
        plain = ops.rms_norm(x, weight, EPS)
        pair = ops.add_rms_norm(x, x, weight, EPS)
        quantized = ops.rms_norm_quantize_fp8(x, weight, EPS, 32)
        summed = ops.add_rms_norm_quantize_fp8(x, x, weight, EPS, 128)
        int8 = (
            *ops.rms_norm_quantize_int8(x, weight, EPS),
            *ops.add_rms_norm_quantize_int8(x, x, weight, EPS),
        )
    rows = ((9, 200), torch.float16)
    codes, scales = ((9, 200), torch.float8_e4m3fn), ((9, 1), torch.float32)
    described = [(tuple(out.shape), out.dtype) for out in (plain, *pair, *quantized, *summed)]
    assert described == [
        *(rows, rows, rows),
        *(codes, scales, ((9, 7), torch.float32)),
        *(codes, scales, ((9, 2), torch.float32), rows),
    ]
    whole = (((9, 200), torch.int8), ((9, 1), torch.float32), ((9, 1), torch.int32))
    assert [(tuple(out.shape), out.dtype) for out in int8] == [*whole, *whole, rows]
    sums = quantized[2], summed[2]
    assert all(each.stride(0) % 4 == 0 for each in sums)
    others = (plain, *pair, *quantized[:2], *summed[:2], summed[3])
    assert all(out.is_contiguous() for out in others)


def test_what_no_kernel_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    x, weight = torch.zeros(4, 64), torch.ones(64)
    with pytest.raises(
        HalfbyteError, match=r"takes a weight of 64 values in the dtype .* not float32 \[63\]"
    ):
        ops.rms_norm(x, weight[1:], EPS)
    with pytest.raises(HalfbyteError, match=r"not bfloat16 \[64\] on cpu for float32 \[4, 64\] on cpu"):
        ops.rms_norm_quantize_fp8(x, weight.bfloat16(), EPS, 32)
    with pytest.raises(HalfbyteError, match="a contiguous weight, not one with stride 2"):
        ops.rms_norm(x, torch.ones(128)[::2], EPS)
    with pytest.raises(HalfbyteError, match="rows of at most 16384 values, not of 16385"):
        ops.rms_norm(torch.zeros(1, 16385), torch.ones(16385), EPS)
    with pytest.raises(HalfbyteError, match="one shape, dtype and device"):
        ops.add_rms_norm(x, x[:2], weight, EPS)
    with pytest.raises(HalfbyteError, match="not of 16"):
        ops.add_rms_norm_quantize_fp8(x, x, weight, EPS, 16)


def test_the_cpu_is_refused() -> None:
    with pytest.raises(HalfbyteError, match="rms_norm runs on a CUDA device, not on cpu"):
        ops.rms_norm(torch.zeros(4, 64), torch.ones(64), EPS)
