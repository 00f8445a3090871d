"""Linear layers to hold the portable GPU kernels to: their numbers, how they are run, and how far off they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import FLOAT_SCALE_DTYPES
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.reference import exact_weight, reference_linear
from halfbyte.kernels.triton_linear import TritonFp8, TritonInt8, TritonW4A8, TritonW4A16
from halfbyte.schemes import Scheme
from tests.kernels.cases import magnitude, random_inputs, random_weight, settled

KERNELS = {kernel.name: kernel for kernel in (TritonW4A16(), TritonW4A8(), TritonInt8(), TritonFp8())}
FP8 = ActivationFormat("e4m3", "token")
INT8 = ActivationFormat("int8", "token")
STATIC_FP8 = ActivationFormat("e4m3", "tensor", dynamic=False)
STATIC_INT8 = ActivationFormat("int8", "tensor", dynamic=False)

# What rounding to a dtype may take.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# What sums may lose, relative to the sum of magnitudes: fp32 sums on tensor cores are cut off, not rounded.
LOSS = {"e4m3": 2.0**-16, "int8": 2.0**-20, None: 2.0**-16}
# Hopper cuts FP8 products off 13 bits below the first bit of the largest of 32 and of their sum so far.
LOSS_ON_GPU = {**LOSS, "e4m3": 2.0**-12}


@dataclass(frozen=True)
class Case:
    """A layer, its inputs, and the kernel that runs it."""

    kernel: str
    scheme: Scheme
    weight: QuantizedTensor
    x: torch.Tensor
    bias: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    @property
    def label(self) -> str:
        weights, inputs = self.scheme.weights, self.scheme.activations
        return (
            f"{self.kernel} {weights} {inputs} M={self.x.shape[0]} N, K={self.weight.shape} {self.x.dtype} "
            f"bias={self.bias is not None}"
        )

    def run(self, device: torch.device) -> torch.Tensor:
        """The result on a device, from preparing the weight on. There, memory that nobody wrote is NaN."""
        kernel = KERNELS[self.kernel]
        q = self.weight
        q = QuantizedTensor(
            q.format,
            q.codes.to(device),
            q.scales.to(device),
            _moved(q.zero_points, device),
            _moved(q.outer_scales, device),
        )
        problem = LinearProblem(self.scheme, *q.shape, device, self.x.dtype)
        prepared = kernel.prepare(q, problem, _moved(self.input_scale, device))
        return kernel.run(self.x.to(device), prepared, _moved(self.bias, device)).cpu()

    def exact_result(self) -> torch.Tensor:
        """float64 ``[M, N]``, by the definition."""
        return reference_linear(
            self.x, self.weight, self.scheme.activations, input_scale=self.input_scale, bias=self.bias
        )


def cut_off_on_hopper(case: Case) -> torch.Tensor:
    """The most that FP8 sums may lose, whatever the numbers: in steps of 32, products and the sum so far are each cut
    off 13 bits below the largest of them.
    """
    products = case.x.double()[:, None] * exact_weight(case.weight)
    largest = torch.maximum(products.abs().amax(-1), products.cumsum(-1).abs().amax(-1))
    inputs = case.x.shape[1]
    rounded_input = 1 + 2.0**-4
    return largest * rounded_input * (inputs + -(-inputs // 32)) * 2.0**-13


def assert_right(
    case: Case, y: torch.Tensor, loss: dict[str | None, float], more: torch.Tensor | float = 0.0
) -> None:
    """``y`` is the layer's result in the dtype of its inputs, by the float64 reference. more: that it may be off."""
    want = case.exact_result()
    assert (y.dtype, y.shape) == (case.x.dtype, want.shape), case.label
    lost = loss[case.scheme.activations.element if case.scheme.activations else None]
    bound = magnitude(case.x, exact_weight(case.weight)) * lost + want.abs() * UNIT[y.dtype] * 1.05 + more
    wrong = ~((y.double() - want).abs() <= bound + 2 * torch.finfo(y.dtype).tiny)
    assert not wrong.any(), f"{case.label}: {int(wrong.sum())} of {wrong.numel()} values, {y[wrong][:4]}"


def assert_exact(case: Case, y: torch.Tensor) -> None:
    """``y`` is the exact result of a case of whole numbers, rounded once."""
    want = case.exact_result().to(case.x.dtype)
    assert (y.dtype, y.shape) == (want.dtype, want.shape), case.label
    wrong = y != want
    assert not wrong.any(), f"{case.label}: {int(wrong.sum())} of {wrong.numel()} values, {y[wrong][:4]}"


