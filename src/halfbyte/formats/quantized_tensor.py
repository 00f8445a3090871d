"""The one noun that travels through the house: codes with what is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.formats.spec import TensorFormat


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight of shape ``[..., out, in]``.

    format: what the numbers are; its ``scale`` dtype is settled (never ``model``).
    codes: ``[..., out, in]``. Integer elements: int8, signed, whether symmetric or not (stored files add
        ``2**(bits-1)``). ``e4m3`` / ``e5m2``: torch's float8 dtypes. ``e2m1``: uint8, sign bit 3, magnitude 0..7.
    scales: shape ``format.scale_shape(shape)``; bf16, f16, f32, ``torch.float8_e4m3fn`` (NVFP4), uint8 holding
        exponent + 127 (``e8m0``) or int8 (QoQ's integer group scales).
    zero_points: int8 codes on the same signed range as ``codes`` and shaped like ``scales``, or none.
    outer_scales: fp32, shape ``format.outer_shape(shape)``, or none. Multiplies.
    """

    format: TensorFormat
    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)
