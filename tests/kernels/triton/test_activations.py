"""Quantization of inputs on the GPU, held to its definition in halfbyte.formats.activations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import halfbyte.kernels.triton.activations  # noqa: F401
from halfbyte.errors import HalfbyteError
from tests.kernels.triton.rows import (
    DTYPES,
    assert_fp8,
    assert_int8,
    assert_same,
    hostile_rows,
    normal_rows,
)
from tests.kernels.triton.runners import Runner, interpreted

GROUPS = (32, 64, 128)
# What rounding to a dtype may take, and the smallest result: a step of FP16; where exponentials overflow fp32.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-119, torch.bfloat16: 2.0**-119, torch.float16: 2.0**-24}
ops = torch.ops.halfbyte


def test_fp8_follows_the_definition(run: Runner, shapes: list[tuple[int, int]]) -> None:
    cases = [
        (hostile_rows(rows, columns, dtype, seed), GROUPS[(seed + columns) % 3])
        for seed, dtype in enumerate(DTYPES)
        for rows, columns in shapes
    ]
    for (x, group), results in zip(
        cases, run([("quantize_fp8_per_token", case) for case in cases]), strict=True
    ):
        assert_fp8(x, results, group)


def test_int8_follows_the_definition(run: Runner, shapes: list[tuple[int, int]]) -> None:
    cases = [hostile_rows(rows, columns, dtype) for dtype in DTYPES for rows, columns in shapes]
    for x, results in zip(cases, run([("quantize_int8_per_token", (x,)) for x in cases]), strict=True):
        assert_int8(x, results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_quotient_of_two_16_bit_numbers(run: Runner, dtype: torch.dtype) -> None:
    # A row for each significand of the largest magnitude, and in it all significands at all distances from it
    # that still matter: smaller inputs become 0. The interpreter would take minutes for all rows of FP16.
    bits = 7 if dtype == torch.bfloat16 else 10
    significands = 1 + torch.arange(1 << bits) / (1 << bits)
    largest = significands[:: 32 if run is interpreted and dtype == torch.float16 else 1, None]
    inputs = (significands * 2.0 ** -torch.arange(21)[:, None]).reshape(1, -1)
    x = (torch.cat([largest, inputs.minimum(largest)], dim=1) * 2.0**15).to(dtype)
    fp8, int8 = run([("quantize_fp8_per_token", (x, 128)), ("quantize_int8_per_token", (x,))])
    assert_fp8(x, fp8, 128)
    assert_int8(x, int8)


def test_long_rows_are_read_in_parts(run: Runner) -> None:
    x, y = hostile_rows(10, 33000, torch.bfloat16), hostile_rows(4, 40000, torch.float32)
    fp8, wide, int8 = run(
        [
            ("quantize_fp8_per_token", (x, 64)),
            ("quantize_fp8_per_token", (y, 128)),
            ("quantize_int8_per_token", (x,)),
        ]
    )
    assert_fp8(x, fp8, 64)
    assert_fp8(y, wide, 128)
    assert_int8(x, int8)


def test_rows_may_lie_apart(run: Runner) -> None:
    fused = hostile_rows(7, 1200, torch.bfloat16)
    halves = fused[:, :600], fused[:, 600:]
    odd = hostile_rows(7, 601, torch.bfloat16)[:, 1:]
    plain, unaligned, apart, together = run(
        [
            ("quantize_fp8_per_token", (halves[1], 32)),
            ("quantize_fp8_per_token", (odd, 32)),
            ("silu_and_mul", halves),
            ("silu_and_mul", tuple(half.contiguous() for half in halves)),
        ]
    )
    assert_fp8(halves[1], plain, 32)
    assert_fp8(odd, unaligned, 32)
    assert_same(apart[0], together[0])


def gates(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate = normal_rows(rows, columns, torch.float32, seed=1) * 8
    if rows:
        gate[0, :8] = torch.tensor([0.0, -0.0, 100.0, -100.0, 88.0, -88.0, 20.0, -20.0])
    return gate.to(dtype), normal_rows(rows, columns, dtype, seed=2)


def activated(gate: torch.Tensor, op: str) -> torch.Tensor:
    """In float64. torch's own GELU subtracts numbers that are almost equal where the gate is very negative."""
    if op == "silu_and_mul":
        return F.silu(gate)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    result = gate * torch.sigmoid(2 * inner)
    assert torch.allclose(result, F.gelu(gate, approximate="tanh"), atol=1e-13)
    return result


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations(run: Runner, shapes: list[tuple[int, int]], op: str) -> None:
    cases = [gates(rows, columns, dtype) for dtype in DTYPES for rows, columns in shapes]
    results = run(
        [
            *((op, case) for case in cases),
            *((f"{op}_quantize_fp8", (*case, 64)) for case in cases),
            *((f"{op}_quantize_int8", case) for case in cases),
        ]
    )
    plain, fp8, int8 = (results[i * len(cases) : (i + 1) * len(cases)] for i in range(3))
    as_torch = []
    for (gate, up), (product,), *quantized in zip(cases, plain, fp8, int8, strict=True):
        assert (product.dtype, product.shape) == (gate.dtype, gate.shape)
        # Exponentials are approximate; then it is rounded twice: the activation, and the product.
        want = activated(gate.double(), op) * up.double()
        unit = UNIT[gate.dtype]
        bound = want.abs() * (2 * unit + unit**2 + 2.0**-14) + SMALLEST[gate.dtype] * (1 + up.double().abs())
        assert ((product.double() - want).abs() <= bound).all()
        if op == "silu_and_mul" and gate.dtype == torch.bfloat16:
            as_torch.append((product == F.silu(gate) * up).flatten())
        # What is quantized is that product.
        assert_fp8(product, quantized[0], 64)
        assert_int8(product, quantized[1])
    # Few exponentials are so far off that a rounding turns, or so large that their reciprocal becomes 0.
    assert not as_torch or torch.cat(as_torch).double().mean() > 0.99


