"""What a kernel is asked to do, what it makes of a weight, and what it must offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.schemes import Scheme


@dataclass(frozen=True)
class LinearProblem:
    """``y = quantize(x) @ weight.T + bias`` with numbers of ``scheme``, whose scale dtype is settled.

    dtype: of ``x`` and ``y`` (float32, bfloat16 or float16). device: where all of it lies.
    """

    scheme: Scheme
    out_features: int
    in_features: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Prepared:
    """A weight in the form that one kernel runs on. The form is the kernel's own and never goes to disk.

    tensors: by the names that the kernel gives them. input_scale: fp32 ``[1]`` of static activations, or
    none.
    """

    problem: LinearProblem
    tensors: Mapping[str, torch.Tensor]
    input_scale: torch.Tensor | None = None


class Kernel(Protocol):
    """One way to run a quantized linear layer."""

    name: str

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        """Whether this kernel takes the problem, and why not (empty if it does)."""
        ...

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        """The weight ``[out, in]`` in the kernel's form."""
        ...

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        """The inverse of :meth:`prepare`, bit for bit."""
        ...

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[M, in]`` to ``[M, out]`` in the problem's dtype; M may be 0. NaN and Inf stay in their row."""
        ...


def first_refusal(conditions: Iterable[tuple[bool, str]]) -> tuple[bool, str]:
    """What ``can_implement`` answers: the reason of the first condition that does not hold, or yes."""
    return next(((False, reason) for holds, reason in conditions if not holds), (True, ""))
