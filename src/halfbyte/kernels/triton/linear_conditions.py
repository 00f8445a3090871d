"""What the portable GPU kernels take: predicates on number formats, and what a GPU must be. No Triton here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import torch

from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.problem import LinearProblem

# 128 * 127 * this many products is the most that an int32 sum is sure to hold.
LARGEST_INT8_K = (2**31 - 1) // (128 * 127)

HALVES = (torch.bfloat16, torch.float16)
_FLOAT_SCALES = ("bf16", "f16", "f32")


def gpu_conditions(problem: LinearProblem, lowest: tuple[int, int]) -> Iterator[tuple[bool, str]]:
    """That Triton runs on the problem's device, and that this has tensor cores of ``lowest`` or later."""
    device = problem.device
    yield device.type == "cuda" and not torch.version.hip, f"runs on NVIDIA GPUs, not on {device.type}"
    yield find_spec("triton") is not None, "Triton is not installed"
    capability = _capability(device)
    yield capability is not None, "no CUDA GPU is there"
    assert capability is not None
    major, minor = capability
    yield (
        capability >= lowest,
        f"needs compute capability {lowest[0]}.{lowest[1]} or higher, not {major}.{minor}",
    )


def is_hopper(problem: LinearProblem) -> bool:
    """Whether the problem lies on a GPU of compute capability 9.0."""
    return _capability(problem.device) == (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def is_int4(weights: TensorFormat) -> bool:
    """INT4 with one level of floating-point scales."""
    return weights.element == "int4" and weights.outer is None and weights.scale in _FLOAT_SCALES


def is_two_level(weights: TensorFormat) -> bool:
    """INT4 with an integer scale per group and an fp32 scale per channel (QoQ)."""
    return (weights.element, weights.scale, weights.outer) == ("int4", "int8", "channel")


def has_known_groups(weights: TensorFormat) -> bool:
    """Groups that the INT4 kernels know: 32, 64, multiples of 128, or whole channels."""
    if weights.granularity == "channel":
        return True
    size = weights.group_size
    return size is not None and (size in (32, 64) or size % 128 == 0)


def is_coarse(weights: TensorFormat) -> bool:
    """One floating-point scale per channel or tensor."""
    return (
        weights.granularity in ("channel", "tensor")
        and weights.outer is None
        and weights.scale in _FLOAT_SCALES
    )


def is_blocks(weights: TensorFormat) -> bool:
    """One floating-point scale per 128 x 128 weights."""
    return weights.block_shape == (128, 128) and weights.outer is None and weights.scale in _FLOAT_SCALES


def is_simple(activations: ActivationFormat | None, element: str) -> bool:
    """One fp32 scale per token or tensor."""
    return (
        activations is not None
        and activations.element == element
        and activations.granularity in ("token", "tensor")
        and activations.scale == "f32"
    )


def name_of(dtype: torch.dtype) -> str:
    """The dtype as messages say it."""
    return str(dtype).removeprefix("torch.")
