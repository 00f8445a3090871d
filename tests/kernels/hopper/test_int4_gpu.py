"""INT4 kernels on a Hopper GPU against float64 on the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.floats import encode_float8
from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.vllm_scales import rounded_weight
from halfbyte.kernels.hopper.blocks import pack_blocks
from halfbyte.kernels.hopper.config import fitted
from halfbyte.kernels.hopper.w4a8 import run_w4a8
from halfbyte.kernels.hopper.w4a8_config import FP16, W4A8Config
from halfbyte.kernels.hopper.w4a8_fp8_scales import run_w4a8_fp8_scales, w4a8_fp8_scales_linear
from halfbyte.kernels.hopper.w4a8_fp8_scales_codes import FORMAT, pack_codes
from halfbyte.kernels.hopper.w4a8_fp8_scales_config import TABLE
from halfbyte.kernels.hopper.w4a16 import run_w4a16
from halfbyte.kernels.hopper.w4a16_config import W4A16Config, table_for
from halfbyte.kernels.hopper.workspace import Spaces, reserve, space
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.hopper_int4 import HopperW4A8, HopperW4A8Fp32Sums, HopperW4A16
from halfbyte.kernels.problem import LinearProblem, Prepared
from halfbyte.kernels.quantized_inputs import QuantizedInputs
from halfbyte.kernels.reference import exact_weight
from halfbyte.schemes import PRESETS, Scheme

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
W4A8, W4A16, FP32_SUMS = HopperW4A8(), HopperW4A16(), HopperW4A8Fp32Sums()
BOTH = pytest.mark.parametrize("kernel", [W4A8, FP32_SUMS, W4A16], ids=lambda kernel: kernel.name)
Kernel = HopperW4A8 | HopperW4A16 | HopperW4A8Fp8Scales
# With fp8 scales: K in whole rounds of blocks, or with blocks left over, or less than a round.
FP8_SCALES_SHAPES = (
    (256, 512),
    (4096, 4096),
    (1040, 1088),
    (6144, 1088),
    (16, 128),
    (8192, 2176),
    (12288, 4096),
    (28672, 2176),
    (57376, 2176),
)
TOKENS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
BF16 = torch.bfloat16


def scheme(kernel: Kernel, group: int | None = 128, symmetric: bool = True, scale: str = "bf16") -> Scheme:
    of = PRESETS["w4a16" if kernel is W4A16 else "w4a8"]
    weights = replace(
        of.weights,
        granularity="group" if group else "channel",
        group_size=group,
        symmetric=symmetric,
        scale=scale,
    )
    return replace(of, weights=weights)


def layer(
    kernel: Kernel, n: int, k: int, of: Scheme | None = None, dtype: torch.dtype = BF16, seed: int = 0
) -> Prepared:
    torch.manual_seed(seed)
    of = of or scheme(kernel)
    return prepared(kernel, quantize(torch.randn(n, k, device=GPU) * 0.05, of.weights), of, dtype)


def prepared(kernel: Kernel, q: QuantizedTensor, of: Scheme, dtype: torch.dtype = BF16) -> Prepared:
    return kernel.prepare(q, LinearProblem(of, q.shape[0], q.shape[1], GPU, dtype))


def error(kernel: Kernel, x: torch.Tensor, weight: Prepared, bias: torch.Tensor | None = None) -> float:
    """Relative to float64 on the codes that the kernel was given."""
    exact = x.double()
    if isinstance(kernel, HopperW4A8):
        inputs = kernel.quantize(x, weight)
        exact = inputs.codes.double() * inputs.scales.double()
    poison = torch.full((x.shape[0], weight.problem.out_features), float("nan"), device=GPU, dtype=x.dtype)
    del poison  # the allocator gives its memory to the output
    found = kernel.run(x, weight, bias).double()
    wanted = exact @ exact_weight(kernel.restore(weight)).T.to(GPU)
    if bias is not None:
        wanted = wanted + bias.double()
    if x.shape[0] == 0:
        assert found.shape == wanted.shape
        return 0.0
    return ((found - wanted).norm() / wanted.norm()).item()


@BOTH
@pytest.mark.parametrize(
    ("n", "k"), [(256, 512), (4096, 4096), (1040, 1088), (16, 64), (8192, 1024), (20480, 256)]
)
def test_any_number_of_tokens(kernel: Kernel, n: int, k: int) -> None:
    weight = layer(kernel, n, k, scheme(kernel, 64 if k % 128 else 128))
    for tokens in TOKENS:
        assert error(kernel, torch.randn(tokens, k, device=GPU, dtype=BF16), weight) < 3e-3, tokens


@BOTH
@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", ["bf16", "f16", "f32"])
def test_kinds_of_weights(kernel: Kernel, group: int | None, symmetric: bool, scale: str) -> None:
    weight = layer(kernel, 656, 1536, scheme(kernel, group, symmetric, scale))
    for tokens in (1, 16, 40, 200, 300):
        x = torch.randn(tokens, 1536, device=GPU, dtype=BF16) + 0.3
        bias = torch.randn(656, device=GPU, dtype=BF16)
        assert error(kernel, x, weight, bias) < 3e-3, tokens


@BOTH
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("k", [640, 2176])  # less than a round of blocks; several, and a part of one
def test_many_tokens_on_many_features(kernel: Kernel, group: int, symmetric: bool, k: int) -> None:
    weight = layer(kernel, 28672, k, scheme(kernel, group, symmetric))
    for tokens in (64, 100, 200, 600):
        x = torch.randn(tokens, k, device=GPU, dtype=BF16) + 0.3
        assert error(kernel, x, weight) < 3e-3, tokens


@BOTH
@pytest.mark.parametrize("symmetric", [True, False])
def test_half_precision(kernel: Kernel, symmetric: bool) -> None:
    weight = layer(kernel, 512, 1024, scheme(kernel, symmetric=symmetric), torch.float16)
    for tokens in (3, 100):
        x = torch.randn(tokens, 1024, device=GPU, dtype=torch.float16)
        assert error(kernel, x, weight) < 1e-3


@BOTH
@pytest.mark.parametrize("tokens", [5, 64, 130])
def test_scales_of_every_size(kernel: Kernel, tokens: int) -> None:
    of = scheme(kernel, scale="f32")
    q = quantize(torch.randn(256, 1024, device=GPU), of.weights)
    q.scales[:, 0] = 1e-30
    q.scales[:, 1] = 0
    q.scales[::2, 2], q.scales[::2, 3] = 1e4, 1e-4
    x = torch.randn(tokens, 1024, device=GPU, dtype=BF16)
    assert error(kernel, x, prepared(kernel, q, of)) < 3e-3


@BOTH
@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_one_large_activation_per_row(kernel: Kernel, tokens: int) -> None:
    x = torch.randn(tokens, 2048, device=GPU, dtype=BF16)
    x[:, 77] = 448
    assert error(kernel, x, layer(kernel, 512, 2048)) < 3e-3


@BOTH
@pytest.mark.parametrize("code", [-8, -1, 0, 7])
def test_every_code_is_exact(kernel: Kernel, code: int) -> None:
    of = scheme(kernel)
    q = quantize(torch.randn(128, 256, device=GPU), of.weights)
    q.codes.fill_(code)
    q.scales.fill_(1)
    weight = prepared(kernel, q, of)
    for tokens in (4, 100, 300):
        x = torch.randint(-3, 4, (tokens, 256), device=GPU).to(BF16)
        wanted = (x.double().sum(1, keepdim=True) * code).expand(-1, 128).to(BF16)
        if isinstance(kernel, HopperW4A16):
            assert torch.equal(kernel.run(x, weight), wanted)
            continue
        sums = torch.zeros(tokens, 4, device=GPU)[:, :2]
        sums[:] = x.float().view(tokens, 2, 128).sum(-1)
        inputs = QuantizedInputs(x.to(torch.float8_e4m3fn), torch.ones(tokens, 1, device=GPU), sums)
        assert torch.equal(kernel.run_quantized(inputs, weight), wanted)


@BOTH
@pytest.mark.parametrize("tokens", [8, 16, 64, 300])
def test_nan_stays_in_its_row(kernel: Kernel, tokens: int) -> None:
    weight = layer(kernel, 4096, 2048)
    x = torch.randn(tokens, 2048, device=GPU, dtype=BF16)
    clean = kernel.run(x, weight)
    x[3, 5] = float("nan")
    found = kernel.run(x, weight)
    assert found[3].isnan().all()
    others = [row for row in range(tokens) if row != 3]
    assert torch.equal(found[others], clean[others])


@BOTH
@pytest.mark.parametrize("tokens", [1, 16, 64, 129, 500])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (8192, 8192)])
def test_the_same_bits_twice_and_in_a_graph(kernel: Kernel, tokens: int, n: int, k: int) -> None:
    weight = layer(kernel, n, k)
    x = torch.randn(tokens, k, device=GPU, dtype=BF16)
    first = kernel.run(x, weight)
    assert torch.equal(kernel.run(x, weight), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(3):  # kernels that start before the one ahead has ended
            out = kernel.run(x, weight)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, first)


@BOTH
def test_compiles_with_torch(kernel: Kernel) -> None:
    weight = layer(kernel, 256, 512)
    packed, factors = weight.tensors["weight"], weight.tensors.get("row_factors")
    x = torch.randn(4, 512, device=GPU, dtype=BF16)

    def w4a16(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.halfbyte.w4a16_linear(x, packed, None, 256, 128, BF16, False)

    def w4a8(codes: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        weights = (packed, factors, None)
        return torch.ops.halfbyte.w4a8_linear(codes, scales, sums, *weights, 256, 128, False, True, BF16)

    run, inputs = (w4a16, (x,)) if isinstance(kernel, HopperW4A16) else (w4a8, kernel.quantize(x, weight))
    kernel.run(x, weight)  # imports the op
    assert torch.equal(torch.compile(run, fullgraph=True)(*inputs), run(*inputs))


@BOTH
def test_packing_on_the_gpu_is_packing_on_the_cpu(kernel: Kernel) -> None:
    of = scheme(kernel)
    q = quantize(torch.randn(512, 1024), of.weights)
    moved = QuantizedTensor(q.format, q.codes.to(GPU), q.scales.to(GPU))
    weight = prepared(kernel, moved, of)
    host = kernel.prepare(q, LinearProblem(of, 512, 1024, torch.device("cpu"), BF16))
    for name, tensor in host.tensors.items():
        assert torch.equal(weight.tensors[name].cpu(), tensor), name
    assert torch.equal(kernel.restore(weight).codes, moved.codes)
    assert torch.equal(kernel.restore(weight).scales, moved.scales)


@pytest.mark.parametrize(("n", "k"), FP8_SCALES_SHAPES)
def test_fp8_scales_for_any_number_of_tokens(n: int, k: int) -> None:
    """Against the rounded weight: what is left is the output's rounding and the tensor cores' short sums."""
    kernel, of = HopperW4A8Fp8Scales(), scheme(W4A8)
    q = quantize(torch.randn(n, k - k % 128, device=GPU) * 0.05, of.weights)
    weight = kernel.prepare(q, LinearProblem(of, *q.codes.shape, GPU, BF16))
    assert torch.equal(kernel.restore(weight).codes, q.codes)
    exact = rounded_weight(q.codes, q.scales).double()
    for tokens in TOKENS[1:]:
        x = torch.randn(tokens, q.codes.shape[1], device=GPU, dtype=BF16)
        inputs = kernel.quantize(x, weight)
        wanted = inputs.codes.double() * inputs.scales.double() @ exact.T
        found = kernel.run_quantized(inputs, weight).double()
        assert ((found - wanted).norm() / wanted.norm()).item() < 5e-3, tokens


def test_every_fp8_scale_times_every_code() -> None:
    """Tokens with a single one give the weight back: what the definition rounds, NaN for a scale of NaN."""
    scales = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(256, 8)
    packed = pack_blocks(FORMAT, codes, pack_codes, scales[:, None], None).to(GPU)
    x = torch.eye(128, device=GPU).to(torch.float8_e4m3fn)
    ones = torch.ones(256, device=GPU)
    found = w4a8_fp8_scales_linear(x, ones[:128, None], packed, ones, None, BF16)
    is_nan = (scales & 0x7F) == 0x7F
    group = scales.view(torch.float8_e4m3fn).float()[:, None]
    wanted = encode_float8(torch.where(is_nan[:, None], 0, group) * codes, "e4m3").float()
    assert found.T[is_nan].isnan().all()
    assert torch.equal(found.T[~is_nan].float().cpu(), wanted[~is_nan])


def test_nan_stays_in_its_row_with_fp8_scales() -> None:
    kernel, of = HopperW4A8Fp8Scales(), scheme(W4A8)
    weight = prepared(kernel, quantize(torch.randn(1024, 2048, device=GPU), of.weights), of)
    for tokens in (8, 100, 300):
        x = torch.randn(tokens, 2048, device=GPU, dtype=BF16)
        clean = kernel.run(x, weight)
        assert torch.equal(kernel.run(x, weight), clean)
        x[3, 5] = float("nan")
        found = kernel.run(x, weight)
        assert found[3].isnan().all()
        others = [row for row in range(tokens) if row != 3]
        assert torch.equal(found[others], clean[others])


STREAMED = (
    W4A8Config(64, 128, stages=4, stage_blocks=2, stream=True),
    W4A8Config(128, 128, stages=4, parts=2, share=2, stream=True),
    W4A8Config(64, 192, stages=4, stage_blocks=2, stream=True),
    W4A8Config(64, 192, stages=4, stage_blocks=2, stream=True, fp16_sums=True),
    W4A16Config(64, 128, stages=4, stream=True),
)


@pytest.mark.parametrize("config", STREAMED, ids=str)
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(64, 18960, 1088), (64, 19200, 4096), (64, 35008, 1152), (130, 6000, 1088), (700, 1600, 4096)],
)
def test_tiles_divided_among_blocks(config: W4A8Config | W4A16Config, tokens: int, n: int, k: int) -> None:
    kernel = W4A8 if isinstance(config, W4A8Config) else W4A16
    weight = layer(kernel, n, k, scheme(kernel, 64))
    fmt = kernel.block_format(weight)
    fitting = fitted(config, fmt)
    assert fitting is not None
    assert fitting.schedule(tokens, n, -(-k // 128), fmt).streamed
    assert space(0, torch.cuda.current_stream().cuda_stream) is not None
    x = torch.randn(tokens, k, device=GPU, dtype=BF16)
    packed, outs = weight.tensors["weight"], [x.new_full((tokens, n), float("nan")) for _ in range(3)]
    exact = x.double()
    for out in outs:
        if isinstance(fitting, W4A8Config):
            inputs = W4A8.quantize(x, weight)
            exact = inputs.codes.double() * inputs.scales.double()
            run_w4a8(fitting, fmt, *inputs, packed, weight.tensors["row_factors"], None, out)
        else:
            run_w4a16(fitting, fmt, x, packed, None, out)
    wanted = exact @ exact_weight(kernel.restore(weight)).T.to(GPU)
    assert ((outs[0] - wanted).norm() / wanted.norm()).item() < 3e-3
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("tokens", "n"), [(128, 57376), (200, 57344), (500, 28672)])
def test_a_rest_of_features_is_multiplied_by_itself(tokens: int, n: int) -> None:
    weight = layer(W4A8, n, 2176)
    x, bias = torch.randn(tokens, 2176, device=GPU, dtype=BF16), torch.randn(n, device=GPU, dtype=BF16)
    fmt = W4A8.block_format(weight)
    config = FP16.choose(tokens, n, 2176, fmt)
    assert config.rest
    assert config.first_features(tokens, n, config.rest) < n
    assert error(W4A8, x, weight, bias) < 3e-3


def test_other_kernels_take_a_rest_too() -> None:
    tokens, n, k = 200, 57376, 2176
    x, bias = torch.randn(tokens, k, device=GPU, dtype=BF16), torch.randn(n, device=GPU, dtype=BF16)
    out = x.new_full((tokens, n), float("nan"))
    weight = layer(W4A16, n, k)
    fmt = W4A16.block_format(weight)
    config = table_for(fmt, BF16).choose(tokens, n, k, fmt)
    assert config.rest
    assert config.first_features(tokens, n, config.rest) < n
    run_w4a16(config, fmt, x, weight.tensors["weight"], bias, out)
    wanted = x.double() @ exact_weight(W4A16.restore(weight)).T.to(GPU) + bias.double()
    assert ((out - wanted).norm() / wanted.norm()).item() < 3e-3

    kernel, of = HopperW4A8Fp8Scales(), scheme(W4A8)
    weight = layer(kernel, n, k, of)
    cut = TABLE.choose(tokens, n, k, FORMAT)
    assert cut.rest
    assert cut.first_features(tokens, n, cut.rest) < n
    whole = replace(cut, rest=None)
    inputs, tensors = kernel.quantize(x, weight), weight.tensors
    outs = [torch.full_like(out, float("nan")) for _ in range(2)]
    for config, to in zip((whole, cut), outs, strict=True):
        operands = (inputs.codes, inputs.scales, tensors["weight"], tensors["channels"], bias, to)
        run_w4a8_fp8_scales(config, *operands)
    assert torch.equal(*outs)


@pytest.mark.parametrize("tokens", [64, 128, 300, 1100])
def test_sums_in_fp16_do_not_overflow(tokens: int) -> None:
    """Every product as large as it can be, for as many groups as are added up in fp16."""
    k, of = 28672, scheme(W4A8)
    q = quantize(torch.randn(8192, k, device=GPU), of.weights)
    q.codes.fill_(-8)
    q.scales.fill_(0.9921875)  # just below the power of two up to which a row's scales may go
    weight = prepared(W4A8, q, of)
    x = torch.ones(tokens, k, device=GPU, dtype=BF16)
    assert "row_factors" in weight.tensors
    found = W4A8.run(x, weight)
    assert torch.isfinite(found).all()
    # Sums grow by one part in 224 each time, and each time are rounded.
    assert error(W4A8, x, weight) < 1e-2


@pytest.mark.parametrize("k", [4096, 14336, 28672, 28800])
def test_sums_in_fp16_are_near_fp32_ones(k: int) -> None:
    """What fp16 adds to the error is about what bf16 results have anyway, for the longest sums kept in it."""
    weight = layer(W4A8, 4096, k)
    x = torch.randn(512, k, device=GPU, dtype=BF16)
    fp16, fp32 = error(W4A8, x, weight), error(FP32_SUMS, x, weight)
    assert fp32 < 1.8e-3
    assert fp32 < fp16 < 2.8e-3 if k <= 28672 else fp16 == fp32


@pytest.mark.parametrize(("size", "bound"), [(50, 3.5e-3), (200, 1.1e-2)])
def test_a_sum_of_large_numbers_that_cancel(size: int, bound: float) -> None:
    """Two inputs that many times as large as others, whose products cancel: the others keep the digits that fp16 has
    beside them. (Were the two not codes already, E4M3 would round each by up to a thirtieth, and more would be left.)
    """
    of = scheme(W4A8)
    q = quantize(torch.randn(512, 2048, device=GPU), of.weights)
    q.codes[:, 1500] = q.codes[:, 7] = 7
    q.scales[:] = q.scales.amax(1, keepdim=True)
    weight = prepared(W4A8, q, of)
    x = torch.randn(300, 2048, device=GPU, dtype=BF16)
    x[:, 7], x[:, 1500] = size, -size
    assert error(W4A8, x, weight) < bound


def test_each_owner_has_space_of_its_own() -> None:
    spaces = Spaces(0)
    owners = [*(("stream", number) for number in range(6)), *(("graph", number) for number in range(6))]
    given = [spaces.of(owner) for owner in owners]
    found = [one for one in given if one is not None]
    assert len(set(found)) == len(found) < len(owners)
    assert [spaces.of(owner) for owner in owners] == given


def test_graphs_use_a_space_of_their_own() -> None:
    reserve(0)
    seen = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            seen += [space(0, stream), space(0, stream)]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert space(0, torch.cuda.current_stream().cuda_stream) not in seen


@pytest.mark.parametrize("k", [2688, 5376])
def test_octets_of_several_tiles_keep_apart(k: int) -> None:
    weight = layer(W4A8, 43008, k, scheme(W4A8, 64, symmetric=False))
    x = torch.randn(32, k, device=GPU, dtype=BF16)
    first = W4A8.run(x, weight)
    assert error(W4A8, x, weight) < 3e-3
    assert all(torch.equal(W4A8.run(x, weight), first) for _ in range(50))


def test_streamed_tiles_in_a_graph_and_with_nan() -> None:
    weight = layer(W4A8, 57344, 1024)
    x = torch.randn(64, 1024, device=GPU, dtype=BF16)
    want = W4A8.run(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [W4A8.run(x, weight) for _ in range(3)]
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(out, want) for out in outs)
    x[7, 3] = torch.nan
    spoiled = W4A8.run(x, weight)
    assert spoiled[7].isnan().all()
    others = [token for token in range(64) if token != 7]
    assert torch.equal(spoiled[others], want[others])


def test_wrong_operands_are_one_line() -> None:
    weight = layer(W4A8, 256, 512)
    inputs = W4A8.quantize(torch.randn(4, 512, device=GPU, dtype=BF16), weight)
    with pytest.raises(
        HalfbyteError, match="x_scale must be contiguous float32 with one number for each of 4"
    ):
        W4A8.run_quantized(inputs._replace(scales=inputs.scales.half()), weight)
    with pytest.raises(HalfbyteError, match="x must be contiguous bfloat16 or float16, not float32"):
        W4A16.run(torch.randn(4, 512, device=GPU), layer(W4A16, 256, 512))
