"""FP8 layers by torch._scaled_mm against the float64 reference: torch has it for CPUs too, quantizers aside."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.quantized_inputs import QuantizedInputs
from halfbyte.kernels.reference import exact_weight, reference_linear
from halfbyte.kernels.scaled_mm import ScaledMM, ScaledMMBlocks
from halfbyte.schemes import Scheme
from tests.kernels.cases import magnitude, random_inputs, random_weight, settled

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="its quantizers need Triton")

TENSOR = TensorFormat("e4m3", "tensor", scale="f32")
STATIC = ActivationFormat("e4m3", "tensor", dynamic=False)
SCHEMES = [
    settled("fp8"),
    settled("fp8", "f32"),
    settled("fp8_per_tensor"),
    Scheme("tensor-token", TENSOR, ActivationFormat("e4m3", "token")),
    Scheme("tensor-static", TENSOR, STATIC),
    Scheme("channel-static", replace(TENSOR, granularity="channel"), STATIC),
]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        monkeypatch.setattr("halfbyte.kernels.triton.linear_inputs.quantized_inputs", quantize_activations)
    return torch.device(request.param)


def check(
    scheme: Scheme,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    device: torch.device,
) -> None:
    tokens, rows, columns = shape
    q, x = random_weight(scheme, rows, columns), random_inputs(tokens, columns, dtype)
    scale = None if scheme.activations is None or scheme.activations.dynamic else torch.tensor([0.3])
    if dtype == torch.float16:
        x /= 64  # the huge channel would leave its range
    at = QuantizedTensor(q.format, q.codes.to(device), q.scales.to(device))
    problem = LinearProblem(scheme, rows, columns, device, dtype)
    kernel = ScaledMMBlocks() if scheme.weights.granularity == "block" else ScaledMM()
    assert device.type == "cpu" or kernel.can_implement(problem) == (True, "")
    prepared = kernel.prepare(at, problem, None if scale is None else scale.to(device))
    y = kernel.run(x.to(device), prepared, None if bias is None else bias.to(device)).cpu()
    want = reference_linear(x, q, scheme.activations, input_scale=scale, bias=bias)
    assert (y.dtype, y.shape) == (dtype, want.shape)
    # Hopper's FP8 tensor cores add in fewer bits than fp32; a bias of another dtype comes after a rounding.
    product = want if bias is None or bias.dtype == dtype else want - bias.double()
    bound = magnitude(x, exact_weight(q)) * 2.0**-12 + (want.abs() + product.abs()) * UNIT[dtype] * 1.05
    bound += torch.finfo(dtype).smallest_normal * UNIT[dtype]  # below it numbers have fewer bits
    assert ((y.double() - want).abs() <= bound).all(), (scheme, shape)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name + scheme.weights.scale)
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 64, 65, 257])
def test_results_equal_the_reference(scheme: Scheme, tokens: int, device: torch.device) -> None:
    shape = (tokens, 80, 272)
    check(scheme, shape, torch.bfloat16, None, device)
    check(scheme, shape, torch.bfloat16, torch.linspace(-1, 1, 80).bfloat16(), device)
    check(scheme, shape, torch.bfloat16, torch.linspace(-1, 1, 80), device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 16, 63, 64, 65, 68, 300])
@pytest.mark.parametrize("rows", [144, 256])
def test_blocks_equal_the_reference(tokens: int, rows: int) -> None:
    scheme, shape, device = settled("fp8_per_block"), (tokens, rows, 1536), torch.device("cuda")
    check(scheme, shape, torch.bfloat16, None, device)
    check(scheme, shape, torch.bfloat16, torch.linspace(-1, 1, rows).bfloat16(), device)
    check(scheme, shape, torch.bfloat16, torch.linspace(-1, 1, rows), device)
    check(scheme, shape, torch.float16, None, device)


@pytest.mark.parametrize("tokens", [1, 33])
def test_single_scales_give_fp16_too(tokens: int, device: torch.device) -> None:
    bias = torch.linspace(-1, 1, 64).half()
    check(settled("fp8_per_tensor"), (tokens, 64, 128), torch.float16, bias, device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_inputs_stay_in_their_row(bad: float, device: torch.device) -> None:
    scheme = settled("fp8")
    q = random_weight(scheme, 32, 64)
    at = QuantizedTensor(q.format, q.codes.to(device), q.scales.to(device))
    prepared = ScaledMM().prepare(at, LinearProblem(scheme, 32, 64, device, torch.bfloat16))
    x = random_inputs(5, 64, torch.bfloat16)
    clean = ScaledMM().run(x.to(device), prepared)
    x[1, 7] = bad
    y = ScaledMM().run(x.to(device), prepared)
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


@pytest.mark.parametrize("name", ["fp8", "fp8_per_tensor"])
@pytest.mark.parametrize(
    ("rows", "out_features", "few"),
    [
        (1, 32, True),
        (64, 32768, True),
        (65, 32, True),
        (65, 16384, False),
        (2**15, 32, True),
        (2**15 + 1, 32, False),
    ],
)
def test_few_rows_on_a_gpu_are_scaled_after_the_product(
    rows: int, out_features: int, few: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[tuple[torch.dtype, int, int]] = []
    multiply = torch._scaled_mm

    def noted(a: Any, b: Any, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any) -> torch.Tensor:
        products.append((options["out_dtype"], scale_a.numel(), scale_b.numel()))
        return multiply(a, b, scale_a, scale_b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    scheme = settled(name)
    single = name == "fp8_per_tensor"
    with FakeTensorMode(), torch.device("cuda"):
        shape = (out_features, 64)
        scales = torch.empty(scheme.weights.scale_shape(shape))
        weight = QuantizedTensor(scheme.weights, torch.empty(shape, dtype=torch.float8_e4m3fn), scales)
        problem = LinearProblem(scheme, *shape, torch.device("cuda"), torch.bfloat16)
        prepared = ScaledMM().prepare(weight, problem)
        codes = torch.empty(rows, 64, dtype=torch.float8_e4m3fn)
        inputs = QuantizedInputs(codes, torch.empty((1,) if single else (rows, 1)), torch.empty(0))
        y = ScaledMM().run_quantized(inputs, prepared, torch.empty(out_features, dtype=torch.bfloat16))
        assert (y.dtype, y.shape) == (torch.bfloat16, (rows, out_features))
    scaled = (torch.bfloat16, 1, 1) if single else (torch.bfloat16, rows, out_features)
    assert products == [(torch.float32, 1, 1) if few and not single else scaled]
