"""W4A8 on a Hopper GPU against the float64 reference of the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.hopper_w4a8 import HopperW4A8
from halfbyte.kernels.problem import LinearProblem, Prepared
from halfbyte.kernels.reference import exact_weight
from halfbyte.schemes import PRESETS, Scheme

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
KERNEL = HopperW4A8()
TOKENS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
BF16 = torch.bfloat16


def scheme(group: int | None, symmetric: bool = True, scale: str = "bf16") -> Scheme:
    weights = replace(
        PRESETS["w4a8"].weights,
        granularity="group" if group else "channel",
        group_size=group,
        symmetric=symmetric,
        scale=scale,
    )
    return replace(PRESETS["w4a8"], weights=weights)


def layer(of: Scheme, n: int, k: int, dtype: torch.dtype = BF16, seed: int = 0) -> Prepared:
    torch.manual_seed(seed)
    return prepared(quantize(torch.randn(n, k, device=GPU) * 0.05, of.weights), of, dtype)


def prepared(q: QuantizedTensor, of: Scheme, dtype: torch.dtype = BF16) -> Prepared:
    return KERNEL.prepare(q, LinearProblem(of, *q.shape, GPU, dtype))  # type: ignore[misc]


def error(x: torch.Tensor, weight: Prepared, bias: torch.Tensor | None = None) -> float:
    """Relative to float64 on the codes that the kernel was given."""
    inputs = KERNEL.quantize(x, weight)
    poison = torch.full((x.shape[0], weight.problem.out_features), float("nan"), device=GPU, dtype=x.dtype)
    del poison  # the allocator gives its memory to the output
    found = KERNEL.run_quantized(inputs, weight, bias).double()
    wanted = inputs.codes.double() * inputs.scales.double() @ exact_weight(KERNEL.restore(weight)).T.to(GPU)
    if bias is not None:
        wanted = wanted + bias.double()
    if x.shape[0] == 0:
        assert found.shape == wanted.shape
        return 0.0
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    ("n", "k"), [(256, 512), (4096, 4096), (1040, 1088), (16, 64), (8192, 1024), (20480, 256)]
)
def test_any_number_of_tokens(n: int, k: int) -> None:
    weight = layer(scheme(64 if k % 128 else 128), n, k)
    for tokens in TOKENS:
        assert error(torch.randn(tokens, k, device=GPU, dtype=BF16), weight) < 3e-3, tokens


@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", ["bf16", "f16", "f32"])
def test_kinds_of_weights(group: int | None, symmetric: bool, scale: str) -> None:
    weight = layer(scheme(group, symmetric, scale), 656, 1536)
    for tokens in (1, 16, 40, 200):
        x = torch.randn(tokens, 1536, device=GPU, dtype=BF16) + 0.3
        bias = torch.randn(656, device=GPU, dtype=BF16)
        assert error(x, weight, bias) < 3e-3, tokens


def test_half_precision_outputs() -> None:
    weight = layer(scheme(128), 512, 1024, torch.float16)
    for tokens in (3, 100):
        assert error(torch.randn(tokens, 1024, device=GPU, dtype=torch.float16), weight) < 1e-3


@pytest.mark.parametrize("tokens", [5, 64, 130])
def test_scales_of_every_size(tokens: int) -> None:
    of = scheme(128, scale="f32")
    q = quantize(torch.randn(256, 1024, device=GPU), of.weights)
    q.scales[:, 0] = 1e-30
    q.scales[:, 1] = 0
    q.scales[::2, 2], q.scales[::2, 3] = 1e4, 1e-4
    assert error(torch.randn(tokens, 1024, device=GPU, dtype=BF16), prepared(q, of)) < 3e-3


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_one_large_activation_per_row(tokens: int) -> None:
    x = torch.randn(tokens, 2048, device=GPU, dtype=BF16)
    x[:, 77] = 448
    assert error(x, layer(scheme(128), 512, 2048)) < 3e-3


@pytest.mark.parametrize("code", [-8, -1, 0, 7])
def test_every_code_is_exact(code: int) -> None:
    of = scheme(128)
    q = quantize(torch.randn(128, 256, device=GPU), of.weights)
    q.codes.fill_(code)
    q.scales.fill_(1)
    weight = prepared(q, of)
    for tokens in (4, 100):
        x = torch.randint(-3, 4, (tokens, 256), device=GPU).to(BF16)
        inputs = KERNEL.quantize(x, weight)._replace(
            codes=x.to(torch.float8_e4m3fn), scales=torch.ones(tokens, 1, device=GPU)
        )
        sums = torch.zeros_like(inputs.sums)
        sums[:, :tokens] = x.float().view(tokens, 2, 128).sum(-1).T
        found = KERNEL.run_quantized(inputs._replace(sums=sums), weight)
        assert torch.equal(found, (x.double().sum(1, keepdim=True) * code).expand(-1, 128).to(BF16))


@pytest.mark.parametrize("tokens", [8, 16, 64, 300])
def test_nan_stays_in_its_row(tokens: int) -> None:
    weight = layer(scheme(128), 4096, 2048)
    x = torch.randn(tokens, 2048, device=GPU, dtype=BF16)
    clean = KERNEL.run(x, weight)
    x[3, 5], x[5, 900] = float("nan"), float("inf")
    found = KERNEL.run(x, weight)
    assert found[3].isnan().all()
    assert found[5].isnan().all()
    others = [row for row in range(tokens) if row not in (3, 5)]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 16, 64, 129, 500])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (8192, 8192)])
def test_the_same_bits_twice_and_in_a_graph(tokens: int, n: int, k: int) -> None:
    weight = layer(scheme(128), n, k)
    x = torch.randn(tokens, k, device=GPU, dtype=BF16)
    first = KERNEL.run(x, weight)
    assert torch.equal(KERNEL.run(x, weight), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(3):  # kernels that start before the one ahead has ended
            out = KERNEL.run(x, weight)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, first)


def test_compiles_with_torch() -> None:
    weight = layer(scheme(128), 256, 512)
    inputs = KERNEL.quantize(torch.randn(4, 512, device=GPU, dtype=BF16), weight)

    def run(codes: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        return torch.ops.halfbyte.w4a8_linear(
            codes, scales, sums, weight.tensors["weight"], None, 256, 128, BF16, False, BF16
        )

    assert torch.equal(torch.compile(run, fullgraph=True)(*inputs), run(*inputs))


def test_packing_on_the_gpu_is_packing_on_the_cpu() -> None:
    of = scheme(128)
    q = quantize(torch.randn(512, 1024), of.weights)
    moved = QuantizedTensor(q.format, q.codes.to(GPU), q.scales.to(GPU))
    weight = prepared(moved, of)
    host = KERNEL.prepare(q, LinearProblem(of, 512, 1024, torch.device("cpu"), BF16))
    assert torch.equal(weight.tensors["weight"].cpu(), host.tensors["weight"])
    assert torch.equal(KERNEL.restore(weight).codes, moved.codes)


def test_wrong_operands_are_one_line() -> None:
    weight = layer(scheme(128), 256, 512)
    inputs = KERNEL.quantize(torch.randn(4, 512, device=GPU, dtype=BF16), weight)
    with pytest.raises(
        HalfbyteError, match="x_scale must be contiguous float32 with one number for each of 4"
    ):
        KERNEL.run_quantized(inputs._replace(scales=inputs.scales.half()), weight)
