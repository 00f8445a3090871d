"""Scales fitted once more after all codes have been chosen."""

from __future__ import annotations

from dataclasses import replace

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import FLOAT_SCALE_DTYPES, round_scales


def refit_scales(
    q: QuantizedTensor, weight: torch.Tensor, moment: torch.Tensor, *, sweeps: int = 2
) -> QuantizedTensor:
    """The same codes with scales that make the output's error smaller, and never larger.

    One group after the other gets the scale with the least tr(E M E^T), E = weight - decoded, given the other scales
    (coordinate descent on a least-squares problem per row), rounded to the dtype of scales, where that is a gain.
    Codes, zero points and outer scales stay.
    weight: what ``q`` was made of, ``[..., out, in]``. moment: mean (or any multiple) of x x^T, fp32 ``[..., in, in]``,
    or ``[in, in]`` for all members of a stack; one that is not finite changes nothing. sweeps: times that all groups
    are gone through.
    Errors: scales that rows share, or that are no floating-point numbers.
    """
    fmt = q.format
    if fmt.granularity not in ("channel", "group") or fmt.scale not in FLOAT_SCALE_DTYPES:
        raise HalfbyteError(
            f"{fmt.scale} scales per {fmt.granularity} cannot be refitted; "
            f"accepted: per channel or group, {', '.join(FLOAT_SCALE_DTYPES)}"
        )
    units = dequantize(replace(q, scales=torch.ones_like(q.scales, dtype=torch.float32).to(q.scales.dtype)))
    errors = weight.double() - dequantize(q)
    scales = q.scales.double()
    groups = scales.shape[-1]
    size = weight.shape[-1] // groups
    for group in [*range(groups)] * sweeps:
        inputs = slice(group * size, (group + 1) * size)
        unit, columns = units[..., inputs].double(), moment[..., inputs].double()
        gain = ((errors @ columns) * unit).sum(-1)
        cost = ((unit @ columns[..., inputs, :]) * unit).sum(-1)
        before = scales[..., group]
        nearest = round_scales((before + gain / cost).float(), fmt.scale).double()
        moved = nearest - before
        # False where the group has no cost, or nothing is known of it: its quotient is NaN.
        better = moved * (moved * cost - 2 * gain) < 0
        errors[..., inputs] -= torch.where(better, moved, 0.0).unsqueeze(-1) * unit
        scales[..., group] = torch.where(better, nearest, before)
    return replace(q, scales=scales.float().to(q.scales.dtype))
