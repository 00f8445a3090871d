"""The grid that a weight is rounded onto: its scales and zero points, chosen from the weight's ranges."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats import qoq
from halfbyte.formats.integer import asymmetric_grid, symmetric_reach
from halfbyte.formats.ranges import absolute_maxima, as_float, signed_ranges
from halfbyte.formats.scales import LARGEST_SCALE, divided, round_scales, scale_values, shared_exponents
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling

# Times the smallest E4M3 scale (2^-9) this is the smallest normal fp32, so no divisor is ever zero or subnormal.
SMALLEST_OUTER_SCALE = 2.0**-117
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Grid:
    """Scales, zero points and outer scales as :class:`QuantizedTensor` holds them."""

    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None

    def per_tile(self, tiling: Tiling) -> TileGrid:
        """The same in fp32, to stand beside ``tiling.tiles(weight)``."""

        def spread(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            return tiling.per_tile(tensor.float().broadcast_to(self.scales.shape))

        return TileGrid(
            tiling.per_tile(scale_values(self.scales)), spread(self.zero_points), spread(self.outer_scales)
        )


@dataclass(frozen=True)
class TileGrid:
    """A grid in fp32, each part ``[down, 1, across, 1]``."""

    scales: torch.Tensor
    zero_points: torch.Tensor | None
    outer_scales: torch.Tensor | None

    def __getitem__(self, down: slice) -> TileGrid:
        zero_points, outer = self.zero_points, self.outer_scales
        return TileGrid(
            self.scales[down],
            None if zero_points is None else zero_points[down],
            None if outer is None else outer[down],
        )


@dataclass(frozen=True)
class Ranges:
    """What the tiles of a weight span, fp32, shaped like its scales: ``low <= 0 <= high``.

    Symmetric formats know the largest magnitude only: ``low`` is ``-high``.
    """

    low: torch.Tensor
    high: torch.Tensor
    elsewhere: float = 0.0

    @classmethod
    def of(cls, weight: torch.Tensor, fmt: TensorFormat, elsewhere: float = 0.0) -> Ranges:
        """Ranges of a weight ``[..., out, in]``.

        elsewhere: largest magnitude of other weights that share its outer scale per tensor.
        Errors: NaN or Inf in it, a shape that ``fmt`` cannot tile.
        """
        weight = as_float(weight)
        tiling = Tiling.of(tuple(weight.shape), fmt)
        shape = fmt.scale_shape(weight.shape)
        if fmt.symmetric:
            high = absolute_maxima(weight, tiling).reshape(shape)
            return cls(-high, high, elsewhere)
        low, high = signed_ranges(weight, tiling)
        return cls(low.reshape(shape), high.reshape(shape), elsewhere)

    @property
    def absmax(self) -> torch.Tensor:
        return torch.maximum(-self.low, self.high)

    def clipped(self, ratio: float | torch.Tensor) -> Ranges:
        """Ranges times ``ratio`` (broadcastable to their shape)."""
        return Ranges((self.low * ratio).clamp(min=-_FP32_MAX), (self.high * ratio).clamp(max=_FP32_MAX))


def choose_grid(ranges: Ranges, fmt: TensorFormat, ratio: float | torch.Tensor = 1.0) -> Grid:
    """The round-to-nearest grid over ``ranges``, each narrowed (or widened) by ``ratio``.

    Outer scales always come from the whole ranges: clipping one tile moves no other.
    Errors: a combination of element, scale and outer scale that has no rule.
    """
    clipped = ranges.clipped(ratio)
    if fmt.scale == "int8":
        qoq.check_format(fmt)
        outer = qoq.channel_scales(ranges.absmax.amax(-1, keepdim=True), fmt.outer_dtype)
        # Rounding is monotonic: the range of the rounded weights is the rounded range.
        level_one = [qoq.level_one_(bound.clone(), outer) for bound in (ranges.low, ranges.high)]
        scales, zero_points = qoq.group_grid(level_one[0] * ratio, level_one[1] * ratio)
        return Grid(scales, zero_points, outer)
    if not fmt.symmetric:
        if fmt.outer is not None or fmt.scale == "e8m0":
            raise HalfbyteError(
                "asymmetric formats with E8M0 or outer scales are not known, but for int8 scales"
            )
        return Grid(*asymmetric_grid(clipped.low, clipped.high, fmt))
    if fmt.scale == "e8m0":
        if fmt.outer is not None:
            raise HalfbyteError("E8M0 scales take no outer scale; accepted: outer none")
        return Grid(shared_exponents(clipped.high, fmt.max_value))
    reach = symmetric_reach(fmt.bits) if fmt.is_integer else fmt.max_value
    if fmt.outer is None:
        return Grid(round_scales(divided(clipped.high, reach), fmt.scale))
    outer = _outer_scales(ranges, fmt, reach)
    return Grid(round_scales(divided(clipped.high, reach) / outer, fmt.scale), None, outer)


def _outer_scales(ranges: Ranges, fmt: TensorFormat, reach: float) -> torch.Tensor:
    """fp32 scales that bring the largest inner scale to the top of its dtype (NVFP4: amax / (448 * 6))."""
    if fmt.scale != "e4m3" or (fmt.outer == "channel" and fmt.granularity != "group"):
        raise HalfbyteError(
            f"outer scale {fmt.outer!r} with {fmt.scale} scales per {fmt.granularity} is not known; "
            "accepted: e4m3 scales, per group for outer scales per channel"
        )
    axes = (-1,) if fmt.outer == "channel" else (-2, -1)
    absmax = ranges.high.amax(axes, keepdim=True).clamp(min=ranges.elsewhere)
    outer = divided(absmax, LARGEST_SCALE["e4m3"] * reach).clamp(min=SMALLEST_OUTER_SCALE)
    # Files store the reciprocal of a tensor's scale, so it is one that survives that: codes fit what readers get.
    return outer.reciprocal().reciprocal() if fmt.outer == "tensor" else outer
