"""INT4 weights on the CPU by torch's own INT4 kernel, for BF16 models.

torch's kernel multiplies BF16 inputs with codes times BF16 scales, all of it exact in fp32, sums in fp32 and
rounds the sum to BF16. (It also takes float32, by a scalar loop 30 times slower.) That is W4A16 as it should
be. Around it:

- Quantized inputs are E4M3 or INT8 codes, which BF16 holds exactly, but their sum still has to be multiplied
  by the token's scale, so its rounding must not count. One more group of columns lets the kernel say what it
  rounded off: the second time the group's zero point is minus the first result, and what comes out is the
  rest, again rounded to 8 bits. Together they hold the fp32 sum to 2^-16.
- A zero point times its scale takes 12 bits, more than BF16 has. What is missing (at most 4 bits, exact in
  BF16) is multiplied by the group's sum of inputs and added.
- A bias is added to the rounded result of W4A16, as a second operation in the model's dtype would.
- From some number of rows on, a strip of the weight in fp32 and a matrix product are faster, and used.
"""

from __future__ import annotations

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.inputs import finish, read_inputs
from halfbyte.kernels.int4_layout import ROW_MULTIPLE, Int4Layout, int4_layout
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal

GROUP_SIZES = (256, 128, 64, 32)

# Measured on two AVX-512 cores at 576 x 576 to 4096 x 4096: above these, multiplying fp32 strips is faster.
_MOST_ROWS_PLAIN = 64
_MOST_ROWS_QUANTIZED = 4
_STRIP_VALUES = 1 << 19


