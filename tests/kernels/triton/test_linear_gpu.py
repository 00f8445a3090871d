"""What only a GPU can show of the portable layers: every tile, the same bits again, graphs, torch.compile.

Compiling takes most of the time. So schemes take turns with tiles, shapes and dtypes, and the same few layers go
through all other tests.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.reference import reference_linear
from halfbyte.kernels.triton import linear_inputs, linear_w4a8, linear_w4a16, linear_w8  # noqa: F401
from halfbyte.schemes import Scheme
from tests.kernels.cases import random_inputs, random_weight, settled
from tests.kernels.triton.linear_cases import FP8, INT8, KERNELS, assert_exact, int4, schemes, whole_case
from tests.kernels.triton.linear_runners import on_gpu
from tests.kernels.triton.runners import poison

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
# By the tile that takes them.
TOKENS = ((0, 1, 2, 7, 8, 16), (17, 32), (33, 64), (129, 256, 1000))
ROWS, INPUTS = 256, 14336
SHAPES = ((256, 512), (200, 384), (1, 128), (48, 4096), (4096, 1024))
# One of each way through the kernels.
WAYS = {
    "w4a16": ("triton-w4a16", Scheme("w4a16", int4(128, symmetric=False))),
    "w4a8": ("triton-w4a8", Scheme("w4a8", int4(128), FP8)),
    "w4a8-asym": ("triton-w4a8", Scheme("w4a8-asym", int4(32, symmetric=False), FP8)),
    "w4a8-int8": ("triton-w4a8", Scheme("w4a8-int8", int4(64), INT8)),
    "two levels": ("triton-w4a8", settled("w4a8-int8")),
    "int8": ("triton-int8", settled("w8a8-int8")),
    "w8a16": ("triton-int8", settled("w8a16")),
    "fp8": ("triton-fp8", settled("fp8")),
    "fp8 tensor": ("triton-fp8", settled("fp8_per_tensor")),
    "fp8 blocks": ("triton-fp8", settled("fp8_per_block")),
}


class Layer(torch.nn.Module):
    """A layer with random weights and a bias on the GPU, for BF16 inputs."""

    def __init__(self, kernel: str, scheme: Scheme, shape: tuple[int, int]) -> None:
        super().__init__()
        self.kernel, self.scheme = KERNELS[kernel], scheme
        q = random_weight(scheme, *shape)
        parts = (q.codes, q.scales, q.zero_points, q.outer_scales)
        self.weight = QuantizedTensor(q.format, *(None if t is None else t.to(GPU) for t in parts))  # type: ignore[arg-type]
        static = scheme.activations is not None and not scheme.activations.dynamic
        self.input_scale = torch.tensor([0.3], device=GPU) if static else None
        problem = LinearProblem(scheme, *shape, GPU, torch.bfloat16)
        self.prepared = self.kernel.prepare(self.weight, problem, self.input_scale)
        self.bias = torch.linspace(-1, 1, shape[0], device=GPU).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel.run(x, self.prepared, self.bias)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        activations = self.scheme.activations
        return reference_linear(x, self.weight, activations, input_scale=self.input_scale, bias=self.bias)


@cache
def layer_of(way: str) -> Layer:
    """One whose sums are in several parts for any number of tokens, as few rows and many inputs make them."""
    return Layer(*WAYS[way], (ROWS, INPUTS))


def inputs(tokens: int) -> torch.Tensor:
    return random_inputs(tokens, INPUTS, torch.bfloat16).to(GPU)


@pytest.mark.parametrize("number", range(len(schemes())))
def test_every_number_of_tokens(number: int) -> None:
    kernel, scheme, multiple = schemes()[number]
    fitting = [shape for shape in SHAPES if shape[1] % multiple == 0]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)[: 2 if scheme.activations is None else 3]
    dtype, shape = dtypes[number % len(dtypes)], fitting[number % len(fitting)]
    cases = [
        whole_case(kernel, scheme, (tokens, *shape), dtype, bias=number % 4 > 0, seed=number)
        for tokens in TOKENS[number // 3 % len(TOKENS)]
    ]
    for case, y in zip(cases, on_gpu(cases), strict=True):
        assert_exact(case, y)


@pytest.mark.parametrize("way", WAYS)
def test_errors_at_the_size_of_a_model(way: str) -> None:
    # Relative to float64, with a result in BF16: nothing but its rounding should show. (One large number may make up
    # the norm, of which rounding alone may take 2^-8: that one is looked at by itself.)
    layer = layer_of(way)
    for tokens in (1, 16, 64, 512):
        x = torch.randn(tokens, INPUTS, generator=torch.Generator().manual_seed(0)).to(GPU, torch.bfloat16)
        # The upper half of the channels has a huge one, next to which no error would show.
        y, want = (result[:, : ROWS // 2].double() for result in (layer(x), layer.reference(x)))
        largest = want.abs() == want.abs().max()
        error = (y - want).abs()
        assert error[~largest].norm() <= 3e-3 * want[~largest].norm(), tokens
        assert (error[largest] <= (2.0**-8 + 1e-3) * want[largest].abs()).all(), tokens


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_twice_and_from_graphs(way: str) -> None:
    layer = layer_of(way)
    for tokens in (1, 33, 300):
        x = inputs(tokens)
        first, half = layer(x), layer(x / 2)
        for _ in range(3):
            poison(1 << 22)
            assert torch.equal(layer(x), first), tokens
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for want in (first, half):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, want), tokens
            x /= 2


@pytest.mark.parametrize("way", WAYS)
def test_compiled_in_one_graph(way: str) -> None:
    layer = layer_of(way)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 3):
        x = inputs(tokens)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("way", WAYS)
def test_inputs_may_lie_apart_unaligned_or_transposed(way: str) -> None:
    layer = layer_of(way)
    x = inputs(4)
    wide = torch.full((4, INPUTS + 44), float("nan"), dtype=torch.bfloat16, device=GPU)
    wide[:, 3 : INPUTS + 3] = x
    assert torch.equal(layer(wide[:, 3 : INPUTS + 3]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_devices_than_the_current_one() -> None:
    layer = layer_of("w4a16")
    x = inputs(4)
    want = layer(x)
    there = layer.prepared
    moved = {name: tensor.to("cuda:1") for name, tensor in there.tensors.items()}
    y = layer.kernel.run(x.to("cuda:1"), type(there)(there.problem, moved), layer.bias.to("cuda:1"))
    assert torch.equal(y.to(GPU), want)
