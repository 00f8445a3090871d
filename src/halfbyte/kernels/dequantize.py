"""The kernel for everything: weights stay packed; strip by strip they become fp32 and are multiplied."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.float_strips import float_strips
from halfbyte.kernels.inputs import can_read, finish, read_inputs
from halfbyte.kernels.problem import LinearProblem, Prepared
from halfbyte.kernels.storage import compact, expand


class Dequantize:
    """Any scheme, shape, dtype and device. Sums are fp32; the whole weight never exists in fp32."""

    name = "dequantize"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return can_read(problem.scheme.activations)

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        return Prepared(problem, compact(q), input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem = prepared.problem
        return expand(prepared.tensors, problem.scheme.weights, problem.in_features)

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        problem = prepared.problem
        values, scales = read_inputs(x, problem.scheme.activations, prepared.input_scale)
        columns = values.T
        # The weight on the left: each strip then fills whole rows of the result.
        sums = values.new_empty(problem.out_features, x.shape[0])
        for rows, strip in self._strips(prepared):
            torch.mm(strip, columns, out=sums[rows])
        return finish(sums.T.contiguous(), scales, bias, x.dtype)

    def _strips(self, prepared: Prepared) -> Iterator[tuple[slice, torch.Tensor]]:
        """The weight to multiply by: rows, and fp32 ``[rows, in]``."""
        problem = prepared.problem
        return float_strips(prepared.tensors, problem.scheme.weights, problem.in_features)