class CpuInt4:
    """W4A16 and W4A8 with BF16 scales per group (or channel) on the CPU, in BF16."""

    name = "cpu-int4"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        weights = problem.scheme.weights
        return first_refusal(
            (
                (problem.device.type == "cpu", f"runs on the CPU, not on {problem.device.type}"),
                (
                    problem.dtype == torch.bfloat16,
                    f"torch's INT4 kernel is fast in bfloat16 only, not in {problem.dtype}",
                ),
                (
                    weights.element == "int4" and weights.outer is None,
                    "weights must be INT4 with one level of scales",
                ),
                (weights.scale == "bf16", f"scales must be bf16, not {weights.scale}"),
                (
                    _group_size(weights, problem.in_features) is not None,
                    f"groups must be of {_words(GROUP_SIZES)} inputs",
                ),
                (
                    problem.out_features % ROW_MULTIPLE == 0,
                    f"out_features {problem.out_features} must be a multiple of {ROW_MULTIPLE}",
                ),
                (
                    _scales_last(problem.scheme.activations),
                    "inputs must be plain, or E4M3 or INT8 per token or tensor",
                ),
                (int4_layout() is not None, "this torch keeps INT4 codes in an unknown order"),
            )
        )

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        group = _group_size(q.format, problem.in_features)
        assert group is not None
        repeats = problem.in_features // group // q.scales.shape[1]
        scales = q.scales.repeat_interleave(repeats, 1).T
        zero_points = None if q.zero_points is None else q.zero_points.repeat_interleave(repeats, 1).T
        codes = q.codes + 8
        pairs = scales.new_zeros(*scales.shape, 2)
        pairs[..., 0] = scales
        tensors = {}
        if zero_points is not None:
            offsets = -zero_points.float() * scales.float()
            pairs[..., 1] = offsets
            tensors["zeros"] = zero_points.contiguous()
            tensors["rest"] = offsets - pairs[..., 1].float()
        if problem.scheme.activations is not None:
            codes = torch.nn.functional.pad(codes, (0, group), value=8)
            pairs = torch.cat([pairs, pairs.new_zeros(1, *pairs.shape[1:])])
        tensors["codes"] = _layout().pack(codes)
        tensors["pairs"] = pairs
        return Prepared(problem, tensors, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        fmt, inputs = prepared.problem.scheme.weights, prepared.problem.in_features
        packed = prepared.tensors["codes"]
        strips = [s.T for _, s in _layout().unpack(packed, inputs, torch.int8, packed.shape[0])]
        groups = inputs // _stored_group(fmt, inputs)
        step = _groups(prepared) // groups
        scales = prepared.tensors["pairs"][: _groups(prepared) : step, :, 0].T.contiguous()
        zeros = prepared.tensors.get("zeros")
        zeros = None if zeros is None else zeros[::step].T.contiguous()
        return QuantizedTensor(fmt, torch.cat(strips).sub_(8), scales, zeros)

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        activations = prepared.problem.scheme.activations
        if x.shape[0] == 0:
            return x.new_empty(0, prepared.problem.out_features)
        if activations is None and x.shape[0] <= _MOST_ROWS_PLAIN:
            result = _multiply(x.contiguous(), prepared)
            if "rest" in prepared.tensors:
                result = result.float().add_(_rest(x.float(), prepared)).to(x.dtype)
            return result if bias is None else result.add_(bias)
        values, scales = read_inputs(x, activations, prepared.input_scale)
        if x.shape[0] <= _MOST_ROWS_QUANTIZED:
            sums = _multiply_twice(values.to(torch.bfloat16), prepared)
            if "rest" in prepared.tensors:
                sums.add_(_rest(values, prepared))
        else:
            sums = _multiply_strips(values, prepared)
        return finish(sums, scales, bias, x.dtype)


def _multiply(x: torch.Tensor, prepared: Prepared, pairs: torch.Tensor | None = None) -> torch.Tensor:
    """BF16 ``[M, K]`` times the packed weight, rounded to BF16."""
    pairs = prepared.tensors["pairs"] if pairs is None else pairs
    group = prepared.problem.in_features // _groups(prepared)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, prepared.tensors["codes"], group, pairs)


def _multiply_twice(codes: torch.Tensor, prepared: Prepared) -> torch.Tensor:
    """BF16 codes ``[M, in]`` times the weight, fp32: the rounded product plus what was rounded off."""
    inputs, groups = prepared.problem.in_features, _groups(prepared)
    wide = torch.nn.functional.pad(codes, (0, inputs // groups))
    rounded = _multiply(wide, prepared)
    wide[:, inputs] = 1
    pairs = prepared.tensors["pairs"].clone()
    sums = rounded.float()
    for row in range(codes.shape[0]):
        torch.neg(rounded[row], out=pairs[groups, :, 1])
        sums[row].add_(_multiply(wide[row : row + 1], prepared, pairs)[0])
    return sums


def _multiply_strips(values: torch.Tensor, prepared: Prepared) -> torch.Tensor:
    """fp32 ``[M, in]`` times the weight, fp32, a strip of the weight at a time."""
    inputs, groups = prepared.problem.in_features, _groups(prepared)
    scales = prepared.tensors["pairs"][:groups, :, 0].float()
    zeros = prepared.tensors.get("zeros")
    sums = values.new_empty(values.shape[0], prepared.problem.out_features)
    packed = prepared.tensors["codes"]
    for rows, strip in _layout().unpack(packed, inputs, torch.float32, _STRIP_VALUES // inputs):
        by_group = strip.view(groups, -1, strip.shape[1])
        by_group.sub_(8 if zeros is None else zeros[:, None, rows] + 8).mul_(scales[:, None, rows])
        sums[:, rows] = values @ strip
    return sums


def _rest(values: torch.Tensor, prepared: Prepared) -> torch.Tensor:
    """What zero points times scales exceed BF16 by, times the inputs ``[M, in]`` of each group."""
    rest = prepared.tensors["rest"]
    return values.unflatten(-1, (rest.shape[0], -1)).sum(-1) @ rest


def _groups(prepared: Prepared) -> int:
    """Groups of inputs that the kernel sees, without the one that is added for quantized inputs."""
    problem = prepared.problem
    group = _group_size(problem.scheme.weights, problem.in_features)
    assert group is not None
    return problem.in_features // group


def _stored_group(fmt: TensorFormat, inputs: int) -> int:
    return fmt.group_size or inputs


def _group_size(fmt: TensorFormat, inputs: int) -> int | None:
    """The group size to run with: the format's own, or any that divides a channel; none if there is none."""
    if fmt.granularity == "channel":
        return next((size for size in GROUP_SIZES if inputs % size == 0), None)
    return fmt.group_size if fmt.granularity == "group" and fmt.group_size in GROUP_SIZES else None


def _scales_last(activations: ActivationFormat | None) -> bool:
    """Whether the inputs' scales can wait until the products are summed."""
    if activations is None:
        return True
    return activations.element in ("e4m3", "int8") and activations.granularity in ("token", "tensor")


def _layout() -> Int4Layout:
    layout = int4_layout()
    assert layout is not None
    return layout


def _words(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sorted(sizes)[:-1]))} or {max(sizes)}"
