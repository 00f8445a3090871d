"""Layer inputs in 8 bits, quantized while the model runs. What the kernels' own quantizers are held to.

Nothing raises and nothing waits for the device here. A NaN or Inf in one token must never change another one:
scales that a single token (or group) owns become NaN with it; a scale of the whole tensor leaves such tokens out.
"""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.floats import FLOAT8_DTYPES, decode_e8m0
from halfbyte.formats.scales import divided, round_scales, shared_exponents
from halfbyte.formats.spec import FLOAT_MAX, ActivationFormat

# INT8 leaves -128 out, so that the range is the same on both sides of zero.
_LARGEST = {**{element: FLOAT_MAX[element] for element in FLOAT8_DTYPES}, "int8": 127.0}


def quantize_activations(
    x: torch.Tensor, fmt: ActivationFormat, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[..., K]`` of any float dtype as codes ``[..., K]`` and fp32 scales.

    scale: fp32 ``[1]`` from the checkpoint (static formats), used as it is; none to take it from the values.
    Returns: codes float8 or int8 (in [-127, 127]), x / scale rounded to nearest, ties to even, saturating; scales
        ``[1]`` (tensor), ``[..., 1]`` (token) or ``[..., K / group]``: largest magnitude / largest element, in
        fp32 or as a power of two (``e8m0``), positive even for zeros.
        A token (or group) that holds NaN or Inf gets the scale NaN. In a tensor with one scale, such tokens do not
        count for it; their NaN elements become NaN codes, or 0 in INT8, and their Inf saturate.
    Errors: a format without a rule, a static format without a scale, K no multiple of the group.
    """
    if fmt.element not in _LARGEST or fmt.scale not in ("f32", "e8m0"):
        raise HalfbyteError(
            f"activations in {fmt.element} with {fmt.scale} scales are not known; accepted: {', '.join(_LARGEST)} "
            "with f32 or e8m0 scales"
        )
    values = x.float()
    if scale is None:
        if not fmt.dynamic:
            raise HalfbyteError("activations with static scales need the checkpoint's input scale")
        scale = _dynamic_scales(values, fmt)
    limit = _LARGEST[fmt.element]
    quotients = (_groups(values, fmt.group_size) / scale.float().unsqueeze(-1)).clamp_(-limit, limit)
    if fmt.element == "int8":
        codes = quotients.round_().nan_to_num_(0.0).to(torch.int8)
    else:
        codes = quotients.to(FLOAT8_DTYPES[fmt.element])
    return codes.reshape(x.shape), scale.float()


def dequantize_activations(
    codes: torch.Tensor, scales: torch.Tensor, group_size: int | None = None
) -> torch.Tensor:
    """``code * scale`` in fp32, shaped like ``codes``; scales as :func:`quantize_activations` returns them."""
    return (_groups(codes.float(), group_size) * scales.unsqueeze(-1)).reshape(codes.shape)


def _groups(values: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """``[..., K]`` as ``[..., groups, group_size]``; one group where there is no size."""
    size = group_size or values.shape[-1]
    if values.shape[-1] % size:
        raise HalfbyteError(f"activation group size {size} does not divide in_features {values.shape[-1]}")
    return values.unflatten(-1, (values.shape[-1] // size, size))


def _dynamic_scales(values: torch.Tensor, fmt: ActivationFormat) -> torch.Tensor:
    absmax = _groups(values, fmt.group_size).abs().amax(-1)
    if fmt.granularity == "tensor":
        finite = torch.where(absmax.isfinite(), absmax, 0.0).reshape(-1)
        absmax = torch.cat([finite, finite.new_zeros(1)]).amax(0, keepdim=True)
    if fmt.scale == "e8m0":
        scales = decode_e8m0(shared_exponents(absmax, _LARGEST[fmt.element]))
    else:
        scales = round_scales(divided(absmax, _LARGEST[fmt.element]), "f32")
    return torch.where(absmax.isfinite(), scales, torch.nan)
