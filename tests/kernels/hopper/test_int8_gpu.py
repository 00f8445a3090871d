"""INT4 weights on INT8 tensor cores of a Hopper GPU: sums equal integer arithmetic, whatever the shape."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.kernels.hopper.config import Table, fitted
from halfbyte.kernels.hopper.w4a8_int8 import run_w4a8_int8, w4a8_int8_linear
from halfbyte.kernels.hopper.w4a8_int8_config import TABLE
from halfbyte.kernels.hopper_int8 import HopperW4A8Int8
from halfbyte.kernels.problem import LinearProblem, Prepared
from halfbyte.kernels.quantized_inputs import QuantizedInputs
from halfbyte.schemes import PRESETS, Scheme

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
KERNEL = HopperW4A8Int8()
TOKENS = (0, 1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 257, 512, 1000, 2048)
BF16 = torch.bfloat16
CHANNEL = TensorFormat("int4", "channel", symmetric=False, scale="bf16")
GROUPS = pytest.mark.parametrize("group", [128, 64, 32, 256, None])


def scheme(group: int | None) -> Scheme:
    two_level = PRESETS["w4a8-int8"]
    return replace(two_level, weights=two_level.weights.with_group_size(group) if group else CHANNEL)


@cache
def layer(n: int, k: int, group: int | None, dtype: torch.dtype = BF16) -> tuple[Prepared, torch.Tensor]:
    """A weight, and as float64 the integers that are multiplied: ``[k, n]``."""
    of = scheme(group)
    weight = torch.randn(n, k, device=GPU, generator=torch.Generator(GPU).manual_seed(n + k)) * 0.05
    q = quantize(weight, of.weights)
    return prepared(q, of, dtype), integers(q)


def prepared(q: QuantizedTensor, of: Scheme, dtype: torch.dtype = BF16) -> Prepared:
    return KERNEL.prepare(q, LinearProblem(of, q.shape[0], q.shape[1], GPU, dtype))


def integers(q: QuantizedTensor) -> torch.Tensor:
    assert q.zero_points is not None
    levels = q.codes.double().unflatten(-1, (q.scales.shape[1], -1)) - q.zero_points.double()[..., None]
    if q.outer_scales is not None:
        levels *= q.scales.double()[..., None]
    return levels.flatten(-2).T.contiguous()


def channels(q: QuantizedTensor) -> torch.Tensor:
    return (q.scales if q.outer_scales is None else q.outer_scales).float().reshape(1, -1)


def meant(inputs: QuantizedInputs, weight: Prepared, levels: torch.Tensor) -> torch.Tensor:
    """Integer sums, exact in float64, then the two scales in the kernel's order, each product rounded to fp32."""
    sums = inputs.codes.double() @ levels
    assert float(sums.abs().max() if len(sums) else 0) < 2**31
    return channels(KERNEL.restore(weight)) * (inputs.scales * sums.float())


@GROUPS
@pytest.mark.parametrize(
    ("n", "k"),
    [(4096, 4096), (1040, 1280), (16, 256), (28672, 2304), (6144, 2560), (57344, 1280), (8192, 768)],
)
def test_sums_are_those_of_integers(n: int, k: int, group: int | None) -> None:
    weight, levels = layer(n, k, group)
    generator = torch.Generator(GPU).manual_seed(0)
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device=GPU, dtype=BF16, generator=generator)
        inputs = KERNEL.quantize(x.abs() if tokens % 2 else x, weight)
        torch.full((tokens, n), float("nan"), device=GPU, dtype=BF16)  # the allocator gives it to the output
        found = KERNEL.run_quantized(inputs, weight)
        assert torch.equal(found, meant(inputs, weight, levels).to(BF16)), tokens


@pytest.mark.parametrize("config", TABLE.configurations(), ids=str)
@pytest.mark.parametrize("group", [128, None])
def test_every_configuration_of_the_table(config, group: int | None) -> None:  # type: ignore[no-untyped-def]
    weight, levels = layer(8192, 2304, group)
    fmt, tensors = KERNEL.block_format(weight), weight.tensors
    inputs = KERNEL.quantize(torch.randn(config.tokens + 3, 2304, device=GPU, dtype=BF16), weight)
    out = torch.full((config.tokens + 3, 8192), float("nan"), device=GPU, dtype=BF16)
    fits = fitted(config, fmt)
    assert fits is not None
    run_w4a8_int8(fits, fmt, *inputs, tensors["weight"], tensors["channels"], tensors.get("zeros"), None, out)
    assert torch.equal(out, meant(inputs, weight, levels).to(BF16))


