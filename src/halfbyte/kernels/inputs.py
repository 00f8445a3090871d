"""The inputs of a layer as its scheme wants them: plain, or quantized where they enter."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.formats.activations import dequantize_activations, quantize_activations
from halfbyte.formats.floats import FLOAT8_DTYPES
from halfbyte.formats.spec import ActivationFormat


def can_read(fmt: ActivationFormat | None) -> tuple[bool, str]:
    """Whether there is a rule for such inputs, and what is accepted if there is none."""
    known = fmt is None or (fmt.element in (*FLOAT8_DTYPES, "int8") and fmt.scale in ("f32", "e8m0"))
    return known, "" if known else "inputs must be plain, E4M3, E5M2 or INT8"


def read_inputs(
    x: torch.Tensor, fmt: ActivationFormat | None, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Inputs ``[M, in]`` as fp32 values, and the fp32 scale ``[M, 1]`` or ``[1]`` that products still need.

    Quantized inputs come as their codes, which fp32 holds exactly. Scales per group cannot wait until the
    products are summed, so they are in the values. No scale is left for these and for plain inputs.
    """
    if fmt is None:
        return x.float(), None
    codes, scales = quantize_activations(x, fmt, input_scale)
    if fmt.granularity == "group":
        return dequantize_activations(codes, scales, fmt.group_size), None
    return decode_codes(codes), scales


def decode_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes (float8 or int8) as fp32. CPU float8 goes through a table, three times faster than a cast."""
    if codes.dtype not in FLOAT8_DTYPES.values() or codes.device.type != "cpu":
        return codes.float()
    index = codes.reshape(-1).view(torch.uint8).int()
    return torch.index_select(_float8_values(codes.dtype), 0, index).view(codes.shape)


def finish(
    sums: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``sums * scales + bias`` in fp32 (sums ``[M, out]`` are overwritten), rounded once, to ``dtype``."""
    if scales is not None:
        sums.mul_(scales)
    if bias is not None:
        sums.add_(bias)
    return sums.to(dtype)


@cache
def _float8_values(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
