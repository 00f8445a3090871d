"""Which kernel runs a layer, and why: the choice is logged, and one that cannot be met says the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.cpu_int4 import CpuInt4
from halfbyte.kernels.cpu_int8 import CpuInt8
from halfbyte.kernels.dequantize import Dequantize
from halfbyte.kernels.dequantize_fp8_scales import DequantizeFp8Scales
from halfbyte.kernels.hopper_fp8 import HopperFp8
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.hopper_int4 import HopperW4A8, HopperW4A8Fp32Sums, HopperW4A16
from halfbyte.kernels.hopper_int8 import HopperW4A8Int8
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.kernels.reference import Reference
from halfbyte.kernels.scaled_mm import ScaledMM, ScaledMMBlocks
from halfbyte.kernels.triton_linear import TritonFp8, TritonInt8, TritonW4A8, TritonW4A16

logger = logging.getLogger(__name__)

# Best first. The reference runs everything and is only ever chosen by name: Dequantize does too.
KERNELS: tuple[Kernel, ...] = (
    CpuInt4(),
    CpuInt8(),
    HopperW4A8(),
    HopperW4A8Fp32Sums(),
    HopperW4A8Fp8Scales(),
    HopperW4A16(),
    HopperW4A8Int8(),
    ScaledMM(),
    ScaledMMBlocks(),
    TritonW4A8(),
    TritonW4A16(),
    TritonFp8(),
    HopperFp8(),
    TritonInt8(),
    Dequantize(),
    DequantizeFp8Scales(),
    Reference(),
)
_IN_NUMBERS_OF = {"vllm": (HopperW4A8Fp8Scales.name, DequantizeFp8Scales.name)}

_forced: ContextVar[str | None] = ContextVar("forced kernel", default=None)


@contextmanager
def forced_kernel(name: str | None) -> Iterator[None]:
    """Within this context :func:`select` takes the kernel called ``name`` or fails; none changes nothing.

    Errors: a name that no kernel has.
    """
    if name is not None:
        kernel_named(name)
    token = _forced.set(name or _forced.get())
    try:
        yield
    finally:
        _forced.reset(token)


def kernel_named(name: str) -> Kernel:
    """The kernel called ``name``. Errors: an unknown name; the message lists those known."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise HalfbyteError(f"kernel {name!r} is not known; known kernels: {', '.join(k.name for k in KERNELS)}")


def select(problem: LinearProblem, force: str | None = None, module: str = "a linear layer") -> Kernel:
    """The best kernel that can run ``problem``; with ``force`` (or :func:`forced_kernel`) the one so called.

    Kernels that compute in the numbers of the scheme's target come before all others.
    module: the layer's name, for the log and for messages.
    Errors: a forced kernel that is unknown or cannot run it; a problem that no kernel can run.
    """
    force = force or _forced.get()
    candidates = _best_first(problem) if force is None else (kernel_named(force),)
    reasons: list[str] = []
    for kernel in candidates:
        able, reason = kernel.can_implement(problem)
        if able:
            logger.info(
                "Selected %s for %s%s", kernel.name, module, f" ({'; '.join(reasons)})" if reasons else ""
            )
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise HalfbyteError(f"{module}: no kernel can run it; {'; '.join(reasons)}")


def _best_first(problem: LinearProblem) -> Sequence[Kernel]:
    meant = _IN_NUMBERS_OF.get(problem.scheme.target, ())
    return sorted(KERNELS, key=lambda kernel: kernel.name not in meant)


def explain(problem: LinearProblem) -> dict[str, str]:
    """By kernel name, best first: why it cannot run ``problem``, or an empty string if it can."""
    return {kernel.name: kernel.can_implement(problem)[1] for kernel in _best_first(problem)}