def test_gates_that_are_not_finite_stay_in_their_row(run: Runner) -> None:
    gate, up = gates(7, 640, torch.float16)
    spoiled, spoiling = gate.clone(), up.clone()
    spoiled[1, 5] = torch.nan
    spoiling[3, 639] = torch.inf
    spoiled[5, 0] = spoiling[5, 0] = 6e4  # their product overflows
    clean, (codes, scales, sums) = run(
        [("silu_and_mul_quantize_fp8", (*pair, 32)) for pair in ((gate, up), (spoiled, spoiling))]
    )
    assert scales.flatten().isnan().nonzero().flatten().tolist() == [1, 3, 5]
    others = [0, 2, 4, 6]
    assert_same(codes[others], clean[0][others])
    assert_same(scales[others], clean[1][others])
    assert_same(sums[others], clean[2][others])


FAKE_CALLS = [
    ("quantize_fp8_per_token", 1, (32,), [(9, 200), (9, 1), (9, 7)]),
    ("quantize_int8_per_token", 1, (), [(9, 200), (9, 1), (9, 1)]),
    ("silu_and_mul_quantize_int8", 2, (), [(9, 200), (9, 1), (9, 1)]),
    ("gelu_tanh_and_mul_quantize_int8", 2, (), [(9, 200), (9, 1), (9, 1)]),
    ("silu_and_mul", 2, (), [(9, 200)]),
    ("gelu_tanh_and_mul", 2, (), [(9, 200)]),
    ("silu_and_mul_quantize_fp8", 2, (128,), [(9, 200), (9, 1), (9, 2)]),
    ("gelu_tanh_and_mul_quantize_fp8", 2, (64,), [(9, 200), (9, 1), (9, 4)]),
]


@pytest.mark.parametrize(("op", "tensors", "rest", "shapes_out"), FAKE_CALLS, ids=[c[0] for c in FAKE_CALLS])
def test_fake_outputs_have_the_shapes(
    op: str, tensors: int, rest: tuple[int, ...], shapes_out: list[tuple[int, int]]
) -> None:
    with FakeTensorMode():
        x = torch.empty(9, 400, dtype=torch.bfloat16, device="meta")[:, :200]
        outputs = getattr(ops, op)(*[x] * tensors, *rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert [tuple(out.shape) for out in outputs] == shapes_out
    assert all(out.is_contiguous() for out in outputs[:2])
    dtypes = [x.dtype]
    if "int8" in op:
        dtypes = [torch.int8, torch.float32, torch.int32]
    elif "fp8" in op:
        dtypes = [torch.float8_e4m3fn, torch.float32, torch.float32]
        assert outputs[2].stride(0) % 4 == 0
    assert [out.dtype for out in outputs] == dtypes


def refusals() -> list[tuple[tuple[object, ...], str]]:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    return [
        ((x.to(torch.int32), 32), "takes bfloat16, float16 or float32, not int32"),
        ((x[0], 32), r"takes rows of at least one value, each contiguous: .* not bfloat16 \[64\] on cpu"),
        ((x.T, 32), r"with strides \[1, 64\]"),
        ((x[:, :0], 32), r"not bfloat16 \[4, 0\]"),
        ((x, 48), "sums groups of 32, 64 or 128 values, not of 48"),
    ]


@pytest.mark.parametrize(("arguments", "message"), refusals())
def test_what_no_kernel_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    with pytest.raises(HalfbyteError, match=message) as caught:
        ops.quantize_fp8_per_token(*arguments)
    assert "\n" not in str(caught.value)


def test_inputs_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    x = torch.zeros(4, 64)
    with pytest.raises(
        HalfbyteError, match=r"one shape, dtype and device, not float32 \[4, 64\] on cpu with"
    ):
        ops.silu_and_mul(x, x[:3])
    with pytest.raises(HalfbyteError, match="one shape, dtype and device"):
        ops.silu_and_mul_quantize_fp8(x, x.half(), 32)


def test_the_cpu_is_refused() -> None:
    with pytest.raises(HalfbyteError, match="quantize_int8_per_token runs on a CUDA device, not on cpu"):
        ops.quantize_int8_per_token(torch.zeros(4, 64))
