from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halfbyte.algorithms.gptq import gptq
from halfbyte.algorithms.output_error import output_error
from halfbyte.algorithms.rtn import rtn
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats.columns import ColumnRounding
from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.vllm_rounding import VllmRounding
from halfbyte.formats.vllm_scales import VLLM_W4A8, settle, vllm_dequantize
from tests.formats.hostile import FORMATS, bits

ALL = pytest.mark.parametrize("name", FORMATS)
PER_ROW = [n for n, f in FORMATS.items() if f.granularity in ("channel", "group") and f.outer != "tensor"]
SIZE = 128
CHANNEL = TensorFormat("int4", "channel", scale="f32")


def weight_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def moment_of(size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """Of inputs that depend on each other and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator) * 0.1 + torch.eye(size)
    inputs = torch.randn(4 * size, size, generator=generator) @ mix
    inputs = inputs * torch.exp(torch.randn(size, generator=generator))
    return inputs.T @ inputs / len(inputs)


def textbook(
    weight: torch.Tensor,
    moment: torch.Tensor,
    damping: float,
    nearest: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """GPTQ as the paper derives it: after each column, the inverse of the Hessian of those that are left, float64.

    nearest: what the values of a column (float64 ``[out]``, the column's number) are rounded to.
    """
    left, hessian = weight.double(), moment.double()
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    order = sorted(range(len(moment)), key=lambda i: -float(moment[i, i]))
    rounded = torch.empty_like(left)
    for step, column in enumerate(order):
        remaining = order[step:]
        inverse = torch.linalg.inv(hessian[remaining][:, remaining])
        rounded[:, column] = nearest(left[:, column], column).double()
        error = (left[:, column] - rounded[:, column]) / inverse[0, 0]
        left[:, remaining] -= error[:, None] * inverse[0]
    return rounded


@ALL
def test_it_is_the_papers_algorithm(name: str) -> None:
    weight, moment, fmt = weight_of(4, SIZE), moment_of(), FORMATS[name]
    grid = choose_grid(Ranges.of(weight, fmt), fmt)
    rounding = ColumnRounding.of(fmt, grid, weight.shape)

    def nearest(values: torch.Tensor, column: int) -> torch.Tensor:
        return rounding.round(values.float()[:, None], slice(column, column + 1))[1][:, 0]

    result = gptq(weight, fmt, moment, damping=0.05)
    assert (result.damping, result.fallback) == ((0.05,), (None,))
    wanted = textbook(weight, moment, 0.05, nearest).float()
    assert torch.equal(dequantize(result.quantized), wanted)
    for found, chosen in (
        (result.quantized.scales, grid.scales),
        (result.quantized.zero_points, grid.zero_points),
        (result.quantized.outer_scales, grid.outer_scales),
    ):
        assert (found is None and chosen is None) or torch.equal(bits(found), bits(chosen))


def test_it_is_the_papers_algorithm_on_the_numbers_of_vllms_kernel() -> None:
    weight, moment = weight_of(4, 256), moment_of(256)
    scales = settle(rtn(weight, VLLM_W4A8).scales)
    codes = torch.arange(-8, 8, dtype=torch.int8)[:, None, None].expand(16, *weight.shape)
    numbers = torch.stack([vllm_dequantize(QuantizedTensor(VLLM_W4A8, code, scales)) for code in codes])

    def nearest(values: torch.Tensor, column: int) -> torch.Tensor:
        choices = numbers[:, :, column]
        return choices.gather(0, (choices - values).abs().argmin(0, keepdim=True))[0]

    result = gptq(weight, VLLM_W4A8, moment, rounding=VllmRounding.of(scales))
    assert torch.equal(result.quantized.scales, scales)
    assert torch.equal(vllm_dequantize(result.quantized), textbook(weight, moment, 0.01, nearest).float())


@ALL
def test_outputs_are_better_than_with_rtn(name: str) -> None:
    weight, moment, fmt = weight_of(16, 256), moment_of(256), FORMATS[name]
    plain, found = rtn(weight, fmt), gptq(weight, fmt, moment).quantized
    errors = [output_error(weight, dequantize(q), moment) for q in (found, plain)]
    assert errors[0] < errors[1] * 0.95


def test_rounding_to_the_kernels_numbers_is_better_than_to_the_scales_alone() -> None:
    weight, moment = weight_of(16, 256), moment_of(256)
    scales = settle(rtn(weight, VLLM_W4A8).scales)
    aware = gptq(weight, VLLM_W4A8, moment, rounding=VllmRounding.of(scales)).quantized
    unaware = gptq(weight, VLLM_W4A8, moment, grid=Grid(scales)).quantized
    errors = [output_error(weight, vllm_dequantize(q), moment) for q in (aware, unaware)]
    assert errors[0] < errors[1]


@ALL
@pytest.mark.parametrize("moment", [torch.eye(SIZE), torch.diag(torch.rand(SIZE) + 0.1)], ids=["one", "any"])
def test_independent_inputs_are_rounded_to_nearest(name: str, moment: torch.Tensor) -> None:
    weight, fmt = weight_of(6, SIZE), FORMATS[name]
    assert torch.equal(bits(gptq(weight, fmt, moment).quantized.codes), bits(rtn(weight, fmt).codes))


def test_the_order_of_inputs_does_not_show() -> None:
    weight, moment = weight_of(6, SIZE), moment_of()
    shuffled = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))
    there = gptq(weight[:, shuffled], CHANNEL, moment[shuffled][:, shuffled]).quantized
    assert torch.equal(there.codes, gptq(weight, CHANNEL, moment).quantized.codes[:, shuffled])


@pytest.mark.parametrize("block", [1, 7, 128, 1000])
def test_blocks_do_not_show(block: int) -> None:
    weight, moment, fmt = weight_of(6, 256), moment_of(256), FORMATS["w4a8"]
    found = gptq(weight, fmt, moment, block=block).quantized
    assert torch.equal(found.codes, gptq(weight, fmt, moment, block=64).quantized.codes)


@pytest.mark.parametrize("name", PER_ROW)
def test_rows_do_not_know_of_each_other(name: str) -> None:
    weight, moment, fmt = weight_of(23, 256), moment_of(256), FORMATS[name]
    together = gptq(weight, fmt, moment).quantized
    apart = [gptq(rows, fmt, moment).quantized.codes for rows in weight.split([1, 16, 6])]
    assert torch.equal(bits(together.codes), torch.cat([bits(codes) for codes in apart]))


@ALL
def test_stacks_equal_their_members(name: str) -> None:
    """One of them with a moment that is of no use."""
    weight, fmt = weight_of(3, 5, SIZE), FORMATS[name]
    moment = torch.stack([moment_of(seed=1), torch.full((SIZE, SIZE), torch.nan), moment_of(seed=2)])
    stack = gptq(weight, fmt, moment)
    assert stack.damping == (0.01, None, 0.01)
    for i in range(3):
        alone = gptq(weight[i], fmt, moment[i])
        assert torch.equal(bits(stack.quantized.codes[i]), bits(alone.quantized.codes))
        assert torch.equal(bits(stack.quantized.scales[i]), bits(alone.quantized.scales))
        assert stack.fallback[i] == alone.fallback[0]


def test_members_may_share_a_moment() -> None:
    weight, moment, fmt = weight_of(2, 2, 5, 256), moment_of(256), FORMATS["w4a8"]
    stack = gptq(weight, fmt, moment)
    assert (stack.damping, stack.fallback) == ((0.01,) * 4, (None,) * 4)
    alone = torch.stack([gptq(member, fmt, moment).quantized.codes for member in weight.flatten(0, 1)])
    assert torch.equal(stack.quantized.codes.flatten(0, 1), alone)


@pytest.mark.parametrize(
    ("moment", "reason"),
    [
        (torch.zeros(SIZE, SIZE), "no input was ever other than zero"),
        (torch.full((SIZE, SIZE), torch.nan), "NaN or Inf"),
        (torch.diag(torch.full((SIZE,), torch.inf)), "NaN or Inf"),
        (
            torch.ones(SIZE, SIZE) * 9
            - 8 * torch.eye(SIZE)
            - torch.ones(SIZE, SIZE) * 15 * (1 - torch.eye(SIZE)),
            "definite",
        ),
    ],
)
@ALL
def test_useless_moments_leave_rtn_and_a_reason(name: str, moment: torch.Tensor, reason: str) -> None:
    weight, fmt = weight_of(6, SIZE), FORMATS[name]
    result = gptq(weight, fmt, moment)
    assert reason in str(result.fallback[0])
    assert result.damping == (None,)
    assert torch.equal(bits(result.quantized.codes), bits(rtn(weight, fmt).codes))


@ALL
def test_fewer_tokens_than_inputs_are_no_obstacle(name: str) -> None:
    inputs = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
    weight, moment, fmt = weight_of(6, SIZE), inputs.T @ inputs, FORMATS[name]
    result = gptq(weight, fmt, moment)
    assert result.fallback == (None,)
    found, plain = (output_error(weight, dequantize(q), moment) for q in (result.quantized, rtn(weight, fmt)))
    assert found < plain


def test_inputs_that_were_always_zero_are_rounded_to_nearest_and_change_nothing() -> None:
    weight, moment = weight_of(6, 96), moment_of(96)
    dead = torch.arange(96) % 5 == 2
    moment[dead], moment[:, dead] = 0.0, 0.0
    grid = choose_grid(Ranges.of(weight, CHANNEL), CHANNEL)
    codes = gptq(weight, CHANNEL, moment, grid=grid, damping=0.0).quantized.codes
    assert torch.equal(codes[:, dead], rtn(weight, CHANNEL).codes[:, dead])
    others = gptq(weight[:, ~dead], CHANNEL, moment[~dead][:, ~dead], grid=grid, damping=0.0).quantized.codes
    assert torch.equal(codes[:, ~dead], others)


def test_any_multiple_of_the_moment_does() -> None:
    weight, moment, fmt = weight_of(6, 256), moment_of(256), FORMATS["w4a8"]
    codes = gptq(weight, fmt, moment).quantized.codes
    assert torch.equal(codes, gptq(weight, fmt, moment * 2.0**30).quantized.codes)
    assert torch.equal(codes, gptq(weight, fmt, moment * 2.0**-30).quantized.codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_and_nothing_is_overwritten(dtype: torch.dtype) -> None:
    weight, moment, fmt = weight_of(6, 256).to(dtype), moment_of(256), FORMATS["w4a8"]
    before = weight.clone(), moment.clone()
    first = gptq(weight, fmt, moment).quantized
    assert torch.equal(first.codes, gptq(weight.float(), fmt, moment).quantized.codes)
    assert torch.equal(weight, before[0])
    assert torch.equal(moment, before[1])


@ALL
def test_extreme_weights_stay_finite(name: str) -> None:
    weight, fmt = weight_of(4, SIZE), FORMATS[name]
    weight[0], weight[1, ::2], weight[2] = 0.0, 1e30, 1e-38
    assert dequantize(gptq(weight, fmt, moment_of()).quantized).isfinite().all()


def test_other_weights_take_part_in_a_shared_outer_scale() -> None:
    weight, moment, fmt = weight_of(4, SIZE), moment_of(), FORMATS["nvfp4"]
    found = gptq(weight, fmt, moment, elsewhere=3.0).quantized.outer_scales
    assert found is not None
    assert torch.equal(found, rtn(weight, fmt, elsewhere=3.0).outer_scales)


def test_what_does_not_fit_is_refused() -> None:
    weight, moment, fmt = weight_of(2, 3, 128), moment_of(), FORMATS["w4a8"]
    grid = choose_grid(Ranges.of(weight, fmt), fmt)
    with pytest.raises(HalfbyteError, match=r"\[64, 64\] does not fit a weight \[2, 3, 128\]"):
        gptq(weight, fmt, moment[:64, :64])
    with pytest.raises(HalfbyteError, match=r"accepted: \[128, 128\] or \[2, 128, 128\]"):
        gptq(weight, fmt, moment.expand(3, 128, 128))
    with pytest.raises(HalfbyteError, match="not both"):
        gptq(weight, fmt, moment, grid=grid, rounding=ColumnRounding.of(fmt, grid, weight.shape))
    with pytest.raises(HalfbyteError, match="blocks of 0"):
        gptq(weight, fmt, moment, block=0)
    with pytest.raises(HalfbyteError, match="damping"):
        gptq(weight, fmt, moment, damping=-1.0)
    with pytest.raises(NonFiniteError):
        gptq(weight.index_fill(-1, torch.tensor([5]), torch.nan), fmt, moment)


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "stack"])
def test_a_gpu_gives_the_same(name: str, lead: tuple[int, ...]) -> None:
    """But for values that lie on a boundary, where sums in another order decide."""
    fmt, weight = FORMATS[name], weight_of(*lead, 100, 512)
    moment = torch.stack([moment_of(512, seed) for seed in range(3)]) if lead else moment_of(512)
    wanted = gptq(weight, fmt, moment)
    found = gptq(weight.cuda(), fmt, moment.cuda())
    assert (found.damping, found.fallback) == (wanted.damping, wanted.fallback)
    assert torch.equal(bits(found.quantized.scales.cpu()), bits(wanted.quantized.scales))
    codes = bits(found.quantized.codes.cpu())
    assert (codes != bits(wanted.quantized.codes)).float().mean() < 0.005
    errors = [
        output_error(weight, dequantize(q), moment) for q in (wanted.quantized, on_cpu(found.quantized))
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


def on_cpu(q: QuantizedTensor) -> QuantizedTensor:
    parts = (q.scales, q.zero_points, q.outer_scales)
    return QuantizedTensor(q.format, q.codes.cpu(), *(None if part is None else part.cpu() for part in parts))  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers_of_vllms_kernel() -> None:
    weight, moment = weight_of(100, 256), moment_of(256)
    rounding = VllmRounding.of(settle(rtn(weight, VLLM_W4A8).scales))
    wanted = gptq(weight, VLLM_W4A8, moment, rounding=rounding).quantized
    there = VllmRounding.of(rounding.grid.scales.cuda())
    found = gptq(weight.cuda(), VLLM_W4A8, moment.cuda(), rounding=there).quantized
    assert (found.codes.cpu() != wanted.codes).float().mean() < 0.005
