"""A mixture's experts on Hopper GPUs: what a linear kernel does with one weight, for all of them in one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from halfbyte.kernels.fused import gated, gated_quantize, quantize, routed_inputs, routed_rows
from halfbyte.kernels.hopper_fp8 import HopperFp8
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.hopper_int4 import HopperW4A8, HopperW4A8Fp32Scales, HopperW4A8Fp32Sums, HopperW4A16
from halfbyte.kernels.hopper_int8 import HopperW4A8Int8
from halfbyte.kernels.problem import Kernel, LinearProblem, Prepared
from halfbyte.kernels.quantized_inputs import sum_group
from halfbyte.kernels.routes import Routes

Rows = Sequence[torch.Tensor]
"""What a linear kernel's op takes of its inputs: codes, scales and sums, or inputs as they are."""
LinearKernel = TypeVar("LinearKernel", bound=Kernel)


@dataclass(frozen=True)
class PreparedExperts:
    """Weights of one problem, each as its linear kernel prepares it, one after the other in memory.

    stacked: what the grouped kernel reads, ``[experts, ...]``. experts: each with views of that.
    """

    experts: tuple[Prepared, ...]
    stacked: Mapping[str, torch.Tensor]

    @property
    def problem(self) -> LinearProblem:
        return self.experts[0].problem


