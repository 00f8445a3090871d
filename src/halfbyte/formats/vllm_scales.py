"""The numbers that vLLM's CUTLASS W4A8 kernel computes with, from the bfloat16 scales of groups of 128 it is given.

Loading turns the scale of group g and channel n into ``channel[n] * group[n, g]``: a channel's scales are quantized to
E4M3 as a token's activations are, divided by 8 (rounded to E4M3 again), and its fp32 scale is multiplied by 8. A
weight is ``e4m3(code * group) * channel``: products are rounded. (vLLM 0.26, ``convert_bf16_scales_to_fp8``, with the
floor of ``QuantFP8``, and ``csrc/.../cutlass_w4a8``.)
"""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.floats import encode_float8
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import SMALLEST_SCALE, divided
from halfbyte.formats.spec import FLOAT_MAX, TensorFormat

GROUP_SIZE = 128
VLLM_W4A8 = TensorFormat("int4", "group", GROUP_SIZE, scale="bf16")
# vLLM's smallest scale of a token, and so of a channel, before the latter is multiplied by 8.
SMALLEST_CHANNEL = 1.0 / (FLOAT_MAX["e4m3"] * 512)

_DIVISOR = 8  # what the largest group scale leaves room for: its product with -8
_LARGEST_GROUP = FLOAT_MAX["e4m3"] / _DIVISOR
# fp32 mantissa bits behind those of a significand of 4 bits.
_DROPPED_BITS = 20


def split_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 ``[..., out, groups]`` as group scales, E4M3 of that shape, and channel scales, fp32 ``[..., out]``."""
    values = scales.float()
    channels = divided(values.amax(-1, keepdim=True), FLOAT_MAX["e4m3"]).clamp(min=SMALLEST_CHANNEL)
    groups = encode_float8(values / channels, "e4m3").float()
    return encode_float8(groups / _DIVISOR, "e4m3"), channels[..., 0] * _DIVISOR


def rounded_weight(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight that is multiplied, fp32 ``[..., out, in]``, from int8 codes and bfloat16 scales of groups of 128."""
    groups, channels = split_scales(scales)
    products = codes.float() * groups.float().repeat_interleave(GROUP_SIZE, -1)[..., : codes.shape[-1]]
    return encode_float8(products, "e4m3").float() * channels.unsqueeze(-1)


def vllm_dequantize(q: QuantizedTensor) -> torch.Tensor:
    """What vLLM's kernel takes a quantized weight for, fp32 ``[..., out, in]``.

    Errors: a format other than symmetric INT4 in groups of 128 with bfloat16 scales.
    """
    if q.format != VLLM_W4A8:
        raise HalfbyteError(
            f"vLLM's W4A8 kernel cannot take {q.format}; accepted: symmetric int4 in groups of 128, bf16 scales"
        )
    return rounded_weight(q.codes, q.scales)


def settle(scales: torch.Tensor) -> torch.Tensor:
    """Scales near the given ones that vLLM's conversion keeps, bfloat16 ``[..., out, groups]`` as the input.

    scales: positive and finite. A channel's scale c becomes a number with a significand of 4 bits, its largest group
    exactly 448, the others the nearest E4M3 that an eighth is E4M3 of too. Two significands of 4 bits fit bfloat16's
    8, so ``group * c`` is stored exactly, and the conversion finds the same groups and the same c. A scale moves by at
    most 1/17 of itself, 2 % on average (more only if it is less than 1/3584 of its channel's largest); codes that are
    chosen for the settled scales make good for it. Settling twice changes nothing.

    Where a channel's largest scale is less than 1/512, the conversion takes its floor for c. Raising scales to 1/512
    would leave no codes for such small weights, so the floor is taken here too: groups are below 448 and survive, and
    only the stored product, as the floor is no short number, is rounded (by at most 2^-9 of itself;
    :func:`vllm_dequantize` tells what the kernel uses).
    A shard of a layer that is split along its inputs is converted by itself: its scales survive where its largest
    group is one that is 448.
    """
    values = scales.float()
    largest = values.amax(-1, keepdim=True)
    short = _short_significand(divided(largest, FLOAT_MAX["e4m3"]))
    floored = short < SMALLEST_CHANNEL
    channels = torch.where(floored, SMALLEST_CHANNEL, short) * _DIVISOR
    eighths = encode_float8((values / channels).clamp(SMALLEST_SCALE["e4m3"], _LARGEST_GROUP), "e4m3").float()
    eighths = torch.where((values == largest) & ~floored, _LARGEST_GROUP, eighths)
    return (eighths * channels).to(torch.bfloat16)


def _short_significand(values: torch.Tensor) -> torch.Tensor:
    """Positive normal fp32 rounded to the nearest number with a significand of 4 bits, ties up."""
    half = 1 << (_DROPPED_BITS - 1)
    return (values.view(torch.int32) + half >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)
