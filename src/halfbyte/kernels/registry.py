"""Which kernel runs a layer, and why: the choice is logged, and one that cannot be met says the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.cpu_int4 import CpuInt4
from halfbyte.kernels.cpu_int8 import CpuInt8
from halfbyte.kernels.dequantize import Dequantize
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.hopper_int4 import HopperW4A8, HopperW4A8Fp32Sums, HopperW4A16
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.kernels.reference import Reference
from halfbyte.kernels.scaled_mm import ScaledMM, ScaledMMBlocks
from halfbyte.kernels.triton_linear import TritonFp8, TritonInt8, TritonW4A8, TritonW4A16

logger = logging.getLogger(__name__)

# Best first. The reference runs everything and is only ever chosen by name: the kernel before it does too.
KERNELS: tuple[Kernel, ...] = (
    CpuInt4(),
    CpuInt8(),
    HopperW4A8(),
    HopperW4A8Fp32Sums(),
    HopperW4A8Fp8Scales(),
    HopperW4A16(),
    ScaledMM(),
    ScaledMMBlocks(),
    TritonW4A8(),
    TritonW4A16(),
    TritonFp8(),
    TritonInt8(),
    Dequantize(),
    Reference(),
)

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
    """The first kernel that can run ``problem``; with ``force`` (or :func:`forced_kernel`) the one so called.

    module: the layer's name, for the log and for messages.
    Errors: a forced kernel that is unknown or cannot run it; a problem that no kernel can run.
    """
    force = force or _forced.get()
    candidates = KERNELS if force is None else (kernel_named(force),)
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


def explain(problem: LinearProblem) -> dict[str, str]:
    """By kernel name, best first: why it cannot run ``problem``, or an empty string if it can."""
    return {kernel.name: kernel.can_implement(problem)[1] for kernel in KERNELS}
