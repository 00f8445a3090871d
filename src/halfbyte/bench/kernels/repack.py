"""Bringing a quantized weight into a kernel's own form, on the GPU: from a code to a byte, or from a file's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from halfbyte.bench.kernels import ours
from halfbyte.bench.kernels.accuracy import WrongResultError
from halfbyte.bench.kernels.contender import MissingError
from halfbyte.bench.kernels.operands import Operands, Shape
from halfbyte.formats.int4_words import WORD_ORDERS
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.kernels.roofline import Work
from halfbyte.schemes import Scheme

OP = "repack"
_CODES = "codes"


@dataclass(frozen=True)
class Repacking:
    """inputs: ``codes``, or the order of the words that hold them."""

    kernel: Kernel
    scheme: Scheme
    inputs: str


def repackings(shapes: Sequence[Shape], group_size: int | None, device: torch.device) -> list[Repacking]:
    """Every GPU kernel with every scheme that it takes on at least one of the shapes, from all that holds its codes."""
    return [
        Repacking(kernel, scheme, inputs)
        for kernel, scheme in _pairs(shapes, group_size, device)
        for inputs in (_CODES, *(WORD_ORDERS if scheme.weights.element == "int4" else ()))
    ]


def _pairs(
    shapes: Sequence[Shape], group_size: int | None, device: torch.device
) -> Iterator[tuple[Kernel, Scheme]]:
    for names in ours.SCHEMES.values():
        for name in names:
            scheme = ours.scheme_of(name, group_size)
            problems = [LinearProblem(scheme, *shape, device, torch.bfloat16) for shape in shapes]
            able = {kernel.name: kernel for problem in problems for kernel in ours.gpu_kernels(problem)}
            for kernel in able.values():
                yield kernel, scheme


def measure(operands: Operands, case: Repacking, passes: int) -> tuple[Work, list[float]]:
    """Microseconds of ``kernel.prepare``, with unpacking where codes come in words, and host time; after a first call.

    Errors: MissingError, a shape that it does not take; WrongResultError, a weight that does not come back bit for bit.
    """
    kernel, scheme = case.kernel, case.scheme
    weight = operands.quantized(scheme.weights)
    problem = LinearProblem(scheme, *operands.shape, operands.device, torch.bfloat16)
    able, reason = kernel.can_implement(problem)
    if not able:
        raise MissingError(reason)
    held, unpacked = _held(case.inputs, weight)
    prepared = kernel.prepare(unpacked(), problem)
    if not _same(kernel.restore(prepared), weight):
        raise WrongResultError("restore does not give back what prepare was given")
    times = []
    for _ in range(passes):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        kernel.prepare(unpacked(), problem)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    moved = (held, *_parts(weight)[1:], *prepared.tensors.values())
    return Work(nbytes=sum(t.nbytes for t in moved if t is not None), operations=0), times


def _held(inputs: str, weight: QuantizedTensor) -> tuple[torch.Tensor, Callable[[], QuantizedTensor]]:
    """The tensor with the codes, and what makes the weight of it."""
    if inputs == _CODES:
        return weight.codes, lambda: weight
    pack, unpack = WORD_ORDERS[inputs]
    words = pack(weight.codes)
    return words, lambda: replace(weight, codes=unpack(words, weight.shape[1]))


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
