"""What every kernel is held to: the scheme's arithmetic in float64, as plain as it can be written."""

from __future__ import annotations

import torch

from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.floats import decode_e2m1
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import scale_values
from halfbyte.formats.spec import ActivationFormat
from halfbyte.formats.tiles import Tiling
from halfbyte.kernels.inputs import can_read
from halfbyte.kernels.problem import LinearProblem, Prepared


def reference_linear(
    x: torch.Tensor,
    q: QuantizedTensor,
    activations: ActivationFormat | None = None,
    *,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [M, in]`` times the weight ``[out, in]``, float64 ``[M, out]``.

    Scales are exact: every input code times its own scale, every weight code times its group's. A kernel that
    sums each group in fp32 and adds the sums times their scale differs by the order and rounding of fp32 sums
    alone.
    """
    result = _inputs(x, activations, input_scale) @ exact_weight(q).T
    return result if bias is None else result + bias.double()


def exact_weight(q: QuantizedTensor) -> torch.Tensor:
    """``(code - zero_point) * scale * outer_scale`` without any rounding, float64 ``[..., out, in]``."""
    tiling = Tiling.of(q.shape, q.format)
    codes = decode_e2m1(q.codes) if q.format.element == "e2m1" else q.codes
    values = tiling.tiles(codes.double())
    if q.zero_points is not None:
        values = values - tiling.per_tile(q.zero_points)
    values = values * tiling.per_tile(scale_values(q.scales)).double()
    if q.outer_scales is not None:
        values = values * tiling.per_tile(q.outer_scales.broadcast_to(q.scales.shape)).double()
    return tiling.restore(values)


class Reference:
    """The definition as a kernel: exact and slow. For comparison; it is never chosen by itself."""

    name = "reference"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return can_read(problem.scheme.activations)

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        named = {"codes": q.codes, "scales": q.scales, "zeros": q.zero_points, "outer": q.outer_scales}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        return Prepared(problem, tensors, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        t = prepared.tensors
        return QuantizedTensor(
            prepared.problem.scheme.weights, t["codes"], t["scales"], t.get("zeros"), t.get("outer")
        )

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        result = reference_linear(
            x,
            self.restore(prepared),
            prepared.problem.scheme.activations,
            input_scale=prepared.input_scale,
            bias=bias,
        )
        return result.to(x.dtype)


def _inputs(x: torch.Tensor, fmt: ActivationFormat | None, input_scale: torch.Tensor | None) -> torch.Tensor:
    if fmt is None:
        return x.double()
    codes, scales = quantize_activations(x, fmt, input_scale)
    size = fmt.group_size or x.shape[-1]
    groups = codes.double().unflatten(-1, (-1, size))
    return (groups * scales.double().unsqueeze(-1)).flatten(-2)