def schemes() -> list[tuple[str, Scheme, int]]:
    """Kernel, scheme, and a multiple that the number of inputs must be of."""
    found = []
    for size in (None, 32, 64, 128, 256):
        for symmetric in (True, False)[: 1 if size == 256 else 2]:
            weights = int4(size, symmetric)
            found.append(("triton-w4a16", Scheme("w4a16", weights), size or 1))
            found.append(("triton-w4a8", Scheme("w4a8", weights, FP8), size or 1))
            found.append(("triton-w4a8", Scheme("w4a8", weights, INT8), size or 1))
        if size:
            two_levels = settled("w4a8-int8")
            weights = two_levels.weights.with_group_size(size)
            found.append(("triton-w4a8", replace(two_levels, weights=weights), size))
    found.append(("triton-w4a8", Scheme("w4a8-static", int4(128), STATIC_FP8), 128))
    found.append(("triton-w4a8", Scheme("w4a8-static", int4(128), STATIC_INT8), 128))
    for scale in ("f16", "f32"):
        found.append(("triton-w4a16", Scheme("w4a16", int4(64, scale=scale)), 64))
        found.append(("triton-w4a8", Scheme("w4a8", int4(128, False, scale=scale), FP8), 128))
        found.append(("triton-fp8", settled("fp8", scale), 1))
        found.append(("triton-int8", settled("w8a8-int8", scale), 1))
    found += [("triton-int8", settled(name), 1) for name in ("w8a16", "w8a8-int8")]
    found += [("triton-fp8", settled(name), 1) for name in ("fp8", "fp8_per_tensor")]
    found.append(("triton-fp8", settled("fp8_per_block"), 128))
    tensor = TensorFormat("e4m3", "tensor", scale="bf16")
    found.append(("triton-fp8", Scheme("fp8-static", tensor, STATIC_FP8), 1))
    for activations in (STATIC_INT8, replace(STATIC_INT8, dynamic=True)):
        found.append(("triton-int8", replace(settled("w8a8-int8"), activations=activations), 1))
    return found


def int4(size: int | None, symmetric: bool = True, scale: str = "bf16") -> TensorFormat:
    """INT4 in groups, or in channels without a size."""
    granularity = "group" if size else "channel"
    return TensorFormat("int4", granularity, size, symmetric=symmetric, scale=scale)


def case_of(
    kernel: str, scheme: Scheme, shape: Sequence[int], dtype: torch.dtype, *, bias: bool = True, seed: int = 0
) -> Case:
    """A case with random numbers. shape: M, N, K."""
    tokens, rows, columns = shape
    q = random_weight(scheme, rows, columns, seed)
    x = random_inputs(tokens, columns, dtype, seed + 1)
    if dtype == torch.float16:
        x /= 64  # the huge channel would leave its range
    static = scheme.activations is not None and not scheme.activations.dynamic
    return Case(
        kernel,
        scheme,
        q,
        x,
        torch.linspace(-1, 1, rows).to(dtype) if bias else None,
        torch.tensor([0.3]) if static else None,
    )


def whole_case(
    kernel: str, scheme: Scheme, shape: Sequence[int], dtype: torch.dtype, *, bias: bool, seed: int = 0
) -> Case:
    """A case of small whole numbers and scales that are powers of two: no order of sums changes its result.

    Up to 4096 inputs, sums take fewer bits than fp32 has, and those of one group fewer than Hopper's FP8 sums have.
    """
    tokens, rows, columns = shape
    fmt, activations = scheme.weights, scheme.activations
    generator = torch.Generator().manual_seed(seed)

    def whole(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.randint(int(low), int(high) + 1, shape, generator=generator)

    def powers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        exponents = whole(0, 2, *shape)
        return (1 << exponents if dtype == torch.int8 else 0.5**exponents).to(dtype)

    if fmt.is_integer:
        codes = whole(fmt.qmin, fmt.qmax, rows, columns).to(torch.int8)
    else:
        codes = whole(-8, 8, rows, columns).to(torch.float8_e4m3fn)
    scales = fmt.scale_shape((rows, columns))
    q = QuantizedTensor(
        fmt,
        codes,
        powers(scales, torch.int8 if fmt.scale == "int8" else FLOAT_SCALE_DTYPES[fmt.scale]),
        None if fmt.symmetric else whole(fmt.qmin, fmt.qmax, *scales).to(torch.int8),
        None if fmt.outer is None else powers((rows, 1), torch.float32),
    )
    x = whole(-7, 7, tokens, columns)
    # 448 is 64 times 7: a power of two is the scale of inputs that are quantized.
    x[:, ::128] = 127 if activations is not None and activations.element == "int8" else 7
    static = activations is not None and not activations.dynamic
    return Case(
        kernel,
        scheme,
        q,
        (x << torch.arange(tokens)[:, None] % 3).to(dtype),
        (torch.arange(rows) % 7 - 3).to(dtype) if bias else None,
        torch.ones(1) if static else None,
    )


def hostile_weight(scheme: Scheme, rows: int, columns: int, seed: int = 0) -> QuantizedTensor:
    """Every code there is, and scales from 1e-30 and 0 to 1e4, next to each other."""
    fmt = scheme.weights
    generator = torch.Generator().manual_seed(seed)
    if fmt.outer is not None:
        return random_weight(scheme, rows, columns, seed)
    if fmt.is_integer:
        codes = torch.randint(fmt.qmin, fmt.qmax + 1, (rows, columns), generator=generator).to(torch.int8)
        codes[rows // 2] = fmt.qmin
    else:
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        finite = numbers.view(torch.uint8)[~numbers.float().isnan()]
        codes = finite[torch.randint(len(finite), (rows, columns), generator=generator)]
        codes = codes.view(torch.float8_e4m3fn)
    shape = fmt.scale_shape((rows, columns))
    palette = torch.tensor([1e4, 1e-4, 1.0, 1e-30, 0.0, 0.02])
    scales = palette[torch.randint(len(palette), shape, generator=generator)]
    zeros = None
    if not fmt.symmetric:
        zeros = torch.randint(fmt.qmin, fmt.qmax + 1, shape, generator=generator).to(torch.int8)
    return QuantizedTensor(fmt, codes, scales.to(FLOAT_SCALE_DTYPES[fmt.scale]), zeros)


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
