"""Every kernel against the float64 reference, on every scheme that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.kernels.reference import exact_weight, reference_linear
from halfbyte.kernels.registry import KERNELS, kernel_named
from halfbyte.schemes import PRESETS, Scheme
from tests.kernels.cases import magnitude, problem_for, random_inputs, random_weight, settled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHANNEL_W4 = Scheme("w4a16-channel", TensorFormat("int4", "channel", scale="bf16"))
CHANNEL_W4A8 = Scheme(
    "w4a8-channel", TensorFormat("int4", "channel", scale="bf16"), ActivationFormat("e4m3", "token")
)
ASYMMETRIC_W4A8 = Scheme(
    "w4a8-asym",
    TensorFormat("int4", "group", 64, symmetric=False, scale="bf16"),
    ActivationFormat("int8", "token"),
)
STATIC_FP8 = Scheme(
    "fp8-static",
    TensorFormat("e4m3", "tensor", scale="bf16"),
    ActivationFormat("e4m3", "tensor", dynamic=False),
)
THREE_BITS = Scheme("w3a16", TensorFormat("int3", "group", 32, scale="bf16"))
SCHEMES = [
    *(settled(name) for name in PRESETS),
    CHANNEL_W4,
    CHANNEL_W4A8,
    ASYMMETRIC_W4A8,
    STATIC_FP8,
    THREE_BITS,
]
# What rounding to a dtype may take.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def pairs() -> list[tuple[Kernel, Scheme, torch.dtype]]:
    found = []
    for kernel in KERNELS:
        for scheme in SCHEMES:
            for dtype in DTYPES:
                problem = LinearProblem(scheme, 64, 256, torch.device("cpu"), dtype)
                if kernel.can_implement(problem)[0]:
                    found.append((kernel, scheme, dtype))
    return found


def assert_close(
    y: torch.Tensor, x: torch.Tensor, q: QuantizedTensor, scheme: Scheme, **extra: torch.Tensor
) -> None:
    want = reference_linear(x, q, scheme.activations, **extra)
    # Sums in fp32 (2^-16 where the INT4 kernel joins two roundings), rounded to the result's dtype, at most
    # twice: before the bias and after.
    product = want if (bias := extra.get("bias")) is None else want - bias.double()
    bound = magnitude(x, exact_weight(q)) * 2.0**-16 + (want.abs() + product.abs()) * UNIT[y.dtype] * 1.05
    wrong = (y.double() - want).abs() > bound + torch.finfo(y.dtype).tiny
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values, worst {(y.double() - want).abs().max()}"
    )


@pytest.mark.parametrize(("kernel", "scheme", "dtype"), pairs(), ids=lambda v: getattr(v, "name", str(v)))
def test_results_equal_the_reference(kernel: Kernel, scheme: Scheme, dtype: torch.dtype) -> None:
    q = random_weight(scheme, 80, 256)
    bias = torch.linspace(-1, 1, 80).to(dtype)
    static = scheme.activations is not None and not scheme.activations.dynamic
    extra = {"input_scale": torch.tensor([0.3])} if static else {}
    prepared = kernel.prepare(q, problem_for(scheme, q, dtype), **extra)
    # Few rows and many take different ways through the INT4 kernel.
    for rows in (1, 3, 50, 65):
        x = random_inputs(rows, 256, dtype)
        if dtype == torch.float16:
            x = x / 64  # the huge channel would leave its range
        y = kernel.run(x, prepared, bias)
        assert y.shape == (rows, 80)
        assert y.dtype == dtype
        assert_close(y, x, q, scheme, bias=bias, **extra)


@pytest.mark.parametrize(("kernel", "scheme", "dtype"), pairs(), ids=lambda v: getattr(v, "name", str(v)))
def test_restore_is_bit_exact(kernel: Kernel, scheme: Scheme, dtype: torch.dtype) -> None:
    q = random_weight(scheme, 112, 256)
    prepared = kernel.prepare(q, problem_for(scheme, q, dtype))
    back = kernel.restore(prepared)
    assert back.format == q.format
    for name in ("codes", "scales", "zero_points", "outer_scales"):
        was, now = getattr(q, name), getattr(back, name)
        assert (was is None) == (now is None)
        if was is not None:
            assert (now.dtype, now.shape) == (was.dtype, was.shape)
            assert torch.equal(now.view(torch.uint8), was.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("kernel", "scheme", "dtype"), pairs(), ids=lambda v: getattr(v, "name", str(v)))
def test_no_rows_give_no_rows(kernel: Kernel, scheme: Scheme, dtype: torch.dtype) -> None:
    q = random_weight(scheme, 64, 256)
    prepared = kernel.prepare(q, problem_for(scheme, q, dtype), torch.ones(1))
    y = kernel.run(torch.empty(0, 256, dtype=dtype), prepared, torch.zeros(64, dtype=dtype))
    assert (y.shape, y.dtype) == ((0, 64), dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [3, 65])
@pytest.mark.parametrize("name", ["w4a8", "w4a8-int8", "w4a16", "w8a8-int8", "fp8_per_block", "mxfp4"])
def test_bad_inputs_stay_in_their_row(name: str, rows: int, bad: float) -> None:
    scheme = settled(name)
    q = random_weight(scheme, 64, 256)
    for kernel in KERNELS:
        problem = problem_for(scheme, q, torch.bfloat16)
        if not kernel.can_implement(problem)[0]:
            continue
        prepared = kernel.prepare(q, problem)
        x = random_inputs(rows, 256, torch.bfloat16)
        clean = kernel.run(x, prepared)
        x[1, 7] = bad
        y = kernel.run(x, prepared)
        assert not y[1].isfinite().all(), kernel.name
        others = [row for row in range(rows) if row != 1]
        assert torch.equal(y[others], clean[others]), kernel.name


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(PRESETS)),
    rows=st.integers(1, 70),
    out_features=st.integers(1, 70),
    groups=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(DTYPES[:2]),
)
def test_any_shape(
    name: str, rows: int, out_features: int, groups: int, group: int, dtype: torch.dtype
) -> None:
    scheme = settled(name)
    if name.startswith("w4"):
        scheme = replace(scheme, weights=scheme.weights.with_group_size(group))
    columns = group * groups
    if name == "fp8_per_block":
        columns = 128 * groups
    q = random_weight(scheme, out_features, columns)
    x = random_inputs(rows, columns, dtype)
    for kernel in KERNELS:
        problem = problem_for(scheme, q, dtype)
        if kernel.can_implement(problem)[0]:
            assert_close(kernel.run(x, kernel.prepare(q, problem)), x, q, scheme)


def test_int8_sums_are_exact_at_the_extremes() -> None:
    fmt = TensorFormat("int8", "channel", scale="f32")
    scheme = Scheme("w8a8", fmt, ActivationFormat("int8", "tensor", dynamic=False))
    q = QuantizedTensor(fmt, torch.full((16, 96), -128, dtype=torch.int8), torch.ones(16, 1))
    kernel = kernel_named("cpu-int8")
    prepared = kernel.prepare(q, problem_for(scheme, q, torch.float32), torch.ones(1))
    assert kernel.run(torch.full((2, 96), 127.0), prepared).unique().tolist() == [-128 * 127 * 96]


def test_two_level_values_beyond_int8_are_refused() -> None:
    scheme = settled("w4a8-int8")
    q = random_weight(scheme, 16, 128)
    q.codes[3, 5], q.zero_points[3, 0], q.scales[3, 0] = 7, -8, 16  # type: ignore[index]
    with pytest.raises(Exception, match=r"rows 0 to 15 .*outside of \[-128, 127\]"):
        kernel_named("cpu-int8").prepare(q, problem_for(scheme, q, torch.float32))