class HopperExperts(ABC, Generic[LinearKernel]):
    """The grouped form of a linear kernel. Rows come, and go, in the order of :class:`Routes`; those of nobody are
    neither read nor written.
    """

    def __init__(self, linear: LinearKernel, inputs: int, *tensors: str) -> None:
        """inputs: how many tensors of a row the op takes: codes, scales, sums. tensors: names of those of the weight,
        besides ``weight``, as it takes them; those that a weight does not have are none.
        """
        self.linear = linear
        self.name = linear.name
        self._inputs = inputs
        self._tensors = ("weight", *tensors)

    def stack(self, experts: Sequence[Prepared]) -> PreparedExperts:
        """Experts prepared by the linear kernel, for one problem. Their own tensors can go afterwards."""
        alike = self._alike(experts)
        stacked = {
            name: torch.stack([each.tensors[name] for each in alike])
            for name in self._tensors
            if name in alike[0].tensors
        }
        if stacked["weight"].is_cuda:
            # Weights are read before the kernel ahead has ended, and that one may be the stacking.
            torch.cuda.current_stream(stacked["weight"].device).synchronize()
        views = (
            replace(each, tensors={**each.tensors, **{name: tensor[i] for name, tensor in stacked.items()}})
            for i, each in enumerate(alike)
        )
        return PreparedExperts(tuple(views), stacked)

    def _alike(self, experts: Sequence[Prepared]) -> Sequence[Prepared]:
        """The same weights in forms of one kind."""
        return experts

    def run(
        self,
        rows: Rows,
        prepared: PreparedExperts,
        routes: Routes,
        heights: Sequence[int],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[R, out]`` of ``[R, in]``. heights: those for which ``routes`` were found. bias: ``[experts, out]``."""
        tensors = (prepared.stacked.get(name) for name in self._tensors)
        given = (*rows[: self._inputs], *tensors, bias, routes.runs, routes.tiles, list(heights))
        return self._op()(*given, *self._settings(prepared))

    @abstractmethod
    def _op(self) -> Callable[..., torch.Tensor]:
        """The op: rows, the weight's tensors, bias, runs, tiles, heights, and then :meth:`_settings`."""

    @abstractmethod
    def _settings(self, prepared: PreparedExperts) -> tuple[Any, ...]:
        """What else it is told."""

    def route(self, x: torch.Tensor, prepared: PreparedExperts, routes: Routes) -> Rows:
        """Rows ``[R, in]`` of tokens ``[M, in]`` as :meth:`run` takes them."""
        return routed_inputs(x, routes, _sums_of(prepared))

    def rows(self, values: torch.Tensor, prepared: PreparedExperts) -> Rows:
        """Rows ``[R, in]`` as :meth:`run` takes them."""
        return quantize(values, _sums_of(prepared))

    def gated_rows(
        self, gate: torch.Tensor, up: torch.Tensor, activation: str, prepared: PreparedExperts
    ) -> Rows:
        """``activation(gate) * up`` as :meth:`run` takes it. activation: a value of ``fused.GATES``."""
        return gated_quantize(gate, up, activation, _sums_of(prepared))


class _W4A8(HopperExperts[HopperW4A8]):
    def __init__(self, linear: HopperW4A8) -> None:
        super().__init__(linear, 3, "row_factors")

    def _alike(self, experts: Sequence[Prepared]) -> Sequence[Prepared]:
        # Where fp16 does not hold one expert's scales, all have them in fp32.
        if len({"row_factors" in each.tensors for each in experts}) == 1:
            return experts
        exact = HopperW4A8Fp32Scales()
        return [exact.prepare(self.linear.restore(each), each.problem, each.input_scale) for each in experts]

    def _op(self) -> Callable[..., torch.Tensor]:
        from halfbyte.kernels.hopper.w4a8 import w4a8_experts

        return w4a8_experts

    def _settings(self, prepared: PreparedExperts) -> tuple[Any, ...]:
        problem, fmt = prepared.problem, self.linear.block_format(prepared.experts[0])
        zero_points = fmt.zeros is not None
        return problem.out_features, fmt.group_size, zero_points, self.linear.fp16_sums, problem.dtype


class _W4A8Fp8Scales(HopperExperts[HopperW4A8Fp8Scales]):
    def __init__(self) -> None:
        super().__init__(HopperW4A8Fp8Scales(), 2, "channels")

    def _op(self) -> Callable[..., torch.Tensor]:
        from halfbyte.kernels.hopper.w4a8_fp8_scales import w4a8_fp8_scales_experts

        return w4a8_fp8_scales_experts

    def _settings(self, prepared: PreparedExperts) -> tuple[Any, ...]:
        return (prepared.problem.dtype,)


class _Fp8(HopperExperts[HopperFp8]):
    def __init__(self) -> None:
        super().__init__(HopperFp8(), 2, "channels")

    def _op(self) -> Callable[..., torch.Tensor]:
        from halfbyte.kernels.hopper.w8a8 import w8a8_experts

        return w8a8_experts

    def _settings(self, prepared: PreparedExperts) -> tuple[Any, ...]:
        return (prepared.problem.dtype,)


class _W4A8Int8(HopperExperts[HopperW4A8Int8]):
    def __init__(self) -> None:
        super().__init__(HopperW4A8Int8(), 3, "channels", "zeros")

    def _op(self) -> Callable[..., torch.Tensor]:
        from halfbyte.kernels.hopper.w4a8_int8 import w4a8_int8_experts

        return w4a8_int8_experts

    def _settings(self, prepared: PreparedExperts) -> tuple[Any, ...]:
        fmt = self.linear.block_format(prepared.experts[0])
        return fmt.group_size if fmt.scale else None, prepared.problem.dtype


class _W4A16(HopperExperts[HopperW4A16]):
    def __init__(self) -> None:
        super().__init__(HopperW4A16(), 1)

    def _op(self) -> Callable[..., torch.Tensor]:
        from halfbyte.kernels.hopper.w4a16 import w4a16_experts

        return w4a16_experts

    def _settings(self, prepared: PreparedExperts) -> tuple[Any, ...]:
        fmt = self.linear.block_format(prepared.experts[0])
        return prepared.problem.out_features, fmt.group_size, fmt.scale, fmt.zeros is not None

    def route(self, x: torch.Tensor, prepared: PreparedExperts, routes: Routes) -> Rows:
        return (routed_rows(x, routes),)

    def rows(self, values: torch.Tensor, prepared: PreparedExperts) -> Rows:
        return (values.contiguous(),)

    def gated_rows(
        self, gate: torch.Tensor, up: torch.Tensor, activation: str, prepared: PreparedExperts
    ) -> Rows:
        return (gated(gate, up, activation),)


def _sums_of(prepared: PreparedExperts) -> int | None:
    return sum_group(prepared.problem.scheme)


EXPERTS: tuple[HopperExperts, ...] = (
    _W4A8(HopperW4A8()),
    _W4A8(HopperW4A8Fp32Sums()),
    _W4A8Fp8Scales(),
    _W4A16(),
    _W4A8Int8(),
    _Fp8(),
)


def experts_of(linear: str) -> HopperExperts | None:
    """The grouped form of the linear kernel of that name, if it has one."""
    return next((kernel for kernel in EXPERTS if kernel.name == linear), None)
