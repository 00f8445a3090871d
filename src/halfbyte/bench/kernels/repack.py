"""Bringing a quantized weight into a kernel's own form, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.bench.kernels import ours
from halfbyte.bench.kernels.accuracy import WrongResultError
from halfbyte.bench.kernels.ceilings import Work
from halfbyte.bench.kernels.contender import MissingError
from halfbyte.bench.kernels.operands import Operands, Shape
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.schemes import Scheme

OP = "repack"


def pairs(
    shapes: Sequence[Shape], group_size: int | None, device: torch.device
) -> list[tuple[Kernel, Scheme]]:
    """Every GPU kernel with every scheme that it takes on at least one of the shapes."""
    found = []
    for names in ours.SCHEMES.values():
        for name in names:
            scheme = ours.scheme_of(name, group_size)
            problems = [LinearProblem(scheme, *shape, device, torch.bfloat16) for shape in shapes]
            able = {kernel.name: kernel for problem in problems for kernel in ours.gpu_kernels(problem)}
            found += [(kernel, scheme) for kernel in able.values()]
    return found


def measure(operands: Operands, kernel: Kernel, scheme: Scheme, passes: int) -> tuple[Work, list[float]]:
    """Microseconds of ``kernel.prepare`` on codes of one byte each, host time included, after a first call.

    Errors: MissingError, a shape that it does not take; WrongResultError, a weight that does not come back bit for bit.
    """
    weight = operands.quantized(scheme.weights)
    problem = LinearProblem(scheme, *operands.shape, operands.device, torch.bfloat16)
    able, reason = kernel.can_implement(problem)
    if not able:
        raise MissingError(reason)
    prepared = kernel.prepare(weight, problem)
    if not _same(kernel.restore(prepared), weight):
        raise WrongResultError("restore does not give back what prepare was given")
    times = []
    for _ in range(passes):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        kernel.prepare(weight, problem)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    nbytes = sum(t.nbytes for t in (*_parts(weight), *prepared.tensors.values()) if t is not None)
    return Work(nbytes=nbytes, operations=0), times


def _parts(weight: QuantizedTensor) -> tuple[torch.Tensor | None, ...]:
    return weight.codes, weight.scales, weight.zero_points, weight.outer_scales


def _same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    for a, b in zip(_parts(one), _parts(other), strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape or a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b)):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