@GROUPS
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_bias_in_both_dtypes(dtype: torch.dtype, group: int | None) -> None:
    weight, levels = layer(1040, 1280, group, dtype)
    bias = torch.randn(1040, device=GPU, dtype=dtype)
    for tokens in (1, 16, 100, 300):
        inputs = KERNEL.quantize(torch.randn(tokens, 1280, device=GPU, dtype=dtype), weight)
        found = KERNEL.run_quantized(inputs, weight, bias).double()
        wanted = meant(inputs, weight, levels).double() + bias.double()
        assert ((found - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-6).all()


@pytest.mark.parametrize("group", [128, None])
def test_the_largest_numbers_do_not_overflow(group: int | None) -> None:
    """Inputs and weights of one sign and full size, over as many inputs as int32 is sure to hold."""
    k = 131072
    of = scheme(group)
    q = quantize(torch.randn(64, k, device=GPU), of.weights)
    q.codes.fill_(7)
    assert q.zero_points is not None
    q.zero_points.fill_(-8)
    if group:
        q.scales.fill_(8)  # 15 * 8 = 120
    weight = prepared(q, of)
    for tokens in (3, 130):
        for size in (127, -127):
            codes = torch.full((tokens, k), size, device=GPU, dtype=torch.int8)
            ones = torch.ones(tokens, 1, device=GPU)
            inputs = QuantizedInputs(codes, ones, codes.sum(-1, keepdim=True, dtype=torch.int32))
            assert torch.equal(
                KERNEL.run_quantized(inputs, weight), meant(inputs, weight, integers(q)).to(BF16)
            )


@pytest.mark.parametrize("tokens", [8, 16, 64, 300])
def test_nan_stays_in_its_row(tokens: int) -> None:
    weight, _ = layer(4096, 4096, 128)
    x = torch.randn(tokens, 4096, device=GPU, dtype=BF16)
    clean = KERNEL.run(x, weight)
    x[3, 5] = float("nan")
    found = KERNEL.run(x, weight)
    assert found[3].isnan().all()
    others = [row for row in range(tokens) if row != 3]
    assert torch.equal(found[others], clean[others])


@GROUPS
def test_the_same_bits_in_a_graph_and_back_from_the_packed_form(group: int | None) -> None:
    weight, _ = layer(8192, 2304, group)
    restored = KERNEL.restore(weight)
    again = prepared(restored, scheme(group))
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in weight.tensors.items())
    for tokens in (1, 16, 64, 129, 500):
        x = torch.randn(tokens, 2304, device=GPU, dtype=BF16)
        first = KERNEL.run(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = KERNEL.run(x, weight)
        graph.replay()
        assert torch.equal(captured, first)


def test_operands_of_another_layout_are_refused() -> None:
    weight, _ = layer(4096, 4096, 128)
    inputs = KERNEL.quantize(torch.randn(4, 4096, device=GPU, dtype=BF16), weight)
    tensors = (weight.tensors["weight"], weight.tensors["channels"])
    zeros = torch.zeros(4096, device=GPU, dtype=torch.int32)
    for found, message in (
        ((inputs.codes.float(), inputs.scales, inputs.sums, *tensors, None), "x must be contiguous int8"),
        ((inputs.codes, inputs.scales[:2], inputs.sums, *tensors, None), "x_scale must be"),
        ((inputs.codes, inputs.scales, inputs.sums.long(), *tensors, None), "x_sum must be contiguous int32"),
        ((*inputs, *tensors, zeros), "for whole channels"),
        ((*inputs, tensors[0][:8], tensors[1], None), "weight must be packed"),
    ):
        with pytest.raises(HalfbyteError, match=message):
            w4a8_int8_linear(*found, None, 128, BF16)


def test_the_table_takes_every_kind_of_weight() -> None:
    table: Table = TABLE
    for group in (32, 64, 128, None):
        for tokens in TOKENS[1:]:
            assert table.choose(tokens, 4096, 4096, KERNEL.block_format(layer(16, 256, group)[0]))
