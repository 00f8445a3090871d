"""halfbyte's own GPU kernels, as the registry has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from halfbyte.bench.kernels.contender import Contender, MissingError, Task, linear
from halfbyte.bench.kernels.operands import Operands, Shape
from halfbyte.bench.kernels.timing import rotation
from halfbyte.formats.spec import TensorFormat
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.kernels.quantized_inputs import SharedInputsKernel, can_share_inputs
from halfbyte.kernels.registry import KERNELS, explain
from halfbyte.schemes import PRESETS, Scheme

PER_CHANNEL = "w4a8-int8 per channel"
"""``w4a8-int8`` with one scale and zero point per channel, whatever the size of groups."""

SCHEMES = {
    "w4a8_linear": ("w4a8", "w4a8-int8", PER_CHANNEL),
    "w4a16_linear": ("w4a16", "w4a16-asym"),
    "fp8_linear": ("fp8", "fp8_per_tensor", "fp8_per_block"),
    "int8_linear": ("w8a8-int8",),
}
"""Presets by op. Those with INT4 weights come in groups of the size asked for."""


def scheme_of(name: str, group_size: int | None) -> Scheme:
    """The preset with its scale dtype settled, and INT4 weights in groups of ``group_size`` (none: per channel)."""
    if name == PER_CHANNEL:
        name, group_size = "w4a8-int8", None
    scheme = PRESETS[name]
    weights = scheme.weights.with_scale("bf16")
    if weights.element == "int4" and group_size:
        weights = weights.with_group_size(group_size)
    elif weights.element == "int4":
        weights = TensorFormat("int4", "channel", symmetric=weights.symmetric, scale="bf16")
    return replace(scheme, weights=weights)


def gpu_kernels(problem: LinearProblem) -> list[Kernel]:
    """Kernels that run ``problem``, which lies on a GPU, and would not run it on a CPU: the portable ones would."""
    on_cpu = replace(problem, device=torch.device("cpu"))
    return [k for k in KERNELS if k.can_implement(problem)[0] and not k.can_implement(on_cpu)[0]]


def contenders(
    op: str, shapes: Sequence[Shape], group_size: int | None, device: torch.device, from_bf16: bool
) -> tuple[list[Contender], dict[str, str]]:
    """Every GPU kernel that takes at least one of ``shapes``, and why there is none, by scheme, if there is none.

    from_bf16: also those that take quantized inputs once more from BF16 ones, with quantization in the time.
    """
    found: list[Contender] = []
    without: dict[str, str] = {}
    for name in SCHEMES[op]:
        scheme = scheme_of(name, group_size)
        problems = [LinearProblem(scheme, *shape, device, torch.bfloat16) for shape in shapes]
        able = {kernel.name: kernel for problem in problems for kernel in gpu_kernels(problem)}
        for kernel in able.values():
            found += _of_kernel(kernel, op, scheme, name == PER_CHANNEL, from_bf16)
        if not able:
            reasons = [f"{kernel}: {reason}" for kernel, reason in explain(problems[0]).items() if reason]
            without[name] = f"no GPU kernel; {'; '.join(reasons)}"
    return found, without


def _of_kernel(
    kernel: Kernel, op: str, scheme: Scheme, per_channel: bool, from_bf16: bool
) -> list[Contender]:
    label = f"{kernel.name}-channel" if per_channel else kernel.name

    def contender(inputs: Literal["bf16", "quantized"]) -> Contender:
        def load(operands: Operands) -> Callable[[int], Task]:
            return _load(operands, kernel, scheme, quantized=inputs == "quantized")

        return Contender(label, op, scheme.name, scheme.weights.group_size, inputs, load)

    if not can_share_inputs(kernel, scheme):
        return [contender("bf16")]
    return [contender("quantized"), *([contender("bf16")] if from_bf16 else [])]


def _load(operands: Operands, kernel: Kernel, scheme: Scheme, quantized: bool) -> Callable[[int], Task]:
    weight = operands.quantized(scheme.weights)
    problem = LinearProblem(scheme, *operands.shape, operands.device, torch.bfloat16)
    able, reason = kernel.can_implement(problem)
    if not able:
        raise MissingError(reason)
    first = kernel.prepare(weight, problem)
    nbytes = sum(tensor.nbytes for tensor in first.tensors.values())
    # Prepared anew, not cloned: what a kernel keeps beside its tensors may point to them.
    more = [kernel.prepare(weight, problem) for _ in range(rotation(nbytes, operands.cache) - 1)]

    tasks = partial(linear, operands, weight=weight, activations=scheme.activations, copies=[first, *more])
    if quantized:
        assert isinstance(kernel, SharedInputsKernel)
        return tasks(
            feed=lambda x: kernel.quantize(x, first),
            call=lambda prepared, inputs, _: kernel.run_quantized(inputs, prepared),
            quantized=True,
        )
    return tasks(feed=lambda x: x, call=lambda prepared, x, _: kernel.run(x, prepared), quantized=False)
